"""Who waits for whom: from the waits of all processes to the one chain that ends at what holds a run up.

    trainer ──batch 12──▶ orchestrator ──3 of 8 groups──▶ env-server ──rollouts──▶ inference (silent for 12 s)
                               └────────replica to serve policy 11─────────────────▲

Components are the nodes, their waits the edges (`Wait.waits_on`). Every path is followed from where the search begins,
no component twice, and the path whose end is worst is the answer: a component that is silent explains more than a wait
that is overdue, and that more than one that is not.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from typing import Any

from millrace.errors import MillraceError
from millrace.telemetry.waits import Wait

SILENT_S = 3.0
"""Seconds without a heartbeat (one per second) from which on a worker is named as silent."""
REDIS, STORE, DISK, OPERATOR, ENV_WORKER = "redis", "object store", "disk", "operator", "env worker"
_EXTERNAL = {REDIS, STORE, DISK, OPERATOR}


class Severity(IntEnum):
    """How much the end of a path explains."""

    WORKS = 0
    """It waits for nobody: it is at work."""
    WAITS = 1
    OVERDUE = 2
    MISSING = 3
    """There is no such component."""
    STORAGE = 4
    """Redis, the object store or a disk does not answer."""
    SILENT = 5
    """A process does not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One process of the run, as it was heard of last."""

    name: str
    """The worker's id."""
    kind: str
    """`trainer`, `orchestrator`, `env-server` or `inference`."""
    waits: Sequence[Wait] = ()
    silence_s: float = 0.0
    is_lost: bool = False
    """Its lease ran out: it counts as gone until it registers again."""
    activity: str = "works"
    """What it does when it waits for nobody, in words."""
    url: str = ""
    """Inference: where others reach its HTTP API."""
    num_requests: int | None = None
    """Inference: open requests, if they are known."""

    @property
    def is_silent(self) -> bool:
        """Return whether the component is lost or was not heard for `SILENT_S`.

        Its reported waits are then out of date.
        """
        return self.is_lost or self.silence_s > SILENT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitLink:
    """One step of the chain. `wait` is what an event would say of it."""

    text: str
    wait: Wait


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """From who waits to who is waited for; empty if nobody waits."""

    links: tuple[WaitLink, ...] = ()
    severity: Severity = Severity.WORKS

    def __str__(self) -> str:
        return " ← ".join(link.text for link in self.links)

    def preceded_by(self, link: WaitLink) -> "Chain":
        """Return this chain with a link in front; its severity is at least that of the link's wait."""
        own = Severity.OVERDUE if link.wait.is_overdue else Severity.WAITS
        return replace(self, links=(link, *self.links), severity=max(self.severity, own))


def find_chain(components: Sequence[Component], *, starts: Sequence[str]) -> Chain:
    """Return the worst path of waits that begins at one of the components named `starts`; empty if none of them waits.

    A name is a worker's id, a kind of worker, or the URL of an engine. Of equally bad paths that of the earlier start
    is returned.
    """
    graph = _Graph(components)
    paths = [graph.from_component(component, ()) for name in starts for component in graph.resolve(name)]
    waiting = [path for path in paths if len(path.links) > 1 or path.severity > Severity.WORKS]
    if not waiting:
        return Chain()
    # `max` keeps the first of equals, which is the order of `starts`.
    return max(waiting, key=lambda path: path.severity)


