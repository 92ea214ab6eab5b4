"""A function of the user's own that says which task an ordinal draws."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from millrace.config.sections.buffer import BufferConfig
from millrace.errors import InvalidSpecError
from millrace.orchestrator.play.pools import GroupResult, Pools, TaskBuffer, Thresholds
from millrace.orchestrator.play.tasks import Sampler, TaskSource
from millrace.telemetry import waits
from millrace_testing.patience import patient
from millrace_testing.polling import until

A, B = TaskSource(env="a", num_tasks=4, digest="x"), TaskSource(env="b", num_tasks=3, digest="y")
TASKS = {"a": np.arange(4), "b": np.arange(3)}


def sampler(function: Callable[..., Any], **kwargs: Any) -> Sampler:
    return Sampler(function, import_path="own.tasks:fn", kwargs=kwargs, seed=5)


async def test_it_is_given_what_may_be_drawn_the_step_the_seed_and_its_own_arguments() -> None:
    seen: list[Any] = []

    def fn(ordinal: int, tasks: Any, **rest: Any) -> tuple[str, int]:
        seen.append((ordinal, {env: list(indices) for env, indices in tasks.items()}, rest))
        return "b", 2

    pools = Pools().after(
        [GroupResult(env="a", task_index=1, reward=1.0)],
        Thresholds(easy=0.8, hard=0.2),
        step=1,
        drawn_below=3,
        resolved_below=3,
    )
    config = BufferConfig(easy_threshold=0.8, hard_threshold=0.2, sampler="own.tasks:fn")
    drawer = TaskBuffer([A, B], config, seed=5, pools=lambda: pools, sampler=sampler(fn, hardest=True))
    await drawer.choose([7, 7])
    ref = drawer.task(7)
    assert (ref.ordinal, ref.env, ref.task_index) == (7, "b", 2)
    assert seen == [(7, {"a": [0, 2, 3], "b": [0, 1, 2]}, {"step": 1, "seed": 5, "hardest": True})]


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (None, "returned None for ordinal 3, not (environment, index of a task)"),
        (("a", 1.0), "not (environment, index of a task)"),
        (("c", 1), "named environment 'c' for ordinal 3; there are a, b"),
        ((["a"], 1), "named environment ['a'] for ordinal 3"),
        (("b", 3), "named task 3 of 'b' for ordinal 3, which is not in"),
        (("b", -1), "named task -1"),
    ],
)
async def test_an_answer_that_names_no_task_is_refused(answer: Any, says: str) -> None:
    with pytest.raises(InvalidSpecError) as raised:
        await sampler(lambda *_, **__: answer).choose(3, TASKS, step=0)
    [violation] = raised.value.violations
    assert violation.field == "orchestrator.buffer.sampler" and says in violation.message


async def test_what_it_raises_is_said() -> None:
    def fn(*_: Any, **__: Any) -> tuple[str, int]:
        raise KeyError("difficulty")

    with pytest.raises(InvalidSpecError, match="KeyError"):
        await sampler(fn).choose(0, TASKS, step=0)


async def test_a_trial_finds_slow_and_changing_answers() -> None:
    asked: list[int] = []

    def counts(ordinal: int, tasks: Any, **_: Any) -> tuple[str, int]:
        asked.append(ordinal)
        return "a", len(asked) % 4 if len(asked) > 8 else 0

    def sleeps(ordinal: int, tasks: Any, **_: Any) -> tuple[str, int]:
        time.sleep(0.15)
        return "a", 0

    await sampler(lambda ordinal, tasks, **_: ("a", ordinal % 4)).try_out([A, B])
    for function, says in ((counts, "use only its arguments"), (sleeps, "the run waits for each")):
        with pytest.raises(InvalidSpecError) as raised:
            await sampler(function).try_out([A, B])
        assert says in raised.value.violations[0].message


async def test_a_function_that_never_returns_keeps_no_thread_that_others_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.orchestrator.play.tasks._TRIED_WITHIN_S", 0.1)
    before, is_over = set(threading.enumerate()), threading.Event()

    def blocks(ordinal: int, tasks: Any, **_: Any) -> tuple[str, int]:
        is_over.wait()
        return "a", 0

    try:
        with pytest.raises(InvalidSpecError, match=r"took more than 0\.1 s"):
            await sampler(blocks).try_out([A, B])
        stuck = [thread for thread in threading.enumerate() if thread not in before]
        assert stuck and all(thread.daemon for thread in stuck), "the end of the process would wait for the others"
    finally:
        is_over.set()


async def test_a_slow_call_holds_up_nothing_but_who_asked() -> None:
    entered, may_go = threading.Event(), threading.Event()

    def slow(ordinal: int, tasks: Any, **_: Any) -> tuple[str, int]:
        entered.set()
        assert may_go.wait(patient(20)), "the event loop stood still"
        return "a", ordinal % 4

    drawer = TaskBuffer([A, B], BufferConfig(sampler="own.tasks:fn"), seed=5, pools=Pools, sampler=sampler(slow))
    drawing = asyncio.create_task(drawer.choose([6, 7]))
    await until(entered.is_set, what="the function is called")
    shown = "the task of ordinal 6, which 'own.tasks:fn' chooses"
    await until(lambda: shown in [wait.reason for wait in waits.snapshot("test")], what="its wait is shown")
    may_go.set()
    await drawing
    assert [drawer.task(ordinal).task_index for ordinal in (6, 7)] == [2, 3]


async def test_a_call_that_never_returns_ends_with_the_function_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.orchestrator.play.tasks._CHOSEN_WITHIN_S", 0.1)
    is_over = threading.Event()

    def blocks(ordinal: int, tasks: Any, **_: Any) -> tuple[str, int]:
        is_over.wait()
        return "a", 0

    try:
        with pytest.raises(InvalidSpecError, match=r"took more than 0\.1 s for ordinal 3 \(got own\.tasks:fn\)"):
            await sampler(blocks).choose(3, TASKS, step=0)
    finally:
        is_over.set()
