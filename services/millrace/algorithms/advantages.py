"""Algorithms that turn rewards, or a teacher's scores, into credit per token."""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import numpy as np

from millrace.algorithms.base import Credit, Credited, OverlongPenalty, RewardRanges, ScalarAdvantage, broadcast
from millrace.config.sections.algo import AdvantageConfig, AlgoConfig
from millrace.custom_code import CustomCode, bad_code
from millrace.errors import InternalError
from millrace.rollouts.types import MAX_REWARD, Rollout, Sample, are_equal

# A function of the user's own that turns the rewards of a group into advantages.

FIELD = "orchestrator.algo.import_path"


class Custom(ScalarAdvantage):
    """`fn(rewards, lengths, **kwargs)`: float64 [G] and int64 [G] (sampled tokens) to advantages [G].

    G is the number of rollouts of the group. The function is pure: what it returned is in the log and is never
    computed again. It is called for groups of equal rewards, too.
    """

    is_shift_invariant = False
    compares = False

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        import_path: str,
        kwargs: Mapping[str, Any],
        overlong: OverlongPenalty | None = None,
    ) -> None:
        """Take the user's function with its further arguments `kwargs`, and a penalty of long responses (None: no
        penalty).

        `import_path`, `my.module:fn`, names the function in errors.
        """
        super().__init__(overlong=overlong)
        self._function = function
        self._import_path = import_path
        self._kwargs = dict(kwargs)

    @classmethod
    def load(cls, config: AdvantageConfig, code: CustomCode) -> "Custom":
        """Import the user's function that `config` names, as far as `code` allows, and try it on a group of three.

        Returns the algorithm; raises InvalidSpecError if the function may not be loaded or is unusable.
        """
        path = config.import_path or ""
        custom = cls(
            code.load(path, field=FIELD),
            import_path=path,
            kwargs=config.kwargs,
            overlong=OverlongPenalty.from_config(config),
        )
        custom.advantages(np.asarray([0.0, 1.0, 0.5]), np.asarray([1, 2, 4]))
        return custom

    def advantages(self, rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Call the user's function on copies of a group's rewards and lengths, and return its advantages, float64 [G].

        Raises InvalidSpecError if it raises, or returns another shape or values that are too large or not finite.
        """
        try:
            # Copies, because the function may write into its arguments.
            result = np.asarray(self._function(rewards.copy(), lengths.copy(), **self._kwargs), dtype=np.float64)
        except Exception as error:  # a user's function may raise anything
            raise bad_code(FIELD, self._import_path, f"it raised {type(error).__name__}: {error}") from error
        if result.shape != rewards.shape:
            problem = f"it returned the shape {result.shape}, not one advantage for each of {len(rewards)} rollouts"
            raise bad_code(FIELD, self._import_path, problem)
        # Not `> MAX_REWARD`, with which a nan would pass.
        if not (np.abs(result) <= MAX_REWARD).all():
            kind = f"beyond ±{MAX_REWARD:g}" if np.isfinite(result).all() else "that is not finite"
            rewards_text = ", ".join(f"{reward:g}" for reward in rewards[:8])
            problem = f"it returned an advantage {kind}, of rewards {rewards_text}"
            raise bad_code(FIELD, self._import_path, problem)
        return result


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
        """Take the options of GRPO.

        `std_norm` says by which standard deviation of rewards advantages are divided: that of the group's, that of the
        batch's, or none. With `leave_one_out` a reward is compared with the mean of the other rewards. `overlong` is a
        penalty of long responses, None for no penalty. With `by_turn` each turn gets its own advantage.
        """
        super().__init__(overlong=overlong, by_turn=by_turn)
        self._std_norm, self._leave_one_out = std_norm, leave_one_out

    @classmethod
    def from_config(cls, config: AdvantageConfig) -> Self:
        """Make the algorithm with the options of an algorithm's table of the config."""
        return cls(**cls.options(config))

    @staticmethod
    def options(config: AdvantageConfig) -> dict[str, Any]:
        """Return, by name, the arguments of GRPO's constructor that an algorithm's table of the config asks for."""
        return {
            "std_norm": config.std_norm,
            "leave_one_out": config.leave_one_out,
            "overlong": OverlongPenalty.from_config(config),
            "by_turn": config.credit == "turn",
        }

    def advantages(self, rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return each reward less the group's mean, scaled as `leave_one_out` and `std_norm` "group" ask, float64 [G].

        `rewards` are float64 [G]; `lengths` do not matter.
        """
        advantages = rewards - rewards.mean()
        if self._leave_one_out:
            advantages = advantages * len(rewards) / (len(rewards) - 1)
        if self._std_norm == "group":
            advantages = advantages / (rewards.std(ddof=1) + EPSILON)
        return advantages

    def finish(self, batch: Sequence[Credited]) -> list[Credit]:
        """Return the final credit of each sample of a batch, in order.

        With `std_norm` "batch" its advantages are divided by the standard deviation of the rewards of the batch's
        rollouts, each of which counts once. Otherwise, and for a single rollout, the credit is returned as it is.
        """
        # A rollout with several samples must count once in the deviation.
        rollouts = {(item.rollout.ordinal, item.rollout.member): item.rollout for item in batch}
        if self._std_norm != "batch" or len(rollouts) < 2:
            return super().finish(batch)
        scale = 1.0 / (self.shaped_rewards(list(rollouts.values())).std(ddof=1) + EPSILON)
        return [replace(item.credit, advantages=scaled(item.credit.advantages, scale)) for item in batch]


def scaled(advantages: np.ndarray, scale: float) -> np.ndarray:
    """Return advantages float32 [T] times `scale`: multiplied in float64, rounded once to float32."""
    return (advantages.astype(np.float64) * scale).astype(np.float32)


# GRPO for episodes of several agents, such as one that proposes tasks and its solvers (as in PRIME-RL).


class HierarchicalGrpo:
    """A = r - mean(r) over the traces of the same agent, for every sampled token of a trace.

    The mean is over all rollouts of the group. Traces of `episode_agents` are compared within one rollout instead,
    because their prompts occur only there. A trace without peers gets 0.
    """

    def __init__(self, *, episode_agents: Collection[str] = ()) -> None:
        """Take the names of agents whose traces are compared within one rollout instead of the whole group."""
        self._episode_agents = frozenset(episode_agents)

    @classmethod
    def from_config(cls, config: AdvantageConfig) -> Self:
        """Make the algorithm with the `episode_agents` of an algorithm's table of the config."""
        return cls(episode_agents=config.episode_agents)

    def credit(self, group: Sequence[Rollout]) -> list[list[Credit]]:
        """Return one `Credit` per sample of each rollout: on sampled tokens its trace's reward less the mean of the
        peers'.

        Peers are the traces of the same agent in the group, or in the rollout for `episode_agents`. A trace without
        peers, or with peers of equal rewards, gets 0.
        """
        peers: dict[tuple[str, int], list[tuple[int, int, float]]] = defaultdict(list)
        for at, rollout in enumerate(group):
            for place, trace in enumerate(rollout.agent_traces):
                scope = at if trace.agent in self._episode_agents else -1
                if trace.num_samples:
                    peers[trace.agent, scope].append((at, place, trace.reward))
        advantages: dict[tuple[int, int], float] = {}
        for traces in peers.values():
            rewards = np.asarray([reward for _, _, reward in traces], dtype=np.float64)
            # Against the first reward, small differences between large rewards keep their digits.
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
        """Return the credit that each sample of the batch got from its group, unchanged."""
        return [item.credit for item in batch]


# Maximum-likelihood RL: the deviation from the mean reward, divided by that mean (arXiv 2602.02710; PRIME-RL).


class MaxRl(ScalarAdvantage):
    """A_i = (p_i - mean(p)) / mean(p), 0 for a group whose mean is not positive; p are shares of the reward's range.

    With the lowest and the highest reward alone it weights a task by the inverse of its pass rate, as the gradient of
    its log-likelihood. Rewards outside of their range have no such meaning: InvalidSpecError.
    """

    is_shift_invariant = False

    def __init__(self, *, ranges: RewardRanges | None = None) -> None:
        """Take the lowest and highest reward by environment; None means that rewards are shares from 0 to 1 already."""
        super().__init__()
        self._ranges = ranges

    @classmethod
    def from_config(cls, config: AdvantageConfig) -> Self:
        """Make the algorithm for rewards from 0 to 1; `config` has no option for it."""
        return cls()

    def advantages(self, rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return each reward's deviation from the group's mean, divided by that mean, float64 [G].

        Zeros if the mean is not positive. `rewards` are shares of their range, float64 [G]; `lengths` do not matter.
        """
        mean = rewards.mean()
        return (rewards - mean) / mean if mean > 0 else np.zeros(len(rewards))

    def shaped_rewards(self, rollouts: Sequence[Rollout]) -> np.ndarray:
        """Return the rollouts' rewards as shares of their environment's range, float64 [N] from 0 to 1.

        Unchanged without ranges.

        Raises InvalidSpecError for a reward outside of its range.
        """
        return super().shaped_rewards(rollouts) if self._ranges is None else self._ranges.shares(rollouts)


# On-policy RL with the optimal baseline (OPO, arXiv 2505.23585).


class Opo(ScalarAdvantage):
    """A_i = r_i - sum(l r) / sum(l), with l the rollouts' lengths in sampled tokens.

    The baseline of least variance, where the norm of a rollout's gradient grows with its length. `leave_one_out`
    belongs to grpo; the reward of rollout i is part of its own baseline here, as in the paper.
    """

    def advantages(self, rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return each reward less the mean reward weighted by length, float64 [G].

        `lengths` are sampled tokens, int64 [G].
        """
        return rewards - (lengths * rewards).sum() / max(lengths.sum(), 1)


# Role-conditioned advantage estimation for self-play (SPIRAL, arXiv 2506.24119; PRIME-RL's `rae`).

MAX_AGENTS = 1 << 12
"""Agents of an environment whose moving averages are kept; further ones have the baseline 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baselines:
    """Hold, by environment and agent, the moving average of its rewards as a batch's header records it.

    Immutable; an average begins at 0.
    """

    decays: Mapping[str, float] = field(default_factory=dict[str, float])
    """By environment: what an average keeps of itself with every trace. No others are kept."""
    values: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Mapping[str, float]])

    def against(self, batch: Sequence[Credited]) -> tuple[list[Credited], "Baselines"]:
        """Return the samples of a batch with `baseline` set, and the moving averages of rewards after the batch.

        A trace's `baseline` is the average of its agent's rewards before it; the average then takes in the trace's
        reward. Traces are ordered by ordinal, member and place. Samples that train nothing do not count; their baseline
        is 0, like that of environments without `decays`, and of an environment's new agents after `MAX_AGENTS`.
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
            # An environment can invent names of agents, and every header has all of these averages.
            if trace.agent in agents or len(agents) < MAX_AGENTS:
                agents[trace.agent] = decay * before + (1 - decay) * trace.reward
        items = [replace(item, baseline=met.get(item.trace_key, 0.0)) for item in batch]
        return items, replace(self, values=values)

    def restored(self, values: Mapping[str, Mapping[str, float]]) -> "Baselines":
        """Return a copy with the averages `values` that a header recorded, by environment and agent.

        Environments that no longer have a decay are left out.
        """
        return replace(self, values={env: agents for env, agents in values.items() if env in self.decays})


class Rae:
    """A = r - b for every sampled token of a trace, with its own reward r and the baseline b of its role.

    b is the moving average of the rewards of the same agent in the same environment before this trace (`Baselines`).
    Nothing is compared within a group, which may be of one.
    """

    @classmethod
    def from_config(cls, config: AdvantageConfig) -> Self:
        """Make the algorithm; `config` has no option for it, because `Baselines` has the decay of the averages."""
        return cls()

    def credit(self, group: Sequence[Rollout]) -> list[list[Credit]]:
        """Return, for each rollout, one `Credit` per sample with a provisional advantage of 1 for sampled tokens.

        `finish` replaces it: the real one depends on earlier traces of the batch.
        """
        return [[Credit(advantages=broadcast(1.0, sample)) for sample in rollout.samples] for rollout in group]

    def finish(self, batch: Sequence[Credited]) -> list[Credit]:
        """Return for each sample the credit with its trace's reward less `Credited.baseline` on every sampled token."""
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
        """Return each reward less the group's mean, float64 [G], which `finish` whitens later.

        `lengths` do not matter.
        """
        return rewards - rewards.mean()

    def finish(self, batch: Sequence[Credited]) -> list[Credit]:
        """Return the credit with advantages of mean 0 and variance 1 over all sampled tokens of the batch.

        Fewer than two sampled tokens leave the credit unchanged.
        """
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
        """Return each reward less the mean of the group's other rewards, float64 [G]; `lengths` do not matter."""
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
        """Take the weights of cross-entropy by role of a message; the other parameters are those of `Grpo`."""
        super().__init__(**of_grpo)
        self._weights = dict(weights)

    @classmethod
    def from_config(cls, config: AdvantageConfig) -> Self:
        """Make the algorithm with the roles' weights and GRPO's options of an algorithm's table of the config."""
        return cls(weights=config.role_weights, **cls.options(config))

    def credit(self, group: Sequence[Rollout]) -> list[list[Credit]]:
        """Return GRPO's credit per sample of each rollout, with cross-entropy weights on the environment's tokens.

        The weights, by the role of a token's message, do not depend on rewards: rollouts of equal rewards have them,
        too.
        """
        return [
            [
                replace(credit, ce_weights=self._observed(sample))
                for credit, sample in zip(credits, rollout.samples, strict=True)
            ]
            for rollout, credits in zip(group, super().credit(group), strict=True)
        ]

    def _observed(self, sample: Sample) -> np.ndarray | None:
        """Return the cross-entropy weight of each token of a sample, float32 [T], by the role of its message.

        None if all are 0.
        """
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
        """Take the factor `kl_coef`, by which the log-ratio of teacher to policy becomes an advantage."""
        self._kl_coef = kl_coef

    @classmethod
    def from_config(cls, config: AlgoConfig) -> "Opd":
        """Make the algorithm with the `kl_coef` of an algorithm's table of the config."""
        return cls(kl_coef=config.kl_coef)

    def credit(self, group: Sequence[Rollout]) -> list[list[Credit]]:
        """Return, per sample of each rollout, `kl_coef` times the teacher's log-prob less the policy's for sampled
        tokens.

        Raises InternalError if a sample comes without its teacher's scores. Rewards do not count.
        """
        return [[self._credit(rollout, index) for index in range(len(rollout.samples))] for rollout in group]

    def finish(self, batch: Sequence[Credited]) -> list[Credit]:
        """Return the credit that each sample of the batch got from its group, unchanged."""
        return [item.credit for item in batch]

    def _credit(self, rollout: Rollout, index: int) -> Credit:
        """Return the credit of the rollout's sample `index`: `kl_coef` times the log-ratio of teacher to policy.

        Raises InternalError if the sample comes without its teacher's scores.
        """
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
