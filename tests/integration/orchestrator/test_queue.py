"""The queue over real Redis, a real store and real gRPC: order, gangs, quotas, use that outlives an orchestrator."""

import asyncio
from collections import Counter

import pytest

from millrace.errors import InvalidSpecError
from millrace.orchestrator import manager
from millrace.orchestrator.waiting import RunQueue
from millrace.rpc.channel import call
from millrace.v1 import run_pb2, run_service_pb2
from millrace_testing.orchestrator.fakes import FakeEnvServer, FakeTrainer
from millrace_testing.orchestrator.runs import (
    bodies,
    get,
    has_state,
    headers_of,
    require_clean,
    resolutions,
    restart_orchestrator,
    states,
    submit,
    watch,
)
from millrace_testing.polling import until


async def why(stack, run: run_pb2.Run) -> str:
    return (await call(stack.runs.ExplainRun, run_service_pb2.ExplainRunRequest(name=run.name))).summary


async def says(stack, run: run_pb2.Run, words: str) -> None:
    """Wait until `run why` says these words of a run."""
    last = ""

    async def does() -> bool:
        nonlocal last
        last = await why(stack, run)
        return words in last

    try:
        await until(does)
    except AssertionError as error:
        raise AssertionError(f"{words!r} was never said, last: {last!r}") from error


async def with_groups(stack, groups: str) -> None:
    stack.queue_groups = groups
    await restart_orchestrator(stack)


async def started(stack, *runs: run_pb2.Run) -> list[str]:
    """Watch runs to their end and return their names in the order in which they started."""
    at = {}
    for run in runs:
        events = await watch(stack, run)
        assert states(events)[-1] == "SUCCEEDED"
        at[run.name] = next(each.time.ToNanoseconds() for each in events if each.HasField("state_changed"))
    return sorted(at, key=at.__getitem__)


async def test_a_higher_priority_goes_first_and_the_other_is_told_its_place(stack) -> None:
    await stack.env_server()
    await stack.inference()
    low, high = await submit(stack, "low"), await submit(stack, "high", priority=5)
    await says(stack, low, "queued: place 2 of 2: no trainer worker is free")
    await says(stack, high, "queued: place 1 of 2 (priority 5): no trainer worker is free")
    listed = (await call(stack.runs.ListRuns, run_service_pb2.ListRunsRequest())).runs
    assert [(each.name, each.queue_place.partition(": no trainer")[0]) for each in listed] == [
        (high.name, "place 1 of 2 (priority 5)"),
        (low.name, "place 2 of 2"),
    ]
    await stack.trainer()
    assert await started(stack, low, high) == [high.name, low.name]
    assert not (await get(stack, low)).queue_place, "it waits no more"


async def test_a_gang_gets_nothing_until_it_gets_all_and_others_pass_it_by(stack) -> None:
    await stack.env_server()
    await stack.inference("r1")
    trainer = await stack.trainer()
    large = await submit(stack, "large", min_replicas=2)
    await says(stack, large, "it needs 2 replicas, registered are 1")
    small = await submit(stack, "small", max_replicas=1)
    assert states(await watch(stack, small))[-1] == "SUCCEEDED", "nothing is kept for what cannot begin"
    assert await has_state(stack, large, run_pb2.RUN_STATE_QUEUED) and trainer.status.run_uid in ("", small.uid)
    await stack.inference("r2")
    assert states(await watch(stack, large))[-1] == "SUCCEEDED"


async def test_what_exceeds_a_quota_or_has_no_group_is_refused_with_the_numbers(stack) -> None:
    await with_groups(stack, "small:quota=2,large:quota=100")
    with pytest.raises(InvalidSpecError, match=r"needs 4 accelerators at once.*group 'small' may have 2"):
        await submit(stack, "too-large", group="small", min_replicas=3)
    with pytest.raises(InvalidSpecError, match=r"is no group of this server, which has: default, large, small"):
        await submit(stack, "elsewhere", group="other")
    assert (await submit(stack, "fits", group="small", min_replicas=1)).state == run_pb2.RUN_STATE_QUEUED


