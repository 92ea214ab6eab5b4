"""Every policy loss in float64 against its paper's objective, written here in its own way, value and gradient."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from millrace.config.filling import PRESETS
from millrace.config.load import validate_document
from millrace.config.sections.loss import CorrectionConfig, LossConfig
from millrace.errors import InvalidSpecError
from millrace.trainer.losses import LOSSES, LossInputs, Multiplier, divisor, token_losses, total_loss

Rows = list[list[tuple[float, float, float]]]
"""Per sample: trainer log-prob, inference log-prob and advantage of each of its tokens."""

ROWS: Rows = [
    [(-1.0, -1.2, 0.7), (-0.4, -0.1, 0.7), (-2.0, -3.4, 0.7), (-0.9, -0.9, 0.7)],
    [(-1.5, -1.1, -0.4), (-0.2, -2.2, -0.4), (-3.0, -1.4, -0.4)],
    [(-0.7, -0.70005, 1.3), (-0.3, -0.3, 1.3)],
    [(-2.5, -0.3, -1.1)],
]


def inputs_of(rows: Rows, *, width: int = 6) -> LossInputs:
    """Return rows after one prompt token, padded: what is no member has values that would show."""
    shape = (len(rows), width)
    trainer, inference, advantages = (torch.full(shape, value, dtype=torch.float64) for value in (-50.0, 0.0, 9.0))
    mask = torch.zeros(shape, dtype=torch.bool)
    for row, tokens in enumerate(rows):
        for at, (t, i, advantage) in enumerate(tokens, start=1):
            trainer[row, at], inference[row, at], advantages[row, at], mask[row, at] = t, i, advantage, True
    return LossInputs(
        trainer_logprobs=trainer.requires_grad_(),
        inference_logprobs=inference,
        advantages=advantages,
        loss_mask=mask,
        rl_weights=torch.ones(shape, dtype=torch.float64),
        ce_weights=torch.zeros(shape, dtype=torch.float64),
    )


def group_tokens(rows: Rows) -> list[int]:
    """Of each row the tokens of its group: that of the first two rows, or of all the others."""
    sizes = [sum(map(len, rows[:2])), sum(map(len, rows[2:]))]
    return [sizes[min(at // 2, 1)] for at in range(len(rows))]


def found(rows: Rows, config: LossConfig) -> tuple[float, list[list[float]]]:
    """Return the loss of a batch, and its gradient at every token."""
    tokens = group_tokens(rows)
    inputs = replace(inputs_of(rows), group_tokens=torch.tensor(tokens)[:, None])
    counted = divisor(config, num_tokens=sum(map(len, rows)), num_samples=len(rows), num_groups=len(rows) // 2)
    loss = total_loss(token_losses(inputs, config), rl_divisor=counted, num_ce_tokens=0)
    loss.backward()
    gradient = inputs.trainer_logprobs.grad
    assert gradient is not None and not gradient[~inputs.loss_mask].any()
    return float(loss.detach()), [gradient[row, 1 : len(tokens) + 1].tolist() for row, tokens in enumerate(rows)]


Objective = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
"""Of one sample: t, i and its advantage to the objective that is maximised, per token [n]."""


def clipped(low: float, high: float, dual: float | None = None) -> Objective:
    """Return min(r A, clip(r) A), and for A < 0 not below dual * A."""

    def objective(t: torch.Tensor, i: torch.Tensor, advantage: float) -> torch.Tensor:
        ratio = torch.exp(t - i)
        surrogate = torch.minimum(ratio * advantage, torch.clamp(ratio, 1 - low, 1 + high) * advantage)
        if dual is not None and advantage < 0:
            surrogate = torch.maximum(surrogate, torch.full_like(surrogate, dual * advantage))
        return surrogate

    return objective


def gspo(low: float, high: float) -> Objective:
    """Return the ratio of the sequence to the power 1/length, shared by its tokens (eq. 5 and 7 of
    arXiv:2507.18071).
    """

    def objective(t: torch.Tensor, i: torch.Tensor, advantage: float) -> torch.Tensor:
        ratio = (torch.exp(t.sum() - i.sum())) ** (1 / len(t))
        return torch.minimum(ratio * advantage, torch.clamp(ratio, 1 - low, 1 + high) * advantage).expand(len(t))

    return objective


def cispo(low: float, high: float) -> Objective:
    """Return the clipped ratio, without a gradient, times A log pi (eq. 4 of arXiv:2506.13585)."""

    def objective(t: torch.Tensor, i: torch.Tensor, advantage: float) -> torch.Tensor:
        return torch.clamp(torch.exp(t - i), 1 - low, 1 + high).detach() * advantage * t

    return objective


def importance(t: torch.Tensor, i: torch.Tensor, advantage: float) -> torch.Tensor:
    return torch.exp(t - i) * advantage


def inside(threshold: float) -> Objective:
    """Return Importance sampling where the probability moved by no more than the threshold (prime-rl's ipo)."""

    def objective(t: torch.Tensor, i: torch.Tensor, advantage: float) -> torch.Tensor:
        return torch.where((t.exp() - i.exp()).abs() <= threshold, torch.exp(t - i) * advantage, 0.0)

    return objective


def capped(keep: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor], cap: float) -> Objective:
    """Return the ratio of a kept token counts at most `cap`, and its gradient is that of the policy (prime-rl,
    2026-10).
    """

    def objective(t: torch.Tensor, i: torch.Tensor, advantage: float) -> torch.Tensor:
        return torch.where(keep(t, i, advantage), torch.exp(t - i).detach().clamp(max=cap) * advantage * t, 0.0)

    return objective


