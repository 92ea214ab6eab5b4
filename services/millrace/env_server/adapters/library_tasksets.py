"""What tasksets of the library need: options, packages of its extras, files and hubs with tasks.

The library imports a package of an extra when it loads or plays a task: without it `openenv` would load, and every
rollout fail. A hub that does not answer is asked again and again, for minutes. What is wrong with an option or a file
it says in the words of pydantic, or of whatever it stumbled over.
"""

import ast
import contextlib
import re
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from pydantic import ValidationError

from millrace.custom_code import environment_module
from millrace.env_server.interpreters import LIBRARY, default_place, needed_with
from millrace.env_server.library.releases import FIELD, installed
from millrace.errors import InvalidSpecError, Violation

_TASKSETS = "verifiers.v1.tasksets"
_EXTRA = re.compile(r"extra\s*==\s*['\"](?P<name>[^'\"]+)['\"]")
_OF_PYTHON = re.compile(r"python(?:_full)?_version\s*>=\s*['\"](?P<major>\d+)\.(?P<minor>\d+)")
_CONNECT_S = 10.0
_MOST_COUNTED = 100_000
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_SHOWN = (bool, int, float, str)
_IN_DATA = (AttributeError, LookupError, TypeError, ValueError)
"""What reading a broken file raises: also errors of JSON, TOML, Unicode and pydantic are ValueErrors."""


@contextlib.contextmanager
def options_checked(*, roles: str) -> Iterator[None]:
    """Translate pydantic's errors in the block, about an environment's options, to InvalidSpecError with the key of
    each.

    `roles` is the key of the roles' config, such as `args.env`.
    """
    try:
        yield
    except (ValidationError, KeyError) as error:
        # The library fails as KeyError where pydantic cannot make an error of that type again ("path_type").
        wrong = error if isinstance(error, ValidationError) else error.__context__
        if not isinstance(wrong, ValidationError):
            raise
        is_whole = wrong is error  # else the taskset's own, whose keys have no prefix yet
        found = [_wrong_option(each, roles=roles, is_whole=is_whole) for each in wrong.errors(include_url=False)]
        remedy = "correct them; `millrace env check ID --args …` tries them without a run"
        raise InvalidSpecError(found, reason="ENV_ARGS_INVALID", remedy=remedy) from error


def _wrong_option(found: Mapping[str, Any], *, roles: str, is_whole: bool) -> Violation:
    """Return one of pydantic's errors as a violation with the user's key.

    `roles` is the key of the roles' config. `is_whole` is whether the error's location begins at the environment's
    config and not at the taskset's. The value is left out if it may be a secret.
    """
    path, value = [str(part) for part in found["loc"]], found["input"]
    if not is_whole or path[:1] == ["taskset"]:
        field = ".".join(["args", *(path[1:] if is_whole else path)])
    else:
        field = ".".join([roles, *path])
    message = f"{found['msg'][:1].lower()}{found['msg'][1:]}"
    is_shown = isinstance(value, _SHOWN) and found["type"] != "extra_forbidden"  # that may be a misspelt secret
    return Violation(field=field, value=f"{value!r:.100}" if is_shown else None, message=message)


