"""`millrace-trainer sft --config FILE`: fine-tuning with a progress bar on a terminal and plain lines elsewhere.

Progress goes to stderr; the last line on stdout is the directory of the model.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers.utils.logging import disable_progress_bar

from millrace.config.load import validate_document
from millrace.config.sections.sft import SFTConfig
from millrace.errors import NotFoundError
from millrace.telemetry.logging import getLogger, setup
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.sft.fine_tune import SFTStep, run_sft

logger = getLogger(__name__)


def run(path: Path) -> int:
    """Fine-tune as the resolved config in `path` says; returns the exit code."""
    config = load_config(path)
    setup("trainer", level=config.log.level, json_lines=config.log.json_logging)
    if config.wandb is not None:
        logger.warning("[wandb] is set, but the export to Weights & Biases is not there yet; see metrics.jsonl")
    disable_progress_bar()  # the bars of loading and saving a model would stand between the lines of the steps
    gang = Gang.join()
    try:
        with _progress() as on_step:
            directory = run_sft(config, gang=gang, on_step=on_step)
    finally:
        gang.leave()
    if gang.is_leader:
        print(directory)
    return 0


def load_config(path: Path) -> SFTConfig:
    """The config of a JSON file; InvalidSpecError lists everything that is wrong."""
    try:
        return validate_document(path.read_bytes(), SFTConfig, source=str(path))
    except OSError as error:
        raise NotFoundError(
            f"config {path} cannot be read: {error.strerror}",
            reason="CONFIG_NOT_FOUND",
            remedy="pass the resolved config that `millrace sft --dry-run` prints",
        ) from error


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[SFTStep], None]]:
    """A callback that shows steps."""
    if not sys.stderr.isatty():
        yield _print_line
        return
    columns = (
        TextColumn("sft"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}  {task.fields[speed]:.0f} tokens/s"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("sft", total=None, loss=float("nan"), speed=0.0)

        def update(step: SFTStep) -> None:
            speed = step.num_tokens / step.seconds
            bar.update(task, total=step.num_steps, completed=step.step + 1, loss=step.loss, speed=speed)

        yield update


def _print_line(step: SFTStep) -> None:
    """One plain line per step."""
    print(
        f"step {step.step + 1}/{step.num_steps}  loss {step.loss:.4f}  lr {step.lr:.2e}  "
        f"{step.num_tokens / step.seconds:.0f} tokens/s",
        file=sys.stderr,
        flush=True,
    )
