"""What a run keeps in Redis does not grow with its length, and what was removed there is missed by nobody."""

import pytest

from millrace.orchestrator.drive import housekeeping
from millrace.runlog import RunLog, Stream, open_redis
from millrace.runlog.redis import log as redis_log
from millrace_testing.orchestrator.runs import create, headers_of, require_clean, resolutions, states, watch, wipe
from millrace_testing.polling import until

STEPS = 12


@pytest.mark.parametrize("is_wiped", [False, True])
async def test_batches_and_policies_in_redis_are_those_of_a_window(stack, monkeypatch, is_wiped) -> None:
    """The run writes no checkpoint. With `is_wiped` Redis loses everything before the last step."""
    monkeypatch.setattr(housekeeping, "TRIM_S", 0.05)
    monkeypatch.setattr(redis_log, "KEPT_POLICIES", 3)
    await stack.env_server()
    await stack.inference()
    trainer = await stack.trainer()
    run = await create(stack, max_steps=STEPS)
    redis = open_redis(stack.redis_url)
    try:
        await until(lambda: len(trainer.headers) > STEPS - 3, timeout_s=60.0)
        trainer.hold.clear()
        if is_wiped:
            await wipe(stack)
        else:
            log = await RunLog.open(redis, stack.deps["store"], prefix=stack.prefix, uid=run.uid)
            newest = trainer.status.step

            async def held(stream: Stream) -> list[int]:
                return [int(entry.id.partition("-")[0]) for entry in await log.read(stream, count=1000)]

            async def is_trimmed() -> bool:
                return min(await held(Stream.BATCHES), default=newest) >= newest

            await until(is_trimmed, timeout_s=20.0)
            assert len(await held(Stream.POLICIES)) <= 3
        trainer.hold.set()
        assert states(await watch(stack, run, timeout_s=60.0))[-1] == "SUCCEEDED"
        headers = await headers_of(stack, run)
        assert [header.step for header in headers] == list(range(STEPS + 1))
        resolutions(headers)
        await require_clean(stack, run)
    finally:
        await redis.aclose()
