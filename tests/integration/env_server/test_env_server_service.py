"""The service around the workers: idempotence, fencing, capacity, cancelling, and a log that goes away."""

import asyncio
import os
import signal
import time
from typing import Any

import pytest

from millrace.env_server.run import WarmKeeper
from millrace.env_server.workers.pool import EnvPool
from millrace.errors import CapacityError, FencedError, InvalidSpecError, InvalidStateError, MillraceError
from millrace.internal.v1 import batch_pb2, env_service_pb2, play_pb2, rollout_pb2
from millrace.orchestrator.play.env_servers import PLAY_TIMEOUT_S
from millrace.rollouts.types import RolloutStatus
from millrace.rpc.channel import call
from millrace.runlog.names import Stream
from millrace.runlog.redis.log import RunLog
from millrace.telemetry import waits
from millrace_testing.patience import patient
from millrace_testing.polling import until

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]


async def play_group(server: Any, request: play_pb2.PlayGroupRequest) -> Any:
    return await call(server.stub.PlayGroup, request, timeout_s=patient(PLAY_TIMEOUT_S))


async def playing(server: Any) -> list[play_pb2.PlayingGroup]:
    request = env_service_pb2.ListPlayingRequest(run_uid=server.log.uid, epoch=server.epoch)
    return list((await call(server.stub.ListPlaying, request, timeout_s=60)).groups)


async def cancel(server: Any, *groups: play_pb2.PlayingGroup) -> int:
    request = env_service_pb2.CancelGroupsRequest(run_uid=server.log.uid, epoch=server.epoch, groups=groups)
    return (await call(server.stub.CancelGroups, request, timeout_s=60)).num_cancelled


async def stream_length(server: Any) -> int:
    return len(await server.log.read(Stream.ROLLOUTS, count=10_000))


async def test_open_env_answers_loading_first(server: Any) -> None:
    opened = await server.open("reverse-text", {"seed": 99}, wait=False)
    assert opened.state == env_service_pb2.ENV_STATE_LOADING


async def test_play_before_loaded_is_unavailable(server: Any) -> None:
    with pytest.raises(MillraceError) as caught:
        await play_group(server, server.request("faulty-v0", 0, args={"load_seconds": 120.0}))
    assert caught.value.reason == "ENV_LOADING"


async def test_play_of_a_failed_environment_says_why(server: Any) -> None:
    await server.open("faulty-v0", {"load_raises": True})
    with pytest.raises(InvalidStateError, match="no such thing while loading"):
        await play_group(server, server.request("faulty-v0", 0, args={"load_raises": True}))


async def test_groups_are_idempotent_while_playing_and_after(server: Any) -> None:
    await server.open("faulty-v0")
    request = server.request("faulty-v0", 11)  # long_sleep: 2 s
    assert not (await play_group(server, request)).already_playing
    assert (await play_group(server, request)).already_playing
    await server.collect(request)
    before = await stream_length(server)
    assert (await play_group(server, request)).already_playing
    await asyncio.sleep(0.5)
    assert await stream_length(server) == before
    request.attempt = 1
    assert not (await play_group(server, request)).already_playing
    await asyncio.sleep(2.5)


async def test_list_playing_shows_what_is_left(server: Any) -> None:
    await server.open("faulty-v0")
    request = server.request("faulty-v0", 9, size=3, rollout_timeout_seconds=60.0)  # sleep
    await play_group(server, request)
    [group] = await playing(server)
    assert (group.ordinal, list(group.members), group.planned_step) == (request.ordinal, [0, 1, 2], 7)
    assert group.base_url == request.base_url and 0 <= group.age_seconds < 5
    assert await cancel(server, group) == 1
    assert await playing(server) == []


async def test_cancelled_groups_append_nothing_and_free_their_place(server: Any) -> None:
    await server.open("faulty-v0")
    before = await stream_length(server)
    for _ in range(3):
        await play_group(server, server.request("faulty-v0", 9, size=2, rollout_timeout_seconds=60.0))
    assert server.service.groups.num_rollouts == 6
    assert await cancel(server) == 3
    assert server.service.groups.num_rollouts == 0
    await asyncio.sleep(1.0)
    assert await stream_length(server) == before


