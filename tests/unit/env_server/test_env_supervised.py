"""What becomes of an environment whose workers cannot be started, for a reason that nobody foresaw."""

from collections.abc import Sequence
from typing import Any

from millrace.env_server.isolation.confinement import Confinement
from millrace.env_server.workers.pool import EnvPool, PoolLimits
from millrace.internal.v1.play_pb2 import EnvSpec
from millrace_testing.polling import until


class Starter:
    """Starts no worker."""

    confinement = Confinement()

    async def start(self, files: Sequence[int], *, python: str = "") -> None:
        raise ValueError("the message has 200000 bytes, the most is 163840")


async def test_an_environment_that_cannot_be_started_fails_with_the_reason() -> None:
    starter: Any = Starter()
    pool = EnvPool(EnvSpec(id="an-env"), PoolLimits(), starter)
    pool.start()
    try:
        await until(lambda: pool.failure is not None)
        assert pool.failure is not None and pool.failure.error_type == "ValueError"
        assert "the message has 200000 bytes" in str(pool.failure)
    finally:
        await pool.close()
