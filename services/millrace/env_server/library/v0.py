"""The parts of `verifiers` that the v0 adapter uses, wherever this release has them.

| release | where | what is missing there |
|---|---|---|
| 0.3.1 | `verifiers.legacy` | nothing |
| 0.1.14 to 0.3.0 | `verifiers` | the renderer client, or that it takes a typed config; then the engine tokenizes |
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import asyncio
import functools
import importlib.util
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import datasets

if TYPE_CHECKING or importlib.util.find_spec("verifiers.legacy") is not None:
    from verifiers.legacy.clients import Client, OpenAIChatCompletionsClient, OpenAICompletionsClient, resolve_client
    from verifiers.legacy.types import (
        ClientConfig,
        Response,
        ResponseMessage,
        ResponseTokens,
        TimeSpan,
        Tool,
        ToolCall,
        Usage,
    )
    from verifiers.legacy.utils import response_utils
    from verifiers.legacy.utils.error_utils import ErrorChain
    from verifiers.legacy.utils.message_utils import normalize_messages
    from verifiers.legacy.utils.save_utils import state_to_output

    RENDERER_CLIENT = "verifiers.legacy.clients.renderer_client"
else:
    from verifiers.clients import Client, OpenAIChatCompletionsClient, OpenAICompletionsClient, resolve_client
    from verifiers.types import (
        ClientConfig,
        Response,
        ResponseMessage,
        ResponseTokens,
        TimeSpan,
        Tool,
        ToolCall,
        Usage,
    )
    from verifiers.utils import response_utils
    from verifiers.utils.error_utils import ErrorChain
    from verifiers.utils.message_utils import normalize_messages
    from verifiers.utils.save_utils import state_to_output

    RENDERER_CLIENT = "verifiers.clients.renderer_client"

HAS_RENDERERS = "renderer_config" in ClientConfig.model_fields and importlib.util.find_spec("renderers") is not None
"""Whether turns can be tokenized here, and not by the engine."""

__all__ = [
    "HAS_RENDERERS",
    "RENDERER_CLIENT",
    "Client",
    "ClientConfig",
    "ErrorChain",
    "OpenAIChatCompletionsClient",
    "OpenAICompletionsClient",
    "Response",
    "ResponseMessage",
    "ResponseTokens",
    "TimeSpan",
    "Tool",
    "ToolCall",
    "Usage",
    "normalize_messages",
    "resolve_client",
    "response_utils",
    "state_to_output",
]


# Changes to `verifiers` v0 and `datasets`: hops to threads left out, and columns named in errors.
#
# Nothing that an environment can see changes: what runs in the event loop instead of a thread is the library's own
# formatting, which holds the interpreter's lock for as long either way.

T = TypeVar("T")


class EnvExecutor(ThreadPoolExecutor):
    """A pool for blocking code of environments, which runs the library's formatting of one rollout without a thread."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Run a formatting call in this thread and return a finished asyncio future; submit other calls to the pool.

        What a formatting call raises is raised here.
        """
        if not _is_formatting(fn):
            return super().submit(fn, *args, **kwargs)
        # An asyncio future that is done: the loop takes it as it is, where it would wake itself up for another kind.
        done: Any = asyncio.get_running_loop().create_future()
        done.set_result(fn(*args, **kwargs))  # what it raises reaches its awaiter as well
        return done


def _is_formatting(fn: Callable[..., Any]) -> bool:
    """Return whether `fn` is the call of `asyncio.to_thread` with one of the library's functions that format a
    rollout.
    """
    wrapped = getattr(fn, "args", ())  # functools.partial(context.run, function, …)
    if not wrapped:
        return False
    return wrapped[0] is state_to_output or getattr(wrapped[0], "__module__", "") == response_utils.__name__


# An error of a missing column names the columns that the data set has: `datasets` raises the bare KeyError of a row.

_WATCHED = "_millrace_watched"


def note_columns() -> None:
    """Wrap `datasets.Dataset.map` and `filter` so that a KeyError for a missing column names those that there are.

    A second call does nothing.
    """
    for name in ("map", "filter"):
        stock = getattr(datasets.Dataset, name)
        if not hasattr(stock, _WATCHED):
            setattr(datasets.Dataset, name, _naming_columns(stock))


def _naming_columns(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that calls `stock`, and adds the data set's columns as a note to a KeyError for a missing one."""

    @functools.wraps(stock)
    def call(self: datasets.Dataset, *args: Any, **kwargs: Any) -> Any:
        """Call the library's method, and add the columns to a KeyError for a missing one."""
        try:
            return stock(self, *args, **kwargs)
        except KeyError as error:
            key = error.args[0] if error.args else None
            has_note = bool(getattr(error, "__notes__", ()))  # one of these may call another
            if isinstance(key, str) and key not in self.column_names and not has_note:
                error.add_note(f"the data set has columns {', '.join(map(repr, self.column_names)) or '(none)'}")
            raise

    setattr(call, _WATCHED, True)
    return call
