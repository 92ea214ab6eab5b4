"""Reward functions that want what their rubric does not pass: refused when the environment is loaded, and only then."""

import functools
import re
from typing import Any

import pytest
import verifiers as vf
from datasets import Dataset

from millrace.env_server.adapters.client_v0 import LeanClient
from millrace.env_server.adapters.failures import describe_error
from millrace.env_server.adapters.rubrics_v0 import refuse_unknown_arguments
from millrace.env_server.library.v0 import note_columns
from millrace.errors import InvalidSpecError

ROW = {"question": "a", "answer": "b", "level": 1}


def hard(completion: Any, answer: str, difficulty: int) -> float:
    return 1.0


def named(completion: Any, *, difficulty: int, **kwargs: Any) -> float:
    return 1.0


def ranked(completions: Any, difficulties: Any) -> list[float]:
    return [1.0] * len(completions)


def easy(completion: Any, level: int, parser: Any, difficulty: int = 1) -> float:
    return 1.0


def all_of_them(**kwargs: Any) -> float:
    return 1.0


def together(completions: Any, states: Any, parser: Any) -> list[float]:
    return [1.0] * len(completions)


def given(func: Any) -> Any:
    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        return func(*args, difficulty=1, **kwargs)

    return call


class Scoring(vf.Rubric):
    """Reward functions of its own, called as the library does."""

    def __init__(self, name: str) -> None:
        super().__init__(funcs=[getattr(self, name)])

    def wants(self, completion: Any, difficulty: int) -> float:
        return 1.0

    def fine(self, completion: Any, level: int) -> float:
        return 1.0


class Calling(vf.Rubric):
    """Calls reward functions in its own way."""

    async def _call_individual_reward_func(self, func: Any, state: Any) -> float:
        return float(func("", "", difficulty=1))


class Preparing(vf.SingleTurnEnv):
    """Gives its rubric more when a rollout begins."""

    async def setup_state(self, state: Any) -> Any:
        self.rubric.add_class_object("difficulty", 1)
        return state


def load(rubric: vf.Rubric, kind: type[vf.SingleTurnEnv] = vf.SingleTurnEnv) -> None:
    env = kind(dataset=Dataset.from_list([ROW, ROW]), rubric=rubric)
    session: Any = None
    refuse_unknown_arguments(env, dict(env.get_dataset()[0]), client=LeanClient("http://127.0.0.1", session))


@pytest.mark.parametrize(
    ("rubric", "text"),
    [
        (lambda: vf.Rubric(funcs=[hard]), r"'hard' wants 'difficulty', .* answer, completion, .*level, parser, prompt"),
        (lambda: vf.Rubric(funcs=[named]), r"'named' wants 'difficulty'"),
        (lambda: vf.Rubric(funcs=[ranked]), r"'ranked' wants 'difficulties', .* answers, completions, .*states"),
        (lambda: vf.RubricGroup(rubrics=[vf.Rubric(funcs=[easy]), vf.Rubric(funcs=[hard])]), r"'hard' wants"),
        (lambda: Scoring("wants"), r"'wants' wants 'difficulty'"),
    ],
)
def test_an_argument_that_nobody_passes_is_refused_with_those_that_may_be_asked_for(rubric: Any, text: str) -> None:
    with pytest.raises(InvalidSpecError, match=text) as caught:
        load(rubric())
    kind, message, remedy = describe_error(caught.value)
    assert kind == "ENV_REWARD_ARGUMENTS" and re.search(r" \(at .*test_arguments_v0\.py:\d+ in \w+\)$", message)
    assert remedy.startswith("let it ask for one of those, or give 'difficult")


@pytest.mark.parametrize(
    "rubric",
    [
        lambda: vf.Rubric(funcs=[easy, all_of_them, together]),
        lambda: vf.Rubric(funcs=[given(hard)]),
        lambda: vf.Rubric(funcs=[functools.partial(hard, difficulty=2)]),  # type: ignore[list-item]
        lambda: Scoring("fine"),
        lambda: Calling(funcs=[hard]),
    ],
)
def test_what_the_library_can_call_is_not_refused(rubric: Any) -> None:
    load(rubric())


def test_a_class_object_is_an_argument() -> None:
    rubric = vf.Rubric(funcs=[hard])
    rubric.add_class_object("difficulty", 3)
    load(rubric)


def test_an_environment_whose_own_code_may_pass_more_is_not_refused() -> None:
    load(vf.Rubric(funcs=[hard]), Preparing)


def test_a_missing_column_is_told_with_those_that_there_are() -> None:
    note_columns()
    note_columns()  # once is enough
    rows = Dataset.from_list([{"questoin": "a", "answer": "b"}])
    with pytest.raises(KeyError) as caught:
        vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[easy])).get_dataset()
    assert "'question'; the data set has columns 'questoin', 'answer'" in describe_error(caught.value)[1]
    with pytest.raises(KeyError) as other:
        rows.filter(lambda row: {"a": 1}[row["answer"]] == 1)
    assert describe_error(other.value)[1].startswith("'b'; the data set has columns 'questoin', 'answer' ("), (
        "nobody can tell whose key it was"
    )
    with pytest.raises(KeyError) as known:
        rows.map(lambda row: {"x": {}["answer"]})
    assert "columns" not in describe_error(known.value)[1]
