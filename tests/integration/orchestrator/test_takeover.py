"""What a new orchestrator takes over, and what the one before notices; what happens to work whose worker is gone."""

import asyncio
import json
import logging
from collections import Counter
from typing import Any, cast

from millrace.backoff import Backoff
from millrace.internal.v1 import batch_pb2, rollout_pb2, worker_service_pb2
from millrace.orchestrator import manager
from millrace.orchestrator.beside import LogPlace
from millrace.orchestrator.catalog import RunCatalog
from millrace.orchestrator.manager import RunManager
from millrace.orchestrator.play import env_servers, play
from millrace.orchestrator.workers import WorkerRegistry
from millrace.rollouts.types import Purpose, RolloutStatus
from millrace.rollouts.wire import decode_archive, encode_rollout
from millrace.runlog import Lease
from millrace.runlog.names import Names
from millrace.v1 import run_pb2
from millrace_testing.leases import lease_holder
from millrace_testing.orchestrator.fakes import FakeEnvServer, FakeTrainer, make_rollout
from millrace_testing.orchestrator.runs import (
    bodies,
    create,
    get,
    has_state,
    log_of,
    require_clean,
    resolutions,
    restart_orchestrator,
    states,
    watch,
)
from millrace_testing.patience import patient
from millrace_testing.polling import until
from millrace_testing.runlog.committed import load_headers


async def archived(stack, run) -> list:
    headers, _ = await load_headers(await log_of(stack, run))
    store = stack.deps["store"]
    found = [r for h in headers if h.rollouts_key for r in decode_archive(store.get(h.rollouts_key))]
    return [rollout for rollout in found if rollout.purpose is Purpose.TRAIN]


async def test_what_is_being_played_is_taken_over_and_not_played_again(stack) -> None:
    env, _, trainer = await stack.env_server(), await stack.inference(), await stack.trainer()
    env.go_on.clear()
    run = await create(stack)
    await until(lambda: len(env.tasks) >= 4)
    await restart_orchestrator(stack)
    await until(lambda: has_state(stack, run, run_pb2.RUN_STATE_RUNNING))
    env.go_on.set()
    assert states(await watch(stack, run))[-1] == "SUCCEEDED"
    played = {request.ordinal: request.attempt for request in env.requests if not request.eval_id}
    assert played and set(played.values()) == {0} and all(len(env.plays_of(ordinal)) == 1 for ordinal in played)
    assert all(attempts == 1 for _, _, attempts in resolutions(trainer.steps).values())


async def test_finished_members_are_used_and_only_the_lost_ones_are_played_again(stack) -> None:
    env, _, trainer = await stack.env_server(silent=set(range(1000))), await stack.inference(), await stack.trainer()
    run = await create(stack)
    await until(lambda: env.plays_of(0))
    request = env.plays_of(0)[0]
    log = await log_of(stack, run)
    for member in (0, 2):
        (await log.append_rollouts([encode_rollout(make_rollout(request, member, RolloutStatus.OK, 0))])).require(
            "test"
        )
    env.silent.clear()
    await restart_orchestrator(stack)
    assert states(await watch(stack, run))[-1] == "SUCCEEDED"
    again = env.plays_of(0)[1]
    assert (list(again.members), again.attempt) == ([1, 3], 1)
    assert again.dispatched_after, "the request says what was read before it"
    mine = [rollout for rollout in await archived(stack, run) if rollout.ordinal == 0]
    assert {(r.member, r.attempt) for r in mine} == {(0, 0), (2, 0), (1, 1), (3, 1)}
    assert all(rollout.entry_id for rollout in mine)
    resolutions(trainer.steps)


async def test_a_late_rollout_of_an_env_server_that_nobody_had_heard_of_is_not_generated_again(stack) -> None:
    env, _, trainer = await stack.env_server(), await stack.inference(), await stack.trainer()
    trainer.hold.clear()
    run = await create(stack)
    await until(lambda: len(trainer.headers) >= 1)
    request = env.requests[-1]
    late = type(request)()
    late.CopyFrom(request)
    late.ClearField("eval_id")
    late.purpose, late.ordinal, late.attempt, late.group_size = rollout_pb2.PURPOSE_TRAIN, 7, 3, 4
    log = await log_of(stack, run)
    assert not env.plays_of(7)
    rollout = make_rollout(late, 1, RolloutStatus.OK, 0, env_server="nobody-knows")
    (await log.append_rollouts([encode_rollout(rollout)])).require("test")
    await until(lambda: env.plays_of(7), what="its group is opened, and the rest of it is played")
    trainer.hold.set()
    await watch(stack, run)
    assert 1 not in env.plays_of(7)[0].members


