"""The harnesses of a v1 environment's roles, and the runtimes of roles and tool servers: this machine or containers.

The library's own defaults are a shell that runs in a remote sandbox. Ours are a chat loop in this process, on this
machine. They apply only where neither the environment nor the user names one, and where they fit what is
loaded; what does not fit is refused at load, while the library would fail in every rollout.
"""

import contextlib
import dis
import inspect
import json
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any, get_args

import httpx
import verifiers.v1 as vf
from mcp import ClientSession
from mcp.client.streamable_http import streamable_http_client
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.runtimes import ProgramResult, runtime_is_local
from verifiers.v1.utils.compile import resolve_runtime_config
from verifiers.v1.utils.loaders import default_harness_id

from millrace.decoding import decode_object
from millrace.env_server import engine_access
from millrace.env_server.adapters.failures import other_part, with_plain_text
from millrace.env_server.adapters.selection import table_of
from millrace.env_server.library import v1
from millrace.env_server.library.endpoints import arguments_text
from millrace.env_server.library.releases import installed
from millrace.env_server.library.v1 import mcp_field
from millrace.errors import CorruptObjectError, InvalidSpecError, Violation

# An in-process v1 harness: model calls through the interception endpoint, and calls of tools in between.
#
# The stock harnesses start a Python subprocess per segment (about 1.5 CPU-seconds per rollout). The interception is
# the contract, not the process, so a coroutine does, which asks it without a connection (`library.interception`). The
# tools are those of the taskset's MCP servers, which the library starts; the policy sees them under the names that the
# library's own `null` harness gives them.

# A plugin id is looked up as a top-level module; `register` makes this module answer to it.
HARNESS_ID = "millrace_inprocess"
_SHOWN_RESULT_CHARS = 500


