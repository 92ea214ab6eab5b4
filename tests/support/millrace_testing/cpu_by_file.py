"""A pytest plugin that says where a test run computes: `pytest -p millrace_testing.cpu_by_file`.

Durations say how long a test waits, and on a busy machine that is mostly for others. Processor seconds are those of the
test's process and of all processes below it, such as the children of a fork server that lives as long as the session.
"""

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

_NAME = "cpu_s"
_SHOWN = 25
_TICKS = os.sysconf("SC_CLK_TCK")


def _spent_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system + _running_s("self")


def _running_s(process: int | str) -> float:
    """Return the processor seconds of a process's living descendants, with those of their ended children."""
    total = 0.0
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has ended since
            for child in map(int, task.read_text().split()):
                fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
                total += sum(map(int, fields[11:15])) / _TICKS + _running_s(child)
    return total


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Measure a file's processor time from before its first test's fixtures to the end of its last test."""
    stash = item.session.stash
    if _BEGAN not in stash:
        stash[_BEGAN] = _spent_s()
    item.stash[_IS_LAST] = nextitem is None or nextitem.path != item.path
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Add the measurement to the last report of a file; xdist sends reports to the process that prints."""
    if call.when == "teardown" and item.stash[_IS_LAST]:
        now = _spent_s()
        item.user_properties.append((_NAME, now - item.session.stash[_BEGAN]))
        item.session.stash[_BEGAN] = now
    return (yield)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the files with the most processor time."""
    spent: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                spent[report.location[0]] += sum(value for name, value in report.user_properties if name == _NAME)
    terminalreporter.section(f"processor seconds: {spent.total():.0f}")
    for name, seconds in spent.most_common(_SHOWN):
        terminalreporter.write_line(f"{seconds:8.1f}  {name}")


_BEGAN = pytest.StashKey[float]()
_IS_LAST = pytest.StashKey[bool]()
