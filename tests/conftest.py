"""Fixtures shared by all tests: a real Redis, real object stores, and names that no other test uses."""

import fcntl
import gc
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

# Read when grpc is imported: its fork handlers start threads in a child that is about to exec, and crash it at times.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

import hypothesis
import pytest

from millrace.errors import NotFoundError
from millrace.inference.launch_env import engine_python
from millrace.local.redis import EmbeddedRedis, die_with_parent, free_port
from millrace.storage import ObjectStore
from millrace.storage.local import LocalStore
from millrace.telemetry import waits

_SERVER_START_S = 60.0
_VENV_VLLM = Path(__file__).resolve().parents[1] / ".venv-vllm" / "bin" / "python"
_REPOSITORY = Path(__file__).resolve().parents[1]
_PUBLIC_ENVIRONMENTS = _REPOSITORY / ".venv-environments"
_AGENTS = _REPOSITORY / ".venv-agents"
_TEMPLATE_PACKAGES = _REPOSITORY / ".venv-templates"
_TINKER = _REPOSITORY / ".venv-tinker"
_TRANSFORMERS_4 = _REPOSITORY / ".venv-transformers-4"
_VENV_NEMO_GYM = _REPOSITORY / ".venv-nemo-gym"
_VENV_OPENENV = _REPOSITORY / ".venv-openenv"
_VLLM_WHEELS = _REPOSITORY / ".venv-vllm-wheels"
_OF_ENVIRONMENTS = {"public_environments", "pinned_pythons", "nemo_gym_python", "openenv_python", "agents_python"}
_WAITS_END_S = 5.0  # threads that were told to stop are given that long

# Shared machines are slow at times; that is no finding. No example database: a test run leaves nothing in the tree.
# Few examples: every run draws others, and `make fuzz` looks for the rare ones in whatever decodes.
hypothesis.settings.register_profile(
    "millrace", deadline=None, database=None, max_examples=30, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("millrace")


@pytest.fixture(autouse=True, scope="module")
def no_wait_is_left_behind() -> Iterator[None]:
    """Yield what stops must take its registered waits along, or `millrace run why` shows ghosts and other tests trip.

    Looked at after a module, when its servers have been stopped: while they run they may wait for what they like.
    """
    before = {wait.reason for wait in waits.snapshot("test")}
    yield
    ends = time.monotonic() + _WAITS_END_S
    while left := [wait.reason for wait in waits.snapshot("test") if wait.reason not in before]:
        assert time.monotonic() < ends, f"the module is over and somebody still waits for {left}"
        time.sleep(0.01)


@pytest.fixture(autouse=True, scope="module")
def what_is_left_is_never_collected() -> Iterator[None]:
    """Let no test walk through what the modules before its own have left: each collection took a second at the end.

    A trainer collects garbage at each try of a run.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_process_group_is_left_behind() -> Iterator[None]:
    """Yield a process has one default process group: what one test leaves would be the failure of another."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()
        pytest.fail("the test is over, and its process group is not: end it with Gang.leave()")


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield a real Redis-compatible server for the session. Tests share it: each uses its own run uid or prefix.

    MILLRACE_TEST_REDIS_URL names another one, as tests/compose/test_containers.py does.
    """
    if url := os.environ.get("MILLRACE_TEST_REDIS_URL"):
        yield url
        return
    with EmbeddedRedis(tmp_path_factory.mktemp("redis"), append_only="none") as server:
        yield server.url


@pytest.fixture
def local_store(tmp_path: Path) -> LocalStore:
    """Return an empty object store in a directory of its own."""
    return LocalStore(tmp_path / "store")


@pytest.fixture(scope="session")
def s3_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield moto's S3 server in a process of its own: speaks the protocol, keeps objects in memory, checks no
    secrets.
    """
    port = free_port()
    log_path = tmp_path_factory.mktemp("moto") / "moto.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "millrace_testing.atomic_moto", "-H", "127.0.0.1", "-p", str(port)],
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=die_with_parent,
        )
    try:
        ends = time.monotonic() + _SERVER_START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > ends:
                    pytest.fail(f"moto did not start: {log_path.read_text()[-2000:]}")
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()  # what it holds is in memory, and nobody reads it any more
        process.wait(60)


