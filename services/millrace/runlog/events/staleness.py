"""How old the rollouts of each environment were when they were trained on, and how many groups came too late."""

from collections.abc import Mapping
from dataclasses import dataclass

MUCH = 0.25
"""Share of an environment's last groups dropped as stale from which people are told."""
_MOST = 1000  # environments of one run, whatever its events name


@dataclass(slots=True, kw_only=True)
class Staleness:
    """Of one environment."""

    mean: float | None = None
    """Steps between the policy that sampled a token and the step that trained on it, in the newest step."""
    largest: float | None = None
    """The largest of any step."""
    num_stale: int = 0
    """Groups dropped as stale."""
    share: float | None = None
    """Of its last groups, those dropped as stale, 0 to 1."""
    slow_share: float | None = None
    """The same of the slowest quarter of them."""

    @property
    def is_much(self) -> bool:
        """Return whether people are told."""
        return self.share is not None and self.share >= MUCH

    @property
    def lost(self) -> str:
        """`12 groups dropped as stale (31% of its last ones, 80% of the slowest quarter)`; empty if there are none."""
        if not self.num_stale:
            return ""
        shares = [(self.share, "of its last ones"), (self.slow_share, "of the slowest quarter")]
        known = ", ".join(f"{share:.0%} {whose}" for share, whose in shares if share is not None)
        groups = "group" if self.num_stale == 1 else "groups"
        return f"{self.num_stale} {groups} dropped as stale" + (f" ({known})" if known else "")

    @property
    def words(self) -> str:
        """`0.8 steps, at most 2; 12 groups dropped …`."""
        age = "" if self.mean is None else f"{self.mean:.1f} steps"
        age += f", at most {self.largest:.0f}" if age and self.largest is not None else ""
        return "; ".join(part for part in (age, self.lost) if part)


def note_batch(known: dict[str, Staleness], metrics: Mapping[str, float]) -> None:
    """Take the metrics of a batch in."""
    for name, value in metrics.items():
        if env := _between(name, "batch/dropped/stale/"):
            _of(known, env).num_stale += round(value)
        elif env := _between(name, "stale_share/", "/mean"):
            _of(known, env).share = value
        elif env := _between(name, "stale_share/", "/slowest_quarter"):
            _of(known, env).slow_share = value


def note_step(known: dict[str, Staleness], metrics: Mapping[str, float]) -> None:
    """Take the metrics of a step in."""
    for name, value in metrics.items():
        if env := _between(name, "staleness/", "/mean"):
            _of(known, env).mean = value
        elif env := _between(name, "staleness/", "/max"):
            found = _of(known, env)
            found.largest = value if found.largest is None else max(found.largest, value)


def _of(known: dict[str, Staleness], env: str) -> Staleness:
    """That of an environment; what lies beyond the most that are kept is forgotten."""
    return known.setdefault(env, Staleness()) if env in known or len(known) < _MOST else Staleness()


def _between(name: str, begin: str, end: str = "") -> str:
    """Return the environment in a metric's name; empty if that is another metric's."""
    is_it = name.startswith(begin) and name.endswith(end) and len(name) > len(begin) + len(end)
    return name[len(begin) : len(name) - len(end)] if is_it else ""
