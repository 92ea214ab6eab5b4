"""Role-conditioned advantage estimation for self-play (SPIRAL, arXiv 2506.24119; PRIME-RL's `rae`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from millrace.algorithms.base import Credit, Credited, broadcast
from millrace.config.sections.algo import AdvantageConfig
from millrace.rollouts.types import Rollout

MAX_AGENTS = 1 << 12
"""Agents of an environment whose moving averages are kept; further ones have the baseline 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baselines:
    """By environment and agent the moving average of its rewards behind a header. Immutable; it begins at 0."""

    decays: Mapping[str, float] = field(default_factory=dict[str, float])
    """By environment: what an average keeps of itself with every trace. No others are kept."""
    values: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Mapping[str, float]])

    def against(self, batch: Sequence[Credited]) -> tuple[list[Credited], "Baselines"]:
        """The samples of a batch with the baseline of each one's trace, and the baselines behind the batch.

        Traces count in the order of ordinal, member and place, whatever order they came in, and each meets the average
        of those before it. What filters leave out does not count.
        """
        values = {env: dict(agents) for env, agents in self.values.items()}
        met: dict[tuple[int, int, int], float] = {}
        counted = [item for item in batch if item.rollout.env in self.decays and not item.credit.trains_nothing]
        for key, item in sorted({item.trace_key: item for item in counted}.items()):
            env, trace = item.rollout.env, item.trace
            agents, decay = values.setdefault(env, {}), self.decays[env]
            met[key] = before = agents.get(trace.agent, 0.0)
            if trace.agent in agents or len(agents) < MAX_AGENTS:
                agents[trace.agent] = decay * before + (1 - decay) * trace.reward
        items = [replace(item, baseline=met.get(item.trace_key, 0.0)) for item in batch]
        return items, replace(self, values=values)

    def restored(self, values: Mapping[str, Mapping[str, float]]) -> "Baselines":
        """These baselines with the values of a header, of the environments that still have some."""
        return replace(self, values={env: agents for env, agents in values.items() if env in self.decays})


class Rae:
    """A = r - b for every sampled token of a trace, with its own reward r and the baseline b of its role.

    b is the moving average of the rewards of the same agent in the same environment before this trace (`Baselines`).
    Nothing is compared within a group, which may be of one.
    """

    @classmethod
    def from_config(cls, config: AdvantageConfig) -> Self:
        """As `[orchestrator.algo]` says; the decay is a matter of `Baselines`."""
        return cls()

    def credit(self, group: Sequence[Rollout]) -> list[list[Credit]]:
        """Return advantages of 1: what they are depends on all traces before, which `finish` knows."""
        return [[Credit(advantages=broadcast(1.0, sample)) for sample in rollout.samples] for rollout in group]

    def finish(self, batch: Sequence[Credited]) -> list[Credit]:
        """Return r - b for every sample."""
        return [
            replace(item.credit, advantages=broadcast(item.trace.reward - item.baseline, item.sample)) for item in batch
        ]
