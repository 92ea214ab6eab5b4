"""Environments with groups of several sizes: what is admitted, what a batch is cut of, what counts as failed."""

import asyncio
import random
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.config import RLConfig
from millrace.orchestrator.drive.loop import RolloutLoop
from millrace.orchestrator.play.failures import Failures
from millrace.orchestrator.play.play import PlayState, num_rollouts
from millrace.orchestrator.play.routing import AdmissionRule
from millrace.rollouts.types import RolloutStatus
from millrace.telemetry import waits
from millrace.telemetry.waits import Refusal
from millrace_testing.orchestrator.builders import make_play, make_rollout


def config(**orchestrator: Any) -> Any:
    base = {"batch_size": 8, "rollouts_per_example": 2, "env": [{"id": "a"}, {"id": "b", "rollouts_per_example": 4}]}
    return RLConfig.model_validate({"max_steps": 3, "orchestrator": {**base, **orchestrator}}).orchestrator


def rule(size: int, level: int, factor: float) -> AdmissionRule:
    return AdmissionRule(
        rollouts_per_step=size, async_level=level, max_off_policy_steps=8, oversampling_factor=factor, max_steps=None
    )


def loop_of(settings: Any, groups: list[Any]) -> RolloutLoop:
    """Return a loop of which only the cut is asked."""
    none = cast("Any", None)
    policies = SimpleNamespace(served_version=lambda: 0)
    book = SimpleNamespace(step=0, whole=groups, open=[], plays={})
    return RolloutLoop(
        max_steps=3,
        rule=rule(settings.batch_size, settings.async_level, settings.oversampling_factor),
        make_play=none,
        book=cast("Any", book),
        failures=none,
        player=none,
        policies=cast("Any", policies),
        writer=none,
        events=none,
        algorithms={},
        settings=settings,
        timeout_s=1.0,
        is_stopping=lambda: False,
    )


def whole(ordinal: int, size: int, *, version: int = 0) -> Any:
    play = make_play(ordinal, group_size=size)
    for member in range(size):
        play.add(make_rollout(ordinal, member, group_size=size, version=version))
    assert play.state is PlayState.WHOLE
    return play


def test_a_batch_is_of_the_fewest_whole_groups_that_have_its_rollouts() -> None:
    groups = [whole(ordinal, size) for ordinal, size in enumerate([4, 2, 4, 2, 4])]
    assert [group.ordinal for group in loop_of(config(), groups).take()] == [0, 1, 2]
    assert loop_of(config(), groups[:2]).take() == [], "6 of 8 rollouts"
    assert [group.ordinal for group in loop_of(config(), groups[1:2] * 1 + groups[2:4]).take()] == [1, 2, 3]


def test_groups_that_grow_too_old_are_cut_first_whatever_their_size() -> None:
    groups = [whole(0, 4, version=1), whole(1, 4, version=1), whole(2, 2, version=0), whole(3, 2, version=0)]
    assert [group.ordinal for group in loop_of(config(), groups).take()] == [2, 3, 0]


@given(
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    level=st.integers(0, 3),
    factor=st.sampled_from([1.0, 1.5]),
    seed=st.integers(0, 2**16),
)
def test_simulated_runs_fill_every_batch_and_keep_the_bound(
    sizes: list[int], level: int, factor: float, seed: int
) -> None:
    """A batch has its rollouts and less than a group more; so has the work ahead; and no step waits for ever."""
    rng, batch = random.Random(seed), max(sizes) * 2
    admission, table = rule(batch, level, factor), list[int]()
    step = served = 0
    for _ in range(200):
        while sum(table) < admission.num_allowed(step=step, served_version=served):
            table.append(rng.choice(sizes))
        assert sum(table) < (level + 1) * batch * factor + max(sizes)
        assert sum(table) >= batch or step > served + level or served < step - level, "enough is admitted for a cut"
        if sum(table) >= batch and admission.may_cut(step=step, served_version=served):
            count = next(at for at in range(1, len(table) + 1) if sum(table[:at]) >= batch)
            assert batch <= sum(table[:count]) < batch + max(sizes)
            table = [] if level == 0 else table[count:]
            step += 1
        elif served < step:
            served += 1
        assert step - served <= level + 1
    assert step > 20


def test_what_is_counted_in_groups_and_what_in_rollouts() -> None:
    settings = config()
    assert settings.group_sizes == {"a": 2, "b": 4} and settings.groups_per_step == 2, "the fewest that make a batch"
    assert loop_of(settings, []).missing(6, of=8) == "6 of 8 rollouts"
    one = config(env=[{"id": "a"}, {"id": "b", "rollouts_per_example": 2}])
    assert one.groups_per_step == 4 and loop_of(one, []).missing(6, of=8) == "3 of 4 groups"
    assert num_rollouts([whole(0, 2), whole(1, 4)]) == 6


def test_a_group_has_answered_once_all_of_its_own_size_have() -> None:
    counted = Failures(num_groups=1, group_sizes={"reverse-text": 3, "b": 8}, max_share=0.5)
    for member in range(2):
        counted.note(make_rollout(0, member, group_size=3, status=RolloutStatus.ENV_ERROR))
    assert counted.error() is None
    counted.note(make_rollout(0, 2, group_size=3, status=RolloutStatus.ENV_ERROR))
    assert counted.error() is not None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch_size": 3}, "orchestrator.batch_size must be at least the largest group, which is 4"),
        (
            {"env": [{"id": "a", "rollouts_per_example": 3}]},
            "must be a multiple of `rollouts_per_example` of the environments",
        ),
        (
            {"env": [{"id": "a", "rollouts_per_example": 1}]},
            r"orchestrator.env\[0\].rollouts_per_example must be at least 2 for",
        ),
        ({"rollouts_per_example": 1}, "orchestrator.rollouts_per_example must be at least 2 for grpo"),
    ],
)
def test_sizes_that_make_no_batch_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        config(**changes)


def test_sizes_of_their_own_leave_the_runs_alone() -> None:
    envs = [{"id": "a", "rollouts_per_example": 2}, {"id": "b", "rollouts_per_example": 4}]
    assert config(rollouts_per_example=1, env=envs).group_sizes == {"a": 2, "b": 4}
    evaluated = config(env=envs, eval={}).eval
    assert [env.rollouts_per_example for env in evaluated.env] == [None, None], "an evaluation takes none of it over"


@pytest.mark.parametrize("is_playing", [False, True])
async def test_a_batch_for_whose_rest_the_spool_has_no_room_is_refused_and_no_wait_without_end(
    is_playing: bool,
) -> None:
    refusal = Refusal(reason="SPOOL_FULL", message="the spool keeps 6", remedy="raise MILLRACE_SPOOL_BYTES")
    loop = loop_of(config(), [whole(0, 4)])
    last = make_play(1, group_size=4)
    if is_playing:
        last.place("env-server", replica="r", timeout_s=60.0)
    changed = asyncio.Event()
    changed.set()
    loop.book = cast("Any", SimpleNamespace(step=0, whole=loop.book.whole, open=[last], plays={}, changed=changed))
    loop.failures = cast("Any", SimpleNamespace(outage="", not_before=0.0))
    loop.full_spool = lambda: refusal
    try:
        await loop.wait_for_change()
        [wait] = [each for each in waits.snapshot("x") if "for batch 0" in each.reason]
        assert wait.refusal == (None if is_playing else refusal)
    finally:
        loop.wait.over()
