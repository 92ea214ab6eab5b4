"""A pytest plugin for workers of xdist that die of a signal: `pytest -p millrace_testing.crashed_workers`.

Two things of xdist 3.8 with `--dist loadfile`: it gives all files of a worker that died out again, those that are done,
too, and whoever gets such an empty one waits for ever, and with it the whole run; and it runs the test again in which
the worker died, but has said by then that it failed. The first such test of a run counts by its second try, and the
run says so; a second worker that dies fails it.
"""

from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

_DIED = pytest.StashKey[list[str]]()


class _Scheduling(LoadFileScheduling):
    """Gives out again only what a dead worker had not done."""

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


def pytest_configure(config: pytest.Config) -> None:
    """Workers have no workers."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Crashes(config))