class Tools:
    """What the MCP servers of a rollout offer."""

    def __init__(self) -> None:
        self.definitions: list[dict[str, Any]] = []
        """As OpenAI's API has them."""
        self._owners: dict[str, tuple[ClientSession, str]] = {}

    async def add(self, server: str, session: ClientSession) -> None:
        """Add the tools of an MCP server, over its open `session`, to those offered, under the names `SERVER_TOOL`.

        With `server` "" a tool keeps its name. Raises ValueError if a name is taken.
        """
        await session.initialize()
        for tool in (await session.list_tools()).tools:
            name = f"{server}_{tool.name}" if server else tool.name
            if name in self._owners:
                raise ValueError(f"two tool servers have a tool {name!r}; give one of them another TOOL_PREFIX")
            self._owners[name] = (session, tool.name)
            function = {
                "name": name,
                "description": tool.description or "",
                "parameters": mcp_field(tool, "inputSchema"),
            }
            self.definitions.append({"type": "function", "function": function})

    async def answer(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """Make a tool call that the policy asked for, in OpenAI's form, and return the message with its result.

        For an unknown tool, or arguments that are no JSON object, the message has the error. Errors of the server are
        raised.
        """
        function = call["function"]
        return {
            "role": "tool",
            "tool_call_id": call["id"],
            "content": await self._result(str(function.get("name")), arguments_text(function.get("arguments"))),
        }

    async def _result(self, name: str, arguments: str) -> str | list[dict[str, Any]]:
        """Call the tool `name` with its arguments, a JSON text, and return the content of its result.

        The content is one text if all parts are text, else the parts in OpenAI's form. An unknown tool and arguments
        that are no JSON object give a text that begins with `error:`.
        """
        if name not in self._owners:
            return f"error: there is no tool {name!r}"
        try:
            values = decode_object(arguments, what=f"arguments of {name}", reason="TOOL_ARGUMENTS_INVALID")
        except CorruptObjectError as error:
            return f"error: the arguments must be a JSON object: {error}"
        session, tool = self._owners[name]
        with engine_access.at(f"tool {name!r}"):
            blocks = (await session.call_tool(tool, values)).content
        parts: list[dict[str, Any]] = [_part(block) for block in blocks]
        return "\n".join(part["text"] for part in parts) if not other_part([{"content": parts}]) else parts


def _part(block: Any) -> dict[str, Any]:
    """Convert a content block of MCP to OpenAI's form: an image as a data URL, anything else as text."""
    if block.type == "image":
        return {"type": "image_url", "image_url": {"url": f"data:{mcp_field(block, 'mimeType')};base64,{block.data}"}}
    return {"type": "text", "text": block.text if block.type == "text" else str(block)}


@contextlib.asynccontextmanager
async def opened_tools(urls: Mapping[str, str], *, timeout_s: float) -> AsyncIterator[Tools]:
    """Connect to MCP servers, `urls` by server name, and yield their tools; disconnect when the block ends.

    Each HTTP request to a server may take `timeout_s`.
    """
    tools = Tools()
    async with contextlib.AsyncExitStack() as stack:
        for server, url in urls.items():
            client = await stack.enter_async_context(httpx.AsyncClient(timeout=timeout_s, follow_redirects=True))
            read, write, *_ = await stack.enter_async_context(streamable_http_client(url, http_client=client))
            await tools.add(server, await stack.enter_async_context(ClientSession(read, write)))
        yield tools


class InprocessHarnessConfig(vf.HarnessConfig):
    """Nothing to configure."""


class InprocessHarness(vf.Harness[InprocessHarnessConfig]):
    """Sends the conversation until the policy calls no tool; the rollout's user, if it has one, resumes it."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    SUPPORTS_TOOL_INTERCEPTION = v1.GATES_CALLS
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(  # type: ignore[override]
        self,
        ctx: vf.ModelContext,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
        **kwargs: Any,
    ) -> ProgramResult:
        """Play one rollout: call the model, and the tools that it asks for, until a reply calls no tool.

        `ctx` has the model's name, `secret` names the rollout at the interception, and `mcp_urls` has its tool servers
        by name; `data` is the task with its prompt. `trace`, `runtime` and `endpoint` are not used. Returns exit code 1
        if a model call is not answered with 200 or the library stops the rollout, with the reason in `stderr`; else 0.
        """
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [with_plain_text(message_to_wire(message)) for message in prompt or ()]
        async with opened_tools(mcp_urls, timeout_s=self.config.tool_timeout) as tools:
            body: dict[str, Any] = {"model": ctx.model, "messages": messages}
            if tools.definitions:
                body["tools"] = tools.definitions
            while True:
                reply = await v1.ask(secret, body)
                if reply.status != 200:
                    detail = f"{reply.status} {reply.text[:_SHOWN_RESULT_CHARS]}"
                    return ProgramResult(exit_code=1, stdout="", stderr=detail)
                message = json.loads(reply.body)["choices"][0]["message"]
                calls = message.get("tool_calls") if tools.definitions else None
                if not calls:
                    return ProgramResult(exit_code=0, stdout="", stderr="")
                messages.append(message)
                for call in calls:
                    try:
                        denied = await v1.verdict(secret, call)
                    except v1.StoppedError as error:
                        return ProgramResult(exit_code=1, stdout="", stderr=str(error))
                    messages.append(dict(denied) if denied else await tools.answer(call))


def register() -> str:
    """Make this module what the library loads for HARNESS_ID, and return that id."""
    # Found under the first name the library does not look for it on the disk, which it would in every rollout.
    for name in (f"verifiers.v1.harnesses.{HARNESS_ID}", HARNESS_ID):
        sys.modules[name] = sys.modules[__name__]
    return HARNESS_ID


__all__ = ["InprocessHarness"]


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
    """Return the environment's config `base` with a harness and a runtime in every role that names none.

    `harness` is the id of ours, which is set where the library would take its shell or its chat loop; the runtime is
    this machine. `where` is the config's key in messages. Raises InvalidSpecError for a runtime that the library does
    not have, or a role that is no table.
    """
    config = dict(base)
    taskset_id = str(config["taskset"]["id"])
    named = {key: config[key] for key in ("id", "taskset") if key in config}
    # Resolved without the user's keys, so that what the author declares can be seen apart from what the user sets.
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
    """Yield (name, default config) of every role that the environment's config class declares."""
    for name, field in type(config).model_fields.items():
        if isinstance(field.default, AgentConfig):
            yield name, field.default


def _require_known(configured: Mapping[str, Any], *, key: str) -> None:
    """Raise InvalidSpecError if a role's table names a kind of runtime that the library does not have; `key` is its
    runtime's key.
    """
    kind = table_of(configured.get("runtime"), where=key).get("type")
    if isinstance(kind, str) and kind not in _kinds():
        raise InvalidSpecError([Violation(field=f"{key}.type", value=kind, message=problem_of(kind))])


def _names_runtime(configured: Mapping[str, Any], author: AgentConfig) -> bool:
    """Return whether the user's table of a role (`configured`) or the environment's author names the role's runtime."""
    return configured.get("runtime") is not None or "runtime" in author.model_fields_set


def check_runtimes(env: Any, *, where: str) -> None:
    """Raise InvalidSpecError if a role or tool server of an environment has a runtime or harness that cannot be used
    here.

    `where` is the key of the environment's config. Blocks for some seconds while runtimes are looked for.
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
    """Yield a violation for each role whose harness needs a container and has none, or takes no tool servers that there
    are.

    `roles` has the config of each role, and `where` is the key of the environment's config.
    """
    for name, config in env.config.agent_harnesses().items():
        harness, kind = vf.load_harness(config), str(roles[name].runtime.type)
        if harness.NEEDS_CONTAINER and kind == LOCAL:
            message = f"must be {_either(_containers())}: the harness {config.id!r} needs a container"
            yield Violation(field=f"{where}.{name}.runtime.type", value=kind, message=message)
        if not harness.SUPPORTS_MCP and tool_servers(env):
            message = "must be a harness that takes tool servers, which the taskset has; leave it out for ours"
            yield Violation(field=f"{where}.{name}.harness.id", value=str(config.id), message=message)


def check_default_runtime(env: Any, task: Any, configured: Mapping[str, Any], *, where: str) -> None:
    """Raise InvalidSpecError if the task's own functions use its rollout's machine and a role names no runtime.

    `configured` has the user's tables of roles by name, and `where` is their key. The default runtime is this machine,
    which rollouts share: a fixed path would be the same for all of them.
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
    """Raise InvalidSpecError if the only role's runtime lacks what `task` needs, such as an image or a network policy.

    `where` is the key of the environment's config. A container of the image is started to try it, which blocks.
    Environments of several roles are not checked. Without this check the library would fail in every rollout.
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
    """Return the name of the first function of the task's own class or plugins that uses `runtime`; "" if there is
    none.
    """
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
    # The bytecode tells a parameter that is used from one that a signature of the library merely demands.
    read = (each.argval for each in dis.get_instructions(code) if each.opname.startswith("LOAD"))
    return any("runtime" in (names if isinstance(names, tuple) else (names,)) for names in read)


def tool_servers(env: Any) -> list[Any]:
    """Return every tool server that the environment declares: those of the taskset and those of each task."""
    taskset = env.taskset
    task_class = taskset.task_type()
    return [*type(taskset).toolsets(taskset.config), *task_class.toolsets(taskset.config.task)]


def problem_of(kind: str) -> str:
    """Return why no runtime of that kind, such as `docker`, can run here; "" if one can. Blocks for some seconds at
    most.
    """
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
    """Return why the Docker engine cannot be reached at its socket; "" if it can."""
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
    """Return why a program that makes containers without an engine, such as podman, cannot be used here; "" if it can.

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
    """Return the kinds of runtimes that the installed library has: for each whether it runs on this machine."""
    known: dict[str, bool] = {}
    parts: list[Any] = [AgentConfig.model_fields["runtime"].annotation]
    while parts:
        part = parts.pop(0)
        parts += get_args(part)
        if "type" in (fields := getattr(part, "model_fields", {})):
            known[str(fields["type"].default)] = runtime_is_local(part())
    return known


def problem_of_image(command: str, image: str) -> str:
    """Return why no container of `image` can be started here by `command` (docker or podman); "" if one can.

    Blocks while it starts one, at most `_START_S`. An image that is still being fetched when the time is up counts as
    one that starts.
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
    # The last line of such programs is often a hint; the error is the last line that has the word.
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
    """Return the kinds as text for a message: `'a', 'b' or 'c'`."""
    *most, last = map(repr, kinds)
    return f"{', '.join(most)} or {last}" if most else last
