"""Tasksets of the library whose packages or tasks are not here: refused at load, with what to do."""

import socket
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verifiers")

from millrace.env_server.adapters import library_tasksets as tasksets
from millrace.env_server.adapters.v1 import V1Adapter
from millrace.errors import InvalidSpecError
from millrace.rollouts.requests import EnvSpec


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
