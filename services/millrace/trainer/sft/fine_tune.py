"""Supervised fine-tuning: the same micro-batches, loss, optimizer and gang as RL, without a log.

Writes `<output_dir>/<run name>/model` (Hugging Face format with the tokenizer), `adapter` beside it if adapters were
trained, and `metrics.jsonl`, one line per step. With `[ckpt]` it saves checkpoints beside them, and continues a run
that is started again.
"""

import contextlib
import json
import logging
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn
from transformers.utils.logging import disable_progress_bar

from millrace.config.load import validate_document
from millrace.config.sections.environments import have_conversations
from millrace.config.sections.loss import LossConfig
from millrace.config.sections.sft import SFTConfig
from millrace.decoding import decode_json
from millrace.errors import CorruptObjectError, InvalidSpecError, InvalidStateError, NotFoundError, Violation
from millrace.models.torch_support import shortage_named
from millrace.models.vocabulary import require_tokenizer
from millrace.policies.stops import turn_stops
from millrace.rollouts.types import TrainSample
from millrace.storage.scratch import io_errors
from millrace.telemetry.logging import FILE_ONLY, setup
from millrace.trainer.gang.agreement import agreed
from millrace.trainer.gang.distributed import Gang, resolve_determinism, seed_rank, set_determinism
from millrace.trainer.learning.batch import MicroBatch, build_micro_batch
from millrace.trainer.learning.forward import OnePass, token_logprobs
from millrace.trainer.learning.learner import build_model
from millrace.trainer.learning.optimizer import PolicyOptimizer
from millrace.trainer.learning.packing import Utilization, packing_of
from millrace.trainer.learning.plan import in_order, plan_micro_batches
from millrace.trainer.losses import Objective, token_losses
from millrace.trainer.model.compiled import take_failures
from millrace.trainer.model.lora import set_learning
from millrace.trainer.model.memory import defer_resharding
from millrace.trainer.model.pretrained import (
    policy_files,
    resolve_compute_dtype,
    resolve_model_directory,
    resolve_publish_dtype,
    with_turn_stops,
)
from millrace.trainer.model.published import described_tensors
from millrace.trainer.sft.checkpoints import (
    Handover,
    SFTCheckpoints,
    num_bytes_of,
    require_mergeable,
    require_room,
    save_adapter,
    save_model,
    try_to_save,
)
from millrace.trainer.sft.data import FineTuningData
from millrace.trainer.sft.pairs import Preferences, plan_pairs

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SFTStep:
    """The report of a step; `loss` is the mean per trained token, or per pair with `[dpo]`.

    `preferences` are metrics of pairs, by name. `num_steps` is an estimate if the run ends with the data. `val_loss` is
    that of the weights before the step.
    """

    step: int
    num_steps: int
    loss: float
    lr: float
    grad_norm: float
    was_skipped: bool
    num_tokens: int
    num_loss_tokens: int
    seconds: float
    val_loss: float | None = None
    world_size: int = 1
    mfu: float | None = None
    preferences: Mapping[str, float] = field(default_factory=dict[str, float])

    def metrics(self) -> dict[str, float | int]:
        """Return the step's metrics for `metrics.jsonl`, under prime-rl's names."""
        throughput = self.num_tokens / self.seconds if self.seconds > 0 else 0.0
        return {
            "step": self.step,
            "loss/mean": self.loss,
            **self.preferences,
            "optim/lr": self.lr,
            "optim/grad_norm": self.grad_norm,
            "optim/skipped": int(self.was_skipped),
            "progress/tokens": self.num_tokens,
            "perf/throughput": throughput,
            "perf/throughput_per_gpu": throughput / self.world_size,
            **({} if self.mfu is None else {"perf/mfu": self.mfu}),
            "time/step": self.seconds,
            **({} if self.val_loss is None else {"val/loss": self.val_loss}),
        }


