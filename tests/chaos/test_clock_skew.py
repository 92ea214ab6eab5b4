"""Clocks that disagree by hours, and that jump: order is by ids, and holders count their leases on monotonic clocks."""

import contextlib
import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from millrace.local import stack as preloads
from millrace_testing.chaos.clocks import Clocks, library
from millrace_testing.chaos.run import RECOVERS_WITHIN_S, Event
from millrace_testing.chaos.stack import SERVICES, ChaosStack
from millrace_testing.patience import patient

pytestmark = pytest.mark.long

HOUR = 3600
SKEW = {
    "millrace.orchestrator.main": HOUR,
    "millrace.trainer.main": -HOUR,
    "millrace.env_server.main": 24 * HOUR,
    "millrace.env_server.workers.env_worker": 24 * HOUR,
    "millrace.env_server.workers.starter": 24 * HOUR,  # workers are copies of it
    "millrace.inference.main": -24 * HOUR,
}
JUMPS = (5 * HOUR, -5 * HOUR, 0)
"""Ahead, back by ten hours, and right again."""
STEPS = 20
SEEN_S = 3.0
"""Every process has looked at its clock again."""
NUMBERS = (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT)
SIGNED = ("reward_mean", "metrics", "mismatch_kl")
"""Numbers of events that may be below 0; all others are lengths, ages and shares."""


def test_a_run_with_skewed_clocks_survives_kills(make_chaos) -> None:
    skew = os.pathsep.join([str(Path(__file__).with_name("skew")), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    skewed = {"PYTHONPATH": skew, "CLOCK_SKEW": json.dumps(SKEW)}
    skewed[preloads.VARIABLE] = "0"  # the skew is chosen when a program starts
    stack: ChaosStack = make_chaos(env=skewed)
    run = stack.submit(max_steps=12)
    for name, step in (("orchestrator", 2), ("trainer", 4)):
        run.wait_step(step)
        stack.kill(name)
    stack.finish(run)
    written = {kind: event.time.seconds for kind in ("batch_committed", "step_completed") for event in run.of(kind)}
    assert written["batch_committed"] - written["step_completed"] > HOUR, "the clocks were not skewed"
    assert list(dict.fromkeys(run.steps())) == list(range(12)), "in order by ids, whatever the clocks say"


@pytest.fixture(scope="module")
def jumpy(warm) -> Iterator[tuple[ChaosStack, Clocks]]:
    """Yield a stack under libfaketime, and its clocks."""
    if library() is None:
        pytest.skip("no libfaketime: apt-get install faketime")
    clocks = Clocks(warm.path / "outputs" / "clocks")
    with ChaosStack(warm, "jumpy", env=clocks.environ) as stack:
        yield stack, clocks


WHOSE = {"all services": SERVICES, "redis": ("redis",), "env-server": ("env-server",)}


@pytest.mark.parametrize("whose", WHOSE)
def test_a_run_whose_clocks_jump_by_hours_goes_on(jumpy: tuple[ChaosStack, Clocks], whose: str) -> None:
    stack, clocks = jumpy
    run = stack.submit(max_steps=STEPS)
    run.wait_step(1)
    began = time.time()
    for offset_s in JUMPS:
        clocks.set(WHOSE[whose], offset_s)
        time.sleep(SEEN_S)
        seen = offsets_seen(stack, clocks, whose)
        assert all(math.isclose(offset_s, each, abs_tol=60) for each in seen), f"{whose} did not jump: {seen}"
        run.wait_step(run.steps()[-1] + 1)
    stack.finish(run)
    print(f"{whose}: {run.heard_standstill_s(began):.1f} s without progress at most")
    assert list(dict.fromkeys(run.steps())) == list(range(STEPS))
    assert run.heard_standstill_s(began) <= patient(RECOVERS_WITHIN_S), run.describe()
    assert not [found for event in run.events for found in below_zero(event)]


@pytest.mark.slow
@pytest.mark.parametrize("offset_s", [5 * HOUR, -5 * HOUR], ids=["ahead", "back"])
def test_kills_after_all_clocks_have_jumped(jumpy: tuple[ChaosStack, Clocks], offset_s: int) -> None:
    stack, clocks = jumpy
    run = stack.submit(max_steps=STEPS)
    run.wait_step(1)
    began = time.time()
    clocks.set((*SERVICES, "redis"), offset_s)
    for name in ("orchestrator", "trainer", "env-server", "redis"):
        time.sleep(SEEN_S)
        stack.kill_running(name)
    stack.finish(run)
    clocks.set((*SERVICES, "redis"), 0)
    print(f"{offset_s / HOUR:+g} h: {run.heard_standstill_s(began):.1f} s without progress at most")
    assert not [found for event in run.events for found in below_zero(event)]


def offsets_seen(stack: ChaosStack, clocks: Clocks, whose: str) -> list[float]:
    """By how many seconds each clock in question is ahead of the true time, as its owner sees it."""
    if whose == "redis":
        with contextlib.closing(stack.redis()) as client:
            return [float(client.time()[0]) - time.time()]
    return [clocks.seen(name) for name in WHOSE[whose]]


def below_zero(message: Message | Event, path: str = "") -> list[str]:
    """Return the lengths, ages and shares of an event that are negative or no number."""
    found: list[str] = []
    for field, value in message.ListFields():
        where = f"{path}.{field.name}"
        if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE and not field.is_repeated:
            found += below_zero(value, where)
        elif field.cpp_type in NUMBERS and not field.is_repeated and field.name not in SIGNED and not value >= 0:
            found.append(f"{where} = {value}")
    return found
