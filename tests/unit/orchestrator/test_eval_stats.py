"""The figures of an evaluation, and how long a lost endpoint is tried."""

import itertools

import pytest
from orchestrator_builders import make_rollout

from millrace.orchestrator.eval_stats import figures, pass_at_k
from millrace.orchestrator.eval_tasks import MAX_ATTEMPTS, EvalTask
from millrace.rollouts.types import RolloutStatus


def task(index: int, rewards: list[float]) -> EvalTask:
    made = EvalTask(index, len(rewards))
    for member, reward in enumerate(rewards):
        made.add(make_rollout(index, member, reward=reward, group_size=len(rewards)))
    return made


@pytest.mark.parametrize(("size", "passed", "k"), [(4, 1, 2), (4, 2, 2), (4, 0, 1), (4, 4, 4), (5, 2, 4)])
def test_pass_at_k_counts_every_draw(size: int, passed: int, k: int) -> None:
    draws = list(itertools.combinations([True] * passed + [False] * (size - passed), k))
    assert pass_at_k(size, passed, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_figures_of_two_tasks() -> None:
    found = figures([task(0, [1.0, 0.0]), task(1, [1.0, 1.0])], pass_threshold=1.0)
    assert found["reward/sem"] == pytest.approx(0.25)  # means 0.5 and 1.0: deviation 0.354 over the root of 2
    assert (found["pass@1"], found["pass@2"], found["pass^2"]) == (0.75, 1.0, 0.5)
    assert figures([task(0, [0.5])], pass_threshold=0.5)["pass@1"] == 1.0


def test_a_task_that_an_endpoint_keeps_losing_ends() -> None:
    lost = EvalTask(0, 1, max_blameless_attempts=3)
    for attempt in range(4):
        assert not lost.is_done and lost.attempt == attempt
        lost.add(make_rollout(0, 0, attempt=attempt, group_size=1, status=RolloutStatus.ENGINE_LOST))
    assert lost.is_done and lost.num_failed_attempts == MAX_ATTEMPTS and list(lost.failed) == [0]
    ours = EvalTask(0, 1)
    for attempt in range(20):
        ours.add(make_rollout(0, 0, attempt=attempt, group_size=1, status=RolloutStatus.ENGINE_LOST))
    assert not ours.is_done


def test_what_a_predecessor_played_counts_at_whatever_attempt_it_was() -> None:
    adopted = EvalTask(0, 2)
    adopted.adopt(make_rollout(0, 0, attempt=3, group_size=2, status=RolloutStatus.ENV_ERROR))
    adopted.adopt(make_rollout(0, 1, attempt=1, group_size=2))
    assert (adopted.attempt, list(adopted.good), adopted.num_failed_attempts) == (4, [1], 1)