def run_sft(config: SFTConfig, *, gang: Gang, on_step: Callable[[SFTStep], None]) -> Path:
    """Fine-tune as the config says, save the model, and return its directory. Collective in a gang.

    `on_step` is called at rank 0 after each step. Before training raises InvalidSpecError for a config or rows that
    cannot be used, the errors of `io_errors` if files cannot be written, and CapacityError if the disk lacks room.
    """
    determinism = resolve_determinism("auto", is_compiled=config.model.compile is not None)
    set_determinism(determinism, seed=config.seed, device=gang.device)
    directory = resolve_model_directory(config.model.name)
    # Rows of text do without a chat template; environments that are played do not.
    needs_template = config.eval is not None and have_conversations(config.eval.env)
    tokenizer = require_tokenizer(directory, model=directory, needs_template=needs_template)
    data = FineTuningData(config, tokenizer, stops=turn_stops(tokenizer, directory))
    built = build_model(
        config.model,
        directory,
        gang=gang,
        seed=config.seed,
        prefix="model",
        context_length=config.data.seq_len,
        is_proved=config.dpo is not None,
    )
    if built.adapter is not None:
        require_mergeable(built.model)
        seed_rank(config.seed, rank=gang.layout.random_stream(gang.rank))  # the adapters' dropout
    dtype = resolve_publish_dtype(config.model, device=gang.device)
    output = Path(config.output_dir) / (config.run.name or "sft")
    model_bytes = num_bytes_of(described_tensors(built.model, dtype=dtype))
    # Before the first step, because a training is useless if its model cannot be saved.
    with agreed(gang), io_errors(output, "write", setting=None):
        output.mkdir(parents=True, exist_ok=True)
        files = policy_files(built.model, directory, dtype=dtype)
        files = with_turn_stops(files, directory, tokenizer=directory)
        if gang.is_leader:
            try_to_save(files, target=output / "model", num_bytes=model_bytes)
    optimizer = PolicyOptimizer(
        built.model,
        optim=config.optim,
        scheduler=config.scheduler,
        max_steps=data.num_steps,
        offloads_state=config.model.optim_cpu_offload,
    )
    checkpoints = SFTCheckpoints(
        config,
        output / "checkpoints",
        model=built.model,
        optimizer=optimizer,
        gang=gang,
        data={} if config.ckpt is None else data.identity,
        base_digest=built.base_digest,
    )
    start = checkpoints.resume(max_steps=data.num_steps)
    handover = Handover(config.eval, output, model=built.model, files=files, dtype=dtype, gang=gang)
    handover.begin(start[0])
    if gang.is_leader:
        _log_start(output, start[0], saves=config.ckpt is not None)
    with agreed(gang):
        if gang.is_leader and (checkpoint_bytes := checkpoints.num_bytes):
            copies = model_bytes * (1 + handover.most)
            require_room(output, checkpoint_bytes + copies, what="a checkpoint and the model take")
    learner = _Learner(config, gang=gang, model=built.model, optimizer=optimizer, directory=directory)
    _train(config, data, learner, checkpoints, handover, start=start, output=output, on_step=on_step)
    if built.adapter is not None:
        save_adapter(
            built.model,
            built.adapter,
            base=config.model.name,
            files=files,
            target=output / "adapter",
            dtype=dtype,
            gang=gang,
        )
    return save_model(built.model, files=files, target=output / "model", dtype=dtype, gang=gang)


def _train(
    config: SFTConfig,
    data: FineTuningData,
    learner: "_Learner",
    checkpoints: SFTCheckpoints,
    handover: Handover,
    *,
    start: tuple[int, int, int],
    output: Path,
    on_step: Callable[[SFTStep], None],
) -> None:
    """Take the steps from `start` to the last, with metrics, validation, checkpoints and handed-over weights.

    `start` is a step, the position of its rows in the data, and the number of steps in a row before it that were
    skipped. `on_step` is called at rank 0 after each step. Collective in a gang.
    """
    step, position, num_skipped = start
    validate = _validation(config, data, learner)
    with _open_metrics(output, step, gang=learner.gang) as metrics, checkpoints:
        while not data.is_over(step, position):
            # Both before the step, because they are of the weights that `step` steps have made.
            val_loss = validate(step)
            handover.maybe_hand_over(step)
            samples, following = data.take(position)
            report = learner.step(step, samples)
            report = replace(report, num_steps=data.expect_steps(step, following), val_loss=val_loss)
            _write_line(metrics, report.metrics())
            if learner.gang.is_leader:
                on_step(report)
                data.warn_of_losses(position, following, is_first=step == 0)
            num_skipped = num_skipped + 1 if report.was_skipped else 0
            _require_learning(config, step, num_skipped)
            step, position = step + 1, following
            is_last = data.is_over(step, position)
            checkpoints.maybe_save(step, position=position, num_skipped=num_skipped, is_last=is_last)
        val_loss = validate(step, is_last=True)
        if val_loss is not None:
            _write_line(metrics, {"step": step, "val/loss": val_loss})
    handover.maybe_hand_over(step, is_last=True)


