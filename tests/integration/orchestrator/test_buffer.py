"""Which tasks a run draws follows from its log: after an orchestrator's end, and in a fork, they are the same."""

from dataclasses import replace

from millrace.internal.v1 import batch_pb2
from millrace.orchestrator.drive.batch_writer import decode_state
from millrace.orchestrator.play.pools import Pool
from millrace.rollouts.types import Purpose, Rollout
from millrace.rpc.channel import call
from millrace.v1 import run_pb2, run_service_pb2
from millrace_testing.orchestrator.runs import bodies, create, get, log_of, restart_orchestrator, watch
from millrace_testing.polling import until
from millrace_testing.runlog.committed import load_headers

EASY, MIXED, HARD = {0, 3, 6, 9, 12, 15, 18}, {2, 5, 8, 11, 14, 17}, {1, 4, 7, 10, 13, 16, 19}
BUFFER = {"easy_threshold": 0.9, "hard_threshold": 0.1, "online_difficulty_filtering": True}


def by_task(rollout: Rollout) -> Rollout:
    """Return a third of the tasks is always solved, a third never, and of the last third every second member solves
    it.
    """
    if rollout.purpose is Purpose.TRAIN:
        reward = [1.0, 0.0, float(rollout.member % 2)][rollout.task_index % 3]
        return replace(rollout, reward=reward)
    return rollout


async def workers(stack, **options):
    return (
        await stack.env_server(**{"shape": by_task, "delay_s": 0.02} | options),
        await stack.inference(),
        (await stack.trainer()),
    )


async def new_run(stack, run_id: str, **more) -> run_pb2.Run:
    return await create(stack, run_id=run_id, max_steps=8, **{"async_level": 0, "eval": None, "buffer": BUFFER} | more)


async def headers_of(stack, run) -> list[batch_pb2.BatchHeader]:
    return (await load_headers(await log_of(stack, run)))[0]


async def drawn(stack, run) -> dict[int, str]:
    """Return the task of every ordinal."""
    return {item.ordinal: item.task_id for header in await headers_of(stack, run) for item in header.resolutions}


async def succeeded(stack, run) -> list:
    events = await watch(stack, run)
    assert events[-1].state_changed.new_state == run_pb2.RUN_STATE_SUCCEEDED, events[-1]
    return events


async def test_a_successor_and_a_fork_draw_what_an_undisturbed_run_draws(stack) -> None:
    await workers(stack)
    undisturbed = await new_run(stack, "undisturbed")
    await succeeded(stack, undisturbed)
    expected = await drawn(stack, undisturbed)
    by_step = [{item.task_id for item in header.resolutions} for header in await headers_of(stack, undisturbed)]
    retired: set[str] = set()
    for tasks in by_step:
        assert not tasks & retired, "what is easy or hard behind a header is not drawn for the next step"
        retired |= {task for task in tasks if int(task.removeprefix("train/")) not in MIXED}
    assert len(retired) > 6

    killed = await new_run(stack, "killed")
    for step in (1, 3, 4, 6):
        await until(lambda step=step: _has_step(stack, killed, step))
        await restart_orchestrator(stack)
    await succeeded(stack, killed)
    assert await drawn(stack, killed) == expected

    request = run_service_pb2.ForkRunRequest(name=killed.name, step=3, run_id="forked")
    forked = (await call(stack.runs.ForkRun, request)).run
    await succeeded(stack, forked)
    assert await drawn(stack, forked) == expected


async def _has_step(stack, run, step: int) -> bool:
    return any(header.step >= step for header in await headers_of(stack, run))


async def test_the_run_says_what_was_moved_and_thrown_away(stack) -> None:
    await workers(stack)
    run = await new_run(stack, "counted")
    events = await succeeded(stack, run)
    headers = await headers_of(stack, run)
    assert {header.num_rollouts for header in headers[:-1]} == {8}, "batches stay full"
    resolved = [item for header in headers for item in header.resolutions]
    easy, hard = (len({item.task_id for item in resolved if item.reason == why}) for why in ("easy", "hard"))
    pools = decode_state(headers[-1].orchestrator_state).pools
    assert pools is not None and pools.counts("reverse-text") == (easy, hard) and easy and hard
    placed = pools.newest()["reverse-text"]
    assert {task for task in placed if placed[task] is Pool.EASY} <= EASY
    assert {task for task in placed if placed[task] is Pool.HARD} <= HARD
    last = bodies(events, "batch_committed")[-1]
    assert (last.num_easy_tasks, last.num_normal_tasks, last.num_hard_tasks) == (easy, 20 - easy - hard, hard)
    progress = (await get(stack, run)).progress
    assert (progress.num_easy_tasks, progress.num_hard_tasks) == (easy, hard)
    assert (progress.num_groups, progress.num_groups_dropped) == (len(resolved), len(resolved) - 16)


async def test_a_filter_that_never_passes_is_named(stack) -> None:
    await workers(stack, shape=lambda rollout: replace(rollout, reward=1.0))
    run = await new_run(stack, "starved", buffer={"online_difficulty_filtering": True})
    events = await watch(stack, run)
    error = events[-1].state_changed.error
    says = "lets nothing pass: of the last 20 groups 0 had only the lowest reward of `reward_range` and 20 only the"
    assert error.reason == "NO_ADVANTAGE" and says in error.message
    assert "lets nothing pass: of the last 2 groups" in bodies(events, "warning")[0].message


async def test_a_run_whose_tasks_are_all_retired_ends_with_the_reason(stack) -> None:
    await workers(stack, num_tasks=4, shape=lambda rollout: rollout)  # each group has the mean reward 0.5
    run = await new_run(stack, "exhausted", buffer={"easy_threshold": 0.5})
    events = await watch(stack, run)
    error = events[-1].state_changed.error
    assert error.reason == "NO_TASKS_LEFT" and "every one is easy or hard" in error.message
    assert len(bodies(events, "batch_committed")) == 2
