"""Algorithms that turn rewards, or a teacher's scores, into credit per token."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import numpy as np

from millrace.algorithms.base import Credit, Credited, OverlongPenalty, RewardRanges, ScalarAdvantage, broadcast
from millrace.config.sections.algo import AdvantageConfig, AlgoConfig
from millrace.errors import InternalError
from millrace.rollouts.types import Rollout, Sample, are_equal

EPSILON = 1e-6
"""Added to every deviation, as verl and SkyRL do."""


# GRPO (arXiv 2402.03300), by default without the division by the deviation (Dr. GRPO, arXiv 2503.20783; PRIME-RL).


class Grpo(ScalarAdvantage):
    """A_i = r_i - mean(r), the same for every sampled token of rollout i.

    `std_norm` divides by the deviation of the group's rewards (unbiased, ddof 1) or of those of the whole batch;
    `leave_one_out` compares with the mean of the others: times G / (G - 1).
    """

    def __init__(
        self,
        *,
        std_norm: Literal["none", "group", "batch"] = "none",
        leave_one_out: bool = False,
        overlong: OverlongPenalty | None = None,
        by_turn: bool = False,
    ) -> None:
        super().__init__(overlong=overlong, by_turn=by_turn)
        self._std_norm, self._leave_one_out = std_norm, leave_one_out

    @classmethod
    def from_config(cls, config: AdvantageConfig) -> Self:
        """Make the algorithm that `[orchestrator.algo]` describes."""
        return cls(**cls.options(config))

    @staticmethod
    def options(config: AdvantageConfig) -> dict[str, Any]:
        """Return the arguments of the constructor that `[orchestrator.algo]` names."""
        return {
            "std_norm": config.std_norm,
            "leave_one_out": config.leave_one_out,
            "overlong": OverlongPenalty.from_config(config),
            "by_turn": config.credit == "turn",
        }

    def advantages(self, rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return the advantages of a group, float64 [G]."""
        advantages = rewards - rewards.mean()
        if self._leave_one_out:
            advantages = advantages * len(rewards) / (len(rewards) - 1)
        if self._std_norm == "group":
            advantages = advantages / (rewards.std(ddof=1) + EPSILON)
        return advantages

    def finish(self, batch: Sequence[Credited]) -> list[Credit]:
        """Return the credit, divided by the deviation of the batch's rewards if `std_norm` is "batch"."""
        rollouts = {(item.rollout.ordinal, item.rollout.member): item.rollout for item in batch}
        if self._std_norm != "batch" or len(rollouts) < 2:
            return super().finish(batch)
        scale = 1.0 / (self.shaped_rewards(list(rollouts.values())).std(ddof=1) + EPSILON)
        return [replace(item.credit, advantages=scaled(item.credit.advantages, scale)) for item in batch]


def scaled(advantages: np.ndarray, scale: float) -> np.ndarray:
    """Multiply in float64, and round once: float32 [T]."""
    return (advantages.astype(np.float64) * scale).astype(np.float32)


# GRPO for episodes of several agents, such as one that proposes tasks and its solvers (as in PRIME-RL).


class HierarchicalGrpo:
    """A = r - mean(r) over the traces of the same agent, for every sampled token of a trace.

    The mean is over all rollouts of the group. Traces of `episode_agents` are compared within one rollout instead,
    because their prompts occur only there. A trace without peers gets 0.
    """

    def __init__(self, *, episode_agents: Collection[str] = ()) -> None:
        self._episode_agents = frozenset(episode_agents)

    @classmethod
    def from_config(cls, config: AdvantageConfig) -> Self:
        """Make the algorithm that `[orchestrator.algo]` describes."""
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


# Maximum-likelihood RL: the deviation from the mean reward, divided by that mean (arXiv 2602.02710; PRIME-RL).


