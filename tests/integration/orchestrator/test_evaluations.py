"""Evaluations during training are of the version that they name, and their rollouts are kept."""

from collections import Counter

from millrace.rollouts.types import Purpose, Rollout, RolloutStatus
from millrace.rollouts.wire import decode_archive
from millrace_testing.orchestrator.runs import (
    bodies,
    create,
    headers_of,
    require_clean,
    restart_orchestrator,
    states,
    watch,
)
from millrace_testing.polling import until

EVERY_TWO = {"rollouts_per_example": 2, "interval": 2}


async def archived(stack, run) -> list[Rollout]:
    """Return the rollouts of evaluations that the run's headers archive."""
    store = stack.deps["store"]
    found = [
        r for h in await headers_of(stack, run) if h.rollouts_key for r in decode_archive(store.get(h.rollouts_key))
    ]
    return [rollout for rollout in found if rollout.purpose is Purpose.EVAL]


def spans(events) -> list[tuple[int, int, int]]:
    """Return step, oldest and newest version of each evaluation."""
    return [(e.step, e.policy_version, e.policy_version_max) for e in bodies(events, "eval_completed")]


async def test_the_only_replica_keeps_its_version_until_the_evaluation_is_over(stack) -> None:
    env, replica, trainer = await stack.env_server(), await stack.inference(), await stack.trainer()
    env.evals_go_on.clear()
    run = await create(stack, max_steps=5, eval=EVERY_TWO)
    await until(lambda: len(trainer.headers) >= 4, what="the trainer is as far ahead as async_level lets it")
    await until(lambda: any("@2-" in request.eval_id for request in env.requests), what="the evaluation has begun")
    assert replica.status.version == 2
    env.evals_go_on.set()
    events = await watch(stack, run)
    assert states(events)[-1] == "SUCCEEDED"
    assert spans(events) == [(0, 0, 0), (2, 2, 2), (4, 4, 4), (5, 5, 5)]
    kept = await archived(stack, run)
    assert Counter(r.eval_id.partition("-e")[0] for r in kept) == dict.fromkeys(
        (f"reverse-text@{step}" for step in (0, 2, 4, 5)), 6
    ), "every rollout of every evaluation is archived once"
    assert all(not r.is_duplicate and r.min_version == r.max_version for r in kept)
    await require_clean(stack, run)


async def test_one_of_several_replicas_keeps_the_version_while_the_others_train_on(stack) -> None:
    env, first, trainer = await stack.env_server(), await stack.inference(), await stack.trainer()
    second = await stack.inference("inference-other")
    env.evals_go_on.clear()
    run = await create(stack, max_steps=9, eval=EVERY_TWO)
    await until(lambda: len(trainer.headers) >= 8, what="training goes on beside the evaluation")
    assert min(first.status.version, second.status.version) == 2
    asked = {request.base_url for request in env.requests if "@2-" in request.eval_id}
    assert len(asked) == 1, "the replica that is held plays all of it"
    env.evals_go_on.set()
    events = await watch(stack, run)
    found = spans(events)
    assert all(step == low == high for step, low, high in found), found
    assert {step for step, *_ in found} >= {0, 2, 9} and states(events)[-1] == "SUCCEEDED"
    skipped = [w.message for w in bodies(events, "warning") if w.reason == "EVAL_SKIPPED"]
    missing = {2, 4, 6, 8} - {step for step, *_ in found}
    assert missing == {step for e in bodies(events, "eval_completed") for step in e.skipped}, "the records name them"
    assert missing and all(any(f"v{step}" in message for message in skipped) for step in missing), "none in silence"


async def test_an_evaluation_may_span_versions_and_says_which(stack) -> None:
    env, replica, _ = await stack.env_server(), await stack.inference(), await stack.trainer()
    env.evals_go_on.clear()
    run = await create(stack, max_steps=5, eval={**EVERY_TWO, "pin": "span"})
    await until(lambda: replica.status.version >= 4, what="no replica waits")
    env.evals_go_on.set()
    events = await watch(stack, run)
    found = spans(events)
    assert found[1][0] == 2 <= found[1][1] < found[1][2] and found[1][2] >= 4
    # Nothing is due behind it but the last version: what was skipped is told all the same.
    assert [step for step, *_ in found] == [0, 2, 5]
    assert list(bodies(events, "eval_completed")[-1].skipped) == [4]
    (skipped,) = [w.message for w in bodies(events, "warning") if w.reason == "EVAL_SKIPPED"]
    assert "an evaluation before them lasted until the last step was done: reverse-text: v4." in skipped


async def test_a_successor_evaluates_the_version_that_was_due(stack) -> None:
    """The replica goes back to it; what was played for the predecessor is in no figure."""
    env, _, trainer = await stack.env_server(), await stack.inference(), await stack.trainer()
    await stack.inference("inference-other")
    env.evals_go_on.clear()
    run = await create(stack, max_steps=4, eval=EVERY_TWO)
    await until(lambda: len(trainer.headers) >= 4)
    await restart_orchestrator(stack)
    env.evals_go_on.set()
    events = await watch(stack, run)
    found = spans(events)
    assert states(events)[-1] == "SUCCEEDED" and all(step == low == high for step, low, high in found)
    assert [step for step, *_ in found] == [0, 2, 4]
    counted = Counter(r.eval_id.partition("-e")[0] for r in await archived(stack, run) if not r.is_duplicate)
    assert set(counted.values()) == {6} and len(counted) == len(found)
    await require_clean(stack, run)


async def test_an_evaluation_goes_on_where_the_replica_that_was_held_is_lost(stack) -> None:
    env, first, trainer = await stack.env_server(), await stack.inference(), await stack.trainer()
    second = await stack.inference("inference-other")
    env.evals_go_on.clear()
    run = await create(stack, max_steps=8, eval=EVERY_TWO)
    await until(lambda: len(trainer.headers) >= 6)
    held = min(first, second, key=lambda each: each.status.version)
    held.is_down = True
    await stack.kill_worker(held.worker_id)
    env.evals_go_on.set()
    events = await watch(stack, run)
    assert (2, 2, 2) in spans(events) and states(events)[-1] == "SUCCEEDED"


async def test_failed_rollouts_count_in_every_figure(stack) -> None:
    broken = {("eval", 1, member, attempt): RolloutStatus.ENV_ERROR for member in (0, 1) for attempt in (0, 1, 2)}
    await stack.env_server(broken=broken)
    await stack.inference()
    await stack.trainer()
    run = await create(stack)
    report = bodies(await watch(stack, run), "eval_completed")[0]
    # Of three tasks with rewards 0 and 1 one failed: every figure is over the six rollouts that were asked for.
    assert (report.num_rollouts, report.num_failed, list(report.failed_tasks)) == (4, 2, ["train/1"])
    assert abs(report.reward_mean - 2 / 6) < 1e-12
    assert abs(report.metrics["pass@1"] - 2 / 6) < 1e-12 and abs(report.metrics["pass@2"] - 2 / 3) < 1e-12
