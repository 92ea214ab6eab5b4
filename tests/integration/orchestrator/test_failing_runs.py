"""A run that cannot learn says so with the first real error, and ends; what the infrastructure lost ends nothing."""

import asyncio
import json
import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from millrace.config.load import validate_document
from millrace.errors import InvalidStateError, PermissionDeniedError
from millrace.internal.v1 import batch_pb2, rollout_pb2
from millrace.orchestrator.drive.housekeeping import Housekeeper
from millrace.readers.audit import audit_run
from millrace.rollouts.types import Purpose, RoleSpan, Rollout, RolloutError, RolloutStatus, TurnReward
from millrace.rpc.channel import call, stream
from millrace.rpc.status import abort
from millrace.v1 import run_pb2, run_service_pb2
from millrace_testing.lanes import one_by_default
from millrace_testing.orchestrator.fakes import FakeReplica
from millrace_testing.orchestrator.runs import (
    CONFIG,
    bodies,
    create,
    get,
    headers_of,
    log_of,
    require_clean,
    resolutions,
    restart_orchestrator,
    watch,
)
from millrace_testing.polling import until
from millrace_testing.runlog.committed import load_headers

WITHIN_S = 60.0
FRAMES = "my_env/reward.py:12 in score"
LOST = [(RolloutStatus.ENGINE_LOST, False), pytest.param(RolloutStatus.MODEL_ERROR, True, marks=pytest.mark.long)]
"""What the infrastructure lost: by its status, and as the rollout's error says."""


def failing(status: RolloutStatus, *, share: float = 1.0, **error):
    """Training rollouts that fail, the first `share` of each group."""

    def shape(rollout: Rollout) -> Rollout:
        if rollout.purpose is Purpose.EVAL or rollout.member >= share * rollout.group_size:
            return rollout
        failure = RolloutError(**{"type": "KeyError", "message": "'answer'", "frames": FRAMES} | error)
        return replace(rollout, status=status, error=failure, samples=(), reward=0.0)

    return shape


async def workers(stack, **options):
    return await stack.env_server(**options), await stack.inference(), await stack.trainer()


async def explained(stack, run) -> str:
    return (await call(stack.runs.ExplainRun, run_service_pb2.ExplainRunRequest(name=run.name))).summary


@pytest.mark.parametrize(
    ("status", "remedy"),
    [
        (RolloutStatus.ENV_ERROR, "millrace env check"),
        pytest.param(RolloutStatus.MODEL_ERROR, "orchestrator.sampling", marks=pytest.mark.long),
        pytest.param(RolloutStatus.TIMEOUT, "orchestrator.rollout_timeout_s", marks=pytest.mark.long),
        pytest.param(RolloutStatus.PROMPT_TOO_LONG, "orchestrator.seq_len", marks=pytest.mark.long),
        pytest.param(RolloutStatus.WORKER_DIED, "ended its own worker process", marks=pytest.mark.long),
    ],
)
async def test_a_run_whose_rollouts_all_fail_ends_with_the_first_real_error(stack, status, remedy) -> None:
    env, _, trainer = await workers(stack, shape=failing(status))
    began = time.monotonic()
    run = await create(stack)
    events = await watch(stack, run, timeout_s=WITHIN_S)
    assert time.monotonic() - began < WITHIN_S
    end = events[-1].state_changed
    assert end.new_state == run_pb2.RUN_STATE_FAILED and end.error.reason == "ROLLOUTS_FAILED"
    assert end.error.component == "env-server"
    for text in ("KeyError: 'answer'", FRAMES, "'reverse-text'", "of the last 64 groups", str(status.value)):
        assert text in end.error.message, text
    assert remedy in end.error.remedy
    first = bodies(events, "rollouts_failed")[0]
    assert first.environment.num_rollouts <= 5 * 4, "within the first groups: four play at the same time"
    assert "KeyError: 'answer'" in first.message and FRAMES in first.message and remedy in first.message
    assert len(bodies(events, "rollouts_failed")) <= 12, "the first, then whenever the number has doubled"
    assert len(env.requests) < 200, "failed groups are bounded"
    assert not [header for header in trainer.steps if header.num_rollouts]
    failed = (await get(stack, run)).progress.environments[0]
    assert failed.num_failed == failed.num_rollouts >= 64 and failed.first_error == "KeyError: 'answer'"
    why = await explained(stack, run)
    assert "ended as FAILED" in why and "KeyError: 'answer'" in why
    report = await audit_run(stack.deps["redis"], stack.deps["store"], prefix=stack.prefix, uid=run.uid)
    [violation] = report.violations
    assert violation.check == "POLICY_CORRUPT", violation
    assert violation.message.startswith("manifest of policy 0-0 "), "the fake trainer publishes no real start policy"