async def test_a_quota_stops_only_its_group(stack) -> None:
    await with_groups(stack, "a:quota=3,b")
    await stack.env_server()
    first, second = await submit(stack, "first", group="a"), await submit(stack, "second", group="a")
    other = await submit(stack, "other", group="b")
    held = await stack.trainer(worker_id="t1")
    held.hold.clear()
    await until(lambda: held.status.run_uid)
    await stack.trainer(worker_id="t2")
    await says(stack, second, "its group may have 3 accelerators at once; it begins when runs of the group end")
    assert held.status.run_uid == first.uid
    await until(lambda: has_state(stack, other, run_pb2.RUN_STATE_STARTING))


async def test_what_a_group_used_counts_after_the_orchestrator_was_replaced(stack) -> None:
    await with_groups(stack, "a,b")
    await stack.env_server()
    await stack.inference()
    await stack.trainer(worker_id="t1")
    events = await watch(stack, await submit(stack, "used", group="a"))
    counts = [(each.trainer_accelerators, each.replica_accelerators) for each in bodies(events, "workers_assigned")]
    assert counts[-1] == (1, 1), "a trainer and a replica"
    await stack.kill_worker("t1")
    await restart_orchestrator(stack)
    older, newer = await submit(stack, "older", group="a"), await submit(stack, "newer", group="b")
    await says(stack, newer, "place 1 of 2 (group b)")
    await stack.trainer(worker_id="t2")
    assert await started(stack, older, newer) == [newer.name, older.name]


async def preempted(stack, *, priority: int = 5):
    """A preemptible run with one trainer and two replicas, and another one that waits for both."""
    await stack.env_server()
    for name in ("r1", "r2"):
        await stack.inference(name)
    trainer = await stack.trainer(worker_id="t1")
    trainer.hold.clear()
    low = await submit(stack, "low", preemptible=True)
    await until(lambda: len(trainer.headers) >= 1)
    high = await submit(stack, "high", priority=priority, min_replicas=2)
    return low, high, trainer


async def test_a_run_of_higher_priority_preempts_one_that_goes_on_by_itself(stack) -> None:
    low, high, trainer = await preempted(stack)
    await until(lambda: has_state(stack, low, run_pb2.RUN_STATE_QUEUED))
    trainer.hold.set()
    events = await watch(stack, high)
    assert states(events) == ["STARTING", "RUNNING", "STOPPING", "SUCCEEDED"]
    events = await watch(stack, low)
    assert states(events) == ["STARTING", "RUNNING", "QUEUED", "STARTING", "RUNNING", "STOPPING", "SUCCEEDED"]
    reason = next(each.reason for each in bodies(events, "state_changed") if each.new_state == run_pb2.RUN_STATE_QUEUED)
    assert "preempted for run high (priority 5): " in reason and "; the pause took " in reason
    resolutions(await headers_of(stack, low))
    await require_clean(stack, low)
    await require_clean(stack, high)


async def test_both_runs_say_what_is_about_to_be_preempted(stack, monkeypatch) -> None:
    asked = asyncio.Event()
    written = manager.write_intent

    async def late(*args):
        await asked.wait()
        return await written(*args)

    monkeypatch.setattr(manager, "write_intent", late)
    low, high, trainer = await preempted(stack)
    await says(stack, high, "run low of lower priority pauses for it")
    await says(stack, low, "it pauses for run high (priority 5): ")
    asked.set()
    trainer.hold.set()
    for run in (high, low):
        assert states(await watch(stack, run))[-1] == "SUCCEEDED"


