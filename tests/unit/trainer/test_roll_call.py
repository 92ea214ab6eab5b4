"""Rank 0 names the ranks that hold up the gang."""

import itertools
import json
import os
import threading
import time
from collections.abc import Callable

import pytest
from torch import distributed as dist

from millrace.telemetry import waits
from millrace.trainer.gang import agreement
from millrace.trainer.gang.agreement import Failure, RollCall
from millrace.trainer.gang.distributed import PeerWatch
from millrace_testing.polling import block_until


def rank_waits() -> list[str]:
    return [wait.reason for wait in waits.snapshot("trainer") if wait.reason.startswith("rank ")]


@pytest.fixture(autouse=True)
def short_periods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "PERIOD_S", 0.05)


def until(reason: str | None, *, show: Callable[[], None] = lambda: None) -> None:
    """Until that wait, or no wait for a rank, is registered, showing signs of life meanwhile; fails after 20 s."""
    ends = time.monotonic() + 20
    show()
    while rank_waits() != ([reason] if reason else []):
        assert time.monotonic() < ends, rank_waits()
        time.sleep(0.02)
        show()


def test_a_rank_that_waits_for_something_of_its_own_is_named_and_so_is_one_that_is_silent():
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage] - documented, and not in torch's stubs
    numbers = itertools.count(1)

    def waiting_for(wait: str) -> None:
        sign = {"count": next(numbers), "pid": 7, "host": "b", "wait": wait}
        store.set("roll-call/1", json.dumps(sign))

    roll_call = RollCall(store, rank=0, world_size=2)
    roll_call.start()
    try:
        until(
            "rank 1 of 2 (process 7 on b), which waits for the object store",
            show=lambda: waiting_for("the object store"),
        )
        until(None, show=lambda: waiting_for(""))
        until("rank 1 of 2 (process 7 on b), which does not show itself")
        until(None, show=lambda: store.set("roll-call/1", f"no sign of ours {next(numbers)}"))
    finally:
        roll_call.stop()
    until(None)


def test_a_rank_is_known_before_its_thread_gets_a_turn():
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage] - documented, and not in torch's stubs
    roll_call = RollCall(store, rank=1, world_size=2)
    roll_call.start()
    try:
        assert json.loads(store.get("roll-call/1"))["pid"] == os.getpid()
    finally:
        roll_call.stop()


def test_rank_0_hears_why_another_rank_gives_the_run_up_as_long_as_it_shows_it():
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage] - documented, and not in torch's stubs
    leader, peer = (RollCall(store, rank=rank, world_size=2) for rank in range(2))
    heard: list[Failure] = []
    leader.watch_failures(heard.append)
    peer.start()
    leader.start()
    try:
        peer.show_failure(reason="OUT_OF_MEMORY", message="é" * 3000)
        block_until(lambda: len(heard) >= 2, what="the failure at two looks")
    finally:
        leader.stop()
        peer.stop()
    assert set(heard) == {Failure(rank=1, reason="OUT_OF_MEMORY", message="é" * 2000)}


def test_no_thread_is_left_inside_torch_by_a_rank_that_leaves():
    """A process that exits meanwhile is aborted: "terminate called without an active exception"."""
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage] - documented, and not in torch's stubs
    roll_call, watch = RollCall(store, rank=0, world_size=2), PeerWatch(store, rank=0, world_size=2)
    before = set(threading.enumerate())
    roll_call.start()
    watch.start()
    assert {thread.name for thread in set(threading.enumerate()) - before} == {"roll-call", "peer-watch"}
    roll_call.stop()
    watch.leave()
    assert set(threading.enumerate()) <= before
