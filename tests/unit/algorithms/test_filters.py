"""Filters: what they find, and what becomes of the rollouts that they found."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from millrace.algorithms import Credited, Filtered, Grpo, ReinforcePlusPlus, Thresholded, count_found, make_algorithms
from millrace.config.load import validate_document
from millrace.config.sections.buffer import FilterConfig
from millrace.custom_code import CustomCode
from millrace.errors import InvalidSpecError
from millrace.orchestrator.drive.batch_writer import cut, teaches
from millrace.rollouts.types import Rollout
from millrace_testing.orchestrator.builders import make_play, make_rollout


def config(**keys: Any) -> FilterConfig:
    return FilterConfig.model_validate(keys)


def rollouts(*rewards: float, truncated: int | None = 2) -> list[Rollout]:
    made = [make_rollout(0, member, reward=reward, group_size=len(rewards)) for member, reward in enumerate(rewards)]
    return [replace(each, is_truncated=each.member == truncated) for each in made]


def sampled(logprobs: list[float], *, ids: list[int] | None = None, prompt: int = 2) -> Rollout:
    rollout = make_rollout(0, 0)
    length = prompt + len(logprobs)
    sample = replace(
        rollout.samples[0],
        token_ids=np.asarray([200_000] * prompt + (ids or [5] * len(logprobs)), np.int32),
        loss_mask=np.asarray([0] * prompt + [1] * len(logprobs), np.uint8),
        inference_logprobs=np.asarray([-99.0] * prompt + logprobs, np.float32),
        policy_spans=(),
    )
    assert len(sample.token_ids) == length
    return replace(rollout, samples=(sample,))


def advantages(group: list[Rollout], *filters: FilterConfig) -> list[float | None]:
    """Of each rollout; None where nothing of it is trained."""
    found = Filtered(Grpo(), filters).credit(group)
    return [None if credits[0].trains_nothing else float(credits[0].advantages.max()) for credits in found]


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({"action": "count"}, [0.0, 1.0, -1.0]),
        ({"action": "mask"}, [0.0, 1.0, None]),
        ({"action": "drop"}, [-0.5, 0.5, None]),
        ({"action": "penalise", "penalty": 3.0}, [1.0, 2.0, -3.0]),
    ],
)
def test_what_becomes_of_a_rollout_by_hand(keys: dict[str, Any], wanted: list[float | None]) -> None:
    """Rewards 1, 2 and 0, the last one truncated: the mean is 1, 1.5 without it, and 0 with it at -3."""
    group = rollouts(1.0, 2.0, 0.0)
    found = Filtered(Grpo(), [config(type="truncated", **keys)]).credit(group)
    means = [float(credit[0].advantages[-1]) for credit in found]
    assert means == pytest.approx([each or 0.0 for each in wanted])
    assert [credit[0].trains_nothing for credit in found] == [each is None for each in wanted]


def test_a_filter_that_finds_nothing_changes_nothing() -> None:
    group = rollouts(1.0, 2.0, 0.0, truncated=None)
    found, plain = Filtered(Grpo(), [config(type="truncated", action="drop")]).credit(group), Grpo().credit(group)
    assert all(np.array_equal(a[0].advantages, b[0].advantages) for a, b in zip(found, plain, strict=True))


@pytest.mark.parametrize(
    ("logprobs", "is_found"),
    [
        ([-0.001] * 4, True),
        ([-3.0, *[-0.001] * 4, -3.0], True),
        ([-0.001] * 3, False),
        ([*[-0.001] * 3, -0.2, *[-0.001] * 3], False),
    ],
)
def test_repetition_is_a_row_of_sure_tokens(logprobs: list[float], is_found: bool) -> None:
    found = count_found([sampled(logprobs)], [config(type="repetition", window=4)])
    assert found == ({"repetition": 1} if is_found else {})


@pytest.mark.parametrize(
    ("token", "logprob", "is_found"), [(100_001, -14.0, True), (100_000, -14.0, False), (100_001, -13.8, False)]
)
def test_gibberish_is_a_rare_token_that_was_very_unlikely(token: int, logprob: float, is_found: bool) -> None:
    found = count_found([sampled([-1.0, logprob], ids=[5, token])], [config(type="gibberish")])
    assert found == ({"gibberish": 1} if is_found else {}), "and tokens of the prompt count for nothing"


def finished(algorithm: Any, members: list[Rollout]) -> list[Any]:
    credits = algorithm.credit(members)
    items = [
        Credited(rollout=r, sample=r.samples[0], credit=c[0], num_tokens=r.samples[0].num_tokens)
        for r, c in zip(members, credits, strict=True)
    ]
    return algorithm.finish(items)


def test_the_deviation_of_a_batch_is_that_of_the_rewards_that_were_compared() -> None:
    """Rewards 1, 2 and 9, the last one 6 lower: 1, 2 and 3, which deviate by 1."""
    penalised = Filtered(Grpo(std_norm="batch"), [config(type="truncated", action="penalise", penalty=6.0)])
    found = [float(credit.advantages[-1]) for credit in finished(penalised, rollouts(1.0, 2.0, 9.0))]
    assert found == pytest.approx([-1.0, 0.0, 1.0], abs=1e-5)


def test_what_is_left_out_has_no_part_in_what_is_computed_over_a_batch() -> None:
    group = rollouts(1.0, 2.0, 9.0)
    with_filter = finished(Filtered(ReinforcePlusPlus(), [config(type="truncated", action="drop")]), group)
    without = finished(ReinforcePlusPlus(), group[:2])
    assert [credit.advantages.tolist() for credit in with_filter[:2]] == [
        credit.advantages.tolist() for credit in without
    ]
    assert with_filter[2].trains_nothing


def test_a_batch_counts_and_leaves_out_what_was_found() -> None:
    play = make_play(0, group_size=3)
    for rollout in rollouts(1.0, 2.0, 0.0):
        play.add(rollout)
    filters = [config(type="truncated", action="mask"), config(type="repetition", action="count", window=2)]
    algorithms = {play.task.env: Filtered(Grpo(), filters)}
    batch = cut([play], algorithms, step=0, filter_zero_advantages=False, seq_len=64, filters=filters)
    assert [sample.member for sample in batch.samples] == [0, 1] and batch.filtered == {"truncated": 1}
    assert batch.rewards == [1.0, 2.0, 0.0], "its reward is measured all the same"


@pytest.mark.parametrize(
    ("algo", "filters", "says"),
    [
        ("grpo", {"type": "truncated", "penalty": 2.0}, "penalty: has no meaning for mask, only for penalise"),
        ("grpo", {"type": "truncated", "window": 5}, "window: has no meaning for truncated"),
        ("grpo", {"type": "no_such_filter"}, "type"),
        ("opd", {"type": "truncated", "action": "penalise"}, "lowers rewards, and opd has none"),
        ("max_rl", {"type": "truncated", "action": "penalise"}, "max_rl divides by their mean"),
    ],
)
def test_contradictions_are_refused_with_the_reason(algo: str, filters: dict[str, Any], says: str) -> None:
    orchestrator = {"algo": {"type": algo}, "rollouts_per_example": 2, "env": [{"id": "e"}], "filters": [filters]}
    with pytest.raises(InvalidSpecError, match=says):
        validate_document({"model": {"name": "gpt2"}, "orchestrator": orchestrator})


def test_what_an_algorithm_does_not_go_with_is_refused_for_one_environment_too() -> None:
    filters = [{"type": "truncated", "action": "penalise"}]
    env = [{"id": "e"}, {"id": "f", "algo": {"type": "max_rl"}}]
    orchestrator = {"rollouts_per_example": 2, "env": env, "filters": filters}
    with pytest.raises(InvalidSpecError, match="max_rl divides by their mean"):
        validate_document({"model": {"name": "gpt2"}, "orchestrator": orchestrator})


def test_tokens_with_small_advantages_are_not_trained_on_by_hand() -> None:
    """Rewards 1, 0.5 and 0.45: the mean is 0.65, so the advantages are 0.35, -0.15 and -0.2."""
    credits = [each[0] for each in Thresholded(Grpo(), 0.17).credit(rollouts(1.0, 0.5, 0.45, truncated=None))]
    assert [each.trains_nothing for each in credits] == [False, True, False]
    assert [
        round(float(each.advantages.sum() / each.rl_weights.sum()), 6) for each in credits if not each.trains_nothing
    ] == [
        0.35,
        -0.2,
    ]


def test_a_group_of_small_advantages_is_left_out_or_replaced() -> None:
    group = make_play(0)
    for rollout in rollouts(0.5, 0.55, truncated=None):
        group.add(rollout)
    algorithm = Thresholded(Grpo(), 0.03)
    assert teaches(group, Grpo(), seq_len=64) and not teaches(group, algorithm, seq_len=64)
    batch = cut([group], {group.task.env: algorithm}, step=0, filter_zero_advantages=True, seq_len=64)
    assert batch.samples == [] and batch.resolved[0].reason == "zero_advantage"


def test_the_bound_is_of_its_environment() -> None:
    envs = [{"id": "a", "min_abs_advantage": 0.1}, {"id": "b"}, {"id": "c", "min_abs_advantage": 0.1}]
    document = {"model": {"name": "m"}, "orchestrator": {"rollouts_per_example": 2, "env": envs}}
    made = make_algorithms(validate_document(document).orchestrator, CustomCode())
    assert isinstance(made["a"], Thresholded) and made["a"] is made["c"] and isinstance(made["b"], Grpo)
    document["orchestrator"]["algo"] = {"type": "opd", "teacher": {"name": "t", "base_url": "http://e/v1"}}
    with pytest.raises(InvalidSpecError, match="has no meaning for opd, which learns from every token"):
        validate_document(document)