def reinforce_tis(cap: float) -> Objective:
    def objective(t: torch.Tensor, i: torch.Tensor, advantage: float) -> torch.Tensor:
        return torch.exp(t - i).detach().clamp(max=cap) * advantage * t

    return objective


def expected(rows: Rows, objective: Objective, *, aggregation: str, constant: int = 1) -> list[list[float]]:
    """Return the gradient of the loss, sample by sample, by autograd over the objective."""
    gradients = []
    for tokens in rows:
        t = torch.tensor([token[0] for token in tokens], dtype=torch.float64, requires_grad=True)
        i = torch.tensor([token[1] for token in tokens], dtype=torch.float64)
        each = objective(t, i, tokens[0][2])
        match aggregation:
            case "token":
                loss = -each.sum() / sum(map(len, rows))
            case "sequence":
                loss = -each.mean() / len(rows)
            case "prompt":
                loss = -each.sum() / (group_tokens(rows)[len(gradients)] * (len(rows) // 2))
            case _:
                loss = -each.sum() / (constant * len(rows))
        (gradient,) = torch.autograd.grad(loss, t)
        gradients.append(gradient.tolist())
    return gradients


CASES: list[tuple[dict[str, Any], Objective]] = [
    ({"type": "ppo"}, clipped(0.2, 0.2)),
    ({"type": "ppo", "clip_low": 0.2, "clip_high": 0.28}, clipped(0.2, 0.28)),
    ({"type": "ppo", "dual_clip": 3.0}, clipped(0.2, 0.2, 3.0)),
    ({"type": "ppo", "aggregation": "sequence"}, clipped(0.2, 0.2)),
    ({"type": "ppo", "aggregation": "constant", "constant_tokens": 16}, clipped(0.2, 0.2)),
    ({"type": "gspo"}, gspo(3e-4, 4e-4)),
    ({"type": "gspo", "clip_low": 0.5, "clip_high": 0.5}, gspo(0.5, 0.5)),
    ({"type": "cispo"}, cispo(1.0, 4.0)),
    ({"type": "cispo", "clip_low": 0.2, "clip_high": 0.3}, cispo(0.2, 0.3)),
    ({"type": "ipo", "kl_tau": 0.0}, inside(0.1)),
    ({"type": "ipo", "kl_tau": 0.0, "ipo_threshold": 0.3}, inside(0.3)),
    (
        {"type": "ipo", "kl_tau": 0.0, "ipo_threshold": 0.3, "max_importance_ratio": 1.2},
        capped(lambda t, i, _: (t.exp() - i.exp()).abs() <= 0.3, 1.2),
    ),
    (
        {"type": "ppo", "max_importance_ratio": 1.5},
        capped(lambda t, i, a: torch.exp(t - i) <= 1.2 if a > 0 else torch.exp(t - i) >= 0.8, 1.5),
    ),
    (
        {"type": "importance_sampling", "correction": [{"type": "token_mask", "low": 0.2, "high": 5.0}]},
        capped(lambda t, i, _: (torch.exp(t - i) >= 0.2) & (torch.exp(t - i) <= 5.0), 5.0),
    ),
    ({"type": "importance_sampling"}, importance),
    ({"type": "importance_sampling", "aggregation": "sequence"}, importance),
    ({"type": "importance_sampling", "aggregation": "prompt"}, importance),
    ({"type": "gspo", "aggregation": "prompt", "clip_low": 0.2, "clip_high": 0.2}, gspo(0.2, 0.2)),
    ({"type": "importance_sampling", "correction": [{"type": "token_tis"}]}, reinforce_tis(2.0)),
    ({"type": "ppo", "correction": [{"type": "token_tis", "high": 1.5}]}, reinforce_tis(1.5)),
]


@pytest.mark.parametrize(("keys", "objective"), CASES, ids=[json.dumps(keys) for keys, _ in CASES])
def test_the_gradient_is_that_of_the_papers_objective(keys: dict[str, Any], objective: Objective) -> None:
    config = LossConfig.model_validate(keys)
    _, gradients = found(ROWS, config)
    wanted = expected(ROWS, objective, aggregation=config.aggregation, constant=config.constant_tokens or 1)
    for got, want in zip(gradients, wanted, strict=True):
        assert got == pytest.approx(want, abs=1e-12)
    assert any(value for row in wanted for value in row)


def test_every_loss_has_a_case() -> None:
    assert {keys["type"] for keys, _ in CASES} | {"default"} == LOSSES.keys()


OF_PRESETS: dict[str, tuple[Objective, str]] = {
    "grpo": (clipped(0.2, 0.2), "sequence"),
    "dr_grpo": (clipped(0.2, 0.2), "constant"),
    "dapo": (clipped(0.2, 0.28), "token"),
    "gspo": (gspo(3e-4, 4e-4), "sequence"),
    "cispo": (cispo(1.0, 4.0), "token"),
    "rloo": (importance, "sequence"),
    "opo": (importance, "token"),
    "reinforce_pp": (clipped(0.2, 0.2), "token"),
    "max_rl": (importance, "token"),
    "opd": (importance, "token"),
    "opsd": (importance, "token"),
}
"""Objective and aggregation as docs/algorithms.md says of each preset; `constant` divides by `seq_len`."""


@pytest.mark.parametrize("preset", PRESETS)
def test_the_gradient_of_a_preset_is_that_of_its_papers_objective(preset: str) -> None:
    teacher = {"algo": {"teacher": {"name": "t", "base_url": ["http://127.0.0.1:1/v1"]}}} if preset == "opd" else {}
    whole = document()
    whole = {**whole, "seq_len": 16, "algo": {"preset": preset}, "orchestrator": whole["orchestrator"] | teacher}
    config = validate_document(whole).trainer.loss
    objective, aggregation = OF_PRESETS[preset]
    _, gradients = found(ROWS, config)
    for got, want in zip(gradients, expected(ROWS, objective, aggregation=aggregation, constant=16), strict=True):
        assert got == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_on_policy_every_loss_is_reinforce(name: str) -> None:
    """Where both policies are the same, the multiplier is 1 and nothing is clipped."""
    rows = [[(t, t, advantage) for t, _, advantage in tokens] for tokens in ROWS]
    made = LOSSES[name](inputs_of(rows), LossConfig.model_validate({"type": name}))
    assert isinstance(made, Multiplier) and not made.low.any() and not made.high.any()
    mask = inputs_of(rows).loss_mask
    assert made.factor[mask].tolist() == pytest.approx([1.0] * int(mask.sum())) and not made.factor[~mask].any()


def test_the_value_is_that_of_the_objective_by_hand() -> None:
    """One token, r = 2, A = 1, clipped at 1.2 from above: dropped here, so its value is 0 and its gradient is 0."""
    rows: Rows = [[(0.0, -0.6931471805599453, 1.0)], [(-0.6931471805599453, 0.0, 1.0)]]
    loss, gradients = found(rows, LossConfig.model_validate({"type": "ppo"}))
    assert loss == pytest.approx(-0.5 / 2) and gradients[0] == [0.0] and gradients[1] == pytest.approx([-0.25])
    loss, gradients = found(rows, LossConfig.model_validate({"type": "cispo", "clip_low": 0.2, "clip_high": 0.2}))
    assert loss == pytest.approx(-(1.2 + 0.8) / 2)
    assert [gradients[0][0], gradients[1][0]] == pytest.approx([-0.6, -0.4])


@pytest.mark.parametrize(
    ("correction", "factors"),
    [
        ({"type": "token_tis", "high": 2.0}, [0.5, 2.0, 2.0]),
        ({"type": "icepop", "low": 0.4, "high": 5.0}, [0.5, 2.0, 4.0]),
        ({"type": "icepop", "low": 0.5, "high": 3.0}, [0.5, 2.0, 0.0]),
        ({"type": "token_mask", "low": 0.6, "high": 3.0}, [0.0, 1.0, 0.0]),
        ({"type": "sequence_tis", "high": 3.0}, [3.0, 3.0, 3.0]),
        ({"type": "sequence_mask", "low": 0.5, "high": 5.0}, [1.0, 1.0, 1.0]),
        ({"type": "sequence_mask", "low": 0.5, "high": 3.0}, [0.0, 0.0, 0.0]),
        ({"type": "geometric_mask", "low": 1.5, "high": 1.6}, [1.0, 1.0, 1.0]),
        ({"type": "geometric_mask"}, [0.0, 0.0, 0.0]),
    ],
)
def test_corrections_by_hand(correction: dict[str, Any], factors: list[float]) -> None:
    """Ratios 1/2, 2 and 4: their product is 4, their geometric mean 1.587."""
    rows: Rows = [[(0.0, 0.6931471805599453, 1.0), (0.0, -0.6931471805599453, 1.0), (0.0, -1.3862943611198906, 1.0)]]
    config = LossConfig.model_validate({"type": "importance_sampling", "correction": [correction]})
    is_mask = correction["type"].endswith("_mask")
    wanted = [factor * ratio for factor, ratio in zip(factors, [0.5, 2.0, 4.0], strict=True)] if is_mask else factors
    _, gradients = found(rows, config)
    assert [-3 * value for value in gradients[0]] == pytest.approx(wanted)


def test_a_masked_token_may_have_an_infinite_ratio() -> None:
    rows: Rows = [[(0.0, -800.0, 1.0), (-1.0, -1.0, 1.0)]]
    config = LossConfig.model_validate({"type": "importance_sampling", "correction": [{"type": "token_mask"}]})
    loss, gradients = found(rows, config)
    assert loss == pytest.approx(-0.5) and gradients[0] == [0.0, -0.5]


@given(st.permutations(range(len(ROWS))), st.integers(1, 3), st.sampled_from(CASES))
def test_no_layout_of_the_batch_changes_the_gradient(
    order: list[int], cut: int, case: tuple[dict[str, Any], Objective]
) -> None:
    """Other orders of the samples, and the batch in two micro-batches or on two ranks."""
    config = LossConfig.model_validate(case[0])
    whole = dict(enumerate(found(ROWS, config)[1]))
    counted = divisor(config, num_tokens=sum(map(len, ROWS)), num_samples=len(ROWS), num_groups=len(ROWS) // 2)
    tokens = group_tokens(ROWS)
    for part in (order[:cut], order[cut:]):
        inputs = inputs_of([ROWS[at] for at in part], width=9)
        inputs = replace(inputs, group_tokens=torch.tensor([tokens[at] for at in part])[:, None])
        total_loss(token_losses(inputs, config), rl_divisor=counted, num_ce_tokens=0).backward()
        assert inputs.trainer_logprobs.grad is not None
        for row, at in enumerate(part):
            got = inputs.trainer_logprobs.grad[row, 1 : len(ROWS[at]) + 1].tolist()
            assert got == pytest.approx(whole[at], abs=1e-15)


def document(**loss: Any) -> dict[str, Any]:
    orchestrator = {"rollouts_per_example": 2, "env": [{"id": "e"}]}
    return {"model": {"name": "gpt2"}, "orchestrator": orchestrator, "trainer": {"loss": loss}}


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        ({"type": "gspo", "aggregation": "token"}, "must be sequence, constant or prompt for gspo"),
        ({"type": "gspo", "correction": [{"type": "token_mask"}]}, "corrects single tokens, and gspo has one ratio"),
        ({"type": "cispo", "correction": [{"type": "token_tis"}]}, "corrects twice: cispo"),
        ({"correction": [{"type": "icepop"}]}, "corrects twice: default"),
        (
            {"type": "ppo", "correction": [{"type": "token_tis"}, {"type": "icepop"}]},
            "weighs by the same ratio again",
        ),
        ({"type": "ppo", "correction": [{"type": "token_mask", "low": 3.0}]}, "must be at most `high`"),
        ({"aggregation": "constant"}, "is required for constant"),
        ({"constant_tokens": 5}, "constant_tokens"),
        ({"clip_high": 0.3}, "has no meaning for default"),
        ({"type": "cispo", "dual_clip": 3.0}, "has no meaning for cispo"),
        ({"type": "ppo", "kl_tau": 0.1}, "has no meaning for ppo"),
        ({"type": "sapo"}, "type"),
        ({"type": "grpo"}, "prime-rl's grpo is not here: take default, ipo, or importance_sampling with"),
        ({"clip_ratio": 8.0}, "is no part of any loss here"),
        ({"type": "ppo", "ipo_threshold": 0.2}, "has no meaning for ppo"),
    ],
)
def test_contradictions_are_refused_with_the_reason(loss: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidSpecError, match=says):
        validate_document(document(**loss))


def test_what_a_loss_became_stands_in_the_resolved_config() -> None:
    loss = validate_document(document(type="gspo")).trainer.loss
    assert (loss.clip_low, loss.clip_high, loss.aggregation) == (3e-4, 4e-4, "sequence")
    again = validate_document(json.loads(validate_document(document(type="gspo")).resolved_json()))
    assert again.trainer.loss == loss
    icepop = CorrectionConfig.model_validate({"type": "icepop"})
    assert (icepop.low, icepop.high) == (0.5, 5.0)
