"""Which file is run when and where, and workers that die: `millrace_testing.scheduling` in runs of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

from millrace_testing.repository import REPOSITORY
from millrace_testing.scheduling import LONGEST

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


def run(directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """A pytest of the files of `directory` with the plugin."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "millrace_testing.scheduling", "-p", "no:cacheprovider"]
    command += [*options, str(directory)]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=90, check=False)


@pytest.mark.parametrize("dying", [(2,), (1, 3)], ids=["one worker", "two workers"])
def test_a_worker_that_dies_fails_its_test_and_no_run_waits_for_ever(tmp_path: Path, dying: tuple[int, ...]) -> None:
    for name in "acdefg":
        (tmp_path / f"test_{name}.py").write_text(QUIET)
    (tmp_path / "test_b.py").write_text(f"DYING = {dying}\n{DIES}")
    ended = run(tmp_path, "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
    assert ended.returncode == 1, ended.stdout
    assert [f"FAILED test_b.py::test_dies[{each}]" in ended.stdout for each in range(4)] == [
        each in dying for each in range(4)
    ]


def test_the_longest_files_are_first_and_those_that_compute_between_those_that_wait(tmp_path: Path) -> None:
    for longest in LONGEST:
        assert (REPOSITORY / "tests" / longest).is_file()
    (tmp_path / LONGEST[0]).parent.mkdir()
    (tmp_path / LONGEST[0]).write_text("def test_it():\n    pass\n")
    for kind, names in (("integration", "ab"), ("unit", "cdef")):
        (tmp_path / kind).mkdir()
        for name in names:
            (tmp_path / kind / f"test_{name}.py").write_text("def test_it():\n    pass\n")
    shown = run(tmp_path, "--collect-only").stdout
    assert [line.partition("::")[0][-4] for line in shown.splitlines() if "::" in line] == list("sacdbef")
