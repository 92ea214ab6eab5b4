"""What a teacher learns of a task: told of when the environment is loaded, if no task has it."""

import json
import types
from typing import Any

import pytest
import verifiers as vf
from datasets import Dataset

from millrace.env_server.adapters.outcome import require_demonstrations
from millrace.env_server.adapters.v0 import V0Adapter
from millrace.errors import InvalidSpecError
from millrace.internal.v1.play_pb2 import EnvSpec


def load(key: str, rows: list[dict[str, Any]]) -> V0Adapter:
    def load_environment() -> vf.Environment:
        return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=vf.Rubric())

    module: Any = types.SimpleNamespace(load_environment=load_environment)
    return V0Adapter.load(EnvSpec(id="a", demo_key=key), module, {})


@pytest.mark.parametrize("info", [{"steps": "one, two"}, json.dumps({"steps": "one, two"})])
def test_a_field_that_a_task_has_is_taken(info: Any) -> None:
    for key in ("answer", "steps", ""):
        load(key, [{"question": "q", "answer": "b", "info": info}])


def test_one_that_none_has_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(InvalidSpecError) as refused:
        load("demonstration", [{"question": "q", "answer": "b", "info": {"steps": "one"}}] * 3)
    assert refused.value.reason == "ENV_LOAD_FAILED"
    assert "none of its first 3 training tasks has `demonstration`" in str(refused.value)
    assert "(they have answer, steps)" in str(refused.value) and "demo_key" in str(refused.value)


def test_one_task_of_many_is_enough_and_an_empty_one_is_none() -> None:
    require_demonstrations(iter([{"a": 1}, {"a": 1, "b": "x"}]), "b")
    require_demonstrations(iter(()), "b")
    with pytest.raises(InvalidSpecError):
        require_demonstrations(iter([{"a": 1, "b": ""}, {"b": None}]), "b")
