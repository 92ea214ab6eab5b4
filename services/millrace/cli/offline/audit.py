"""Audit a run in this process, from the object store. How deep depends on the request and on the installed packages."""

import importlib
import os
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
    jobs: int | None
    """Processes that read the contents of steps; None for as many as this machine has processors."""
    resume: Path | None
    """File from which a killed audit goes on."""

    @property
    def is_here(self) -> bool:
        """Return whether this process does the audit; otherwise the run's server does."""
        asked = (self.store, self.jobs, self.resume)
        return any(each is not None for each in asked) or self.is_deep or bool(self.attestations)


def audit_here(request: AuditRequest, say: Say) -> "audit_pb2.AuditReport":
    """Audit the log and return the report; with `is_deep` and `num_replays`, also recompute some steps.

    `say` is called with the progress.
    """
    from millrace.cli import interrupts
    from millrace.cli.offline.run_store import naming, open_run, redis_url, store_url_of
    from millrace.readers.audit import AuditRanges, audit_run
    from millrace.runlog import open_redis
    from millrace.runlog.names import Names

    objects, deployment, uid = open_run(request.name, request.store, request.prefix)
    depth = _depth(request)
    ranges = AuditRanges(
        store_url=store_url_of(request.name, request.store)[0],
        jobs=request.jobs or os.cpu_count() or 1,
        resume=request.resume,
    )

    async def work(_: interrupts.Interrupts) -> "audit_pb2.AuditReport":
        """Audit the run, with Redis if it is named."""
        with naming("--redis"):
            client = open_redis(redis_url(request.redis)) if request.redis is not None else None
        try:
            return await audit_run(
                client, objects, prefix=deployment, uid=uid, depth=depth, on_progress=say, ranges=ranges
            )
        finally:
            if client is not None:
                await client.aclose()

    report = interrupts.run(work)
    if request.is_deep:
        _replay(report, objects, Names(deployment, uid), count=request.num_replays or 0, say=say)
    return report


def _depth(request: AuditRequest) -> "Depth":
    """Return how deep the audit reads: whether weights are read and recomputed, and which attestations and key it
    checks.
    """
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

    The outcome is added to `report`. `say` is called with the progress.
    """
    if not count:
        report.not_seen.add(check="NOT_REPLAYED", message="no step was computed again (--replay N)")
        return
    try:
        replay: Any = importlib.import_module("millrace.readers.replay").replay
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
        ("tasks", _tasks(report)),
        ("rollouts", f"{report.num_rollouts} kept, {_count(report.num_duplicates, 'late duplicate')} discarded"),
        ("policies", f"{_count(report.num_policies, 'version')} in {_count(report.num_lineages, 'lineage')}"),
        ("events", f"{report.num_events} of {_count(report.num_writers, 'writer')}"),
        ("recovery", _recovery(report)),
        ("lost", str(_matching(report, _GAPS, "_MISSING", "_NOT_REPORTED"))),
        ("counted twice", str(_matching(report, _TWICE))),
        ("changed", f"{_matching(report, _HASHES, '_CORRUPT', '_CHANGED', '_MISMATCH')}; {_hashes(report)}"),
    ]
    lines = [f"{report.run} ({report.run_uid})", *(_labelled(*row) for row in rows)]
    lines += [_labelled("note", f"{note.message} [{note.check}]") for note in report.notes]
    lines += [_labelled("not checked", f"{each.message} [{each.check}]") for each in report.not_seen]
    lines += [f"VIOLATION {found.check}: {found.message}" for found in report.violations]
    lines.append(f"audit found {_count(len(report.violations), 'violation')}" if report.violations else "audit clean")
    return lines


def _labelled(label: str, text: str) -> str:
    return f"  {label:<13} {text}"


def _log(report: audit_pb2.AuditReport) -> str:
    """Return the number of steps, and whether the log is closed, as text."""
    begins = f" from step {report.first_step} on" if report.first_step else ""
    return f"{_count(report.num_steps, 'step')}{begins}, {'closed' if report.is_closed else 'still open'}"


def _tasks(report: audit_pb2.AuditReport) -> str:
    """Return how many tasks were trained on, dropped by reason, and are open, as text."""
    dropped = sum(report.dropped.values())
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(report.dropped.items()))
    why = f" ({reasons})" if reasons else ""
    return f"{report.num_trained} trained on, {dropped} dropped{why}, {report.num_open} open"


def _recovery(report: audit_pb2.AuditReport) -> str:
    """Return how often services took over from others and Redis was rebuilt, as text."""
    takeovers = [
        f"{_count(newest - 1, 'takeover')} of the {role}"
        for role, newest in sorted(report.epochs.items())
        if role != "log" and newest > 1
    ]
    rebuilds = max(report.num_generations, 1) - 1
    parts = [*takeovers, *([f"{_count(rebuilds, 'rebuild')} of Redis"] if rebuilds else [])]
    return ", ".join(parts) or "none was needed"


def _hashes(report: audit_pb2.AuditReport) -> str:
    """Return the chain hash, and what was read, recomputed and checked, as text."""
    parts = [f"chain hash {report.chain_hash[:16]}…"]
    if report.is_deep:
        parts.append(f"{report.num_bytes_verified / 1e6:.1f} MB of weights and checkpoints read")
    if report.replayed_steps:
        parts.append(f"steps {', '.join(map(str, report.replayed_steps))} computed again")
    if report.num_attestations:
        parts.append(f"{_count(report.num_attestations, 'attestation')} checked")
    return "; ".join(parts)


def _matching(report: audit_pb2.AuditReport, checks: Iterable[str], *endings: str) -> int:
    """Return the number of violations whose check is one of `checks` or has one of the endings."""
    return sum(found.check in checks or found.check.endswith(endings) for found in report.violations)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