def _require_learning(config: SFTConfig, step: int, num_skipped: int) -> None:
    """Raise InvalidStateError if `max_skipped_steps` steps in a row, up to step `step`, were skipped."""
    if num_skipped < config.max_skipped_steps:
        return
    raise InvalidStateError(
        f"the model cannot learn: the gradients of the {num_skipped} steps up to step {step} were not finite "
        f"(max_skipped_steps = {config.max_skipped_steps})",
        reason="TOO_MANY_SKIPPED_STEPS",
        remedy="see whether the start model's weights are finite; lower optim.lr, and begin under another run.name",
    )


class _Learner:
    """Computes losses of samples, and takes optimizer steps."""

    def __init__(
        self, config: SFTConfig, *, gang: Gang, model: nn.Module, optimizer: PolicyOptimizer, directory: Path
    ) -> None:
        """Take a model and its optimizer; try how rows can be packed, which is collective in a gang.

        `directory` has the start model, with which `[dpo]` compares.
        """
        self._config = config
        self.gang = gang
        self._model = model
        self._optimizer = optimizer
        dtype = resolve_compute_dtype(config.model, device=gang.device)
        validated = 0 if config.val is None else config.val.data.seq_len
        self._longest = max(config.data.seq_len, validated)
        self._packing = packing_of(model, config.pack, longest=self._longest, compute_dtype=dtype, gang=gang)
        self._preferences = Preferences.of(config, model=model, directory=directory, packing=self._packing, gang=gang)
        self._utilization = Utilization.of(
            model,
            tflops=config.peak_tflops,
            compute_dtype=dtype,
            device=gang.device,
            world_size=gang.world_size,
        )

    def step(self, step: int, samples: Sequence[TrainSample]) -> SFTStep:
        """Take optimizer step `step` on the mean loss of the samples' trained tokens or pairs; return its report.

        `samples` are those of all ranks. Collective. A gradient that is not finite changes nothing.
        """
        began = time.monotonic()
        micro_batches = self._micro_batches(samples)
        num_tokens, num_loss_tokens = self._counts(micro_batches)
        num_pairs, total = len(samples) // 2, 0.0
        set_learning(self._model, True)
        for at, micro_batch in enumerate(micro_batches):
            defer_resharding(self._model, is_last=at == len(micro_batches) - 1)
            loss = self._loss(micro_batch, num_loss_tokens if self._preferences is None else num_pairs)
            loss.backward()
            total += float(loss.detach())
        set_learning(self._model, False)
        report = self._optimizer.step(step)
        for failure in take_failures(self._model):
            logger.warning(failure, extra={"reason": "COMPILE_FAILED"})
        if report.was_skipped:
            logger.warning("the gradient was not finite; the step changed nothing", extra={"step": step})
        seconds, used = time.monotonic() - began, self._utilization
        return SFTStep(
            step=step,
            num_steps=step + 1,
            loss=self.gang.sum_of_data([total])[0],
            lr=report.lr,
            grad_norm=report.grad_norm,
            was_skipped=report.was_skipped,
            num_tokens=num_tokens,
            num_loss_tokens=num_loss_tokens,
            seconds=seconds,
            world_size=self.gang.world_size,
            preferences={} if self._preferences is None else self._preferences.take_metrics(num_pairs, gang=self.gang),
            mfu=None if used is None else used.mfu([each.num_tokens for each in samples], seconds=seconds),
        )

    @torch.no_grad()
    def loss(self, samples: Sequence[TrainSample]) -> float:
        """Return the mean loss of the trained tokens, or of the pairs, of all ranks' `samples`. Collective."""
        micro_batches = self._micro_batches(samples)
        if self._preferences is None:
            _, count = self._counts(micro_batches)
        else:
            count = len(samples) // 2
        loss = self.gang.sum_of_data([sum(float(self._loss(each, count)) for each in micro_batches)])[0]
        if self._preferences is not None:
            self._preferences.take_metrics(count, gang=self.gang)  # those of the next step begin anew
        return loss

    def _loss(self, micro_batch: MicroBatch, count: int) -> torch.Tensor:
        """Return a micro-batch's share of the mean loss over `count`, the trained tokens or the pairs of all ranks."""
        if self._preferences is not None:
            return self._preferences.loss(self._model, micro_batch, num_pairs=count)
        objective = Objective(loss_of=token_losses, config=LossConfig(), rl_divisor=0, num_ce_tokens=count)

        def loss_at(logprobs_BT: torch.Tensor, entropy_BT: torch.Tensor) -> torch.Tensor:
            return objective(micro_batch.loss_inputs(logprobs_BT))[1]

        return loss_at(*token_logprobs(self._model, micro_batch, one_pass=OnePass(loss_at)))

    def _counts(self, micro_batches: Sequence[MicroBatch]) -> tuple[int, int]:
        """Return the numbers of tokens and of trained tokens of the step over all ranks. Collective."""
        counts = [sum(each.num_tokens for each in micro_batches), sum(each.num_ce_tokens for each in micro_batches)]
        num_tokens, num_loss_tokens = self.gang.sum_of_data(counts)
        return int(num_tokens), int(num_loss_tokens)

    def _micro_batches(self, samples: Sequence[TrainSample]) -> list[MicroBatch]:
        """Return this rank's micro-batches of the samples of all ranks."""
        plan_of = plan_micro_batches if self._preferences is None else plan_pairs
        plan = plan_of(
            [sample.num_tokens for sample in samples],
            max_tokens=self._config.micro_batch_tokens,
            world_size=self.gang.layout.data_size,
            packing=self._packing,
        )
        return [
            build_micro_batch(
                [samples[index] for row in rows for index in row],
                rows=in_order(rows),
                seq_len=self._longest,
                device=self.gang.device,
            )
            for rows in plan[self.gang.data_rank]
        ]


