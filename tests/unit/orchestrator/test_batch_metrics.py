"""The metrics of a batch say why its reward is what it is."""

import math
from dataclasses import replace

import pytest

from millrace.orchestrator.drive.batch_metrics import MAX_NAMES, MIN_MEASURED, PATIENCE_SLACK, Durations, batch_metrics
from millrace.orchestrator.play.play import Play
from millrace_testing.orchestrator.builders import make_play, make_rollout


def group(ordinal: int, rewards: list[float], **changes) -> Play:
    made = make_play(ordinal, group_size=len(rewards))
    for member, reward in enumerate(rewards):
        made.add(replace(make_rollout(ordinal, member, reward=reward, group_size=len(rewards)), **changes))
    return made


def test_functions_spread_and_ends_by_environment() -> None:
    groups = [
        group(0, [1.0, 0.7 + 0.2 + 0.1], metrics={"exact": 1.0}, stop_condition="stop", num_turns=2),
        group(1, [0.0, 0.0], metrics={"exact": 0.0, "length": 3.0}, stop_condition="max_turns", is_truncated=True),
        group(2, [0.0, 1.0], stop_condition="stop"),
    ]
    env = groups[0].task.env
    found = batch_metrics(groups, seq_len=10_000, stale={env: 2}, shares={})
    assert found[f"metrics/{env}/exact"] == 0.5 and found[f"metrics/{env}/length"] == 3.0
    assert found[f"solve_all/{env}"] == found["solve_all/all"] == pytest.approx(1 / 3)
    assert found[f"solve_none/{env}"] == pytest.approx(1 / 3)
    assert found[f"zero_advantage/{env}"] == found["zero_advantage/all"] == pytest.approx(2 / 3)
    assert found[f"stop_condition/{env}/max_turns"] == found[f"is_truncated/{env}/mean"] == pytest.approx(1 / 3)
    assert found[f"reward/{env}/mean"] == pytest.approx(0.5)
    assert (found[f"reward/{env}/min"], found[f"reward/{env}/max"]) == (0.0, 1.0)
    assert found[f"reward/{env}/group_std"] == pytest.approx(0.5 / 3)
    assert found["num_turns/all/max"] == 2.0 and found[f"batch/dropped/stale/{env}"] == 2.0
    assert found["seq_len/cut_tokens"] == 0.0
    length = max(sample.num_tokens for each in groups for rollout in each.rollouts() for sample in rollout.samples)
    assert batch_metrics(groups, seq_len=length - 1, stale={}, shares={})["seq_len/cut_tokens"] == 6.0


def test_small_rewards_that_differ_are_no_zero_advantage() -> None:
    found = batch_metrics([group(0, [0.0, 2e-7]), group(1, [2e-7, 2e-7])], seq_len=64, stale={}, shares={})
    assert found["zero_advantage/all"] == 0.5


def test_an_environment_of_a_thousand_functions_makes_a_bounded_number_of_metrics() -> None:
    found = batch_metrics(
        [group(0, [1.0, 0.0], metrics={f"f{at:04}": 1.0 for at in range(1000)})], seq_len=64, stale={}, shares={}
    )
    assert sum(name.startswith("metrics/") for name in found) == MAX_NAMES


def test_a_group_is_waited_for_as_long_as_its_environment_takes() -> None:
    durations = Durations(window=40)
    for at in range(MIN_MEASURED):
        assert durations.patience_s("slow") == math.inf, "little is known of it"
        durations.note("slow", 10.0, is_stale=at % 2 == 0)
    for _ in range(20):
        durations.note("quick", 1.0, is_stale=False)
    assert durations.patience_s("slow") == 10.0 * PATIENCE_SLACK and durations.patience_s("quick") == PATIENCE_SLACK
    shares = durations.stale_shares()
    assert (shares["slow"].share, shares["quick"].share) == (0.5, 0.0) and durations.num_stale[
        "slow"
    ] == MIN_MEASURED // 2
    for _ in range(40):
        durations.note("quick", None, is_stale=False)
    assert list(durations.stale_shares()) == ["quick"], "shares are over the last groups"
