"""What the stack does before and while its processes start."""

import asyncio
import signal
import sys
import time
from pathlib import Path

import pytest

from millrace.errors import InvalidSpecError, InvalidStateError, UnavailableError
from millrace.inference.settings import InferenceSettings
from millrace.local import stack as stack_module
from millrace.local.preflight import check_redis
from millrace.local.stack import LocalStack, StackOptions
from millrace.processes import supervisor as supervisor_module
from millrace.processes.supervisor import ProcessDiedError
from millrace.telemetry.settings import Settings
from millrace_testing.local.programs import spec

# A module that never serves: it writes one line and sleeps.
DEAF = {"orchestrator": "deaf_service"}


@pytest.fixture
def deaf(tmp_path, monkeypatch) -> dict[str, str]:
    (tmp_path / "deaf_service.py").write_text("import time\nprint('loading the model', flush=True)\ntime.sleep(600)\n")
    return {"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"}


def options(directory: Path, **more) -> StackOptions:
    return StackOptions(directory=directory, **more)


async def test_service_that_is_never_ready_is_told_with_its_last_lines(tmp_path, deaf, monkeypatch):
    notes: list[str] = []
    monkeypatch.setattr(stack_module, "SAY_WAIT_AFTER_S", 0.4)
    with pytest.raises(UnavailableError) as caught:
        async with LocalStack(
            options(tmp_path / "out"), note=notes.append, environ=deaf, modules=DEAF, ready_deadline_s=1.5
        ) as stack:
            await stack.start()
    assert caught.value.exit_code == 5
    assert "orchestrator was not ready within 1.5 s" in caught.value.message
    assert "  | loading the model" in caught.value.message and "orchestrator.log" in (caught.value.remedy or "")
    assert any("waiting for orchestrator to be ready" in note and "loading the model" in note for note in notes)
    assert not any(child.is_alive for child in stack.supervisor.children.values())


async def test_a_malformed_url_of_redis_is_not_repeated():
    with pytest.raises(InvalidSpecError) as caught:
        await check_redis("redis://user:hunter/2@cache:6379/0", prefix="p")
    assert "hunter" not in str(caught.value) and caught.value.__cause__ is None


def test_services_read_the_url_of_redis_from_the_file_that_it_came_from(tmp_path):
    (tmp_path / "redis.url").write_text("redis://:hunter2@cache:6379/0")
    environ = {"MILLRACE_REDIS_URL_FILE": f"{tmp_path}/redis.url"}
    chosen = StackOptions(directory=tmp_path).with_settings(Settings.from_env(environ))
    assert chosen.redis_url == "redis://:hunter2@cache:6379/0"
    stack = LocalStack(chosen, environ=environ)
    addresses = {"orchestrator": "127.0.0.1:1"}
    env = stack.service_spec("orchestrator", addresses, "127.0.0.1:2", {}, chosen.redis_url, "file:///store").env
    assert "hunter2" not in str(env)
    assert Settings.from_env(env).redis_url == chosen.redis_url


async def test_lines_of_an_earlier_life_are_not_shown(tmp_path, deaf, monkeypatch):
    (tmp_path / "deaf_service.py").write_text("import time\ntime.sleep(600)\n")
    log = tmp_path / "out" / "logs" / "orchestrator.log"
    log.parent.mkdir(parents=True)
    log.write_text("ended long ago\n")
    notes: list[str] = []
    monkeypatch.setattr(stack_module, "SAY_WAIT_AFTER_S", 0.2)
    with pytest.raises(UnavailableError) as caught:
        async with LocalStack(
            options(tmp_path / "out"),
            note=notes.append,
            environ=deaf,
            modules={**DEAF, "trainer": "deaf_service"},
            ready_deadline_s=0.8,
        ) as stack:
            await stack.start()
    assert "(it wrote nothing)" in caught.value.message
    assert "waiting for orchestrator, trainer to be ready (0 s of 1 s); no output yet" in notes, "one line for both"
    assert not any("ended long ago" in text for text in [*notes, caught.value.message])


async def test_directory_belongs_to_one_stack(tmp_path):
    async with LocalStack(options(tmp_path)):
        with pytest.raises(InvalidStateError, match=r"another stack \(pid \d+\) runs in"):
            async with LocalStack(options(tmp_path)):
                pass
    async with LocalStack(options(tmp_path)):
        pass


async def test_guard_returns_the_result_passes_errors_on_and_cancels(tmp_path):
    async def give(value: int) -> int:
        return value

    async def fail() -> None:
        raise ValueError("mine")

    async with LocalStack(options(tmp_path)) as stack:
        assert await stack.guard(give(3)) == 3
        with pytest.raises(ValueError, match="mine"):
            await stack.guard(fail())
        waiting = asyncio.create_task(stack.guard(asyncio.sleep(600)))
        await asyncio.sleep(0.05)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting


async def test_cancelling_the_stop_hurries_it_and_still_stops_everything(tmp_path):
    from millrace.processes.supervisor import ProcessSpec, Supervisor, tail

    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    )
    supervisor = Supervisor(term_grace_s=60)

    async def hold() -> None:
        async with supervisor:
            argv = [sys.executable, "-c", code]
            await supervisor.start(ProcessSpec(name="stubborn", argv=argv, env={}, log_path=tmp_path / "log"))
            while not tail(tmp_path / "log"):
                await asyncio.sleep(0.02)

    holding = asyncio.create_task(hold())
    while not tail(tmp_path / "log"):
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.2)
    began = time.monotonic()
    holding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await holding
    assert time.monotonic() - began < 6
    assert not supervisor.children["stubborn"].is_alive


