"""The object store fails while a run needs it: the run waits, visibly, and goes on; its log is clean."""

import asyncio
import time
from collections.abc import Iterator

import pytest

from millrace.client import Client
from millrace.storage.s3 import S3Store
from millrace.v1 import run_service_pb2
from millrace_testing.chaos.fault_proxy import Effect, Fault, FaultProxy
from millrace_testing.chaos.logs import wait_line
from millrace_testing.chaos.run import WAITS_S, ChaosRun
from millrace_testing.chaos.stack import ChaosStack

pytestmark = pytest.mark.long

BUCKET = "millrace-chaos"
NAMED_WITHIN_S = 30.0


@pytest.fixture(scope="module")
def proxy(s3_endpoint: str) -> Iterator[FaultProxy]:
    with FaultProxy(s3_endpoint) as running:
        yield running


@pytest.fixture(scope="module")
def shared_stack(warm, proxy: FaultProxy, s3_endpoint: str) -> Iterator[ChaosStack]:
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("AWS_ACCESS_KEY_ID", "test")
        environ.setenv("AWS_SECRET_ACCESS_KEY", "testsecret")
        S3Store(bucket=BUCKET, endpoint=s3_endpoint, region="us-east-1").ensure_bucket()
        url = f"s3://{BUCKET}/store?endpoint={proxy.endpoint}&region=us-east-1"
        with ChaosStack(warm, "store", env={"MILLRACE_STORE_URL": url}) as stack:
            yield stack


@pytest.fixture
def stack(shared_stack: ChaosStack, proxy: FaultProxy) -> Iterator[ChaosStack]:
    """Yield a stack whose every request to the object store passes the proxy, without faults yet."""
    proxy.clear()
    shared_stack.wait_ready()
    yield shared_stack
    proxy.clear()


def _explain(stack: ChaosStack, run: ChaosRun) -> run_service_pb2.ExplainRunResponse:
    async def ask() -> run_service_pb2.ExplainRunResponse:
        async with Client(stack.address) as client:
            return await client.runs.explain(run.name)

    return asyncio.run(ask())


def _wait_explained(stack: ChaosStack, run: ChaosRun, *words: str, timeout_s: float = NAMED_WITHIN_S) -> str:
    """Return the first wait that `millrace run why` shows with all these words."""
    ends = time.monotonic() + timeout_s
    seen: dict[str, None] = {}
    while time.monotonic() < ends:
        answer = _explain(stack, run)
        reasons = [answer.summary, *(f"{wait.owner}: {wait.reason}" for wait in answer.waits)]
        for reason in reasons:
            if all(word in reason for word in words):
                return reason
        seen.update(dict.fromkeys(reasons))
        time.sleep(0.25)
    raise AssertionError(f"nothing said {words}: {[*seen][-5:]}")


def test_faults_of_every_kind_strike_during_a_run(stack: ChaosStack, proxy: FaultProxy) -> None:
    run = stack.submit(max_steps=5)
    run.wait_step(0)
    faults = [
        proxy.add(Fault(effect=Effect.LOSE_ANSWER, method="PUT", key="*/batches/*.pb", every=3, times=3)),
        proxy.add(Fault(effect=Effect.LOSE_ANSWER, method="PUT", key="*/manifest.json", every=2, times=3)),
        proxy.add(Fault(effect=Effect.TORN_WRITE, method="PUT", key="*/policies/*.bin", every=2, times=2)),
        proxy.add(Fault(effect=Effect.CUT_REQUEST, method="PUT", every=5, times=4)),
        proxy.add(Fault(effect=Effect.ANSWER, method="PUT", every=4, times=6)),
        proxy.add(Fault(effect=Effect.ANSWER, method="PUT", status=507, code="InsufficientStorage", every=6, times=3)),
        proxy.add(Fault(effect=Effect.CUT_ANSWER, method="GET", every=5, times=6)),
        proxy.add(Fault(effect=Effect.RESET, method="LIST", every=5, times=4)),
        proxy.add(Fault(effect=Effect.ANSWER, status=500, code="InternalError", every=7, times=6)),
        proxy.add(Fault(effect=Effect.SLOW, method="PUT", rate=1_500_000, every=3)),
        proxy.add(Fault(effect=Effect.SLOW, method="GET", rate=3_000_000, every=3)),
    ]
    stack.finish(run)
    proxy.clear()
    struck = {f"{fault.method} {fault.effect} {fault.key}": fault.struck for fault in faults}
    assert all(struck.values()), f"every fault struck: {struck}"
    # A trainer that such a store throws out of a step computes it again; the audit proves that it came to the same.
    assert list(dict.fromkeys(run.steps())) == list(range(5))
    stack.audit(run)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "gives_up"),
    [
        pytest.param("*", ("orchestrator", "run given up by this replica"), id="all"),
        pytest.param("*/policies/*", ("trainer", "run released"), id="policies"),
        pytest.param("*/checkpoints/*", ("trainer", "run released"), id="checkpoints"),
    ],
)
def test_an_outage_longer_than_the_retries_is_named_and_outlived(
    stack: ChaosStack, proxy: FaultProxy, key: str, gives_up: tuple[str, str]
) -> None:
    service, words = gives_up
    run = stack.submit(max_steps=6)
    run.wait_step(1)
    began = time.time()
    outage = proxy.add(Fault(effect=Effect.ANSWER, key=key, status=503, code="SlowDown"))
    said = _wait_explained(stack, run, "object store", proxy.endpoint, "HTTP 503")
    print(f"after {time.time() - began:.1f} s: {said}")
    log = stack.directory / "logs" / f"{service}.log"
    print(wait_line(log, words, since=began, timeout_s=WAITS_S, alive=lambda: not run.is_over))
    assert "object store" in _wait_explained(stack, run, "object store")
    proxy.remove(outage)
    ended = time.time()
    stack.finish(run)
    print(f"{outage.struck} requests failed; behind its end: {run.require_recovery(ended)}")
    assert all(stack.restarts(name) == 0 for name in stack.pids()), "no process dies of it"


def test_a_store_that_hangs_and_then_answers(stack: ChaosStack, proxy: FaultProxy) -> None:
    run = stack.submit(max_steps=5)
    run.wait_step(1)
    hanging = proxy.add(Fault(effect=Effect.HANG))
    _wait_explained(stack, run, "object store", proxy.endpoint)
    proxy.remove(hanging)
    ended = time.time()
    stack.finish(run)
    assert hanging.struck > 0
    print(run.require_recovery(ended))


def test_a_full_store_is_named_and_the_run_goes_on_with_room(stack: ChaosStack, proxy: FaultProxy) -> None:
    run = stack.submit(max_steps=5)
    run.wait_step(1)
    full = proxy.add(Fault(effect=Effect.ANSWER, method="PUT", status=507, code="InsufficientStorage"))
    _wait_explained(stack, run, "object store", "507 InsufficientStorage")
    time.sleep(3)
    proxy.remove(full)
    ended = time.time()
    stack.finish(run)
    print(run.require_recovery(ended))
    assert full.struck > 0
