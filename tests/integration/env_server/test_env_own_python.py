"""An environment with an interpreter of its own: played there by the rules of all workers, or refused at load."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from millrace.env_server.isolation import namespaces
from millrace.env_server.isolation.confinement import Confinement, Isolation, why_no_container
from millrace.env_server.isolation.namespaces import visible_to_workers
from millrace.env_server.service import Admits
from millrace.env_server.workers.pool import EnvPool, PoolLimits
from millrace.env_server.workers.starter import WorkerStarter
from millrace.errors import InvalidSpecError
from millrace.internal.v1 import env_service_pb2
from millrace.internal.v1.play_pb2 import EnvSpec
from millrace.rollouts.types import Rollout, RolloutStatus

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

BLOCK, EXIT, SLEEP = 7, 8, 11
"""Tasks of `faulty-v0`."""
NOBODY = 65534
CONFINED = "import os\nif 'NoNewPrivs:\\t1' not in open('/proc/self/status').read(): os._exit(77)\n"
FIXTURES = Path(__file__).parents[2] / "fixtures" / "environments"
# What only the virtual environment has: an environment that asks about its own process.
HERE = """
import os, sys
import verifiers as vf
from datasets import Dataset

def load_environment():
    facts = f"{sys.prefix}|{os.getcwd()}|{'PYTHONPATH' in os.environ}|{os.environ['PATH'].split(':')[0]}"
    rows = Dataset.from_list([{"question": facts, "answer": ""}])
    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[lambda completion: 1.0]))
"""


def make_venv(place: Path, *, packages: bool = True) -> str:
    """Return a virtual environment that finds the packages of ours, or none, and `here_env`."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True, timeout=120)
    [site] = place.glob("lib/python*/site-packages")
    (site / "here_env.py").write_text(HERE)
    if packages:
        ours = [path for path in sys.path if path.endswith("site-packages")]
        (site / "ours.pth").write_text("\n".join([*ours, str(FIXTURES / "faulty_v0"), ""]))
    return str(place / "bin" / "python")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_venv(tmp_path_factory.mktemp("own") / "venv")


async def play(server: Any, env_id: str, task_index: int, python: str, **changes: Any) -> Any:
    opened = await server.open(env_id, {"python": python})
    assert opened.state == env_service_pb2.ENV_STATE_READY, opened
    return await server.play_one(env_id, task_index, args={"python": python}, **changes)


@pytest.mark.long
async def test_workers_run_in_it_with_its_packages_alone(server: Any, python: str) -> None:
    rollout = await play(server, "here-env", 0, python)
    assert rollout.status is RolloutStatus.OK, rollout.error
    facts = json.loads(rollout.messages_json)[0]["content"].split("|")
    place = str(Path(python).parents[1])
    assert (facts[0], facts[2], facts[3]) == (place, "False", f"{place}/bin")
    assert facts[1] != os.getcwd(), "a directory of the worker's own"
    [sample] = rollout.samples
    assert sample.policy_spans and sample.loss_mask.sum() == len(rollout_reply(rollout)) + 1
    workers = [each for each in psutil.Process().children(recursive=True) if python in each.cmdline()]
    assert len(workers) == 1, "no copy of the template, whose libraries are ours"
    [pool] = [pool for pool in server.service.pools if pool.env.id == "here-env"]
    assert pool.workers[0].process.pid == workers[0].pid


def rollout_reply(rollout: Rollout) -> str:
    return str(json.loads(rollout.messages_json)[-1]["content"])


@pytest.mark.long
async def test_it_is_chosen_for_what_only_it_has_and_that_is_said(
    server: Any, python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.service, "admits", Admits(pythons=[str(Path(python).parents[2]), "*"]))
    opened = await server.open("owner/here-env@1.0")
    assert opened.state == env_service_pb2.ENV_STATE_READY, opened
    assert opened.played_in.startswith(f"played in {python} (verifiers "), opened
    assert opened.played_in.endswith("the env-server's own interpreter does not have it")
    rollout = await server.play_one("owner/here-env@1.0", 0)
    assert rollout.status is RolloutStatus.OK, rollout.error
    assert json.loads(rollout.messages_json)[0]["content"].startswith(str(Path(python).parents[1]))


