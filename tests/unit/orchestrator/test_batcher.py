from dataclasses import replace

import numpy as np
import pytest

from millrace.algorithms import Grpo, ReinforcePlusPlus
from millrace.internal.v1 import batch_pb2
from millrace.orchestrator.drive.batch_writer import cut, score_samples, teaches
from millrace.orchestrator.play.book import count_dropped, resolutions
from millrace.orchestrator.play.play import Play
from millrace.rollouts.types import OwnSampling, PolicySpan
from millrace_testing.orchestrator.builders import make_play, make_rollout

GRPO = {make_play(0).task.env: Grpo()}


def make_group(ordinal: int, rewards: list[float]) -> Play:
    group = make_play(ordinal, group_size=len(rewards))
    for member, reward in enumerate(rewards):
        group.add(make_rollout(ordinal, member, reward=reward, group_size=len(rewards)))
    return group


def test_advantages_stand_on_sampled_tokens_only() -> None:
    batch = cut([make_group(4, [0.0, 1.0])], GRPO, step=7, filter_zero_advantages=True, seq_len=64)
    assert [sample.ordinal for sample in batch.samples] == [4, 4]
    np.testing.assert_array_equal(batch.samples[0].advantages, np.float32([0, 0, -0.5, -0.5, -0.5, -0.5]))
    np.testing.assert_array_equal(batch.samples[1].advantages, np.float32([0, 0, 0.5, 0.5, 0.5, 0.5]))
    assert batch.rewards == [0.0, 1.0]


def test_a_group_without_advantage_is_dropped_and_still_counts_in_the_mean() -> None:
    groups = [make_group(0, [1.0, 1.0]), make_group(1, [0.0, 1.0])]
    batch = cut(groups, GRPO, step=0, filter_zero_advantages=True, seq_len=64)
    assert {sample.ordinal for sample in batch.samples} == {1}
    assert count_dropped(batch.resolved) == {"zero_advantage": 1}
    assert batch.rewards == [1.0, 1.0, 0.0, 1.0]
    wire = resolutions(batch.resolved)
    assert [item.ordinal for item in wire] == [0, 1]
    assert wire[0].outcome == batch_pb2.ORDINAL_OUTCOME_DROPPED
    assert wire[1].outcome == batch_pb2.ORDINAL_OUTCOME_TRAINED


def test_shrink_means_what_true_means() -> None:
    groups = [make_group(0, [1.0, 1.0]), make_group(1, [0.0, 0.5, 1.0])]
    batch = cut(groups, GRPO, step=0, filter_zero_advantages="shrink", seq_len=64)
    assert [(sample.ordinal, sample.member) for sample in batch.samples] == [(1, 0), (1, 2)]
    assert count_dropped(batch.resolved) == {"zero_advantage": 1}


def test_a_batch_that_is_refilled_keeps_its_groups_whole() -> None:
    group = make_group(1, [0.0, 0.5, 1.0])
    batch = cut([group], GRPO, step=0, filter_zero_advantages="refill", seq_len=64)
    assert [(sample.ordinal, sample.member) for sample in batch.samples] == [(1, 0), (1, 1), (1, 2)]


def test_a_group_teaches_if_one_of_its_samples_has_an_advantage_within_the_sequence_length() -> None:
    algorithm = Grpo()
    assert teaches(make_group(0, [0.0, 1.0]), algorithm, seq_len=64)
    assert not teaches(make_group(0, [1.0, 1.0]), algorithm, seq_len=64)
    assert not teaches(make_group(0, [0.0, 1.0]), algorithm, seq_len=2), "only the prompt is left"


def test_without_the_filter_every_sample_is_trained() -> None:
    batch = cut([make_group(0, [1.0, 1.0])], GRPO, step=0, filter_zero_advantages=False, seq_len=64)
    assert len(batch.samples) == 2
    assert count_dropped(batch.resolved) == {}


def test_evaluation_samples_carry_no_advantage() -> None:
    samples = score_samples([make_rollout(0, 0, reward=1.0)], seq_len=64)
    assert len(samples) == 1
    assert not samples[0].advantages.any()


def test_samples_are_cut_at_the_sequence_length_and_vanish_without_sampled_tokens() -> None:
    batch = cut([make_group(0, [0.0, 1.0])], GRPO, step=0, filter_zero_advantages=False, seq_len=4)
    assert [sample.num_tokens for sample in batch.samples] == [4, 4]
    assert all(len(sample.advantages) == len(sample.loss_mask) == 4 for sample in batch.samples)
    prompt_only = cut([make_group(0, [0.0, 1.0])], GRPO, step=0, filter_zero_advantages=False, seq_len=2)
    assert prompt_only.samples == [] and count_dropped(prompt_only.resolved) == {"zero_advantage": 1}


