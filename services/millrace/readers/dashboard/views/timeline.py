"""Lanes of who did what when, and why a step takes as long as it does, in words."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from millrace.readers.dashboard.index import Columns
from millrace.readers.dashboard.views.facts import RunFacts
from millrace.runlog.run_status import state_name
from millrace.telemetry.logging import redacted_beginning
from millrace.v1 import event_pb2

STEPS_DEFAULT, STEPS_MAX = 20, 500
_BINS = 400
_MAX_MARKS = 2_000
_LOSSES = re.compile(r"LOST|DIED|KILLED|REPLACED|RESTART|TAKEOVER|TAKEN_OVER|RECOVER|REBUILT|UNREACHABLE|STALL")
HELD_UP = 0.02
"""Share of a step from which on the words name what held the trainer up beside its work."""
_HELD_UP = {
    "publish": "until a version could be published",
    "load": "to read its batch from the object store",
    "checkpoint": "for a checkpoint",
}


# What the time of steps went to: measured where a service measured it, else laid on the way that a batch takes.

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
        """Return when the step began, in seconds since 1970: at the end of the step before."""
        return self.ended - self.body.step_seconds

    @property
    def waited(self) -> float:
        """Return for how many seconds the trainer waited for the step's batch."""
        return min(self.body.wait_seconds, self.body.step_seconds)

    def held_up(self, cause: str) -> float:
        """Return the seconds in which the trainer did not work because of `cause` ("load", …), as it measured them."""
        return max(0.0, self.body.metrics.get(_MEASURED[cause], 0.0))

    def overlap(self, begin: float, end: float) -> float:
        """Return the seconds of the step's wait for its batch that are between two times (seconds since 1970)."""
        return max(0.0, min(end, self.began + self.waited) - max(begin, self.began))


def shares_of(
    steps: Sequence[Step], way: Mapping[str, float], *, whole: Mapping[int, float], committed: Mapping[int, float]
) -> list[dict[str, Any]]:
    """Return the causes of the steps' time, each with its share (0 to 1), seconds per step and text, the largest first.

    By step, `whole` is when the last rollout of its batch was finished, and `committed` when the batch was in the store
    (seconds since 1970): what of this a trainer waited for is measured. The rest of its wait is divided among the
    causes in `way` in proportion to their seconds; without any it is a cause of its own ("batches").
    """
    total = sum(step.body.step_seconds for step in steps)
    if total <= 0:
        return []
    spent = {cause: sum(step.held_up(cause) for step in steps) for cause in _MEASURED}
    # Measured as well: the part of the wait between the last rollout of a batch and its commit.
    spent["commit"] = sum(
        step.overlap(whole[number], committed[number])
        for step in steps
        if (number := step.body.step) in whole and number in committed
    )
    wait = max(0.0, sum(step.waited for step in steps) - spent["commit"])
    spent["trainer"] = max(0.0, total - wait - sum(spent.values()))
    # The rest of the wait is divided over the way of a batch, in proportion to the mean time of each part.
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
    """Return a sentence with the main cause of `shares`, which is not empty.

    What holds up at the object store counts as one cause, if together it is the largest.
    """
    first = shares[0]
    store = [each for each in shares if each["cause"] in STORE]
    together = sum(each["share"] for each in store)
    others = max((each["share"] for each in shares if each["cause"] not in STORE), default=0.0)
    if together <= others or store[0]["share"] >= _ALONE * together:
        return f"{_verb(first['share'])}, {first['text']}: {first['share']:.0%} of a step."
    parts = ", ".join(f"{each['text']} ({each['share']:.0%})" for each in store if each["share"] >= _SHOWN)
    return f"{_verb(together)}, the object store is waited for: {together:.0%} of a step: {parts}."


def _verb(share: float) -> str:
    """Return how a sentence about a cause with this share of the time begins."""
    return "Mostly" if share >= MAIN_SHARE else "First of all"


