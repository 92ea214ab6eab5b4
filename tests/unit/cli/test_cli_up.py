"""What `millrace up` says as it stops: the command that starts the same stack again."""

import shlex

import pytest

from millrace.cli.commands.up import restart_command, up


@pytest.mark.parametrize(
    "line",
    [
        [],
        ["--dir", "a place", "--listen", "127.0.0.1:7001"],
        ["--http-port", "8000", "--dashboard-port", "7002", "--log-level", "debug", "--engine", "vllm"],
        ["--no-restart", "--no-liveness"],
        ["--restart", "--liveness"],
    ],
    ids=" ".join,
)
def test_the_command_that_starts_the_stack_again_has_every_option_of_the_line(
    line: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_ENGINE", "embedded")
    with up.make_context("up", list(line)) as context:
        assert restart_command(context) == ["millrace", "up", *line]


def test_the_command_can_be_pasted() -> None:
    with up.make_context("up", ["--dir", "my runs"]) as context:
        assert shlex.join(restart_command(context)) == "millrace up --dir 'my runs'"
