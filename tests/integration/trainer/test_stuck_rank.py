"""A rank of four that is stopped holds up all others, and is named."""

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from typing import Any

import psutil
import pytest

from millrace.local.redis import free_port
from millrace_testing.polling import until

Recorder = Any  # conftest.Recorder; tests are not importable from one another
pytestmark = [pytest.mark.long, pytest.mark.timeout(280)]
RANKS = 4
NAMED_WITHIN_S = 30.0
JOINED_WITHIN_S = 200.0


def rank_processes(torchrun: subprocess.Popen[bytes]) -> dict[int, psutil.Process]:
    """The gang's processes by rank."""
    children = psutil.Process(torchrun.pid).children()
    return {int(child.environ()["RANK"]): child for child in children if "RANK" in child.environ()}


@pytest.fixture
async def gang(orchestrator: Any, trainers: Any, recorder: Recorder, make_config: Any) -> AsyncIterator[Any]:
    """Four ranks, in a run of which one batch is there: then they wait for the second one together."""
    recorder.create(make_config())
    recorder.commit(0, recorder.make_samples(0))
    orchestrator.run_uid = recorder.uid
    run = ("-m", "torch.distributed.run", f"--nproc-per-node={RANKS}", "--master-addr=127.0.0.1")
    command = (*run, f"--master-port={free_port()}", "-m", "millrace.trainer.main")
    torchrun = trainers.start(recorder, *command, GLOO_SOCKET_IFNAME="lo")
    try:
        async with asyncio.timeout(JOINED_WITHIN_S):
            while orchestrator.status.step < 1:
                assert torchrun.poll() is None, trainers.log_path.read_text()[-3000:]
                await asyncio.sleep(0.2)
        yield torchrun
    finally:
        for process in psutil.Process(torchrun.pid).children(recursive=True):
            process.kill()


async def test_a_rank_that_is_stopped_is_named(orchestrator: Any, gang: Any) -> None:
    assert not [wait for wait in orchestrator.waits if "rank" in wait and "of 4" in wait]
    stuck = rank_processes(gang)[2]
    os.kill(stuck.pid, signal.SIGSTOP)
    named = await until(
        lambda: [wait for wait in orchestrator.waits if wait.startswith("rank ")], timeout_s=NAMED_WITHIN_S
    )
    assert len(named) == 1 and named[0].startswith(f"rank 2 of 4 (process {stuck.pid} on ")
    assert "does not show itself" in named[0]
    os.kill(stuck.pid, signal.SIGCONT)
    await until(lambda: not [wait for wait in orchestrator.waits if wait.startswith("rank ")], timeout_s=NAMED_WITHIN_S)
