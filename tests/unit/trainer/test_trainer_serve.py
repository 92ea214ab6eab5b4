"""The trainer's process ends with an error, and says which, when what runs beside the training ends by itself."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from millrace.errors import UnauthenticatedError
from millrace.rpc import serve as registered
from millrace.telemetry.settings import Settings
from millrace.trainer import serve


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings.from_env(
        {
            "MILLRACE_REDIS_URL": "redis://127.0.0.1:1/0",
            "MILLRACE_STORE_URL": tmp_path.as_uri(),
            "MILLRACE_ORCHESTRATOR": "127.0.0.1:1",
        },
        required=["redis_url", "store_url", "orchestrator"],
    )


def _agent_that_raises(error: BaseException) -> type:
    class Agent:
        def __init__(self, *args: Any, **options: Any) -> None:
            pass

        async def run(self, stopping: asyncio.Event) -> None:
            raise error

    return Agent


@pytest.mark.parametrize("error", [RuntimeError("a defect"), asyncio.CancelledError()])
async def test_an_unexpected_end_of_the_agent_is_logged_and_exits_with_1(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    monkeypatch.setattr(registered, "WorkerAgent", _agent_that_raises(error))
    assert await asyncio.to_thread(serve.run, settings) == 1  # a thread, so that no signal handler is set
    records = [record for record in caplog.records if "companion" in record.getMessage()]
    assert len(records) == 1 and records[0].levelname == "ERROR"
    if isinstance(error, RuntimeError):
        assert records[0].exc_info is not None and records[0].exc_info[1] is error


async def test_an_error_with_an_exit_code_of_its_own_is_raised(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registered, "WorkerAgent", _agent_that_raises(UnauthenticatedError("who are you?")))
    with pytest.raises(UnauthenticatedError, match="who are you"):
        await asyncio.to_thread(serve.run, settings)


async def test_an_agent_that_ends_when_asked_is_no_failure(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    class Agent:
        def __init__(self, address: str, worker: Any, report: Any, hear: Any, **options: Any) -> None:
            self._trainer = report.__self__

        async def run(self, stopping: asyncio.Event) -> None:
            self._trainer.stop()
            await stopping.wait()

        async def heartbeat_now(self, *, timeout_s: float) -> bool:
            return True

    monkeypatch.setattr(registered, "WorkerAgent", Agent)
    assert await asyncio.to_thread(serve.run, settings) == 0
