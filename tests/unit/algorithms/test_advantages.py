"""Every algorithm that compares rewards, against its paper's formula in exact fractions, and by hand."""

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.algorithms import (
    ADVANTAGES,
    ALGORITHMS,
    Credited,
    Echo,
    Grpo,
    MaxRl,
    Opo,
    ReinforcePlusPlus,
    Rloo,
    ScalarAdvantage,
)
from millrace.algorithms.base import OverlongPenalty
from millrace.config.filling import PRESETS
from millrace.config.load import validate_document
from millrace.config.sections.algo import COMPARING, DISTILLING, PER_AGENT, AlgoConfig
from millrace.errors import InvalidSpecError
from millrace.rollouts.types import Rollout, Sample
from millrace_testing.orchestrator.builders import make_rollout

Group = list[tuple[Fraction, int]]
"""Reward and sampled tokens of each rollout."""


def rollout(reward: float, length: int, *, ordinal: int = 0, member: int = 0) -> Rollout:
    """Return a rollout of one prompt token and `length` sampled ones."""
    sample = Sample(
        token_ids=np.arange(length + 1, dtype=np.int32),
        loss_mask=np.asarray([0, *[1] * length], dtype=np.uint8),
        inference_logprobs=np.asarray([0, *[-1] * length], dtype=np.float32),
    )
    return replace(make_rollout(ordinal, member, reward=reward), samples=(sample,))


def advantages(algorithm: ScalarAdvantage, group: Group) -> list[float]:
    """Return the advantage of each rollout's sampled tokens, which are all equal, and 0 at the prompt."""
    credits = algorithm.credit([rollout(float(reward), length) for reward, length in group])
    for (credit,) in credits:
        assert credit.advantages.dtype == np.float32 and credit.advantages[0] == 0
        assert len(set(credit.advantages[1:].tolist())) == 1
    return [float(credit.advantages[1]) for (credit,) in credits]


def mean(values: list[Fraction]) -> Fraction:
    return sum(values, Fraction()) / len(values)


def grpo(group: Group) -> list[float]:
    rewards = [reward for reward, _ in group]
    return [float(reward - mean(rewards)) for reward in rewards]


def grpo_by_deviation(group: Group) -> list[float]:
    rewards = [reward for reward, _ in group]
    squares = sum((reward - mean(rewards)) ** 2 for reward in rewards)
    deviation = math.sqrt(squares / (len(rewards) - 1))
    return [float(reward - mean(rewards)) / (deviation + 1e-6) for reward in rewards]


def rloo(group: Group) -> list[float]:
    rewards = [reward for reward, _ in group]
    others = [[reward for at, reward in enumerate(rewards) if at != own] for own in range(len(rewards))]
    return [float(reward - mean(rest)) for reward, rest in zip(rewards, others, strict=True)]


def opo(group: Group) -> list[float]:
    total = sum(length for _, length in group)
    baseline = sum((reward * length for reward, length in group), Fraction()) / total
    return [float(reward - baseline) for reward, _ in group]


def max_rl(group: Group) -> list[float]:
    center = mean([reward for reward, _ in group])
    return [float((reward - center) / center) if center > 0 else 0.0 for reward, _ in group]


FORMULAS: dict[str, tuple[ScalarAdvantage, Callable[[Group], list[float]]]] = {
    "grpo": (Grpo(), grpo),
    "grpo, group deviation": (Grpo(std_norm="group"), grpo_by_deviation),
    "grpo, leave one out": (Grpo(leave_one_out=True), rloo),
    "rloo": (Rloo(), rloo),
    "opo": (Opo(), opo),
    "max_rl": (MaxRl(), max_rl),
    "echo": (Echo(weights={"tool": 0.1}), grpo),
    "reinforce_pp, before the batch": (ReinforcePlusPlus(), grpo),
}

GROUPS = st.lists(
    st.tuples(st.integers(-400, 400).map(lambda n: Fraction(n, 100)), st.integers(1, 9)), min_size=2, max_size=9
)


@pytest.mark.parametrize("name", FORMULAS)
@given(group=GROUPS)
def test_advantages_are_those_of_the_formula(name: str, group: Group) -> None:
    algorithm, formula = FORMULAS[name]
    expected = formula(group)
    if len({reward for reward, _ in group}) == 1:
        expected = [0.0] * len(group)  # no formula learns from equal rewards; exactly, whatever rounding says
    if not any(name == "max_rl" and abs(mean([reward for reward, _ in group])) < 1e-3 for _ in group):
        np.testing.assert_allclose(advantages(algorithm, group), expected, rtol=2e-6, atol=2e-7)


