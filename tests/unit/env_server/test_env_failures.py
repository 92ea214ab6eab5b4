"""What learns of an exception of an environment: its own lines, in our spelling, bounded."""

import importlib
import sys
from collections.abc import Iterator
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from millrace.env_server.adapters.failures import (
    describe_error,
    frames_of,
    is_engine_fault,
    our_spelling,
    remember_code,
    remember_roles,
    role_key,
)

CODE = """
import json

def parse(text):
    return json.loads(text)

def wrapped(text):
    try:
        parse(text)
    except ValueError as error:
        raise KeyError("no answer") from error

def deep(n):
    return 1 / 0 if n == 0 else deep(n - 1)

class Unprintable(Exception):
    def __str__(self):
        return 1 / 0

def unprintable():
    raise Unprintable
"""


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    (tmp_path / "its_code.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = spec_from_file_location("its_code", tmp_path / "its_code.py")
    assert spec is not None
    remember_code(spec)
    yield importlib.import_module("its_code")
    del sys.modules["its_code"]


def raised(function, *args: object) -> BaseException:
    try:
        function(*args)
    except Exception as error:  # noqa: BLE001 - whatever it raises is looked at
        return error
    raise AssertionError("nothing was raised")


def test_the_environments_lines_and_not_those_of_what_it_calls(code: ModuleType) -> None:
    """json.loads raised it, and this test called it."""
    assert frames_of(raised(code.parse, "{")) == "its_code.py:5 in parse: return json.loads(text)"
    assert (
        "(at " in describe_error(raised(code.parse, "{"))[1]
        and "its_code.py:5 in parse)" in describe_error(raised(code.parse, "{"))[1]
    )


def test_the_first_error_of_a_chain_counts(code: ModuleType) -> None:
    lines = frames_of(raised(code.wrapped, "{")).splitlines()
    assert lines == ["its_code.py:9 in wrapped: parse(text)", "its_code.py:5 in parse: return json.loads(text)"]


def test_frames_are_bounded(code: ModuleType) -> None:
    text = frames_of(raised(code.deep, 400))
    assert len(text.splitlines()) <= 4 and len(text) <= 1000 and "in deep" in text


def test_an_error_without_lines_of_the_environment(code: ModuleType) -> None:
    assert "its_code" not in frames_of(raised(int, "x"))
    assert frames_of("no traceback at all") == ""


def test_an_error_whose_text_cannot_be_made(code: ModuleType) -> None:
    kind, text, _ = describe_error(raised(code.unprintable))
    assert kind == "Unprintable" and "its text cannot be made: ZeroDivisionError" in text


def test_an_engines_fault_is_found_behind_what_wraps_it() -> None:
    class AnswerError(Exception):
        status_code = 503

    def wrapped() -> None:
        try:
            raise AnswerError
        except AnswerError as error:
            raise ValueError("model call failed") from error

    assert is_engine_fault(raised(wrapped))
    AnswerError.status_code = 400
    assert not is_engine_fault(raised(wrapped))


@pytest.mark.parametrize(
    ("text", "ours"),
    [
        ("pass --env.agent.timeout.setup", "pass args.env.agent.timeout.setup"),
        ("a harness belongs to a seat: --env.agent.harness.* on the env", "args.env.agent.harness.* on the env"),
        ("Pass --env.taskset.ignore-dockerfile to", "Pass args.ignore_dockerfile to"),
        ("pass --taskset.ignore-separate-verifier.", "pass args.ignore_separate_verifier."),
        ("--env.<role>.max-turns", "args.env.<role>.max_turns"),
        ("pip install --upgrade x", "pip install --upgrade x"),
    ],
)
def test_flags_of_the_library_are_keys_of_ours(text: str, ours: str) -> None:
    assert ours in our_spelling(text)


@pytest.fixture
def asks_for_an_env() -> Iterator[None]:
    """Yield the environment of this worker has an option `env` itself."""
    remember_roles("args.millrace.env")
    yield
    remember_roles("args.env")


@pytest.mark.usefixtures("asks_for_an_env")
def test_keys_of_roles_stand_where_the_environment_leaves_room_for_them() -> None:
    assert our_spelling("pass --env.agent.timeout.setup") == "pass args.millrace.env.agent.timeout.setup"
    assert our_spelling("pass --env.taskset.n") == "pass args.n"
    assert role_key("agent.timeout.rollout") == "args.millrace.env.agent.timeout.rollout"
