"""How a service ends: exit code and last words, the same for every service."""

from typing import NoReturn

import pytest

from millrace.errors import InvalidSpecError, UnavailableError, Violation
from millrace.processes import lifeline


def ended(run, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    with pytest.raises(SystemExit) as caught:
        lifeline.run_service(run)
    return caught.value.code, capsys.readouterr().err


def raising(error: BaseException):
    def run() -> NoReturn:
        raise error

    return run


def test_a_code_is_passed_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(lambda: None, capsys) == (0, "")
    assert ended(lambda: 3, capsys) == (3, "")


def test_an_error_of_ours_says_what_and_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    error = UnavailableError("Redis is away", remedy="start it")
    assert ended(raising(error), capsys) == (error.exit_code, "Error: Redis is away\n  remedy: start it\n")


def test_everything_that_is_wrong_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = [Violation(field=name, message="is not set", source="environment") for name in ("A", "B")]
    code, text = ended(raising(InvalidSpecError(wrong, remedy="set them")), capsys)
    assert code == InvalidSpecError.exit_code
    assert text == (
        "Error: 2 things are wrong:\n  - A: is not set [environment]\n  - B: is not set [environment]\n"
        "  remedy: set them\n"
    )
    one = ended(raising(InvalidSpecError(wrong[:1], remedy="set it")), capsys)[1]
    assert one == "Error: A: is not set [environment]\n  remedy: set it\n"


def test_a_defect_shows_where_and_ends_with_words(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = ended(raising(KeyError("x")), capsys)
    assert code == 1 and "Traceback" in text and text.endswith("Error: KeyError: 'x'\n")


def test_ctrl_c_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(raising(KeyboardInterrupt()), capsys) == (130, "")


def test_what_comes_before_may_refuse(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        lifeline.run_service(lambda: 0, before=raising(UnavailableError("no interpreter")))
    assert caught.value.code == UnavailableError.exit_code
    assert capsys.readouterr().err == "Error: no interpreter\n"
