"""The training loop.

    batches ──▶ micro-batches ──▶ loss, backward ──▶ optimizer step ──▶ publish version n + 1 ──▶ checkpoint ──▶ report
       ▲                                                                                                          │
       └─────────────────────────── the orchestrator cuts batch n + 1 ◀───────────────────────────────────────────┘

Publishing and saving go on during the next step. Version 0 is the start model; step n consumes batch n and turns
version n into version n + 1, in one optimizer step or, with minibatches, several. A closing header ends the run: its
samples are the final evaluation's rollouts, and scoring them shows how far trainer and engine agree.
"""

import logging
import time
from dataclasses import asdict, dataclass

import torch

from millrace.errors import InvalidStateError
from millrace.telemetry import faults
from millrace.telemetry.faults import Point
from millrace.trainer.learning.batch import Minibatch
from millrace.trainer.learning.learner import Learner
from millrace.trainer.learning.metrics import (
    NOT_FITTING,
    NOT_RECORDED,
    NotFinite,
    Score,
    StepMetrics,
    describe_not_finite,
    find_not_finite,
)
from millrace.trainer.learning.optimizer import OptimizerReport
from millrace.trainer.log.background import StopRequested
from millrace.trainer.log.batches import Batch
from millrace.trainer.log.token_log import TokenRows
from millrace.trainer.losses import LossFunction, Objective, divisor
from millrace.trainer.model.compiled import is_compiled, take_failures
from millrace.trainer.reporter import Phases
from millrace.trainer.training import Position, Training
from millrace.v1 import event_pb2

logger = logging.getLogger(__name__)


def train(run: Training) -> None:
    """Publish the policy of the run's position, then train every batch up to the closing header.

    When asked to release the run before that, raises StopRequested, after saving a checkpoint if the run has them and
    steps were made. Raises InvalidStateError if too many steps in a row were skipped. Collective in a gang.
    """
    stopped: StopRequested | None = None
    with run.checkpointer, run.publisher, run.token_logs:
        start = run.position.version
        # The start model of a new run. After a resume it is the checkpoint's version, which is published again and
        # compared, or skipped, as the plan says.
        run.publisher.publish(start)
        run.turn.begin()
        run.reporter.start()
        # The state that was resumed may already have the skipped steps that end the run.
        require_learning(run)
        try:
            for batch in run.batches.follow(start):
                if batch.is_closing:
                    close(run, batch)
                else:
                    step(run, batch)
        except StopRequested as request:
            stopped = request
            # Without a step this is the state that was resumed, which is saved, or the start model.
            if run.position.version > start:
                run.save_last_checkpoint()
    if stopped is not None:  # the last version is published
        raise stopped


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """The metrics of a step, and the report of what it did to the weights.

    If a minibatch was skipped, `not_finite` is "loss", "entropy" or "gradient", and `cause` a sentence on where.
    """

    metrics: StepMetrics
    report: OptimizerReport
    not_finite: str = ""
    cause: str = ""


def step(run: Training, batch: Batch) -> None:
    """Learn from a batch, publish the next policy version, save a due checkpoint, and report. Collective in a gang.

    Advances the run's position by one version, also if the step was skipped. Raises InvalidStateError if too many steps
    in a row were skipped.
    """
    # Only once the batch is there: until then the engines need shared devices to sample it.
    with run.turn(batch.step):
        began = time.monotonic()
        rows = run.token_logs.collect(batch)
        learned = learn(run, batch, rows=rows)
        faults.reach(Point.TRAINER_AFTER_STEP, step=batch.step)
        run.token_logs.write(batch, rows)
        forward_backward_s = time.monotonic() - began
        # Steps before `skips_from` were skipped before a resume, and are in the position's count already.
        counts = learned.report.was_skipped and batch.step >= run.skips_from
        run.position = Position(batch.step + 1, batch.chain_hash, run.position.num_skipped + 1 if counts else 0)
        # Snapshot and probe compute on the devices, so that they are part of the turn; the upload goes on after it.
        publish_s = run.publisher.publish(run.position.version, step=batch.step)
    checkpoint_s = run.save_due_checkpoint()
    phases = Phases(
        devices_s=run.turn.waited_s,
        forward_backward_s=forward_backward_s,
        publish_s=publish_s,
        checkpoint_s=checkpoint_s,
    )
    run.reporter.step_completed(batch, metrics=learned.metrics.values(), optimizer=learned.report, phases=phases)
    _warn(run, batch, learned)
    _warn_of_compiler(run)
    run.on_progress(run.position.version)
    # After the warnings, so that the run's events say what was wrong before the run ends.
    require_learning(run, learned)


