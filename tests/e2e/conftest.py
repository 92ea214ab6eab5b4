"""The demo's commands, run as a user runs them, in a working directory of the test's own."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLES = REPOSITORY / "examples" / "reverse_text"
COMMAND_TIMEOUT_S = 280


@dataclass
class Workplace:
    """A directory in which `millrace` commands run; relative paths of the examples end up in it."""

    path: Path

    def popen(self, *argv: str, **options) -> subprocess.Popen[str]:
        env = {name: value for name, value in os.environ.items() if not name.startswith("MILLRACE_")}
        env |= {"OMP_NUM_THREADS": "1", **options.pop("env", {})}
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        return subprocess.Popen(
            [sys.executable, *argv],
            cwd=self.path,
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            **options,
        )

    def run(self, *argv: str, check: bool = True, **options) -> str:
        process = self.popen(*argv, **options)
        try:
            output, _ = process.communicate(timeout=COMMAND_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.terminate()
            output, _ = process.communicate(timeout=30)
            pytest.fail(f"{argv} did not end within {COMMAND_TIMEOUT_S} s:\n{output[-5000:]}")
        if check and process.returncode != 0:
            pytest.fail(f"{argv} ended with {process.returncode}:\n{output[-5000:]}")
        return output

    def millrace(self, *argv: str, **options) -> str:
        return self.run("-m", "millrace.cli", *argv, **options)

    def warm_up(self, seed: int) -> None:
        """Make the tiny model and warm it up, as the demo does."""
        self.run(str(EXAMPLES / "make_model.py"), "--seed", str(seed))
        self.millrace("sft", "@", str(EXAMPLES / "sft.toml"), "--seed", str(seed))

    def train(self, *argv: str, **options) -> tuple[dict, str]:
        """Run RL from the example's file; returns the summary and everything that was printed."""
        output = self.millrace("rl", "@", str(EXAMPLES / "rl.toml"), *argv, **options)
        last = output.strip().splitlines()[-1]
        assert last.endswith("summary.json"), f"the last line is not the summary's path: {last!r}"
        return json.loads((self.path / last).read_text()), output


@pytest.fixture(scope="session")
def make_workplace(tmp_path_factory: pytest.TempPathFactory):
    def make(name: str) -> Workplace:
        return Workplace(tmp_path_factory.mktemp(name))

    return make


@pytest.fixture(scope="session")
def warm(make_workplace) -> Workplace:
    """A workplace with the warmed-up model of seed 0."""
    workplace = make_workplace("warm")
    workplace.warm_up(0)
    return workplace
