"""The training loop.

    batches ──▶ micro-batches ──▶ loss, backward ──▶ optimizer step ──▶ publish version n + 1 ──▶ checkpoint ──▶ report
       ▲                                                                                                          │
       └─────────────────────────── the orchestrator cuts batch n + 1 ◀───────────────────────────────────────────┘

Publishing goes on beside the next step. Version 0 is the start model; step n consumes batch n and turns version n into
version n + 1. A closing header ends the run: its samples are the final evaluation's rollouts, and scoring them shows
how far trainer and engine agree.
"""

import time

import torch

from millrace.telemetry import faults, logging
from millrace.telemetry.faults import Point
from millrace.trainer.learning.learner import Learner
from millrace.trainer.learning.loss import LossFunction, LossInputs, token_losses, total_loss
from millrace.trainer.learning.metrics import StepMetrics
from millrace.trainer.learning.optimizer import OptimizerReport
from millrace.trainer.learning.score import Score
from millrace.trainer.log.batches import Batch
from millrace.trainer.log.stop import StopRequested
from millrace.trainer.reporter import Phases
from millrace.trainer.training import Position, Training
from millrace.v1 import event_pb2

logger = logging.getLogger(__name__)


def train(run: Training) -> None:
    """Train from the run's position to its closing header.

    Raises StopRequested, with a checkpoint saved if the run has checkpoints, when asked to let go before that.
    """
    stopped: StopRequested | None = None
    with run.publisher:
        start = run.position.version
        run.publisher.publish(start)
        run.reporter.start()
        try:
            for batch in run.batches.follow(start):
                if batch.is_closing:
                    close(run, batch)
                else:
                    step(run, batch)
        except StopRequested as request:
            stopped = request
            if run.position.version > start:
                run.save_last_checkpoint()
    if stopped is not None:  # the last version is published
        raise stopped


def step(run: Training, batch: Batch) -> None:
    """One optimizer step, its policy version, and its report."""
    began = time.monotonic()
    metrics = forward_backward(run, batch)
    report = run.optimizer.step(batch.step)
    faults.reach(Point.TRAINER_AFTER_STEP, step=batch.step)
    forward_backward_s = time.monotonic() - began
    run.position = Position(batch.step + 1, batch.chain_hash)
    publish_s = run.publisher.publish(run.position.version, step=batch.step)
    checkpoint_s = run.save_checkpoint() if run.checkpointer.is_due(run.position.version) else 0.0
    phases = Phases(forward_backward_s=forward_backward_s, publish_s=publish_s, checkpoint_s=checkpoint_s)
    run.reporter.step_completed(batch, metrics=metrics, optimizer=report, phases=phases)
    _warn(run, batch, report)
    run.on_progress(run.position.version)


def forward_backward(run: Learner, batch: Batch, *, loss_of: LossFunction = token_losses) -> dict[str, float]:
    """Accumulate the gradient of the batch's loss and return the step's metrics, both over all ranks."""
    counts = [0.0, 0.0]
    for micro_batch in batch.micro_batches:
        counts[0] += micro_batch.num_rl_tokens
        counts[1] += micro_batch.num_ce_tokens
    num_rl_tokens, num_ce_tokens = (int(count) for count in run.gang.sum(counts))
    metrics = StepMetrics(batch.header.envs)
    with run.learning():
        for micro_batch in batch.micro_batches:
            logprobs_BT, entropy_BT = run.logprobs(micro_batch)
            losses = loss_of(LossInputs.of(micro_batch, logprobs_BT), run.config.loss)
            loss = total_loss(losses, num_rl_tokens=num_rl_tokens, num_ce_tokens=num_ce_tokens)
            (loss * run.gang.world_size).backward()  # FSDP averages gradients over the ranks; this makes it a sum
            faults.reach(Point.TRAINER_MID_BACKWARD, step=batch.step)
            metrics.add(micro_batch, losses=losses, loss=loss, trainer_logprobs_BT=logprobs_BT, entropy_BT=entropy_BT)
    return metrics.reduce(run.gang)


def close(run: Training, batch: Batch) -> None:
    """Score the closing header's samples with the final weights and save the final checkpoint."""
    # The position stays: a closing header is no step, and the checkpoint of version n names H(n - 1).
    version = run.position.version
    if batch.header.samples:
        score = Score()
        with torch.no_grad():
            for micro_batch in batch.micro_batches:
                logprobs_BT, _ = run.logprobs(micro_batch)
                score.add(micro_batch, logprobs_BT, version=version)
        result = score.reduce(run.gang)
        if result.num_other_version_tokens:
            run.reporter.warning(
                "SCORE_OTHER_VERSION",
                f"{result.num_other_version_tokens} tokens of the final evaluation are not of version {version} "
                "and were not scored",
            )
        if result.num_tokens:
            run.reporter.score_completed(
                event_pb2.ScoreCompleted(
                    version=version,
                    num_tokens=result.num_tokens,
                    mismatch_kl=result.mismatch_kl,
                    max_abs_logprob_diff=result.max_abs_logprob_diff,
                )
            )
    run.save_last_checkpoint()
    logger.info("run ended", extra={"version": version, "outcome": batch.header.outcome})


def _warn(run: Training, batch: Batch, report: OptimizerReport) -> None:
    """Warn of a step that changed nothing because its gradient was not finite."""
    if report.was_skipped:
        run.reporter.warning(
            "GRADIENT_NOT_FINITE",
            f"step {batch.step} had a gradient norm of {report.grad_norm}, so its update was skipped; "
            "lower trainer.optim.lr or look at the batch's log-probs",
        )
