"""The command line's own error class, and the function that prints every error.

Exit codes: 0 ok, 1 a run failed or a defect, 2 usage, 3 not found, 4 denied, 5 unavailable, 130 Ctrl-C, 143 SIGTERM.
"""

import signal
import sys
import traceback
from typing import TextIO

from millrace.errors import InvalidSpecError, MillraceError, Violation, of_system

EXIT_FAILED = 1
EXIT_USAGE = 2


class CliError(Exception):
    """A command cannot go on. Has the problem, its place, the remedy and the exit code."""

    def __init__(
        self, message: str, *, hint: str | None = None, exit_code: int = EXIT_USAGE, place: str | None = None
    ) -> None:
        """Create the error. `hint` is printed as the remedy, `place` as the location of the problem."""
        super().__init__(message)
        self.message = message
        self.place = place
        self.hint = hint
        self.exit_code = exit_code


class Interrupted(Exception):
    """The user or the system asked the command to end."""

    def __init__(self, number: signal.Signals) -> None:
        """Create the error; the exit code is 128 + `number`, the signal's number."""
        super().__init__(number.name)
        self.exit_code = 128 + number


def report(error: BaseException, *, is_debug: bool, stream: TextIO | None = None) -> int:
    """Print an error with its place and remedy, and return the exit code of the command.

    `stream` None is standard error. With `is_debug`, the traceback is printed, too. An interruption prints nothing
    else.
    """
    out = stream or sys.stderr
    if is_debug:
        traceback.print_exception(error, file=out)
    match of_system(error) or error:
        case Interrupted() | KeyboardInterrupt():
            return getattr(error, "exit_code", 130)
        case InvalidSpecError() as known:
            _print_violations(known, out)
        case MillraceError() as known:
            print(f"Error: {known.message}", file=out)
            _print_remedy(known.remedy, out)
        case CliError() as known:
            print(f"Error: {known.message}", file=out)
            if known.place:
                print(f"  at: {known.place}", file=out)
            _print_remedy(known.hint, out)
        # A missing module of Millrace itself is a defect, and is reported as one below.
        case ModuleNotFoundError(name=str(name)) if not name.startswith("millrace"):
            print(
                f"Error: this command needs the package {name.partition('.')[0]}, which is not installed here", file=out
            )
            remedy = (
                'pip install "millrace[local]" (`millrace[client]` alone submits runs to a server and follows them)'
            )
            _print_remedy(remedy, out)
            return EXIT_USAGE
        case _:
            print(f"Error: {type(error).__name__}: {error}", file=out)
            _print_remedy("this is a defect of Millrace; --debug shows where it happened", out)
            return EXIT_FAILED
    if is_debug and isinstance(known, MillraceError):
        print(f"  reason: {known.reason}   request: {known.request_id or '-'}", file=out)
    return known.exit_code


def _print_violations(error: InvalidSpecError, out: TextIO) -> None:
    """Print the violations of an InvalidSpecError, each with its place, and the remedy."""
    if len(error.violations) == 1:
        print(f"Error: {_line(error.violations[0])}", file=out)
        if error.violations[0].source:
            print(f"  at: {error.violations[0].source}", file=out)
    else:
        print(f"Error: {len(error.violations)} things are wrong:", file=out)
        for violation in error.violations:
            where = f"  [{violation.source}]" if violation.source else ""
            print(f"  - {_line(violation)}{where}", file=out)
    _print_remedy(error.remedy, out)


def _line(violation: Violation) -> str:
    """Return a violation as text: field, message, and the value that was given."""
    got = "" if violation.value is None else f" (got {violation.value})"
    return f"{violation.field}: {violation.message}{got}"


def _print_remedy(text: str | None, out: TextIO) -> None:
    if text:
        print(f"  remedy: {text}", file=out)
