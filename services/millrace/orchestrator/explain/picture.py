"""The chain of waits as boxes, for the dashboard: who waits for what, up to what the run waits for in the end."""

from dataclasses import asdict, dataclass
from typing import Any

from millrace.orchestrator.explain.chain import ENV_WORKER, Chain, Severity, WaitLink

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
    """The boxes of a chain, from who waits to who is waited for; none if nobody waits."""
    found: list[Box] = []
    for place, link in enumerate(chain.links):
        is_last = place == len(chain.links) - 1
        found += _of_link(link, chain.severity if is_last else Severity.WAITS, is_last=is_last)
    return [asdict(box) for box in found]


def _of_link(link: WaitLink, severity: Severity, *, is_last: bool) -> list[Box]:
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
