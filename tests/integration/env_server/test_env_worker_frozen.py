"""An environment worker that stands still, and rollouts that wait for an engine: who waits for whom is visible."""

import asyncio
import os
import signal

import pytest

from millrace.env_server.workers.worker_process import WorkerProcess
from millrace.internal.v1 import env_service_pb2, rollout_pb2
from millrace.internal.v1.play_pb2 import EnvSpec, PlayGroupRequest, Sampling
from millrace.orchestrator.play.env_servers import PLAY_TIMEOUT_S
from millrace.rollouts.types import RolloutStatus
from millrace.rpc.channel import call
from millrace.runlog.names import Stream
from millrace.telemetry import waits
from millrace_testing.patience import patient
from millrace_testing.polling import until

NAMED_WITHIN_S = 30.0

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]


def request(base_url: str, ordinal: int = 0) -> PlayGroupRequest:
    return PlayGroupRequest(
        run_uid="r-frozen",
        purpose=rollout_pb2.PURPOSE_TRAIN,
        ordinal=ordinal,
        members=[0],
        group_size=1,
        env=EnvSpec(name="reverse", id="reverse-text"),
        task_index=0,
        base_url=base_url,
        model="policy",
        sampling=Sampling(temperature=1.0, max_tokens=8),
        rollout_timeout_seconds=60,
    )


def about(text: str) -> list[waits.Wait]:
    return [wait for wait in waits.snapshot("env-server-0") if text in wait.reason]


async def until_there(text: str) -> waits.Wait:
    found = await until(lambda: about(text), timeout_s=NAMED_WITHIN_S)
    (wait,) = found
    return wait


async def test_a_frozen_worker_is_named_and_forgotten_when_it_goes_on(engine, starter) -> None:
    env = EnvSpec(name="r", id="reverse-text", args_json='{"num_train": 4, "num_eval": 2}')
    worker = await WorkerProcess.spawn(env, starter, name="reverse-text#7")
    try:
        await worker.loaded
        await asyncio.sleep(4)
        assert about("env worker") == []  # an idle worker that answers
        os.kill(worker.process.pid, signal.SIGSTOP)
        playing = [
            asyncio.create_task(worker.play(request(engine.base_url("ok"), n), tokenizer_dir="")) for n in (0, 1)
        ]
        wait = await until_there(f"env worker reverse-text#7 (pid {worker.process.pid}), which has not answered for")
        assert wait.reason.endswith("2 rollouts wait")
        assert (wait.waits_on, wait.deadline_s > 0) == ("env worker reverse-text#7", True)
        os.kill(worker.process.pid, signal.SIGCONT)
        async with asyncio.timeout(120):
            rollouts = [rollout for play in await asyncio.gather(*playing) for rollout in play]
            assert [rollout.status for rollout in rollouts] == [RolloutStatus.OK] * 2
            while about("env worker"):
                await asyncio.sleep(0.1)
    finally:
        await worker.close()


async def test_a_worker_that_stays_frozen_is_killed_and_its_rollouts_are_played_again(server, engine) -> None:
    """Four tasks at once: none of them becomes a suspect, or they would be played one after the other."""
    args = {"num_train": 8, "num_eval": 2}
    await server.open("reverse-text", args)
    [pool] = [pool for pool in server.service.pools if "8" in pool.env.args_json]
    [worker] = pool.slots
    worker.frozen_s = 4.0
    os.kill(worker.process.pid, signal.SIGSTOP)
    groups = [server.request("reverse-text", n, args=args, size=2) for n in range(4)]
    playing = asyncio.create_task(server.play(*groups))
    wait = await until_there(f"(pid {worker.process.pid}), which has not answered for")
    assert wait.reason.endswith("s: its process is frozen, and is killed after 4 s; 8 rollouts wait")
    rollouts = await playing
    assert [rollout.status for rollout in rollouts] == ["ok"] * 8
    assert worker.process.returncode == -signal.SIGKILL and not pool.trials.suspects and not pool.probes.workers


async def test_code_that_blocks_its_worker_for_longer_is_no_frozen_process(server) -> None:
    args = {"modes": ["block_long"]}
    await server.open("faulty-v0", args)
    pool = next(pool for pool in server.service.pools if "block_long" in pool.env.args_json)
    [worker] = pool.slots
    worker.frozen_s = 3.0
    blocking = server.request("faulty-v0", 0, args=args, rollout_timeout_seconds=30.0)
    playing = asyncio.create_task(server.play(blocking))
    wait = await until_there("which has not answered for")
    assert "blocked by the environment's code" in wait.reason
    [rollout] = await playing
    assert rollout.status == "ok" and worker.is_ready