def _validation(config: SFTConfig, data: FineTuningData, learner: _Learner) -> Callable[..., float | None]:
    """Return a function from a step to the validation loss before it; None where it is not due at that step.

    With `is_last` it is always due. The function is collective in a gang.
    """
    if config.val is None:
        return lambda step, is_last=False: None
    val, samples = config.val, data.validation_samples()

    def validate(step: int, is_last: bool = False) -> float | None:
        is_due = step % val.interval == 0 and (step > 0 or val.eval_on_start)
        return learner.loss(samples) if is_last or is_due else None

    return validate


def _open_metrics(output: Path, start: int, *, gang: Gang) -> IO[str]:
    """Open `metrics.jsonl` in `output` to append, after deleting lines from step `start` on.

    Other ranks than 0 get /dev/null.
    """
    if not gang.is_leader:
        return Path(os.devnull).open("w", encoding="utf-8")
    path = output / "metrics.jsonl"
    lines = path.read_text(errors="replace").splitlines() if start and path.is_file() else []
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text("".join(f"{line}\n" for line in lines if _is_before(line, start)))
    fresh.replace(path)  # at once: a kill must not lose the history
    return path.open("a", encoding="utf-8")


def _log_start(output: Path, step: int, *, saves: bool) -> None:
    """Log at which step an earlier run in this directory is continued, and how far it had come.

    Does nothing for a new run. `step` is the step of the checkpoint, 0 without one; `saves` says whether the config has
    checkpoints.
    """
    path = output / "metrics.jsonl"
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    steps = [step for step, metrics in map(_metrics_of, lines) if "loss/mean" in metrics]
    made = max(steps, default=-1) + 1
    if step:
        begins = f"fine-tuning continues after step {step} (checkpoint {step})"
    elif made:
        without = "the run had saved none yet" if saves else "the config has no [ckpt]"
        begins = f"fine-tuning begins at step 1 again, without a checkpoint ({without})"
    else:
        return
    again = f": the run had ended after step {made}, and steps {step + 1} to {made} are made again"
    logger.info(begins + (again if made > step else ""), extra={"step": step, "made": made})


def _is_before(line: str, start: int) -> bool:
    """Return whether a line of metrics is of a step before `start`, or only of a validation after `start` steps."""
    step, metrics = _metrics_of(line)
    return bool(metrics) and (step < start or (step == start and "loss/mean" not in metrics))


def _metrics_of(line: str) -> tuple[int, dict[str, Any]]:
    """Return the step of a line of metrics, and its metrics; 0 and {} for an incomplete line, which a kill leaves."""
    try:
        metrics = decode_json(line, what="a line of metrics.jsonl", reason="METRICS_CORRUPT")
    except CorruptObjectError:
        return 0, {}
    if not isinstance(metrics, dict) or not isinstance(step := metrics.get("step"), int):
        return 0, {}
    return step, metrics