class MaxRl(ScalarAdvantage):
    """A_i = (p_i - mean(p)) / mean(p), 0 for a group whose mean is not positive; p are shares of the reward's range.

    With the lowest and the highest reward alone it weights a task by the inverse of its pass rate, as the gradient of
    its log-likelihood. Rewards outside of their range have no such meaning: InvalidSpecError.
    """

    is_shift_invariant = False

    def __init__(self, *, ranges: RewardRanges | None = None) -> None:
        """Take `ranges` of rewards by environment; without ranges, rewards are shares."""
        super().__init__()
        self._ranges = ranges

    @classmethod
    def from_config(cls, config: AdvantageConfig) -> Self:
        """Make the algorithm for rewards from 0 to 1; `config` has no option for it."""
        return cls()

    def advantages(self, rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return the advantages of a group, float64 [G]."""
        mean = rewards.mean()
        return (rewards - mean) / mean if mean > 0 else np.zeros(len(rewards))

    def shaped_rewards(self, rollouts: Sequence[Rollout]) -> np.ndarray:
        """Return the rewards as shares of their range, float64 [N]."""
        return super().shaped_rewards(rollouts) if self._ranges is None else self._ranges.shares(rollouts)


# On-policy RL with the optimal baseline (OPO, arXiv 2505.23585).


class Opo(ScalarAdvantage):
    """A_i = r_i - sum(l r) / sum(l), with l the rollouts' lengths in sampled tokens.

    The baseline of least variance, where the norm of a rollout's gradient grows with its length. `leave_one_out`
    belongs to grpo; the reward of rollout i is part of its own baseline here, as in the paper.
    """

    def advantages(self, rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return the advantages of a group, float64 [G]."""
        return rewards - (lengths * rewards).sum() / max(lengths.sum(), 1)


# Role-conditioned advantage estimation for self-play (SPIRAL, arXiv 2506.24119; PRIME-RL's `rae`).

MAX_AGENTS = 1 << 12
"""Agents of an environment whose moving averages are kept; further ones have the baseline 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baselines:
    """By environment and agent the moving average of its rewards after a header. Immutable; it begins at 0."""

    decays: Mapping[str, float] = field(default_factory=dict[str, float])
    """By environment: what an average keeps of itself with every trace. No others are kept."""
    values: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Mapping[str, float]])

    def against(self, batch: Sequence[Credited]) -> tuple[list[Credited], "Baselines"]:
        """Return the samples with `baseline` set, and the baselines after the batch.

        A trace's `baseline` is the moving average of its agent's rewards before it; the average then takes in the
        trace's reward. Traces are ordered by ordinal, member and place. Samples that train nothing do not count; their
        baseline is 0, like that of environments without `decays`.
        """
        values = {env: dict(agents) for env, agents in self.values.items()}
        met: dict[tuple[int, int, int], float] = {}
        counted = [item for item in batch if item.rollout.env in self.decays and not item.credit.trains_nothing]
        # Sorted by key: the moving average must not depend on the order of arrival, else a replay would give other
        # credit.
        for key, item in sorted({item.trace_key: item for item in counted}.items()):
            env, trace = item.rollout.env, item.trace
            agents, decay = values.setdefault(env, {}), self.decays[env]
            met[key] = before = agents.get(trace.agent, 0.0)
            if trace.agent in agents or len(agents) < MAX_AGENTS:
                agents[trace.agent] = decay * before + (1 - decay) * trace.reward
        items = [replace(item, baseline=met.get(item.trace_key, 0.0)) for item in batch]
        return items, replace(self, values=values)

    def restored(self, values: Mapping[str, Mapping[str, float]]) -> "Baselines":
        """Return the baselines with the values of a header, for environments that still use baselines."""
        return replace(self, values={env: agents for env, agents in values.items() if env in self.decays})


class Rae:
    """A = r - b for every sampled token of a trace, with its own reward r and the baseline b of its role.

    b is the moving average of the rewards of the same agent in the same environment before this trace (`Baselines`).
    Nothing is compared within a group, which may be of one.
    """

    @classmethod
    def from_config(cls, config: AdvantageConfig) -> Self:
        """Make the algorithm that `[orchestrator.algo]` describes; `Baselines` has the decay."""
        return cls()

    def credit(self, group: Sequence[Rollout]) -> list[list[Credit]]:
        """Return advantages of 1 for sampled tokens; `finish` puts in the real ones, which depend on earlier traces."""
        return [[Credit(advantages=broadcast(1.0, sample)) for sample in rollout.samples] for rollout in group]

    def finish(self, batch: Sequence[Credited]) -> list[Credit]:
        """Return r - b on the sampled tokens of every sample, with b from `Credited.baseline`."""
        return [
            replace(item.credit, advantages=broadcast(item.trace.reward - item.baseline, item.sample)) for item in batch
        ]


# REINFORCE++ with a baseline (arXiv 2501.03262, as verl's `reinforce_plus_plus_baseline`).

MIN_VARIANCE = 1e-8
"""Added to the variance, as verl's `masked_whiten` does."""


class ReinforcePlusPlus(ScalarAdvantage):
    """A_i = r_i - mean(r) of the group, then whitened over all sampled tokens of the batch: mean 0, variance 1.

    Whitening over tokens means that a long rollout counts more in mean and variance (unbiased) than a short one.
    """

    def advantages(self, rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return the advantages of a group before whitening, float64 [G]."""
        return rewards - rewards.mean()

    def finish(self, batch: Sequence[Credited]) -> list[Credit]:
        """Return the credit, whitened over all sampled tokens of the batch; unchanged for fewer than two tokens."""
        masks = [item.sampled for item in batch]
        rows = [item.credit.advantages[: item.num_tokens].astype(np.float64) for item in batch]
        tokens = np.concatenate([row[mask] for row, mask in zip(rows, masks, strict=True)]) if rows else np.zeros(0)
        if len(tokens) < 2:
            return super().finish(batch)
        mean, scale = tokens.mean(), 1.0 / np.sqrt(tokens.var(ddof=1) + MIN_VARIANCE)
        return [
            replace(item.credit, advantages=np.where(mask, (row - mean) * scale, 0.0).astype(np.float32))
            for item, row, mask in zip(batch, rows, masks, strict=True)
        ]


# REINFORCE leave-one-out (Kool et al. 2019; Ahmadian et al., arXiv 2402.14740).


class Rloo(ScalarAdvantage):
    """A_i = r_i - mean of the rewards of the other rollouts of the task = G / (G - 1) * (r_i - mean(r))."""

    def advantages(self, rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return the advantages of a group, float64 [G]."""
        return (rewards - rewards.mean()) * len(rewards) / (len(rewards) - 1)


# ECHO: GRPO on what the policy sampled, and cross-entropy on what the environment says after a reply.
#
# Source: PRIME-RL's `echo` (2026-08 and later).


class Echo(Grpo):
    """A_i as of `Grpo`; a token of a message of role k after the first reply has the cross-entropy weight alpha_k.

    These are tokens that the policy did not sample, so each token is in one term of the loss at most. The trainer takes
    the mean of each term over its own tokens (`trainer.losses.total_loss`).
    """

    def __init__(self, *, weights: Mapping[str, float], **of_grpo: Any) -> None:
        """Take `weights`, by role; the other parameters are `Grpo`'s."""
        super().__init__(**of_grpo)
        self._weights = dict(weights)

    @classmethod
    def from_config(cls, config: AdvantageConfig) -> Self:
        """Make the algorithm that `[orchestrator.algo]` describes."""
        return cls(weights=config.role_weights, **cls.options(config))

    def credit(self, group: Sequence[Rollout]) -> list[list[Credit]]:
        """Return one `Credit` per sample; where rewards are equal, only the environment's tokens have weight."""
        return [
            [
                replace(credit, ce_weights=self._observed(sample))
                for credit, sample in zip(credits, rollout.samples, strict=True)
            ]
            for rollout, credits in zip(group, super().credit(group), strict=True)
        ]

    def _observed(self, sample: Sample) -> np.ndarray | None:
        """Return the cross-entropy weights of a sample, float32 [T]; None where all are 0."""
        weights = np.zeros(sample.num_tokens, np.float32)
        for span in sample.roles:
            weights[span.start : span.end] = self._weights.get(span.role, 0.0)
        return weights if weights.any() else None


# On-policy distillation: the policy samples, a teacher says how likely each of its tokens is.
#
# The teacher of `opd` is another, frozen model; that of `opsd` is the policy itself with a demonstration of the task in
# besides. Who scored makes no difference here.
#
# Source: Thinking Machines Lab, "On-Policy Distillation" (2025); Agarwal et al., arXiv 2306.13649; PRIME-RL's `opd`.
# Self-distillation: arXiv 2601.19897; PRIME-RL's `opsd` (2026-10).


class Opd:
    """A_t = c * (log p_teacher(x_t | x_<t) - log p_policy(x_t | x_<t)) for every sampled token x_t; no baseline.

    What is recorded has the log-prob that the token was sampled with. The trainer, which weights A_t with its
    importance ratio p_trainer / p_behaviour, puts its own log-prob in its place (`Credit.reference_kl`): its step is
    then in expectation minus the gradient of the per-token reverse KL(policy || teacher), as in PRIME-RL, however stale
    the tokens are. Only the next token is looked at (discount 0). Rewards do not count, groups may be of one.
    """

    def __init__(self, *, kl_coef: float = 1.0) -> None:
        self._kl_coef = kl_coef

    @classmethod
    def from_config(cls, config: AlgoConfig) -> "Opd":
        """Make the algorithm that `[orchestrator.algo]` describes."""
        return cls(kl_coef=config.kl_coef)

    def credit(self, group: Sequence[Rollout]) -> list[list[Credit]]:
        """Return one `Credit` per sample; InternalError if a sample comes without its teacher's scores."""
        return [[self._credit(rollout, index) for index in range(len(rollout.samples))] for rollout in group]

    def finish(self, batch: Sequence[Credited]) -> list[Credit]:
        """Return the credit as it is: a teacher's scores are not compared over a batch."""
        return [item.credit for item in batch]

    def _credit(self, rollout: Rollout, index: int) -> Credit:
        sample = rollout.samples[index]
        if sample.teacher_logprobs is None:
            raise InternalError(
                f"sample {index} of ordinal {rollout.ordinal}, member {rollout.member} has no teacher_logprobs",
                reason="SCORES_MISSING",
                remedy="env-servers score rollouts before they append them; update those of an older release",
            )
        advantages = np.float32(self._kl_coef) * (sample.teacher_logprobs - sample.inference_logprobs)
        advantages = np.where(sample.loss_mask == 1, advantages, np.float32(0.0)).astype(np.float32)
        return Credit(advantages=advantages, reference_kl=self._kl_coef)
