"""A pytest plugin that says where a test run computes: `pytest -p millrace_testing.cpu_by_file`.

Durations say how long a test waits, and on a busy machine that is mostly for others. Processor seconds are those of the
test's process and of the processes that were reaped in it, with theirs. Servers of the whole session are reaped behind
its last test and have a line of their own.
"""

import os
from collections import Counter
from collections.abc import Iterator

import pytest

_NAME = "cpu_s"
_OF_SESSION = "servers of whole sessions"
_SHOWN = 25


def _spent_s() -> float:
    times = os.times()
    return times.user + times.system + _reaped_s()


def _reaped_s() -> float:
    times = os.times()
    return times.children_user + times.children_system


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """What the item costs begins before its fixtures are made."""
    item.stash[_BEGAN] = _spent_s()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Set apart what is reaped behind the last test."""
    before = _reaped_s()
    yield
    if nextitem is None:
        item.stash[_SERVERS] = _reaped_s() - before


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Each report carries what was spent since the one before, which xdist takes to the process that prints."""
    now = _spent_s()
    servers = item.stash.get(_SERVERS, 0.0)
    item.user_properties[:] = [each for each in item.user_properties if each[0] not in (_NAME, _OF_SESSION)]
    item.user_properties += [(_NAME, now - item.stash[_BEGAN] - servers), (_OF_SESSION, servers)]
    item.stash[_BEGAN] = now
    return (yield)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The files that computed most."""
    spent: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                for name, value in report.user_properties:
                    if name in (_NAME, _OF_SESSION):
                        spent[report.location[0] if name == _NAME else name] += value
    terminalreporter.section(f"processor seconds: {spent.total():.0f}")
    for name, seconds in spent.most_common(_SHOWN):
        terminalreporter.write_line(f"{seconds:8.1f}  {name}")


_BEGAN = pytest.StashKey[float]()
_SERVERS = pytest.StashKey[float]()