async def test_capacity(server: Any) -> None:
    await server.open("faulty-v0")
    request = server.request("faulty-v0", 9, size=60, rollout_timeout_seconds=60.0)
    await play_group(server, request)
    with pytest.raises(CapacityError, match=r"60 rollouts .* capacity is 64") as caught:
        await play_group(server, server.request("faulty-v0", 0, size=5))
    assert caught.value.reason == "ENV_SERVER_FULL"
    await cancel(server)


async def test_older_epochs_are_fenced(server: Any) -> None:
    await server.open("faulty-v0")
    server.epoch = 5
    await playing(server)
    with pytest.raises(FencedError, match="epoch 4 is older than epoch 5"):
        await play_group(server, server.request("faulty-v0", 0, epoch=4))
    server.epoch = 4
    with pytest.raises(FencedError):
        await playing(server)
    with pytest.raises(FencedError):
        await cancel(server)
    server.epoch = 6
    [rollout] = await server.play(server.request("faulty-v0", 0))
    assert rollout.status is RolloutStatus.OK


async def test_bad_requests_name_every_field(server: Any) -> None:
    await server.open("faulty-v0")
    bad = server.request("faulty-v0", 0, members=[0, 0, 7], base_url="", rollout_timeout_seconds=0.0)
    bad.sampling.extra_body_json = "[1"
    with pytest.raises(InvalidSpecError) as caught:
        await play_group(server, bad)
    assert {violation.field for violation in caught.value.violations} == {
        "members",
        "base_url",
        "rollout_timeout_seconds",
        "sampling.extra_body_json",
    }
    with pytest.raises(InvalidSpecError, match="14 training tasks"):
        await play_group(server, server.request("faulty-v0", 14))
    with pytest.raises(InvalidSpecError, match="JSON object"):
        await call(
            server.stub.OpenEnv,
            env_service_pb2.OpenEnvRequest(env=play_pb2.EnvSpec(id="faulty-v0", args_json="[1")),
        )


async def test_part_of_a_group_with_group_rewards_is_refused(server: Any) -> None:
    args = {"kind": "group"}
    await server.open("faulty-v0", args)
    with pytest.raises(InvalidSpecError, match="one attempt"):
        await play_group(server, server.request("faulty-v0", 0, args=args, members=[1], group_size=3))


async def test_rollouts_survive_a_log_that_is_gone(server: Any) -> None:
    """The log is wiped while rollouts are played; they wait, visibly, and arrive when it is rebuilt."""
    await server.open("faulty-v0")
    names = server.log.names
    meta = await server.log.redis.hgetall(names.meta)
    await server.log.redis.delete(names.meta)
    request = server.request("faulty-v0", 0, size=2)
    await play_group(server, request)
    await until(lambda: any("append of rollout" in wait.reason for wait in waits.snapshot("test")), timeout_s=120)
    assert server.service.groups.num_rollouts == 2
    await server.log.redis.hset(names.meta, mapping=meta)
    rollouts = await server.collect(request)
    assert {rollout.status for rollout in rollouts} == {RolloutStatus.OK}
    await until(lambda: not server.service.groups.num_rollouts, timeout_s=120)


async def test_kept_rollouts_are_given_up_when_their_ordinal_is_resolved(server: Any) -> None:
    await server.open("faulty-v0")
    names = server.log.names
    meta = await server.log.redis.hgetall(names.meta)
    await server.log.redis.delete(names.meta)
    request = server.request("faulty-v0", 0)
    await play_group(server, request)
    await asyncio.sleep(1.0)
    assert server.service.groups.num_rollouts == 1
    server.sink.note_run(server.log.uid, request.ordinal + 1, "")
    await until(lambda: not server.service.groups.num_rollouts, timeout_s=120)
    await server.log.redis.hset(names.meta, mapping=meta)
    server.log = await RunLog.open(server.log.redis, server.store, prefix="test", uid=server.log.uid)


async def test_worker_killed_from_outside_costs_no_rollout(server: Any) -> None:
    await server.open("faulty-v0")
    request = server.request("faulty-v0", 11, size=4, rollout_timeout_seconds=30.0)
    await play_group(server, request)
    pools: list[EnvPool] = [pool for pool in server.service.pools if pool.info is not None]
    [worker] = await until(
        lambda: [worker for pool in pools for worker in pool.slots if worker is not None and worker.num_playing]
    )
    os.kill(worker.process.pid, signal.SIGKILL)
    rollouts = await server.collect(request)
    assert {rollout.status for rollout in rollouts} == {RolloutStatus.OK}
    assert all(not pool.quarantined_tasks for pool in pools)


