"""What `millrace rl` does about a run that is there already: goes on, forks, or says what there is to choose."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from millrace.cli.errors import CliError
from millrace.cli.session.run_session import begin, find_home
from millrace.config.sections.rl import RLConfig
from millrace.errors import AlreadyExistsError, NotFoundError
from millrace.v1 import run_pb2

RUNNING, FAILED, SUCCEEDED = run_pb2.RUN_STATE_RUNNING, run_pb2.RUN_STATE_FAILED, run_pb2.RUN_STATE_SUCCEEDED


def make_config(**changes: Any) -> RLConfig:
    orchestrator = {"env": [{"id": "reverse-text"}], "batch_size": 8, "rollouts_per_example": 4}
    return RLConfig.model_validate({"run": {"name": "demo"}, "orchestrator": orchestrator, **changes})


class FakeRuns:
    """Runs of a server by name, and what was asked."""

    def __init__(self, *, state: run_pb2.RunState | None, step: int = 6) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.runs: dict[str, run_pb2.Run] = {}
        if state is not None:
            self._add("demo", state, make_config().resolved_json(), step=step)

    def _add(self, name: str, state: run_pb2.RunState, config_json: str, *, step: int = 0) -> run_pb2.Run:
        if f"runs/{name}" in self.runs:
            metadata = {"run": name, "uid": f"uid-{name}"}
            raise AlreadyExistsError(f"{name} exists", reason="RUN_NAME_TAKEN", remedy="", metadata=metadata)
        run = run_pb2.Run(name=f"runs/{name}", uid=f"uid-{name}", state=state, config_json=config_json)
        run.progress.step = step
        self.runs[run.name] = run
        return run

    async def create(self) -> run_pb2.Run:
        self.asked.append(("create",))
        return self._add("demo", run_pb2.RUN_STATE_QUEUED, "{}")

    async def get(self, name: str) -> run_pb2.Run:
        if name not in self.runs:
            raise NotFoundError(f"no run {name}", reason="RUN_NOT_FOUND", remedy="")
        return self.runs[name]

    async def resume(self, name: str) -> run_pb2.Run:
        self.asked.append(("resume", name))
        return self.runs[name]

    async def pause(self, name: str, *, reason: str) -> run_pb2.Run:
        self.asked.append(("pause", name, reason))
        return self.runs[name]

    async def fork(self, name: str, *, step: int, run_id: str, config_json: str) -> run_pb2.Run:
        self.asked.append(("fork", name, step, json.loads(config_json)["run"]["name"]))
        return self._add(run_id, run_pb2.RUN_STATE_QUEUED, config_json)


class FakeClient:
    def __init__(self, runs: FakeRuns) -> None:
        self.runs = runs


def ask(
    runs: FakeRuns, config: RLConfig, resume_step: int | None, *, must_exist: bool = True, name: str | None = "demo"
) -> tuple[run_pb2.Run, list[str]]:
    notes: list[str] = []
    client: Any = FakeClient(runs)
    begun = begin(
        client,
        config,
        name=name,
        resume_step=resume_step,
        must_exist=must_exist,
        create=runs.create,
        note=notes.append,
    )
    return asyncio.run(begun), notes


def test_a_name_that_is_taken_offers_all_three() -> None:
    runs = FakeRuns(state=RUNNING)
    with pytest.raises(CliError) as raised:
        ask(runs, make_config(), None)
    assert "a run called 'demo' exists (uid uid-demo)" in str(raised.value)
    assert all(word in (raised.value.hint or "") for word in ("--resume", "--ckpt.resume_step K", "--name demo-b"))
    assert list(runs.runs) == ["runs/demo"]


@pytest.mark.parametrize(("state", "asked"), [(RUNNING, []), (FAILED, [("resume", "runs/demo")])])
@pytest.mark.parametrize("step", [-1, 6])
def test_the_newest_step_goes_on(state: run_pb2.RunState, asked: list[Any], step: int) -> None:
    runs = FakeRuns(state=state)
    run, notes = ask(runs, make_config(output_dir="elsewhere"), step)
    assert run.name == "runs/demo" and runs.asked == asked and "goes on at step 6" in notes[0]


def test_a_step_below_the_newest_is_a_fork_and_the_parent_waits() -> None:
    runs = FakeRuns(state=RUNNING)
    run, notes = ask(runs, make_config(), 4)
    assert (run.name, run.uid) == ("runs/demo-from-4", "uid-demo-from-4")
    forked = ("fork", "runs/demo", 4, None)
    assert runs.asked == [forked, ("pause", "runs/demo", "forked at step 4 as runs/demo-from-4")]
    assert "never rewritten" in notes[0] and "demo is paused" in notes[1]
    with pytest.raises(CliError, match="a run called 'demo-from-4' exists"):
        ask(runs, make_config(), 4)


def test_another_config_is_refused_naming_the_keys_and_forks_where_a_step_is_named() -> None:
    changed = make_config(trainer={"optim": {"lr": 5e-5}})
    with pytest.raises(CliError) as raised:
        ask(FakeRuns(state=RUNNING), changed, -1)
    assert "trainer.optim.lr is 5e-05, the run has 1e-06" in str(raised.value)
    assert "--ckpt.resume_step 6" in (raised.value.hint or "")
    runs = FakeRuns(state=SUCCEEDED)
    assert ask(runs, changed, 6)[0].name == "runs/demo-from-6"
    assert [words[0] for words in runs.asked] == ["fork"], "a run that has ended is not paused"


def test_a_run_that_has_ended_has_nothing_to_go_on_with() -> None:
    with pytest.raises(CliError, match="has ended as SUCCEEDED at step 6"):
        ask(FakeRuns(state=SUCCEEDED), make_config(), -1)


def test_a_run_that_is_not_there() -> None:
    with pytest.raises(NotFoundError):
        ask(FakeRuns(state=None), make_config(), -1)
    run, notes = ask(FakeRuns(state=None), make_config(), -1, must_exist=False)
    assert run.name == "runs/demo" and "begins with step 0" in notes[0]
    with pytest.raises(CliError, match="which run shall go on"):
        ask(FakeRuns(state=RUNNING), make_config(), -1, name=None)


def test_a_fork_is_found_in_the_directory_of_its_parent(tmp_path: Path) -> None:
    for home, name in (("demo", "demo"), ("demo", "demo-from-4"), ("other", "other")):
        (tmp_path / home / "store" / "millrace" / "names").mkdir(parents=True, exist_ok=True)
        (tmp_path / home / "store" / "millrace" / "names" / name).write_text("uid")
    (tmp_path / "demo-from-4").mkdir()  # its results
    assert find_home(tmp_path, "demo-from-4", prefix="millrace") == tmp_path / "demo"
    assert find_home(tmp_path, "other", prefix="millrace") == tmp_path / "other"
    assert find_home(tmp_path, "nobody", prefix="millrace") is None
