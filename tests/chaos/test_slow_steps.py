"""What is made slow is what the timeline blames, in words and with its share: environment, object store, engine."""

import contextlib
import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from millrace.readers.dashboard.views.timeline import STORE
from millrace.storage.s3 import S3Store
from millrace.telemetry.faults import Action, Point
from millrace_testing.chaos.fault_proxy import Effect, Fault, FaultProxy
from millrace_testing.chaos.run import WAITS_S, ChaosRun
from millrace_testing.chaos.stack import ChaosStack
from millrace_testing.repository import REPOSITORY

pytestmark = pytest.mark.long

BUCKET = "millrace-slow"
ENVIRONMENT = REPOSITORY / "tests" / "fixtures" / "environments" / "sorted_env"
STEPS, SHOWN = 6, 4
REWARD_S, WRITE_S, DECODE_S = 3.0, 0.7, 0.5
"""How long what is made slow takes where a step takes a second; in proportion where it takes longer."""


@pytest.fixture(scope="module")
def proxy(s3_endpoint: str) -> Iterator[FaultProxy]:
    with FaultProxy(s3_endpoint) as running:
        yield running


@pytest.fixture(scope="module")
def stack(warm, proxy: FaultProxy, s3_endpoint: str) -> Iterator[ChaosStack]:
    """Yield a stack whose every request to the object store passes the proxy."""
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("AWS_ACCESS_KEY_ID", "test")
        environ.setenv("AWS_SECRET_ACCESS_KEY", "testsecret")
        S3Store(bucket=BUCKET, endpoint=s3_endpoint, region="us-east-1").ensure_bucket()
        url = f"s3://{BUCKET}/store?endpoint={proxy.endpoint}&region=us-east-1"
        env = {"MILLRACE_STORE_URL": url, "PYTHONPATH": str(ENVIRONMENT)}
        with ChaosStack(warm, "slow", env=env) as running:
            yield running


@pytest.fixture(scope="module")
def slowness(stack: ChaosStack) -> float:
    """Return the seconds of an undisturbed step, at least 1: a busy machine makes everything else slow, too."""
    began = time.monotonic()
    stack.finish(submit(stack))
    return max(1.0, (time.monotonic() - began) / STEPS)


def submit(stack: ChaosStack, seconds: float = 0.0) -> ChaosRun:
    """Return a run whose rewards take `seconds`."""
    env = [{"id": "sorted-env", "args": {"num_tasks": 240, "seconds": seconds}}]
    return stack.submit(None, "--orchestrator.env", json.dumps(env), max_steps=STEPS)


def explained(stack: ChaosStack, run: ChaosRun) -> tuple[str, dict[str, float]]:
    """Return the first sentence of the run's timeline, and the shares."""
    url = f"{stack.where['dashboard']}/api/runs/{run.name.removeprefix('runs/')}/timeline?steps={SHOWN}"
    ends = time.monotonic() + WAITS_S
    found: dict[str, Any] = {"steps": 0}
    while not (found["steps"] == SHOWN and found["last_step"] == STEPS - 1 and _is_whole(found["index"])):
        assert time.monotonic() < ends, f"the log of {run.name} is not read: {found}"
        time.sleep(0.25)
        with urllib.request.urlopen(url, timeout=WAITS_S) as answer:
            found = json.load(answer)
    print(*found["words"], sep="\n")
    return found["words"][0], {each["cause"]: each["share"] for each in found["shares"]}


def _is_whole(index: dict[str, Any]) -> bool:
    return not index["is_growing"] and index["batches"] == index["known_batches"] > 0


@contextlib.contextmanager
def slow_engine(stack: ChaosStack, seconds: float) -> Iterator[None]:
    """Decoding pauses for `seconds` again and again while the block runs."""
    over = threading.Event()

    def slow() -> None:
        while not over.is_set():
            armed = stack.arm(Point.INFERENCE_MID_DECODE, Action.SLEEP, seconds=seconds)
            while not armed.has_fired() and not over.wait(0.05):
                pass

    thread = threading.Thread(target=slow)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        stack.disarm()


def test_a_slow_environment_is_blamed(stack: ChaosStack, slowness: float) -> None:
    run = submit(stack, REWARD_S * slowness)
    stack.finish(run)
    words, shares = explained(stack, run)
    assert words.startswith("Mostly, environments and rewards run: ")
    assert shares["environment"] > 0.5


def test_a_slow_store_is_blamed(stack: ChaosStack, proxy: FaultProxy, slowness: float) -> None:
    fault = proxy.add(Fault(effect=Effect.DELAY, method="PUT", seconds=WRITE_S * slowness))
    run = submit(stack)
    try:
        stack.finish(run)
    finally:
        proxy.remove(fault)
    assert fault.struck >= STEPS
    words, shares = explained(stack, run)
    assert words.startswith("Mostly, ") and "object store" in words
    assert sum(shares.get(cause, 0.0) for cause in STORE) > 0.5


def test_a_slow_engine_is_blamed(stack: ChaosStack, slowness: float) -> None:
    run = submit(stack)
    with slow_engine(stack, DECODE_S * slowness):
        stack.finish(run)
    words, shares = explained(stack, run)
    assert words.startswith("Mostly, engines generate: ")
    assert shares["engine"] > 0.5
