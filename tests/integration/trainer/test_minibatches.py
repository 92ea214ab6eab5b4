"""Several optimizer steps per batch: one version each, the same after a kill, a resume and in a replay."""

import asyncio
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from millrace.cli.main import main
from millrace.config.sections.rl import RLConfig
from millrace.telemetry import faults
from millrace.telemetry.faults import Fault, Point
from millrace.trainer.learning.plan import Packing, plan_micro_batches

Recorder = Any  # conftest.Recorder; tests are not importable from one another
MakeConfig = Callable[..., RLConfig]
STEPS = 4
DECOUPLED: dict[str, Any] = {"type": "ppo", "correction": [{"type": "token_tis"}]}


@pytest.fixture
def config(make_config: MakeConfig, dropout_model: Path) -> RLConfig:
    return make_config(
        name=str(dropout_model),
        max_steps=STEPS,
        model={"seq_len": 32, "dropout": True},
        minibatches=2,
        loss=DECOUPLED,
        ckpt={"interval": 1},
        determinism="strict",
        pack={"mode": "always"},
    )


def parts_of(samples: list[Any], count: int) -> list[list[Any]]:
    """Return each sample is a group of its own here, in the order of the ordinals."""
    return [samples[first::count] for first in range(count)]


@pytest.mark.parametrize(
    "loss", [{"type": "ppo"}, {"type": "gspo"}, {"kl": {"coef": 0.1}, "entropy_coef": 0.01, "aggregation": "prompt"}]
)
def test_a_batch_of_two_is_two_batches_of_one(
    new_recorder: Callable[[], Recorder], make_config: MakeConfig, loss: dict[str, Any]
) -> None:
    """Bit for bit, where the loss looks at the policy that sampled and the learning rate does not change."""
    one, two = new_recorder(), new_recorder()
    one.create(make_config(minibatches=2, loss=loss))
    two.create(make_config(loss=loss))
    for step in range(2):
        samples = one.make_samples(step)
        one.commit(step, samples)
        for at, part in enumerate(parts_of(samples, 2)):
            two.commit(2 * step + at, part)
    for recorder, steps in ((one, 2), (two, 4)):
        recorder.commit(steps, [], closing=True)
        assert recorder.train() == steps
    twice, once = one.digests(), two.digests()
    assert [twice[version] for version in range(3)] == [once[0], once[2], once[4]]
    assert len({*once.values()}) == 5


