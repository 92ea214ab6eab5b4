"""Epochs: numbered from 1 without a gap, by role."""

from millrace.runlog.audit.findings import Audit


def check_epochs(audit: Audit) -> dict[str, int]:
    """Check every role's epochs; returns the newest epoch by role."""
    newest: dict[str, int] = {}
    root = f"{audit.names.root}epochs/"
    for prefix in audit.store.list_prefixes(root):
        role = prefix.removeprefix(root).rstrip("/")
        numbers: list[int] = []
        for info in audit.store.list(prefix):
            name = info.key.removeprefix(prefix)
            if name.isdigit():
                numbers.append(int(name))
            else:
                audit.findings.violation("EPOCH_CORRUPT", f"{audit.uri(info.key)} is no epoch")
        newest[role] = max(numbers, default=0)
        missing = sorted(set(range(1, newest[role] + 1)) - set(numbers))
        if missing:
            audit.findings.violation(
                "EPOCH_MISSING", f"epochs {missing[:8]} of {role} do not exist, but {newest[role]} does"
            )
    for role, number in newest.items():
        audit.report.epochs[role] = number
    return newest


def newest_generation(audit: Audit) -> int:
    """The newest generation of the Redis copy that was installed: 1 at creation, then one per rebuild."""
    prefix = audit.names.generations
    numbers = [name for info in audit.store.list(prefix) if (name := info.key.removeprefix(prefix)).isdigit()]
    installed = {1, *map(int, numbers)}
    audit.report.num_generations = len(installed)
    return max(installed)
