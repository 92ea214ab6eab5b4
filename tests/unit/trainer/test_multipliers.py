"""The table of multipliers: at every token the gradient of every loss is -w f A, with f written here once more.

f is computed token by token with floats, not tensors; `test_losses.py` derives the same gradients from the objectives
of the papers.
"""

import inspect
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.config.sections.loss import LossConfig
from millrace.trainer.losses import LOSSES, LossInputs, divisor, token_losses, total_loss

Row = list[tuple[float, float]]
"""Log-probs of the trainer and of the engine at the tokens of one sample."""
Multiplier = Callable[[Row, float], list[float]]


def ratios(row: Row) -> list[float]:
    return [math.exp(t - i) for t, i in row]


def moved(row: Row) -> list[float]:
    return [math.exp(t) - math.exp(i) for t, i in row]


def product(row: Row) -> float:
    return math.exp(sum(t - i for t, i in row))


def geometric(row: Row) -> float:
    return product(row) ** (1 / len(row))


def is_clipped(ratio: float, advantage: float, low: float, high: float) -> bool:
    return (advantage > 0 and ratio > 1 + high) or (advantage < 0 and ratio < 1 - low)


def dppo(row: Row, advantage: float) -> list[float]:
    dropped = [by > 0.2 if advantage > 0 else by < -0.2 for by in moved(row)]
    return [0.0 if drop else r for r, drop in zip(ratios(row), dropped, strict=True)]


def ipo(row: Row, advantage: float) -> list[float]:
    return [r if abs(by) <= 0.1 else 0.0 for r, by in zip(ratios(row), moved(row), strict=True)]


def ppo(low: float, high: float, dual: float = math.inf) -> Multiplier:
    def multiplier(row: Row, advantage: float) -> list[float]:
        return [0.0 if is_clipped(r, advantage, low, high) or (advantage < 0 and r > dual) else r for r in ratios(row)]

    return multiplier


def gspo(low: float, high: float) -> Multiplier:
    def multiplier(row: Row, advantage: float) -> list[float]:
        s = geometric(row)
        return [0.0 if is_clipped(s, advantage, low, high) else s] * len(row)

    return multiplier


def of_ratios(factor: Callable[[float], float]) -> Multiplier:
    return lambda row, advantage: [factor(r) for r in ratios(row)]


def of_sample(factor: Callable[[Row], float]) -> Multiplier:
    return lambda row, advantage: [factor(row)] * len(row)


def masked(keep: Callable[[Row], bool], other: Multiplier) -> Multiplier:
    return lambda row, advantage: [f if keep(row) else 0.0 for f in other(row, advantage)]


def correcting(loss: str, **correction: Any) -> dict[str, Any]:
    return {"type": loss, "correction": [correction]}


IS = of_ratios(lambda r: r)
TABLE: list[tuple[dict[str, Any], Multiplier]] = [
    ({"type": "default", "kl_tau": 0.0}, dppo),
    ({"type": "ipo", "kl_tau": 0.0}, ipo),
    ({"type": "ppo"}, ppo(0.2, 0.2)),
    ({"type": "ppo", "clip_high": 0.28}, ppo(0.2, 0.28)),
    ({"type": "ppo", "dual_clip": 3.0}, ppo(0.2, 0.2, 3.0)),
    ({"type": "gspo"}, gspo(3e-4, 4e-4)),
    ({"type": "cispo"}, of_ratios(lambda r: min(max(r, 0.0), 5.0))),
    ({"type": "importance_sampling"}, IS),
    (correcting("importance_sampling", type="token_tis"), of_ratios(lambda r: min(r, 2.0))),
    (correcting("ppo", type="token_tis", high=1.5), of_ratios(lambda r: min(r, 1.5))),
    (correcting("importance_sampling", type="sequence_tis"), of_sample(lambda row: min(product(row), 5.0))),
    (correcting("ppo", type="icepop"), of_ratios(lambda r: r if 0.5 <= r <= 5.0 else 0.0)),
    (correcting("importance_sampling", type="token_mask"), of_ratios(lambda r: r if 0.5 <= r <= 2.0 else 0.0)),
    (correcting("ppo", type="sequence_mask"), masked(lambda row: 0.5 <= product(row) <= 2.0, ppo(0.2, 0.2))),
    (
        correcting("cispo", type="geometric_mask", low=0.8, high=1.25),
        masked(lambda row: 0.8 <= geometric(row) <= 1.25, of_ratios(lambda r: min(r, 5.0))),
    ),
    (
        correcting("gspo", type="sequence_mask"),
        masked(lambda row: 0.5 <= product(row) <= 2.0, gspo(3e-4, 4e-4)),
    ),
]