def test_tasks_weigh_the_same_where_their_rollouts_share_a_weight(
    new_recorder: Callable[[], Recorder], make_config: MakeConfig
) -> None:
    """Groups of one are samples; in groups of three, with rollouts of several lengths, a token weighs otherwise."""

    def trained(aggregation: str, group: int) -> str:
        recorder = new_recorder()
        recorder.create(make_config(loss={"type": "importance_sampling", "aggregation": aggregation}))
        samples = recorder.make_samples(0)
        recorder.commit(0, [replace(sample, ordinal=sample.ordinal // group) for sample in samples])
        recorder.commit(1, [], closing=True)
        assert recorder.train() == 1
        return recorder.digests()[1]

    assert trained("prompt", 1) == trained("sequence", 1)
    assert len({trained(aggregation, 3) for aggregation in ("prompt", "sequence", "token")}) == 3


def test_decoupled_ppo_needs_the_policy_before_the_batch(
    new_recorder: Callable[[], Recorder], make_config: MakeConfig
) -> None:
    """With one step per batch it is reinforce with truncated weights; with two, it is so in the first of them only."""
    found = []
    for minibatches, type_ in ((1, "importance_sampling"), (1, "ppo"), (2, "importance_sampling"), (2, "ppo")):
        recorder = new_recorder()
        optim = {"lr": 0.05}  # so that the second half of a batch has tokens to clip
        recorder.record(make_config(minibatches=minibatches, optim=optim, loss={**DECOUPLED, "type": type_}), steps=1)
        recorder.train()
        (step,) = [event.step_completed for event in recorder.events() if event.HasField("step_completed")]
        found.append((recorder.digests()[1], step.metrics["is_masked/mean"]))
    assert found[0] == found[1] and found[0][1] == 0
    assert found[2][0] != found[3][0] and found[2][1] == 0 < found[3][1]


@pytest.mark.long  # resuming from every checkpoint, below, is the same in one process
async def test_killed_between_two_optimizer_steps_it_makes_the_same_policies(
    orchestrator: Any, trainers: Any, recorder: Recorder, config: RLConfig, tmp_path: Path
) -> None:
    await asyncio.to_thread(recorder.record, config, steps=STEPS)
    await asyncio.to_thread(recorder.train)
    unkilled = recorder.digests()
    assert sorted(unkilled) == list(range(STEPS + 1)) and len({*unkilled.values()}) == STEPS + 1
    recorder.forget_training()
    packing = Packing(per_token=1.0, per_square=1.0, causal_cost=1.0, masked_cost=1.0, is_always=True)
    plans = []
    for step in range(2):
        lengths = [len(sample.token_ids) for sample in parts_of(recorder.make_samples(step), 2)[0]]
        (plan,) = plan_micro_batches(lengths, max_tokens=64, packing=packing)
        plans.append(plan)
    assert any(len(row) > 1 for plan in plans for rows in plan for row in rows), "rows hold several samples"
    # In the first micro-batch of the second half.
    fault = Fault(point=Point.TRAINER_MID_BACKWARD, when={"step": 1}, skip=len(plans[1]))
    faults.arm(tmp_path / "faults", fault)
    orchestrator.run_uid = recorder.uid
    process = trainers.fork(recorder, MILLRACE_FAULTS=str(tmp_path / "faults"))
    await orchestrator.until(lambda status: process.poll() is not None or bool(status.error_reason))
    assert process.returncode == -signal.SIGKILL, trainers.log_path.read_text()
    trainers.fork(recorder)
    await orchestrator.until(lambda status: status.is_finished or bool(status.error_reason))
    assert not orchestrator.status.error_reason, orchestrator.status.error_message
    assert recorder.digests() == unkilled


def test_from_every_checkpoint_the_same_policies_follow_and_a_replay_gives_them(
    recorder: Recorder, config: RLConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder.record(config, steps=STEPS)
    recorder.train()
    digests = recorder.digests()
    for first in range(1, STEPS + 1):
        for step in range(first, STEPS + 1):
            recorder.store.delete(f"{recorder.root}checkpoints/{step:08d}/manifest.json")
        assert recorder.train() == STEPS  # strict: a version that differs would be refused
    assert recorder.digests() == digests
    recorder.store.create(f"{recorder.prefix}/names/tiny-run", recorder.uid.encode())
    where = ("--store", recorder.store_url, "--prefix", recorder.prefix)
    other = ("--loss", "millrace_testing.trainer.other_losses:doubled")
    for step, more in ((0, ()), (2, other)):
        assert main(["run", "replay", "tiny-run", "--step", str(step + 1), *where, *more]) == 0
        assert f"equal: version {step + 1} has digest {digests[step + 1]}" in capsys.readouterr().out


@pytest.mark.parametrize("bad", [(5,), (4, 5)], ids=["one half", "both halves"])
def test_a_half_that_is_not_finite_is_skipped_alone(
    recorder: Recorder, make_config: MakeConfig, bad: tuple[int, ...]
) -> None:
    samples = recorder.make_samples(0)
    for at in bad:
        advantages, logprobs = samples[at].advantages.copy(), samples[at].inference_logprobs.copy()
        advantages[-2], logprobs[-2] = 3e38, -50.0
        samples[at] = replace(samples[at], advantages=advantages, inference_logprobs=logprobs)
    recorder.create(make_config(minibatches=2))
    recorder.commit(0, samples)
    recorder.commit(1, recorder.make_samples(1))
    recorder.commit(2, [], closing=True)
    recorder.train()
    events, digests = recorder.events(), recorder.digests()
    steps = [event.step_completed.metrics for event in events if event.HasField("step_completed")]
    assert [step["optim/skipped"] for step in steps] == [len(bad) / 2, 0]
    ((reason, message),) = [(e.warning.reason, e.warning.message) for e in events if e.HasField("warning")]
    assert reason == "LOSS_NOT_FINITE" and f"in 1 of its 12 samples ({bad[0]})" in message
    if len(bad) == 1:
        assert message.startswith("1 of the 2 minibatches of step 1 changed nothing: the loss of batch 0")
    else:
        assert "version 1 has the weights of version 0" in message
    assert (digests[1] == digests[0]) == (len(bad) == 2) and digests[2] != digests[1]
