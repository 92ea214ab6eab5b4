"""Tasksets of the library whose options, packages or tasks are wrong or not here: refused at load, with what to do."""

import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verifiers")

from millrace.env_server.adapters import library_tasksets as tasksets
from millrace.env_server.adapters.failures import describe_error
from millrace.env_server.adapters.v1 import V1Adapter
from millrace.errors import InvalidSpecError
from millrace.internal.v1.play_pb2 import EnvSpec


@pytest.mark.parametrize(
    ("env_id", "args", "package"),
    [("openenv", {"base_url": "http://127.0.0.1:9"}, "openenv"), ("harbor", {}, "harbor")],
)
def test_a_taskset_whose_extra_is_missing_names_it(
    monkeypatch: pytest.MonkeyPatch, env_id: str, args: dict[str, Any], package: str
) -> None:
    monkeypatch.setattr(tasksets, "find_spec", lambda name: None)
    with pytest.raises(InvalidSpecError) as caught:
        V1Adapter.load(EnvSpec(name=env_id, id=env_id), args)
    assert caught.value.reason == "ENV_PACKAGE_MISSING"
    assert f"(the extra `{package}` of verifiers" in str(caught.value)
    assert f"'verifiers[{package}]==" in str(caught.value.remedy) and "'renderers>=" in str(caught.value.remedy)


def test_a_python_that_the_extra_is_not_for_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasksets, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "version_info", (3, 11, 9))
    with pytest.raises(InvalidSpecError, match=r"whose Python is 3\.11; the package needs 3\.12 or later") as caught:
        V1Adapter.load(EnvSpec(name="harbor", id="harbor"), {})
    assert "python3.12 -m venv" in str(caught.value.remedy)


def test_what_no_extra_brings_or_nobody_imports_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """`nemo_gym` needs its package for servers alone, which run elsewhere."""
    import verifiers.v1.tasksets.nemo_gym

    assert verifiers.v1.tasksets.nemo_gym
    monkeypatch.setattr(tasksets, "find_spec", lambda name: None)
    tasksets.require_packages("nemo_gym")
    tasksets.require_packages("rev-text-v1")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of a hub of Harbor that does not listen."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
    constants = ModuleType("harbor.auth.constants")
    constants.SUPABASE_URL = f"http://{address}"  # type: ignore[attr-defined]
    for name in ("harbor", "harbor.auth"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "harbor.auth.constants", constants)
    monkeypatch.setattr(tasksets, "getproxies", dict)
    return address


def test_tasks_of_a_hub_that_does_not_answer_are_refused_until_they_are_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hub: str
) -> None:
    from verifiers.v1.tasksets.harbor import taskset as harbor

    monkeypatch.setattr(harbor, "CACHE", tmp_path)
    mine = SimpleNamespace(config=harbor.HarborConfig(id="harbor", dataset="some/tasks"))
    with pytest.raises(InvalidSpecError, match=r"args\.dataset: its tasks are not in .*does not answer") as caught:
        tasksets.require_data(mine)
    assert caught.value.reason == "ENV_DATA_MISSING"
    assert f"harbor download some/tasks --export -o DIRECTORY`, and bring that directory to {tmp_path}" in str(
        caught.value.remedy
    )
    harbor.cache_dir(mine.config).mkdir()
    tasksets.require_data(mine)
    own = harbor.HarborConfig(id="harbor", dataset="tasks", registry_url="http://127.0.0.1:9/registry.json")
    tasksets.require_data(SimpleNamespace(config=own))


def refusal_of(env_id: str, args: dict[str, Any]) -> tuple[str, str]:
    """What a worker reports of an environment that does not load: (reason, message)."""
    with pytest.raises(InvalidSpecError) as caught:
        V1Adapter.load(EnvSpec(name=env_id, id=env_id), args)
    reason, message, remedy = describe_error(caught.value)
    assert remedy and "Error" not in reason and "pydantic.dev" not in message
    return reason, message


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({}, "args.dataset: field required"),
        ({"dataset": 3}, "args.dataset: input is not a valid path"),
        ({"dataset": "x", "task": "y"}, "args.task: input should be a valid dictionary"),
        ({"dataset": "x", "task": {"resource_url": "y"}}, "args.task.resource_url: extra inputs are not permitted"),
        ({"dataset": "x", "task": {"request_timeout": -1}}, "args.task.request_timeout: input should be greater than"),
        ({"dataset": "x", "env": {"agent": {"max_turns": "two"}}}, "args.env.agent.max_turns: input should be a valid"),
        ({"dataset": "x", "eval_args": {"dataset": 3}}, "args.dataset: input is not a valid path"),
    ],
)
def test_an_option_that_a_taskset_does_not_take_is_named_by_its_key(
    tmp_path: Path, args: dict[str, Any], said: str
) -> None:
    if args.get("dataset") == "x":
        args = args | {"dataset": str(tasks_file(tmp_path, WHOLE))}
    reason, message = refusal_of("nemo_gym", args)
    assert reason == "ENV_ARGS_INVALID" and message.startswith(said), message


