"""On-policy distillation: the policy samples, a teacher says how likely each of its tokens is.

The teacher of `opd` is another, frozen model; that of `opsd` is the policy itself, told a demonstration of the task
besides. Who scored makes no difference here.

Source: Thinking Machines Lab, "On-Policy Distillation" (2025); Agarwal et al., arXiv 2306.13649; PRIME-RL's `opd`.
Self-distillation: arXiv 2601.19897; PRIME-RL's `opsd` (2026-10).
"""

from collections.abc import Sequence

import numpy as np

from millrace.algorithms.base import Credit, Credited
from millrace.config.sections.algo import AlgoConfig
from millrace.errors import InternalError
from millrace.rollouts.types import Rollout


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
        """As `[orchestrator.algo]` says."""
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
