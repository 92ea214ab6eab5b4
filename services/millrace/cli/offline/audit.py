"""Audit a run in this process, from the object store. How deep depends on the request and on the installed packages."""

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millrace.errors import InvalidStateError, MillraceError
from millrace.v1 import audit_pb2

if TYPE_CHECKING:
    from millrace.readers.audit import Depth
    from millrace.runlog.names import Names
    from millrace.storage import ObjectStore

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRequest:
    """The options of `millrace run audit`."""

    name: str
    store: str | None
    redis: str | None
    prefix: str | None
    is_deep: bool
    num_replays: int | None
    attestations: tuple[Path, ...]
    key: Path | None

    @property
    def is_here(self) -> bool:
        """Return whether this process does the audit; otherwise the run's server does."""
        return self.store is not None or self.is_deep or bool(self.attestations)


def audit_here(request: AuditRequest, say: Say) -> "audit_pb2.AuditReport":
    """Audit the log and return the report; with `is_deep` and `num_replays`, also recompute some steps.

    `say` is called with the progress.
    """
    from millrace.cli import interrupts
    from millrace.cli.offline.run_store import naming, open_run, redis_url
    from millrace.readers.audit import audit_run
    from millrace.runlog import open_redis
    from millrace.runlog.names import Names

    objects, deployment, uid = open_run(request.name, request.store, request.prefix)
    depth = _depth(request)

    async def work(_: interrupts.Interrupts) -> "audit_pb2.AuditReport":
        with naming("--redis"):
            client = open_redis(redis_url(request.redis)) if request.redis is not None else None
        try:
            return await audit_run(client, objects, prefix=deployment, uid=uid, depth=depth, on_progress=say)
        finally:
            if client is not None:
                await client.aclose()

    report = interrupts.run(work)
    if request.is_deep:
        _replay(report, objects, Names(deployment, uid), count=request.num_replays or 0, say=say)
    return report


def _depth(request: AuditRequest) -> "Depth":
    from millrace.readers.audit import Depth
    from millrace.runlog.attest import Attestation, load_key

    prove = compare = None
    if request.is_deep:
        from millrace.policies.fetch import prove_policies
        from millrace.trainer.checkpoint.index import differences

        prove, compare = prove_policies, differences
    kept = tuple(Attestation.decode(path.read_bytes(), where=str(path)) for path in request.attestations)
    key = load_key(request.key) if request.key is not None else None
    return Depth(is_deep=request.is_deep, prove=prove, compare=compare, key=key, attestations=kept)


def _replay(report: "audit_pb2.AuditReport", store: "ObjectStore", names: "Names", *, count: int, say: Say) -> None:
    """Recompute `count` steps, spread over the run, and compare them with the published weights.

    The outcome is added to `report`.
    """
    if not count:
        report.not_seen.add(check="NOT_REPLAYED", message="no step was computed again (--replay N)")
        return
    try:
        replay: Any = importlib.import_module("millrace.readers.replay.steps").replay
    except ModuleNotFoundError as error:
        message = f"no step was computed again: {error.name} is not installed here (pip install 'millrace[trainer]')"
        report.not_seen.add(check="NOT_REPLAYED", message=message)
        return
    for step in sampled(int(report.first_step), int(report.num_steps), count):
        say(f"computing step {step} again")
        try:
            result = replay(store, names, step=step)
        except InvalidStateError as error:  # not kept any more, or not published
            report.not_seen.add(check="NOT_REPLAYED", message=f"step {step}: {error.message}")
            continue
        except MillraceError as error:
            report.violations.add(check="REPLAY_FAILED", message=f"step {step}: {error.message}")
            continue
        if result.computed_digest == result.published_digest:
            report.replayed_steps.append(step)
        elif result.notes:
            message = f"step {step} gives other weights than were published; {'; '.join(result.notes)}"
            report.not_seen.add(check="REPLAY_NOT_COMPARABLE", message=message)
        else:
            message = (
                f"step {step} gives digest {result.computed_digest[:16]}…, published is {result.published_digest[:16]}…"
            )
            report.violations.add(check="REPLAY_DIFFERS", message=message)


def sampled(first: int, total: int, count: int) -> list[int]:
    """Return at most `count` steps, evenly spread over the `total` steps from `first` on.

    The last step is always among them.
    """
    if total < 1:
        return []
    count = min(count, total)
    return sorted({first + total - 1 - place * total // count for place in range(count)})


# An audit as text: what the log holds, what recovered, and what breaks a promise.

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
    """Return the report as text. The last line is `audit clean`, or the number of violations."""
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
