"""What `verifiers` v0 does again for every rollout, done once: signatures of functions, and hops to threads.

Nothing that an environment can see changes: a signature is the function's own, and what runs in the event loop instead
of a thread is the library's own formatting, which holds the interpreter's lock for as long either way.
"""

import asyncio
import functools
import inspect
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from millrace.env_server.library.v0 import response_utils, state_to_output

T = TypeVar("T")

_SIGNATURES_KEPT = 1024
_kept_signature = functools.lru_cache(_SIGNATURES_KEPT)(inspect.signature)


class _Inspection:
    """The module `inspect`, which looks at a function's signature once."""

    def __getattr__(self, name: str) -> Any:
        return getattr(inspect, name)

    @staticmethod
    def signature(function: Callable[..., Any]) -> inspect.Signature:
        """As `inspect.signature`, which takes the library a sixth of a short rollout."""
        try:
            hash(function)
        except TypeError:  # an object that can be called, and not be kept
            return inspect.signature(function)
        return _kept_signature(function)


def remember_signatures() -> None:
    """Have the library's modules that look at signatures in every rollout ask for each of them once."""
    inspection = _Inspection()
    for name, module in list(sys.modules.items()):
        if name.startswith("verifiers.") and vars(module).get("inspect") is inspect:
            vars(module)["inspect"] = inspection


class EnvExecutor(ThreadPoolExecutor):
    """A pool for what environments run in threads; the library's formatting of one rollout runs at once."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """As the base class, for everything but that."""
        if not _is_formatting(fn):
            return super().submit(fn, *args, **kwargs)
        # An asyncio future that is done: the loop takes it as it is, where it would wake itself up for another kind.
        done: Any = asyncio.get_running_loop().create_future()
        done.set_result(fn(*args, **kwargs))  # what it raises reaches its awaiter as well
        return done


def _is_formatting(fn: Callable[..., Any]) -> bool:
    """Whether `asyncio.to_thread` was called with a function of the library that formats."""
    wrapped = getattr(fn, "args", ())  # functools.partial(context.run, function, …)
    if not wrapped:
        return False
    return wrapped[0] is state_to_output or getattr(wrapped[0], "__module__", "") == response_utils.__name__
