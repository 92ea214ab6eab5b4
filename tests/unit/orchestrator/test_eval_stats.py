"""The figures of an evaluation, and how long a lost endpoint is tried."""

import itertools
import random
from dataclasses import replace

import pytest

from millrace.orchestrator.play.evals import confidence, figures, pass_at_k
from millrace.orchestrator.play.play import MAX_FAILED_ATTEMPTS, Play, PlayState
from millrace.orchestrator.play.settings import PlaySettings
from millrace.rollouts.types import Purpose, RolloutStatus
from millrace_testing.orchestrator.builders import make_play, make_rollout


def of_evaluation(*, max_blameless_attempts: int | None = None) -> PlaySettings:
    return PlaySettings(purpose=Purpose.EVAL, rollout_timeout_s=60.0, max_blameless_attempts=max_blameless_attempts)


def task(index: int, rewards: list[float]) -> Play:
    made = make_play(index, group_size=len(rewards), settings=of_evaluation())
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
    assert figures([task(0, [0.7 + 0.2 + 0.1])], pass_threshold=1.0)["pass@1"] == 1.0


def test_metrics_of_the_environment_are_taken_for_no_figure() -> None:
    """Nor is a reward function of v1 that is called `sem`."""
    made = make_play(0, group_size=1, settings=of_evaluation())
    metrics = {"reward/sem": 9.0, "pass@8": 9.0, "turns": 9.0, "exact": 1.0}
    made.add(replace(make_rollout(0, 0, group_size=1), metrics=metrics))
    found = figures([made], pass_threshold=1.0)
    assert "reward/sem" not in found and "pass@8" not in found and found["turns"] != 9.0
    assert [found[name] for name in ("env/reward/sem", "env/pass@8", "env/turns", "exact")] == [9.0, 9.0, 9.0, 1.0]


def test_failed_rollouts_are_in_the_denominator_of_every_figure() -> None:
    solved = [task(index, [1.0, 1.0]) for index in range(4)]
    failed = [make_play(index, group_size=2, settings=of_evaluation()) for index in range(4, 8)]
    found = figures([*solved, *failed], pass_threshold=1.0)
    assert (found["pass@1"], found["pass@2"], found["pass^2"]) == (0.5, 0.5, 0.5)
    assert found["reward/sem"] == pytest.approx(0.189, abs=1e-3)  # eight means, four of them 0
    assert found["seconds"] == figures(solved, pass_threshold=1.0)["seconds"], "only finished rollouts have it"


def test_the_interval_of_pass_at_k_covers_the_truth_as_often_as_it_says() -> None:
    draw = random.Random(7)
    for num_tasks, per_task in ((50, 1), (50, 4), (200, 2)):
        covered = 0
        for _ in range(600):
            truths = [draw.betavariate(2, 3) for _ in range(num_tasks)]
            passed = [sum(draw.random() < truth for _ in range(per_task)) for truth in truths]
            low, high = confidence([each / per_task for each in passed], num_draws=num_tasks * per_task)
            covered += low <= 0.4 <= high
        assert 0.93 <= covered / 600 <= 0.985


def test_the_interval_of_pass_at_k_is_not_empty_where_all_or_no_task_passes() -> None:
    assert confidence([0.0] * 20, num_draws=20) == (0.0, pytest.approx(0.161, abs=1e-3))
    assert confidence([1.0] * 20, num_draws=20) == (pytest.approx(0.839, abs=1e-3), 1.0)
    low, high = confidence([0.5] * 4, num_draws=8)
    assert low < 0.5 < high
    found = figures([task(0, [1.0, 0.0]), task(1, [1.0, 1.0])], pass_threshold=1.0)
    assert found["pass@1/low"] < 0.75 < found["pass@1/high"] < 1.0 and "pass@2/low" in found


def test_a_task_that_an_endpoint_keeps_losing_ends() -> None:
    lost = make_play(group_size=1, settings=of_evaluation(max_blameless_attempts=3))
    for attempt in range(4):
        assert lost.is_open and lost.attempt == attempt
        lost.add(make_rollout(0, 0, attempt=attempt, group_size=1, status=RolloutStatus.ENGINE_LOST))
    assert lost.state is PlayState.RESOLVED and lost.num_failed_attempts == MAX_FAILED_ATTEMPTS
    assert list(lost.failures) == [0]
    ours = make_play(group_size=1, settings=of_evaluation())
    for attempt in range(20):
        ours.add(make_rollout(0, 0, attempt=attempt, group_size=1, status=RolloutStatus.ENGINE_LOST))
    assert ours.is_open


def test_what_a_predecessor_played_counts_at_whatever_attempt_it_was() -> None:
    adopted = make_play(settings=of_evaluation())
    for rollout in (
        make_rollout(0, 0, attempt=3, group_size=2, status=RolloutStatus.ENV_ERROR),
        make_rollout(0, 1, attempt=1, group_size=2),
    ):
        adopted.follow(rollout.attempt)
        adopted.add(rollout)
    assert (adopted.attempt, list(adopted.members), adopted.num_failed_attempts) == (4, [1], 1)