@contextlib.contextmanager
def tasks_checked(env_id: str, taskset: Iterable[Any], args: Mapping[str, Any]) -> Iterator[None]:
    """Raise InvalidSpecError (ENV_DATA_MISSING, ENV_DATA_INVALID) if the block, which reads the tasks, fails for their
    files.

    A file named in `args` that is missing is refused for every taskset. Other errors are translated for tasksets of the
    library alone, and pass through for others: their author looks for the line that raised. `taskset` is read again to
    count the tasks before the broken one.
    """
    try:
        yield
    except OSError as error:
        # The file of the error is sought among the arguments, so that the message can name the key that the user wrote.
        key = next((key for key, value in _leaves(args, "args") if _is_file(value, error.filename)), "")
        is_file = error.filename or isinstance(error, FileNotFoundError)
        if not key and not (is_file and _is_of_library(env_id)):
            raise
        message = f"{error.strerror} where workers run" if key else f"where workers run: {error}"
        wrong = Violation(field=key or "args", value=str(error.filename) if key else None, message=message)
        remedy = "bring the file to the machine of the env-server, readable by its workers' user, or name another"
        raise InvalidSpecError([wrong], reason="ENV_DATA_MISSING", remedy=remedy) from error
    except _IN_DATA as error:
        if not _is_of_library(env_id):
            raise
        named = [key for key, value in _leaves(args, "args") if isinstance(value, str) and Path(value).exists()]
        message = f"a task cannot be read{_place_of_broken(taskset)} ({_in_words(error)})"
        wrong = Violation(field=named[0] if named else "args", message=message)
        remedy = f"correct the tasks: each has what the taskset {env_id!r} of verifiers {installed()} asks for"
        raise InvalidSpecError([wrong], reason="ENV_DATA_INVALID", remedy=remedy) from error


def _in_words(error: Exception) -> str:
    """Return the text of an error in a task's data; of pydantic's each location and message, of a KeyError which
    key.
    """
    if isinstance(error, ValidationError):
        found = error.errors(include_url=False)
        return "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in found)
    return f"lacks the key {error}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"


def _place_of_broken(taskset: Iterable[Any]) -> str:
    """Return how many tasks can be read before the first that cannot, as in ", after 3 that can"; "" for 0.

    Reads the taskset again from its beginning, at most `_MOST_COUNTED` tasks.
    """
    count = 0
    with contextlib.suppress(*_IN_DATA):
        for _ in islice(taskset, _MOST_COUNTED):  # a taskset may be endless, and the error not be raised again
            count += 1
    return f", after {count} that can" if count else ""


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of all values in nested mappings that are no mappings; `key` is the prefix."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from _leaves(each, f"{key}.{name}")
    else:
        yield key, value


def _is_file(value: Any, filename: Any) -> bool:
    """Return whether two values are paths of the same file; False if either is no text."""
    if not isinstance(value, str) or not isinstance(filename, str):
        return False
    return Path(value).expanduser().resolve() == Path(filename).resolve()


def _is_of_library(env_id: str) -> bool:
    """Return whether this process has imported the library's own taskset of that name."""
    return f"{_TASKSETS}.{environment_module(env_id)}" in sys.modules


def require_packages(env_id: str) -> None:
    """Raise InvalidSpecError (ENV_PACKAGE_MISSING) if the library's own taskset `env_id` imports a package that is
    missing.

    Only packages of the library's extras count; tasksets that are not the library's pass. The taskset's modules must be
    imported already: their sources are searched for imports, in functions as well.
    """
    lacking = sorted(root for root in _imported(environment_module(env_id)) if find_spec(root) is None)
    extras = {_canonical(name): requirement for requirement in _extras() if (name := _name(requirement))}
    for root in lacking:
        if requirement := extras.get(_canonical(root)):
            wrong = Violation(field=FIELD, value=env_id, message=_lacks(root, requirement))
            raise InvalidSpecError([wrong], reason="ENV_PACKAGE_MISSING", remedy=_remedy(requirement, env_id))


