"""What is reported of an exception: its class, its message, and the last frames of the environment's own code.

An environment's error passes through the library and through us before it is caught, and may be wrapped on the way. Its
author looks for the line that is theirs, so frames of other code are shown only where none of the environment's is.
"""

import asyncio
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Mapping
from importlib.machinery import ModuleSpec
from types import CoroutineType, FrameType
from typing import Any

import millrace
from millrace.env_server.isolation.limits import MEMORY_VARIABLE
from millrace.errors import InvalidSpecError, NotFoundError, Violation
from millrace.rollouts.types import MAX_ERROR_FRAMES_CHARS

# Refusal of content that is not text in requests to our engines: of messages a trainer sees the tokens alone.
#
# Without this check an image fails wherever the chat template or the engine meets it first, in words that name
# neither.


def other_part(messages: Iterable[Any]) -> str:
    """Return the type of the first content part in the messages that is not text, such as `image_url`; "" if all are
    text.

    Messages are mappings or models with a field `content`.
    """
    for message in messages:
        content = _field(message, "content")
        for part in content if isinstance(content, list | tuple) else ():
            kind = "text" if isinstance(part, str) else str(_field(part, "type") or "of no type")
            if kind != "text":
                return kind
    return ""


def refusal(kind: str) -> str:
    """Return the error message for a content part of type `kind`."""
    return (
        f"a message of the environment has a content part {kind!r}, and Millrace plays and trains on text alone; "
        "leave such parts out of its prompts and replies, or evaluate it at an endpoint that takes them "
        "(millrace eval --client.base-url)"
    )


def refuse_other_parts(prompts: Iterable[Any], *, tasks: str) -> None:
    """Raise InvalidSpecError if a prompt of the environment's tasks has content parts that our engines do not accept.

    `prompts` are lists of messages, or texts, by the task's number; `tasks` says in the message which set they are of,
    such as "training". Parts that come up only in the course of a rollout fail that rollout.
    """
    for index, prompt in enumerate(prompts):
        if kind := other_part(prompt if isinstance(prompt, list | tuple) else ()):
            message = f"its {tasks} task {index}: {refusal(kind)}"
            raise InvalidSpecError([Violation(field="orchestrator.env.id", message=message)])


def with_plain_text(message: dict[str, Any]) -> dict[str, Any]:
    """Return the chat message with its list of text parts joined to one string by line ends.

    Many chat templates take only a string. A message with other parts, or with a string, is returned unchanged.
    """
    content = message.get("content")
    if not isinstance(content, list) or other_part([message]):
        return message
    return {**message, "content": "\n".join(part if isinstance(part, str) else part["text"] for part in content)}


def _field(thing: Any, name: str) -> Any:
    """Return the field of a mapping or the attribute of an object; None if it is missing."""
    return thing.get(name) if isinstance(thing, Mapping) else getattr(thing, name, None)


def not_text_error(base: type[Exception]) -> type[Exception]:
    """Return a new exception class `NotTextError`, derived from `base`.

    `base` is the class of errors that this generation of `verifiers` treats as the environment's own mistake.
    """
    return type("NotTextError", (base,), {"__doc__": "The environment sends what is not text to an engine of ours."})


_MAX_FRAMES = 4
# What Python writes between the errors of a chain, the one that began it first.
_NEXT_ERROR = re.compile(r"\n[ |]*(?:The above exception was the direct cause|During handling of the above exception)")
_CAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"
# Flags of `vf-eval` that are keys of an environment's args here; others are not ours to translate.
_FLAG = re.compile(r"--(?:env|taskset|agent|timeout)\.[A-Za-z0-9_.<>-]*[A-Za-z0-9_>]")
_FRAME = re.compile(
    r'^[ |]*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>.+)\n(?:[ |]{4,}(?P<code>.+))?', re.M
)
_OURS = os.path.dirname(str(millrace.__file__)) + os.sep
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_LIBRARY = f"{os.sep}site-packages{os.sep}verifiers{os.sep}"

