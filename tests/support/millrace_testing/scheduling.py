"""A pytest plugin that deals the files of a test run out to its processes: `pytest -p millrace_testing.scheduling`.

Most files of `tests/unit` and `tests/contract` compute, most others wait. Each kind alone would leave processors idle,
or processes waiting for a processor: they are mixed.

xdist 3.8 with `--dist loadfile` gives all files of a worker that died out again, those that are done, too, and whoever
gets such an empty one waits for ever, and with it the whole run.
"""

import functools
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

_READS_TREES = "from millrace_testing import syntax\n"
_COMPUTE = {"unit", "contract"}
LONGEST = ("e2e/test_guides.py", "unit/local/test_shared_gpu.py")
"""Files of several minutes, which begin first: begun last, each would run alone while the other processes are idle."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first, and then files that compute between those that wait, evenly; each kind keeps its
    order.
    """
    kinds: dict[bool, dict[Path, int]] = {True: {}, False: {}}
    first = [item for item in items if item.path.as_posix().endswith(LONGEST)]
    others = [item for item in items if not item.path.as_posix().endswith(LONGEST)]
    for item in others:
        files = kinds[_computes(item)]
        files.setdefault(item.path, len(files))
    others.sort(key=lambda item: kinds[_computes(item)][item.path] / len(kinds[_computes(item)]))
    items[:] = [*first, *others]


def _computes(item: pytest.Item) -> bool:
    return not _COMPUTE.isdisjoint(item.nodeid.partition("::")[0].split("/"))


@functools.cache
def _group_of(file: Path) -> str:
    """Return what one worker runs as a whole: a file, or all files that share the syntax trees of the services."""
    return _READS_TREES if file.is_file() and _READS_TREES in file.read_text() else str(file)


class _Scheduling(LoadFileScheduling):
    """Hands out again only the files that a dead worker had not finished."""

    def _split_scope(self, nodeid: str) -> str:
        return _group_of(self.config.rootpath / nodeid.partition("::")[0])

    def remove_node(self, node: WorkerController) -> str | None:
        """Remove a worker, and return the test that it was running, as `LoadScopeScheduling` does."""
        workload = self.assigned_work[node]
        for scope in [scope for scope, tests in workload.items() if all(tests.values())]:
            del workload[scope]
        return super().remove_node(node)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _Scheduling:
    """Return our scheduler."""
    return _Scheduling(config, log)
