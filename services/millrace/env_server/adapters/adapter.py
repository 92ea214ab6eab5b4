"""One surface over both generations of `verifiers` environments, and how an environment is found."""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Protocol

from millrace.env_server.adapters.env_args import parse_args
from millrace.env_server.adapters.failures import remember_code
from millrace.env_server.adapters.outcome import Outcome
from millrace.env_server.requests import EnvSpec, LoadedEnv, PlayRequest
from millrace.errors import NotFoundError


class EnvAdapter(Protocol):
    """A loaded environment."""

    loaded: LoadedEnv

    async def play(self, request: PlayRequest, *, tokenizer_dir: str) -> Sequence[Outcome]:
        """Play one task for every member of the request. Deadlines are the caller's."""
        ...

    async def start(self) -> None:
        """Start what rollouts share; called once, inside the event loop."""
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
            remember_code(found)
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