_own_code: list[str] = []
"""Files and directories of the environment's own code; a worker hosts one environment."""


_roles_at: list[str] = []
"""Where the args of this worker's environment have its roles."""


def remember_roles(where: str) -> None:
    """Set the key under which the args of this process's environment have its roles, such as `args.env`; `role_key`
    uses it.
    """
    _roles_at[:] = [where]


def role_key(path: str) -> str:
    """Return the key of a role's setting as the user writes it: `args.env.agent.timeout.setup` for
    `agent.timeout.setup`.

    `remember_roles` may have set another prefix than `args.env`.
    """
    return f"{_roles_at[0] if _roles_at else 'args.env'}.{path}"


def remember_code(spec: ModuleSpec) -> None:
    """Set which files count as the environment's own code in this process: the directories of the package that
    `spec` describes, or its one file.
    """
    directories = spec.submodule_search_locations
    _own_code[:] = [os.path.join(each, "") for each in directories] if directories else [spec.origin or ""]


def frames_of(error: BaseException | str) -> str:
    """Return the last frames of the environment's own code, one a line, of an exception or of a traceback's text.

    At most four frames are returned, all of one error: of the first error in the chain of causes that has any, the
    innermost frame last. If no error has one, frames of foreign code are returned: neither Millrace's nor of
    `verifiers` nor of the standard library; "" if there are none either.
    """
    text = error if isinstance(error, str) else trace_text(error)
    chain = [list(_FRAME.finditer(part)) for part in _NEXT_ERROR.split(text)]
    # Own code is sought in the whole chain before any foreign code: a cause in a library must not hide the author's
    # line.
    for is_shown in (_is_own, _is_foreign):
        for part in chain:
            if shown := [_describe(frame) for frame in part if is_shown(frame["file"])]:
                return "\n".join(shown[-_MAX_FRAMES:])[-MAX_ERROR_FRAMES_CHARS:]
    return ""


def own_frame(frame: FrameType) -> str:
    """Return `path:12 in reward` for a frame whose file is the environment's own code (`remember_code`), else ""."""
    file = frame.f_code.co_filename
    return f"{_shown_path(file)}:{frame.f_lineno} in {frame.f_code.co_name}" if _is_own(file) else ""


def own_line_of(thread_id: int) -> str:
    """Return the innermost line of the environment's own code on a thread's stack, as `path:12 in reward`; "" if it
    runs none.
    """
    frame = sys._current_frames().get(thread_id)
    while frame is not None:
        if found := own_frame(frame):
            return found
        frame = frame.f_back
    return ""


def own_line(task: asyncio.Future[Any]) -> str:
    """Return the innermost line of the environment's own code at which a task waits, as `path:12 in reward`; "" if
    none is known.
    """
    found, coroutine = "", task.get_coro() if isinstance(task, asyncio.Task) else None
    while isinstance(coroutine, CoroutineType):
        frame: FrameType | None = coroutine.cr_frame
        # The innermost coroutine is the last of the chain, so a later frame replaces an earlier one.
        found = (own_frame(frame) if frame is not None else "") or found
        coroutine = coroutine.cr_await
    return found


def trace_text(error: BaseException) -> str:
    """Return the tracebacks of an exception, its causes and its contexts as one text, the first cause first.

    Python's own leaves out the context of an exception that has a cause, and libraries set causes after the fact.
    """
    parts = ["".join(traceback.format_exception(each, chain=False)) for each in _chain(error)]
    return _CAUSE.join(reversed(parts))


def our_spelling(text: str) -> str:
    """Return the text with flags of the command `vf-eval` written as keys of an environment's args.

    `--env.agent.timeout.setup` becomes `args.env.agent.timeout.setup`.
    """
    return _FLAG.sub(lambda flag: _key(flag[0][2:].rstrip(".").replace("-", "_")), text)