async def test_tasks_that_differ_between_workers_fail_the_environment(server: Any) -> None:
    args = {"is_random": True}
    await server.open("faulty-v0", args)
    request = server.request("faulty-v0", 9, args=args, rollout_timeout_seconds=60.0)
    await play_group(server, request)
    await asyncio.sleep(0.2)
    for pool in server.service.pools:
        if b"is_random" in pool.env.args_json.encode():
            for worker in pool.slots:
                if worker is not None:
                    worker.kill("test")
    async with asyncio.timeout(120):
        while (await server.open("faulty-v0", args, wait=False)).state != env_service_pb2.ENV_STATE_FAILED:
            await asyncio.sleep(0.2)
    opened = await server.open("faulty-v0", args)
    assert opened.error_type == "TaskSetChanged"
    [rollout] = await server.collect(request)  # the one that lost its worker does not wait for ever
    assert (rollout.status, rollout.error.type) == (RolloutStatus.ENV_ERROR, "TaskSetChanged")


async def test_eval_and_train_of_one_ordinal_are_two_groups(server: Any) -> None:
    await server.open("faulty-v0")
    request = server.request("faulty-v0", 0)
    await server.play(request)
    request.purpose = rollout_pb2.PURPOSE_EVAL
    request.eval_id = "step-4"
    request.use_train_tasks = True
    assert not (await play_group(server, request)).already_playing
    await asyncio.sleep(0.5)


async def test_open_says_which_key_is_not_set(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Known before the first rollout: the key of an endpoint, and that of a teacher."""
    monkeypatch.setenv("THE_KEY", "x")
    spec = server.spec("faulty-v0")
    request = env_service_pb2.OpenEnvRequest(env=spec, api_key_var="NO_SUCH_KEY", teacher_key_var="NOR_THIS_ONE")
    with pytest.raises(InvalidSpecError) as caught:
        await call(server.stub.OpenEnv, request, timeout_s=patient(60))
    assert [violation.field for violation in caught.value.violations] == ["api_key_var", "teacher_key_var"]
    assert "start it with NO_SUCH_KEY=<the endpoint's API key>" in caught.value.violations[0].message
    request = env_service_pb2.OpenEnvRequest(env=spec, api_key_var="THE_KEY", teacher_key_var="THE_KEY")
    assert (await call(server.stub.OpenEnv, request, timeout_s=patient(60))).state


async def test_a_run_that_ended_leaves_nothing_behind_but_warm_workers(server: Any) -> None:
    """What it plays stops, what is kept of it goes, and the next run finds its environment loaded."""
    args = {"num_train": 5, "num_eval": 2}
    await server.open("reverse-text", args)
    await server.play(server.request("reverse-text", 0, args=args))
    await play_group(server, server.request("reverse-text", 1, args=args, size=3, mode="hang"))
    assert server.service.num_rollouts == 3 and server.log.uid in server.sink.spool.run_uids
    closing = batch_pb2.BatchHeader(step=0, kind=batch_pb2.BATCH_KIND_CLOSE, run_uid=server.log.uid)
    server.store.create(server.log.names.batch_header(0), closing.SerializeToString())
    async with asyncio.timeout(patient(60)):
        while server.service.num_rollouts or server.log.uid in server.sink.spool.run_uids:
            server.service.look_for_end(server.log.uid)  # as every heartbeat does
            await asyncio.sleep(0.01)
    server.store.delete(server.log.names.batch_header(0))
    assert await playing(server) == []
    WarmKeeper(service=server.service).look()
    began = time.monotonic()
    assert (await server.open("reverse-text", args, wait=False)).state == env_service_pb2.ENV_STATE_READY
    assert time.monotonic() - began < patient(2)
    # `run resume`: what is played from now on counts again, before the first heartbeat says so.
    [rollout] = await server.play(server.request("reverse-text", 2, args=args))
    assert rollout.status is RolloutStatus.OK
