"""The rollouts of a run for display, read from the archives in the object store without a server."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from millrace.readers.exports.conversation import content_of, given_of, messages_of

if TYPE_CHECKING:
    from millrace.rollouts.types import Rollout
    from millrace.storage import ObjectStore

SORTS: dict[str, Callable[["SampleRecord"], Any]] = {
    "step": lambda found: (found.step, found.rollout.ordinal, found.rollout.member),
    "reward": lambda found: found.rollout.reward,
    "tokens": lambda found: found.rollout.num_tokens,
    "turns": lambda found: found.rollout.num_turns,
    "seconds": lambda found: found.rollout.seconds,
}
"""Sort keys of samples, by name."""


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """A rollout, and the step whose batch it was committed with."""

    step: int
    rollout: "Rollout"
    id: str = ""
    """The sample's id in `run lineage`, the API and the dashboard."""

    def to_json(self) -> dict[str, Any]:
        """Return the sample as plain data."""
        rollout = self.rollout
        error = rollout.error
        return {
            "id": self.id,
            "step": self.step,
            "env": rollout.env,
            "purpose": rollout.purpose.name.lower(),
            "eval_id": rollout.eval_id,
            "task": rollout.ordinal,
            "task_id": rollout.task_id,
            "member": rollout.member,
            "attempt": rollout.attempt,
            "status": str(rollout.status),
            "error": None if error is None else {"type": error.type, "message": error.message, "frames": error.frames},
            "reward": rollout.reward,
            "metrics": dict(rollout.metrics),
            "stop": rollout.stop_condition,
            "truncated": rollout.is_truncated,
            "turns": rollout.num_turns,
            "tokens": rollout.num_tokens,
            "sampled_tokens": rollout.num_loss_tokens,
            "versions": [rollout.min_version, rollout.max_version],
            "seconds": rollout.seconds,
            "given": given_of(rollout),
            "messages": messages_of(rollout),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFilter:
    """Conditions on samples; a field that is None or empty is no condition."""

    env: str = ""
    step: int | None = None
    task: int | None = None
    status: str = ""
    purpose: str | None = None
    """`train` or `eval`."""
    min_reward: float | None = None
    max_reward: float | None = None
    text: str = ""
    """Text that one of the messages must contain; case is ignored."""

    def passes(self, rollout: "Rollout") -> bool:
        """Return whether the rollout meets all conditions except `step`, which `read_samples` checks."""
        return (
            (not self.env or rollout.env == self.env)
            and (self.task is None or rollout.ordinal == self.task)
            and (self.purpose is None or rollout.purpose.value == self.purpose)
            and (not self.status or str(rollout.status).lower() == self.status.lower())
            and (self.min_reward is None or rollout.reward >= self.min_reward)
            and (self.max_reward is None or rollout.reward <= self.max_reward)
            and (not self.text or self.text.lower() in _text_of(rollout).lower())
        )


def read_samples(store: "ObjectStore", prefix: str, uid: str, conditions: SampleFilter) -> Iterator[SampleRecord]:
    """Yield the samples that pass the filter, from all committed batches in order of steps.

    Duplicates and retired steps are skipped; NotFoundError says which record has retired the one that is asked for.
    One archive is in memory at a time. Raises CorruptObjectError for a damaged archive.
    """
    from millrace.errors import NotFoundError
    from millrace.readers.exports.samples import read_headers
    from millrace.runlog.names import Names, rollout_id
    from millrace.runlog.records.retirement import steps_retired
    from millrace.runlog.records.revisions import read_rollouts

    names = Names(prefix, uid)
    below, _ = steps_retired(store, names)
    for step, revision, header in read_headers(store, names, step=conditions.step):
        if step < below and conditions.step is None:
            continue
        try:
            rollouts = read_rollouts(store, header)
        except NotFoundError:  # retired just now, or gone
            if conditions.step is not None:
                raise
            continue
        for place, rollout in enumerate(rollouts):
            if not rollout.is_duplicate and conditions.passes(rollout):
                yield SampleRecord(step, rollout, rollout_id(step, revision, place))


def sort_samples(samples: Sequence[SampleRecord], order: str) -> list[SampleRecord]:
    """Return the samples sorted by a name in `SORTS`; with a `-` before the name, in descending order."""
    return sorted(samples, key=SORTS[order.removeprefix("-")], reverse=order.startswith("-"))


def _text_of(rollout: "Rollout") -> str:
    return "\n".join(content_of(message) for message in messages_of(rollout))
