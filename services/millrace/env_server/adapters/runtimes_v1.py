"""Where the roles and tool servers of a v1 environment run: on this machine, or in containers of its engine.

The library would find out in the first rollout, and so would every other one; here it is said at load.
"""

import shutil
import socket
from typing import Any

from verifiers.v1.configs.agent import AgentConfig

from millrace.env_server.adapters.env_args import V1_ENV
from millrace.errors import InvalidSpecError, Violation

LOCAL, CONTAINERS = "subprocess", "docker"
ENGINE_SOCKET = "/var/run/docker.sock"
_TOOLS = "args (the runtime of tool server {!r})"
_ANSWER_S = 5.0


def check_runtimes(env: Any) -> None:
    """Refuse an environment whose roles or tool servers cannot run here. Raises InvalidSpecError."""
    task_class = env.taskset.task_type()
    roles = [(f"args.{V1_ENV}.{name}.runtime.type", role) for name, role in env.config if isinstance(role, AgentConfig)]
    kinds = [(key, str(role.runtime.type)) for key, role in roles]
    started = [tools for tools in tool_servers(env) if not tools.config.url]  # the others are there already
    asked = [*kinds, *((_TOOLS.format(tools.server_name), str(tools.config.runtime.type)) for tools in started)]
    wrong = [Violation(field=key, value=kind, message=why) for key, kind in asked if (why := problem_of(kind))]
    if not wrong and getattr(task_class, "NEEDS_CONTAINER", False):
        message = f"must be {CONTAINERS!r}: tasks of {task_class.__name__} need a container"
        wrong = [Violation(field=key, value=kind, message=message) for key, kind in kinds if kind == LOCAL]
    if wrong:
        raise InvalidSpecError(wrong)


def tool_servers(env: Any) -> list[Any]:
    """Every tool server that the environment declares, of all rollouts and of each."""
    taskset = env.taskset
    task_class = taskset.task_type()
    return [*type(taskset).toolsets(taskset.config), *task_class.toolsets(taskset.config.task)]


def problem_of(kind: str) -> str:
    """Why nothing of that kind can run here, or ""."""
    if kind == LOCAL:
        return ""
    if kind != CONTAINERS:
        return (
            f"must be {LOCAL!r} or {CONTAINERS!r}: a sandbox of a provider would have to reach into this env-server "
            "through a public tunnel, which Millrace does not open"
        )
    if shutil.which("docker") is None:
        return f"needs the command `docker` where the env-server runs, which is not there; install it, or use {LOCAL!r}"
    with socket.socket(socket.AF_UNIX) as engine:
        engine.settimeout(_ANSWER_S)
        try:
            engine.connect(ENGINE_SOCKET)
        except OSError as error:
            return (
                f"needs a Docker engine where the env-server runs, and none answers at {ENGINE_SOCKET} "
                f"({error.strerror or error}); start one, let workers reach it (docs/security.md), or use {LOCAL!r}"
            )
    return ""
