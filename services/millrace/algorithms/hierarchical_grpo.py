"""GRPO for episodes of several agents, such as one that proposes tasks and its solvers (as in PRIME-RL)."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Self

import numpy as np

from millrace.algorithms.base import Credit, Credited, broadcast
from millrace.config.sections.algo import AdvantageConfig
from millrace.rollouts.types import Rollout, are_equal


class HierarchicalGrpo:
    """A = r - mean(r) over the traces of the same agent, for every sampled token of a trace.

    The mean is over all rollouts of the group, but for `episode_agents`, whose traces are compared within one rollout:
    what they were asked there they were asked nowhere else. A trace without peers gets 0.
    """

    def __init__(self, *, episode_agents: Collection[str] = ()) -> None:
        self._episode_agents = frozenset(episode_agents)

    @classmethod
    def from_config(cls, config: AdvantageConfig) -> Self:
        """As `[orchestrator.algo]` says."""
        return cls(episode_agents=config.episode_agents)

    def credit(self, group: Sequence[Rollout]) -> list[list[Credit]]:
        """Return one `Credit` per sample; agents that are alone, or of equal rewards, get advantage 0."""
        peers: dict[tuple[str, int], list[tuple[int, int, float]]] = defaultdict(list)
        for at, rollout in enumerate(group):
            for place, trace in enumerate(rollout.agent_traces):
                scope = at if trace.agent in self._episode_agents else -1
                if trace.num_samples:
                    peers[trace.agent, scope].append((at, place, trace.reward))
        advantages: dict[tuple[int, int], float] = {}
        for traces in peers.values():
            rewards = np.asarray([reward for _, _, reward in traces], dtype=np.float64)
            differences = np.zeros(len(rewards)) if are_equal(rewards) else rewards - rewards[0]
            for (at, place, _), advantage in zip(traces, differences - differences.mean(), strict=True):
                advantages[at, place] = float(advantage)
        return [
            [
                Credit(advantages=broadcast(advantages[at, place], sample))
                for place, sample in zip(rollout.trace_of_sample, rollout.samples, strict=True)
            ]
            for at, rollout in enumerate(group)
        ]

    def finish(self, batch: Sequence[Credited]) -> list[Credit]:
        """Return the groups' credit as it is."""
        return [item.credit for item in batch]
