"""The queue over real Redis, a real store and real gRPC: order, gangs, quotas, use that outlives an orchestrator."""

import json

import pytest

from millrace.errors import InvalidSpecError
from millrace.rpc.channel import call
from millrace.v1 import run_pb2, run_service_pb2
from millrace_testing.orchestrator.runs import bodies, config_json, get, has_state, restart_orchestrator, states, watch
from millrace_testing.polling import until


async def submit(stack, name: str, **queue) -> run_pb2.Run:
    document = {**json.loads(config_json(max_steps=1, eval=None)), "queue": queue}
    request = run_service_pb2.CreateRunRequest(kind=run_pb2.RUN_KIND_RL, config_json=json.dumps(document), run_id=name)
    return (await call(stack.runs.CreateRun, request)).run


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


async def test_without_groups_nothing_is_recorded(stack) -> None:
    await stack.env_server()
    await stack.inference()
    await stack.trainer()
    events = await watch(stack, await submit(stack, "alone"))
    assert states(events)[-1] == "SUCCEEDED" and not bodies(events, "workers_assigned")
