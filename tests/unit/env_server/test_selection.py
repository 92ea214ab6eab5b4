"""`select`: which tasks are trained on, and which are evaluated, of environments of both generations."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
import verifiers as vf
from datasets import Dataset
from pydantic import ValidationError

from millrace.config import RLConfig
from millrace.config.sections.environments import SelectConfig, selection_json
from millrace.env_server.adapters.selection import EveryTask, selected_tables, tasks_of
from millrace.env_server.adapters.v0 import V0Adapter
from millrace.errors import InvalidSpecError

SIZE = 20


def select(**values: Any) -> SelectConfig:
    return SelectConfig.model_validate(values)


def numbers(size: int, *, start: int = 0) -> EveryTask:
    """Return tasks that are numbers, called `id-N`; two have the same name."""
    return EveryTask(
        size=size,
        row=lambda index: start + index,
        content=lambda index: start + index,
        named=lambda index, kind: {"ids": [f"id-{start + index}"], "names": [f"{index // 2}"], "keys": []}[kind],
    )


def chosen(train: SelectConfig | None = None, evaluated: SelectConfig | None = None, **more: Any) -> Any:
    trained = more.pop("trained", [train])
    text = selection_json(train=train, evaluated=evaluated, trained=trained, **more.pop("json", {}))
    tables = selected_tables(
        text, train=more.get("whole", numbers(SIZE)), held_out=more.get("held_out"), is_mixed=False
    )
    return tuple([table.row(index) for index in range(len(table))] for table in tables)


@pytest.mark.parametrize(
    ("values", "tasks"),
    [
        ({}, range(SIZE)),
        ({"limit": 3}, [0, 1, 2]),
        ({"skip": 17, "limit": 9}, [17, 18, 19]),
        ({"include": {"idx": "0:10:5,17"}}, [0, 5, 17]),
        ({"include": {"idx": 4}}, [4]),
        ({"include": {"idx": ["18:", 3]}}, [3, 18, 19]),
        ({"include": {"ids": ["id-7", "id-2"]}, "exclude": {"idx": [2]}}, [7]),
        ({"include": {"names": ["3"]}}, [6, 7]),
        ({"exclude": {"idx": "::2"}, "skip": 8}, [17, 19]),
        ({"shuffle": True, "limit": 4}, [10, 18, 16, 14]),
        ({"shuffle": True, "seed": 3, "include": {"idx": ":6"}}, [0, 2, 3, 5, 4, 1]),
    ],
)
def test_the_steps_are_those_of_verifiers_0_4(values: dict[str, Any], tasks: Sequence[int]) -> None:
    """The orders are what `Taskset.select` of verifiers 0.4.0 gives for a taskset of twenty."""
    assert chosen(select(**values))[0] == list(tasks)


def test_keys_are_the_task_ids_of_samples() -> None:
    ids = numbers(SIZE).table(range(SIZE)).ids
    assert chosen(select(include={"keys": [ids[11]]}))[0] == [11]


def test_the_tasks_that_are_selected_are_a_set_of_their_own() -> None:
    """Same digest as an environment that has these tasks alone, another than that of all."""
    whole = numbers(SIZE)
    text = selection_json(train=select(include={"idx": "5:8"}))
    train, _ = selected_tables(text, train=whole, held_out=None, is_mixed=False)
    assert train.digest == numbers(3, start=5).table(range(3)).digest != whole.table(range(SIZE)).digest
    assert list(train.ids) == list(whole.table(range(SIZE)).ids[5:8])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"include": {"ids": ["id-3", "id-30", "x"]}}, ["include.ids", "names 2 of 3 tasks", "'id-30', 'x'", "'id-0'"]),
        ({"include": {"idx": "15:25"}}, ["include.idx", "15 to 24", "there are 20 training tasks: 0 to 19"]),
        ({"exclude": {"idx": "20:"}}, ["exclude.idx", "names positions 20"]),
        ({"exclude": {"names": ["y"]}}, ["exclude.names", "'y'"]),
        ({"skip": 20}, ["leaves none of the 20 training tasks", "skip drops 20 of the 20"]),
        ({"include": {"idx": "0:3"}, "exclude": {"idx": "0:3"}}, ["include keeps 3, exclude names 3"]),
    ],
)
def test_what_is_not_there_is_named_with_what_there_is(values: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(InvalidSpecError) as caught:
        chosen(select(**values))
    assert all(word in str(caught.value) for word in words), caught.value


def test_what_names_no_task_at_all_says_what_else_there_is() -> None:
    whole = EveryTask(size=2, row=lambda index: index, content=lambda index: index)
    with pytest.raises(InvalidSpecError, match="have no names: choose by `idx` or `keys`"):
        chosen(select(include={"names": ["a"]}), whole=whole)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"include": {"idx": "5:2"}}, "slice '5:2' is empty"),
        ({"include": {"idx": "1:9:0"}}, "has a step of 0"),
        ({"include": {"idx": [-1]}}, "'-1' is no position"),
        ({"include": {"idx": ["all"]}}, "'all' is no position"),
        ({"exclude": {"ids": ["a", "b", "a"]}}, "names 'a' twice"),
        ({"exclude": {"idx": [3, "3"]}}, "names '3' twice"),
        ({"limit": 0}, "greater than or equal to 1"),
        ({"includes": {}}, "Extra inputs"),
    ],
)
def test_what_cannot_be_meant_is_refused_when_it_is_read(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        select(**values)


def test_what_is_evaluated_may_not_be_trained_on() -> None:
    first, rest = select(include={"idx": ":15"}), select(exclude={"idx": ":15"})
    assert chosen(first, rest) == (list(range(15)), list(range(15, 20)))
    overlapping = select(include={"idx": "12:"})
    with pytest.raises(InvalidSpecError) as caught:
        chosen(first, overlapping)
    ids = numbers(SIZE).table(range(SIZE)).ids
    words = ["3 of its 8 tasks that are trained on", f"'{ids[12]}', '{ids[13]}', '{ids[14]}'"]
    assert all(word in str(caught.value) for word in words), caught.value
    with pytest.raises(InvalidSpecError, match="2 of its 2 tasks"):
        chosen(None, select(limit=2))
    assert chosen(None, select(limit=2), trained=[]) == (list(range(SIZE)), [0, 1]), "of another environment"
    assert chosen(first, overlapping, held_out=numbers(SIZE, start=100))[1] == [*range(112, 120)]


def test_only_what_is_played_of_an_evaluation_counts_for_the_overlap() -> None:
    first, rest = select(include={"idx": "10:"}), select()
    assert chosen(first, rest, json={"num_evaluated": 5})[1] == [0, 1, 2, 3, 4]


def rl(**orchestrator: Any) -> RLConfig:
    base = {"batch_size": 4, "rollouts_per_example": 2}
    return RLConfig.model_validate({"max_steps": 1, "orchestrator": {**base, **orchestrator}})


def test_an_evaluation_that_follows_training_does_not_take_over_what_is_trained_on() -> None:
    config = rl(env=[{"id": "a", "select": {"limit": 3}}], eval={}).orchestrator
    assert config.eval is not None and [env.select for env in config.eval.env] == [None]
    assert json.loads(config.selections()["a"]).keys() == {"train"}


def test_every_training_selection_of_the_same_environment_is_kept_apart() -> None:
    env = {"id": "a", "args": {"n": 1}}
    envs = [{**env, "name": f"a{at}", "select": {"skip": at, "limit": 1}} for at in range(2)]
    evaluated = [{**env, "name": "held", "select": {"skip": 2}}, {"id": "a", "name": "other", "select": {"limit": 1}}]
    said = rl(env=envs, eval={"env": evaluated, "num_examples": 4}).orchestrator.selections()
    held = json.loads(said["held"])
    assert [each["skip"] for each in held["apart_from"]] == [0, 1] and held["eval"]["limit"] == 4
    assert json.loads(said["other"])["apart_from"] == [], "with other args"
    assert rl(env=[env]).orchestrator.selections() == {"a": ""}


def v0(names: str, *, has_eval: bool = False) -> vf.Environment:
    def one(name: str) -> vf.Environment:
        data = Dataset.from_list([{"question": f"{name}{at}", "answer": "x", "id": f"{name}-{at}"} for at in range(4)])
        held = Dataset.from_list([{"question": f"held {name}{at}", "answer": "x"} for at in range(3)])
        return vf.SingleTurnEnv(dataset=data, eval_dataset=held if has_eval else None, rubric=vf.Rubric())

    return one(names) if len(names) == 1 else vf.EnvGroup(envs=[one(name) for name in names], env_names=list(names))


def questions(table: Any) -> list[str]:
    return [table.row(index)["prompt"][0]["content"] for index in range(len(table))]


def test_v0_environments_and_groups() -> None:
    text = selection_json(train=select(include={"ids": ["a-1", "a-2"]}), evaluated=select(limit=2))
    adapter = V0Adapter(v0("a", has_eval=True), renderer="", select_json=text)
    assert (questions(adapter.train), questions(adapter.eval)) == (["a1", "a2"], ["held a0", "held a1"])
    group = V0Adapter(v0("ab"), renderer="", select_json=selection_json(train=select(limit=4)))
    assert questions(group.train) == ["a0", "b0", "a1", "b1"] and not len(group.eval), "of every child in turn"
    second = selection_json(train=select(include={"idx": "4:"}, exclude={"idx": [5]}))
    assert questions(V0Adapter(v0("ab"), renderer="", select_json=second).train) == ["b0", "b2", "b3"]
    assert [group.loaded.train.ids[at] == table for at, table in enumerate(group.train.ids)] == [True] * 4


def test_an_endless_taskset_of_v1_is_cut_where_its_tasks_are_asked_for() -> None:
    class Data:
        id, name = "x", None

        def model_dump(self, mode: str) -> dict[str, int]:
            return {}

    class Endless:
        INFINITE = True

        def __iter__(self) -> Any:
            while True:
                yield type("Task", (), {"data": Data(), "key": "k"})()

    assert tasks_of(Endless(), 7).size == 7 and list(tasks_of(Endless(), 2).named(1, "ids")) == ["x"]
