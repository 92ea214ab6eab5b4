"""Which interpreters environments may run in, named by a run's config or chosen: `MILLRACE_ENV_PYTHONS`.

Who may submit runs must not thereby run programs where the env-server is: the variable lists directories, and is
empty unless the operator sets it.
"""

import os
from collections.abc import Sequence

from millrace.errors import InvalidSpecError, Violation

PYTHONS_VARIABLE = "MILLRACE_ENV_PYTHONS"
ANY = "*"
"""Allows every interpreter: for a stack of the user's own."""
FIELD = "orchestrator.env.python"


def default_place() -> str:
    """Return the directory in which a user's own machine has virtual environments for environments."""
    data = os.environ.get("XDG_DATA_HOME") or os.path.join(os.path.expanduser("~"), ".local", "share")
    return os.path.join(data, "millrace", "pythons")


def own_pythons() -> tuple[str, ...]:
    """Return the value of the variable for a user's own programs: every interpreter, and `default_place` to search."""
    return (default_place(), ANY)


def parse_pythons(text: str) -> tuple[str, ...]:
    """Return the directories in a value of the variable, which `:` separates; `*` is one of them if it is there.

    Raises ValueError if another part is no absolute path.
    """
    parts = tuple(part for part in text.split(os.pathsep) if part)
    if not all(part == ANY or os.path.isabs(part) for part in parts):
        raise ValueError(f"must be absolute paths of directories, separated by {os.pathsep!r}, or {ANY} for all")
    return parts


def problem_of(python: str, allowed: Sequence[str]) -> str:
    """Return why workers may not run in that interpreter, or "", also for no interpreter.

    Its path must be below an allowed directory once links among its directories are resolved. The interpreter itself
    may be a link to another place, as in every virtual environment.
    """
    if not python:
        return ""
    if not allowed:
        return f"is not allowed: {PYTHONS_VARIABLE} of the env-server is not set, which allows none; {_remedy(python)}"
    if not os.path.isabs(python):
        return "must be an absolute path, on the machine where the env-server runs"
    place = os.path.join(os.path.realpath(os.path.dirname(python)), os.path.basename(python))
    if ANY not in allowed and not any(_is_below(place, each) for each in allowed):
        listed = ", ".join(allowed)
        return (
            f"is not allowed: {PYTHONS_VARIABLE} of the env-server allows what lies below {listed}; {_remedy(python)}"
        )
    if not os.path.exists(python):
        return (
            "is not there, where the env-server runs; make the virtual environment "
            f"(python3 -m venv {os.path.dirname(os.path.dirname(python))}), or correct the path"
        )
    if not os.path.isfile(python) or not os.access(python, os.X_OK):
        return "is no program; name the interpreter itself, such as /path/to/venv/bin/python"
    return ""


def require_allowed(python: str, allowed: Sequence[str]) -> None:
    """Raise InvalidSpecError (ENV_PYTHON_REFUSED) if `problem_of` finds a reason against the interpreter."""
    if problem := problem_of(python, allowed):
        raise InvalidSpecError([Violation(field=FIELD, value=python, message=problem)], reason="ENV_PYTHON_REFUSED")


def _is_below(path: str, directory: str) -> bool:
    real = os.path.realpath(directory)
    return path.startswith(os.path.join(real, ""))


def _remedy(python: str) -> str:
    place = os.path.dirname(os.path.dirname(python)) or "DIRECTORY"
    return f"its operator starts it with {PYTHONS_VARIABLE}={place}, or the environment goes without the key"
