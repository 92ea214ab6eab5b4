"""Who plays the roles of v1 environments, and where: what the environment needs, what is said, or what is ours."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verifiers")

import verifiers.v1 as vf

from millrace.env_server.adapters import runtimes_v1
from millrace.env_server.adapters.v1 import V1Adapter
from millrace.errors import InvalidSpecError
from millrace.internal.v1.play_pb2 import EnvSpec

FIXTURES = Path(__file__).parents[2] / "fixtures" / "environments"
OURS = "millrace_inprocess"
SAID = {"agent": {"runtime": {"type": "subprocess"}}}


@pytest.fixture(autouse=True)
def environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FIXTURES / "placed"))
    monkeypatch.syspath_prepend(str(FIXTURES / "rev_text_v1"))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Yield the configs that the library is asked to load."""
    configs: list[Any] = []
    stock = vf.load_environment

    def load(config: Any) -> Any:
        configs.append(config)
        return stock(config)

    monkeypatch.setattr(vf, "load_environment", load)
    yield configs


def load(env_id: str, **args: Any) -> V1Adapter:
    return V1Adapter.load(EnvSpec(name=env_id, id=env_id), args)


@contextlib.contextmanager
def refused(*said: str) -> Iterator[None]:
    with pytest.raises(InvalidSpecError) as caught:
        yield
    for each in said:
        assert each in str(caught.value)


def test_a_task_that_works_on_its_machine_is_refused_until_one_says_which_that_is() -> None:
    with refused("args.millrace.env.agent.runtime.type", "`found` of PlacedTask", "'docker'", "'subprocess'"):
        load("placed-v1")
    assert len(load("placed-v1", millrace={"env": SAID}).train) == 2


def test_a_task_that_only_has_the_librarys_signatures_is_played_on_this_machine(seen: list[Any]) -> None:
    load("rev-text-v1", num_examples=4)
    [config] = seen
    assert (config.agent.harness.id, config.agent.runtime.type) == (OURS, "subprocess")


def test_a_taskset_is_played_by_its_own_harness(seen: list[Any]) -> None:
    load("harnessed-v1", env={"agent": {"harness": {"word": "now"}}})
    [config] = seen
    assert (config.agent.harness.id, config.agent.harness.word) == ("harnessed-v1", "now")


def test_a_harness_that_is_said_plays(seen: list[Any]) -> None:
    load("harnessed-v1", env={"agent": {"harness": {"id": OURS}, "timeout": {"setup": 3}}})
    [config] = seen
    assert (config.agent.harness.id, config.agent.timeout.setup) == (OURS, 3)


def test_a_harness_that_needs_a_container_is_refused_at_load() -> None:
    with refused("args.env.agent.runtime.type", "'boxed-v1' needs a container", "must be 'docker'"):
        load("boxed-v1")


@pytest.mark.parametrize(
    ("needs", "said"),
    [({"image": "python:3.12"}, "requires image 'python:3.12'"), ({"network_allow": []}, "requires a network policy")],
)
def test_tasks_that_the_runtime_cannot_play_are_refused_at_load(
    monkeypatch: pytest.MonkeyPatch, needs: dict[str, Any], said: str
) -> None:
    import rev_text_v1

    task = rev_text_v1.RevTask(rev_text_v1.RevData(idx=0, prompt="a", answer="a", **needs))
    monkeypatch.setattr(rev_text_v1.RevTaskset, "load", lambda self: [task])
    with refused("args.env.agent.runtime.type: must be 'docker'", said):
        load("rev-text-v1")


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("modal", "'modal' is a sandbox of a provider"),
        ("podman", "has no runtime of that name; a release that has it may be the environment's own"),
        ("dokcer", "has no runtime of that name"),
    ],
)
def test_the_runtimes_are_those_of_the_library(kind: str, said: str) -> None:
    with refused("args.env.agent.runtime.type: must be 'subprocess' or 'docker'", said):
        load("rev-text-v1", env={"agent": {"runtime": {"type": kind}}})


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo first >&2; echo 'Error: no such host' >&2; exit 125", "(Error: no such host); put the image there"),
        ("echo 'Error: mount: operation not permitted' >&2; exit 126", "set MILLRACE_ENV_ISOLATION=none"),
        ("exit 3", "(exit code 3)"),
        ("exit 0", ""),
    ],
)
def test_a_container_of_the_image_is_tried_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, said: str
) -> None:
    program = tmp_path / "podman"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert said in (problem := runtimes_v1.problem_of_image("podman", "localhost/mine:1"))
    assert bool(said) == bool(problem)


def test_what_an_environment_says_of_its_roles_counts(seen: list[Any]) -> None:
    """A simulated user's `null` is the library's chat loop, which ours is as well."""
    load("rev-text-v1", num_examples=4, env={"id": "user_sim"})
    [config] = seen
    assert (config.user.harness.id, config.user.max_turns, config.assistant.harness.id) == (OURS, 8, OURS)


def test_a_key_that_is_an_option_of_the_taskset_is_the_tasksets(seen: list[Any]) -> None:
    for value in ("echo", {"agent": "smith"}, {}):
        loaded = load("placed-v1", env=value, num_tasks=3, millrace={"env": SAID, "num_tasks": 9})
        assert len(loaded.train) == 3 and seen[-1].taskset.env == value
    with refused("args.millrace", "has no key 'environment'"):
        load("placed-v1", millrace={"environment": SAID})
    with refused("args.millrace", "must be a table"):
        load("placed-v1", millrace="yes")
    with refused("args.env", "must be a table"):
        load("rev-text-v1", env="echo")
    with refused("args.env.agent", "must be a table"):
        load("rev-text-v1", env={"agent": "smith"})
