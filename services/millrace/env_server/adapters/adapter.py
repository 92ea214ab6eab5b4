"""One surface over both generations of `verifiers` environments, and how an environment is found."""

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Sequence
from types import ModuleType
from typing import Protocol

from millrace.env_server.adapters.env_args import parse_args
from millrace.env_server.adapters.outcome import Outcome
from millrace.env_server.isolation.limits import MEMORY_VARIABLE
from millrace.env_server.requests import EnvSpec, LoadedEnv, PlayRequest
from millrace.errors import NotFoundError


class EnvAdapter(Protocol):
    """A loaded environment."""

    loaded: LoadedEnv

    async def play(self, request: PlayRequest, *, tokenizer_dir: str) -> Sequence[Outcome]:
        """Play one task for every member of the request. Deadlines are the caller's."""
        ...

    async def start(self) -> None:
        """Bring up what rollouts share; called once, inside the event loop."""
        ...

    async def close(self) -> None:
        """Release it."""
        ...


def module_name(env_id: str) -> str:
    """The Python module of an environment id: `owner/reverse-text@1.0` → `reverse_text`."""
    return env_id.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_")


def find_module(env_id: str) -> ModuleType:
    """Import the environment's module. Raises NotFoundError if there is none; its own import errors pass through."""
    name = module_name(env_id)
    for candidate in (name, name.lower(), f"verifiers.v1.tasksets.{name.lower()}"):
        try:
            found = importlib.util.find_spec(candidate)
        except (ImportError, ValueError):
            found = None
        if found is not None:
            return importlib.import_module(candidate)
    raise NotFoundError(
        f"environment {env_id!r} was not found: no Python module {name!r} in {sys.prefix}",
        reason="ENV_NOT_FOUND",
        remedy=f"install its package where the env-server runs (pip install -e environments/{name}, or "
        f"pip install {env_id.rsplit('/', 1)[-1].replace('_', '-')}), then try again",
    )


def load_adapter(env: EnvSpec) -> EnvAdapter:
    """Load an environment of either generation. Must run in the main thread: v0 installs signal handlers."""
    args = parse_args(env)
    module = find_module(env.id)
    # Imported here: each pulls in its generation of the library.
    if callable(getattr(module, "load_environment", None)):
        from millrace.env_server.adapters.v0 import V0Adapter

        return V0Adapter.load(env.id, module, args)
    from millrace.env_server.adapters.v1 import V1Adapter, exports_taskset

    if exports_taskset(module):
        return V1Adapter.load(env.id, args)
    raise NotFoundError(
        f"module {module.__name__!r} of environment {env.id!r} has neither load_environment() (v0) nor a Taskset in "
        "its __all__ (v1)",
        reason="ENV_NOT_AN_ENVIRONMENT",
        remedy="name a verifiers environment package",
    )


def describe_load_error(error: BaseException) -> tuple[str, str]:
    """(class, message) of a failed load: message and place of the exception that began it, and what to do."""
    if isinstance(error, NotFoundError):
        return "EnvironmentNotFound", str(error)
    if isinstance(error, MemoryError):
        problem = f"it asked for more memory than a worker may have ({MEMORY_VARIABLE} of the env-server)"
        error = MemoryError(f"{problem}: {error}" if str(error) else problem).with_traceback(error.__traceback__)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" (at {frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    return type(error).__name__, f"{error}{where}; correct the environment's args (orchestrator.env.args), or its code"