async def test_duplicates_are_archived_and_counted_once_across_takeovers(stack) -> None:
    env, _, trainer = await stack.env_server(), await stack.inference(), await stack.trainer()
    env.go_on.clear()
    run = await create(stack)
    await until(lambda: env.plays_of(0))
    log, request = await log_of(stack, run), env.plays_of(0)[0]
    for _ in range(3):  # each differs in its timing: three plays of one member
        (await log.append_rollouts([encode_rollout(make_rollout(request, 1, RolloutStatus.OK, 0))])).require("test")
    env.go_on.set()
    trainer.hold.clear()
    await until(lambda: len(trainer.headers) >= 1)
    await restart_orchestrator(stack)
    trainer.hold.set()
    await watch(stack, run)
    mine = [r for r in await archived(stack, run) if (r.ordinal, r.member) == (0, 1)]
    assert sorted(rollout.is_duplicate for rollout in mine) == [False, True, True, True]
    counts = [json.loads(header.orchestrator_state)["num_duplicates"] for header in trainer.steps]
    assert counts == sorted(counts) and counts[-1] == 3, "its own play came as well: 1 of 4 is used, once"


async def test_an_orchestrator_that_was_overtaken_gives_up_with_a_clear_message(stack, caplog, monkeypatch) -> None:
    monkeypatch.setattr(manager, "LEASE_TTL_S", 3.0)
    monkeypatch.setattr(manager, "BACKOFF_S", 0.5)
    env, _, trainer = await stack.env_server(), await stack.inference(), await stack.trainer()
    env.go_on.clear()
    run = await create(stack)
    await until(lambda: env.plays_of(0))
    log = await log_of(stack, run)
    await stack.deps["redis"].delete(Names(stack.prefix, run.uid).lease("orchestrator"))
    other = await Lease.acquire(log, "orchestrator", "orchestrator-other", 30.0, slot="elsewhere/1")
    assert other is not None
    epoch = await log.acquire_epoch("orchestrator", "orchestrator-other")
    with caplog.at_level(logging.ERROR, "millrace.orchestrator.manager"):
        env.go_on.set()
        given_up = lambda: [r for r in caplog.records if "given up by this replica" in r.getMessage()]  # noqa: E731
        await until(given_up, timeout_s=10.0)
    error = given_up()[0].__dict__["error"]
    assert "another process holds a newer epoch" in error or "was lost to another orchestrator" in error
    headers, _ = await load_headers(log)
    assert not headers, "nothing is committed under the older epoch"
    await other.release()
    assert states(await watch(stack, run))[-1] == "SUCCEEDED", "it drives the run again once the other one is gone"
    assert min(header.writer_epoch for header in trainer.steps) > epoch.number


async def test_the_successor_in_its_place_claims_although_the_lease_of_the_dead_one_holds(stack) -> None:
    env, _, trainer = await stack.env_server(), await stack.inference(), await stack.trainer()
    trainer.hold.clear()
    run = await create(stack)
    await until(lambda: len(trainer.headers) >= 1)
    port = int(stack.address.rpartition(":")[2])
    log = await log_of(stack, run)
    key = Names(stack.prefix, run.uid).lease("orchestrator")
    held = await stack.deps["redis"].get(key)
    await stack.kill_orchestrator()
    await stack.deps["redis"].set(key, held, px=60_000)  # a `kill -9` leaves it after
    epoch = await log.current_epoch("orchestrator")
    await stack.start_orchestrator(port)

    async def is_claimed() -> bool:
        return await log.current_epoch("orchestrator") > epoch

    await until(is_claimed, timeout_s=8.0)
    trainer.hold.set()
    assert states(await watch(stack, run))[-1] == "SUCCEEDED"
    assert env.requests


