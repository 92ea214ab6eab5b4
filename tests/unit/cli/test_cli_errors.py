"""Every error as a message with its remedy, and an exit code."""

import errno
import io
import os
import signal
from importlib import metadata

import pytest

from millrace import errors
from millrace.cli.errors import CliError, Interrupted, report
from millrace.errors import InvalidSpecError, Violation


def reported(error: BaseException, *, is_debug: bool = False) -> tuple[int, str]:
    out = io.StringIO()
    return report(error, is_debug=is_debug, stream=out), out.getvalue()


def test_one_violation():
    violation = Violation(field="max_steps", value="-1", message="must be at least 1", source="rl.toml:3")
    code, text = reported(InvalidSpecError([violation], remedy="correct it"))
    assert code == 2
    assert text == "Error: max_steps: must be at least 1 (got -1)\n  at: rl.toml:3\n  remedy: correct it\n"


def test_all_violations_at_once():
    violations = [
        Violation(field="orchestrator.batch_size", value="10", message="must be divisible by 4", source="rl.toml:7"),
        Violation(field="orchestrator.env", message="is missing"),
    ]
    code, text = reported(InvalidSpecError(violations))
    assert code == 2
    assert text.splitlines() == [
        "Error: 2 things are wrong:",
        "  - orchestrator.batch_size: must be divisible by 4 (got 10)  [rl.toml:7]",
        "  - orchestrator.env: is missing",
    ]


@pytest.mark.parametrize(
    ("cls", "code"),
    [
        (errors.NotFoundError, 3),
        (errors.AlreadyExistsError, 2),
        (errors.InvalidStateError, 2),
        (errors.ConflictError, 5),
        (errors.UnauthenticatedError, 4),
        (errors.PermissionDeniedError, 4),
        (errors.CapacityError, 5),
        (errors.UnavailableError, 5),
        (errors.InternalError, 1),
    ],
)
def test_exit_codes(cls, code):
    assert reported(cls("what", remedy="do this")) == (code, "Error: what\n  remedy: do this\n")


def test_what_the_client_alone_does_not_have_is_named_with_what_has_it():
    missing = ModuleNotFoundError("No module named 'psutil'", name="psutil")
    code, text = reported(missing)
    assert code == 2 and "needs the package psutil" in text and "millrace[local]" in text
    assert reported(metadata.PackageNotFoundError("torch"))[1].startswith(
        "Error: this command needs the package torch,"
    )
    assert "defect" in reported(ModuleNotFoundError("No module named 'millrace.gone'", name="millrace.gone"))[1]


def test_own_error_and_defects():
    assert reported(CliError("no", hint="so", exit_code=1)) == (1, "Error: no\n  remedy: so\n")
    code, text = reported(ValueError("odd"))
    assert code == 1 and text.startswith("Error: ValueError: odd\n") and "defect" in text


def test_interrupts_print_nothing():
    assert reported(Interrupted(signal.SIGINT)) == (130, "")
    assert reported(Interrupted(signal.SIGTERM)) == (143, "")
    assert reported(KeyboardInterrupt()) == (130, "")


def test_debug_adds_traceback_reason_and_request():
    error = errors.UnavailableError("gone", reason="DRAINING")
    error.request_id = "r-1"
    code, text = reported(error, is_debug=True)
    assert code == 5 and "UnavailableError: gone" in text and "reason: DRAINING   request: r-1" in text


@pytest.mark.parametrize(
    ("number", "code", "remedy"),
    [
        (errno.ENOTDIR, 2, "name another path"),
        (errno.EACCES, 2, "name another path"),
        (errno.EROFS, 2, "name another path"),
        (errno.ENOSPC, 5, "free disk space"),
        (errno.ECHILD, 1, "defect"),
    ],
)
def test_what_the_system_refuses_of_a_path_is_no_defect(number, code, remedy):
    found, text = reported(OSError(number, os.strerror(number), "/data/run"))
    assert found == code and "/data/run" in text.splitlines()[0] and remedy in text.splitlines()[1]