LOGPROBS = st.floats(-4.0, -0.01)
ROWS = st.lists(
    st.tuples(
        st.lists(st.tuples(LOGPROBS, LOGPROBS), min_size=1, max_size=5),
        st.floats(0.1, 3.0).flatmap(lambda size: st.sampled_from([size, -size])),
    ),
    min_size=1,
    max_size=4,
)


def test_the_table_has_every_loss_and_each_is_small() -> None:
    assert {keys["type"] for keys, _ in TABLE} == LOSSES.keys()
    for loss in LOSSES.values():
        assert len(inspect.getsource(loss).splitlines()) <= 30, loss


def inputs_of(rows: list[tuple[Row, float]]) -> LossInputs:
    shape = (len(rows), 6)
    columns = [torch.zeros(shape, dtype=torch.float64) for _ in range(3)]
    mask = torch.zeros(shape, dtype=torch.bool)
    for at, (row, advantage) in enumerate(rows):
        for place, (t, i) in enumerate(row, start=1):
            columns[0][at, place], columns[1][at, place], columns[2][at, place] = t, i, advantage
            mask[at, place] = True
    return LossInputs(
        trainer_logprobs=columns[0].requires_grad_(),
        inference_logprobs=columns[1],
        advantages=columns[2],
        loss_mask=mask,
        rl_weights=torch.ones(shape, dtype=torch.float64),
        ce_weights=torch.zeros(shape, dtype=torch.float64),
    )


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
@pytest.mark.parametrize(("keys", "multiplier"), TABLE, ids=[json.dumps(keys) for keys, _ in TABLE])
@settings(max_examples=15)
@given(rows=ROWS)
def test_the_gradient_of_a_token_is_minus_w_f_a(
    keys: dict[str, Any], multiplier: Multiplier, aggregation: str, rows: list[tuple[Row, float]]
) -> None:
    if keys["type"] == "gspo" and aggregation == "token":
        return  # refused: its ratio is that of a whole sample
    constant = {"constant_tokens": 32} if aggregation == "constant" else {}
    config = LossConfig.model_validate({**keys, "aggregation": aggregation, **constant})
    num_tokens = sum(len(row) for row, _ in rows)
    inputs = inputs_of(rows)
    counted = divisor(config, num_tokens=num_tokens, num_samples=len(rows))
    total_loss(token_losses(inputs, config), rl_divisor=counted, num_ce_tokens=0).backward()
    gradient = inputs.trainer_logprobs.grad
    assert gradient is not None
    for at, (row, advantage) in enumerate(rows):
        weight = {
            "token": 1 / num_tokens,
            "sequence": 1 / (len(rows) * len(row)),
            "constant": 1 / (len(rows) * 32),
        }[aggregation]
        wanted = [-weight * f * advantage for f in multiplier(row, advantage)]
        assert gradient[at, 1 : len(row) + 1].tolist() == pytest.approx(wanted, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", ["default", "ipo"])
def test_the_penalty_of_primes_losses_is_the_squared_log_ratio(name: str) -> None:
    """One token, t - i = ln 1.2: kl_tau * 2 * ln 1.2 comes on top of f A."""
    inputs = inputs_of([([(math.log(0.06), math.log(0.05))], 1.0)])
    config = LossConfig.model_validate({"type": name, "kl_tau": 0.5})
    token_losses(inputs, config).rl.sum().backward()
    assert inputs.trainer_logprobs.grad is not None
    assert float(inputs.trainer_logprobs.grad[0, 1]) == pytest.approx(-1.2 + 0.5 * 2 * math.log(1.2))
