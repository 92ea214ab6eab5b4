"""Steps whose numbers are not finite change nothing, say where, replay alike, and end the run if there are too many."""

import asyncio
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.cli.main import main
from millrace.config.sections.rl import RLConfig
from millrace.errors import InvalidStateError
from millrace.policies.fetch import prove_policies
from millrace.readers.audit import Depth, audit_run
from millrace.runlog.records.revisions import Reopening
from millrace.telemetry import faults
from millrace.telemetry.faults import Fault, Point
from millrace.trainer.checkpoint.index import differences
from millrace_testing.trainer.torchrun import train_gang

Recorder = Any  # conftest.Recorder; tests are not importable from one another
MakeConfig = Callable[..., RLConfig]
BAD_SAMPLE = 5


def make_samples(recorder: Recorder, step: int, *, bad: bool = False) -> list[Any]:
    """Return the samples of a step; in a bad one the loss of a token is too large for its number format."""
    samples = recorder.make_samples(step)
    if bad:
        advantages, logprobs = samples[BAD_SAMPLE].advantages.copy(), samples[BAD_SAMPLE].inference_logprobs.copy()
        advantages[-2], logprobs[-2] = 3e38, -50.0
        samples[BAD_SAMPLE] = replace(samples[BAD_SAMPLE], advantages=advantages, inference_logprobs=logprobs)
    return samples


def record(recorder: Recorder, config: RLConfig, *, steps: int, bad: tuple[int, ...]) -> None:
    recorder.create(config)
    for step in range(steps):
        recorder.commit(step, make_samples(recorder, step, bad=step in bad))
    recorder.commit(steps, recorder.make_samples(steps, count=4, version=steps), closing=True)


def warnings(recorder: Recorder) -> list[tuple[str, str]]:
    found = [event.warning for event in recorder.events() if event.HasField("warning")]
    return [(warning.reason, warning.message) for warning in found]


def skipped(recorder: Recorder) -> list[float]:
    steps = [event.step_completed for event in recorder.events() if event.HasField("step_completed")]
    return [step.metrics["optim/skipped"] for step in steps]


