"""Every command and file of `docs/guides` that can run on one machine without a GPU, as a reader would run them.

A block that begins with ```` ```sh run ```` is run, one with ```` ```LANGUAGE file=PATH ```` is written, and each line
of ```` ```text expect ```` is looked for in the output of the block that was run before. Other blocks are for reading.
What a block starts in the background ends with the guide. `millrace up` gets free ports instead of its usual ones.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from millrace.local.directory import free_port

REPOSITORY = Path(__file__).resolve().parents[2]
GUIDES = sorted((REPOSITORY / "docs" / "guides").glob("*.md"))
BLOCK = re.compile(r"^```(\w+) (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCK_TIMEOUT_S = 600
PORTS = ("50051", "8000", "8001")
"""What `millrace up` and the replicas of the guides listen on, where a reader follows them."""


@dataclass(frozen=True)
class Block:
    what: str  # "run", "expect", or "file=PATH"
    text: str


def blocks_of(guide: Path) -> list[Block]:
    return [Block(what, text) for _, what, text in BLOCK.findall(guide.read_text())]


@dataclass
class Reader:
    """Who follows a guide: in a directory that looks like a fresh checkout with `.venv`, and takes what is written."""

    home: Path
    ports: dict[str, str] = field(default_factory=lambda: {port: str(free_port()) for port in PORTS})
    sessions: list[int] = field(default_factory=list)

    def write(self, path: str, text: str) -> None:
        """Write a file of the guide."""
        place = self.home / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(self._with_free_ports(text))

    def run(self, script: str) -> str:
        """Run a block in the directory and with the variables that the block before left; return what it printed."""
        state = self.home / ".shell-state"
        before = state.read_text() if state.exists() else ""
        script = self._with_free_ports(script)
        whole = f"set -e\n{before}\n{script}\n{{ export -p; printf 'cd %q\\n' \"$PWD\"; }} > {state}\n"
        shell = subprocess.Popen(
            ["bash", "-c", whole],
            cwd=self.home,
            env={**os.environ, "HOME": str(self.home)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.sessions.append(shell.pid)
        printed, _ = shell.communicate(timeout=BLOCK_TIMEOUT_S)
        assert shell.returncode == 0, f"exit code {shell.returncode}:\n{script}\n{printed[-4000:]}"
        return printed

    def end(self) -> None:
        """End what runs in the background: each stack takes its own processes along."""
        for session in self.sessions:
            with suppress(ProcessLookupError):
                os.killpg(session, signal.SIGTERM)

    def _with_free_ports(self, text: str) -> str:
        text = re.sub(
            r"^millrace up\b", "millrace up --listen 127.0.0.1:50051 --http-port 8000", text, flags=re.MULTILINE
        )
        return re.sub(rf"\b({'|'.join(PORTS)})\b", lambda found: self.ports[found[0]], text)


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    for name in ("examples", "environments"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    bin_dir = Path(sys.executable).parent
    (tmp_path / ".venv" / "bin" / "activate").write_text(f'export PATH="{bin_dir}:$PATH"\n')
    follower = Reader(tmp_path)
    try:
        yield follower
    finally:
        follower.end()


def test_there_are_guides_with_commands() -> None:
    assert GUIDES
    assert all(any(block.what == "run" for block in blocks_of(guide)) for guide in GUIDES)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "guide",
    [
        pytest.param(guide, marks=pytest.mark.slow) if guide.stem == "debugging_learning" else pytest.param(guide)
        for guide in GUIDES
    ],  # the slow one trains for minutes
    ids=lambda guide: guide.stem,
)
def test_a_guide_works_as_it_is_written(guide: Path, reader: Reader) -> None:
    output = ""
    for block in blocks_of(guide):
        if block.what.startswith("file="):
            reader.write(block.what.removeprefix("file="), block.text)
        elif block.what == "run":
            output = reader.run(block.text)
        elif block.what == "expect":
            missing = [line for line in block.text.splitlines() if line not in output]
            assert not missing, f"{guide.name} promises {missing}; printed was:\n{output[-4000:]}"
