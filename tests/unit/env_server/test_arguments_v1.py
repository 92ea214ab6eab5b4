"""Reward and metric functions of v1 tasks that want what is not passed: refused when the environment is loaded."""

import functools
import re
from typing import Any

import pytest
import verifiers.v1 as vf

from millrace.env_server.adapters.watched_v1 import refuse_unknown_arguments
from millrace.errors import InvalidSpecError


class Good(vf.Task[vf.TaskData]):
    @vf.reward
    async def by_trace(self, trace: vf.Trace, task: Any, runtime: Any, level: int = 1, **more: Any) -> float:
        return 1.0

    @vf.metric
    def plain(self) -> float:
        return 1.0


class Wants(vf.Task[vf.TaskData]):
    @vf.reward
    async def hard(self, trace: vf.Trace, difficulty: int) -> float:
        return 1.0


class Measures(vf.Task[vf.TaskData]):
    @vf.metric
    async def length(self, completion: str, *, answer: str) -> float:
        return 1.0


def given(function: Any) -> Any:
    @functools.wraps(function)
    async def call(*args: Any, **kwargs: Any) -> Any:
        return await function(*args, difficulty=1, **kwargs)

    return call


class Decorated(vf.Task[vf.TaskData]):
    @vf.reward
    @given
    async def hard(self, trace: vf.Trace, difficulty: int) -> float:
        return 1.0


class Overrides(Wants):
    async def hard(self, trace: vf.Trace, difficulty: int = 1) -> float:  # it is no reward any more
        return 1.0


class ScoresItself(Wants):
    async def score(self, trace: Any, runtime: Any = None) -> None:
        return None


def task(kind: type[vf.Task[Any]]) -> vf.Task[Any]:
    return kind(vf.TaskData(idx=0, prompt="a"), kind.config_type()())


@pytest.mark.parametrize("kind", [Good, Decorated, Overrides, ScoresItself])
def test_what_can_be_called_is_taken(kind: type[vf.Task[Any]]) -> None:
    refuse_unknown_arguments([task(kind), task(Good)])


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Wants, "reward function 'hard' wants 'difficulty', which the library does not pass; it may ask for"),
        (Measures, "metric function 'length' wants 'answer' and 'completion', which the library does not pass"),
    ],
)
def test_what_cannot_is_refused_with_what_may_be_asked_for(kind: type[vf.Task[Any]], said: str) -> None:
    with pytest.raises(InvalidSpecError) as raised:
        refuse_unknown_arguments([task(Good), task(kind)])
    assert raised.value.reason == "ENV_REWARD_ARGUMENTS" and "give " in (raised.value.remedy or "")
    message = raised.value.message
    assert said in message and "it may ask for runtime, task, trace" in message
    assert re.search(r"test_arguments_v1\.py:\d+ in (hard|length)", message)
