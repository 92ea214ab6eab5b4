"""What is watched of the library's rubrics, with the library's own class."""

import asyncio
import inspect
import logging
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import verifiers as vf

from millrace.env_server.adapters.outcome import number_of
from millrace.env_server.adapters.rubrics_v0 import SCORED, Scored, watch_rubrics

watch_rubrics(vf.Rubric)
watch_rubrics(vf.Rubric)  # once is enough


def state(key: str = "t", *rewards: float | None) -> Any:
    steps = [{"reward": reward, "advantage": None} for reward in rewards]
    return vf.State(
        input={"prompt": "p", "answer": "", "info": {}}, completion="c", trajectory=steps, trajectory_id=key
    )


async def scored(rubric: vf.Rubric, key: str = "t") -> tuple[Any, Scored]:
    found = state(key)
    await rubric.score_rollout(found)
    return found, SCORED.take(key)


def bad(completion: str, answer: str) -> float:
    raise ValueError("oops")


async def test_what_a_function_raises_is_noted_with_its_own_line() -> None:
    _, noted = await scored(vf.Rubric(funcs=[bad]))
    [failure] = noted.failures
    assert failure.message == "reward function 'bad' raised ValueError: oops"
    assert failure.frames.endswith('in bad: raise ValueError("oops")')
    assert SCORED.take("t").failures == [], "notes are forgotten when they are taken"


async def test_notes_are_of_the_rollout_that_was_scored_in_whichever_task_it_was() -> None:
    """An environment may score in a task that was started long before."""
    rubric, asked = vf.Rubric(funcs=[bad]), asyncio.Queue[Any]()

    async def work() -> None:
        while True:
            found = await asked.get()
            await rubric.score_rollout(found)
            asked.task_done()

    task = asyncio.create_task(work())
    with SCORED.playing() as unnamed:
        for key in ("a", "b"):
            asked.put_nowait(state(key))
        await asked.join()
    task.cancel()
    assert len(SCORED.take("a").failures) == len(SCORED.take("b").failures) == 1
    assert unnamed.failures == []


async def test_a_state_without_an_id_is_of_the_play_that_scores_it() -> None:
    nameless = state("")
    with SCORED.playing() as unnamed:
        await asyncio.create_task(vf.Rubric(funcs=[bad]).score_rollout(nameless))
    assert len(unnamed.failures) == 1


async def test_rubrics_with_calls_of_their_own_are_watched_also_those_of_later_classes() -> None:
    class Own(vf.Rubric):
        async def _call_individual_reward_func(self, func: Any, state: Any) -> float:
            try:
                return float(func(completion="", answer=""))
            except ValueError:
                return 0.0

    class Around(Own):
        async def _call_individual_reward_func(self, func: Any, state: Any) -> float:
            return await vf.Rubric._call_individual_reward_func(self, func, state)

    _, noted = await scored(Around(funcs=[bad]))
    assert len(noted.failures) == 1, "and once, through two calls"


async def test_the_signature_by_which_functions_are_told_apart_is_kept() -> None:
    seen: list[inspect.Signature] = []

    class Looks(vf.Rubric):
        async def _call_individual_reward_func(self, func: Any, state: Any) -> float:
            seen.append(inspect.signature(func))
            return await super()._call_individual_reward_func(func, state)

    await scored(Looks(funcs=[bad]))
    assert seen == [inspect.signature(bad)]


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (None, "returned None, not a list"),
        ("ab", "returned 'a', which is no number"),
        ({0: 1.0, 1: 2.0}, "not a list"),
        ({1.0, 2.0}, "not a list"),
        ([1.0], "returned 1 numbers for the 2 members"),
        ([1.0, 2.0, 3.0], "returned 3 numbers for the 2 members"),
        ([1.0, None], "returned None, which is no number"),
        (np.asarray([1.0, np.nan]), ""),
        ((number for number in (1.0, 2.0)), ""),
    ],
)
async def test_a_function_of_a_group_returns_a_number_for_each_member(returned: Any, said: str) -> None:
    def compared(completions: list[Any]) -> list[float]:
        return returned

    members = [state("a", None), state("b", None)]
    await vf.Rubric(funcs=[compared]).score_group(members)
    noted = [SCORED.take("a"), SCORED.take("b")]
    assert all((said in each.failures[0].message) if said else not each.failures for each in noted)