def test_each_environment_has_its_algorithm_and_those_of_one_are_finished_together() -> None:
    """Two groups of one environment are whitened together, the group of the other one is not touched."""
    other = make_play(2, group_size=2)
    other.task = replace(other.task, env="other")
    for member, reward in enumerate([0.0, 3.0]):
        other.add(replace(make_rollout(2, member, reward=reward, group_size=2), env="other"))
    groups = [make_group(0, [0.0, 1.0]), other, make_group(1, [0.0, 4.0])]
    algorithms = {groups[0].task.env: ReinforcePlusPlus(), "other": Grpo()}
    batch = cut(groups, algorithms, step=0, filter_zero_advantages=True, seq_len=64)
    assert [sample.ordinal for sample in batch.samples] == [0, 0, 2, 2, 1, 1]
    found = [float(sample.advantages[2]) for sample in batch.samples]
    scale = np.sqrt(np.var([value for value in (-0.5, 0.5, -2.0, 2.0) for _ in range(4)], ddof=1))
    np.testing.assert_allclose(found, [-0.5 / scale, 0.5 / scale, -1.5, 1.5, -2 / scale, 2 / scale], rtol=1e-6)


def test_what_is_compared_over_a_batch_is_compared_before_groups_are_filtered() -> None:
    """Rewards 0, 1 and 2, 2: the group of equal ones counts in the deviation, and is dropped all the same."""
    groups = [make_group(0, [0.0, 1.0]), make_group(1, [2.0, 2.0])]
    algorithms = {groups[0].task.env: Grpo(std_norm="batch")}
    batch = cut(groups, algorithms, step=0, filter_zero_advantages=True, seq_len=64)
    assert [sample.ordinal for sample in batch.samples] == [0, 0]
    assert count_dropped(batch.resolved) == {"zero_advantage": 1}
    deviation = np.std([0.0, 1.0, 2.0, 2.0], ddof=1)
    found = [float(sample.advantages[2]) for sample in batch.samples]
    np.testing.assert_allclose(found, [-0.5 / deviation, 0.5 / deviation], rtol=1e-5)


def test_tokens_that_are_cut_off_count_in_no_mean() -> None:
    batch = cut(
        [make_group(0, [0.0, 1.0]), make_group(1, [0.0, 3.0])],
        {make_play(0).task.env: ReinforcePlusPlus()},
        step=0,
        filter_zero_advantages=True,
        seq_len=4,
    )
    tokens = np.concatenate([sample.advantages[sample.loss_mask == 1] for sample in batch.samples])
    assert len(tokens) == 8 and abs(tokens.mean()) < 1e-6 and np.var(tokens, ddof=1) == pytest.approx(1, abs=1e-5)


def test_the_mean_version_is_that_of_the_sampled_tokens_within_the_sequence_length() -> None:
    """Two prompt tokens, then one of version 3, two of version 5 and one of version 9."""
    group = make_group(0, [0.0, 1.0])
    spans = [(3, 2, 3), (5, 3, 5), (9, 5, 6)]
    versions = tuple(PolicySpan(lineage=0, version=version, start=start, end=end) for version, start, end in spans)
    for member, rollout in group.members.items():
        [sample] = rollout.samples
        group.members[member] = replace(rollout, samples=(replace(sample, policy_spans=versions),))
    for seq_len, mean in ((64, 22 / 4), (5, 13 / 3), (3, 3.0)):
        batch = cut([group], GRPO, step=9, filter_zero_advantages=True, seq_len=seq_len)
        assert [sample.mean_version for sample in batch.samples] == [pytest.approx(mean)] * 2


def test_what_was_sampled_in_another_way_is_cut_with_its_tokens() -> None:
    group = make_group(0, [0.0, 1.0])
    own = (OwnSampling(start=2, end=4, temperature=0.5), OwnSampling(start=4, end=6, temperature=2.0))
    for member, rollout in enumerate(group.rollouts()):
        sample = replace(rollout.samples[0], own_sampling=own)
        group.members[member] = replace(rollout, samples=(sample,))
    for seq_len, ends in ((64, [4, 6]), (5, [4, 5]), (4, [4])):
        batch = cut([group], GRPO, step=0, filter_zero_advantages=False, seq_len=seq_len)
        assert [[each.end for each in sample.own_sampling] for sample in batch.samples] == [ends, ends]