def learn(run: Learner, batch: Batch, *, rows: TokenRows | None = None) -> Learned:
    """Take one optimizer step per minibatch of the batch; return metrics and report of all as one.

    Collective in a gang. A step that is not finite leaves the weights as they are. `rows` collects values of the
    samples that the token log has; None: none.
    """
    first, *others = batch.minibatches
    # The ratio of later minibatches needs the log-probs under the policy before the batch, which the first step
    # changes.
    minibatches = [first, *run.with_proximal(others)]
    learned = [_learn(run, batch, each, rows) for each in minibatches]
    bad = next((each for each in learned if each.not_finite), learned[0])
    return Learned(
        metrics=StepMetrics.merged([each.metrics for each in learned]),
        report=OptimizerReport.merged([each.report for each in learned]),
        not_finite=bad.not_finite,
        cause=bad.cause,
    )


def _learn(run: Learner, batch: Batch, minibatch: Minibatch, rows: TokenRows | None) -> Learned:
    """Take one optimizer step on a minibatch, and return what it did.

    Skip it if loss, entropy or gradient is not finite. `rows` collects values for the token log; None: none. Collective
    in a gang.
    """
    metrics, found = forward_backward(run, batch, minibatch, rows=rows)
    report = run.optimizer.step(batch.step, skips=bool(found))
    if found:
        cause = describe_not_finite(batch.header, found)
        return Learned(metrics=metrics, report=report, not_finite=min(found).what, cause=cause)
    if report.was_skipped:
        cause = f"the gradient of batch {batch.step} is not finite: its norm is {report.grad_norm}"
        return Learned(metrics=metrics, report=report, not_finite="gradient", cause=cause)
    return Learned(metrics=metrics, report=report)


def forward_backward(
    run: Learner,
    batch: Batch,
    minibatch: Minibatch,
    *,
    loss_of: LossFunction | None = None,
    rows: TokenRows | None = None,
) -> tuple[StepMetrics, list[NotFinite]]:
    """Accumulate the gradient of a minibatch's loss; return its metrics, and the first not finite token of each sample.

    Both are over all ranks; the list is empty if loss and entropy are finite. `loss_of` replaces the run's own loss
    unless None; `rows` collects values for the token log. Collective in a gang.
    """
    counts = [0.0, 0.0, 0.0]
    for micro_batch in minibatch.micro_batches:
        counts[0] += micro_batch.num_rl_tokens
        counts[1] += micro_batch.num_rl_samples
        counts[2] += micro_batch.num_ce_tokens
    # Over all ranks and before any backward: each micro-batch's loss is divided by the whole batch's count, so that the
    # sum of gradients does not depend on how samples are spread.
    num_rl_tokens, num_rl_samples, num_ce_tokens = (int(count) for count in run.gang.sum_of_data(counts))
    groups = _tokens_of_groups(run, batch, minibatch)
    num_groups = None if groups is None else sum(count > 0 for count in groups.values())
    counted = {"num_tokens": num_rl_tokens, "num_samples": num_rl_samples, "num_groups": num_groups}
    objective = Objective(
        loss_of=loss_of or run.loss_of,
        config=run.config.loss,
        rl_divisor=divisor(run.config.loss, **counted),
        num_ce_tokens=num_ce_tokens,
    )
    # Only the first minibatch is computed by a published version; later ones have no number.
    version = batch.step if minibatch is batch.minibatches[0] else None
    metrics, not_finite = StepMetrics(batch.header.envs, version=version), list[NotFinite]()
    run.num_one_pass_tokens = 0
    with run.learning():
        for micro_batch, samples in run.micro_batches(minibatch):
            inputs, logprobs_BT, entropy_BT = run.loss_inputs(micro_batch.with_group_tokens(groups), objective)
            losses, loss = objective(inputs)
            # Where the head has computed its gradient with the log-probs, it only compares the slopes and hands it on.
            loss.backward()
            faults.reach(Point.TRAINER_MID_BACKWARD, step=batch.step)
            metrics.add_reference(micro_batch, inputs)
            if rows is not None:
                rows.add(micro_batch, samples, logprobs_BT=logprobs_BT, entropy_BT=entropy_BT)
            if not metrics.add(
                micro_batch, losses=losses, loss=loss, trainer_logprobs_BT=logprobs_BT, entropy_BT=entropy_BT
            ):
                not_finite += find_not_finite(
                    micro_batch, samples, losses=losses, trainer_logprobs_BT=logprobs_BT, entropy_BT=entropy_BT
                )
    metrics.add_expert_load(run.expert_load)
    metrics.add_one_pass(run.num_one_pass_tokens, minibatch)
    if run.routing is not None:
        metrics.add_replayed(minibatch)
    reduced = metrics.reduce(run.gang)
    # Decided on the sums over all ranks, so that all ranks decide alike.
    if reduced.is_finite:
        return reduced, []
    # Every rank must skip the same step, and the event names the first sample of all ranks.
    everywhere = run.gang.agree(lambda: [asdict(each) for each in not_finite])
    return reduced, sorted({NotFinite(**each) for part in everywhere for each in part})


