"""Tests that fail once: what `millrace_testing.second_tries` makes of them, in runs of their own."""

import subprocess
import sys
from pathlib import Path

import pytest

# Each starts up to three pytests, which a busy machine may take minutes for.
pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

QUIET = """
import pytest

@pytest.mark.parametrize("number", range(3))
def test_quiet(number):
    pass
"""
FAILS = """
from pathlib import Path

import pytest

@pytest.mark.parametrize("number", range(4))
def test_fails(number):
    tries = Path(__file__).with_name(f"tries-{number}")
    tries.write_text(tries.read_text() + "x" if tries.exists() else "x")
    assert len(tries.read_text()) > FAILURES.get(number, 0), f"lost race {number}"
"""


def run(directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run pytest on the files of `directory` with the plugin."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "millrace_testing.second_tries", "-p", "no:cacheprovider"]
    command += [*options, "-o", "faulthandler_timeout=60", str(directory)]
    try:
        return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=240, check=False)
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"pytest did not end within {error.timeout:g} s:\n{error.stdout!r}\n{error.stderr!r}")


@pytest.mark.parametrize(
    ("failures", "tries", "code"),
    [({}, 2, 0), ({1: 1}, 0, 1), ({1: 1, 3: 1}, 2, 0), ({1: 1, 3: 2}, 2, 1), ({0: 1, 1: 1, 2: 1}, 2, 1)],
    ids=["none failed", "none allowed", "two of two", "failed twice", "one too many"],
)
@pytest.mark.parametrize("jobs", [0, 2])
def test_a_few_tests_that_failed_once_may_pass_the_second_time_and_the_run_says_so(
    tmp_path: Path, failures: dict[int, int], tries: int, code: int, jobs: int
) -> None:
    (tmp_path / "test_a.py").write_text(QUIET)
    (tmp_path / "test_b.py").write_text(f"FAILURES = {failures}\n{FAILS}")
    ended = run(tmp_path, "-n", str(jobs), "--second-tries", str(tries))
    assert ended.returncode == code, ended.stdout
    assert all(f"lost race {number}" in ended.stdout for number in failures), "each failure is shown in full"
    assert ended.stdout.count("a race, to be mended") == (len(failures) if code == 0 else 0)
