"""Devices, digests and a gang over NCCL."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from millrace.errors import InvalidStateError
from millrace.local.directory import free_port
from millrace.local.gpus import machine_gpus
from millrace.trainer.gang.distributed import choose_device

pytestmark = pytest.mark.gpu
STUCK = """
import torch
from torch import distributed as dist
from millrace.trainer.gang.distributed import Gang
gang = Gang.join()
value = torch.ones(1, device=gang.device)
dist.all_reduce(value)
torch.cuda.synchronize()
print("joined", flush=True)
if gang.rank == 1:
    import time; time.sleep(600)
dist.all_reduce(value)
torch.cuda.synchronize()
"""


def test_a_rank_without_a_gpu_is_refused(gpu):
    """1 of the list."""
    assert choose_device({"MILLRACE_TRAINER_DEVICE": "cuda"}) == gpu
    with pytest.raises(InvalidStateError, match="has no GPU"):
        choose_device({"LOCAL_RANK": str(torch.cuda.device_count())})


def test_the_driver_and_torch_agree_on_the_gpus(gpu):
    """3 of the list, its first half."""
    assert len(machine_gpus()) == torch.cuda.device_count()


@pytest.mark.timeout(200)
def test_a_rank_that_spins_in_nccl_ends_when_its_peer_is_killed(two_gpus):
    """13 of the list, at one point."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", STUCK],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        assert [rank.stdout.readline() for rank in ranks if rank.stdout] == ["joined\n"] * 2
        ranks[1].send_signal(signal.SIGKILL)
        ranks[1].wait()
        began = time.monotonic()
        assert ranks[0].wait(60) != 0
        assert time.monotonic() - began < 30
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
