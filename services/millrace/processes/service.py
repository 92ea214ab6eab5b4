"""How every service is run from its `main`: it holds its lifeline, and says in words what ended it."""

import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from millrace.errors import InvalidSpecError, MillraceError
from millrace.processes import lifeline


def run_service(run: Callable[[], int | None], *, before: Callable[[], object] | None = None) -> NoReturn:
    """Run it and exit with its code, or with that of the error that ended it (130 for Ctrl-C).

    `before` may become another program, which needs the lifeline itself.
    """
    try:
        if before is not None:
            before()
        lifeline.hold()
        code = run() or 0
    except MillraceError as error:
        report(error)
        code = error.exit_code
    except Exception as error:  # noqa: BLE001 - the process edge: the last line says in words what the traceback means
        traceback.print_exc()
        print(f"Error: {type(error).__name__}: {error}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


def report(error: MillraceError) -> None:
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