@dataclass(slots=True)
class _Window:
    """The last steps of a run, and what else happened meanwhile."""

    steps: list[Step]
    begin: float
    end: float
    published: dict[int, float] = field(default_factory=dict)
    served: dict[int, float] = field(default_factory=dict)
    committed: dict[int, float] = field(default_factory=dict)
    pauses: dict[str, float] = field(default_factory=dict)
    lanes: dict[str, dict[str, Any]] = field(default_factory=dict)
    marks: list[dict[str, Any]] = field(default_factory=list)

    def span(self, lane: str, kind: str, start: float, end: float, text: str, *, group: str) -> None:
        """Add a span of one kind, from `start` to `end` (seconds since 1970), to the lane of that name.

        Cut to the window. `text` describes the span, `group` is the service that the lane belongs to.
        """
        found = self.lanes.setdefault(lane, {"name": lane, "group": group, "spans": []})
        if end > self.begin and start < self.end:
            found["spans"].append([kind, max(start, self.begin), min(end, self.end), text])


def timeline(facts: RunFacts, columns: Columns, *, num_steps: int) -> dict[str, Any]:
    """Return the last `num_steps` steps as plain data: lanes of who did what when, marks, shares of causes, and
    sentences.
    """
    done: dict[int, Step] = {}
    for event in facts.events:
        if event.HasField("step_completed"):
            body = event.step_completed
            done.setdefault(body.step, Step(ended=_time(event), body=body, writer=event.writer))
    steps = [done[step] for step in sorted(done)][-num_steps:]
    if not steps:
        return {"steps": 0, "lanes": [], "marks": [], "shares": [], "words": ["No step is done yet."]}
    begin = steps[0].began
    window = _Window(steps=steps, begin=begin, end=steps[-1].ended)
    _trainer_lanes(window)
    for event in facts.events:
        _add_event(window, event)
    rollouts = _rollout_lanes(window, columns)
    shares = _shares(window, columns, rollouts)
    return {
        "steps": len(steps),
        "first_step": steps[0].body.step,
        "last_step": steps[-1].body.step,
        "begin": begin,
        "end": window.end,
        "lanes": sorted(window.lanes.values(), key=lambda lane: (_ORDER.index(lane["group"]), lane["name"])),
        "marks": window.marks[-_MAX_MARKS:],
        "shares": shares,
        "words": _words(window, rollouts, shares),
    }


_ORDER = ["trainer", "publish", "orchestrator", "inference", "env-server"]


def _time(event: event_pb2.Event) -> float:
    """Return when an event was written, in seconds since 1970."""
    return event.time.ToNanoseconds() / 1e9


def _trainer_lanes(window: _Window) -> None:
    """Add a lane for each process that trained: of each step the wait, forward and backward passes, and the rest."""
    for step in window.steps:
        at, body, writer = step.ended, step.body, step.writer
        got = step.began + step.waited
        window.span(writer, "wait", step.began, got, f"step {body.step}: waits for its batch", group="trainer")
        learning = body.metrics.get("time/forward_backward", at - got) if body.metrics else at - got
        learnt = min(at, got + max(0.0, learning))
        window.span(writer, "work", got, learnt, f"step {body.step}: forward and backward", group="trainer")
        window.span(writer, "other", learnt, at, f"step {body.step}: the rest of the step", group="trainer")


