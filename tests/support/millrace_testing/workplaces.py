"""The demo's commands, run as a user runs them, in a working directory of the test's own (e2e and chaos tests)."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, ClassVar

import psutil
import pytest

from millrace.local.directory import free_ports
from millrace_testing import processes
from millrace_testing.repository import REPOSITORY

EXAMPLES = REPOSITORY / "examples" / "reverse_text"
COMMAND_TIMEOUT_S = 280
STOP_TIMEOUT_S = 30
# Every process of a workplace inherits it; it tells them from those of another test.
MARKER = "E2E_WORKPLACE"


@dataclass
class Workplace:
    """A directory in which `millrace` commands run; relative paths of the examples end up in it."""

    path: Path
    rl_toml: ClassVar[str] = str(EXAMPLES / "rl.toml")

    def popen(self, *argv: str, stdout: int | IO[str] = subprocess.PIPE, **options) -> subprocess.Popen[str]:
        env = {name: value for name, value in os.environ.items() if not name.startswith("MILLRACE_")}
        more = options.pop("env", {})
        # A test's own modules stand in front of the code that is tested, wherever that was found.
        search = os.pathsep.join(filter(None, [more.get("PYTHONPATH"), env.get("PYTHONPATH")]))
        env |= {"OMP_NUM_THREADS": "1", MARKER: str(self.path), **more, **({"PYTHONPATH": search} if search else {})}
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        return subprocess.Popen(
            [*self.program(), *argv],
            cwd=self.path,
            env=env,
            text=True,
            stdout=stdout,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            **options,
        )

    def program(self) -> list[str]:
        """Return the command line of the Python interpreter to use."""
        return [sys.executable]

    def attempt(self, *argv: str, timeout_s: float = COMMAND_TIMEOUT_S, **options) -> tuple[int, str]:
        """Run a command to its end, good or bad; returns the exit code and everything that was printed."""
        process = self.popen(*argv, **options)
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            output, _ = process.communicate(timeout=STOP_TIMEOUT_S)
            pytest.fail(f"{argv} did not end within {timeout_s} s:\n{output[-5000:]}")
        return process.returncode, output

    def run(self, *argv: str, **options) -> str:
        code, output = self.attempt(*argv, **options)
        if code != 0:
            pytest.fail(f"{argv} ended with {code}:\n{output[-5000:]}")
        return output

    def millrace(self, *argv: str, **options) -> str:
        return self.run("-m", "millrace.cli", *argv, **options)

    def warm_up(self, seed: int) -> None:
        """Make the tiny model and warm it up, as the demo does."""
        self.run(str(EXAMPLES / "make_model.py"), "--seed", str(seed))
        self.millrace("sft", "@", str(EXAMPLES / "sft.toml"), "--seed", str(seed))

    def train(self, *argv: str, **options) -> tuple[dict, str]:
        """Run RL from the example's file; returns the summary and everything that was printed."""
        output = self.millrace("rl", "@", self.rl_toml, *argv, **options)
        last = output.strip().splitlines()[-1]
        assert last.endswith("summary.json"), f"the last line is not the summary's path: {last!r}"
        return json.loads((self.path / last).read_text()), output

    def twin(self, path: Path) -> "Workplace":
        """Return another workplace with the same models, whose processes are not this one's."""
        (path / "outputs").mkdir(parents=True)
        (path / "outputs" / "reverse-text").symlink_to(self.path / "outputs" / "reverse-text")
        return Workplace(path)

    @contextlib.contextmanager
    def following(self, *argv: str, **options) -> Iterator[subprocess.Popen[str]]:
        """Run a `millrace` command whose output is read as it comes; it has ended afterwards whatever the test does."""
        process = self.popen("-m", "millrace.cli", *argv, **options)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()  # its reaper ends what it has started
            process.communicate(timeout=STOP_TIMEOUT_S)

    @contextlib.contextmanager
    def up(self, **options) -> Iterator[str]:
        """Run `millrace up` without earlier runs during the block; yield the address of its orchestrator."""
        port, http_port = free_ports(2)
        address = f"127.0.0.1:{port}"
        place = ["--dir", f"outputs/up-{port}", "--listen", address, "--http-port", str(http_port)]
        with self.following("up", *place, **options) as process:
            seen = self.read_until(process, "export MILLRACE_SERVER=")
            assert f"ready. The orchestrator listens on {address}" in seen
            yield address
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=STOP_TIMEOUT_S)
            assert process.returncode == 130, output

    def processes(self) -> list[psutil.Process]:
        """Return the processes of this workplace, found by their environment, or by their directory (Redis overwrites
        its environment).
        """
        return processes.bearing(MARKER, str(self.path), works_in=self.path)

    def processes_of(self, directory: Path) -> list[psutil.Process]:
        """Return the processes that know this directory from an argument or their environment (a stack's, for
        example).
        """
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error, OSError):
                known = [*process.cmdline(), *process.environ().values()]
                if any(text == str(directory) or f"{directory}/" in text for text in known):
                    found.append(process)
        return found

    def wait_empty(self, timeout_s: float) -> None:
        """Fail unless every process has ended within `timeout_s`."""
        ends = time.monotonic() + timeout_s
        while left := self.processes():
            if time.monotonic() > ends:
                pytest.fail(f"still there after {timeout_s:g} s: {left}")
            time.sleep(0.1)

    @staticmethod
    def read_until(process: subprocess.Popen[str], start: str) -> str:
        """Read lines up to one that begins like this (blanks aside); returns all of them."""
        assert process.stdout is not None
        seen = ""
        for line in process.stdout:
            seen += line
            if line.strip().startswith(start):
                return seen
        pytest.fail(f"it ended with {process.wait()} before it said {start!r}:\n{seen[-5000:]}")
