"""What tasksets of the library play with and nothing installs with it: packages of its extras, tasks of a hub.

The library imports such a package when it loads or plays a task: without it `openenv` would load, and every rollout
fail. A hub that does not answer is asked again and again, for minutes.
"""

import ast
import re
import socket
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from millrace.custom_code import environment_module
from millrace.env_server.interpreters.allowed import default_place
from millrace.env_server.interpreters.examine import LIBRARY, needed_with
from millrace.env_server.library.releases import FIELD, installed
from millrace.errors import InvalidSpecError, Violation

_TASKSETS = "verifiers.v1.tasksets"
_EXTRA = re.compile(r"extra\s*==\s*['\"](?P<name>[^'\"]+)['\"]")
_OF_PYTHON = re.compile(r"python(?:_full)?_version\s*>=\s*['\"](?P<major>\d+)\.(?P<minor>\d+)")
_CONNECT_S = 10.0
_NAME = re.compile(r"[A-Za-z0-9_.-]+")


def require_packages(env_id: str) -> None:
    """Refuse a taskset of the library whose extra is not here. Raises InvalidSpecError (ENV_PACKAGE_MISSING).

    Its modules are imported already. What is asked for is what these import, if an extra of the library brings it.
    """
    lacking = sorted(root for root in _imported(environment_module(env_id)) if find_spec(root) is None)
    extras = {_canonical(name): requirement for requirement in _extras() if (name := _name(requirement))}
    for root in lacking:
        if requirement := extras.get(_canonical(root)):
            wrong = Violation(field=FIELD, value=env_id, message=_lacks(root, requirement))
            raise InvalidSpecError([wrong], reason="ENV_PACKAGE_MISSING", remedy=_remedy(requirement, env_id))


def require_data(taskset: Any) -> None:
    """Refuse tasks of Harbor that are not on this machine, if their hub does not answer. Raises InvalidSpecError.

    A registry of the user's own (`registry_url`, `registry_path`, `repo`) and what a proxy reaches are not asked.
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
    """Return the packages that the loaded modules of a taskset of the library import, in functions as well."""
    package = f"{_TASKSETS}.{module}"
    found: set[str] = set()
    for name, loaded in list(sys.modules.items()):
        file = getattr(loaded, "__file__", None)
        if file and (name == package or name.startswith(f"{package}.")):
            found.update(_roots(ast.parse(Path(file).read_bytes())))
    return found


def _roots(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def _extras() -> list[str]:
    """Return what the library's extras install, as its package says it."""
    try:
        return [each for each in distribution(LIBRARY).requires or () if _EXTRA.search(each)]
    except PackageNotFoundError:
        return []


def _lacks(root: str, requirement: str) -> str:
    extra = _EXTRA.search(requirement)
    asked = requirement.partition(";")[0].strip()
    message = f"plays with the package {asked} (the extra `{extra['name'] if extra else root}` of verifiers "
    message += f"{installed()}), and `{root}` is not there in {sys.executable}"
    needed = _python_of(requirement)
    if needed > sys.version_info[:2]:
        message += f", whose Python is {_dotted(sys.version_info[:2])}; the package needs {_dotted(needed)} or later"
    return message


def _remedy(requirement: str, env_id: str) -> str:
    """Return the commands that make an interpreter in which the taskset is played."""
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
    """Return the oldest Python that the requirement is for; (0, 0) if it says none."""
    found = _OF_PYTHON.search(requirement)
    return (int(found["major"]), int(found["minor"])) if found else (0, 0)


def _name(requirement: str) -> str:
    found = _NAME.match(requirement)
    return found[0] if found else ""


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
