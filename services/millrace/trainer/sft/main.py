"""`millrace-trainer sft --config FILE`: fine-tuning with a progress bar on a terminal and plain lines elsewhere.

Progress goes to stderr; the last line on stdout is the directory of the model.
"""

import contextlib
import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers.utils.logging import disable_progress_bar

from millrace.config.load import validate_document
from millrace.config.sections.sft import SFTConfig
from millrace.errors import InvalidSpecError, NotFoundError, Violation
from millrace.models.torch_support import shortage_named
from millrace.telemetry.logging import FILE_ONLY, setup
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.sft.fine_tune import SFTStep, run_sft

logger = logging.getLogger(__name__)

_ETA_STEPS = 20  # steps whose mean duration is taken: enough to be steady, few enough to follow a change


def run(path: Path, *, is_evaluated: bool = False) -> int:
    """Fine-tune as the resolved config in `path` says, print the model's directory, and return 0.

    Raises InvalidSpecError for a config with evaluations unless `is_evaluated`, by which `millrace sft` says that it
    plays them.
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
    """Load the config of a JSON file; raise NotFoundError, or InvalidSpecError with every violation."""
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
    """Provide a callback that shows a step: in a progress bar on a terminal, else as a line on stderr."""
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
        """Print a step. Its duration, for the estimate, is the time since the previous call."""
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
    return "" if step.val_loss is None else f"  val {step.val_loss:.4f}"