def _add_event(window: _Window, event: event_pb2.Event) -> None:
    """Add the spans and marks of one event to the window; events more than a minute outside of it add nothing."""
    at = _time(event)
    # An event comes at the end of what it reports, which may have begun in the window.
    if not window.begin - 60 <= at <= window.end + 60:
        return
    match event.WhichOneof("body"):
        case "policy_published":
            new = event.policy_published
            window.published.setdefault(new.version, at)
            text = f"policy {new.version} is published"
            window.span(f"{event.writer} publishes", "publish", at - new.seconds, at, text, group="publish")
        case "policy_served":
            new = event.policy_served
            window.served.setdefault(new.version, at)
            began = at - max(new.update_seconds, new.pause_seconds)
            text = f"policy {new.version} is fetched and prepared, requests go on"
            window.span(new.replica, "update", began, at - new.pause_seconds, text, group="inference")
            text = f"policy {new.version} is applied: generation stands still"
            window.span(new.replica, "pause", at - new.pause_seconds, at, text, group="inference")
            if window.begin <= at <= window.end:
                window.pauses[new.replica] = window.pauses.get(new.replica, 0.0) + new.pause_seconds
        case "batch_committed":
            window.committed.setdefault(event.batch_committed.step, at)
            text = f"batch of step {event.batch_committed.step + 1} is committed"
            window.span(event.writer, "commit", at, at, text, group="orchestrator")
        case "warning" | "rollouts_failed" | "state_changed":
            _mark(window, event, at)
        case "wait_reported":
            wait = event.wait_reported.wait
            text = f"{wait.owner} waits for {wait.reason}"
            window.marks.append({"time": at, "kind": "wait", "text": _short(text), "on": wait.waits_on})
        case _:
            pass


def _mark(window: _Window, event: event_pb2.Event, at: float) -> None:
    """Add a mark for a warning, failed rollouts or a change of the run's state at the time `at`."""
    kind = event.WhichOneof("body")
    if kind == "warning":
        reason = event.warning.reason
        is_loss = _LOSSES.search(reason) is not None
        mark = {"kind": "death" if is_loss else "warning", "text": _short(f"{reason}: {event.warning.message}")}
    elif kind == "rollouts_failed":
        mark = {"kind": "warning", "text": _short(event.rollouts_failed.message)}
    else:
        change = event.state_changed
        mark = {"kind": "state", "text": _short(f"the run is {state_name(change.new_state)}: {change.reason}")}
    window.marks.append({"time": at, **mark})


def _short(text: str) -> str:
    """Return a text, cut to 500 characters and an ellipsis if it is longer.

    Secrets in a longer text are masked before the cut, because half a secret would not be recognised later. A text that
    is not cut is returned unchanged: its secrets are masked on its way out.
    """
    return text if len(text) <= 500 else redacted_beginning(text, 500)  # what is whole is masked on its way out


def _rollout_lanes(window: _Window, columns: Columns) -> dict[str, float]:
    """Add a lane for each env-server with how many rollouts it played at each time.

    Return by name how many rollouts there were, and means of their seconds (in all, in the engine, in the environment);
    empty without rollouts.
    """
    # Rollouts that ended before the window cannot be in it; those that began after its end are dropped next.
    near = np.flatnonzero(columns.column("finished") >= window.begin)
    rows = columns.rows()[near]
    rows = rows[rows["finished"] - rows["seconds"] <= window.end]
    if not len(rows):
        return {}
    edges = np.linspace(window.begin, window.end, _BINS + 1)
    for number in np.unique(rows["server"]):
        own = rows[rows["server"] == number]
        name = columns.names.name("server", int(number)) or "env-server"
        counts = _in_flight(own, edges)
        model = float(own["model_seconds"].sum()) / max(1e-9, float(own["seconds"].sum()))
        lane = window.lanes.setdefault(name, {"name": name, "group": "env-server", "spans": []})
        lane |= {"counts": [round(float(count), 2) for count in counts], "model_share": round(model, 4)}
    model = np.minimum(rows["model_seconds"], rows["seconds"]).astype(np.float64)
    return {
        "count": float(len(rows)),
        "seconds": float(rows["seconds"].mean()),
        "slow": float(np.quantile(rows["seconds"], 0.9)),
        "model": float(model.mean()),
        "env": float((rows["seconds"] - model).mean()),
    }