class _Graph:
    def __init__(self, components: Sequence[Component]) -> None:
        """Make the graph of the components of one run."""
        self._components = components
        # A silence is a wait of the orchestrator, which gets the heartbeats.
        self._observer = next((c.name for c in components if c.kind == "orchestrator"), "")

    def resolve(self, name: str) -> list[Component]:
        """Return the components that a name means: a worker's id, a kind of worker, or an engine's URL."""
        return [c for c in self._components if name in (c.name, c.kind) or (c.url and name == c.url)]

    def from_component(self, component: Component, seen: tuple[str, ...]) -> Chain:
        """Return the path of waits from a component whose end explains most, such as a component that does not answer.

        `seen` are the names of the components before it on the path.
        """
        if component.is_silent:
            return _silent(component, observer=self._observer)
        paths = [self._along(component, wait, (*seen, component.name)) for wait in component.waits]
        if not paths:
            return _working(component)
        return max(paths, key=_weight)

    def _along(self, component: Component, wait: Wait, seen: tuple[str, ...]) -> Chain:
        """Return the path that begins with the wait `wait` of a component, and goes on with whichever cause explains
        most.

        `seen` has the names of the components on the path so far, `component` included. The path ends with `wait` if
        nobody is named as its cause, or only components in `seen`.
        """
        link = WaitLink(text=_describe(component, wait), wait=wait)
        # A wait may name several, such as all engines.
        tails = [self._to(target.strip(), component, wait, seen) for target in wait.waits_on.split(",")]
        ends = [tail for tail in tails if tail is not None]
        if not ends:  # nobody is named, or it leads back to who waits: the chain ends here
            return Chain().preceded_by(link)
        return max(ends, key=_weight).preceded_by(link)

    def _to(self, target: str, component: Component, wait: Wait, seen: tuple[str, ...]) -> Chain | None:
        """Return the path that begins at `target`, which a component waits for; None if it has no end of its own.

        That is so if the target is unknown, or all that it names are in `seen`, the path so far.
        """
        if target in _EXTERNAL:
            return Chain(severity=Severity.STORAGE if _is_unanswered(wait, target) else Severity.WAITS)
        # An env worker is no registered component; its env-server names it only when it has stopped answering.
        if target.startswith(f"{ENV_WORKER} "):
            return Chain(severity=Severity.SILENT)
        found = self.resolve(target)
        if not found:
            return _missing(target, component, wait) if target in _KINDS else None
        paths = [
            _idle_engine(other, component, wait) or self.from_component(other, seen)
            for other in found
            # Else the path of components that wait for each other would have no end.
            if other.name not in seen
        ]
        return max(paths, key=_weight, default=None)


def storage_of(error: MillraceError) -> str:
    """Return "redis" or "object store" if the reason of an error is of it; empty if the error is of neither."""
    if error.reason.startswith("REDIS_"):
        return REDIS
    return STORE if error.reason.startswith(("STORE_", "BUCKET_", "CLOCK_")) else ""


def _is_unanswered(wait: Wait, target: str) -> bool:
    """Return whether a wait for `target` shows that Redis, the store or a disk does not answer.

    Each wait for Redis does; one for the store or a disk if a single operation takes longer than `SILENT_S`.
    """
    is_operation = target == DISK or wait.reason.startswith(STORE)
    return target == REDIS or (is_operation and wait.age_s > SILENT_S)


_KINDS = ("trainer", "orchestrator", "env-server", "inference")


def _weight(path: Chain) -> tuple[int, int, float]:
    """Return the sort key of a chain: worse first, then longer chains, then older waits."""
    age_s = path.links[0].wait.age_s if path.links else 0.0
    # A longer chain explains more.
    return path.severity, len(path.links), age_s


def _describe(component: Component, wait: Wait) -> str:
    """Return in words what a component waits for, for how long, and whether that is overdue."""
    late = ""
    if wait.is_overdue:
        late = f" (overdue: {wait.deadline_s:g} s are expected)"
    return f"{component.name} waits for {wait.reason}, {wait.age_s:.1f} s{late}"


def _silent(component: Component, *, observer: str) -> Chain:
    """Return the end of a path at a component that does not answer; `observer` is the orchestrator that misses it."""
    gone = "; it counts as lost" if component.is_lost else ""
    who = f"{component.kind} {component.name}"
    state = f"has not answered for {component.silence_s:.0f} s (frozen, or it or its machine is gone{gone})"
    wait = Wait(
        owner=observer,
        reason=f"a heartbeat of {who}, which {state}",
        waits_on=component.name,
        age_s=component.silence_s,
    )
    link = WaitLink(text=f"{who} {state}", wait=wait)
    return Chain(links=(link,), severity=Severity.SILENT)