async def test_while_a_trainer_lets_go_of_who_paused_nobody_else_pauses(stack, monkeypatch) -> None:
    """It saves a checkpoint, which may take minutes: it reports the run until then, and is free for nobody."""
    may_let_go, looks, beats = asyncio.Event(), Counter[str](), Counter[str]()
    heard, claim = FakeTrainer.on_assignments, RunQueue.claim

    def late(trainer: FakeTrainer, reply) -> None:
        if not may_let_go.is_set():
            reply.ClearField("let_go")
        heard(trainer, reply)
        beats[trainer.worker_id] += 1

    def counted(queue: RunQueue, waiting) -> set[str]:
        looks.update(view.record.name for view, _ in waiting)
        return claim(queue, waiting)

    monkeypatch.setattr(FakeTrainer, "on_assignments", late)
    monkeypatch.setattr(RunQueue, "claim", counted)
    await stack.env_server()
    lows, trainers = list[run_pb2.Run](), list[FakeTrainer]()
    for number in (1, 2):
        await stack.inference(f"r{number}")
        trainers.append(await stack.trainer(worker_id=f"t{number}"))
        trainers[-1].hold.clear()
        lows.append(await submit(stack, f"low{number}", preemptible=True, max_replicas=1))
        await until(lambda: len(trainers[-1].headers) >= 1)
        beats.clear()
        await until(lambda: beats[trainers[-1].worker_id] >= 2, what="a heartbeat that names the run")
    high = await submit(stack, "high", priority=5)
    await until(lambda: has_state(stack, lows[1], run_pb2.RUN_STATE_QUEUED))
    looks.clear()
    await until(lambda: looks["high"] >= 3 and looks["low2"] >= 3)
    may_let_go.set()
    for trainer in trainers:
        trainer.hold.set()
    assert ["QUEUED" in states(await watch(stack, run)) for run in (*lows, high)] == [False, True, False]


async def test_nobody_is_preempted_by_equals_or_for_less_than_what_is_needed(stack) -> None:
    low, equal, trainer = await preempted(stack, priority=0)
    too_large = await submit(stack, "too-large", priority=9, min_replicas=3)
    await says(stack, equal, "place 2 of 2")
    await says(stack, too_large, "registered are 2")
    trainer.hold.set()
    events = await watch(stack, low)
    assert "QUEUED" not in states(events) and states(events)[-1] == "SUCCEEDED"
    assert states(await watch(stack, equal))[-1] == "SUCCEEDED"


async def test_a_preemption_of_a_drive_that_is_over_stops_nobody(stack) -> None:
    low, high, trainer = await preempted(stack)
    await until(lambda: has_state(stack, low, run_pb2.RUN_STATE_QUEUED))
    await restart_orchestrator(stack)
    trainer.hold.set()
    for run in (high, low):
        assert states(await watch(stack, run))[-1] == "SUCCEEDED"
    await require_clean(stack, low)


async def test_a_preempted_run_that_is_cancelled_is_over_for_env_servers(stack, monkeypatch) -> None:
    over, heard = set[str](), FakeEnvServer.on_assignments

    def on_assignments(server: FakeEnvServer, reply) -> None:
        over.update(each.run_uid for each in reply.assignments if each.is_over)
        heard(server, reply)

    monkeypatch.setattr(FakeEnvServer, "on_assignments", on_assignments)
    low, high, trainer = await preempted(stack)
    await until(lambda: has_state(stack, low, run_pb2.RUN_STATE_QUEUED))
    await call(stack.runs.CancelRun, run_service_pb2.CancelRunRequest(name=low.name))
    await until(lambda: has_state(stack, low, run_pb2.RUN_STATE_CANCELLED))
    await until(lambda: low.uid in over)
    trainer.hold.set()
    assert states(await watch(stack, high))[-1] == "SUCCEEDED"


async def test_without_groups_nothing_is_recorded(stack) -> None:
    await stack.env_server()
    await stack.inference()
    await stack.trainer()
    events = await watch(stack, await submit(stack, "alone"))
    assert states(events)[-1] == "SUCCEEDED" and not bodies(events, "workers_assigned")