def test_every_algorithm_has_a_formula() -> None:
    assert tuple(ADVANTAGES) == COMPARING and ALGORITHMS.keys() == {*COMPARING, *PER_AGENT, *DISTILLING}
    assert {type(algorithm) for algorithm, _ in FORMULAS.values()} == set(ADVANTAGES.values())


def test_by_hand() -> None:
    group: Group = [(Fraction(1), 2), (Fraction(0), 6), (Fraction(0), 2), (Fraction(1), 10)]
    assert advantages(Grpo(), group) == [0.5, -0.5, -0.5, 0.5]
    # Three others: 1 - 1/3 and 0 - 2/3.
    assert advantages(Rloo(), group) == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])
    # (2 * 1 + 10 * 1) / 20 = 0.6
    assert advantages(Opo(), group) == pytest.approx([0.4, -0.6, -0.6, 0.4])
    # Pass rate 1/2: 1 / (1/2) - 1 for what passed, -1 for what failed.
    assert advantages(MaxRl(), group) == [1.0, -1.0, -1.0, 1.0]
    # Deviation of 1, 0, 0, 1: sqrt(1/3).
    assert advantages(Grpo(std_norm="group"), group) == pytest.approx([0.866, -0.866, -0.866, 0.866], abs=1e-4)


OF_PRESETS = {
    "grpo": grpo_by_deviation,
    "dr_grpo": grpo,
    "dapo": grpo_by_deviation,
    "gspo": grpo_by_deviation,
    "cispo": grpo_by_deviation,
    "rloo": rloo,
    "opo": opo,
    "reinforce_pp": grpo,  # before it is whitened over the batch, below
    "max_rl": max_rl,
}
"""As docs/algorithms.md says of each preset; opd and opsd compare no rewards (test_opd.py)."""


def test_every_preset_has_a_formula() -> None:
    assert {*OF_PRESETS, *DISTILLING} == PRESETS.keys()


