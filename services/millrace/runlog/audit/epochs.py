"""Epochs, intents and generations: numbered from 1 without a gap, and readable."""

from itertools import pairwise

from millrace.decoding import decode_object
from millrace.errors import CorruptObjectError
from millrace.runlog.audit.findings import Audit, as_utf8, between
from millrace.runlog.records.epochs import GENERATION_ROLE


def check_epochs(audit: Audit) -> dict[str, int]:
    """Check every role's epochs; returns the newest epoch by role."""
    newest: dict[str, int] = {}
    for prefix in audit.store.list_prefixes(audit.names.all_epochs):
        role = prefix.removeprefix(audit.names.all_epochs).rstrip("/")
        numbers = _numbers(audit, prefix, "EPOCH", suffix="", fields=("owner", "nonce"))
        newest[role] = max(numbers, default=0)
        _require_all(audit, numbers, "EPOCH_MISSING", f"epochs of {role}")
    for role, number in newest.items():
        audit.report.epochs[as_utf8(role)] = min(number, (1 << 63) - 1)
    if GENERATION_ROLE not in newest:
        audit.findings.violation("EPOCH_MISSING", f"no epoch of {GENERATION_ROLE} exists: the run was never created")
    return newest


def check_intents(audit: Audit) -> None:
    """Intents are numbered without a gap."""
    numbers = _numbers(audit, audit.names.intents, "INTENT", suffix=".json", fields=("kind", "payload", "time"))
    _require_all(audit, numbers, "INTENT_MISSING", "intents")


def check_generations(audit: Audit, seen_in_events: int) -> int:
    """Marks of generations of the Redis copy; returns the newest installed: 1 at creation, then one per rebuild.

    `seen_in_events` is the newest generation that archived events have: it was installed, so it has a mark.
    """
    prefix = audit.names.generations
    installed = {1}
    for info in audit.store.list(prefix):
        name = info.key.removeprefix(prefix)
        if not name.isdecimal() or audit.names.generation(int(name)) != info.key or info.size_bytes:
            audit.findings.violation("GENERATION_CORRUPT", f"{audit.uri(info.key)} is no mark of a generation")
        else:
            installed.add(int(name))
    if seen_in_events > max(installed):
        audit.findings.violation(
            "GENERATION_MISSING",
            f"archived events are of generation {seen_in_events}, and "
            f"{audit.uri(audit.names.generation(seen_in_events))} does not exist",
        )
    for number in sorted(installed - {1}):
        if audit.store.head(audit.names.epoch(GENERATION_ROLE, number)) is None:
            audit.findings.violation(
                "GENERATION_CORRUPT",
                f"{audit.uri(audit.names.generation(number))} marks a generation whose epoch of {GENERATION_ROLE} "
                "nobody took",
            )
    audit.report.num_generations = len(installed)
    return max(installed)


def _numbers(audit: Audit, prefix: str, kind: str, *, suffix: str, fields: tuple[str, ...]) -> list[int]:
    """The numbers of JSON objects under a prefix, each of which has these fields."""
    numbers: list[int] = []
    for info in audit.store.list(prefix):
        name, what = info.key.removeprefix(prefix).removesuffix(suffix), f"{kind.lower()} {audit.uri(info.key)}"
        if not name.isdecimal() or len(name) < 8 or info.key != f"{prefix}{int(name):08d}{suffix}":
            audit.findings.violation(f"{kind}_CORRUPT", f"{audit.uri(info.key)} is no {kind.lower()}")
            continue
        numbers.append(int(name))
        data = audit.get(info.key, what=what)
        if data is None:
            continue
        with audit.reading(f"{kind}_CORRUPT", what):
            document = decode_object(data, what=what, reason=f"{kind}_CORRUPT")
            if missing := [field for field in fields if field not in document]:
                raise CorruptObjectError(f"it lacks {missing}", reason=f"{kind}_CORRUPT")
    return numbers


def _require_all(audit: Audit, numbers: list[int], check: str, what: str) -> None:
    for before, after in pairwise([0, *sorted(numbers)]):
        if after != before + 1:
            audit.findings.violation(check, f"{what}: {between(before, after)} does not exist, but {after} does")
