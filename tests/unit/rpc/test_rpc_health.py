"""The health board: what serves, what runs out by the clock, what is logged."""

import asyncio
import logging

import pytest
from grpc_health.v1 import health_pb2

from millrace.rpc.health import HealthBoard, HealthServicer


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def test_the_process_is_ready_from_the_start_and_a_service_is_not() -> None:
    board = HealthBoard()
    board.add("svc")
    assert board.is_serving("") is True
    assert board.is_serving("svc") is False
    assert board.reason("svc") == "starting"
    assert board.is_serving("nobody") is None


def test_adding_twice_keeps_what_was_set() -> None:
    board = HealthBoard()
    board.add("svc")
    board.set_ready("svc")
    board.add("svc")
    assert board.is_serving("svc") is True


def test_progress_runs_out_and_comes_back() -> None:
    clock = Clock()
    board = HealthBoard(clock=clock)
    board.expect_progress("", within_s=10)
    clock.now += 10
    assert board.is_serving("") is True
    clock.now += 0.5
    assert board.is_serving("") is False
    assert board.reason("") == "no progress for 10.5 s, 10 s allowed"
    board.touch("")
    assert board.is_serving("") is True
    clock.now += 100
    board.expect_progress("", within_s=None)
    assert board.is_serving("") is True


def test_progress_does_not_make_ready() -> None:
    board = HealthBoard()
    board.add("svc")
    board.expect_progress("svc", within_s=10)
    board.touch("svc")
    assert board.is_serving("svc") is False


def test_draining_is_for_good() -> None:
    board = HealthBoard()
    board.add("svc")
    board.set_ready("svc")
    board.drain()
    board.set_ready("svc")
    assert (board.is_serving(""), board.is_serving("svc"), board.reason("svc")) == (False, False, "draining")


def test_a_name_that_nobody_added_is_a_defect() -> None:
    with pytest.raises(KeyError, match="'svc' is not on the health board"):
        HealthBoard().touch("svc")


def test_changes_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    board = HealthBoard(clock=clock)
    board.expect_progress("", within_s=1)
    with caplog.at_level(logging.INFO):
        clock.now += 5
        for _ in range(3):
            board.is_serving("")
        board.touch("")
        for _ in range(3):
            board.is_serving("")
    assert [record.getMessage() for record in caplog.records] == ["not serving", "health changed"]


async def test_a_watch_that_is_held_up_by_its_reader_still_hears_of_the_drain() -> None:
    board, draining = HealthBoard(), asyncio.Event()
    board.add("svc")
    board.set_ready("svc")
    watch = HealthServicer(board, draining).Watch(health_pb2.HealthCheckRequest(service="svc"), None)  # type: ignore[arg-type]
    first = await anext(watch)
    board.drain()
    draining.set()
    seen = [first.status, *[answer.status async for answer in watch]]
    assert seen == [health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING]