async def test_a_worker_that_is_killed_while_it_loads_is_started_again(server) -> None:
    args = {"num_train": 9, "num_eval": 2}
    await server.open("reverse-text", args, wait=False)
    pool = next(pool for pool in server.service.pools if "9" in pool.env.args_json)
    await until(lambda: pool.slots[0] is not None, timeout_s=120)
    os.kill(pool.slots[0].process.pid, signal.SIGKILL)
    assert (await server.open("reverse-text", args)).state == env_service_pb2.ENV_STATE_READY


async def test_rollouts_that_an_engine_keeps_waiting_are_one_wait_for_it(server, engine) -> None:
    args = {"num_train": 4, "num_eval": 2}
    await server.open("reverse-text", args)
    groups = [server.request("reverse-text", n, mode="hang", args=args, size=2) for n in range(2)]
    for group in groups:
        await call(server.stub.PlayGroup, group, timeout_s=patient(PLAY_TIMEOUT_S))
    wait = await until_there("4 rollouts of reverse-text that are played with the engine at")
    assert (wait.waits_on, wait.run) == (engine.base_url("hang"), server.log.uid)
    assert wait.deadline_s > groups[0].rollout_timeout_seconds
    everything = env_service_pb2.CancelGroupsRequest(run_uid=server.log.uid, epoch=1)
    await call(server.stub.CancelGroups, everything, timeout_s=60)
    await until(lambda: not about("rollouts of reverse-text"), timeout_s=120)


async def test_workers_that_are_asked_to_end_accuse_nobody_wherever_they_play(server) -> None:
    """SIGTERM in a shared worker and in the probe worker: no suspect, no failed rollout; the third one counts."""
    args = {"modes": ["long_sleep", "long_sleep"]}
    await server.open("faulty-v0", args)
    pool = next(pool for pool in server.service.pools if "long_sleep" in pool.env.args_json)
    first = pool.slots[0]
    playing = asyncio.create_task(server.play(server.request("faulty-v0", 0, args=args, size=2)))
    await until(lambda: first.num_playing, timeout_s=120)
    os.kill(first.process.pid, signal.SIGTERM)
    await until(lambda: pool.slots[0] not in (None, first) and pool.slots[0].num_playing, timeout_s=120)
    assert not pool.trials.suspects
    assert [rollout.status for rollout in await playing] == ["ok", "ok"] and not pool.probes.workers
    # A suspect whose probe worker is asked to end while it plays, twice, is no culprit.
    task_id = pool.task_id(server.request("faulty-v0", 1, args=args))
    pool.trials.suspect(task_id)
    playing = asyncio.create_task(server.play(server.request("faulty-v0", 1, args=args, size=1)))
    probes = []
    async with asyncio.timeout(120):
        for _ in range(2):
            while not (fresh := [probe for probe in pool.probes.workers if probe.num_playing and probe not in probes]):
                await asyncio.sleep(0.01)
            probes += fresh
            os.kill(fresh[0].process.pid, signal.SIGTERM)
    assert [rollout.status for rollout in await playing] == ["ok"]
    assert not pool.trials.suspects and not pool.quarantined_tasks


async def test_a_leaving_env_server_leaves_rollouts_without_a_worker_to_others(server) -> None:
    args = {"modes": ["long_sleep", "long_sleep", "ok"]}
    await server.open("faulty-v0", args)
    pool = next(pool for pool in server.service.pools if '"ok"]' in pool.env.args_json)
    [worker] = pool.slots
    before = len(await server.log.read(Stream.ROLLOUTS, count=10_000))
    for task_index in range(2):
        await call(
            server.stub.PlayGroup,
            server.request("faulty-v0", task_index, args=args, size=2),
            timeout_s=patient(PLAY_TIMEOUT_S),
        )
    await until(lambda: worker.num_playing >= 4, timeout_s=120)
    try:
        await server.service.leave()
        os.kill(worker.process.pid, signal.SIGKILL)
        async with asyncio.timeout(60):  # it does not wait for a new worker, nor for the grace
            await server.service.drain(grace_s=600)
        assert len(await server.log.read(Stream.ROLLOUTS, count=10_000)) == before and pool.num_deaths == 1
        assert not pool.trials.suspects and pool.slots == [None]
    finally:  # the server and its other pools are those of other tests, too
        server.service.is_leaving = False
        for other in server.service.pools:
            other.is_leaving = False
