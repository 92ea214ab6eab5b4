"""Advantages of several trained agents in one rollout: formulas by hand, and baselines as a fold over the headers."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from millrace.algorithms import ALGORITHMS, Baselines, Filtered, Grpo, HierarchicalGrpo, Rae
from millrace.config.load import validate_document
from millrace.config.sections.buffer import FilterConfig
from millrace.errors import CorruptObjectError, InvalidSpecError
from millrace.orchestrator.drive.batch_writer import CutBatch, cut, decode_state, encode_state
from millrace.orchestrator.play.failures import Tally
from millrace.orchestrator.play.play import Play
from millrace.rollouts.types import Rollout, Trace
from millrace.rollouts.wire import decode_rollout, encode_rollout
from millrace_testing.orchestrator.builders import make_play, make_rollout

Played = Sequence[tuple[str, float]]
"""Of each trace of a rollout its agent and reward."""


def rollout(ordinal: int, member: int, played: Played, *, group_size: int = 1) -> Rollout:
    plain = make_rollout(ordinal, member, group_size=group_size)
    traces = tuple(Trace(agent=agent, reward=reward, num_samples=1, num_turns=1) for agent, reward in played)
    mean = sum(reward for _, reward in played) / len(played)
    return replace(plain, samples=plain.samples * len(played), reward=mean, traces=traces)


def group(ordinal: int, *members: Played) -> Play:
    play = make_play(ordinal, group_size=len(members))
    for member, played in enumerate(members):
        play.add(rollout(ordinal, member, played, group_size=len(members)))
    return play


def cut_rae(groups: Sequence[Play], baselines: Baselines, *, step: int = 0, **options: Any) -> CutBatch:
    algorithms = {groups[0].task.env: options.pop("algorithm", Rae())}
    options = {"filter_zero_advantages": True, "seq_len": 512} | options
    return cut(groups, algorithms, step=step, baselines=baselines, **options)


def advantages(batch: CutBatch) -> dict[tuple[int, int], list[float]]:
    found: dict[tuple[int, int], list[float]] = {}
    for sample in batch.samples:
        found.setdefault((sample.ordinal, sample.member), []).append(float(sample.advantages[-1]))
    return found


ENV = make_play(0).task.env
START = Baselines(decays={ENV: 0.5})


def test_rae_by_hand() -> None:
    """b keeps half of itself: white meets 0, 0.5, 0.25 for its rewards 1, 0, 1, and black 0, -0.5, -0.25."""
    games = [group(at, [("white", r), ("black", -r)]) for at, r in enumerate((1.0, 0.0, 1.0))]
    batch = cut_rae(games, START)
    assert advantages(batch) == {(0, 0): [1.0, -1.0], (1, 0): [-0.5, 0.5], (2, 0): [0.75, -0.75]}
    assert batch.baselines.values == {ENV: {"white": 0.625, "black": -0.625}}
    assert [sample.reward for sample in batch.samples] == [1.0, -1.0, 0.0, 0.0, 1.0, -1.0]
    assert batch.rewards == [0.0, 0.0, 0.0], "that of a rollout is the mean of its traces"


def test_every_sampled_token_of_a_trace_has_its_advantage_and_no_other() -> None:
    batch = cut_rae([group(0, [("white", 1.0), ("black", -1.0)])], START)
    for sample in batch.samples:
        assert set(sample.advantages[sample.loss_mask == 1]) == {sample.reward}
        assert not sample.advantages[sample.loss_mask == 0].any()


def test_the_baseline_does_not_depend_on_the_order_of_arrival() -> None:
    games = [group(at, [("white", r), ("black", -r)]) for at, r in enumerate((1.0, 0.25, 0.5))]
    one, other = cut_rae(games, START), cut_rae(games[::-1], START)
    assert advantages(one) == advantages(other) and one.baselines == other.baselines


def test_a_successor_that_reads_the_header_goes_on_with_the_same_baselines() -> None:
    steps = [[group(at, [("white", r), ("black", 0.3)])] for at, r in enumerate((1.0, 0.1, 0.7))]
    expected, state = START, b""
    for step, games in enumerate(steps):
        whole = cut_rae(games, expected, step=step)
        resumed = cut_rae(games, START.restored(decode_state(state).baselines), step=step)
        assert advantages(resumed) == advantages(whole) and resumed.baselines.values == whole.baselines.values
        expected = whole.baselines
        state = encode_state(
            next_ordinal=step,
            num_duplicates=0,
            read_until="",
            failures=Tally(),
            baselines=expected.values,
        )
    assert decode_state(state).baselines == expected.values and set(expected.values[ENV]) == {"white", "black"}


def test_a_header_of_a_run_without_baselines_says_nothing_of_them() -> None:
    state = encode_state(next_ordinal=0, num_duplicates=0, read_until="", failures=Tally(), baselines={})
    assert b"baselines" not in state
    with pytest.raises(CorruptObjectError):
        decode_state(state[:-1] + b', "baselines": [{"env": "e", "agent": "a", "value": "x"}]}')


def test_environments_that_rae_does_not_train_have_no_baseline() -> None:
    batch = cut_rae([group(0, [("white", 1.0)], [("white", 0.0)])], Baselines(), algorithm=Grpo())
    assert batch.baselines == Baselines()
    assert Baselines(decays={"b": 0.5}).restored({"a": {"x": 1.0}}).values == {}


def test_what_a_filter_leaves_out_moves_no_baseline() -> None:
    play = group(0, [("white", 1.0)])
    cut_off = make_play(1, group_size=1)
    cut_off.add(replace(rollout(1, 0, [("white", 5.0)]), is_truncated=True))
    drops = [FilterConfig.model_validate({"type": "truncated", "action": "drop"})]
    batch = cut_rae([play, cut_off], START, algorithm=Filtered(Rae(), drops), filters=drops)
    assert advantages(batch) == {(0, 0): [1.0]} and batch.baselines.values == {ENV: {"white": 0.5}}


@pytest.mark.parametrize(("kept", "count"), [(True, 1), (False, 2)])
def test_a_reward_that_is_the_baseline_has_no_advantage(kept: bool, count: int) -> None:
    batch = cut_rae([group(0, [("white", 0.0), ("black", 1.0)])], START, filter_zero_advantages=kept)
    assert len(batch.samples) == count


def test_hierarchical_grpo_by_hand() -> None:
    """Proposers are compared over the group (1 and 0), solvers with those of their own rollout."""
    games: list[Played] = [
        [("proposer", 1.0), ("solver", 1.0), ("solver", 0.0)],
        [("proposer", 0.0), ("solver", 5.0), ("solver", 5.0)],
    ]
    rollouts = [rollout(0, member, played, group_size=2) for member, played in enumerate(games)]
    nested = HierarchicalGrpo(episode_agents=["solver"]).credit(rollouts)
    assert [[c.advantages.max() + c.advantages.min() for c in each] for each in nested] == [
        [0.5, 0.5, -0.5],
        [-0.5, 0, 0],
    ]
    flat = HierarchicalGrpo().credit(rollouts)
    assert [[c.advantages.max() + c.advantages.min() for c in each] for each in flat] == [
        [0.5, -1.75, -2.75],
        [-0.5, 2.25, 2.25],
    ]


def test_with_one_agent_hierarchical_grpo_is_grpo() -> None:
    rollouts = [make_rollout(0, member, reward=reward, group_size=3) for member, reward in enumerate((1.0, 0.5, 0.1))]
    ours, grpo = HierarchicalGrpo().credit(rollouts), Grpo().credit(rollouts)
    for (own,), (other,) in zip(ours, grpo, strict=True):
        assert own.advantages.tolist() == other.advantages.tolist()


def test_a_punishment_lowers_every_trace() -> None:
    punishes = FilterConfig.model_validate({"type": "truncated", "action": "penalise", "penalty": 2.0})
    pair = [rollout(0, member, [("a", 1.0), ("b", 3.0)], group_size=2) for member in range(2)]
    pair[1] = replace(pair[1], is_truncated=True)
    credits = Filtered(HierarchicalGrpo(), [punishes]).credit(pair)
    assert [[float(c.advantages[-1]) for c in each] for each in credits] == [[1.0, 1.0], [-1.0, -1.0]]


def test_traces_survive_the_wire_and_one_trace_is_written_as_before() -> None:
    several = rollout(3, 0, [("white", 1.0), ("black", -1.0)])
    assert decode_rollout(encode_rollout(several)) == several
    plain = make_rollout(3, 0)
    assert plain.traces == () and decode_rollout(encode_rollout(plain)) == plain
    assert len(encode_rollout(plain)) < len(encode_rollout(replace(plain, traces=plain.agent_traces)))


@pytest.mark.parametrize(
    ("traces", "says"),
    [
        ((Trace(agent="a", reward=1.0, num_samples=2),), "is not the number of samples, which is 1"),
        ((Trace(agent="a" * 300, reward=1.0, num_samples=1),), "has more than 256 chars"),
        ((Trace(agent="a", reward=float("nan"), num_samples=1),), "is not finite"),
    ],
)
def test_traces_that_contradict_their_rollout_are_refused(traces: tuple[Trace, ...], says: str) -> None:
    with pytest.raises(CorruptObjectError, match=says):
        encode_rollout(replace(make_rollout(0, 0), traces=traces))


def test_samples_of_two_traces_are_no_rewritten_history() -> None:
    both = rollout(0, 0, [("white", 1.0), ("black", -1.0)])
    assert both.rewritten_turn is None
    split = replace(both.traces[1], num_samples=2)
    assert replace(both, samples=both.samples * 2, traces=(both.traces[0], split, both.traces[0])).rewritten_turn == 2


def document(algo: dict[str, Any], **keys: Any) -> dict[str, Any]:
    orchestrator = {"env": [{"id": "reverse-text"}], "batch_size": 8, "rollouts_per_example": 4, "algo": algo}
    return {"orchestrator": {**orchestrator, **keys}}


def test_the_config_chooses_and_bounds_them() -> None:
    config = validate_document(document({"type": "rae", "decay": 0.9}, rollouts_per_example=1)).orchestrator
    assert config.baseline_decays == {"reverse-text": 0.9} and config.takes_several_traces(config.env[0])
    config = validate_document(document({"type": "hierarchical_grpo", "episode_agents": ["solver"]})).orchestrator
    assert isinstance(ALGORITHMS["hierarchical_grpo"].from_config(config.algo), HierarchicalGrpo)
    own = validate_document(document({}, env=[{"id": "reverse-text", "algo": {"type": "rae"}}])).orchestrator
    assert own.baseline_decays == {"reverse-text": 0.95} and own.takes_several_traces(own.env[0])
    assert not validate_document(document({})).orchestrator.takes_several_traces(config.env[0])


@pytest.mark.parametrize(
    ("algo", "keys", "says"),
    [
        ({"type": "hierarchical_grpo"}, {"rollouts_per_example": 1}, "must be at least 2 for hierarchical_grpo"),
        ({"decay": 0.5}, {}, "has no meaning for grpo"),
        ({"type": "rae", "episode_agents": ["a"]}, {}, "has no meaning for rae"),
        ({"type": "rae", "decay": 1.0}, {}, "decay"),
        ({"type": "rae"}, {"filters": [{"type": "truncated", "action": "penalise"}]}, "rae compares none"),
    ],
)
def test_what_contradicts_is_refused(algo: dict[str, Any], keys: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidSpecError, match=says):
        validate_document(document(algo, **keys))
