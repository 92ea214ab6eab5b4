"""What is said when no orchestrator answers, by why it does not."""

import socket

import pytest

from millrace.cli.connection import SILENT_REMEDY, START_REMEDY, WAIT_REMEDY, explain_unreachable, token_given
from millrace.errors import UnauthenticatedError, UnavailableError
from millrace_testing.local.stack_files import write_stack


def remedy(address: str, reason: str, directory) -> str | None:
    with pytest.raises(UnavailableError) as caught, explain_unreachable("--server", address, directory=directory):
        raise UnavailableError("gone", reason=reason, remedy="own")
    return caught.value.remedy


@pytest.fixture
def port():
    """Yield a port that is bound, so that nobody else takes it, and refuses connections until it listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound


def test_refused(port, tmp_path):
    address = f"127.0.0.1:{port.getsockname()[1]}"
    assert remedy(address, "UNREACHABLE", tmp_path) == START_REMEDY
    write_stack(tmp_path, "127.0.0.1:1")
    assert remedy(address, "UNREACHABLE", tmp_path) == START_REMEDY
    write_stack(tmp_path, address)
    assert remedy(address, "UNREACHABLE", tmp_path) == START_REMEDY + WAIT_REMEDY


@pytest.mark.parametrize("reason", ["UNREACHABLE", "DEADLINE_EXCEEDED"])
def test_listens_and_does_not_answer(port, tmp_path, reason):
    port.listen()
    assert remedy(f"127.0.0.1:{port.getsockname()[1]}", reason, tmp_path / "none") == SILENT_REMEDY


def test_what_a_server_said_itself_stays(port, tmp_path):
    assert remedy(f"127.0.0.1:{port.getsockname()[1]}", "DRAINING", tmp_path / "none") == "own"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"MILLRACE_TOKEN_FILE": "mine.token"}, "it does not accept the one in mine.token"),
        ({"MILLRACE_TOKEN": "secret"}, "it does not accept the one in MILLRACE_TOKEN"),
        ({}, "none was given"),
    ],
)
def test_a_token_that_is_refused_is_told_with_its_place(given, said, monkeypatch):
    for name in ("MILLRACE_TOKEN_FILE", "MILLRACE_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    explained = explain_unreachable("--server", "127.0.0.1:7001", token=token_given())
    with pytest.raises(UnauthenticatedError) as caught, explained:
        raise UnauthenticatedError("a valid bearer token is required", remedy="give one")
    assert said in caught.value.message and "by 127.0.0.1:7001 (the address is from --server)" in caught.value.message
    assert caught.value.remedy == "give one" and "secret" not in caught.value.message
