"""The harnesses of a v1 environment's roles, and the runtimes of roles and tool servers: this machine or containers.

The library's own defaults are a shell that runs in a remote sandbox. Ours are a chat loop in this process, on this
machine. They apply only where neither the environment nor the user names one, and where they fit what is
loaded; what does not fit is refused at load, while the library would fail in every rollout.
"""

import dis
import inspect
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args

import verifiers.v1 as vf
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.runtimes import runtime_is_local
from verifiers.v1.utils.compile import resolve_runtime_config
from verifiers.v1.utils.loaders import default_harness_id

from millrace.env_server.adapters.env_args import table_of
from millrace.env_server.library.releases import installed
from millrace.errors import InvalidSpecError, Violation

LOCAL = "subprocess"
ENGINE_SOCKET = "/var/run/docker.sock"
_TOOLS = "args (the runtime of tool server {!r})"
_ANSWER_S, _START_S = 5.0, 40.0
_TRIED = ("docker", "podman")
"""Runtimes whose programs start a container by the same command."""
_CONFINED = (
    "`{}` makes containers itself, which a confined worker may not: set MILLRACE_ENV_ISOLATION=none for environments "
    "that you trust (docs/security.md), or use 'docker', whose engine makes them"
)
_SHOWN_CHARS = 300
_NO_HARNESS = "bash"  # what the library takes for a taskset that brings none
_CHAT_LOOP = "null"  # the library's chat loop, which is a program; ours does the same in this process
_NOT_PLAYED = ("validate",)
"""Of the hooks of a task with a runtime, those that no rollout calls."""


def with_roles(base: Mapping[str, Any], *, harness: str, where: str) -> dict[str, Any]:
    """Return an environment's config (as data) with `harness` and the local runtime in every role that names none.

    `where` is the config's place in messages. Raises InvalidSpecError for a runtime that the library does not have, or
    a role that is no table.
    """
    config = dict(base)
    taskset_id = str(config["taskset"]["id"])
    named = {key: config[key] for key in ("id", "taskset") if key in config}
    for name, author in _roles(vf.resolve_env_config(named)):
        configured = table_of(config.get(name), where=f"{where}.{name}")
        _require_known(configured, key=f"{where}.{name}.runtime")
        pinned = None if author.harness is None else author.harness.id
        own = default_harness_id(taskset_id) if pinned is None else pinned
        chosen = {"id": harness if own in (_NO_HARNESS, _CHAT_LOOP) and pinned != _NO_HARNESS else own}
        role: dict[str, Any] = dict(configured)
        if chosen["id"] != pinned or "harness" in configured:
            role["harness"] = {**chosen, **table_of(configured.get("harness"), where=f"{where}.{name}.harness")}
        if not _names_runtime(configured, author):
            role["runtime"] = {"type": LOCAL}
        config[name] = role
    return config


def _roles(config: Any) -> Iterator[tuple[str, AgentConfig]]:
    """Yield every role as declared by the environment's author."""
    for name, field in type(config).model_fields.items():
        if isinstance(field.default, AgentConfig):
            yield name, field.default


def _require_known(configured: Mapping[str, Any], *, key: str) -> None:
    kind = table_of(configured.get("runtime"), where=key).get("type")
    if isinstance(kind, str) and kind not in _kinds():
        raise InvalidSpecError([Violation(field=f"{key}.type", value=kind, message=problem_of(kind))])


def _names_runtime(configured: Mapping[str, Any], author: AgentConfig) -> bool:
    return configured.get("runtime") is not None or "runtime" in author.model_fields_set


def check_runtimes(env: Any, *, where: str) -> None:
    """Raise InvalidSpecError if a role or tool server of an environment has a runtime or harness that cannot be used
    here.
    """
    task_class = env.taskset.task_type()
    roles = [(name, role) for name, role in env.config if isinstance(role, AgentConfig)]
    kinds = [(f"{where}.{name}.runtime.type", str(role.runtime.type)) for name, role in roles]
    started = [tools for tools in tool_servers(env) if not tools.config.url]  # the others are there already
    asked = [*kinds, *((_TOOLS.format(tools.server_name), str(tools.config.runtime.type)) for tools in started)]
    wrong = [Violation(field=key, value=kind, message=why) for key, kind in asked if (why := problem_of(kind))]
    if not wrong and getattr(task_class, "NEEDS_CONTAINER", False):
        message = f"must be {_either(_containers())}: tasks of {task_class.__name__} need a container"
        wrong = [Violation(field=key, value=kind, message=message) for key, kind in kinds if kind == LOCAL]
    if wrong := wrong or [*_unfit_harnesses(env, dict(roles), where=where)]:
        raise InvalidSpecError(wrong)


