"""A pytest plugin that says where a test run computes: `pytest -p millrace_testing.cpu_by_file`.

Durations say how long a test waits, and on a busy machine that is mostly for others. Processor seconds are those of the
test's process and of the processes that were reaped in it, with theirs.
"""

import os
from collections import Counter
from collections.abc import Iterator

import pytest

_NAME = "cpu_s"
_SHOWN = 25


def _spent_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """What the item costs begins before its fixtures are made."""
    item.stash[_BEGAN] = _spent_s()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Each report carries what was spent since the one before, which xdist takes to the process that prints."""
    now = _spent_s()
    item.user_properties[:] = [each for each in item.user_properties if each[0] != _NAME]
    item.user_properties.append((_NAME, now - item.stash[_BEGAN]))
    item.stash[_BEGAN] = now
    return (yield)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The files that computed most."""
    spent: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                spent[report.location[0]] += sum(value for name, value in report.user_properties if name == _NAME)
    terminalreporter.section(f"processor seconds: {spent.total():.0f}")
    for name, seconds in spent.most_common(_SHOWN):
        terminalreporter.write_line(f"{seconds:8.1f}  {name}")


_BEGAN = pytest.StashKey[float]()