def _key(path: str) -> str:
    """Return the key of the args for the dotted path of a flag of `vf-eval`: `args.NAME` for `taskset.NAME`, else a
    role's.
    """
    path = path.removeprefix("env.")
    return f"args.{path.removeprefix('taskset.')}" if path.startswith("taskset.") else role_key(path)


def describe_error(error: BaseException) -> tuple[str, str, str]:
    """Return (class, message, remedy) of an error that the environment's code raised while it was loaded or played.

    The message ends with the file and line of the environment's own code. A NotFoundError, and an InvalidSpecError
    whose reason begins with ENV_, keep their message and remedy; in place of the class they have `EnvironmentNotFound`
    and the reason.
    """
    if isinstance(error, NotFoundError):
        return "EnvironmentNotFound", error.message, error.remedy or ""
    if isinstance(error, InvalidSpecError) and error.reason.startswith("ENV_"):
        return error.reason, error.message, error.remedy or ""  # it says itself where
    text = _message(error)
    if isinstance(error, MemoryError):
        problem = f"it asked for more memory than a worker may have ({MEMORY_VARIABLE} of the env-server)"
        text = f"{problem}: {text}" if text else problem
    frames = traceback.extract_tb(error.__traceback__)
    # Without a frame of its own, such as for a syntax error, the last frame is still the best place.
    own = [frame for frame in frames if _is_own(frame.filename)] or frames
    where = f" (at {own[-1].filename}:{own[-1].lineno} in {own[-1].name})" if own else ""
    remedy = "correct the environment's args (orchestrator.env.args), or its code"
    return type(error).__name__, f"{our_spelling(text)}{where}", remedy


def is_engine_fault(error: BaseException) -> bool:
    """Return whether an exception of the chain has a `status_code` of 500 or above, as an engine's answer gives it."""
    codes = (getattr(each, "status_code", None) for each in _chain(error))
    return any(isinstance(code, int) and code >= 500 for code in codes)


def _chain(error: BaseException | None, seen: set[int] | None = None) -> Iterator[BaseException]:
    """Yield the exception, then all its causes and contexts, each once; nothing for None.

    `seen` has the Python ids of exceptions that were yielded already, and gets those of these.
    """
    seen = set() if seen is None else seen
    if error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        yield from _chain(error.__cause__, seen)
        yield from _chain(error.__context__, seen)


def _message(error: BaseException) -> str:
    """Return the exception's text and its notes, joined by "; ". If making the text raises, say so instead."""
    try:
        return "; ".join([str(error), *map(str, getattr(error, "__notes__", ()))])
    except Exception as problem:  # noqa: BLE001 - code of the environment, too
        return f"(its text cannot be made: {type(problem).__name__})"


def _is_own(file: str) -> bool:
    """Return whether a file is the environment's own code, as `remember_code` has set it."""
    return any(file == own or (own.endswith(os.sep) and file.startswith(own)) for own in _own_code)


def _is_foreign(file: str) -> bool:
    """Return whether a file is neither Millrace's nor of `verifiers` nor of the standard library."""
    is_library = file.startswith(_OURS) or _LIBRARY in file or file.startswith("<")
    return not is_library and (not file.startswith(_STDLIB) or "site-packages" in file)


def _describe(frame: re.Match[str]) -> str:
    """Format a frame, as in `pkg/module.py:12 in reward: raise ValueError(x)`."""
    code = f": {frame['code'].strip()}" if frame["code"] else ""
    return f"{_shown_path(frame['file'])}:{frame['line']} in {frame['name']}{code}"


def _shown_path(file: str) -> str:
    """Return a file's path relative to the directory that has the environment's package; of foreign code its last
    two parts.
    """
    root = next((os.path.dirname(own.rstrip(os.sep)) for own in _own_code if file.startswith(own)), "")
    return os.path.relpath(file, root) if root else os.sep.join(file.split(os.sep)[-2:])