def test_a_step_that_is_not_finite_changes_nothing_says_where_and_replays_alike(
    recorder: Recorder, make_config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    record(recorder, make_config(ckpt={"interval": 1}, determinism="strict"), steps=4, bad=(1,))
    assert recorder.train() == 4
    digests = recorder.digests()
    assert digests[2] == digests[1] and len({*digests.values()}) == 4
    assert skipped(recorder) == [0, 1, 0, 0]
    ((reason, message),) = warnings(recorder)
    sample = recorder.make_samples(1)[BAD_SAMPLE]
    assert reason == "LOSS_NOT_FINITE"
    assert f"the loss of batch 1 is not finite in 1 of its 12 samples ({BAD_SAMPLE}), first in sample 5" in message
    assert f"(ordinal {sample.ordinal}, member 0, attempt 0) at its token {len(sample.token_ids) - 2}" in message
    assert f"token id {sample.token_ids[-2]}" in message and "engine's -50, advantage 3e+38" in message
    assert "version 2 has the weights of version 1" in message and "after 3 such steps in a row" in message

    recorder.store.create(f"{recorder.prefix}/names/tiny-run", recorder.uid.encode())
    where = ("--store", recorder.store_url, "--prefix", recorder.prefix)
    for step in (1, 2):
        assert main(["run", "replay", "tiny-run", "--step", str(step + 1), *where]) == 0
        assert f"equal: version {step + 1} has digest {digests[step + 1]}" in capsys.readouterr().out
    depth = Depth(is_deep=True, prove=prove_policies, compare=differences)
    report = recorder.call(
        audit_run(recorder.log.redis, recorder.store, prefix=recorder.prefix, uid=recorder.uid, depth=depth)
    )
    ours = ("POLICY", "CHECKPOINT", "EVENT", "STEP", "HEADER", "CHAIN")
    assert not [each for each in report.violations if each.check.startswith(ours)]


@pytest.mark.long
def test_from_every_checkpoint_the_same_policies_follow(recorder: Recorder, make_config: MakeConfig) -> None:
    record(recorder, make_config(ckpt={"interval": 1}, determinism="strict"), steps=4, bad=(1, 2))
    recorder.train()
    digests = recorder.digests()
    for first in (1, 2, 3, 4):
        for step in range(first, 5):
            recorder.store.delete(f"{recorder.root}checkpoints/{step:08d}/manifest.json")
        assert recorder.train() == 4  # strict: a version that differs would be refused
    assert recorder.digests() == digests and digests[1] == digests[2] == digests[3] != digests[4]


@pytest.mark.long
@pytest.mark.parametrize("point", [Point.TRAINER_AFTER_STEP, Point.TRAINER_MID_BACKWARD, Point.TRAINER_MID_CHECKPOINT])
async def test_a_trainer_killed_in_a_skipped_step_goes_on_alike(
    orchestrator: Any, trainers: Any, recorder: Recorder, make_config: MakeConfig, tmp_path: Path, point: Point
) -> None:
    config = make_config(ckpt={"interval": 2}, determinism="strict")
    await asyncio.to_thread(record, recorder, config, steps=4, bad=(1,))
    await asyncio.to_thread(recorder.train)
    unkilled = recorder.digests()
    recorder.forget_training()
    step = 2 if point is Point.TRAINER_MID_CHECKPOINT else 1
    faults.arm(tmp_path / "faults", Fault(point=point, when={"step": step}))
    orchestrator.run_uid = recorder.uid
    process = trainers.fork(recorder, MILLRACE_FAULTS=str(tmp_path / "faults"))
    await orchestrator.until(lambda status: process.poll() is not None or bool(status.error_reason))
    assert process.returncode == -signal.SIGKILL, trainers.log_path.read_text()
    trainers.fork(recorder)
    await orchestrator.until(lambda status: status.is_finished or bool(status.error_reason))
    assert not orchestrator.status.error_reason, orchestrator.status.error_message
    assert recorder.digests() == unkilled and unkilled[1] == unkilled[2]


def test_too_many_in_a_row_end_the_run_and_a_resumed_trainer_says_the_same(
    recorder: Recorder, make_config: MakeConfig
) -> None:
    config = make_config(ckpt={"interval": 2}, max_skipped_steps=2, determinism="strict")
    record(recorder, config, steps=6, bad=(1, 3, 4))
    for _ in range(2):  # the second begins with checkpoint 4, which knows that step 3 was skipped
        with pytest.raises(InvalidStateError) as raised:
            recorder.train()
        assert raised.value.reason == "TOO_MANY_SKIPPED_STEPS"
        assert "steps 4 to 5 were skipped" in raised.value.message
        assert "trainer.max_skipped_steps = 2" in raised.value.message
        assert "the loss of batch 4 is not finite in 1 of its 12 samples" in raised.value.message
        assert max(recorder.digests()) == 5, "the version of the last skipped step is published"
        assert recorder.checkpoints() == [2, 4]
    assert [reason for reason, _ in warnings(recorder)][:3] == ["LOSS_NOT_FINITE"] * 3


def test_skipped_steps_before_a_reopening_count_no_more(recorder: Recorder, make_config: MakeConfig) -> None:
    record(recorder, make_config(ckpt={"interval": 1}, max_skipped_steps=1), steps=3, bad=(1,))
    with pytest.raises(InvalidStateError, match="step 2 was skipped"):
        recorder.train()
    with pytest.raises(InvalidStateError, match="step 2 was skipped"):
        recorder.train()  # from checkpoint 2, before any batch
    failed = Reopening(step=2, revision=0, closing_sha256="ab" * 32, epoch=1, owner="test", time="")
    recorder.store.create(recorder.log.names.reopened(1), failed.encode())
    assert recorder.train() == 3


def test_an_entropy_that_is_not_finite_skips_the_step(
    recorder: Recorder, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a model that gives a token of the vocabulary the logit minus infinity: loss and gradient are finite."""
    from millrace.trainer.learning.learner import Learner

    real, calls = Learner.logprobs, [0]

    def logprobs(self: Any, micro_batch: Any, **rest: Any) -> Any:
        found, entropy = real(self, micro_batch, **rest)
        calls[0] += 1
        if calls[0] == 1:
            entropy = entropy.clone()
            entropy[0, -1] = float("nan")
        return found, entropy

    monkeypatch.setattr(Learner, "logprobs", logprobs)
    record(recorder, make_config(), steps=2, bad=())
    recorder.train()
    digests = recorder.digests()
    assert digests[0] == digests[1] != digests[2] and skipped(recorder) == [1, 0]
    ((reason, message),) = warnings(recorder)
    assert reason == "ENTROPY_NOT_FINITE" and "the entropy of batch 0 is not finite in 1 of its 12 samples" in message


def test_trainer_and_engine_that_drift_apart_are_told_of_once_with_the_trend(
    recorder: Recorder, make_config: MakeConfig
) -> None:
    recorder.create(make_config(max_steps=12, optim={"lr": 1e-6}))
    for step in range(12):
        drift = np.float32(4.0 if step >= 7 else 0.0)
        moved = [
            replace(sample, inference_logprobs=sample.inference_logprobs - drift * sample.loss_mask.astype(np.float32))
            for sample in recorder.make_samples(step)
        ]
        recorder.commit(step, moved)
    recorder.commit(12, recorder.make_samples(12, count=4, version=12), closing=True)
    recorder.train()
    ((reason, message),) = warnings(recorder)
    assert reason == "KL_EXPLODING"
    steps = [e.step_completed.metrics["mismatch_kl/mean"] for e in recorder.events() if e.HasField("step_completed")]
    assert message.startswith("mismatch_kl rose from ") and "lower trainer.optim.lr" in message
    assert f"{steps[9]:.3g}" in message, "the numbers that were measured"


def test_an_engine_that_computes_differently_is_told_of_and_the_learning_rate_is_not_blamed(
    recorder: Recorder, make_config: MakeConfig
) -> None:
    recorder.create(make_config(max_steps=4, optim={"lr": 1e-6}))
    for step in range(4):  # of the version that is trained, and far from what it computes
        moved = [
            replace(sample, inference_logprobs=sample.inference_logprobs - 4 * sample.loss_mask.astype(np.float32))
            for sample in recorder.make_samples(step, version=step)
        ]
        recorder.commit(step, moved)
    recorder.commit(4, recorder.make_samples(4, count=4, version=4), closing=True)
    recorder.train()
    ((reason, message),) = warnings(recorder)
    assert reason == "ENGINE_DISAGREES"
    assert message.startswith("engine and trainer disagree on tokens that the trained version itself sampled")
    steps = [e.step_completed.metrics for e in recorder.events() if e.HasField("step_completed")]
    assert all(each["mismatch_kl/mean"] > 0.5 for each in steps), "enough for KL_EXPLODING"
    assert steps[0]["on_policy_mismatch_kl/mean"] == steps[0]["mismatch_kl/mean"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_ranks_of_a_gang_skip_what_one_of_them_finds(
    new_recorder: Callable[[], Recorder], make_config: MakeConfig
) -> None:
    recorder = new_recorder()
    record(recorder, make_config(micro_batch_tokens=48), steps=3, bad=(1,))
    train_gang(recorder)
    digests = recorder.digests()
    assert digests[1] == digests[2] and len({*digests.values()}) == 3
    ((reason, message),) = warnings(recorder)
    assert reason == "LOSS_NOT_FINITE" and f"({BAD_SAMPLE}), first in sample {BAD_SAMPLE}" in message
