"""What the time of steps went to: measured where a service measured it, else laid on the way that a batch takes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millrace.v1 import event_pb2

TEXTS = {
    "trainer": "the trainer computes",
    "load": "the trainer reads its batch from the object store",
    "checkpoint": "the trainer saves a checkpoint",
    "publish": "the new version is written to the object store",
    "update": "engines fetch and apply the new version",
    "engine": "engines generate",
    "environment": "environments and rewards run",
    "commit": "finished rollouts are written to the object store as a batch",
    "batches": "the trainer waits for its batch",
}
STORE = ("load", "checkpoint", "publish", "commit")
"""Causes that are time in which the object store writes or reads."""
MAIN_SHARE = 0.4
"""From which share of the time on a cause is called the main one."""
_ALONE, _SHOWN = 0.8, 0.01
_MEASURED = {"load": "time/load_data", "checkpoint": "time/save_ckpt", "publish": "time/broadcast_weights"}
"""What holds the trainer up beside its work and its wait, by the metric of a step that says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of the trainer, whose wait for the batch is at its beginning."""

    ended: float
    body: event_pb2.StepCompleted
    writer: str

    @property
    def began(self) -> float:
        """When the step before ended."""
        return self.ended - self.body.step_seconds

    @property
    def waited(self) -> float:
        """Seconds without a batch."""
        return min(self.body.wait_seconds, self.body.step_seconds)

    def held_up(self, cause: str) -> float:
        """Seconds in which the trainer stood still for this cause, as it measured them."""
        return max(0.0, self.body.metrics.get(_MEASURED[cause], 0.0))

    def overlap(self, begin: float, end: float) -> float:
        """Seconds of its wait between these times."""
        return max(0.0, min(end, self.began + self.waited) - max(begin, self.began))


def shares_of(
    steps: Sequence[Step], way: Mapping[str, float], *, whole: Mapping[int, float], committed: Mapping[int, float]
) -> list[dict[str, Any]]:
    """Causes with a share of 0 to 1 each, the largest first.

    `whole` is when the last rollout of a step's batch was finished, and `committed` when the batch was in the store:
    what of this a trainer waited for is measured. The rest of its wait is laid on the parts of `way` in proportion to
    their seconds; without any it is a cause of its own.
    """
    total = sum(step.body.step_seconds for step in steps)
    if total <= 0:
        return []
    spent = {cause: sum(step.held_up(cause) for step in steps) for cause in _MEASURED}
    spent["commit"] = sum(
        step.overlap(whole[number], committed[number])
        for step in steps
        if (number := step.body.step) in whole and number in committed
    )
    wait = max(0.0, sum(step.waited for step in steps) - spent["commit"])
    spent["trainer"] = max(0.0, total - wait - sum(spent.values()))
    length = sum(way.values())
    if length > 0:
        for cause, seconds in way.items():
            spent[cause] = spent.get(cause, 0.0) + wait * seconds / length
    else:
        spent["batches"] = wait
    return [
        {"cause": cause, "share": round(seconds / total, 4), "seconds": round(seconds / len(steps), 4),
         "text": TEXTS[cause]}
        for cause, seconds in sorted(spent.items(), key=lambda each: -each[1])
        if seconds > 0
    ]  # fmt: skip


def headline(shares: Sequence[Mapping[str, Any]]) -> str:
    """The main cause in a sentence. What a slow object store holds up in several places is one cause."""
    first = shares[0]
    store = [each for each in shares if each["cause"] in STORE]
    together = sum(each["share"] for each in store)
    others = max((each["share"] for each in shares if each["cause"] not in STORE), default=0.0)
    if together <= others or store[0]["share"] >= _ALONE * together:
        return f"{_verb(first['share'])}, {first['text']}: {first['share']:.0%} of a step."
    parts = ", ".join(f"{each['text']} ({each['share']:.0%})" for each in store if each["share"] >= _SHOWN)
    return f"{_verb(together)}, the object store is waited for: {together:.0%} of a step: {parts}."


def _verb(share: float) -> str:
    return "Mostly" if share >= MAIN_SHARE else "First of all"
