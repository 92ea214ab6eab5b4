"""A rank whose peer has died ends, even where it is blocked in C."""

import subprocess
import sys
import time

import pytest
from torch import distributed as dist

BLOCKED = """
import ctypes, sys
from torch import distributed as dist
from millrace.trainer.gang import watchdog
rank, port = int(sys.argv[1]), int(sys.argv[2])
watchdog.GRACE_S, watchdog.ABORT_S = 1.0, 1.0
store = dist.TCPStore("127.0.0.1", port, is_master=False)
watch = watchdog.PeerWatch(store, rank=rank, world_size=2)
watch.start()
if sys.argv[3] == "leaves":
    watch.leave()
    sys.exit()
print("blocked", flush=True)
ctypes.CDLL(None).sleep(600)
"""
ENDS_WITHIN_S = 30.0


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def start(store):
    started: list[subprocess.Popen[str]] = []

    def start(rank: int, how: str = "stays") -> subprocess.Popen[str]:
        command = [sys.executable, "-c", BLOCKED, str(rank), str(store.port), how]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.long
def test_a_rank_that_is_blocked_in_c_ends_when_its_peer_is_killed(start):
    blocked, peer = start(0), start(1)
    assert blocked.stdout.readline() == peer.stdout.readline() == "blocked\n"
    peer.kill()
    peer.wait()
    began = time.monotonic()
    assert blocked.wait(ENDS_WITHIN_S) == 1
    assert time.monotonic() - began < ENDS_WITHIN_S


@pytest.mark.long
def test_a_peer_that_leaves_in_order_ends_nobody(start):
    blocked, peer = start(0), start(1, "leaves")
    assert blocked.stdout.readline() == "blocked\n"
    assert peer.wait(100) == 0
    with pytest.raises(subprocess.TimeoutExpired):
        blocked.wait(8)