def _in_flight(rows: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Return how many of the rollouts in `rows` were being played at each of the times `edges` (seconds since 1970)."""
    ends = np.sort(rows["finished"])
    starts = np.sort(rows["finished"] - rows["seconds"])
    # Those that had begun by then, less those that had ended.
    return np.searchsorted(starts, edges, "right") - np.searchsorted(ends, edges, "left")


def _shares(window: _Window, columns: Columns, rollouts: dict[str, float]) -> list[dict[str, Any]]:
    """Return the shares of the steps' time by cause as `shares_of` does.

    `rollouts` are the means of `_rollout_lanes`.
    """
    way: dict[str, float] = {}
    if rollouts:  # without them the way is not known
        way = {"publish": _publish_gap(window), "update": _update_gap(window)}
        way |= {"engine": rollouts["model"], "environment": rollouts["env"]}
    return shares_of(window.steps, way, whole=_whole(window, columns), committed=window.committed)


def _whole(window: _Window, columns: Columns) -> dict[int, float]:
    """Return by step when the last rollout of its batch was finished, in seconds since 1970."""
    steps, finished = columns.column("step"), columns.column("finished")
    near = np.flatnonzero((steps >= window.steps[0].body.step) & (steps <= window.steps[-1].body.step))
    found, which = np.unique(steps[near], return_inverse=True)
    last = np.full(len(found), -np.inf)
    np.maximum.at(last, which, finished[near])
    shown = {step.body.step for step in window.steps}
    return {int(step): float(at) for step, at in zip(found, last, strict=True) if int(step) in shown}


def _publish_gap(window: _Window) -> float:
    """Return the mean seconds from the end of a step until its version is in the store; 0 if none is known."""
    ends = {step.body.step + 1: step.ended for step in window.steps}
    gaps = [window.published[version] - at for version, at in ends.items() if version in window.published]
    return max(0.0, sum(gaps) / len(gaps)) if gaps else 0.0


def _update_gap(window: _Window) -> float:
    """Return the mean seconds from a version's publication until the first engine serves it; 0 if none is known."""
    gaps = [window.served[version] - at for version, at in window.published.items() if version in window.served]
    return max(0.0, sum(gaps) / len(gaps)) if gaps else 0.0


def _words(window: _Window, rollouts: dict[str, float], shares: list[dict[str, Any]]) -> list[str]:
    """Return sentences that say why a step takes as long as it does, the most important first.

    `rollouts` are the means of `_rollout_lanes`, `shares` those of `shares_of`.
    """
    count = len(window.steps)
    total = sum(step.body.step_seconds for step in window.steps)
    wait = sum(step.waited for step in window.steps)
    mean = total / count
    sentences = [
        f"A step took {_s(mean)} over the last {count}; the trainer waited for {wait / max(total, 1e-9):.0%} of it."
    ]
    if shares:
        sentences.insert(0, headline(shares))
    if rollouts:
        env = rollouts["env"] / max(1e-9, rollouts["seconds"])
        sentences.append(
            f"A rollout took {_s(rollouts['seconds'])} (the slowest tenth {_s(rollouts['slow'])} or more): "
            f"{1 - env:.0%} in the engine, {env:.0%} in the environment and its rewards."
        )
    publish, update = _publish_gap(window), _update_gap(window)
    if publish or update:
        sentences.append(
            f"A version is in the object store {_s(publish)} after its step, and served {_s(update)} later."
        )
    for cause, words in _HELD_UP.items():
        if (held := sum(step.held_up(cause) for step in window.steps) / count) > HELD_UP * mean:
            sentences.append(f"The trainer stood still for {_s(held)} of a step {words}.")
    if window.pauses and window.end > window.begin:
        share = max(window.pauses.values()) / (window.end - window.begin)
        sentences.append(f"Generation stood still for updates for {share:.1%} of the time.")
    deaths = sum(mark["kind"] == "death" for mark in window.marks)
    if deaths:
        sentences.append(f"{deaths} times something died, was lost or had to recover: see the marks.")
    return sentences


def _s(seconds: float) -> str:
    """Return seconds as text with a unit."""
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s"