async def test_why_names_the_cause_while_it_fails(stack) -> None:
    env, _, _ = await workers(stack, shape=failing(RolloutStatus.ENV_ERROR))
    run = await create(stack, failure_window=4_000)

    async def is_explained() -> bool:
        return "rollouts of environment 'reverse-text' failed; the first: KeyError: 'answer'" in await explained(
            stack, run
        )

    await until(is_explained)
    env.shape = lambda rollout: rollout
    events = await watch(stack, run)
    end = events[-1].state_changed
    assert end.new_state == run_pb2.RUN_STATE_SUCCEEDED, "the environment was mended meanwhile"
    assert "rollouts failed (" in end.reason and "env_error)" in end.reason


async def test_a_share_below_the_limit_is_shown_and_ends_nothing(stack) -> None:
    def flaky(rollout: Rollout) -> Rollout:
        return failing(RolloutStatus.ENV_ERROR, share=0.25)(rollout) if rollout.attempt == 0 else rollout

    await workers(stack, shape=flaky)
    run = await create(stack, max_failed_share=0.5, failure_window=2)
    events = await watch(stack, run)
    end = events[-1].state_changed
    assert end.new_state == run_pb2.RUN_STATE_SUCCEEDED
    shown = (await get(stack, run)).progress.environments[0]
    assert shown.env == "reverse-text" and dict(shown.failed) == {"env_error": shown.num_failed}
    assert f"{shown.num_failed} of {shown.num_rollouts} rollouts failed ({shown.num_failed} env_error)" in end.reason
    assert shown.num_failed * 5 <= shown.num_rollouts + 4


@pytest.mark.parametrize(("status", "flag"), LOST)
async def test_what_the_infrastructure_lost_is_played_again_and_never_counts(stack, status, flag) -> None:
    lost = failing(status, is_infrastructure=flag)

    def shape(rollout: Rollout) -> Rollout:
        return lost(rollout) if rollout.attempt == 0 else rollout

    await workers(stack, shape=shape)
    run = await create(stack, failure_window=1, max_failed_share=0.01)
    events = await watch(stack, run)
    assert events[-1].state_changed.new_state == run_pb2.RUN_STATE_SUCCEEDED
    assert not bodies(events, "rollouts_failed") and "failed" not in events[-1].state_changed.reason


@pytest.mark.parametrize(("status", "flag"), LOST)
async def test_an_engine_that_fails_every_request_is_told_of_and_the_run_goes_on_when_it_works(
    stack, status, flag
) -> None:
    env, _, _ = await workers(stack, shape=failing(status, is_infrastructure=flag))
    run = await create(stack)
    said = "rollouts in a row were lost to what they run on"

    async def is_explained() -> bool:
        return said in await explained(stack, run) and "KeyError: 'answer'" in await explained(stack, run)

    await until(is_explained)
    env.shape = lambda rollout: rollout
    events = await watch(stack, run, timeout_s=WITHIN_S)
    assert events[-1].state_changed.new_state == run_pb2.RUN_STATE_SUCCEEDED
    told = [body for body in bodies(events, "warning") if body.reason == "ROLLOUTS_LOST"]
    assert told and said in told[0].message and "KeyError: 'answer'" in told[0].message


