"""One surface over both generations of `verifiers` environments, and how an environment is found."""

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Protocol

from millrace.custom_code import environment_module
from millrace.env_server.adapters.failures import remember_code
from millrace.env_server.adapters.outcome import Outcome
from millrace.env_server.adapters.selection import parse_args
from millrace.env_server.library import releases
from millrace.errors import NotFoundError
from millrace.internal.v1.play_pb2 import EnvSpec, PlayGroupRequest
from millrace.rollouts.requests import LoadedEnv


class EnvAdapter(Protocol):
    """A loaded environment."""

    loaded: LoadedEnv

    async def play(self, request: PlayGroupRequest, *, tokenizer_dir: str) -> Sequence[Outcome]:
        """Play the request's task once for each of `request.members` and return the outcomes in that order.

        `tokenizer_dir` has the policy's tokenizer. No time limit is set here: the caller has the deadline.
        """
        ...

    async def start(self) -> None:
        """Start what all rollouts of this environment share, such as an HTTP session; called once, in the event
        loop.
        """
        ...

    async def close(self) -> None:
        """Release the environment's resources."""
        ...


def found_modules(env_id: str) -> Iterator[ModuleType]:
    """Import and yield, one after the other, the Python modules that may be the environment `env_id`.

    The last is the library's own taskset of that name: `textarena` is a package of games, and a taskset of `verifiers`.
    Each found module is remembered as the environment's own code, for error messages. Errors that a module raises while
    it is imported pass through, but for those that `_imported` translates.
    """
    name = environment_module(env_id)
    # Each name once: an id that is lower-case already would be imported twice.
    for candidate in dict.fromkeys((name, name.lower(), f"verifiers.v1.tasksets.{name.lower()}")):
        try:
            found = importlib.util.find_spec(candidate)
        except (ImportError, ValueError):
            found = None
        if found is not None:
            remember_code(found)
            yield _imported(candidate, env_id)


def _imported(name: str, env_id: str) -> ModuleType:
    """Import and return the module `name`; `env_id` is for messages.

    Raises InvalidSpecError for an import error that names `verifiers`: the module is for another release of the
    library. All other errors of the import pass through.
    """
    try:
        return importlib.import_module(name)
    except (AttributeError, ImportError) as error:
        if "verifiers" not in str(error):
            raise
        raise releases.unfit(env_id, error) from error


def exports_taskset(module: ModuleType) -> bool:
    """Return whether the module's `__all__` names a Taskset class of the library, whichever release it is of."""
    exported = (getattr(module, name, None) for name in getattr(module, "__all__", ()))
    bases = (base for thing in exported if isinstance(thing, type) for base in thing.__mro__)
    return any(base.__name__ == "Taskset" and base.__module__.startswith("verifiers.") for base in bases)


def load_adapter(env: EnvSpec) -> EnvAdapter:
    """Import and load the environment `env`, and return its adapter, of v0 or v1. Must run in the main thread: v0
    installs signal handlers.

    Raises NotFoundError if no module of its name is found, or none that is an environment, and InvalidSpecError for
    args that are no JSON object or a release of `verifiers` without that generation.
    """
    args = parse_args(env)
    others: list[str] = []
    for module in found_modules(env.id):
        # Imported here: each pulls in its generation of the library.
        if callable(getattr(module, "load_environment", None)):
            releases.require("v0", env.id)
            from millrace.env_server.adapters.v0 import V0Adapter

            return V0Adapter.load(env, module, args)
        if exports_taskset(module):
            releases.require("v1", env.id)
            from millrace.env_server.adapters.v1 import V1Adapter

            return V1Adapter.load(env, args)
        others.append(module.__name__)
    if others:
        raise NotFoundError(
            f"module {others[0]!r} of environment {env.id!r} has neither load_environment() (v0) nor a Taskset in "
            "its __all__ (v1)",
            reason="ENV_NOT_AN_ENVIRONMENT",
            remedy="name a verifiers environment package",
        )
    name = environment_module(env.id)
    # A worker has a directory of its own: so the env-server's search path comes first in the worker's.
    place = Path(next(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), os.getcwd()))
    candidates = (Path("environments") / name, Path(name))
    packages = (path for path in candidates if (place / path / "pyproject.toml").is_file())
    install = f"pip install -e {next(packages, 'DIRECTORY')}"
    raise NotFoundError(
        f"environment {env.id!r} was not found: no Python module {name!r} in {place} and its venv {sys.prefix}",
        reason="ENV_NOT_FOUND",
        remedy=f"put {name}.py into this directory of the env-server, or install it into this venv ({install})",
    )
