"""A rank whose peer has died ends, even where it is blocked in C."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
from torch import distributed as dist

from millrace.local.directory import free_port
from millrace.trainer.gang.distributed import GRACE_S

BLOCKED = """
import ctypes, sys
from torch import distributed as dist
from millrace.trainer.gang import distributed as watchdog
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
GANG = """
import os, time
from millrace.trainer.gang.distributed import Gang
gang = Gang.join()
assert gang.agree(lambda: gang.rank) == [0, 1]
if gang.rank == 0:
    print("collective", flush=True)
    gang.agree(lambda: 0)
keeper = os.fork() if os.environ["SOCKETS"] == "kept" else 0
if keeper or os.environ["SOCKETS"] == "closed":
    print(keeper, flush=True)
time.sleep(600)
"""
"""Two ranks, of which the second one never comes to the second collective. `kept`: its own child holds its sockets, so
that gloo does not see its death, as NCCL does not on one machine."""
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


@pytest.fixture
def start_gang() -> Iterator[Callable[[str], tuple[subprocess.Popen[str], subprocess.Popen[str]]]]:
    ranks: list[subprocess.Popen[str]] = []
    keepers: list[int] = []

    def start(sockets: str) -> tuple[subprocess.Popen[str], subprocess.Popen[str]]:
        """Return a rank that is in a collective, and the one that it waits for."""
        gang = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        environ = {**os.environ, **gang, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "SOCKETS": sockets}
        command = [sys.executable, "-c", GANG]
        for rank in range(2):
            own = {**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(subprocess.Popen(command, env=own, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
        first, second = ranks
        assert first.stdout is not None and second.stdout is not None
        assert first.stdout.readline() == "collective\n"
        if keeper := int(second.stdout.readline()):
            keepers.append(keeper)
        return first, second

    yield start
    for keeper in keepers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(keeper, signal.SIGKILL)
    for process in ranks:
        process.kill()
        process.communicate()


@pytest.mark.long
def test_a_gang_of_which_one_is_killed_ends_although_the_collective_of_the_other_never_does(start_gang):
    blocked, peer = start_gang("kept")
    time.sleep(3)  # into the collective: nothing tells from outside that it has come to it
    began = time.monotonic()
    peer.kill()
    peer.wait()
    assert blocked.wait(ENDS_WITHIN_S) == 1
    took_s = time.monotonic() - began
    said = blocked.stderr.read()
    assert "a rank of the gang is dead and this one is stuck: it ends" in said, said
    assert GRACE_S < took_s < ENDS_WITHIN_S, "gloo has seen it, and nobody was stuck"


@pytest.mark.long
def test_a_collective_that_sees_the_death_of_a_peer_ends_the_rank_before_the_watchdog_does(start_gang):
    failing, peer = start_gang("closed")
    time.sleep(3)
    began = time.monotonic()
    peer.kill()
    peer.wait()
    assert failing.wait(ENDS_WITHIN_S) == 1
    assert time.monotonic() - began < GRACE_S
    assert "Connection closed by peer" in failing.stderr.read()