async def test_a_successor_goes_on_with_the_window_and_counts_no_rollout_twice(stack) -> None:
    """Before the first header and after one: what a header resolves it carries, the rest is read again."""
    env, _, trainer = await workers(stack)
    run = await create(stack, max_steps=50, failure_window=40)
    await until(lambda: len(trainer.steps) >= 2)
    env.shape = failing(RolloutStatus.ENV_ERROR)

    def num_failed() -> int:
        return sum(len(request.members) for request in env.requests if request.ordinal >= first)

    first = max(request.ordinal for request in env.requests) + 1
    await until(lambda: num_failed() >= 60)
    await restart_orchestrator(stack)
    await until(lambda: num_failed() >= 100)
    await restart_orchestrator(stack)
    events = await watch(stack, run, timeout_s=WITHIN_S)
    end = events[-1].state_changed
    assert end.error.reason == "ROLLOUTS_FAILED", end.reason
    headers, _ = await load_headers(await log_of(stack, run))
    state = json.loads(headers[-1].orchestrator_state)["failures"]
    appended = [request for request in env.requests if request.purpose == 1]
    counted = sum(each["num_rollouts"] for each in state["environments"])
    assert counted <= sum(len(request.members) for request in appended), "no rollout is counted twice"
    ordinals = {request.ordinal for request in appended if request.ordinal >= first}
    assert len(ordinals) < 40 + 20, "the window was not begun anew by a restart"


async def test_a_run_that_is_resumed_after_its_cause_was_removed_goes_on(stack) -> None:
    env, _, _ = await workers(stack, shape=failing(RolloutStatus.ENV_ERROR))
    run = await create(stack, failure_window=8)
    await watch(stack, run, timeout_s=WITHIN_S)
    env.shape = lambda rollout: rollout
    await call(stack.runs.ResumeRun, run_service_pb2.ResumeRunRequest(name=run.name))
    events = await watch(stack, run)
    assert events[-1].state_changed.new_state == run_pb2.RUN_STATE_SUCCEEDED
    assert "env_error)" in events[-1].state_changed.reason, "the totals are those of the whole run"


async def test_equal_rewards_are_told_at_the_first_batch(stack) -> None:
    await workers(stack, shape=lambda rollout: replace(rollout, reward=0.0))
    run = await create(stack)
    events = await watch(stack, run, timeout_s=WITHIN_S)
    warned = [body.message for body in bodies(events, "warning") if body.reason == "ZERO_ADVANTAGE"]
    assert len(warned) == 4 and "all rewards are equal" in warned[0], "at the batches 1, 2, 4 and 8"
    assert events[-1].state_changed.error.reason == "NO_ADVANTAGE"


async def test_equal_rewards_of_those_that_did_not_fail_tell_of_those_that_did(stack) -> None:
    fail = failing(RolloutStatus.ENV_ERROR)
    await workers(stack, shape=lambda rollout: fail(rollout) if rollout.ordinal % 2 else replace(rollout, reward=0.0))
    run = await create(stack)
    error = (await watch(stack, run, timeout_s=WITHIN_S))[-1].state_changed.error
    assert error.reason == "NO_ADVANTAGE"
    assert "env_error), and only the others are compared" in error.message, error.message


async def _has_header(stack, run) -> bool:
    headers, _ = await load_headers(await log_of(stack, run))
    return bool(headers)


async def test_groups_of_equal_rewards_are_replaced_also_by_a_successor(stack) -> None:
    def shape(rollout: Rollout) -> Rollout:
        return replace(rollout, reward=0.0) if rollout.ordinal % 3 else rollout

    await workers(stack, shape=shape)
    run = await create(stack, filter_zero_advantages="refill")
    await until(lambda: _has_header(stack, run))
    await restart_orchestrator(stack)
    events = await watch(stack, run)
    assert events[-1].state_changed.new_state == run_pb2.RUN_STATE_SUCCEEDED
    headers, _ = await load_headers(await log_of(stack, run))
    trained = [header for header in headers if header.kind == batch_pb2.BATCH_KIND_TRAIN]
    assert len(trained) == 3 and {header.num_rollouts for header in trained} == {8}, "every batch is full"
    for header in trained:
        for item in header.resolutions:
            is_dropped = item.outcome == batch_pb2.ORDINAL_OUTCOME_DROPPED
            assert is_dropped == bool(item.ordinal % 3) and (not is_dropped or item.reason == "zero_advantage")


