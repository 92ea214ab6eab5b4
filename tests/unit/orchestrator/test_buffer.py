"""Pools as a fold over the log, and what is drawn from them."""

import json
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.config.load import validate_document
from millrace.config.sections.buffer import BufferConfig, RatioConfig
from millrace.decoding import Fields
from millrace.errors import InvalidSpecError
from millrace.orchestrator.play.book import Resolved
from millrace.orchestrator.play.play import Arrival
from millrace.orchestrator.play.pools import GroupResult, Pool, Pools, TaskBuffer, Thresholds, thresholds_of
from millrace.orchestrator.play.tasks import TaskOrder, TaskSource
from millrace_testing.orchestrator.builders import book_with, make_play, make_rollout
from millrace_testing.orchestrator.runs import CONFIG

BOTH = Thresholds(easy=0.8, hard=0.2)
A, B = TaskSource(env="a", num_tasks=12, digest="x"), TaskSource(env="b", num_tasks=5, digest="y")


def result(task: int, reward: float, env: str = "a") -> GroupResult:
    return GroupResult(env=env, task_index=task, reward=reward)


def for_draw(pools: Pools, *groups: GroupResult, drawn_below: int, resolved_below: int = 0) -> Pools:
    step = 1 + max([pools.step, *(moves.step for moves in pools.recent)])
    return pools.after(groups, BOTH, step=step, drawn_below=drawn_below, resolved_below=resolved_below)


def drawer(pools: Pools, config: BufferConfig | None = None, *sources: TaskSource) -> TaskBuffer:
    config = config or BufferConfig(easy_threshold=0.8)
    return TaskBuffer(sources or (A,), config, seed=3, pools=lambda: pools)


def stored(pools: Pools) -> Pools:
    return Pools.from_json(Fields(json.loads(json.dumps(pools.to_json()))))


def test_a_task_moves_at_its_threshold_and_stays_there() -> None:
    pools = for_draw(Pools(), result(0, 0.8), result(1, 0.2), result(2, 0.5), drawn_below=3, resolved_below=3)
    assert pools.newest() == {"a": {0: Pool.EASY, 1: Pool.HARD}}
    pools = for_draw(pools, result(0, 0.0), result(1, 1.0), drawn_below=5, resolved_below=5)
    assert pools.newest() == {"a": {0: Pool.EASY, 1: Pool.HARD}}, "for good"
    assert pools.counts("a") == (1, 1) and pools.counts("b") == (0, 0)


def test_a_hard_task_that_is_replayed_moves_by_its_new_group() -> None:
    replaying = Thresholds(easy=0.8, hard=0.2, replays_hard=True)
    pools = Pools().after(
        [result(task, 0.0) for task in range(3)] + [result(3, 1.0)], replaying, step=1, drawn_below=4, resolved_below=4
    )
    again = [result(0, 0.5), result(1, 0.9), result(2, 0.1), result(3, 0.0)]
    pools = stored(pools.after(again, replaying, step=2, drawn_below=9, resolved_below=6))
    assert pools.newest() == {"a": {1: Pool.EASY, 2: Pool.HARD, 3: Pool.EASY}}, "what is easy is so for good"
    assert pools.for_draw(pools.num_counting(8))[1]["a"][0] is Pool.HARD, "an ordinal that was drawn before"


def test_a_share_of_the_draws_plays_hard_tasks_again() -> None:
    pools = for_draw(Pools(), result(0, 0.0), result(4, 0.1), result(7, 1.0), drawn_below=5, resolved_below=5)
    config = BufferConfig(easy_threshold=0.8, hard_threshold=0.2)
    plain, replaying = drawer(pools, config), drawer(pools, config.model_copy(update={"hard_replay": 0.25}))
    before, drawn = ([each.task(i).task_index for i in range(5, 2005)] for each in (plain, replaying))
    again = [task for task in drawn if task in (0, 4)]
    assert 0.2 < len(again) / len(drawn) < 0.3 and set(again) == {0, 4} and 7 not in drawn
    assert all(new in (0, 4) or new == old for old, new in zip(before, drawn, strict=True))
    assert not {0, 4, 7} & set(before)


def test_without_thresholds_or_a_schedule_the_draw_is_the_task_order() -> None:
    order = TaskOrder([A, B], seed=3)
    config = BufferConfig(online_difficulty_filtering=True)
    buffer = drawer(for_draw(Pools(), result(0, 1.0), drawn_below=0), config, A, B)
    assert [buffer.task(i) for i in range(100)] == [order.task(i) for i in range(100)]


def test_retired_tasks_are_not_drawn_and_the_others_keep_their_order() -> None:
    order = TaskOrder([A], seed=3)
    groups = [result(task, 1.0) for task in (0, 4, 7)]
    buffer = drawer(for_draw(Pools(), *groups, drawn_below=5, resolved_below=5))
    drawn = [buffer.task(i).task_index for i in range(5, 105)]
    assert not {0, 4, 7} & set(drawn) and set(drawn) == set(range(12)) - {0, 4, 7}
    for ordinal, task in enumerate(drawn, start=5):
        if (first := order.task(ordinal).task_index) not in (0, 4, 7):
            assert task == first


