"""Slow tasks are trained on as quick ones are, and what is lost of rollouts is told by shares of the last ones."""

import asyncio
from dataclasses import replace

import numpy as np

from millrace.internal.v1 import batch_pb2, rollout_pb2
from millrace.rollouts.types import PolicySpan, Rollout, RolloutStatus, Sample
from millrace.rollouts.wire import encode_rollout
from millrace.v1 import run_pb2
from millrace_testing.orchestrator.fakes import make_rollout
from millrace_testing.orchestrator.runs import bodies, create, headers_of, watch


async def test_slow_tasks_are_trained_on_as_quick_ones_are(stack) -> None:
    """Half of the tasks take as long as several steps, and two steps make them too old: the cut waits for them."""
    env, replica, _ = await stack.env_server(), await stack.inference(), await stack.trainer()
    play = env.play

    async def uneven(request) -> None:
        if request.purpose != rollout_pb2.PURPOSE_TRAIN or request.ordinal % 2 == 0:
            await play(request)
            return
        version = replica.status.version
        await asyncio.sleep(0.5)
        for member in request.members:
            rollout = make_rollout(request, member, RolloutStatus.OK, (version, replica.status.version))
            await env.append(request.run_uid, encode_rollout(rollout))

    env.play = uneven
    run = await create(stack, max_steps=8, async_level=2, max_off_policy_steps=2)
    events = await watch(stack, run)
    assert events[-1].state_changed.new_state == run_pb2.RUN_STATE_SUCCEEDED
    committed = bodies(events, "batch_committed")
    assert sum(batch.dropped.get("stale", 0) for batch in committed) == 0
    assert all("reward/reverse-text/std" in batch.metrics for batch in committed)
    outcomes = [item for header in (await headers_of(stack, run))[:-1] for item in header.resolutions]
    trained = [item.ordinal for item in outcomes if item.outcome == batch_pb2.ORDINAL_OUTCOME_TRAINED]
    assert len(trained) == 16 and sum(ordinal % 2 for ordinal in trained) >= 5


async def test_one_good_rollout_does_not_hide_that_the_others_are_cut(stack) -> None:
    def nearly_all(rollout: Rollout) -> Rollout:
        return replace(rollout, is_truncated=(rollout.ordinal, rollout.member) != (0, 0))

    await stack.env_server(shape=nearly_all)
    await stack.inference()
    await stack.trainer()
    run = await create(stack, max_steps=4, async_level=0)
    warned = [body.message for body in bodies(await watch(stack, run), "warning") if body.reason == "ALL_TRUNCATED"]
    assert warned and warned[0].startswith("15 of 16 rollouts of the last 2 batches"), warned


async def test_tokens_behind_seq_len_are_counted_and_told(stack) -> None:
    def long(rollout: Rollout) -> Rollout:
        sample = Sample(
            token_ids=np.zeros(66, np.int32),
            loss_mask=np.ones(66, np.uint8),
            inference_logprobs=np.full(66, -1, np.float32),
            policy_spans=(PolicySpan(lineage=0, version=rollout.min_version or 0, start=0, end=66),),
        )
        return replace(rollout, samples=(sample,))

    await stack.env_server(shape=long)
    await stack.inference()
    await stack.trainer()
    run = await create(stack, max_steps=2)
    events = await watch(stack, run)
    told = [body.message for body in bodies(events, "warning") if body.reason == "SAMPLES_CUT"]
    assert told and "8 of 8 samples of batch 0 are longer than orchestrator.seq_len = 64" in told[0], told
    assert "16 tokens at their ends" in told[0] and "raise orchestrator.seq_len to 66" in told[0]
    assert bodies(events, "batch_committed")[0].metrics["seq_len/cut_tokens"] == 16.0
