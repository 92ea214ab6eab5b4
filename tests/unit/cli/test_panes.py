"""`millrace run panes`: a pane for each component, in a real tmux where there is one."""

import os
import shutil
import subprocess

import pytest

from millrace.cli.commands.run import group
from millrace.cli.main import main


def test_without_tmux_it_says_what_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(group.shutil, "which", lambda _: None)
    assert main(["run", "panes", "alpha"]) == 2
    said = capsys.readouterr().err
    assert "tmux is not installed" in said and "millrace run logs alpha --component trainer -f" in said


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed here")
def test_a_pane_for_the_steps_and_one_for_each_component(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TMUX_TMPDIR", str(tmp_path))
    monkeypatch.setenv("MILLRACE_SERVER", "127.0.0.1:1")
    monkeypatch.chdir(tmp_path)
    name = f"alpha.{os.getpid()}"
    session = name.replace(".", "-")
    try:
        for _ in range(2):  # the second finds the session of the first
            assert main(["run", "panes", name, "--detach", "--level", "warning"]) == 0
            assert capsys.readouterr().out == f"tmux attach-session -t millrace-{session}\n"
        words = ["tmux", "list-panes", "-t", f"millrace-{session}", "-F", "#{pane_start_command}"]
        started = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
        assert len(started) == 5 and f"run watch {name} --plain --server 127.0.0.1:1" in started[0]
        for component in ("orchestrator", "env-server", "inference", "trainer"):
            shown = f"run logs {name} --component {component} -f --level warning --server 127.0.0.1:1"
            assert any(shown in line for line in started), component
    finally:
        subprocess.run(["tmux", "kill-session", "-t", f"millrace-{session}"], capture_output=True, check=False)