async def test_a_replaced_env_servers_groups_are_played_again_at_once(stack) -> None:
    dead = await stack.env_server(silent=set(range(1000)), worker_id="env-server-1", slot="host/1")
    await stack.inference()
    await stack.trainer()
    run = await create(stack)
    await until(lambda: dead.plays_of(0))
    await stack.kill_worker("env-server-1")
    new = await stack.env_server(worker_id="env-server-2", slot="host/1")
    await until(lambda: new.plays_of(0), timeout_s=min(patient(5.0), 9.0), what="long before the lease of 10 s is over")
    assert states(await watch(stack, run))[-1] == "SUCCEEDED"


async def test_an_ended_run_lets_env_servers_forget_everything(stack) -> None:
    env, _, trainer = await stack.env_server(), await stack.inference(), await stack.trainer()
    run = await create(stack)
    await watch(stack, run)
    over = lambda: {a.run_uid for a in env.assignments if a.is_over}  # noqa: E731
    await until(lambda: run.uid in over())
    await restart_orchestrator(stack)
    env.assignments.clear()
    await until(lambda: run.uid in over(), what="told by a successor, too")
    assert trainer.steps


async def test_a_lost_engine_costs_no_attempt_and_nothing_is_sent_to_it_until_it_answers(stack, monkeypatch) -> None:
    monkeypatch.setattr(play, "BLAMELESS_BACKOFF", Backoff(0.1, 0.5))
    env, replica, trainer = await stack.env_server(), await stack.inference(), await stack.trainer()
    env.go_on.clear()
    run = await create(stack)
    await until(lambda: len(env.tasks) >= 4)
    replica.is_down = True
    env.go_on.set()
    await until(lambda: not env.tasks)
    count = len(env.requests)
    waits = "a replica that serves this run's policy"
    await until(lambda: says(stack, run, waits), what="the wait has a name")
    assert len(env.requests) == count, "nothing is sent to a replica that does not answer"
    replica.is_down = False
    events = await watch(stack, run)
    assert states(events)[-1] == "SUCCEEDED"
    found = resolutions(trainer.steps)
    assert found[0][0] == batch_pb2.ORDINAL_OUTCOME_TRAINED and found[0][2] >= 2
    assert {reason for _, reason, _ in found.values()} <= {"", "run_ended"}, "no ordinal is dropped for it"
    assert len(bodies(events, "policy_served")) == len({e.version for e in bodies(events, "policy_served")})


async def says(stack, run, reason: str) -> bool:
    from millrace.rpc.channel import call
    from millrace.v1 import run_service_pb2

    answer = await call(stack.runs.ExplainRun, run_service_pb2.ExplainRunRequest(name=run.uid))
    return any(reason in wait.reason and wait.run_uid == run.uid for wait in answer.waits)


async def test_an_evaluation_that_was_under_way_is_done_by_the_successor(stack) -> None:
    env = await stack.env_server(broken={("eval", 0, 0, 0): RolloutStatus.OK}, delay_s=0.0)
    await stack.inference()
    await stack.trainer()
    held = asyncio.Event()
    play = env.play

    async def slow(request) -> None:
        if request.eval_id:
            await held.wait()
        await play(request)

    env.play = slow
    run = await create(stack)
    await until(lambda: [r for r in env.requests if r.eval_id])
    await restart_orchestrator(stack)
    held.set()
    events = await watch(stack, run)
    assert states(events)[-1] == "SUCCEEDED"
    assert [(e.step, e.num_rollouts) for e in bodies(events, "eval_completed")] == [(0, 6), (3, 6)]
    assert (await get(stack, run)).state == run_pb2.RUN_STATE_SUCCEEDED


async def test_an_env_server_that_does_not_answer_holds_up_groups_for_the_others_only_shortly(
    stack, monkeypatch
) -> None:
    play = FakeEnvServer.PlayGroup

    async def hang_on_one(self, request, context):
        if self.worker_id == "env-server-a":
            await asyncio.sleep(3600)
        return await play(self, request, context)

    monkeypatch.setattr(FakeEnvServer, "PlayGroup", hang_on_one)
    monkeypatch.setattr(env_servers, "PLAY_TIMEOUT_S", 0.2)
    await stack.env_server(worker_id="env-server-a")
    other, _, _ = await stack.env_server(worker_id="env-server-b"), await stack.inference(), await stack.trainer()
    run = await create(stack)
    await until(lambda: has_state(stack, run, run_pb2.RUN_STATE_RUNNING))
    await until(lambda: other.requests, timeout_s=patient(5.0), what="it is asked soon after the one that hangs")


