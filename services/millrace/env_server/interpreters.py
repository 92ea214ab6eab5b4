"""Interpreters that environments bring with them: which are allowed, what they lack, how a worker switches to one."""

import difflib
import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.metadata import Distribution, distributions
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import millrace
from millrace.custom_code import environment_module
from millrace.decoding import decode_object
from millrace.env_server.library.releases import FIELD, HOSTED, TRIED, numbers
from millrace.errors import CorruptObjectError, InvalidSpecError, Violation

if TYPE_CHECKING:
    from packaging.requirements import Requirement


# Which interpreters environments may run in, named by a run's config or chosen: `MILLRACE_ENV_PYTHONS`.
#
# Who may submit runs must not thereby run programs where the env-server is: the variable lists directories, and is
# empty unless the operator sets it.

PYTHONS_VARIABLE = "MILLRACE_ENV_PYTHONS"
ANY = "*"
"""Allows every interpreter: for a stack of the user's own."""
PYTHON_FIELD = "orchestrator.env.python"


def default_place() -> str:
    """Return the directory below which a user's own machine has virtual environments for environments to run in."""
    data = os.environ.get("XDG_DATA_HOME") or os.path.join(os.path.expanduser("~"), ".local", "share")
    return os.path.join(data, "millrace", "pythons")


