"""Changes to `verifiers` v0 and `datasets`: hops to threads left out, and columns named in errors.

Nothing that an environment can see changes: what runs in the event loop instead of a thread is the library's own
formatting, which holds the interpreter's lock for as long either way.
"""

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import datasets

from millrace.env_server.library.v0 import response_utils, state_to_output

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
    """Return whether `asyncio.to_thread` was called with a function of the library that formats."""
    wrapped = getattr(fn, "args", ())  # functools.partial(context.run, function, …)
    if not wrapped:
        return False
    return wrapped[0] is state_to_output or getattr(wrapped[0], "__module__", "") == response_utils.__name__


# An error of a missing column names the columns that the data set has: `datasets` raises the bare KeyError of a row.

_WATCHED = "_millrace_watched"


def note_columns() -> None:
    """Wrap `Dataset.map` and `filter` so that a KeyError for a missing column names those that there are.

    Idempotent.
    """
    for name in ("map", "filter"):
        stock = getattr(datasets.Dataset, name)
        if not hasattr(stock, _WATCHED):
            setattr(datasets.Dataset, name, _telling(stock))


def _telling(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def call(self: datasets.Dataset, *args: Any, **kwargs: Any) -> Any:
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
