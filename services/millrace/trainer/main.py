"""The trainer's process: `python -m millrace.trainer.main`, or `millrace-trainer`.

Without arguments it is a worker that waits for runs. `sft --config FILE` fine-tunes a model on prompts and completions
as a resolved SFT config (JSON) says, and exits; `bench --config FILE` takes steps on fake samples.
"""

import argparse
import os
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import NoReturn

from millrace.processes.installed import require_tried
from millrace.processes.lifeline import run_service
from millrace.telemetry.logging import setup
from millrace.telemetry.settings import Settings

ALLOCATOR_VARIABLE = "PYTORCH_ALLOC_CONF"
"""The variable that torch's allocators read; torch 2.13 reads the older names `OLDER_ALLOCATOR_VARIABLES` too."""
OLDER_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
ALLOCATOR_DEFAULT = "expandable_segments:True"
"""Rows of many lengths leave holes between segments of a fixed size. With expandable segments memory of a GPU cannot be
shared by CUDA IPC, which is not needed: snapshots for the publishing process are copies in host memory."""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the trainer's subcommand, or the worker without one; exit with 0, an error's code, or 130 for Ctrl-C.

    `argv` are the arguments after the program's name; None takes those of the process. Sets the allocator's variable
    before torch is imported.
    """
    arguments = _parser().parse_args(argv)
    prefer_expandable_segments(os.environ)
    jobs = {"sft": lambda: _sft(arguments.config, is_evaluated=arguments.evaluated)}
    jobs["bench"] = lambda: _bench(arguments.config)
    run_service(jobs.get(arguments.command, _worker), before=lambda: require_tried("trainer"))


def prefer_expandable_segments(environ: MutableMapping[str, str]) -> None:
    """Set PYTORCH_ALLOC_CONF in `environ` to expandable segments, unless a variable of the allocator is set.

    Call it before torch is imported.
    """
    if not any(name in environ for name in (ALLOCATOR_VARIABLE, *OLDER_ALLOCATOR_VARIABLES)):
        environ[ALLOCATOR_VARIABLE] = ALLOCATOR_DEFAULT


def _parser() -> argparse.ArgumentParser:
    """Make the parser of the trainer's arguments."""
    parser = argparse.ArgumentParser(prog="millrace-trainer", description="Train runs, or fine-tune one model.")
    commands = parser.add_subparsers(dest="command")
    sft = commands.add_parser("sft", help="supervised fine-tuning from a resolved config")
    sft.add_argument("--config", type=Path, required=True, help="the resolved SFT config, a JSON file")
    sft.add_argument("--evaluated", action="store_true", help="`millrace sft` plays the evaluations of the config")
    bench = commands.add_parser("bench", help="steps on fake samples, timed")
    bench.add_argument("--config", type=Path, required=True, help="what `millrace trainer --bench` writes, a JSON file")
    return parser


def _worker() -> int:
    """Train the runs that the orchestrator assigns, as the environment's settings say; return the exit code."""
    settings = Settings.from_env(os.environ, required=["redis_url", "store_url", "orchestrator"])
    setup("trainer", level=settings.log_level, json_lines=settings.log_json)
    from millrace.trainer.serve import run  # torch is imported here, after the settings are known to be good

    return run(settings)


def _sft(path: Path, *, is_evaluated: bool) -> int:
    """Fine-tune as the resolved config in the file `path` says; return the exit code.

    With `is_evaluated` the parent process, `millrace sft`, plays the config's evaluations.
    """
    from millrace.trainer.sft.fine_tune import run

    return run(path, is_evaluated=is_evaluated)


def _bench(path: Path) -> int:
    """Measure training steps as the file `path` says; return the exit code."""
    from millrace.trainer.bench import run

    return run(path)


if __name__ == "__main__":
    main()