def own_pythons(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return what MILLRACE_ENV_PYTHONS allows on a user's own stack, by the variables of its user.

    Unset, that is `default_place`, to search, and every interpreter. Raises InvalidSpecError for a malformed value.
    """
    # A command runs as its user, who may run whatever is here, unless the variable says what the env-server may.
    if (text := environ.get(PYTHONS_VARIABLE)) is None:
        return (default_place(), ANY)
    try:
        return parse_pythons(text)
    except ValueError as error:
        raise InvalidSpecError([Violation(field=PYTHONS_VARIABLE, value=text, message=str(error))]) from error


def parse_pythons(text: str) -> tuple[str, ...]:
    """Return the directories that a value of MILLRACE_ENV_PYTHONS allows; `:` separates them, and `*` is kept as it is.

    Raises ValueError if any other part is no absolute path.
    """
    parts = tuple(part for part in text.split(os.pathsep) if part)
    if not all(part == ANY or os.path.isabs(part) for part in parts):
        raise ValueError(f"must be absolute paths of directories, separated by {os.pathsep!r}, or {ANY} for all")
    return parts


def problem_of(python: str, allowed: Sequence[str]) -> str:
    """Return why workers may not run in the interpreter `python`; "" if they may, or if it is "".

    `allowed` has the directories that the operator allows. The interpreter's path must be below one of them once links
    among its directories are resolved. The interpreter itself may be a link to another place, as in every virtual
    environment.
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
    """Raise InvalidSpecError (ENV_PYTHON_REFUSED) if workers may not run in the interpreter `python`.

    `allowed` has the directories that the operator allows; "" as `python` is never refused.
    """
    if problem := problem_of(python, allowed):
        raise InvalidSpecError(
            [Violation(field=PYTHON_FIELD, value=python, message=problem)], reason="ENV_PYTHON_REFUSED"
        )


def _is_below(path: str, directory: str) -> bool:
    """Return whether `path` is below `directory` once the links of `directory` are resolved."""
    real = os.path.realpath(directory)
    return path.startswith(os.path.join(real, ""))


def _remedy(python: str) -> str:
    """Return how an operator allows the interpreter, as text for a message."""
    place = os.path.dirname(os.path.dirname(python)) or "DIRECTORY"
    return f"its operator starts it with {PYTHONS_VARIABLE}={place}, or the environment goes without the key"


# Whether a worker can run in an interpreter that an environment brings with it, and which files it must see there.
#
# The worker itself asks, once it is confined: the interpreter, and what its packages do when it starts, is code of the
# environment's.

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
    """Return the command line that runs an env worker with `arguments` in the interpreter `python`."""
    return [python, ENTRANCE, "run", ROOT, *arguments]


def require_usable(python: str) -> None:
    """Raise InvalidSpecError (ENV_PYTHON_UNUSABLE) if a worker cannot run in that interpreter, with the reason.

    Blocks while the interpreter runs and answers, at most `_ANSWER_S`.
    """
    if problem := _problem_of(python):
        raise InvalidSpecError(
            [Violation(field=PYTHON_FIELD, value=python, message=problem)], reason="ENV_PYTHON_UNUSABLE"
        )


def shown_files(python: str) -> list[str]:
    """Return the directories that a worker of level `container` must see to run in the interpreter `python`; [] for
    "".
    """
    if not python:
        return []
    # A virtual environment is found by its `bin`, whose interpreter links to the base installation; both must be seen.
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
    """Return the lines of a file; [] if there is none."""
    return path.read_text(errors="replace").splitlines() if path.is_file() else []


def _problem_of(python: str) -> str:
    """Run the interpreter and return why a worker cannot run in it; "" if it can. Blocks at most `_ANSWER_S`."""
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
    """Return which packages of a worker the interpreter lacks, and the command that installs them; "" if none.

    `versions` has the installed version of each package that it has.
    """
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
    """Return the packages that a worker needs beside `release` of the library, each with its version bounds."""
    return {**NEEDED, **COMPANIONS.get(release, {})}


def _name(requirement: str) -> str:
    """Return the package's name in a requirement such as `numpy>=1.26`."""
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


def exec_worker(python: str, arguments: Sequence[str]) -> NoReturn:
    """Replace this process by an env worker in the interpreter `python`, with these command-line arguments.

    The worker finds that interpreter's packages alone. Does not return; raises OSError.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(python, command(python, arguments), _environ(python))


def _environ(python: str) -> dict[str, str]:
    """Return this process's variables for a program in the interpreter `python`.

    The interpreter's directory is first in PATH, and Python's own search paths are left out.
    """
    environ = {name: value for name, value in os.environ.items() if name not in _SEARCHED}
    environ["PATH"] = os.pathsep.join([os.path.dirname(python), environ.get("PATH", os.defpath)])
    return environ


# In which interpreter an environment is played that names none: the first one that has what its package asks for.
#
# Known are the env-server's own, and those below the directories that its operator allows (`MILLRACE_ENV_PYTHONS`).
# What is in them is read from the metadata of their packages: no code of theirs runs before a worker is confined.

_TASKSETS = "verifiers/v1/tasksets"
"""Where the library has tasksets of its own, which no package of theirs brings."""
_ASKS = re.compile(r"^Requires-Dist:\s*verifiers(?![\w.-])", re.IGNORECASE | re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """An environment as it is installed in one interpreter."""

    package: str = ""
    """What installs it, as pip takes it; "" of modules that no package brings."""
    asks: str = ""
    """The releases of the library that its package requires, such as `>=0.4,<0.5`; "" is any."""
    fits: bool = True
    """Whether the installed release is one of these."""
    is_complete: bool = True
    """Whether the packages that a taskset of the library is known to need are installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """An interpreter that environments can be played in."""

    python: str
    """Its path; "" is the env-server's own."""
    paths: tuple[str, ...] | None
    """Directories of its packages; None is this process's own path."""
    release: str
    """The library's release there; "" if it is not installed."""

    def find(self, module: str) -> Found | None:
        """Return what is installed in this interpreter of the environment whose Python module is `module`; None if
        nothing is.
        """
        package = self._package(module)
        asks = _asked(package) if package is not None else []
        if not asks and (of_library := self._of_library(module)) is not None:  # `textarena` is a package of games, too
            return of_library
        if package is not None:
            fits = all(_is_met(each, self.release) for each in asks)
            text = ",".join(str(each.specifier) for each in asks if each.specifier)
            return Found(package=_installed_from(package), asks=text, fits=fits)
        return Found() if self._has_module(module) else None

    def _has_module(self, module: str) -> bool:
        """Return whether the interpreter has a module of that name, which is looked for and not imported."""
        if self.paths is not None:
            spec = PathFinder.find_spec(module, list(self.paths))
        else:
            spec = find_spec(module) if module.isidentifier() and module != "__main__" else None
        return spec is not None and spec.origin is not None

    def _package(self, module: str) -> Distribution | None:
        """Return the package that brings the module, by its own name or by the modules that it installs; None if
        there is none.
        """
        for each in self._distributions(name=module):
            return each
        # A package may install a module of another name than its own.
        name = _modules(self.paths, _changed(self.paths)).get(module) if self.paths is not None else None
        return next(iter(self._distributions(name=name)), None) if name else None

    def _of_library(self, module: str) -> Found | None:
        """Return the library's own taskset of that module's name as an environment; None if this release has none."""
        library = next(iter(self._distributions(name=LIBRARY)), None)
        files = (
            (library.locate_file(f"{_TASKSETS}/{module}{end}") for end in (".py", "/__init__.py")) if library else ()
        )
        if library is None or not any(os.path.isfile(str(each)) for each in files):
            return None
        named = [each for each in _requirements(library) if _canonical(each.name) == _canonical(module)]
        return Found(is_complete=bool(named) and all(self._has(each) for each in named))

    def _has(self, requirement: "Requirement") -> bool:
        """Return whether a release of the required package that meets the requirement is installed."""
        return any(_is_met(requirement, each.version) for each in self._distributions(name=requirement.name))

    def _distributions(self, *, name: str) -> Iterator[Distribution]:
        """Yield the metadata of the installed packages of that name, however it spells `-` and `_`."""
        yield from distributions(name=_canonical(name), path=_searched(self.paths))


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The interpreter in which an environment is played, and why."""

    python: str = ""
    """The interpreter; "" is the env-server's own."""
    why: str = ""
    """A sentence; "" for the env-server's own interpreter."""


def known_interpreters(allowed: Sequence[str]) -> list[Interpreter]:
    """Return the env-server's own interpreter, then those of virtual environments in the allowed directories, by path.

    Those without `verifiers`, and those that workers may not run in, are left out.
    """
    own = Interpreter(python="", paths=None, release=_release(None))
    pythons = sorted(
        str(python)
        for directory in allowed
        if directory != ANY
        for pattern in ("bin/python", "*/bin/python")
        for python in Path(directory).glob(pattern)
    )
    known = [own]
    for python in dict.fromkeys(pythons):
        paths = _package_directories(Path(python).parent.parent)  # of a program in the root, the root
        if (release := _release(paths)) and not problem_of(python, allowed):
            known.append(Interpreter(python=python, paths=paths, release=release))
    return known


def choose(env_id: str, allowed: Sequence[str]) -> Choice:
    """Return the interpreter in which the environment `env_id`, which names none, is played (blocking: reads metadata).

    The chosen interpreter has the environment and the release of `verifiers` that its package requires, and is the
    env-server's own or one below the directories `allowed`. The env-server's own comes before others, unless only
    others have all that the environment needs. If no interpreter has the environment, the env-server's own is chosen,
    whose worker reports what is missing. Raises InvalidSpecError (ENV_RELEASE_UNSUPPORTED), with the command that makes
    an interpreter, if some have the environment and none the release.
    """
    module = environment_module(env_id)
    known = known_interpreters(allowed)
    found = [(each, has) for each in known if (has := each.find(module)) is not None]
    fitting = [(each, has) for each, has in found if has.fits]
    if found and not fitting:
        raise _fits_nowhere(env_id, found, known, allowed)
    fitting.sort(key=lambda one: not one[1].is_complete)  # stable: ours is first of those that are alike
    interpreter, has = fitting[0] if fitting else (known[0], Found())
    if not interpreter.python:
        return Choice()
    return Choice(python=interpreter.python, why=_why(interpreter, has, found))


def why_missing(env_id: str, python: str, allowed: Sequence[str], *, directory: Path) -> str:
    """Return why a stack that is started in `directory` cannot have the environment; "" if it may have it.

    `python` is the interpreter that the config names, as an absolute path; "" is any that the env-server finds, in
    `allowed`, the directories that its operator allows. Only packages' metadata and names of files are read, so an
    environment that is found may still fail to load. If no interpreter has the library, "" is returned: then no
    environments are played here.
    """
    name = environment_module(env_id)
    known = known_interpreters(allowed)
    if python:
        paths = _package_directories(Path(python).parent.parent)  # of a program in the root, the root
        known = [Interpreter(python=python, paths=paths, release=_release(paths))]
    if not any(each.release for each in known):
        return ""
    searched = [str(directory), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    for module in dict.fromkeys((name, name.lower())):
        spec = PathFinder.find_spec(module, searched)  # that of a directory without a module has no origin
        if (spec and spec.origin) or any(each.find(module) is not None for each in known):
            return ""
    there = {path.stem for path in directory.glob("*.py")} | {
        path.parent.name for path in directory.glob("*/__init__.py")
    }
    for package in (each for here in known for each in distributions(path=_searched(here.paths))):
        if _ASKS.search(package.read_text("METADATA") or ""):
            there.add(package.name.replace("-", "_"))
    near = difflib.get_close_matches(name, sorted(there), n=1)
    places = ", ".join(each.python or f"the venv {sys.prefix}" for each in known)
    hint = f"did you mean {near[0].replace('_', '-')}?" if near else f"install it there, or put {name}.py here"
    return f"no Python module {name!r} in {directory} or {places}; {hint}"


def _why(chosen: Interpreter, has: Found, found: Sequence[tuple[Interpreter, Found]]) -> str:
    """Return a sentence why `chosen` is played in and not the env-server's own interpreter.

    `has` is the environment there; `found` has every interpreter with the environment.
    """
    ours = next((each for interpreter, each in found if not interpreter.python), None)
    if ours is None:
        why = "the env-server's own interpreter does not have it"
    elif not ours.fits:
        why = f"its package asks for {LIBRARY}{has.asks or ours.asks}"
    else:
        why = "what it plays with is there, and not in the env-server's own interpreter"
    return f"played in {chosen.python} ({LIBRARY} {chosen.release or 'is missing'}): {why}"


def _fits_nowhere(
    env_id: str, found: Sequence[tuple[Interpreter, Found]], known: Sequence[Interpreter], allowed: Sequence[str]
) -> InvalidSpecError:
    """Make the error for an environment that is installed, but nowhere with a release of the library that it requires.

    `found` has the interpreters with the environment, `known` all of them, and `allowed` the directories that the
    operator allows for interpreters.
    """
    [(_, has), *_] = found
    there = ", ".join(
        f"{each.python or 'the interpreter of the env-server'} has {each.release or 'none'}" for each in known
    )
    message = f"its package asks for {LIBRARY}{has.asks}, and no interpreter here has it together with that: {there}. "
    release = next((each for each in TRIED if _within(has.asks, each)), "")
    if release:
        place = os.path.join(next((each for each in allowed if each != ANY), default_place()), _canonical(env_id))
        needed = " ".join(f"'{name}{bounds}'" for name, bounds in needed_with(release).items())
        remedy = (
            f"Make one where the env-server runs: `python3 -m venv {place} && {place}/bin/python -m pip install "
            f"{has.package} '{LIBRARY}=={release}' {needed}`"
        )
        if not allowed:
            remedy += f", and start the env-server with {PYTHONS_VARIABLE}={os.path.dirname(place)}"
    else:
        remedy = f"Millrace plays {HOSTED}: install a release of the environment that takes one of these"
    wrong = Violation(field=FIELD, value=env_id, message=message + remedy)
    return InvalidSpecError([wrong], reason="ENV_RELEASE_UNSUPPORTED")


def _release(paths: tuple[str, ...] | None) -> str:
    """Return the library's release in these directories (None: this process's path); "" if it is not installed."""
    return next((each.version for each in distributions(name=LIBRARY, path=_searched(paths))), "")


def _searched(paths: tuple[str, ...] | None) -> list[str]:
    """Return the directories to search for packages; None is this process's path."""
    return list(sys.path if paths is None else paths)


def _package_directories(home: Path) -> tuple[str, ...]:
    """Return the directories from which the virtual environment `home` imports, those of its `.pth` files included."""
    found: list[str] = []
    for site in sorted(home.glob("lib/python3*/site-packages")):
        found.append(str(site))
        for path in sorted(site.glob("*.pth")):
            for line in path.read_text(errors="replace").splitlines():
                named = os.path.join(site, line.strip())
                # As `site` reads them, except that lines which begin with `import` are code, and no code is run here.
                if line.strip() and not line.startswith(("#", "import ", "import\t")) and os.path.isdir(named):
                    found.append(named)
    return tuple(dict.fromkeys(found))


def _changed(paths: tuple[str, ...]) -> tuple[int, ...]:
    """Return the modification times of these directories, which change when a package is installed, for a cache's
    key.
    """
    return tuple(os.stat(each).st_mtime_ns for each in paths if os.path.isdir(each))


@functools.lru_cache(64)
def _modules(paths: tuple[str, ...], _: tuple[int, ...]) -> dict[str, str]:
    """Return the name of the package that installs each module, of the packages in `paths` that require the library.

    The second argument is part of the cache's key alone.
    """
    modules: dict[str, str] = {}
    for each in distributions(path=list(paths)):
        if not _ASKS.search(each.read_text("METADATA") or ""):
            continue
        named = (each.read_text("top_level.txt") or "").split()
        files = {path.parts[0] for path in each.files or () if path.suffix == ".py"}
        for module in (*named, *(name.removesuffix(".py") for name in files)):
            modules.setdefault(module, each.name)
    return modules


def _requirements(package: Distribution) -> list["Requirement"]:
    """Return the package's requirements, those of extras included; leave out what cannot be parsed."""
    from packaging.requirements import InvalidRequirement, Requirement

    read: list[Requirement] = []
    for text in package.requires or ():
        try:
            read.append(Requirement(text))
        except InvalidRequirement:
            continue
    return read


def _asked(package: Distribution) -> list["Requirement"]:
    """Return the package's requirements of the library that apply without an extra."""
    return [
        each
        for each in _requirements(package)
        if _canonical(each.name) == LIBRARY and (each.marker is None or each.marker.evaluate({"extra": ""}))
    ]


def _is_met(requirement: "Requirement", release: str) -> bool:
    """Return whether `release` meets the requirement's version bounds; False for "" and what is no version."""
    from packaging.version import InvalidVersion

    try:
        return bool(release) and requirement.specifier.contains(release, prereleases=True)
    except InvalidVersion:
        return False


def _within(asks: str, release: str) -> bool:
    """Return whether `release` is within the bounds `asks`, such as `>=0.4,<0.5`."""
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(asks).contains(release)


def _installed_from(package: Distribution) -> str:
    """Return what pip takes to install the package elsewhere: `NAME==VERSION`, or the directory that it came from."""
    try:
        origin = decode_object((package.read_text("direct_url.json") or "{}").encode(), what="", reason="")
    except CorruptObjectError:
        origin = {}
    url = str(origin.get("url") or "")
    return url.removeprefix("file://") if url.startswith("file://") else f"{package.name}=={package.version}"


def _canonical(name: str) -> str:
    """Return the name of a package or an environment in the form in which equal names compare equal.

    `OWNER/` before it and `@VERSION` after it are left out.
    """
    return re.sub(r"[-_.]+", "-", name.rpartition("/")[2].partition("@")[0]).lower()