def _unfit_harnesses(env: Any, roles: Mapping[str, AgentConfig], *, where: str) -> Iterator[Violation]:
    for name, config in env.config.agent_harnesses().items():
        harness, kind = vf.load_harness(config), str(roles[name].runtime.type)
        if harness.NEEDS_CONTAINER and kind == LOCAL:
            message = f"must be {_either(_containers())}: the harness {config.id!r} needs a container"
            yield Violation(field=f"{where}.{name}.runtime.type", value=kind, message=message)
        if not harness.SUPPORTS_MCP and tool_servers(env):
            message = "must be a harness that takes tool servers, which the taskset has; leave it out for ours"
            yield Violation(field=f"{where}.{name}.harness.id", value=str(config.id), message=message)


def check_default_runtime(env: Any, task: Any, configured: Mapping[str, Any], *, where: str) -> None:
    """Raise InvalidSpecError if a task works on its rollout's machine and a role names no runtime.

    `configured` has the user's tables of roles. The default runtime is this machine, which rollouts share: a fixed path
    would be the same for all of them.
    """
    hook = _hook_on_machine(task)
    roles = [
        name for name, author in _roles(env.config) if not _names_runtime(dict(configured.get(name) or {}), author)
    ]
    if not hook or not roles:
        return
    message = (
        f"must be named: `{hook}` of {type(task).__name__} works on the machine of its rollout; "
        f"{_either(_containers())} gives each rollout one of its own, and {LOCAL!r} is this machine, where rollouts at "
        "the same time share every path that is not relative"
    )
    wrong = [Violation(field=f"{where}.{name}.runtime.type", value="", message=message) for name in roles]
    raise InvalidSpecError(wrong)


def check_task_fits(env: Any, task: Any, *, where: str) -> None:
    """Raise InvalidSpecError if the only role's runtime lacks what the first task needs, such as an image or a network
    policy.

    A container of the image is started to try it. Environments of several roles are not checked. The library would fail
    in every rollout.
    """
    roles = [(name, role) for name, role in env.config if isinstance(role, AgentConfig)]
    if len(roles) != 1:
        return  # which role plays which task is decided by the environment's code
    [(name, role)] = roles
    try:
        machine = resolve_runtime_config(role.runtime, task)
    except ValueError as error:
        kind = str(role.runtime.type)
        message = f"must be {_either(_containers())}: {error}" if kind == LOCAL else str(error)
        wrong = Violation(field=f"{where}.{name}.runtime.type", value=kind, message=message)
        raise InvalidSpecError([wrong]) from error
    image = str(getattr(machine, "image", ""))
    if machine.type in _TRIED and (message := problem_of_image(machine.type, image)):
        raise InvalidSpecError([Violation(field=f"{where}.{name}.runtime.image", value=image, message=message)])


def _hook_on_machine(task: Any) -> str:
    """Return the name of a function of the task's own that uses its runtime; "" if there is none."""
    kind = type(task)
    own = (getattr(kind, name) for name in dir(kind) if getattr(kind, name) is not getattr(vf.Task, name, None))
    plugged = (hook for attr in ("stop", "metric", "reward") for hook in task.hooks(attr))
    for function in (*own, *plugged):
        if callable(function) and _uses_runtime(function):
            return str(function.__name__)
    return ""