@pytest.mark.parametrize("preset", OF_PRESETS)
@settings(max_examples=20)
@given(group=GROUPS)
def test_the_advantages_of_a_preset_are_those_of_its_formula(preset: str, group: Group) -> None:
    config = validate_document({**DOCUMENT, "algo": {"preset": preset}}).orchestrator.algo
    expected = OF_PRESETS[preset](group)
    if len({reward for reward, _ in group}) == 1:
        expected = [0.0] * len(group)
    if preset != "max_rl" or abs(mean([reward for reward, _ in group])) >= 1e-3:
        found = advantages(ADVANTAGES[config.type].from_config(config), group)
        np.testing.assert_allclose(found, expected, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("algorithm", [each for each, _ in FORMULAS.values()])
@given(reward=st.floats(-1e6, 1e6), lengths=st.lists(st.integers(1, 5), min_size=1, max_size=12))
def test_equal_rewards_and_groups_of_one_give_exactly_nothing(algorithm, reward, lengths) -> None:
    credits = algorithm.credit([rollout(reward, length) for length in lengths])
    assert not any(credit.advantages.any() for (credit,) in credits)


def finished(algorithm: ScalarAdvantage, groups: list[Group]) -> list[np.ndarray]:
    items = []
    for ordinal, group in enumerate(groups):
        rollouts = [rollout(float(r), n, ordinal=ordinal, member=member) for member, (r, n) in enumerate(group)]
        for each, (credit,) in zip(rollouts, algorithm.credit(rollouts), strict=True):
            items.append(Credited(rollout=each, sample=each.samples[0], credit=credit, num_tokens=99))
    return [credit.advantages for credit in algorithm.finish(items)]


@given(groups=st.lists(GROUPS, min_size=1, max_size=4))
def test_reinforce_pp_whitens_over_the_tokens_of_the_batch(groups: list[Group]) -> None:
    rows = finished(ReinforcePlusPlus(), groups)
    assert all(row[0] == 0 for row in rows), "the prompt is no token of the policy"
    tokens = [a for group in groups for a, (_, n) in zip(grpo(group), group, strict=True) for _ in range(n)]
    center = sum(tokens) / len(tokens)
    variance = sum((a - center) ** 2 for a in tokens) / (len(tokens) - 1)
    expected = [(a - center) / math.sqrt(variance + 1e-8) for a in tokens]
    np.testing.assert_allclose(np.concatenate([row[1:] for row in rows]), expected, rtol=1e-4, atol=1e-5)
    if variance > 1e-3:
        whitened = np.concatenate([row[1:] for row in rows]).astype(np.float64)
        assert abs(whitened.mean()) < 1e-5 and whitened.var(ddof=1) == pytest.approx(1, abs=1e-4)


def test_the_deviation_of_a_batch_is_that_of_all_its_rewards() -> None:
    groups: list[Group] = [[(Fraction(0), 1), (Fraction(1), 1)], [(Fraction(2), 3), (Fraction(5), 1)]]
    rows = finished(Grpo(std_norm="batch"), groups)
    deviation = math.sqrt(sum((r - 2) ** 2 for r in (0, 1, 2, 5)) / 3)
    assert [float(row[1]) for row in rows] == pytest.approx(
        [-0.5 / deviation, 0.5 / deviation, -1.5 / deviation, 1.5 / deviation]
    )


def test_long_responses_are_punished_as_in_dapo() -> None:
    """The limits of the paper: 16,384 tokens that are free, a buffer of 4,096."""
    penalty = OverlongPenalty(max_tokens=20480, buffer_tokens=4096)
    lengths = np.asarray([1, 16384, 16385, 18432, 20480, 30000])
    assert penalty(lengths).tolist() == [0, 0, -1 / 4096, -0.5, -1, -1]
    shaped = Grpo(overlong=OverlongPenalty(max_tokens=4, buffer_tokens=2, factor=0.5))
    assert advantages(shaped, [(Fraction(1), 2), (Fraction(1), 4)]) == [0.25, -0.25]


DOCUMENT = {"orchestrator": {"env": [{"id": "reverse-text"}], "batch_size": 8, "rollouts_per_example": 4}}


def with_algo(algo: dict, /, **env: object) -> dict:
    orchestrator = {**DOCUMENT["orchestrator"], "algo": algo, "env": [{"id": "reverse-text", **env}]}
    return {"orchestrator": orchestrator}


@pytest.mark.parametrize("name", ADVANTAGES)
def test_the_config_names_every_algorithm(name: str) -> None:
    config = validate_document(with_algo({"type": name}))
    algo = config.orchestrator.algo
    assert isinstance(ADVANTAGES[name].from_config(algo), ADVANTAGES[name])
    with pytest.raises(InvalidSpecError, match="must be at least 2 for " + name):
        validate_document({"orchestrator": {**with_algo({"type": name})["orchestrator"], "rollouts_per_example": 1}})


def test_an_environment_compares_no_groups_of_one_either() -> None:
    document = with_algo({"type": "custom", "import_path": "my_advantages:fn"}, algo={"type": "opo"})
    validate_document(document)
    document["orchestrator"]["rollouts_per_example"] = 1
    with pytest.raises(InvalidSpecError, match="must be at least 2 for opo"):
        validate_document(document)


def test_a_punishment_needs_a_limit_that_it_fits_below() -> None:
    with pytest.raises(InvalidSpecError, match=r"overlong\.max_tokens: is required"):
        validate_document(with_algo({"overlong": {"buffer_tokens": 16}}))
    validate_document(with_algo({"overlong": {"buffer_tokens": 16, "max_tokens": 64}}))
    with pytest.raises(InvalidSpecError, match="must be at most"):
        validate_document(with_algo({"overlong": {"buffer_tokens": 16, "max_tokens": 8}}))
    with pytest.raises(InvalidSpecError, match="has no meaning for max_rl"):
        validate_document(with_algo({"type": "max_rl", "overlong": {"buffer_tokens": 16, "max_tokens": 64}}))


@pytest.mark.parametrize(
    ("name", "says"),
    [("sft", "rollouts of another model are no part of a run")],
)
def test_algorithms_that_are_not_there_are_refused_for_that(name: str, says: str) -> None:
    document = with_algo({"type": name})
    document["orchestrator"]["rollouts_per_example"] = 1
    with pytest.raises(InvalidSpecError, match=says) as raised:
        validate_document(document)
    assert "must be at least 2" not in str(raised.value)


@pytest.mark.parametrize(("key", "value"), [("std_norm", "group"), ("leave_one_out", True)])
def test_what_belongs_to_grpo_is_refused_elsewhere(key: str, value: object) -> None:
    validate_document(with_algo({key: value}))
    with pytest.raises(InvalidSpecError, match="has no meaning for rloo"):
        validate_document(with_algo({"type": "rloo", key: value}))


def test_an_environment_may_have_an_algorithm_of_its_own() -> None:
    config = validate_document(with_algo({"type": "rloo"}, algo={"type": "opo"}))
    assert config.orchestrator.env[0].algo.type == "opo"
    with pytest.raises(InvalidSpecError, match=r"algo\.type: is required"):
        validate_document(with_algo({"type": "rloo", "std_norm": "none"}, algo={"overlong": None}))
    teacher = {"name": "big", "base_url": "http://localhost:1/v1"}
    with pytest.raises(InvalidSpecError, match="has no meaning for opd"):
        validate_document(with_algo({"type": "opd", "teacher": teacher}, algo={"type": "opo"}))
    assert AlgoConfig().type == "grpo"
