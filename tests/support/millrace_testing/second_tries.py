"""A pytest plugin for runs that decide on a landing: `pytest -p millrace_testing.second_tries --second-tries 2`.

One test in five thousand that loses a race on a busy machine must not hide what the other tests say. Up to
`--second-tries` tests that failed are run once more behind all others, alone, in a pytest of their own. What fails
again fails the run, as does one failure too many; what passes then is shown with its failure, as a race that is to be
mended: of the test, or of what it tests. The default is 0: nobody but a landing tries twice.

Two things of xdist 3.8 with `--dist loadfile`: it gives all files of a worker that died out again, those that are done,
too, and whoever gets such an empty one waits for ever, and with it the whole run; and it runs the test again in which
the worker died, but has said by then that it failed. The first such test of a run counts by its second try, and the
run says so; a second worker that dies fails it.
"""

import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

_DIED = pytest.StashKey[list[str]]()
_OPTION = "--second-tries"
_LIMIT_S = 900.0
"""For all second tries; each test has a limit of its own."""


_READS_TREES = "from millrace_testing import syntax\n"


@functools.cache
def _group_of(file: Path) -> str:
    """Return what one worker runs as a whole: a file, or all files that share the syntax trees of the services."""
    return _READS_TREES if file.is_file() and _READS_TREES in file.read_text() else str(file)


class _Scheduling(LoadFileScheduling):
    """Gives out again only what a dead worker had not done."""

    def _split_scope(self, nodeid: str) -> str:
        return _group_of(self.config.rootpath / nodeid.partition("::")[0])

    def remove_node(self, node: WorkerController) -> str | None:
        """See `LoadScopeScheduling`."""
        workload = self.assigned_work[node]
        for scope in [scope for scope, tests in workload.items() if all(tests.values())]:
            del workload[scope]
        return super().remove_node(node)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _Scheduling:
    """Use ours."""
    return _Scheduling(config, log)


class _Crashes:
    """What is noted of workers that died; in the process that has them."""

    def __init__(self, config: pytest.Config) -> None:
        self._died = config.stash.setdefault(_DIED, [])

    @pytest.hookimpl
    def pytest_handlecrashitem(self, crashitem: str, report: pytest.TestReport) -> None:
        """The first time the second try counts."""
        self._died.append(crashitem)
        if len(self._died) == 1:
            report.outcome = "rerun"  # type: ignore[assignment]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say it: a process that dies is a defect of something, even if nothing failed."""
        for item in self._died:
            terminalreporter.write_line(f"a worker died of a signal in {item}", red=True)


class _SecondTries:
    """Runs what failed once more, when everything else is over; in the process that prints."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterator[None]:
        """Behind the summary, which has every failure in full."""
        yield
        reporter = session.config.pluginmanager.getplugin("terminalreporter")
        assert isinstance(reporter, pytest.TerminalReporter)
        failed = list(dict.fromkeys(each.nodeid for key in ("failed", "error") for each in reporter.stats.get(key, [])))
        limit = int(session.config.getoption(_OPTION) or 0)
        if session.exitstatus != pytest.ExitCode.TESTS_FAILED or not 0 < len(failed) <= limit:
            return
        reporter.section("a second try, alone")
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *failed]
        root = session.config.rootpath
        ended = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, timeout=_LIMIT_S, check=False)
        reporter.write(ended.stdout)
        if ended.returncode == pytest.ExitCode.OK:
            for item in failed:
                reporter.write_line(f"a race, to be mended: failed above, passed when tried again: {item}", red=True)
            session.exitstatus = pytest.ExitCode.OK


def pytest_addoption(parser: pytest.Parser) -> None:
    """How many tests may be tried again."""
    parser.addoption(_OPTION, type=int, default=0, help="tests that may fail once, if they pass when run again alone")


def pytest_configure(config: pytest.Config) -> None:
    """Workers have no workers."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Crashes(config))
        config.pluginmanager.register(_SecondTries())