def _uses_runtime(function: Callable[..., Any]) -> bool:
    """Return whether a function reads its parameter `runtime`, which all of the library's signatures have."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or function.__name__ in _NOT_PLAYED:
        return False
    if "runtime" not in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
        return False
    read = (each.argval for each in dis.get_instructions(code) if each.opname.startswith("LOAD"))
    return any("runtime" in (names if isinstance(names, tuple) else (names,)) for names in read)


def tool_servers(env: Any) -> list[Any]:
    """Return every tool server that the environment declares: those of the taskset and those of each task."""
    taskset = env.taskset
    task_class = taskset.task_type()
    return [*type(taskset).toolsets(taskset.config), *task_class.toolsets(taskset.config.task)]


def problem_of(kind: str) -> str:
    """Return why no runtime of that kind can run here, or "" (blocking, a few seconds at most)."""
    known = _kinds()
    if kind == LOCAL:
        return ""
    if kind not in known:
        return (
            f"must be {_either((LOCAL, *_containers()))}: verifiers {installed()} has no runtime of that name; "
            "a release that has it may be the environment's own (`orchestrator.env.python`)"
        )
    if not known[kind]:
        return (
            f"must be {_either((LOCAL, *_containers()))}: {kind!r} is a sandbox of a provider, which would have to "
            "reach into this env-server through a public tunnel, and Millrace opens none"
        )
    if shutil.which(kind) is None:
        return f"needs the command `{kind}` where the env-server runs, which is not there; install it, or use {LOCAL!r}"
    return _problem_of_engine() if kind == "docker" else _problem_of_command(kind)


def _problem_of_engine() -> str:
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


def _problem_of_command(command: str) -> str:
    """Return why a program that makes containers without an engine cannot be used here, or "".

    Blocks while it runs `COMMAND version`, at most `_ANSWER_S`.
    """
    try:
        asked = subprocess.run(
            [command, "version"], capture_output=True, stdin=subprocess.DEVNULL, timeout=_ANSWER_S, check=False
        )
    except subprocess.TimeoutExpired:
        problem = f"it did not answer within {_ANSWER_S:g} s"
    except OSError as error:
        problem = error.strerror or str(error)
    else:
        problem = asked.stderr.decode(errors="replace").strip().rpartition("\n")[2] or f"exit code {asked.returncode}"
        if asked.returncode == 0:
            return ""
    return f"needs `{command}` where workers run, and `{command} version` fails there: {problem[:_SHOWN_CHARS]}"


def _kinds() -> dict[str, bool]:
    """Return the kinds of runtimes that the installed library has, and whether each runs on this machine."""
    known: dict[str, bool] = {}
    parts: list[Any] = [AgentConfig.model_fields["runtime"].annotation]
    while parts:
        part = parts.pop(0)
        parts += get_args(part)
        if "type" in (fields := getattr(part, "model_fields", {})):
            known[str(fields["type"].default)] = runtime_is_local(part())
    return known


def problem_of_image(command: str, image: str) -> str:
    """Return why no container of that image starts here, or "". Blocks while it starts one, at most `_START_S`.

    An image that is still being fetched when the time is up counts as one that starts.
    """
    argv = [command, "run", "--rm", "--network", "none", "--entrypoint", "sleep", image, "0"]
    try:
        tried = subprocess.run(argv, capture_output=True, stdin=subprocess.DEVNULL, timeout=_START_S, check=False)
    except subprocess.TimeoutExpired:
        return ""
    except OSError as error:
        return f"`{command}` cannot be run where workers run: {error.strerror or error}"
    if tried.returncode == 0:
        return ""
    lines = tried.stderr.decode(errors="replace").strip().splitlines()
    reported = next((line for line in reversed(lines) if "rror" in line), lines[-1] if lines else "")
    message = (
        f"no container of it starts where workers run ({reported[:_SHOWN_CHARS] or f'exit code {tried.returncode}'}); "
    )
    # What the command reports where a confined worker may not make containers.
    if "not permitted" in reported or ("denied" in reported.lower() and command == "podman"):
        return message + _CONFINED.format(command)
    return message + f"put the image there (`{command} pull`, `{command} load`), or name another"


def _containers() -> tuple[str, ...]:
    """Return the kinds of runtimes on this machine that give each rollout a container."""
    return tuple(kind for kind, is_local in _kinds().items() if is_local and kind != LOCAL)


def _either(kinds: tuple[str, ...]) -> str:
    *most, last = map(repr, kinds)
    return f"{', '.join(most)} or {last}" if most else last