async def test_one_that_no_interpreter_has_the_release_for_is_refused_when_it_is_opened(
    server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "next_env-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: next-env\nVersion: 1.0\nRequires-Dist: verifiers>=0.4\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InvalidSpecError) as raised:
        await server.open("next-env")
    assert raised.value.reason == "ENV_RELEASE_UNSUPPORTED"
    assert "-m pip install next-env==1.0 'verifiers==0.4.0' 'aiohttp" in str(raised.value)


@pytest.mark.long
async def test_the_same_environment_without_it_is_another_one(server: Any) -> None:
    opened = await server.open("here-env")
    assert opened.state == env_service_pb2.ENV_STATE_FAILED and opened.error_type == "EnvironmentNotFound"


@pytest.mark.long
async def test_kills_and_deadlines_are_those_of_all_workers(server: Any, python: str) -> None:
    rollout = await play(server, "faulty-v0", EXIT, python)
    assert (rollout.status, rollout.error.type) == (RolloutStatus.WORKER_DIED, "WorkerDied"), rollout.error
    rollout = await play(server, "faulty-v0", SLEEP, python, rollout_timeout_seconds=1.0)
    assert (rollout.status, rollout.error.type) == (RolloutStatus.TIMEOUT, "RolloutTimeout"), rollout.error
    rollout = await play(server, "faulty-v0", BLOCK, python, rollout_timeout_seconds=1.0)
    assert (rollout.status, rollout.error.type) == (RolloutStatus.TIMEOUT, "WorkerBlocked"), rollout.error


async def test_one_that_is_not_there_is_refused_when_the_environment_is_opened(server: Any, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="python3 -m venv") as raised:
        await server.open("faulty-v0", {"python": f"{tmp_path}/venv/bin/python"})
    assert "orchestrator.env.python" in str(raised.value) and not isinstance(raised.value, grpc.RpcError)


async def test_one_that_lacks_packages_fails_the_load_with_the_command(server: Any, tmp_path: Path) -> None:
    python = make_venv(tmp_path / "bare", packages=False)
    opened = await server.open("here-env", {"python": python})
    assert opened.state == env_service_pb2.ENV_STATE_FAILED
    assert "orchestrator.env.python" in opened.error_message
    assert "orchestrator.env.args" not in opened.error_message
    assert f"run `{python} -m pip install 'aiohttp>=3.12'" in opened.error_message, opened.error_message


@pytest.fixture
def place() -> Iterator[Path]:
    """Yield a directory that every user may read, and that is not below /tmp: at level `container` that is the
    worker's.
    """
    made = Path(tempfile.mkdtemp(prefix="millrace-test-python-", dir="/var/tmp"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def can_run_python(uid: int) -> bool:
    try:
        return subprocess.run([sys.executable, "-c", ""], user=uid, cwd="/", timeout=60, check=False).returncode == 0
    except PermissionError:
        return False


@pytest.mark.parametrize("level", list(Isolation))
@pytest.mark.long
async def test_it_is_confined_from_its_first_instruction(level: Isolation, place: Path) -> None:
    """What its packages do when Python starts, before a line of ours, happens after the same walls."""
    own = make_venv(place / "venv")
    [site] = place.glob("venv/lib/python*/site-packages")
    (site / "sitecustomize.py").write_text(CONFINED)
    user = (NOBODY, NOBODY) if level in (Isolation.USER, Isolation.CONTAINER) else None
    visible = visible_to_workers(os.environ, [str(FIXTURES)])
    confinement = Confinement(isolation=level, user=user, visible=visible)
    if user and not namespaces.is_administrator():
        pytest.skip("to be another user takes root")
    if level is Isolation.USER and not can_run_python(NOBODY):
        pytest.skip("Python lies here where other users cannot run it")
    if level is Isolation.CONTAINER and (why := why_no_container(confinement)):
        pytest.skip(f"this machine has no level container: {why}")
    starter = WorkerStarter(confinement, forks=False)
    pool = EnvPool(EnvSpec(name="here", id="here-env", python=own), PoolLimits(), starter)
    pool.start()
    try:
        while pool.info is None and pool.failure is None:
            await asyncio.sleep(0.1)
        # Without walls it ends itself, so that the test can fail.
        has_walls = level is not Isolation.NONE
        assert (pool.info is not None) == has_walls, pool.failure
        assert has_walls or "orchestrator.env.python: is no Python interpreter" in str(pool.failure)
    finally:
        await pool.close()
        await starter.close()