async def test_refilling_that_never_finds_a_group_ends_the_run(stack) -> None:
    await workers(stack, shape=lambda rollout: replace(rollout, reward=0.0))
    run = await create(stack, filter_zero_advantages="refill")
    events = await watch(stack, run, timeout_s=WITHIN_S)
    warned = [body.message for body in bodies(events, "warning") if body.reason == "ZERO_ADVANTAGE"]
    assert len(warned) == 4 and "all rewards are equal" in warned[0], "at the batches' worths 1, 2, 4 and 8"
    assert events[-1].state_changed.error.reason == "NO_ADVANTAGE"


@pytest.mark.parametrize("filter_zero_advantages", [True, pytest.param("refill", marks=pytest.mark.long)])
async def test_filters_that_leave_nothing_are_named(stack, filter_zero_advantages) -> None:
    await workers(stack, shape=lambda rollout: replace(rollout, is_truncated=True))
    filters = [{"type": "truncated", "action": "drop"}]
    run = await create(stack, filters=filters, filter_zero_advantages=filter_zero_advantages)
    events = await watch(stack, run, timeout_s=WITHIN_S)
    warned = [body.message for body in bodies(events, "warning") if body.reason == "ZERO_ADVANTAGE"]
    group_or_batch = 4 if filter_zero_advantages == "refill" else 8
    found = (
        f"orchestrator.filters leave nothing of a group: they found {group_or_batch} of {group_or_batch} (truncated)"
    )
    assert found in warned[0] and events[-1].state_changed.error.reason == "NO_ADVANTAGE"
    assert found in events[-1].state_changed.error.message


async def test_what_filters_found_is_counted_and_left_out(stack) -> None:
    await workers(stack, shape=lambda rollout: replace(rollout, is_truncated=rollout.member == 0))
    run = await create(stack, filters=[{"type": "truncated", "action": "mask"}])
    events = await watch(stack, run)
    assert events[-1].state_changed.new_state == run_pb2.RUN_STATE_SUCCEEDED
    committed = bodies(events, "batch_committed")
    assert committed and all(dict(batch.filtered) == {"truncated": 2} for batch in committed)
    headers, _ = await load_headers(await log_of(stack, run))
    members = {sample.member for header in headers[:-1] for sample in header.samples}
    assert members and 0 not in members


async def test_batches_without_one_rollout_that_came_to_its_own_end_are_told(stack) -> None:
    await workers(stack, shape=lambda rollout: replace(rollout, is_truncated=True))
    run = await create(stack)
    events = await watch(stack, run)
    warned = [body.message for body in bodies(events, "warning") if body.reason == "ALL_TRUNCATED"]
    assert len(warned) == 2 and "orchestrator.sampling.max_tokens" in warned[0], "at the batches 1 and 2 of 3"
    assert events[-1].state_changed.new_state == run_pb2.RUN_STATE_SUCCEEDED


@pytest.mark.parametrize("earned", one_by_default(["more", "nothing", "all"]))
async def test_credit_by_turn_without_rewards_of_turns_that_add_up_is_told(stack, earned) -> None:
    def rewarded(rollout: Rollout) -> Rollout:
        ends = [int(np.flatnonzero(sample.loss_mask)[-1]) + 1 for sample in rollout.samples]
        each = rollout.reward / len(ends) + (0.5 if earned == "more" else 0.0)
        turns = [()] * len(ends) if earned == "nothing" else [(TurnReward(end=end, reward=each),) for end in ends]
        samples = [replace(sample, turns=own) for sample, own in zip(rollout.samples, turns, strict=True)]
        return replace(rollout, samples=tuple(samples))

    await workers(stack, shape=rewarded)
    run = await create(stack, algo={"type": "grpo", "credit": "turn"})
    events = await watch(stack, run)
    assert events[-1].state_changed.new_state == run_pb2.RUN_STATE_SUCCEEDED
    warned = {body.reason: body.message for body in bodies(events, "warning") if body.reason.startswith(("NO_T", "TU"))}
    reason = {"nothing": "NO_TURN_REWARDS", "all": None, "more": "TURN_REWARDS_UNEQUAL"}[earned]
    assert list(warned) == ([reason] if reason else [])
    assert all("verifiers" in text for text in warned.values())


