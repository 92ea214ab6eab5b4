"""The launcher's side of a server process, with a are-in for vLLM: what is said, how it dies, what is left."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator

import pytest

from millrace.errors import InvalidSpecError
from millrace.inference import vllm_server as launch_process
from millrace.inference.vllm_server import VllmProcess
from millrace.processes.table import is_running

WITHIN_S = 60.0


@pytest.fixture
async def vllm(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[VllmProcess]:
    monkeypatch.setattr(launch_process, "HOST_MODULE", "millrace_testing.inference.fake_vllm_host")
    path = os.pathsep.join(sys.path)
    process = await VllmProcess.start({**os.environ, "PYTHONPATH": path})
    yield process
    await process.end()


async def test_flags_that_it_refuses_are_listed(vllm: VllmProcess) -> None:
    with pytest.raises(InvalidSpecError) as caught:
        await asyncio.wait_for(vllm.check({"good": 1, "bad": 2, "worse": 3}), WITHIN_S)
    assert [violation.field for violation in caught.value.violations] == ["bad", "worse"]
    assert await asyncio.wait_for(vllm.exited, WITHIN_S) == 2


async def test_it_takes_over_asks_for_a_new_life_and_leaves_nothing_behind(vllm: VllmProcess) -> None:
    await asyncio.wait_for(vllm.check({"good": 1}), WITHIN_S)
    vllm.send({"argv": ["--model=x"]})
    assert await vllm.hear(deadline_s=WITHIN_S, purpose="load") == {"event": "taking"}
    child = int(vllm.last_line.split()[1])
    assert is_running(child)
    vllm.send({"event": "take_address"})
    assert await vllm.hear(deadline_s=WITHIN_S, purpose="go") == {"event": "restart", "reason": "another model"}
    await asyncio.wait_for(vllm.end(), WITHIN_S)
    assert vllm.exited.result() == -signal.SIGKILL and not is_running(child)


async def test_its_death_names_the_cause(vllm: VllmProcess) -> None:
    await asyncio.wait_for(vllm.check({"good": 1}), WITHIN_S)
    vllm.send({"argv": ["--die"]})
    with pytest.raises(Exception, match="vLLM died: exit code 3") as caught:
        await vllm.hear(deadline_s=WITHIN_S, purpose="load")
    assert "cause: ValueError: no such model" in str(caught.value)


async def test_a_killed_one_is_named_by_its_signal(vllm: VllmProcess) -> None:
    os.kill(vllm.pid, signal.SIGKILL)
    with pytest.raises(Exception, match="vLLM died: signal SIGKILL"):
        await vllm.hear(deadline_s=WITHIN_S, purpose="load")