def _write_line(file: IO[str], metrics: dict[str, float | int]) -> None:
    """Append metrics as one line to the file; NaN and infinities, which JSON lacks, become null."""
    file.write(json.dumps({name: value if math.isfinite(value) else None for name, value in metrics.items()}) + "\n")
    file.flush()


# `millrace-trainer sft --config FILE`: fine-tuning with a progress bar on a terminal and plain lines elsewhere.
#
# Progress goes to stderr; the last line on stdout is the directory of the model.

_ETA_STEPS = 20  # steps whose mean duration is taken: enough to be steady, few enough to follow a change


def run(path: Path, *, is_evaluated: bool = False) -> int:
    """Fine-tune as the resolved config in the file `path` says, print the model's directory, and return 0.

    `is_evaluated` says that the parent process, `millrace sft`, plays the config's evaluations: without it raises
    InvalidSpecError for a config with evaluations.
    """
    config = load_config(path)
    if config.eval is not None and not is_evaluated:
        problem = Violation(field="eval", message="is played by `millrace sft`, and this process trains alone")
        remedy = "leave it out and evaluate the model with `millrace eval`, or start `millrace sft`"
        raise InvalidSpecError([problem], remedy=remedy)
    setup("trainer", level=config.log.level, json_lines=config.log.json_logging)
    logger.info("fine-tuning begins", extra={"config": str(path), FILE_ONLY: True})
    disable_progress_bar()  # the bars of loading and saving a model would be between the lines of the steps
    gang = Gang.join()
    try:
        with shortage_named("fine-tune the model"), _progress() as show:

            def on_step(step: SFTStep) -> None:
                _log(step)
                show(step)

            directory = run_sft(config, gang=gang, on_step=on_step)
    finally:
        gang.leave()
    if gang.is_leader:
        print(directory)
    return 0


def load_config(path: Path) -> SFTConfig:
    """Load the resolved config in a JSON file; raise NotFoundError, or InvalidSpecError with every violation."""
    try:
        document = path.read_bytes()
    except OSError as error:
        raise NotFoundError(
            f"config {path} cannot be read: {error.strerror}",
            reason="CONFIG_NOT_FOUND",
            remedy="pass the resolved config that `millrace sft --dry-run` prints",
        ) from error
    return validate_document(document, SFTConfig, source=str(path))


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[SFTStep], None]]:
    """Yield a function that shows a step: in a progress bar on a terminal, else as a line on stderr."""
    if not sys.stderr.isatty():
        yield _Lines().show
        return
    columns = (
        TextColumn("sft"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}{task.fields[val]}  {task.fields[speed]:.0f} tokens/s  eta"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("sft", total=None, loss=float("nan"), val="", speed=0.0)

        def update(step: SFTStep) -> None:
            fields: dict[str, Any] = {"loss": step.loss, "speed": step.num_tokens / step.seconds}
            if step.val_loss is not None:
                fields["val"] = _val(step)
            bar.update(task, total=step.num_steps, completed=step.step + 1, **fields)

        yield update


class _Lines:
    """Prints one plain line per step, with the remaining time estimated from the last steps."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=_ETA_STEPS)
        self._last_s = time.monotonic()

    def show(self, step: SFTStep) -> None:
        """Print a line about a step, with the remaining time estimated from the time between calls."""
        now = time.monotonic()
        # The time before the first step includes loading, so only that step's own seconds count.
        self._ends.append(now - self._last_s if self._ends else step.seconds)
        self._last_s = now
        rest_s = sum(self._ends) / len(self._ends) * (step.num_steps - step.step - 1)
        print(
            f"step {step.step + 1}/{step.num_steps}  loss {step.loss:.4f}{_val(step)}  lr {step.lr:.2e}  "
            f"{step.num_tokens / step.seconds:.0f} tokens/s  eta {timedelta(seconds=round(rest_s))}",
            file=sys.stderr,
            flush=True,
        )


def _log(step: SFTStep) -> None:
    """Log a step to the log file only, because the terminal shows the progress."""
    fields: dict[str, Any] = {"step": step.step + 1, "loss": step.loss, "lr": step.lr, "seconds": step.seconds}
    if step.val_loss is not None:
        fields["val_loss"] = step.val_loss
    logger.info("step completed", extra={**fields, FILE_ONLY: True})


def _val(step: SFTStep) -> str:
    """Return the validation loss as text to append to a line; empty if there is none."""
    return "" if step.val_loss is None else f"  val {step.val_loss:.4f}"
