"""The rollouts of a run for display, read from the archives in the object store without a server."""

import re
from collections import Counter
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
    """Yield the samples of the run `uid` that meet the conditions, from all committed batches in order of steps.

    Duplicates and retired steps are skipped; NotFoundError says which record has retired the one that is asked for. One
    archive is in memory at a time. Raises CorruptObjectError for a damaged archive.
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
    """Return the texts of all messages of a rollout, one below the other."""
    return "\n".join(content_of(message) for message in messages_of(rollout))


# Turn rollouts into rows for `millrace sft`: whole conversations, from any engine.
#
# A row is text; the trained model's chat template and tokenizer turn it into tokens. Conversations that would not
# survive this unchanged are left out.

_CUT = re.compile(r"… \(\d+ characters cut\)\Z")


class TrainingRows:
    """Makes rows from samples, and counts the samples that were left out, by reason."""

    def __init__(self) -> None:
        self.num_rows = 0
        self.left_out = Counter[str]()

    def row(self, found: SampleRecord) -> dict[str, Any] | None:
        """Return the row of a sample; None if the sample cannot be trained on."""
        messages = messages_of(found.rollout)
        if reason := _unfit(found, messages):
            self.left_out[reason] += 1
            return None
        self.num_rows += 1
        return {"messages": messages}

    def describe(self) -> str:
        """Return the number of rows, and the number of samples left out by reason."""
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self.left_out.items()))
        return f"{self.num_rows} rows" + (f"; left out: {reasons}" if reasons else "")


def _unfit(found: SampleRecord, messages: list[dict[str, Any]]) -> str:
    """Return why a sample cannot be a row of a data set for SFT; empty if it can.

    `messages` are the sample's.
    """
    from millrace.rollouts.types import RolloutStatus  # with numpy, which the client's extra has not

    rollout = found.rollout
    if rollout.status is not RolloutStatus.OK:
        return "failed"
    if rollout.is_truncated:
        return "ended at the token limit (a row would teach to end there)"
    roles = [message.get("role") for message in messages]
    if "note" in roles or any(_CUT.search(str(message.get("content") or "")) for message in messages):
        return "too long to be kept whole"
    if "tool" in roles or any(message.get("tool_calls") for message in messages):
        return "with tools (the log does not hold their definitions)"
    if roles.count("assistant") != rollout.num_turns:
        return "with assistant messages that nobody sampled"
    if not roles or roles[-1] != "assistant" or not messages[-1].get("content"):
        return "without an answer at the end"
    return ""
