"""Real environments that take down their workers: how much still gets played, and what their end says."""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest
import pytest_asyncio

from millrace.env_server.isolation.confinement import Confinement
from millrace.env_server.isolation.limits import WorkerLimits
from millrace.env_server.run import WarmKeeper, WarmLimits
from millrace.env_server.workers.pool import KILLS_WORKERS, EnvPool, PoolLimits
from millrace.env_server.workers.starter import WorkerStarter
from millrace.internal.v1 import rollout_pb2
from millrace.internal.v1.play_pb2 import EnvSpec, PlayGroupRequest, Sampling
from millrace.rollouts.types import Rollout, RolloutStatus
from millrace_testing.patience import patient
from millrace_testing.polling import until

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]

MIB, GIB = 1 << 20, 1 << 30
LIMITS = WorkerLimits(memory_bytes=GIB, max_processes=24, max_file_bytes=256 * MIB)
OK, DIED, QUARANTINED, FAILED = (
    RolloutStatus.OK,
    RolloutStatus.WORKER_DIED,
    RolloutStatus.QUARANTINED,
    RolloutStatus.ENV_ERROR,
)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def limited(environments_on_path: None) -> AsyncIterator[WorkerStarter]:
    made = WorkerStarter(Confinement(limits=LIMITS))
    yield made
    await made.close()


@asynccontextmanager
async def opened(
    starter: WorkerStarter, tasks: Sequence[dict[str, Any]], limits: PoolLimits | None = None
) -> AsyncIterator[EnvPool]:
    """The pool of an environment with these tasks, loaded."""
    env = EnvSpec(name="hungry", id="hungry-env", args_json=json.dumps({"tasks": tasks}))
    pool = EnvPool(env, limits or PoolLimits(), starter)
    pool.start()
    try:
        async with asyncio.timeout(240):
            while pool.info is None:
                assert pool.failure is None, pool.failure
                await asyncio.sleep(0.02)
        yield pool
    finally:
        await pool.close()


async def play(pool: EnvPool, engine: Any, task_index: int, member: int = 0) -> Rollout:
    request = PlayGroupRequest(
        run_uid="r-hungry",
        purpose=rollout_pb2.PURPOSE_TRAIN,
        ordinal=task_index,
        members=[member],
        group_size=2,
        env=pool.env,
        task_index=task_index,
        base_url=engine.base_url("ok"),
        model="policy",
        sampling=Sampling(temperature=1.0, max_tokens=8),
        rollout_timeout_seconds=120,
    )
    [rollout] = await pool.play(request, tokenizer_dir="")
    return rollout


async def test_one_task_in_five_kills_its_worker_and_the_others_are_played(starter: WorkerStarter, engine: Any) -> None:
    """Forty tasks at once, two rollouts each, of which eight tasks end their process."""
    tasks = [{"mode": "exit" if n % 5 == 2 else "slow", "seconds": 0.5} for n in range(40)]
    async with opened(starter, tasks) as pool:
        began = time.monotonic()
        plays = [play(pool, engine, n, member) for n in range(40) for member in range(2)]
        rollouts = await asyncio.gather(*plays)
        assert time.monotonic() - began < patient(60)
        for rollout in rollouts:
            if rollout.ordinal % 5 != 2:
                assert rollout.status == OK, rollout.error
            else:
                assert rollout.status in (DIED, QUARANTINED) and "exit code 3, peak memory" in rollout.error.message
        assert len(pool.quarantined_tasks) == 8 and pool.failure is None
        assert len(pool.probes.workers) <= PoolLimits().num_probes + 1


@pytest.mark.long
async def test_an_environment_of_which_most_tasks_kill_is_given_up(starter: WorkerStarter, engine: Any) -> None:
    async with opened(starter, [{"mode": "exit" if n % 2 else "segfault"} for n in range(40)]) as pool:
        began = time.monotonic()
        rollouts = await asyncio.gather(*(play(pool, engine, n) for n in range(40)))
        assert time.monotonic() - began < patient(60)
        assert pool.failure is not None and pool.failure.error_type == KILLS_WORKERS
        text = str(pool.failure)
        some = pool.quarantined_tasks[-1]
        assert f"task {some}: " in text and "exit code 3, peak memory" in text and "killed by SIGSEGV" in text
        assert len(pool.quarantined_tasks) < 20, "it does not try them all"
        late = [rollout for rollout in rollouts if rollout.status == FAILED]
        assert late and {rollout.error.type for rollout in late} == {KILLS_WORKERS}
        await until(lambda: not pool.num_workers, timeout_s=120)


