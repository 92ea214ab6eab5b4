"""`millrace env check`: real environments of both generations, tried before a run needs them."""

import contextlib
import json
import os
import pty
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from millrace.cli.main import main

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("environments_on_path")]


CONFIG = """
[model]
name = "m"
[orchestrator]
batch_size = 4
rollouts_per_example = 2
[[orchestrator.env]]
id = "faulty-v0"
"""


def check(*arguments: str, environ: dict[str, str] | None = None, stderr: int = subprocess.PIPE) -> Any:
    command = [sys.executable, "-m", "millrace.cli", "env", "check", *arguments]
    return subprocess.run(
        command,
        env={**os.environ, **(environ or {})},
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        timeout=300,
        check=False,
    )


def check_many(*calls: tuple[str, ...]) -> list[Any]:
    """Return side by side: each takes the seconds of an import."""
    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(lambda call: check(*call), calls))


def _read_all(terminal: int) -> str:
    """Return what is drawn until nobody can write there any more."""
    data = b""
    with contextlib.suppress(OSError):
        while part := os.read(terminal, 1 << 16):
            data += part
    os.close(terminal)
    return data.decode()


@pytest.mark.parametrize("env", ["faulty-v0", pytest.param("faulty-v1", marks=pytest.mark.long)])
def test_one_task_is_played_and_shown(env: str) -> None:
    done = check(env, "--reply", "forty-two", "-o", "json")
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert (shown["status"], shown["reward"], shown["task"], shown["error"]) == ("ok", 1.0, 0, None)
    assert {k: shown["messages"][0][k] for k in ("role", "content")} == {"role": "user", "content": "hello"}
    assert shown["messages"][1]["content"] == "forty-two" and shown["num_turns"] >= 1
    assert shown["api"] == env[-2:] and shown["num_train"] > 5 and shown["load_seconds"] > 0
    lines = done.stderr.splitlines()
    assert lines[0] == f"loading environment {env} ..." and "playing task 0 with the stub model ..." in lines
    assert any(line.startswith("loaded in ") and "training tasks" in line for line in lines)


@pytest.mark.long
def test_what_is_wrong_with_it_is_named() -> None:
    modes = json.dumps({"modes": ["reward_raises"]})
    raising, failing, missing, beyond, keyless = check_many(
        ("faulty-v0", "--args", modes),
        ("faulty-v0", "--arg", "load_raises=true"),
        ("no-such-env",),
        ("faulty-v0", "--args", modes, "--task", "9"),
        ("faulty-v0", "--base-url", "http://127.0.0.1:1/v1", "--model", "m", "--api-key-var", "NO_SUCH_KEY"),
    )
    assert raising.returncode == 1
    assert "error   RewardError: reward function 'one' raised ValueError: reward bug" in raising.stdout
    assert 'in one: raise ValueError("reward bug")' in raising.stdout and "assistant:" in raising.stdout
    assert failing.returncode == 2 and "KeyError: 'no such thing while loading' (at " in failing.stderr
    assert missing.returncode == 2 and "no Python module 'no_such_env'" in missing.stderr
    assert "env-workers" not in missing.stderr, "where a worker works is no place to put anything"
    assert "pip install -e DIRECTORY" in missing.stderr, "one of that name may be anybody's package"
    assert beyond.returncode == 2 and "the environment has 1 training tasks (got 9)" in beyond.stderr
    assert keyless.returncode == 2 and "start it with NO_SUCH_KEY=<the endpoint's API key>" in keyless.stderr
    assert all("Traceback" not in done.stderr for done in (raising, failing, missing, beyond, keyless))


@pytest.mark.long
def test_a_terminal_shows_progress_and_load_only_plays_nothing() -> None:
    ours, theirs = pty.openpty()
    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(_read_all, ours)
        done = check("faulty-v0", "--load-only", environ={"TERM": "xterm"}, stderr=theirs)
        os.close(theirs)
        drawn = reading.result()
    assert done.returncode == 0 and done.stdout == "environment faulty-v0 (API v0) can be loaded\n"
    assert "loading environment faulty-v0" in drawn and "\x1b[" in drawn and "loaded in" in drawn


@pytest.mark.long
def test_what_an_environment_cannot_start_with_is_told_as_why_it_is_not_loaded() -> None:
    args = json.dumps({"env": {"is_served": False, "trained": ["white"]}})
    done = check("duel-v1", "--load-only", "--args", args)
    assert done.returncode == 2
    assert "RuntimeError: the board is not there" in done.stderr and "WorkerDied" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--args", "[1]"), ("--args is not a JSON object", "--args '{")),
        (("--arg", "x"), ("--arg 'x' is not KEY=VALUE",)),
        (("--base-url", "http://e/v1"), ("--base-url needs --model",)),
    ],
)
def test_arguments_that_are_none_are_refused_at_once(
    arguments: tuple[str, ...], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["env", "check", "faulty-v0", *arguments]) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in words)


@pytest.mark.long
def test_a_config_is_checked_with_its_environments(tmp_path: Path) -> None:
    """`millrace rl --dry-run --check-environments`, without a server: in a worker on this machine."""
    good, bad = tmp_path / "good.toml", tmp_path / "bad.toml"
    for path, args in ((good, ""), (bad, "load_raises = true")):
        path.write_text(CONFIG + f"args = {{{args}}}\n")
    command = [sys.executable, "-m", "millrace.cli", "rl", "--dry-run", "--check-environments", "@"]

    def run(path: Path) -> Any:
        return subprocess.run([*command, str(path)], capture_output=True, text=True, timeout=300, check=False)

    with ThreadPoolExecutor(2) as threads:
        loaded, refused = threads.map(run, (good, bad))
    assert loaded.returncode == 0, loaded.stderr
    assert "loaded in" in loaded.stderr and json.loads(loaded.stdout)["orchestrator"]["env"][0]["id"] == "faulty-v0"
    assert refused.returncode == 2 and refused.stdout == ""
    assert "environment 'faulty-v0' could not be loaded: KeyError: 'no such thing while loading'" in refused.stderr
    assert refused.stderr.count("no such thing while loading") == 1, "said once"


@pytest.mark.parametrize("command", ["sft", "inference"])
def test_the_check_is_refused_where_it_would_have_no_effect(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--model.name", "m", "--check-environments", "--dry-run"]) == 2
    assert "--check-environments is for `millrace rl`" in capsys.readouterr().err
