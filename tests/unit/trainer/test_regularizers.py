"""KL to the start model and the entropy bonus: their gradients are those of the divergence itself, by enumeration."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from millrace.config.load import validate_document
from millrace.config.sections.loss import LossConfig
from millrace.errors import InvalidSpecError
from millrace.trainer.learning.forward import select_logprobs
from millrace.trainer.losses import LossInputs, token_losses

VOCABULARY = 6


def logits(seed: int) -> torch.Tensor:
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def every_token(
    policy: torch.Tensor, *, behaviour: torch.Tensor, reference: torch.Tensor, advantages: Any
) -> LossInputs:
    """Return one sample of one token for each token of the vocabulary, after a prompt token."""
    shape = (VOCABULARY, 2)

    def second(values: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.zeros_like(values), values], dim=1)

    return LossInputs(
        trainer_logprobs=second(torch.log_softmax(policy, -1)),
        inference_logprobs=second(torch.log_softmax(behaviour, -1)),
        advantages=second(torch.as_tensor(advantages, dtype=torch.float64).expand(VOCABULARY)),
        loss_mask=torch.tensor([[False, True]]).expand(shape),
        rl_weights=torch.ones(shape, dtype=torch.float64),
        ce_weights=torch.zeros(shape, dtype=torch.float64),
        reference_logprobs=second(torch.log_softmax(reference, -1)),
    )


def gradient(inputs: LossInputs, config: LossConfig, policy: torch.Tensor, behaviour: torch.Tensor) -> torch.Tensor:
    """Of the loss's mean over what the behaviour policy samples, by enumeration."""
    losses = token_losses(inputs, config)
    (found,) = torch.autograd.grad((torch.softmax(behaviour, -1) * losses.rl[:, 1]).sum(), policy)
    return found


def kl(policy: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    log_p, log_q = torch.log_softmax(policy, -1), torch.log_softmax(reference, -1)
    return (log_p.exp() * (log_p - log_q)).sum()


@pytest.mark.parametrize(
    "term", [{"estimator": "k2"}, {"estimator": "k3"}, {"place": "reward"}], ids=["k2", "k3", "k1 in the reward"]
)
def test_off_policy_the_gradient_is_that_of_the_divergence(term: dict[str, Any]) -> None:
    policy, behaviour, reference = logits(1).requires_grad_(), logits(2), logits(3)
    config = LossConfig.model_validate({"type": "importance_sampling", "kl": {"coef": 0.3, **term}})
    inputs = every_token(policy, behaviour=behaviour, reference=reference, advantages=0.0)
    (wanted,) = torch.autograd.grad(0.3 * kl(policy, reference), policy)
    assert torch.allclose(gradient(inputs, config, policy, behaviour), wanted, atol=1e-12)
    assert float(wanted.abs().max()) > 0.01


def test_values_by_hand() -> None:
    """Policy and behaviour agree; l = log 2: k2 is (log 2)^2 / 2, k3 is 1/2 - 1 + log 2."""
    shape = (1, 2)
    inputs = LossInputs(
        trainer_logprobs=torch.zeros(shape, dtype=torch.float64, requires_grad=True),
        inference_logprobs=torch.zeros(shape, dtype=torch.float64),
        advantages=torch.full(shape, 2.0, dtype=torch.float64),
        loss_mask=torch.tensor([[False, True]]),
        rl_weights=torch.full(shape, 0.5, dtype=torch.float64),
        ce_weights=torch.zeros(shape, dtype=torch.float64),
        entropy=torch.full(shape, 3.0, dtype=torch.float64),
        reference_logprobs=torch.full(shape, -0.6931471805599453, dtype=torch.float64),
    )

    def loss(**keys: Any) -> float:
        found = token_losses(inputs, LossConfig.model_validate({"type": "importance_sampling", **keys}))
        assert found.rl[0, 0] == 0
        return float(found.rl[0, 1].detach())

    assert loss() == -1.0
    assert loss(kl={"coef": 10.0, "estimator": "k2"}) == pytest.approx(-1.0 + 5 * 0.6931471805599453**2 / 2)
    assert loss(kl={"coef": 10.0}) == pytest.approx(-1.0 + 5 * (0.5 - 1 + 0.6931471805599453))
    assert loss(kl={"coef": 10.0, "place": "reward"}) == pytest.approx(-(2.0 - 6.931471805599453) / 2)
    assert loss(entropy_coef=0.1) == pytest.approx(-1.0 - 0.15)
    constant = {"aggregation": "constant", "constant_tokens": 10}
    assert loss(entropy_coef=0.1, **constant) == pytest.approx((-1.0 - 0.15) / 10)


def test_what_the_loss_used_are_the_lowered_advantages() -> None:
    policy, reference = logits(1).requires_grad_(), logits(3)
    inputs = every_token(policy, behaviour=logits(2), reference=reference, advantages=1.0)
    config = LossConfig.model_validate({"kl": {"coef": 0.5, "place": "reward"}})
    log_ratio = torch.log_softmax(policy, -1) - torch.log_softmax(reference, -1)
    assert torch.allclose(token_losses(inputs, config).advantages[:, 1], 1 - 0.5 * log_ratio)
    assert torch.equal(token_losses(replace(inputs, reference_logprobs=None), config).advantages, inputs.advantages)


@pytest.mark.parametrize("is_cut", [False, True], ids=["whole", "truncated"])
def test_the_gradient_of_the_entropy_is_that_of_minus_p_log_p(is_cut: bool) -> None:
    values = logits(4)
    if is_cut:
        values[2] = -torch.inf
    values.requires_grad_()
    _, learned = select_logprobs(
        values[None, None], torch.tensor([[1]]), temperature_B=torch.tensor([0.7]), is_entropy_learned=True
    )
    _, known = select_logprobs(values.detach()[None, None], torch.tensor([[1]]), temperature_B=torch.tensor([0.7]))
    kept = torch.isfinite(values.detach())
    log_p = torch.log_softmax(values[kept] / 0.7, -1)
    (wanted,) = torch.autograd.grad(-(log_p.exp() * log_p).sum(), values, retain_graph=True)
    (found,) = torch.autograd.grad(learned.sum(), values)
    assert torch.allclose(learned, known, atol=1e-12) and torch.allclose(found, wanted, atol=1e-7)
    assert not known.requires_grad and bool(torch.isfinite(found).all())


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        ({"kl": {"coef": 0.1, "estimator": "k1"}}, "must be k2 or k3 in the loss: the gradient of k1"),
        ({"kl": {"coef": 0.1, "estimator": "k3", "place": "reward"}}, "must be k1 in the reward"),
        ({"kl": {"coef": 0.0}}, "greater than 0|above 0|> 0"),
        ({"kl": {}}, "coef"),
        ({"entropy_coef": -1.0}, "entropy_coef"),
    ],
)
def test_contradictions_are_refused_with_the_reason(loss: dict[str, Any], says: str) -> None:
    orchestrator = {"rollouts_per_example": 2, "env": [{"id": "e"}]}
    with pytest.raises(InvalidSpecError, match=says):
        validate_document({"model": {"name": "gpt2"}, "orchestrator": orchestrator, "trainer": {"loss": loss}})