@pytest.mark.parametrize("role", ["user", *(pytest.param(role, marks=pytest.mark.long) for role in ("tool", None))])
async def test_echo_without_anything_to_learn_is_told_with_who_has_spoken(stack, role) -> None:
    def said(rollout: Rollout) -> Rollout:
        spans = (RoleSpan(role=role, start=0, end=1),) if role else ()
        return replace(rollout, samples=tuple(replace(sample, roles=spans) for sample in rollout.samples))

    await workers(stack, shape=said)
    run = await create(stack, algo={"type": "echo"})
    events = await watch(stack, run)
    assert events[-1].state_changed.new_state == run_pb2.RUN_STATE_SUCCEEDED
    warned = [body.message for body in bodies(events, "warning") if body.reason == "NOTHING_TO_ECHO"]
    assert bool(warned) is (role != "tool")
    assert all(f"(tool), but of: {role or 'nobody'};" in text for text in warned)


@pytest.mark.parametrize("strategy", one_by_default(["interleaved", "branching"]))
async def test_rewritten_history_is_told_where_one_sample_is_expected(stack, strategy) -> None:
    await workers(stack, shape=lambda rollout: replace(rollout, samples=rollout.samples * 2))
    run = await create(stack, trajectory_strategy=strategy)
    events = await watch(stack, run)
    assert events[-1].state_changed.new_state == run_pb2.RUN_STATE_SUCCEEDED
    warned = [body.message for body in bodies(events, "warning") if body.reason == "HISTORY_REWRITTEN"]
    assert len(warned) == (2 if strategy == "interleaved" else 0), "at the batches 1 and 2 of 3"
    assert all("8 of 8 rollouts" in text and "of turn 2 does not" in text for text in warned)
    headers, _ = await load_headers(await log_of(stack, run))
    for header in headers[:-1]:
        counts = Counter((sample.ordinal, sample.member) for sample in header.samples)
        assert counts and set(counts.values()) == {2}, "never one sample made of two, never one left out"


async def test_groups_that_are_all_too_old_are_told(stack) -> None:
    def aged(rollout: Rollout) -> Rollout:
        spans = [[replace(span, version=0) for span in sample.policy_spans] for sample in rollout.samples]
        samples = [replace(sample, policy_spans=tuple(old)) for sample, old in zip(rollout.samples, spans, strict=True)]
        return replace(rollout, samples=tuple(samples))

    env, _, _ = await workers(stack, shape=aged)
    run = await create(stack, max_steps=4, max_off_policy_steps=1)
    seen = []
    async with asyncio.timeout(WITHIN_S):
        request = run_service_pb2.WatchRunRequest(name=run.name)
        async for response in stream(stack.runs.WatchRun, request):
            seen.append(response.event)
            if response.event.warning.reason == "GROUPS_STALE":
                break
    assert "orchestrator.max_off_policy_steps" in seen[-1].warning.message
    assert [body.step for body in bodies(seen, "batch_committed")] == [0, 1], "version 0 may be one step old"
    env.shape = lambda rollout: rollout
    assert (await watch(stack, run))[-1].state_changed.new_state == run_pb2.RUN_STATE_SUCCEEDED


