"""What is measured while this process does not run is held against nobody."""

import asyncio
import time

import pytest

from millrace.telemetry import waits
from millrace.telemetry.waits import LEAST_S, TICK_S, Meter, WaitRegistry
from millrace_testing.patience import patient


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def ticking(clock: Clock) -> Meter:
    meter = Meter(clock=clock)
    meter.begin()
    return meter


def test_a_gap_between_ticks_is_a_standstill(clock):
    meter = ticking(clock)
    for _ in range(10):
        clock.now += TICK_S + LEAST_S / 2  # busy
        meter.tick()
    assert not meter.found
    clock.now += 12.0 + TICK_S
    meter.tick()
    assert [round(each.seconds, 3) for each in meter.found] == [12.0]
    assert meter.within(clock.now - 5.0, clock.now) == 5.0
    assert meter.within(clock.now - 100.0, clock.now + 3.0) == pytest.approx(12.0)
    assert meter.within(clock.now, clock.now + 3.0) == 0.0


def test_one_that_no_tick_has_seen_yet_counts(clock):
    meter = ticking(clock)
    clock.now += 12.0 + TICK_S
    assert meter.within(clock.now - 5.0, clock.now) == 5.0 and not meter.found


def test_without_ticks_nothing_is_known(clock):
    meter = Meter(clock=clock)
    clock.now += 50.0
    assert meter.within(1000.0, clock.now) == 0.0
    is_running = True
    meter.begin(is_ticking=lambda: is_running)
    is_running = False
    clock.now += 50.0
    assert meter.within(1000.0, clock.now) == 0.0
    meter.begin()  # another loop, later
    meter.tick()
    assert not meter.found


def test_waits_do_not_age_while_their_owner_stands_still(clock):
    meter = ticking(clock)
    registry = WaitRegistry(clock=clock, stood_still=meter.within)
    with registry.waiting("Redis", deadline_s=15.0, quiet_s=2.0), registry.shared("the engine", quiet_s=2.0):
        clock.now += 30.0 + TICK_S
        assert registry.snapshot("me") == []
        meter.tick()
        for _ in range(6):
            clock.now += TICK_S
            meter.tick()
        assert {wait.reason for wait in registry.snapshot("me")} == {"Redis", "the engine"}
        assert not [wait for wait in registry.snapshot("me") if wait.is_overdue or wait.age_s > 4.0]


async def test_a_blocked_event_loop_is_seen():
    waits.watch()
    await asyncio.sleep(2 * TICK_S)
    began = time.monotonic()
    time.sleep(2.5)
    assert waits.METER.within(began, time.monotonic()) > 1.0
    await asyncio.sleep(2 * TICK_S)
    assert waits.METER.within(began, time.monotonic()) > 1.0
    assert waits.METER.found[-1].ended - began < patient(4.0)