def _working(component: Component) -> Chain:
    """Return the end of a path at a component that waits for nobody."""
    wait = Wait(owner=component.name, reason=f"nobody: it {component.activity}")
    link = WaitLink(text=f"{component.name} {component.activity}", wait=wait)
    return Chain(links=(link,))


def _missing(kind: str, component: Component, wait: Wait) -> Chain:
    """Return the end of a path where a component waits for a worker of a kind of which the run has none."""
    missing = Wait(
        owner=component.name,
        reason=f"a registered {kind} worker that serves this run: there is none",
        waits_on=kind,
        age_s=wait.age_s,
    )
    link = WaitLink(text=f"no {kind} worker is registered for this run", wait=missing)
    return Chain(links=(link,), severity=Severity.MISSING)


def _idle_engine(engine: Component, component: Component, wait: Wait) -> Chain | None:
    """Return the end of a path at the environment's own code, if that is why an env-server waits for `engine`.

    Else None.

    It is if `component` is an env-server, and the engine has no open request, waits for nobody and answers.
    """
    if component.kind != "env-server" or engine.num_requests != 0 or engine.is_silent or engine.waits:
        return None
    text = f"{engine.name} has no open request: the environment's own code works"
    inside = Wait(
        owner=component.name,
        reason=f"its environments' own code ({engine.name} has no open request)",
        waits_on=ENV_WORKER,
        age_s=wait.age_s,
    )
    return Chain(links=(WaitLink(text=text, wait=inside),))


# The chain of waits as boxes, for the dashboard: who waits for what, up to what the run waits for in the end.

_WORKS = "nobody: it "


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """One box. `state`: `waits`, `overdue`, `works`, `silent`, `missing`, `storage` (it does not answer) or `end`."""

    name: str
    does: str
    state: str
    age_seconds: float = 0.0
    deadline_seconds: float = 0.0


def boxes(chain: Chain) -> list[dict[str, Any]]:
    """Return the boxes that the dashboard draws of a chain, from who waits to who is waited for, each as a dictionary.

    The list is empty for an empty chain.
    """
    found: list[Box] = []
    for place, link in enumerate(chain.links):
        is_last = place == len(chain.links) - 1
        found += _of_link(link, chain.severity if is_last else Severity.WAITS, is_last=is_last)
    return [asdict(box) for box in found]


def _of_link(link: WaitLink, severity: Severity, *, is_last: bool) -> list[Box]:
    """Return the boxes that the dashboard draws of one link of a chain: one, or two for some last links.

    The second box is for what the last link (`is_last`) waits for. `severity` is that of the chain's end, for the last
    link; it decides the state of the boxes.
    """
    wait = link.wait
    ages = {"age_seconds": wait.age_s, "deadline_seconds": wait.deadline_s}
    if wait.reason.startswith(_WORKS):
        return [Box(name=wait.owner, does=wait.reason.removeprefix(_WORKS), state="works")]
    if is_last and wait.waits_on == ENV_WORKER:
        return [Box(name="environment", does=link.text, state="works", age_seconds=wait.age_s)]
    if is_last and severity is Severity.MISSING:
        return [Box(name=wait.waits_on, does=link.text, state="missing", **ages)]
    if is_last and severity is Severity.SILENT and wait.reason.startswith("a heartbeat of "):
        return [Box(name=wait.waits_on, does=link.text, state="silent", **ages)]
    waiting = Box(
        name=wait.owner, does=f"waits for {wait.reason}", state="overdue" if wait.is_overdue else "waits", **ages
    )
    if not is_last or not wait.waits_on:
        return [waiting]
    match severity:
        case Severity.STORAGE:
            return [waiting, Box(name=wait.waits_on, does="does not answer in time", state="storage")]
        case Severity.SILENT:
            return [waiting, Box(name=wait.waits_on, does="does not answer", state="silent")]
        case _:
            return [waiting, Box(name=wait.waits_on, does="is waited for", state="end")]
