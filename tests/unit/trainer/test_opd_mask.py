"""opd with `type = "default"` beside the `ref_kl` component of prime-rl: where the two masks differ, and by how much.

Every token of a small vocabulary is weighted by its probability under the policy that sampled: nothing is drawn.
"""

import pytest
import torch

from millrace.config.sections.loss import LossConfig
from millrace.trainer.losses import LossInputs, dppo

VOCABULARY, CONTEXTS = 32, 2000


def policies(drift: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log-probs [contexts, vocabulary] of the policy that sampled, of the one that is trained, of the
    teacher.
    """
    generator = torch.Generator().manual_seed(0)

    def noise() -> torch.Tensor:
        return torch.randn(CONTEXTS, VOCABULARY, dtype=torch.float64, generator=generator)

    logits = 3.0 * noise()
    sampled = torch.log_softmax(logits, -1)
    return sampled, torch.log_softmax(logits + drift * noise(), -1), torch.log_softmax(logits + noise(), -1)


def gradients(drift: float) -> tuple[torch.Tensor, torch.Tensor, float, float]:
    """Return ours and prime-rl's with respect to the logits; the share of sampled tokens that each of them drops."""
    sampled, trained, teacher = policies(drift)
    advantages, whole = teacher - trained, torch.ones_like(sampled)
    inputs = LossInputs(
        trainer_logprobs=trained, inference_logprobs=sampled, advantages=advantages, loss_mask=whole.bool(),
        rl_weights=whole, ce_weights=torch.zeros_like(whole),
    )  # fmt: skip
    ours = dppo(inputs, LossConfig()).factor
    keep = trained.exp() - sampled.exp() >= -0.2  # PRIME-RL: one side, whatever the sign of the advantage
    theirs = torch.where(keep, (trained - sampled).exp(), 0.0)

    def gradient(factor: torch.Tensor) -> torch.Tensor:
        pull = sampled.exp() * factor * advantages
        return pull - trained.exp() * pull.sum(-1, keepdim=True)

    probability = sampled.exp() / CONTEXTS
    dropped = [float((probability * (factor == 0)).sum()) for factor in (ours, theirs)]
    return gradient(ours), gradient(theirs), dropped[0], dropped[1]


@pytest.mark.parametrize(
    ("drift", "ours_dropped", "theirs_dropped", "apart", "cosine"),
    [(0.0, 0, 0, 0, 1), (0.1, 0, 0, 0, 1), (0.3, 0.0002, 0.0014, 0.018, 0.9998), (1.0, 0.022, 0.155, 0.188, 0.987)],
)
def test_the_gradients_differ_by_what_only_one_mask_drops(
    drift: float, ours_dropped: float, theirs_dropped: float, apart: float, cosine: float
) -> None:
    """Ours is DPPO's two-sided mask, theirs that of prime-rl's `ref_kl`."""
    ours, theirs, *dropped = gradients(drift)
    assert dropped == pytest.approx([ours_dropped, theirs_dropped], abs=5e-4)
    assert float((ours - theirs).norm() / theirs.norm()) == pytest.approx(apart, abs=5e-4)
    assert float(torch.cosine_similarity(ours.flatten(), theirs.flatten(), 0)) == pytest.approx(cosine, abs=5e-4)