def _tokens_of_groups(run: Learner, batch: Batch, minibatch: Minibatch) -> dict[int, int] | None:
    """Return the number of policy-loss tokens of each group in the minibatch over all ranks, by ordinal.

    None if the loss does not weigh tokens by group.
    """
    if run.config.loss.aggregation != "prompt":
        return None
    # Keys from the header, which all ranks have, so that the ranks' sums line up.
    counts = dict.fromkeys(sorted({sample.ordinal for sample in batch.header.samples}), 0)
    for micro_batch in minibatch.micro_batches:
        for ordinal, count in micro_batch.tokens_by_group().items():
            counts[ordinal] += count
    totals = run.gang.sum_of_data([float(count) for count in counts.values()])
    return {ordinal: int(total) for ordinal, total in zip(counts, totals, strict=True)}


def require_learning(run: Training, learned: Learned | None = None) -> None:
    """Raise InvalidStateError if `max_skipped_steps` steps in a row were skipped, after the last version is published.

    `learned` is the last step, whose cause is in the message; None: the steps were skipped before a resume.
    """
    last, num_skipped = run.position.version, run.position.num_skipped
    if num_skipped < run.config.max_skipped_steps:
        return
    run.publisher.finish()
    which = f"step {last} was skipped" if num_skipped == 1 else f"steps {last + 1 - num_skipped} to {last} were skipped"
    raise InvalidStateError(
        f"the run cannot learn: {which}, because loss, entropy or gradient was not finite (trainer.max_skipped_steps = "
        f"{run.config.max_skipped_steps})" + (f"; last, {learned.cause}" if learned is not None else ""),
        reason="TOO_MANY_SKIPPED_STEPS",
        remedy=f"fork the run before it (--step {last - num_skipped}) with a lower trainer.optim.lr, or see "
        "docs/troubleshooting.md",
    )


def close(run: Training, batch: Batch) -> None:
    """Score the closing header's samples with the final weights, report the result, and save the final checkpoint.

    Collective in a gang.
    """
    # The position stays: a closing header is no step, and the checkpoint of version n names H(n - 1).
    version = run.position.version
    if batch.header.samples:
        score = Score()
        with run.turn(version), torch.no_grad():
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


def _warn_of_compiler(run: Training) -> None:
    """Write a warning event for each class of blocks that did not compile at any rank since the last call.

    Collective in a gang.
    """
    if not is_compiled(run.model):
        return
    failures = run.gang.agree(lambda: take_failures(run.model))
    for failure in sorted({each for part in failures for each in part}):
        run.reporter.warning("COMPILE_FAILED", failure)


def _warn(run: Training, batch: Batch, learned: Learned) -> None:
    """Write warning events about a step: skipped minibatches, and log-probs of trainer and engine that drift apart."""
    report, name = learned.report, f"{learned.not_finite.upper()}_NOT_FINITE"
    if learned.not_finite and not report.was_skipped:
        run.reporter.warning(
            name,
            f"{report.num_skipped} of the {report.num_steps} minibatches of step {batch.step + 1} changed nothing: "
            f"{learned.cause}; lower trainer.optim.lr, or look at the batch's samples",
        )
    elif learned.not_finite:
        run.reporter.warning(
            name,
            f"step {batch.step + 1} was skipped: {learned.cause}; version {batch.step + 1} has the weights of version "
            f"{batch.step}. The run ends after {run.config.max_skipped_steps} such steps in a row, this is number "
            f"{run.position.num_skipped}; lower trainer.optim.lr, or look at the batch's samples",
        )
    news = run.replay_watch.news(learned.metrics.values())
    if NOT_RECORDED in news:
        run.reporter.warning(
            "EXPERTS_NOT_RECORDED",
            f"no token of step {batch.step + 1} has the experts that the engine computed it with, so the trainer's "
            "routers chose (trainer.model.moe.replay); serve the policy with inference.return_routed_experts",
        )
    if NOT_FITTING in news:
        run.reporter.warning(
            "ROUTED_EXPERTS_MISFIT",
            f"tokens of step {batch.step + 1} have experts that the trainer's model does not have, and its routers "
            "chose for them (misfit_experts/mean); serve the model that is trained, or leave trainer.model.moe.replay "
            "out",
        )
    if learned.not_finite:
        return
    values = learned.metrics.values()
    if problem := run.disagreement.add(batch.step + 1, values):
        run.reporter.warning("ENGINE_DISAGREES", problem)
    trend = run.kl_trend.add(batch.step + 1, values.get("mismatch_kl/mean", 0.0))
    # A mismatch on the trained version's own tokens has another cause, which has been reported: learning more slowly
    # would not help.
    if trend and not run.disagreement.is_large:
        run.reporter.warning(
            "KL_EXPLODING",
            f"{trend}: trainer and engine disagree more and more on the tokens that are trained on; lower "
            "trainer.optim.lr or async_level, or raise trainer.loss.kl_tau",
        )
