"""The trainer's process: `python -m millrace.trainer.main`, or `millrace-trainer`.

Without arguments it is a worker that waits for runs. `sft --config FILE` fine-tunes a model on prompts and completions
as a resolved SFT config (JSON) says, and exits.
"""

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from millrace.errors import InvalidSpecError, MillraceError
from millrace.processes import lifeline
from millrace.telemetry.logging import setup
from millrace.telemetry.settings import Settings


def main(argv: Sequence[str] | None = None) -> None:
    """Runs and exits with the code of the error that ended it (0, 130 for Ctrl-C)."""
    arguments = _parser().parse_args(argv)
    lifeline.hold()
    try:
        code = _sft(arguments.config) if arguments.command == "sft" else _worker()
    except MillraceError as error:
        _report(error)
        code = error.exit_code
    except Exception as error:  # noqa: BLE001 - the process edge: the last line says in words what the traceback means
        traceback.print_exc()
        print(f"Error: {type(error).__name__}: {error}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


def _report(error: MillraceError) -> None:
    """Print an error as the `millrace` command prints its own: what is wrong, then what to do."""
    violations = error.violations if isinstance(error, InvalidSpecError) else ()
    if len(violations) > 1:
        print(f"Error: {len(violations)} things are wrong:", file=sys.stderr)
        for violation in violations:
            print(f"  - {violation}", file=sys.stderr)
    else:
        print(f"Error: {violations[0] if violations else error.message}", file=sys.stderr)
    if error.remedy:
        print(f"  remedy: {error.remedy}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="millrace-trainer", description="Train runs, or fine-tune one model.")
    commands = parser.add_subparsers(dest="command")
    sft = commands.add_parser("sft", help="supervised fine-tuning from a resolved config")
    sft.add_argument("--config", type=Path, required=True, help="the resolved SFT config, a JSON file")
    return parser


def _worker() -> int:
    settings = Settings.from_env(os.environ, required=["redis_url", "store_url", "orchestrator"])
    setup("trainer", level=settings.log_level, json_lines=settings.log_json)
    from millrace.trainer.serve import run  # torch is imported here, after the settings are known to be good

    return run(settings)


def _sft(path: Path) -> int:
    from millrace.trainer.sft_main import run

    return run(path)


if __name__ == "__main__":
    main()
