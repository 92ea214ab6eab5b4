"""Which services of a one-machine stack are forked from a process that has imported what they need, and what."""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

VARIABLE = "MILLRACE_FORK_SERVER"
"""0 has every service of a one-machine stack start as a program of its own."""
NEEDS: Mapping[str, Sequence[str]] = {
    "millrace.orchestrator.main": ("millrace.orchestrator.main", "millrace.orchestrator.api.serve"),
    "millrace.env_server.main": ("millrace.env_server.main", "millrace.env_server.run"),
    "millrace.inference.main": (
        "millrace.inference.main",
        "millrace.inference.embedded.replica",
        "transformers.modeling_utils",
        "transformers.models.auto.modeling_auto",
    ),
    "millrace.trainer.main": (
        "millrace.trainer.main",
        "millrace.trainer.serve",
        "millrace.trainer.gang.distributed",
        "millrace.trainer.job",
        "millrace.trainer.model.pretrained",
    ),
}
"""What each service imports before it works, lighter ones first."""
WITH_TORCH = ("millrace.inference.main", "millrace.trainer.main")
GPUS = ("/dev/nvidiactl", "/dev/kfd")


def needs(modules: Iterable[str], environ: Mapping[str, str]) -> dict[str, Sequence[str]]:
    """What to import for those of these main modules that may be forked.

    None of them elsewhere than on Linux, or where `VARIABLE` says 0. What uses a GPU is started afresh: what a driver
    did in a process does not survive a fork.
    """
    if environ.get(VARIABLE, "1") == "0" or not hasattr(os, "pidfd_open") or not Path("/proc/self/stat").exists():
        return {}
    has_gpu = any(Path(path).exists() for path in GPUS)
    return {name: NEEDS[name] for name in modules if name in NEEDS and not (has_gpu and name in WITH_TORCH)}
