"""`millrace orchestrator|trainer|env-server`: what is checked, and the process that takes this one's place."""

import json
import os
import subprocess
import sys

import pytest

from millrace.cli.main import main
from millrace.cli.session.service_start import SERVICES, load_service, options_help, start_service
from millrace.errors import InvalidSpecError


@pytest.fixture
def started(monkeypatch):
    """The processes that would have taken this one's place."""
    found: list[tuple[str, list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execve", lambda *arguments: found.append(arguments))
    return found


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("orchestrator", "millrace.orchestrator.main"),
        ("trainer", "millrace.trainer.main"),
        ("env-server", "millrace.env_server.main"),
    ],
)
def test_a_service_starts_with_its_place(name, module, started):
    argv = ["--listen", "127.0.0.1:0", "--store-url", "file:///tmp/x", "--log-level", "debug"]
    loaded = load_service(SERVICES[name], argv, {"KEPT": "1"})
    start_service(SERVICES[name], loaded, {"KEPT": "1"})
    [(python, command, environ)] = started
    assert python == sys.executable and command[1:] == ["-m", module]
    assert environ["MILLRACE_LISTEN"] == "127.0.0.1:0" and environ["MILLRACE_STORE_URL"] == "file:///tmp/x"
    assert environ["MILLRACE_LOG_LEVEL"] == "debug" and environ["KEPT"] == "1"


def test_a_file_is_checked_and_its_place_is_said(tmp_path, monkeypatch, started, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.toml").write_text("max_steps = 5\n[optim]\nlr = 1e-5\n[log]\nlevel = 'debug'\n")
    loaded = load_service(SERVICES["trainer"], ["@", "train.toml", "--optim.lr", "1e-4"], {})
    assert loaded.config.trainer.optim.lr == 1e-4 and loaded.config.max_steps == 5
    start_service(SERVICES["trainer"], loaded, {})
    assert started[0][2]["MILLRACE_LOG_LEVEL"] == "DEBUG"
    assert "millrace run submit --trainer @ train.toml" in capsys.readouterr().err
    with pytest.raises(InvalidSpecError, match=r"trainer.optim.lrr: unknown key"):
        load_service(SERVICES["trainer"], ["@", "train.toml", "--optim.lrr", "1"], {})


@pytest.mark.parametrize("flag", ["--resume", "--follow", "--plain", "--name=x", "--server=127.0.0.1:1"])
@pytest.mark.parametrize("command", ["orchestrator", "trainer", "env-server", "inference"])
def test_what_belongs_to_a_run_is_refused(command, flag, capsys):
    assert main([command, flag, "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert f"millrace {command} has no {flag.partition('=')[0]}: it belongs to a run" in said and "millrace rl" in said


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "millrace.cli", *arguments], capture_output=True, text=True, timeout=60
    )


@pytest.mark.computes
def test_the_section_is_printed_and_the_help_names_every_flag():
    done = run("trainer", "--optim.lr", "1e-4", "--dry-run")
    assert done.returncode == 0 and json.loads(done.stdout)["trainer"]["optim"]["lr"] == 1e-4
    for name in SERVICES:
        text = run(name, "--help").stdout
        for flag in ("--listen", "--redis-url-file", "--store-url", "--metrics-listen", "docs/configuration.md"):
            assert flag in text and flag in options_help(name)