def test_a_header_does_not_count_for_what_was_drawn_before_it() -> None:
    before = Pools()
    old = [drawer(before).task(i) for i in range(8)]
    pools = for_draw(before, *(result(ref.task_index, 1.0) for ref in old), drawn_below=8, resolved_below=2)
    assert [drawer(pools).task(i) for i in range(8)] == old, "a successor draws what is open again"
    new = {drawer(pools).task(i).task_index for i in range(8, 60)}
    assert not new & {ref.task_index for ref in old}


@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.5]))
def test_what_an_ordinal_draws_is_the_same_after_any_kill(seed: int, hard_replay: float) -> None:
    """Headers are cut at random while ordinals are drawn; each is drawn again from each later stored state."""
    rng, pools = random.Random(seed), Pools()
    config = BufferConfig(easy_threshold=0.8, hard_threshold=0.2, hard_replay=hard_replay)
    thresholds = thresholds_of(config)
    drawn: list[int] = []
    unresolved: set[int] = set()
    for _ in range(8):
        for _ in range(rng.randrange(4)):
            unresolved.add(len(drawn))
            drawn.append(drawer(pools, config).task(len(drawn)).task_index)
        ended = rng.sample(sorted(unresolved), rng.randrange(len(unresolved) + 1))
        unresolved -= set(ended)
        groups = [result(drawn[ordinal], rng.random()) for ordinal in sorted(ended)]
        below = min(unresolved, default=len(drawn))
        step = 1 + max([pools.step, *(moves.step for moves in pools.recent)])
        pools = stored(pools.after(groups, thresholds, step=step, drawn_below=len(drawn), resolved_below=below))
        assert [drawer(pools, config).task(ordinal).task_index for ordinal in unresolved] == [
            drawn[o] for o in unresolved
        ]
        assert all(moves.drawn_below > below for moves in pools.recent), "what is resolved is kept no longer"


@given(st.sets(st.integers(0, 4000)), st.sets(st.integers(0, 4000)))
def test_pools_survive_being_stored(easy: set[int], hard: set[int]) -> None:
    groups = [*(result(task, 1.0) for task in sorted(easy)), *(result(task, 0.0, "b") for task in sorted(hard))]
    pools = for_draw(Pools().of_task_sets({"a": "x"}), *groups, drawn_below=7, resolved_below=3)
    assert stored(pools) == pools
    assert len(json.dumps(pools.to_json())) < 3000, "a bit for a task, or less"


@pytest.mark.parametrize(
    "damage", [{"bitmap": "?"}, {"tasks": [-1]}, {"tasks": [1 << 40]}, {"pool": "odd"}, {"env": 3}, {"tasks": "x"}]
)
def test_a_damaged_pool_is_refused(damage: dict) -> None:
    value = for_draw(Pools(), result(1000, 1.0), drawn_below=1, resolved_below=1).to_json()
    value["placed"][0].update(damage)
    with pytest.raises(ValueError):
        Pools.from_json(Fields(value))


def test_a_share_returns_where_a_run_begins_anew_for_what_is_not_drawn_yet() -> None:
    groups = [*(result(task, 1.0) for task in range(8)), *(result(task, 0.0) for task in range(8, 12))]
    pools = for_draw(Pools(), *groups, drawn_below=20, resolved_below=18)
    anew = pools.begun_anew(easy_fraction=0.25, hard_fraction=0.5, seed=1, step=4)
    assert anew == pools.begun_anew(easy_fraction=0.25, hard_fraction=0.5, seed=1, step=4)
    assert anew.counts("a") == (6, 2)
    assert anew.for_draw(anew.num_counting(19)) == pools.for_draw(pools.num_counting(19)), "drawn before"
    assert stored(anew) == anew
    assert pools.begun_anew(easy_fraction=0.0, hard_fraction=0.0, seed=1, step=4) is pools


def test_pools_of_another_task_set_count_no_more() -> None:
    pools = Pools().of_task_sets({"a": "x", "b": "y"})
    pools = for_draw(pools, result(1, 1.0), result(2, 1.0, "b"), drawn_below=3)
    assert pools.of_task_sets({"a": "x", "b": "y"}).newest() == pools.newest()
    assert pools.of_task_sets({"a": "other", "b": "y"}).newest() == {"b": {2: Pool.EASY}}