async def test_the_library_gives_no_turn_of_a_group_a_reward() -> None:
    """0.0 is what the environment gave; what a reward function gives while it compares is the environment's, too."""

    def compared(completions: list[Any], states: list[Any]) -> list[float]:
        states[0]["trajectory"][1]["reward"] = 2.0
        return [2.0, 1.0]

    first, second = state("a", None, None, 0.0), state("b", None)
    group = vf.RubricGroup(rubrics=[vf.Rubric(funcs=[compared]), vf.Rubric(funcs=[lambda completion: 1.0])])
    await group.score_group([first, second])
    assert (first["reward"], second["reward"]) == (3.0, 2.0)
    assert [step["reward"] for step in first["trajectory"]] == [None, 2.0, 0.0]
    assert [step["reward"] for step in second["trajectory"]] == [None]


async def test_what_a_rubric_that_catches_for_itself_warns_of_is_counted() -> None:
    async def careful(completion: str) -> float:
        logging.getLogger(f"{vf.Rubric.__module__}.MathRubric").warning("Math verification failed: timeout")
        return 0.0

    _, noted = await scored(vf.Rubric(funcs=[careful]))
    assert noted.metrics_with({"careful": 0.0}) == {"careful": 0.0, "rubric_warnings": 1}


async def test_a_function_of_weight_0_may_return_metrics() -> None:
    def parts(completion: str) -> Any:
        return {"length": 3, "depth": np.float32(1.5)}

    found, noted = await scored(vf.Rubric(funcs=[lambda completion: 1.0, parts], weights=[1.0, 0.0]))
    assert found["reward"] == 1.0 and noted.failures == []
    assert noted.metrics_with({"f": 1.0, "parts": 0.0}) == {"f": 1.0, "length": 3, "depth": 1.5}
    _, weighed = await scored(vf.Rubric(funcs=[parts]))
    assert "returned {'length': 3" in weighed.failures[0].message


async def test_metrics_are_written_over_no_rewards() -> None:
    def exact(completion: str) -> float:
        return 1.0

    def parts(completion: str) -> Any:
        return {"exact": 0.25, "parts": 2, "length": 3}

    _, noted = await scored(vf.Rubric(funcs=[exact, parts], weights=[1.0, 0.0]))
    found = noted.metrics_with({"exact": 1.0, "parts": 0.0})
    assert found == {"exact": 1.0, "parts/exact": 0.25, "parts": 2, "length": 3}


async def test_what_counts_anywhere_returns_numbers() -> None:
    def parts(completion: str) -> Any:
        return {"length": 3}

    _, noted = await scored(vf.Rubric(funcs=[parts, parts], weights=[0.0, 1.0]))
    assert "returned {'length': 3" in noted.failures[0].message


@pytest.mark.parametrize("raised", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()])
@pytest.mark.parametrize("is_group", [False, True])
async def test_what_would_end_more_than_its_rollout_is_a_failed_reward(raised: BaseException, is_group: bool) -> None:
    def ends(completion: str) -> float:
        raise raised

    found, rubric = state(), vf.Rubric(funcs=[ends])
    await (rubric.score_group([found]) if is_group else rubric.score_rollout(found))
    assert f"'ends' raised {type(raised).__name__}" in SCORED.take("t").failures[0].message


async def test_a_rollout_that_is_cancelled_is_cancelled_while_it_is_scored() -> None:
    async def waits(completion: str) -> float:
        await asyncio.sleep(60)
        return 1.0

    task = asyncio.create_task(vf.Rubric(funcs=[waits]).score_rollout(state()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not SCORED.take("t").failures


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (True, 1.0),
        (0, 0.0),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3.0),
        (np.bool_(1), 1.0),
        (np.asarray(2.0), 2.0),
        (Decimal("0.5"), 0.5),
        (Fraction(1, 4), 0.25),
    ],
)
def test_numbers_of_any_library(value: Any, number: float) -> None:
    assert number_of(value) == number and type(number_of(value)) is float


@pytest.mark.parametrize(
    "value",
    [
        "0.5",
        b"1",
        None,
        [1.0],
        {},
        1j,
        np.str_("0.5"),
        np.asarray("0.5"),
        np.complex64(1 + 2j),
        np.asarray([1.0, 2.0]),
        object(),
    ],
)
def test_what_is_no_number(value: Any) -> None:
    with pytest.raises(TypeError, match="which is no number"):
        number_of(value)


def test_what_a_library_cannot_make_a_number_of_is_none() -> None:
    class Tensor:
        def __float__(self) -> float:
            raise RuntimeError("a Tensor with 2 elements cannot be converted to Scalar")

    with pytest.raises(TypeError, match="which is no number"):
        number_of(Tensor())
