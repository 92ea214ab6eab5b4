import asyncio

from millrace.runlog import open_redis
from millrace.runlog.redis import connection


async def test_no_cancellation_is_lost(redis_url) -> None:
    """A cancelled reader ends: with redis-py's own `socket_timeout` some go on for ever on Python 3.11."""
    client = open_redis(redis_url)

    async def read_for_ever() -> None:
        while True:
            await connection.call(client, "pinging", lambda: client.execute_command("PING"))

    lost = 0
    for attempt in range(1500):
        task = asyncio.create_task(read_for_ever())
        await asyncio.sleep(0.0003 * (attempt % 7))
        task.cancel()
        _, pending = await asyncio.wait({task}, timeout=1.0)
        if pending:
            lost += 1
            task.cancel()
            await asyncio.wait({task}, timeout=1.0)
    assert lost == 0
    await client.aclose()
