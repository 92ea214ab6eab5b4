"""Whether a worker can run in an interpreter that an environment brings with it, and which files it must see there.

The worker itself asks, once it is confined: the interpreter, and what its packages do when it starts, is code of the
environment's.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import millrace
from millrace.decoding import decode_object
from millrace.env_server.interpreters.allowed import FIELD
from millrace.env_server.library.releases import numbers
from millrace.errors import CorruptObjectError, InvalidSpecError, Violation

OLDEST = (3, 11)
NEEDED: Mapping[str, str] = {
    "aiohttp": ">=3.12",
    "grpcio": ">=1.76",
    "numpy": ">=1.26",
    "orjson": ">=3.10",
    "protobuf": ">=6.33.5,<8",
    "psutil": ">=6",
    "pydantic": ">=2.11",
    "zstandard": ">=0.23",
}
"""The packages that the worker's own code imports, as in the extra `env-worker`."""
LIBRARY = "verifiers"
COMPANIONS: Mapping[str, Mapping[str, str]] = {"0.3.1": {"renderers": ">=0.1.10,<0.1.11"}}
"""By release of the library, bounds of packages that it allows in later releases, with which it cannot be imported."""
ENTRANCE = str(Path(__file__).with_name("outside.py"))
ROOT = str(Path(millrace.__file__).parents[1])
_ANSWER_S = 30.0
_SHOWN_CHARS = 300
_SEARCHED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


def command(python: str, arguments: Sequence[str]) -> list[str]:
    """Return the command line of a worker in that interpreter."""
    return [python, ENTRANCE, "run", ROOT, *arguments]


def require_usable(python: str) -> None:
    """Raise InvalidSpecError (ENV_PYTHON_UNUSABLE) if a worker cannot run in that interpreter, with the reason.

    Blocks while the interpreter runs and answers, at most `_ANSWER_S`.
    """
    if problem := _problem_of(python):
        raise InvalidSpecError([Violation(field=FIELD, value=python, message=problem)], reason="ENV_PYTHON_UNUSABLE")


def shown_files(python: str) -> list[str]:
    """Return the directories that a worker of level `container` must see to run in that interpreter; none for ""."""
    if not python:
        return []
    named_home, home = Path(python).parent.parent, Path(os.path.realpath(os.path.dirname(python))).parent
    if os.path.realpath(named_home) == str(home):  # else a link to its directory is in another one, nobody's business
        home = named_home
    base = Path(os.path.realpath(python)).parent.parent
    named = [
        line.partition("=")[2].strip() for line in _lines(home / "pyvenv.cfg") if line.split("=")[0].strip() == "home"
    ]
    shown = [home, base, *(Path(each).parent for each in named), Path(ROOT, "millrace")]
    return [str(each) for each in shown if each != each.parent]  # of an interpreter in /, not everything


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines() if path.is_file() else []


def _problem_of(python: str) -> str:
    companions = {name for bounds in COMPANIONS.values() for name in bounds}
    argv = [python, ENTRANCE, "check", *NEEDED, LIBRARY, *sorted(companions)]
    try:
        answer = subprocess.run(
            argv,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            env=_environ(python),
            timeout=_ANSWER_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"did not answer within {_ANSWER_S:g} s"
    except OSError as error:
        return f"cannot be run here: {error.strerror or error}; let the user of workers read and run it"
    try:
        found = decode_object(answer.stdout, what="its answer", reason="ENV_PYTHON_UNUSABLE")
        version, versions = tuple(found["python"]), dict(found["versions"])
    except (CorruptObjectError, KeyError, TypeError, ValueError):
        output = answer.stderr.decode(errors="replace").strip().rpartition("\n")[2] or f"exit code {answer.returncode}"
        return f"is no Python interpreter that works: {output[:_SHOWN_CHARS]}; name such as /path/to/venv/bin/python"
    if version < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        return f"is Python {'.'.join(map(str, version))}, and workers need {oldest} or later; make it anew with that"
    return _missing(python, versions)


def _missing(python: str, versions: Mapping[str, str]) -> str:
    """Return which packages the interpreter lacks and the command that installs them; "" if none."""
    needed = needed_with(versions.get(LIBRARY, ""))
    lacking = [f"{name}{bounds}" for name, bounds in needed.items() if not _is_within(versions.get(name, ""), bounds)]
    if LIBRARY not in versions:
        lacking.append(LIBRARY)
    if not lacking:
        return ""
    names = ", ".join(
        f"{each} (found {versions[name]})" if (name := _name(each)) in versions else each for each in lacking
    )
    install = " ".join(f"'{each}'" for each in lacking)
    return f"lacks what a worker needs: {names}; run `{python} -m pip install {install}`, then try again"


def needed_with(release: str) -> dict[str, str]:
    """Return the packages, with their bounds, that a worker needs beside that release of the library."""
    return {**NEEDED, **COMPANIONS.get(release, {})}


def _name(requirement: str) -> str:
    return requirement.partition(">")[0]


def _is_within(version: str, bounds: str) -> bool:
    """Return whether a version is within such bounds as `>=3.11,<4`."""
    if not version:
        return False
    for bound in bounds.split(","):
        limit = numbers(bound.lstrip("<>="))
        if (numbers(version) < limit) if bound.startswith(">=") else (numbers(version) >= limit):
            return False
    return True


def go_over(python: str, arguments: Sequence[str]) -> NoReturn:
    """Replace this process by a worker in that interpreter, which finds the interpreter's packages alone.

    Raises OSError.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(python, command(python, arguments), _environ(python))


def _environ(python: str) -> dict[str, str]:
    """Return this process's variables with the interpreter's directory first in PATH, and without Python's search
    paths.
    """
    environ = {name: value for name, value in os.environ.items() if name not in _SEARCHED}
    environ["PATH"] = os.pathsep.join([os.path.dirname(python), environ.get("PATH", os.defpath)])
    return environ
