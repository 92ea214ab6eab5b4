"""An audit as text: what the log holds, what recovered, and what breaks a promise."""

from collections.abc import Iterable

from millrace.v1 import audit_pb2

_GAPS = frozenset({"ORDINAL_LOST", "OPEN_AFTER_CLOSE", "GROUP_NOT_WHOLE", "EVENT_GAP"})
_HASHES = frozenset({"CHAIN_BROKEN", "OBJECT_CORRUPT", "EVENT_DIFFERS", "MIRROR_DIFFERS", "EVENT_NUMBER_REUSED"})
_TWICE = frozenset(
    {
        "ORDINAL_RESOLVED_TWICE",
        "MEMBER_TRAINED_TWICE",
        "SAMPLE_TRAINED_TWICE",
        "ROLLOUT_REGENERATED",
        "COMMITTED_TWICE",
        "PROGRESS_BACK",
    }
)


def report_lines(report: audit_pb2.AuditReport) -> list[str]:
    """The report for people; the last line is `audit clean`, or how many violations there are."""
    rows = [
        ("log", _log(report)),
        ("ordinals", _ordinals(report)),
        ("rollouts", f"{report.num_rollouts} archived, {_count(report.num_duplicates, 'late duplicate')} discarded"),
        ("policies", f"{_count(report.num_policies, 'version')} in {_count(report.num_lineages, 'lineage')}"),
        ("events", f"{report.num_events} of {_count(report.num_writers, 'writer')}"),
        ("recovery", _recovery(report)),
        ("gaps", str(_matching(report, _GAPS, "_MISSING", "_NOT_REPORTED"))),
        ("twice", str(_matching(report, _TWICE))),
        ("hashes", f"{_matching(report, _HASHES, '_CORRUPT', '_CHANGED', '_MISMATCH')} differ; {_hashes(report)}"),
    ]
    lines = [f"{report.run} ({report.run_uid})", *(f"  {label:<10} {text}" for label, text in rows)]
    lines += [f"  note       {note.message} [{note.check}]" for note in report.notes]
    lines += [f"  not seen   {each.message} [{each.check}]" for each in report.not_seen]
    lines += [f"VIOLATION {found.check}: {found.message}" for found in report.violations]
    lines.append(f"audit found {_count(len(report.violations), 'violation')}" if report.violations else "audit clean")
    return lines


def _log(report: audit_pb2.AuditReport) -> str:
    begins = f" from step {report.first_step} on" if report.first_step else ""
    return f"{_count(report.num_steps, 'step')}{begins}, {'closed' if report.is_closed else 'still open'}"


def _ordinals(report: audit_pb2.AuditReport) -> str:
    dropped = sum(report.dropped.values())
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(report.dropped.items()))
    return (
        f"{report.num_trained} trained, {dropped} dropped{f' ({reasons})' if reasons else ''}, {report.num_open} open"
    )


def _recovery(report: audit_pb2.AuditReport) -> str:
    takeovers = [
        f"{_count(newest - 1, 'takeover')} of the {role}"
        for role, newest in sorted(report.epochs.items())
        if role != "log" and newest > 1
    ]
    rebuilds = max(report.num_generations, 1) - 1
    parts = [*takeovers, *([f"{_count(rebuilds, 'rebuild')} of Redis"] if rebuilds else [])]
    return ", ".join(parts) or "none was needed"


def _hashes(report: audit_pb2.AuditReport) -> str:
    parts = [f"chain {report.chain_hash[:16]}…"]
    if report.is_deep:
        parts.append(f"{report.num_bytes_verified / 1e6:.1f} MB of weights and checkpoints read")
    if report.replayed_steps:
        parts.append(f"steps {', '.join(map(str, report.replayed_steps))} computed again")
    if report.num_attestations:
        parts.append(f"{_count(report.num_attestations, 'attestation')} checked")
    return "; ".join(parts)


def _matching(report: audit_pb2.AuditReport, checks: Iterable[str], *endings: str) -> int:
    return sum(found.check in checks or found.check.endswith(endings) for found in report.violations)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
