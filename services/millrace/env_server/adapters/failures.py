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
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import CoroutineType, FrameType
from typing import Any

import millrace
from millrace.env_server.isolation.limits import MEMORY_VARIABLE
from millrace.errors import InvalidSpecError, NotFoundError
from millrace.rollouts.types import MAX_ERROR_FRAMES_CHARS

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
    """Set where the args of this worker's environment have its roles, such as `args.env`; `role_key` uses it."""
    _roles_at[:] = [where]


def role_key(path: str) -> str:
    """Return a role's setting, such as `agent.timeout.setup`, as the key below `orchestrator.env` that the user
    writes.
    """
    return f"{_roles_at[0] if _roles_at else 'args.env'}.{path}"


def remember_code(spec: ModuleSpec) -> None:
    """Set the module of this worker's environment: its package's directories, or its file, are the environment's own
    code.
    """
    directories = spec.submodule_search_locations
    _own_code[:] = [os.path.join(each, "") for each in directories] if directories else [spec.origin or ""]


def frames_of(error: BaseException | str) -> str:
    """Return the last frames of the environment's own code in an exception or a traceback's text, one a line.

    They are at most four, of the first error of the chain that has any. If none has, they are frames of foreign code:
    neither Millrace's nor of `verifiers` nor of the standard library; "" if there are none either.
    """
    text = error if isinstance(error, str) else trace_text(error)
    chain = [list(_FRAME.finditer(part)) for part in _NEXT_ERROR.split(text)]
    for is_shown in (_is_own, _is_foreign):
        for part in chain:
            if shown := [_describe(frame) for frame in part if is_shown(frame["file"])]:
                return "\n".join(shown[-_MAX_FRAMES:])[-MAX_ERROR_FRAMES_CHARS:]
    return ""


def own_frame(frame: FrameType) -> str:
    """Return `path:12 in reward` if a frame is in the environment's own code, else ""."""
    file = frame.f_code.co_filename
    return f"{_shown_path(file)}:{frame.f_lineno} in {frame.f_code.co_name}" if _is_own(file) else ""


def own_line_of(thread_id: int) -> str:
    """Return the innermost line of the environment's own code that a thread runs; "" if it runs none."""
    frame = sys._current_frames().get(thread_id)
    while frame is not None:
        if found := own_frame(frame):
            return found
        frame = frame.f_back
    return ""


def own_line(task: asyncio.Future[Any]) -> str:
    """Return the innermost line of the environment's own code that a task awaits; "" if none is known."""
    found, coroutine = "", task.get_coro() if isinstance(task, asyncio.Task) else None
    while isinstance(coroutine, CoroutineType):
        frame: FrameType | None = coroutine.cr_frame
        found = (own_frame(frame) if frame is not None else "") or found
        coroutine = coroutine.cr_await
    return found


def trace_text(error: BaseException) -> str:
    """Return the tracebacks of an exception and its causes, the first cause first.

    Python's own leaves out the context of an exception that has a cause, and libraries set causes after the fact.
    """
    parts = ["".join(traceback.format_exception(each, chain=False)) for each in _chain(error)]
    return _CAUSE.join(reversed(parts))


def our_spelling(text: str) -> str:
    """Return the text with flags of the library's own command written as keys of the args: `args.env.agent.…`."""
    return _FLAG.sub(lambda flag: _key(flag[0][2:].rstrip(".").replace("-", "_")), text)


def _key(path: str) -> str:
    path = path.removeprefix("env.")
    return f"args.{path.removeprefix('taskset.')}" if path.startswith("taskset.") else role_key(path)


def describe_error(error: BaseException) -> tuple[str, str, str]:
    """Return (class, message, remedy) of an error in the environment's code; the message ends with file and line.

    A NotFoundError, and an InvalidSpecError with a reason of its own such as ENV_DATA_MISSING, keep their message and
    remedy; the reason is then in place of the class.
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
    own = [frame for frame in frames if _is_own(frame.filename)] or frames
    where = f" (at {own[-1].filename}:{own[-1].lineno} in {own[-1].name})" if own else ""
    remedy = "correct the environment's args (orchestrator.env.args), or its code"
    return type(error).__name__, f"{our_spelling(text)}{where}", remedy


def is_engine_fault(error: BaseException) -> bool:
    """Return whether an exception of the chain has a `status_code` of 500 or above, as an engine's answer gives it."""
    codes = (getattr(each, "status_code", None) for each in _chain(error))
    return any(isinstance(code, int) and code >= 500 for code in codes)


def _chain(error: BaseException | None, seen: set[int] | None = None) -> Iterator[BaseException]:
    """Yield the exception, then all its causes and contexts, each once."""
    seen = set() if seen is None else seen
    if error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        yield from _chain(error.__cause__, seen)
        yield from _chain(error.__context__, seen)


def _message(error: BaseException) -> str:
    try:
        return "; ".join([str(error), *map(str, getattr(error, "__notes__", ()))])
    except Exception as problem:  # noqa: BLE001 - code of the environment, too
        return f"(its text cannot be made: {type(problem).__name__})"


def _is_own(file: str) -> bool:
    return any(file == own or (own.endswith(os.sep) and file.startswith(own)) for own in _own_code)


def _is_foreign(file: str) -> bool:
    is_library = file.startswith(_OURS) or _LIBRARY in file or file.startswith("<")
    return not is_library and (not file.startswith(_STDLIB) or "site-packages" in file)


def _describe(frame: re.Match[str]) -> str:
    """Format a frame, as in `pkg/module.py:12 in reward: raise ValueError(x)`."""
    code = f": {frame['code'].strip()}" if frame["code"] else ""
    return f"{_shown_path(frame['file'])}:{frame['line']} in {frame['name']}{code}"


def _shown_path(file: str) -> str:
    root = next((os.path.dirname(own.rstrip(os.sep)) for own in _own_code if file.startswith(own)), "")
    return os.path.relpath(file, root) if root else os.sep.join(file.split(os.sep)[-2:])
