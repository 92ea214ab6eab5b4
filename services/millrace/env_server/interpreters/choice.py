"""In which interpreter an environment is played that names none: the first one that has what its package asks for.

Known are the env-server's own, and those below the directories that its operator allows (`MILLRACE_ENV_PYTHONS`).
What is in them is read from the metadata of their packages: no code of theirs runs before a worker is confined.
"""

import functools
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.metadata import Distribution, distributions
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from millrace.custom_code import environment_module
from millrace.decoding import decode_object
from millrace.env_server.interpreters.allowed import ANY, PYTHONS_VARIABLE, default_place, problem_of
from millrace.env_server.interpreters.examine import LIBRARY, needed_with
from millrace.env_server.library.releases import FIELD, HOSTED, TRIED
from millrace.errors import CorruptObjectError, InvalidSpecError, Violation

if TYPE_CHECKING:
    from packaging.requirements import Requirement

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
        """Return the environment with that module as it is installed here; None if it is not."""
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
        if self.paths is not None:
            spec = PathFinder.find_spec(module, list(self.paths))
        else:
            spec = find_spec(module) if module.isidentifier() and module != "__main__" else None
        return spec is not None and spec.origin is not None

    def _package(self, module: str) -> Distribution | None:
        for each in self._distributions(name=module):
            return each
        name = _modules(self.paths, _changed(self.paths)).get(module) if self.paths is not None else None
        return next(iter(self._distributions(name=name)), None) if name else None

    def _of_library(self, module: str) -> Found | None:
        library = next(iter(self._distributions(name=LIBRARY)), None)
        files = (
            (library.locate_file(f"{_TASKSETS}/{module}{end}") for end in (".py", "/__init__.py")) if library else ()
        )
        if library is None or not any(os.path.isfile(str(each)) for each in files):
            return None
        named = [each for each in _requirements(library) if _canonical(each.name) == _canonical(module)]
        return Found(is_complete=bool(named) and all(self._has(each) for each in named))

    def _has(self, requirement: "Requirement") -> bool:
        return any(_is_met(requirement, each.version) for each in self._distributions(name=requirement.name))

    def _distributions(self, *, name: str) -> Iterator[Distribution]:
        """Yield the distributions of that name, however it spells `-` and `_`."""
        yield from distributions(name=_canonical(name), path=_searched(self.paths))


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The interpreter in which an environment is played, and why."""

    python: str = ""
    """The interpreter; "" is the env-server's own."""
    why: str = ""
    """A sentence; "" for the env-server's own interpreter."""


def known_interpreters(allowed: Sequence[str]) -> list[Interpreter]:
    """Return the env-server's own, then those of virtual environments in the allowed directories, by their paths."""
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
        paths = _package_directories(Path(python).parents[1])
        if (release := _release(paths)) and not problem_of(python, allowed):
            known.append(Interpreter(python=python, paths=paths, release=release))
    return known


def choose(env_id: str, allowed: Sequence[str]) -> Choice:
    """Return the interpreter for an environment that names none (blocking: reads packages' metadata).

    It is one that has the environment and the release of `verifiers` that its package requires; the env-server's own
    before others, unless only others have all that it needs. If no interpreter has the environment, it is the
    env-server's own, whose worker reports what is missing. Raises InvalidSpecError (ENV_RELEASE_UNSUPPORTED), with the
    command that makes an interpreter, if some have the environment and none the release.
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


def _why(chosen: Interpreter, has: Found, found: Sequence[tuple[Interpreter, Found]]) -> str:
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
    return next((each.version for each in distributions(name=LIBRARY, path=_searched(paths))), "")


def _searched(paths: tuple[str, ...] | None) -> list[str]:
    return list(sys.path if paths is None else paths)


def _package_directories(home: Path) -> tuple[str, ...]:
    """Return the directories that a virtual environment imports from, those of its `.pth` files included."""
    found: list[str] = []
    for site in sorted(home.glob("lib/python3*/site-packages")):
        found.append(str(site))
        for path in sorted(site.glob("*.pth")):
            for line in path.read_text(errors="replace").splitlines():
                named = os.path.join(site, line.strip())
                if line.strip() and not line.startswith(("#", "import ", "import\t")) and os.path.isdir(named):
                    found.append(named)
    return tuple(dict.fromkeys(found))


def _changed(paths: tuple[str, ...]) -> tuple[int, ...]:
    """Return the times at which packages were last installed in these directories, for the key of a cache."""
    return tuple(os.stat(each).st_mtime_ns for each in paths if os.path.isdir(each))


@functools.lru_cache(64)
def _modules(paths: tuple[str, ...], _: tuple[int, ...]) -> dict[str, str]:
    """Return the names of packages that require the library, by each module that they install.

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
    from packaging.version import InvalidVersion

    try:
        return bool(release) and requirement.specifier.contains(release, prereleases=True)
    except InvalidVersion:
        return False


def _within(asks: str, release: str) -> bool:
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
    return re.sub(r"[-_.]+", "-", name.rpartition("/")[2].partition("@")[0]).lower()