@pytest.mark.parametrize("is_cancelled", [True, pytest.param(False, marks=pytest.mark.long)])
async def test_a_run_does_not_go_on_without_a_part_of_its_drive(stack, monkeypatch, is_cancelled) -> None:
    async def end(_: Housekeeper) -> None:
        if is_cancelled:
            raise asyncio.CancelledError  # as a library may that is closed beside it

    monkeypatch.setattr(Housekeeper, "watch_log", end)
    await workers(stack)
    run = await create(stack)
    end_of_run = (await watch(stack, run))[-1].state_changed
    assert end_of_run.new_state == run_pb2.RUN_STATE_FAILED
    assert "has ended, though nobody ended it" in end_of_run.error.message


async def test_at_async_level_0_an_empty_batch_drops_no_group_that_may_be_in_the_next_one(stack) -> None:
    def shape(rollout: Rollout) -> Rollout:
        return replace(rollout, reward=0.0 if rollout.ordinal < 2 else float(rollout.member % 2))

    env, _, _ = await workers(stack, shape=shape)
    play, is_empty, is_over = env.play, asyncio.Event(), asyncio.Event()

    async def play_later(request) -> None:
        if request.purpose == rollout_pb2.PURPOSE_TRAIN and request.ordinal >= 2:
            await is_empty.wait()
            if request.ordinal >= 4:  # the batch is of two groups: of 2 and 3, however fast others are
                await is_over.wait()
        await play(request)

    env.play = play_later
    run = await create(stack, max_steps=1, async_level=0, oversampling_factor=1.5)
    await until(lambda: env.plays_of(3))  # in the place of what the empty batch resolved
    is_empty.set()
    assert (await watch(stack, run))[-1].state_changed.new_state == run_pb2.RUN_STATE_SUCCEEDED
    is_over.set()
    found = resolutions(await headers_of(stack, run))
    assert found[0][1] == found[1][1] == "zero_advantage"
    assert found[2][0] == batch_pb2.ORDINAL_OUTCOME_TRAINED, found[2]


async def test_a_replica_that_can_never_sleep_fails_the_run_that_needs_it_to(stack, monkeypatch) -> None:
    remedy = "start it with its sleep mode"

    async def refuse(self, request, context):
        await abort(context, InvalidStateError("it cannot sleep", reason="SLEEP_NOT_ENABLED", remedy=remedy))

    monkeypatch.setattr(FakeReplica, "PauseGeneration", refuse, raising=False)
    _, _, trainer = await workers(stack)
    trainer.hold.clear()
    document = {**CONFIG, "async_level": 0, "inference": {"sleep_while_training": True}}
    request = run_service_pb2.CreateRunRequest(
        kind=run_pb2.RUN_KIND_RL, config_json=validate_document(document).resolved_json()
    )
    run = (await call(stack.runs.CreateRun, request)).run
    await until(lambda: trainer.status.run_uid == run.uid, timeout_s=30)
    trainer.status.device_turn = 1
    end = (await watch(stack, run, timeout_s=WITHIN_S))[-1].state_changed
    assert end.new_state == run_pb2.RUN_STATE_FAILED
    assert (end.error.reason, end.error.component) == ("SLEEP_NOT_ENABLED", "orchestrator")
    assert end.error.message == "it cannot sleep" and end.error.remedy == remedy


async def test_a_store_that_denies_one_object_ends_no_run(stack, monkeypatch):
    """Credentials that are renewed too late do that: the run's next driver goes on."""
    store, denied = type(stack.deps["store"]), []
    create_object = store.create

    def create_or_deny(self, key, data, **options):
        if "/batches/" in key and not denied:
            denied.append(key)
            raise PermissionDeniedError("the store answers 403 (ExpiredToken)", reason="STORE_DENIED")
        return create_object(self, key, data, **options)

    monkeypatch.setattr(store, "create", create_or_deny)
    await asyncio.gather(stack.env_server(), stack.inference(), stack.trainer())
    run = await create(stack)
    events = await watch(stack, run)
    assert denied and bodies(events, "state_changed")[-1].new_state == run_pb2.RUN_STATE_SUCCEEDED
    headers = await headers_of(stack, run)
    assert [header.step for header in headers] == list(range(len(headers))) and len(headers) > 1
    assert resolutions(headers), "each once, and none is left out"
    await require_clean(stack, run)
