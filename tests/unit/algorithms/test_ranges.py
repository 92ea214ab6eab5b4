"""Where the range of rewards counts, it is the environment's, and a reward outside of it is named."""

import json
from typing import Any

import numpy as np
import pytest

from millrace.algorithms import RewardRanges, make_algorithms
from millrace.config.load import validate_document
from millrace.config.sections.orchestrator import OrchestratorConfig
from millrace.custom_code import EVERYTHING
from millrace.errors import InvalidSpecError
from millrace.rollouts.types import Purpose, Rollout, RolloutStatus, Sample


def settings(**keys: Any) -> OrchestratorConfig:
    envs = [{"id": "plain"}, {"id": "signed", "reward_range": [-1, 1]}]
    return validate_document(
        json.dumps({"orchestrator": {"env": envs, "rollouts_per_example": 4, "batch_size": 8, **keys}})
    ).orchestrator


def rollout(env: str, reward: float, *, ordinal: int = 7, member: int = 0) -> Rollout:
    sample = Sample(
        token_ids=np.arange(2, dtype=np.int32),
        loss_mask=np.ones(2, np.uint8),
        inference_logprobs=np.zeros(2, np.float32),
    )
    return Rollout(
        run_uid="r",
        purpose=Purpose.TRAIN,
        ordinal=ordinal,
        member=member,
        attempt=0,
        group_size=4,
        env=env,
        task_index=0,
        task_id="0",
        status=RolloutStatus.OK,
        samples=(sample,),
        reward=reward,
    )


def group(env: str, *rewards: float) -> list[Rollout]:
    return [rollout(env, reward, member=member) for member, reward in enumerate(rewards)]


@pytest.mark.parametrize(
    ("env", "rewards", "found"),
    [
        ("plain", [0.0, 0.0], "hard"),
        ("plain", [1.0, 1.0], "easy"),
        ("plain", [0.7 + 0.2 + 0.1, 1.0], "easy"),
        ("plain", [0.0, 1.0], ""),
        ("plain", [0.5, 0.5], ""),
        ("signed", [-1.0, 1.0], ""),
        ("signed", [0.0, 0.0], ""),
        ("signed", [-1.0, -1.0], "hard"),
        ("signed", [1.0, 1.0], "easy"),
        ("unknown", [1.0, 1.0], "easy"),
    ],
)
def test_a_group_is_easy_or_hard_at_the_ends_of_its_environments_range(
    env: str, rewards: list[float], found: str
) -> None:
    assert RewardRanges.of(settings().env).extreme(group(env, *rewards)) == found


def test_max_rl_weighs_by_the_share_of_the_range() -> None:
    """-1 and 1 are 0 and 1 of a reward that is known to be so; else their mean is near 0 and divides by nothing."""
    algorithms = make_algorithms(settings(algo={"type": "max_rl"}), EVERYTHING)
    for env, rewards in (("plain", [1.0, 0.0, 0.0, 0.0]), ("signed", [1.0, -1.0, -1.0, -1.0])):
        credits = algorithms[env].credit(group(env, *rewards))
        assert [float(credit.advantages[0]) for [credit] in credits] == [3.0, -1.0, -1.0, -1.0]


@pytest.mark.parametrize("reward", [-1.0, 1.001, 1e6])
def test_a_reward_outside_of_its_range_is_named(reward: float) -> None:
    wrong = [*group("plain", 0.0, 1.0), rollout("plain", reward, ordinal=9, member=3)]
    ranges = RewardRanges.of(settings().env)
    for ask in (ranges.extreme, make_algorithms(settings(algo={"type": "max_rl"}), EVERYTHING)["plain"].credit):
        with pytest.raises(InvalidSpecError) as caught:
            ask(wrong)
        assert caught.value.reason == "REWARD_OUT_OF_RANGE"
        for said in ("orchestrator.env.reward_range", "[0, 1]", "'plain'", "ordinal 9, member 3", f"is {reward:g}"):
            assert said in str(caught.value)


def test_nothing_else_asks_for_the_range() -> None:
    credits = make_algorithms(settings(), EVERYTHING)["plain"].credit(group("plain", 5.0, -5.0))
    assert [float(credit.advantages[0]) for [credit] in credits] == [5.0, -5.0]


@pytest.mark.parametrize("bad", [[1, 0], [0, 0], [0], [0, 1, 2], "wide"])
def test_a_range_has_two_ends(bad: Any) -> None:
    with pytest.raises(InvalidSpecError, match=r"env\[0\].reward_range"):
        settings(env=[{"id": "plain", "reward_range": bad}])