@pytest.fixture
def s3_store(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> ObjectStore:
    """Return an empty prefix in a bucket of moto's server."""
    from millrace.storage.s3 import S3Store

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testsecret")
    store = S3Store(bucket="millrace-test", prefix=f"t{os.urandom(6).hex()}", endpoint=s3_endpoint, region="us-east-1")
    store.ensure_bucket()
    return store


def pytest_configure(config: pytest.Config) -> None:
    """Collecting makes millions of objects that live as long as the process: the collector would look through them
    again and again, and find nothing.
    """
    gc.disable()


@pytest.fixture(autouse=True, scope="session")
def no_power_is_lost() -> Iterator[None]:
    """Let tests wait for no disk: none can show what is left when the power fails. A closed descriptor still raises."""

    def looked_at(descriptor: int) -> None:
        os.fstat(descriptor)

    synced, os.fsync = os.fsync, looked_at
    yield
    os.fsync = synced


def pytest_collection_finish(session: pytest.Session) -> None:
    """Tests have their garbage collected, and only theirs."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Who asks for vLLM's interpreter is a test of vLLM, who asks for public packages is one of those."""
    for item in items:
        names = getattr(item, "fixturenames", ())
        if "vllm_python" in names:
            item.add_marker(pytest.mark.vllm)
        if "vllm_wheels" in names:
            item.add_marker(pytest.mark.vllm_wheels)
        if not {
            "public_environments",
            "pinned_pythons",
            "nemo_gym_python",
            "openenv_python",
            "agents_python",
        }.isdisjoint(names):
            item.add_marker(pytest.mark.environments)
        if "template_packages" in names:
            item.add_marker(pytest.mark.templates)
        if "tinker_python" in names:
            item.add_marker(pytest.mark.tinker)
        if "transformers_4" in names:
            item.add_marker(pytest.mark.models)


@pytest.fixture(scope="session")
def public_environments() -> Path:
    """Return the directory of public task packages."""
    if not (_PUBLIC_ENVIRONMENTS / ".millrace-setup").exists():
        pytest.skip("no public task packages: run scripts/setup_environments.sh")
    return _PUBLIC_ENVIRONMENTS


@pytest.fixture(scope="session")
def agents_python() -> Path:
    """Return the interpreter that has public agents."""
    if not (_AGENTS / ".millrace-setup").exists():
        pytest.skip("no public agents: run scripts/setup_environments.sh")
    return _AGENTS / "bin" / "python"


@pytest.fixture(scope="session")
def template_packages() -> Path:
    """Return the directory of public packages with chat templates."""
    if not (_TEMPLATE_PACKAGES / ".millrace-setup").exists():
        pytest.skip("no public chat templates: run scripts/setup_templates.sh")
    return _TEMPLATE_PACKAGES


@pytest.fixture(scope="session")
def tinker_python() -> Path:
    """Return the interpreter that has the public Tinker SDK."""
    if not (_TINKER / ".millrace-setup").exists():
        pytest.skip("no Tinker SDK: run scripts/setup_tinker.sh")
    return _TINKER / "bin" / "python"


@pytest.fixture(scope="session")
def transformers_4() -> Path:
    """Return the directory of the last release of transformers 4."""
    if not (_TRANSFORMERS_4 / ".millrace-setup").exists():
        pytest.skip("no transformers 4: run scripts/setup_transformers_4.sh")
    return _TRANSFORMERS_4


@pytest.fixture(scope="session")
def pinned_pythons() -> dict[str, str]:
    """Return Interpreters with other releases of verifiers than ours, by release."""
    places = {release: _REPOSITORY / f".venv-verifiers-{release}" for release in ("0.1", "0.3", "0.4")}
    if not all((place / ".millrace-setup").exists() for place in places.values()):
        pytest.skip("no other releases of verifiers: run scripts/setup_environments.sh")
    return {release: str(place / "bin" / "python") for release, place in places.items()}


@pytest.fixture(scope="session")
def nemo_gym_python() -> str:
    """Return an interpreter with `nemo-gym`, which needs Python 3.12 or later and other pins than ours."""
    if not (_VENV_NEMO_GYM / ".millrace-setup").exists():
        pytest.skip("no nemo-gym: run scripts/setup_environments.sh where there is a Python 3.12")
    return str(_VENV_NEMO_GYM / "bin" / "python")


@pytest.fixture(scope="session")
def openenv_python() -> str:
    """An interpreter with verifiers 0.4 and `openenv`, which wants other pins than the other public tasks."""
    if not (_VENV_OPENENV / ".millrace-setup").exists():
        pytest.skip("no openenv: run scripts/setup_environments.sh")
    return str(_VENV_OPENENV / "bin" / "python")


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """Return the interpreter of an environment with real vLLM and Millrace."""
    try:
        return engine_python(
            "vllm", {"MILLRACE_VLLM_PYTHON": os.environ.get("MILLRACE_VLLM_PYTHON") or str(_VENV_VLLM)}
        )
    except NotFoundError:
        pytest.skip("no vLLM: run scripts/setup_vllm.sh, or name an interpreter that has it in MILLRACE_VLLM_PYTHON")


@pytest.fixture(scope="session")
def vllm_wheels() -> Path:
    """Return the directory with the sources of vLLM's releases."""
    if not _VLLM_WHEELS.is_dir():
        pytest.skip("no wheels of vLLM: run scripts/setup_vllm_wheels.sh")
    return _VLLM_WHEELS


@pytest.fixture(scope="session")
def make_workplace(tmp_path_factory: pytest.TempPathFactory):
    """Makes directories in which the commands of the example run."""
    from millrace_testing.workplaces import Workplace

    def make(name: str) -> Workplace:
        return Workplace(tmp_path_factory.mktemp(name))

    return make


@pytest.fixture(scope="session")
def make_warm(tmp_path_factory: pytest.TempPathFactory):
    """Makes workplaces with the warmed-up model of a seed, which one process of the test run trains for all of them."""
    from millrace_testing.workplaces import Workplace

    def make(seed: int) -> Workplace:
        shared = _shared_by_workers(tmp_path_factory) / f"warmed-up-{seed}"
        with shared.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (shared / "done").exists():
                shutil.rmtree(shared, ignore_errors=True)  # what another process has failed to make
                shared.mkdir()
                Workplace(shared).warm_up(seed)
                (shared / "done").touch()
        return Workplace(shared).twin(tmp_path_factory.mktemp(f"warm-{seed}") / "place")

    return make


@pytest.fixture(scope="session")
def warm(make_warm):
    """A workplace with the warmed-up model of seed 0."""
    return make_warm(0)


def _shared_by_workers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the temporary directory of the whole test run.

    With pytest-xdist, each of its processes has one below that.
    """
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