def test_engine_limits_reach_the_inference_process_and_no_other(tmp_path):
    def environment(name: str, **more: str) -> dict[str, str]:
        stack = LocalStack(options(tmp_path, engine_environ=more), environ={"MILLRACE_MAX_NUM_SEQS": "7"})
        addresses = {"orchestrator": "127.0.0.1:1", name: "127.0.0.1:2"}
        return dict(stack.service_spec(name, addresses, "127.0.0.1:3", {}, "redis://r", "file:///s").env)

    given = InferenceSettings.from_env(environment("inference", MILLRACE_MAX_NUM_SEQS="3", MILLRACE_MAX_MODEL_LEN="64"))
    assert (given.max_num_seqs, given.max_model_len) == (3, 64)
    left_out = InferenceSettings.from_env(environment("inference"))
    assert (left_out.max_num_seqs, left_out.max_model_len) == (7, None)
    assert "MILLRACE_MAX_MODEL_LEN" not in environment("trainer", MILLRACE_MAX_MODEL_LEN="64")


def test_services_see_the_gpus_that_are_named_for_them(tmp_path):
    stack = LocalStack(options(tmp_path, gpus={"inference": (0, 1), "trainer": ()}), environ={})
    addresses = dict.fromkeys(("orchestrator", "inference", "trainer", "env-server"), "127.0.0.1:1")
    seen = {
        name: stack.service_spec(name, addresses, "127.0.0.1:3", {}, "redis://r", "file:///s").env for name in addresses
    }
    assert seen["inference"]["CUDA_VISIBLE_DEVICES"] == "0,1" and seen["trainer"]["CUDA_VISIBLE_DEVICES"] == ""
    assert "CUDA_VISIBLE_DEVICES" not in seen["env-server"]


def test_environment_of_a_service_names_its_own_place_only(tmp_path):
    environ = {
        "MILLRACE_SERVER": "1.2.3.4:5",
        "MILLRACE_LISTEN": "1.2.3.4:6",
        "MILLRACE_QUEUE_GROUPS": "a:weight=2,b",
        "AWS_REGION": "x",
        "OMP_NUM_THREADS": "4",
    }
    stack = LocalStack(options(tmp_path, log_level="debug"), environ=environ)
    addresses = {"orchestrator": "127.0.0.1:1", "inference": "127.0.0.1:2"}
    spec = stack.service_spec(
        "inference", addresses, "127.0.0.1:3", {"inference": "127.0.0.1:5"}, "redis://127.0.0.1:4/0", "file:///s"
    )
    assert spec.argv == [sys.executable, "-m", "millrace.inference.main"]
    settings = Settings.from_env(spec.env)
    assert settings.listen == "127.0.0.1:2" and settings.http_listen == "127.0.0.1:3"
    assert settings.orchestrator == "127.0.0.1:1" and settings.server is None
    assert settings.metrics_listen == "127.0.0.1:5"
    assert settings.log_level == "DEBUG" and settings.drain_s == 0
    assert spec.env["AWS_REGION"] == "x" and spec.env["OMP_NUM_THREADS"] == "4"
    other = stack.service_spec("orchestrator", addresses, "h:3", {"inference": "h:5"}, "redis://r", "file:///s").env
    assert Settings.from_env(other).queue_groups == "a:weight=2,b", "it is for the stack, not about another one"
    assert "MILLRACE_HTTP_LISTEN" not in other and "MILLRACE_METRICS_LISTEN" not in other


async def test_a_death_at_the_end_of_a_part_of_the_start_is_told_to_the_next_one(tmp_path, monkeypatch):
    """Else nobody would ever start that process again."""
    describe = supervisor_module.describe_death

    def slowly(child):
        time.sleep(0.5)
        return describe(child)

    monkeypatch.setattr(supervisor_module, "describe_death", slowly)
    async with LocalStack(options(tmp_path)) as stack:
        child = await stack.supervisor.start(spec("trainer", "raise SystemExit(3)", tmp_path))
        await child.exited
        await stack.guard(asyncio.sleep(0))  # it is over while the death is being described
        with pytest.raises(ProcessDiedError, match="exit code 3"):
            async with asyncio.timeout(20):
                await stack.guard(asyncio.Event().wait())


async def test_a_process_that_dies_while_another_is_being_started_ends_the_start(tmp_path, deaf, monkeypatch):
    async with LocalStack(options(tmp_path / "out"), environ=deaf, modules=DEAF) as stack:
        start, is_held_up = stack.supervisor.start, asyncio.Event()

        async def held_up(what):
            if what.name == "redis":
                return await start(what)
            is_held_up.set()  # such as the first fork on a busy machine, which takes half a minute
            await asyncio.Event().wait()

        monkeypatch.setattr(stack.supervisor, "start", held_up)
        starting = asyncio.create_task(stack.start())
        async with asyncio.timeout(20):
            await is_held_up.wait()
            stack.supervisor.children["redis"].process.send_signal(signal.SIGKILL)
            with pytest.raises(ProcessDiedError, match=r"redis died: signal SIGKILL, \d\.\d s after"):
                await starting
