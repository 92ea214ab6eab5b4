"""Which environments keep their workers while nobody plays them: for a bounded time, and a bounded number.

The next run of the same environment, or the next evaluation, starts faster where the workers are still there; but every
worker holds some hundred MB, and runs with new environments come and go.
"""

import asyncio
import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from millrace.env_server.service import EnvService
from millrace.env_server.workers.pool import EnvPool

logger = logging.getLogger(__name__)

DEFAULT_IDLE_S = 600.0
DEFAULT_IDLE_WORKERS = 4
_LOOK_S = 5.0
# What is known of resting environments (ids of tasks, quarantined ones) is small, but not nothing.
_MAX_RESTING = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmLimits:
    """How long and how many."""

    idle_s: float = DEFAULT_IDLE_S
    """Seconds that an environment keeps its workers after its last rollout."""
    num_workers: int = DEFAULT_IDLE_WORKERS
    """Workers of environments that no live run has played; above it those end that were used longest ago."""


def to_rest(
    pools: Sequence[EnvPool], *, live_runs: Collection[str], now: float, limits: WarmLimits
) -> Sequence[EnvPool]:
    """The idle environments whose workers shall end at `now` (monotonic)."""
    idle = [(since, pool) for pool in pools if (since := pool.idle_since) is not None and not pool.is_resting]
    idle.sort(key=lambda one: one[0], reverse=True)
    ending: list[EnvPool] = []
    num_kept = 0
    for since, pool in idle:
        is_wanted = not pool.runs.isdisjoint(live_runs)
        if not is_wanted:
            num_kept += pool.num_workers
        if pool.failure is not None or now - since > limits.idle_s or (not is_wanted and num_kept > limits.num_workers):
            ending.append(pool)
            num_kept -= 0 if is_wanted else pool.num_workers
    return ending


@dataclass(kw_only=True)
class WarmKeeper:
    """Lets idle environments rest, again and again."""

    service: EnvService
    limits: WarmLimits = field(default_factory=WarmLimits)
    live_runs: frozenset[str] = frozenset()
    """Uids of the runs that go on, as the orchestrator tells them by heartbeat."""

    async def run(self) -> None:
        """Look every few seconds until cancelled."""
        # unregistered wait: a periodic look; what it awaits is registered where it is awaited
        while True:
            await asyncio.sleep(_LOOK_S)
            self.look()

    def look(self) -> None:
        """Let those rest whose time is over."""
        for pool in to_rest(self.service.pools, live_runs=self.live_runs, now=time.monotonic(), limits=self.limits):
            logger.info("idle environment rests", extra={"env": pool.env.id, "workers": pool.num_workers})
            pool.rest()
        resting = [pool for pool in self.service.pools if pool.is_resting and pool.runs.isdisjoint(self.live_runs)]
        for pool in resting[: max(0, len(resting) - _MAX_RESTING)]:
            self.service.forget(pool)