async def test_a_call_that_waits_in_the_event_loop_ends_its_worker_and_one_that_computes_does_not(
    starter: WorkerStarter, engine: Any
) -> None:
    """Long before the rollouts' deadline of two minutes; the other task's rollouts are played again."""
    tasks = [{"mode": mode, "seconds": 3.0} for mode in ("wait", "slow", "compute")]
    async with opened(starter, tasks, PoolLimits(waits_s=2.0)) as pool:
        began = time.monotonic()
        waits, other = await asyncio.gather(play(pool, engine, 0), play(pool, engine, 1))
        assert time.monotonic() - began < patient(60)
        assert (waits.status, waits.error.type, other.status) == (RolloutStatus.TIMEOUT, "WorkerBlocked", OK)
        assert "one call has waited for" in waits.error.message and "hungry_env.py:" in waits.error.message
        assert "MILLRACE_ENV_BLOCKED_S" in waits.error.message and "asyncio.to_thread" in waits.error.message
        assert len(pool.quarantined_tasks) == 1
        num_deaths = pool.num_deaths
        assert (await play(pool, engine, 2)).status == OK and pool.num_deaths == num_deaths


async def test_a_worker_that_answers_for_another_run_is_ended(starter: WorkerStarter, engine: Any) -> None:
    async with opened(starter, [{"mode": "impostor"}, {"mode": "slow"}]) as pool:
        rollout = await play(pool, engine, 0)
        assert (rollout.run_uid, rollout.status) == ("r-hungry", DIED)
        assert "it answered with other rollouts than those of group 0" in rollout.error.message
        assert (await play(pool, engine, 1)).status == OK


async def test_eight_gigabytes_at_once_fail_that_rollout_alone(limited: WorkerStarter, engine: Any) -> None:
    async with opened(limited, [{"mode": "allocate", "bytes": 8 * GIB}, {"mode": "slow"}]) as pool:
        [greedy, other] = await asyncio.gather(play(pool, engine, 0), play(pool, engine, 1))
        assert (greedy.status, other.status) == (FAILED, OK)
        assert greedy.error.type == "MemoryError" and "MILLRACE_ENV_MEMORY_BYTES" in greedy.error.message
        assert pool.num_deaths == 0


@pytest.mark.long
async def test_eight_gigabytes_in_pieces_end_the_worker_by_its_limit(limited: WorkerStarter, engine: Any) -> None:
    async with opened(limited, [{"mode": "leak", "bytes": 2 * GIB}, {"mode": "slow"}]) as pool:
        [greedy, other] = await asyncio.gather(play(pool, engine, 0), play(pool, engine, 1))
        assert (greedy.status, other.status) == (DIED, OK)
        text = greedy.error.message
        assert "ended by its memory limit: it held" in text and "MILLRACE_ENV_MEMORY_BYTES is 1024 MiB" in text
        assert "frozen" not in text and "SIGKILL" not in text
        assert len(pool.quarantined_tasks) == 1


@pytest.mark.long
async def test_too_many_processes_end_the_worker_by_its_limit(limited: WorkerStarter, engine: Any) -> None:
    async with opened(limited, [{"mode": "fork", "count": 60}]) as pool:
        rollout = await play(pool, engine, 0)
        assert rollout.status == DIED and "ended by its limit of processes: it had" in rollout.error.message
        assert "MILLRACE_ENV_MAX_PROCESSES is 24" in rollout.error.message
        left = [
            p for p in psutil.process_iter(["cmdline"]) if "import time; time.sleep(60)" in (p.info["cmdline"] or [])
        ]
        assert [p for p in left if p.status() != psutil.STATUS_ZOMBIE] == []


@pytest.mark.long
async def test_a_huge_file_fails_that_rollout_alone(limited: WorkerStarter, engine: Any) -> None:
    async with opened(limited, [{"mode": "write", "bytes": GIB}, {"mode": "slow"}]) as pool:
        [greedy, other] = await asyncio.gather(play(pool, engine, 0), play(pool, engine, 1))
        assert (greedy.status, other.status) == (FAILED, OK) and "File too large" in greedy.error.message


async def test_an_idle_environment_rests_and_wakes(starter: WorkerStarter, engine: Any) -> None:
    """Its worker ends, its directory goes, what is known of it stays, and the next rollout is played all the same."""
    async with opened(starter, [{"mode": "slow"}, {"mode": "exit"}]) as pool:
        await asyncio.gather(play(pool, engine, 0), play(pool, engine, 1))
        [bad] = pool.quarantined_tasks
        [worker, *_] = pool.workers
        service: Any = type("Service", (), {"pools": [pool], "forget": lambda *_: None})()
        keeper = WarmKeeper(service=service, limits=WarmLimits(idle_s=3600.0, num_workers=0))
        keeper.live_runs = frozenset({"r-hungry"})
        keeper.look()
        assert pool.num_workers and not pool.is_resting, "a live run plays it"
        keeper.live_runs = frozenset()
        keeper.look()
        await until(lambda: worker.is_ended and not worker.started.directory.exists(), timeout_s=120)
        assert pool.is_resting and not os.path.exists(f"/proc/{worker.process.pid}")
        assert (await play(pool, engine, 0)).status == OK and pool.quarantined_tasks == (bad,)
        assert (await play(pool, engine, 1)).status == QUARANTINED and pool.num_deaths == 1
