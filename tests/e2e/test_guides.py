"""Every command and file of `docs/guides` that can run on one machine without a GPU, as a reader would run them.

A block that begins with ```` ```sh run ```` is run, one with ```` ```LANGUAGE file=PATH ```` is written, and each line
of ```` ```text expect ```` is looked for in the output of the block that was run before. Other blocks are for reading.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
GUIDES = sorted((REPOSITORY / "docs" / "guides").glob("*.md"))
BLOCK = re.compile(r"^```(\w+) (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCK_TIMEOUT_S = 600


@dataclass(frozen=True)
class Block:
    what: str  # "run", "expect", or "file=PATH"
    text: str


def blocks_of(guide: Path) -> list[Block]:
    return [Block(what, text) for _, what, text in BLOCK.findall(guide.read_text())]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A directory that looks like a fresh checkout with `.venv`, and takes what a guide writes."""
    for name in ("examples", "environments"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    bin_dir = Path(sys.executable).parent
    (tmp_path / ".venv" / "bin" / "activate").write_text(f'export PATH="{bin_dir}:$PATH"\n')
    return tmp_path


def run(script: str, shell_state: Path, cwd: Path) -> str:
    """Run a block in the directory and with the variables that the block before left; return what it printed."""
    before = shell_state.read_text() if shell_state.exists() else ""
    whole = f"set -e\n{before}\n{script}\n{{ export -p; printf 'cd %q\\n' \"$PWD\"; }} > {shell_state}\n"
    done = subprocess.run(
        ["bash", "-c", whole],
        cwd=cwd,
        env={**os.environ, "HOME": str(cwd)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=BLOCK_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"exit code {done.returncode}:\n{script}\n{done.stdout[-4000:]}"
    return done.stdout


def test_there_are_guides_with_commands() -> None:
    assert GUIDES
    assert all(any(block.what == "run" for block in blocks_of(guide)) for guide in GUIDES)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_a_guide_works_as_it_is_written(guide: Path, repository: Path) -> None:
    output = ""
    for block in blocks_of(guide):
        if block.what.startswith("file="):
            path = repository / block.what.removeprefix("file=")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
        elif block.what == "run":
            output = run(block.text, repository / ".shell-state", repository)
        elif block.what == "expect":
            missing = [line for line in block.text.splitlines() if line not in output]
            assert not missing, f"{guide.name} promises {missing}; printed was:\n{output[-4000:]}"