def test_an_environment_without_normal_tasks_leaves_its_share_to_the_others() -> None:
    groups = [result(task, 1.0, "b") for task in range(5)]
    pools = for_draw(Pools(), *groups, drawn_below=0)
    buffer = drawer(pools, None, A, B)
    assert {buffer.task(i).env for i in range(50)} == {"a"} and not buffer.is_exhausted(0)
    pools = for_draw(pools, *(result(task, 1.0) for task in range(12)), drawn_below=30)
    assert drawer(pools, None, A, B).is_exhausted(30) and not drawer(pools, None, A, B).is_exhausted(29)


def test_ratios_follow_the_schedule_by_the_step_at_which_a_task_is_drawn() -> None:
    config = BufferConfig(
        schedule=[RatioConfig(step=1, env_ratios=[1.0, 3.0]), RatioConfig(step=2, env_ratios=[0.0, 1.0])]
    )
    pools = for_draw(for_draw(Pools(), drawn_below=100), drawn_below=1100)
    buffer = drawer(pools, config, A, B)
    assert [buffer.task(i) for i in range(100)] == [TaskOrder([A, B], seed=3).task(i) for i in range(100)]
    counts = Counter(buffer.task(i).env for i in range(100, 1100))
    assert 700 < counts["b"] < 800
    assert {buffer.task(i).env for i in range(1100, 1200)} == {"b"}


def test_sizes_count_every_environment() -> None:
    pools = for_draw(Pools(), result(1, 1.0), result(2, 0.0, "b"), drawn_below=1)
    sizes = drawer(pools, None, A, B).sizes(pools)
    assert (sizes.easy, sizes.normal, sizes.hard) == (1, 15, 1)


def test_a_group_counts_when_all_of_its_members_came() -> None:
    play = make_play(5)
    assert play.add(make_rollout(5, 0, group_size=2, reward=1.0)) is Arrival.OPEN
    assert Resolved.of(play, "stale").result is None
    play.add(make_rollout(5, 1, group_size=2))
    assert Resolved.of(play, "stale").result == GroupResult(env="reverse-text", task_index=5, reward=0.5)


def test_a_rollout_of_another_task_is_discarded() -> None:
    play = make_play(5)
    play.is_drawn_by_pools = True
    assert play.add(replace(make_rollout(5, 0, group_size=2), task_index=6)) is Arrival.DUPLICATE


def test_what_was_drawn_stands_below_the_number_that_a_header_keeps() -> None:
    book = book_with(3, 7)
    assert book.drawn_below == 8
    book.drop([book.plays[7]], reason="stale")
    assert book.drawn_below == 8 and book.next_ordinal() == 0


@pytest.mark.parametrize(
    ("buffer", "says"),
    [
        ({"easy_threshold": 0.2, "hard_threshold": 0.2}, "must be above `orchestrator.buffer.hard_threshold`"),
        ({"easy_fraction": 0.5}, "needs `orchestrator.buffer.easy_threshold`"),
        ({"hard_fraction": 0.5}, "needs `orchestrator.buffer.hard_threshold`"),
        ({"hard_replay": 0.5}, "needs `orchestrator.buffer.hard_threshold`"),
        ({"hard_replay": 0.5, "hard_threshold": 0.0, "sampler": "own.tasks:fn"}, "chooses among normal tasks"),
        ({"hard_fraction": 1.5, "hard_threshold": 0.0}, "at most 1"),
        ({"schedule": [{"step": 3, "env_ratios": [1.0]}, {"step": 3, "env_ratios": [1.0]}]}, "ascending steps"),
        ({"schedule": [{"step": 3, "env_ratios": [1.0, 2.0]}]}, "2 env_ratios at step 3, but there are 1"),
        ({"schedule": [{"step": 3, "env_ratios": [0.0]}]}, "let one be above 0"),
        (
            {"schedule": [{"step": 3, "env_ratios": [1.0]}], "sampler": "own.tasks:fn"},
            "the environment as well",
        ),
        ({"sampler_kwargs": {"a": 1}}, "has no effect without `orchestrator.buffer.sampler`"),
        ({"sampler": "own"}, "must match"),
    ],
)
def test_contradictions_are_refused_with_the_reason(buffer: dict, says: str) -> None:
    with pytest.raises(InvalidSpecError) as caught:
        validate_document({**CONFIG, "orchestrator": {**CONFIG["orchestrator"], "buffer": buffer}})
    assert [each for each in caught.value.violations if says in each.message], caught.value.violations


@pytest.mark.parametrize("key", ["online_difficulty_filtering", "easy_threshold"])
def test_a_distillation_has_no_difficulty(key: str) -> None:
    value = True if key.startswith("online") else 0.8
    algo = {"type": "opd", "teacher": {"model": {"name": "t"}, "client": {"base_url": ["http://t/v1"]}}}
    document = {**CONFIG["orchestrator"], "algo": algo, "buffer": {key: value}}
    with pytest.raises(InvalidSpecError) as caught:
        validate_document({**CONFIG, "orchestrator": document})
    assert [each for each in caught.value.violations if "learns from every task" in each.message]