def test_every_wrong_option_is_in_the_one_message() -> None:
    reason, message = refusal_of("nemo_gym", {"datset": "x", "task": {"request_timeout": "soon"}})
    assert reason == "ENV_ARGS_INVALID" and message.startswith("3 violations: ")
    for key in ("args.dataset: ", "args.datset: ", "args.task.request_timeout: "):
        assert key in message


WHOLE = '{"responses_create_params": {"input": "add one"}}\n'


def tasks_file(place: Path, text: str | bytes) -> Path:
    path = place / "tasks.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (WHOLE * 2 + '{"x": 1}\n', "a task cannot be read, after 2 that can (lacks the key 'responses_create_params')"),
        (WHOLE + '{"x": \n', "a task cannot be read, after 1 that can (JSONDecodeError: "),
        ("\n", "a task cannot be read (ValueError: "),
        ("[1]\n", "a task cannot be read (TypeError: "),
        (b"\xff\xfe{}\n", "a task cannot be read (UnicodeDecodeError: "),
        ('{"responses_create_params": 5}\n', "a task cannot be read (AttributeError: "),
    ],
)
def test_a_broken_file_of_tasks_is_named_by_the_option_that_has_it(
    tmp_path: Path, text: str | bytes, said: str
) -> None:
    path = tasks_file(tmp_path, text)
    reason, message = refusal_of("nemo_gym", {"dataset": str(path)})
    assert reason == "ENV_DATA_INVALID" and message.startswith(f"args.dataset: {said}"), message
    path.write_text(WHOLE)
    V1Adapter.load(EnvSpec(name="nemo_gym", id="nemo_gym"), {"dataset": str(path)})


def test_a_file_of_tasks_that_is_not_there_is_named(tmp_path: Path) -> None:
    missing = str(tmp_path / "none.jsonl")
    reason, message = refusal_of("nemo_gym", {"dataset": missing})
    assert reason == "ENV_DATA_MISSING"
    assert message == f"args.dataset: No such file or directory where workers run (got {missing})"
    reason, message = refusal_of("nemo_gym", {"dataset": str(tmp_path)})
    assert reason == "ENV_DATA_MISSING" and "args.dataset: Is a directory" in message


def test_errors_of_code_that_is_not_the_librarys_stay_as_they_are(tmp_path: Path) -> None:
    """Their author looks for the line that raised."""

    def broken(error: Exception) -> Iterator[Any]:
        yield 1
        raise error

    for error in (KeyError("answer"), FileNotFoundError(2, "No such file", str(tmp_path / "other"))):
        tasks = broken(error)
        with pytest.raises(type(error)), tasksets.tasks_checked("rev-text-v1", (), {"data": str(tmp_path)}):
            list(tasks)


def test_a_task_of_another_form_is_said_in_one_line() -> None:
    """As the task files of `harbor`, which are checked by a schema, and missed without a path."""
    import verifiers.v1.tasksets.nemo_gym
    from verifiers.v1.tasksets.nemo_gym.taskset import NeMoGymTaskConfig

    assert verifiers.v1.tasksets.nemo_gym

    def broken() -> Iterator[Any]:
        yield 1
        NeMoGymTaskConfig.model_validate({"headers": 3, "request_timeout": "soon"})

    with pytest.raises(InvalidSpecError) as caught, tasksets.tasks_checked("nemo_gym", broken(), {}):
        list(broken())
    assert caught.value.reason == "ENV_DATA_INVALID"
    said = (
        "args: a task cannot be read, after 1 that can (headers: Input should be a valid dictionary; request_timeout: "
    )
    assert str(caught.value).startswith(said)
    expected = pytest.raises(InvalidSpecError, match="args: where workers run: a has no instruction")
    with expected as missed, tasksets.tasks_checked("nemo_gym", (), {}):
        raise FileNotFoundError("a has no instruction.md")
    assert missed.value.reason == "ENV_DATA_MISSING"


def test_what_may_be_a_misspelt_secret_is_not_shown() -> None:
    _, message = refusal_of("nemo_gym", {"dataset": "x", "api_kye": "sk-123"})
    assert "args.api_kye: extra inputs are not permitted" in message and "sk-123" not in message