def require_data(taskset: Any) -> None:
    """Raise InvalidSpecError if Harbor tasks are not on this machine and their hub does not accept a connection.

    Blocks at most `_CONNECT_S`. Nothing is tried for other tasksets, with a registry of the user's own (`registry_url`,
    `registry_path`, `repo`), or where a proxy is set.
    """
    harbor, config = sys.modules.get(f"{_TASKSETS}.harbor.taskset"), taskset.config
    if harbor is None or not isinstance(config, harbor.HarborConfig) or getproxies():
        return
    place = harbor.cache_dir(config)
    if place.is_dir() or config.repo or config.registry_path or config.registry_url:
        return
    from harbor.auth.constants import SUPABASE_URL  # type: ignore[import-not-found]

    hub = urlsplit(SUPABASE_URL)
    port = 443 if hub.port is None else hub.port
    try:
        socket.create_connection((hub.hostname or "", port), timeout=_CONNECT_S).close()
    except OSError as error:
        message = (
            f"its tasks are not in {place}, and the hub {hub.hostname}, which has them, does not answer "
            f"({error.strerror or error})"
        )
        wrong = Violation(field="orchestrator.env.args.dataset", value=config.dataset, message=message)
        remedy = (
            f"where there is a network, run `harbor download {config.dataset} --export -o DIRECTORY`, and bring that "
            f"directory to {place} where the env-server runs"
        )
        raise InvalidSpecError([wrong], reason="ENV_DATA_MISSING", remedy=remedy) from error


def _imported(module: str) -> set[str]:
    """Return the top-level packages that the loaded modules of a library taskset import anywhere in their sources."""
    package = f"{_TASKSETS}.{module}"
    found: set[str] = set()
    # A copy, because another thread may import at the same time.
    for name, loaded in list(sys.modules.items()):
        file = getattr(loaded, "__file__", None)
        if file and (name == package or name.startswith(f"{package}.")):
            found.update(_roots(ast.parse(Path(file).read_bytes())))
    return found


def _roots(tree: ast.AST) -> Iterator[str]:
    """Yield the top-level package of each absolute import in a syntax tree, in functions as well."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def _extras() -> list[str]:
    """Return the requirements of all the library's extras, as in its package's metadata.

    Empty if it is not installed.
    """
    try:
        return [each for each in distribution(LIBRARY).requires or () if _EXTRA.search(each)]
    except PackageNotFoundError:
        return []


def _lacks(root: str, requirement: str) -> str:
    """Return the message that the package `root`, of the library's extra in `requirement`, is not installed.

    If the package needs a later Python than this one, the message says so.
    """
    extra = _EXTRA.search(requirement)
    asked = requirement.partition(";")[0].strip()
    message = f"plays with the package {asked} (the extra `{extra['name'] if extra else root}` of verifiers "
    message += f"{installed()}), and `{root}` is not there in {sys.executable}"
    needed = _python_of(requirement)
    if needed > sys.version_info[:2]:
        message += f", whose Python is {_dotted(sys.version_info[:2])}; the package needs {_dotted(needed)} or later"
    return message


def _remedy(requirement: str, env_id: str) -> str:
    """Return the commands, as text, that make an interpreter in which the taskset `env_id` can be played.

    `requirement` is that of the library's extra which is missing.
    """
    extra, release = _EXTRA.search(requirement), installed()
    python = f"python{_dotted(max(_python_of(requirement), sys.version_info[:2]))}"
    place = f"{default_place()}/{_canonical(environment_module(env_id))}"
    needed = " ".join(f"'{name}{bounds}'" for name, bounds in needed_with(release).items())
    return (
        f"make an interpreter for it where the env-server runs: `{python} -m venv {place} && {place}/bin/python -m pip "
        f"install '{LIBRARY}[{extra['name'] if extra else ''}]=={release}' {needed}`; it is found there, or set "
        f'`python = "{place}/bin/python"` of the environment'
    )


def _python_of(requirement: str) -> tuple[int, int]:
    """Return the oldest Python that the requirement's marker allows; (0, 0) if it names none."""
    found = _OF_PYTHON.search(requirement)
    return (int(found["major"]), int(found["minor"])) if found else (0, 0)


def _name(requirement: str) -> str:
    """Return the package's name at the beginning of a requirement; "" if it has none."""
    found = _NAME.match(requirement)
    return found[0] if found else ""


def _canonical(name: str) -> str:
    """Return a package's name in the form in which equal names compare equal: lower case, with single hyphens."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _dotted(version: tuple[int, ...]) -> str:
    """Return a version's numbers as text, with dots."""
    return ".".join(map(str, version))