async def test_who_has_not_heard_of_the_end_of_a_run_adds_nothing_to_it(stack, monkeypatch) -> None:
    """Another orchestrator, which looks twice a second, gets a trainer between the seal and its next look."""
    await stack.env_server()
    await stack.inference()
    trainer = await stack.trainer()
    trainer.hold.clear()
    run = await create(stack, max_steps=2)
    await until(lambda: trainer.headers, timeout_s=30.0)
    catalog = RunCatalog(**stack.deps, owner="another")
    views = await catalog.refresh()
    trainer.hold.set()
    assert states(await watch(stack, run))[-1] == "SUCCEEDED"
    store, names = stack.deps["store"], Names(stack.prefix, run.uid)
    await until(lambda: store.head(names.seal(0)) is not None, timeout_s=30.0)
    log = await log_of(stack, run)

    async def is_free() -> bool:
        return await lease_holder(log, "orchestrator") is None

    await until(is_free, timeout_s=30.0)

    async def stale() -> list:
        return views

    monkeypatch.setattr(catalog, "refresh", stale)
    registry, looked = WorkerRegistry(), 0

    def count() -> None:
        nonlocal looked
        looked += 1
        told.update(each.run_uid for record in registry.records() for each in registry.assignments(record))

    told = set[str]()
    registry.register(worker_service_pb2.Worker(worker_id="t2", kind=worker_service_pb2.WORKER_KIND_TRAINER))
    place = LogPlace(**stack.deps, store_url=stack.store_url, redis_url=stack.redis_url)
    other = RunManager(
        owner="another", place=place, catalog=catalog, registry=registry, readers=cast("Any", None), on_scan=count
    )
    running = asyncio.create_task(other.run())
    await until(lambda: looked >= 3, timeout_s=30.0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert not told, "its trainer would take an epoch, too"
    assert [info.key for info in store.list(names.all_epochs) if info.key.endswith("2")] == []
    await require_clean(stack, run)


async def test_a_trainer_hears_only_of_a_run_that_its_orchestrator_holds(stack, monkeypatch) -> None:
    """Two orchestrators: the trainer of the one is free while the other drives the only run."""
    looked, asked, told = Counter[int](), Counter[str](), list[str]()
    read, look, take = manager.is_sealed, RunCatalog.refresh, FakeTrainer.on_assignments

    def hear(trainer: FakeTrainer, reply: worker_service_pb2.HeartbeatResponse) -> None:
        if trainer.worker_id == "second":
            told.extend(each.run_uid for each in reply.assignments)
        take(trainer, reply)

    def count(store, names: Names) -> bool:
        asked[names.uid] += 1
        return read(store, names)

    async def refresh(catalog: RunCatalog) -> list:
        looked[id(catalog)] += 1
        return await look(catalog)

    monkeypatch.setattr(FakeTrainer, "on_assignments", hear)
    trainer = await stack.trainer()
    run = await create(stack)
    await until(lambda: trainer.status.run_uid == run.uid)
    second = type(stack)(stack.redis_url, stack.store_url, stack.prefix)
    await second.start()
    try:
        monkeypatch.setattr(manager, "is_sealed", count)
        monkeypatch.setattr(RunCatalog, "refresh", refresh)
        free = await second.trainer(worker_id="second")
        await until(lambda: len(looked) == 2 and min(looked.values()) >= 6, timeout_s=30.0)
        assert not told, "it would keep the run's own trainer out"
        assert not asked, "a run that somebody holds costs the store nothing"
        another = await create(stack)
        await until(lambda: free.status.run_uid == another.uid, timeout_s=30.0, what="the next run is its own")
        assert set(told) == {another.uid} and trainer.status.run_uid == run.uid
        assert await (await log_of(stack, run)).current_epoch("trainer") == 1
    finally:
        await second.stop()
