"""A plugin for vLLM's processes: asynchronous scheduling, which its platform for CPUs turns off, stays as it is asked.

vLLM finds it by an entry point (`install`), and calls `force` in each of its processes.
"""

import os
from importlib import import_module
from pathlib import Path
from typing import Any

from millrace_testing.repository import REPOSITORY

NAME = "async-on-cpus"
_OVERLAPS = "MILLRACE_TEST_OVERLAPS"
"""The file that is made when the outputs of a step come while another one is under way."""


def overlaps(directory: Path) -> Path:
    """Return the overlapping file of a distribution in `directory`."""
    return directory / "overlaps"


def install(directory: Path) -> dict[str, str]:
    """Write a distribution with the entry point, and return the environment variables with which vLLM finds and calls
    it.
    """
    place = directory / "async_on_cpus-1.dist-info"
    place.mkdir(parents=True)
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1\n")
    (place / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{NAME} = {__name__}:force\n")
    paths = (directory, REPOSITORY / "services", REPOSITORY / "tests" / "support")
    return {"PYTHONPATH": ":".join(map(str, paths)), "VLLM_PLUGINS": NAME, _OVERLAPS: str(overlaps(directory))}


def force() -> None:
    """Make the platform keep the requested scheduling.

    CUDA's streams and events are mocked, as vLLM's V2 for CPUs does.
    """
    from vllm.platforms.cpu import CpuPlatform  # pyright: ignore[reportMissingImports]
    from vllm.v1.engine.core import EngineCore  # pyright: ignore[reportMissingImports]

    import_module("vllm.v1.worker.cpu.shm")  # it mocks when it is imported
    original = CpuPlatform.check_and_update_config
    if getattr(original, "is_forced", False):
        return

    def check(config: Any) -> None:
        asked = config.scheduler_config.async_scheduling
        original(config)
        config.scheduler_config.async_scheduling = asked

    check.is_forced = True  # pyright: ignore[reportFunctionMemberAccess]
    CpuPlatform.check_and_update_config = staticmethod(check)

    step = EngineCore.step_with_batch_queue

    def watched(core: Any) -> Any:
        found = step(core)
        if found[0] and core.batch_queue:
            Path(os.environ[_OVERLAPS]).touch()
        return found

    EngineCore.step_with_batch_queue = watched
