"""Workers of pytest that die: what `millrace_testing.crashed_workers` makes of them, in runs of their own."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

QUIET = """
import pytest

@pytest.mark.parametrize("number", range(3))
def test_quiet(number):
    pass
"""
DIES = """
import os, signal
from pathlib import Path

import pytest

@pytest.mark.parametrize("number", range(4))
def test_dies(number):
    marks = Path(__file__).with_name(f"died-{number}")
    if number in DYING and not marks.exists():
        marks.touch()
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(("dying", "code"), [((2,), 0), ((1, 3), 1)], ids=["one worker", "two workers"])
def test_the_first_death_counts_by_the_second_try_and_no_run_waits_for_ever(
    tmp_path: Path, dying: tuple[int, ...], code: int
) -> None:
    for name in "acdefg":
        (tmp_path / f"test_{name}.py").write_text(QUIET)
    (tmp_path / "test_b.py").write_text(f"DYING = {dying}\n{DIES}")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
    command += ["-p", "millrace_testing.crashed_workers", "-p", "no:cacheprovider", str(tmp_path)]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=90, check=False)
    assert ended.returncode == code, ended.stdout
    assert "22 passed" in ended.stdout
    assert [f"a worker died of a signal in test_b.py::test_dies[{each}]" in ended.stdout for each in range(4)] == [
        each in dying for each in range(4)
    ]
