"""What a real orchestrator says of a run that is held up, and who it says held the run before."""

import asyncio
import os
import signal
import time

import pytest

from millrace.errors import NotFoundError
from millrace.local.redis import EmbeddedRedis
from millrace.rpc.channel import call
from millrace.runlog import EventReader, RunLog
from millrace.v1 import run_pb2, run_service_pb2
from millrace_testing.orchestrator.runs import bodies, create, watch
from millrace_testing.polling import until


async def why(stack, name: str) -> run_service_pb2.ExplainRunResponse:
    return await call(stack.runs.ExplainRun, run_service_pb2.ExplainRunRequest(name=name))


async def test_a_policy_that_nobody_serves_is_up_to_inference(stack) -> None:
    await stack.env_server()
    await stack.trainer()
    run = await create(stack, run_id="lonely")

    async def is_explained() -> bool:
        return "← no inference worker is registered for this run" in (await why(stack, "lonely")).summary

    await until(is_explained)
    answer = await why(stack, run.uid)
    assert ("policy 0 to be served", "inference") in [(wait.reason, wait.waits_on) for wait in answer.waits]
    assert (await why(stack, "-")).summary and (await why(stack, "lone")).summary
    with pytest.raises(NotFoundError):
        await why(stack, "nobody")


async def test_a_takeover_names_who_held_the_run(stack) -> None:
    await stack.env_server(silent=set(range(1000)))
    await stack.inference()
    await stack.trainer()
    run = await create(stack)

    async def waits_for_groups() -> bool:
        return any("groups for batch 0" in wait.reason for wait in (await why(stack, run.name)).waits)

    await until(waits_for_groups)
    before = next(w.owner for w in (await why(stack, run.name)).waits if "groups for batch 0" in w.reason)
    port = int(stack.address.rpartition(":")[2])
    await stack.kill_orchestrator()
    await stack.start_orchestrator(port)
    await until(waits_for_groups)
    await call(stack.runs.CancelRun, run_service_pb2.CancelRunRequest(name=run.name))
    events = await watch(stack, run)
    (told,) = [w.message for w in bodies(events, "warning") if w.reason == "ORCHESTRATOR_REPLACED"]
    assert f" took the run over from {before}, which wrote its last event" in told
    assert told.startswith("orchestrator orchestrator-") and not told.startswith(f"orchestrator {before}")


async def test_a_frozen_redis_is_named_within_seconds_and_told_when_it_is_back(stack, tmp_path) -> None:
    with EmbeddedRedis(tmp_path / "redis", append_only="none") as redis:
        stack = type(stack)(
            redis.url, f"file://{tmp_path}/store", "frozen"
        )  # like the fixture's, on a Redis of its own
        await stack.start()
        try:
            await stack.env_server(silent=set(range(1000)))
            await stack.inference()
            await stack.trainer()
            run = await create(stack)

            async def is_running() -> bool:
                return any("groups for batch 0" in wait.reason for wait in (await why(stack, run.name)).waits)

            await until(is_running)
            os.kill(redis.pid, signal.SIGSTOP)
            began = time.monotonic()

            async def is_named() -> bool:
                asked = time.monotonic()
                answer = await why(stack, run.name)
                assert time.monotonic() - asked < 5.0
                return f"Redis at 127.0.0.1:{redis.port}, which does not answer" in answer.summary

            await until(is_named)
            assert "its state is that of the last look" in (await why(stack, run.name)).summary
            await asyncio.sleep(max(0.0, 7.0 - (time.monotonic() - began)))
            os.kill(redis.pid, signal.SIGCONT)
            log = await RunLog.open(stack.deps["redis"], stack.deps["store"], prefix="frozen", uid=run.uid)

            async def is_told() -> bool:
                return any(event.HasField("warning") for event in await EventReader(log).read())

            await until(is_told)
            await call(stack.runs.CancelRun, run_service_pb2.CancelRunRequest(name=run.name))
            events = await watch(stack, run)
        finally:
            os.kill(redis.pid, signal.SIGCONT)
            await stack.stop()
    assert bodies(events, "state_changed")[-1].new_state == run_pb2.RUN_STATE_CANCELLED
    told = [(w.reason, w.message) for w in bodies(events, "warning")]
    assert [reason for reason, _ in told] == ["REDIS_SILENT"]
    assert told[0][1].startswith(f"Redis at 127.0.0.1:{redis.port} did not answer for ")
