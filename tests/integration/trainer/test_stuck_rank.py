"""A rank that is stopped, or fails where the others wait for it, holds up all of them: it and its error are named."""

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
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
TOLD_WITHIN_S = 20.0
LOSS = """
import os
from millrace.trainer.losses import policy_losses

def fn(inputs, config):
    if os.environ["RANK"] == "1" and inputs.loss_mask.shape[1] > 3:  # not when it is tried out
        raise ValueError("no loss at this rank")
    return policy_losses(inputs, config)
"""


def rank_processes(torchrun: subprocess.Popen[bytes]) -> dict[int, psutil.Process]:
    """Return the gang's processes by rank."""
    children = psutil.Process(torchrun.pid).children()
    return {int(child.environ()["RANK"]): child for child in children if "RANK" in child.environ()}


def gang_of(ranks: int) -> tuple[str, ...]:
    """Return what `python` shall run."""
    run = ("-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--master-addr=127.0.0.1")
    return (*run, f"--master-port={free_port()}", "-m", "millrace.trainer.main")


@pytest.fixture
async def gang(orchestrator: Any, trainers: Any, recorder: Recorder, make_config: Any) -> AsyncIterator[Any]:
    """Yield four ranks, in a run of which one batch is there: then they wait for the second one together."""
    recorder.create(make_config())
    recorder.commit(0, recorder.make_samples(0))
    orchestrator.run_uid = recorder.uid
    torchrun = trainers.start(recorder, *gang_of(RANKS), GLOO_SOCKET_IFNAME="lo")
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


async def test_the_error_of_a_rank_amid_a_step_ends_the_run_and_is_reported_by_rank_0(
    orchestrator: Any, trainers: Any, recorder: Recorder, make_config: Any, tmp_path: Path
) -> None:
    (tmp_path / "rank_loss.py").write_text(LOSS)
    recorder.create(make_config(loss={"type": "custom", "import_path": "rank_loss:fn"}))
    recorder.commit(0, recorder.make_samples(0))
    code = {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}", "MILLRACE_CUSTOM_CODE": "rank_loss"}
    torchrun = trainers.start(recorder, *gang_of(2), GLOO_SOCKET_IFNAME="lo", **code)
    try:
        orchestrator.run_uid = recorder.uid
        await until(lambda: orchestrator.status.epoch or orchestrator.status.error_reason, timeout_s=JOINED_WITHIN_S)
        await until(lambda: orchestrator.status.error_reason, timeout_s=TOLD_WITHIN_S)
        assert orchestrator.status.error_reason == "LOSS_INVALID"
        assert orchestrator.status.error_message.startswith("rank 1: ")
        assert "it raised ValueError: no loss at this rank" in orchestrator.status.error_message
    finally:
        for process in psutil.Process(torchrun.pid).children(recursive=True):
            process.kill()
