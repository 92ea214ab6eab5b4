"""Caches of what `verifiers` and pydantic look up anew in every rollout: signatures, and decorated methods.

Nothing that an environment can see changes: a signature is the function's own, and decorators mark a class's methods
when it is made.
"""

import functools
import inspect
import sys
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

_NUM_KEPT = 1024
_SELF = object()
# pydantic reads the signature of a field's default factory whenever it makes a model without validation.
_PYDANTIC = "pydantic._internal._typing_extra"
_DECORATORS, _DISCOVER = "verifiers.v1.utils.decorators", "discover_decorated"


@functools.lru_cache(_NUM_KEPT)
def _kept(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function, cached by the function."""
    return inspect.signature(function)


@functools.lru_cache(_NUM_KEPT)
def _kept_of_method(function: FunctionType) -> inspect.Signature:
    """Return the signature of a function as a bound method, without `self`, cached by the function."""
    return inspect.signature(MethodType(function, _SELF))


def signature(function: Callable[..., Any], **options: Any) -> inspect.Signature:
    """Return what `inspect.signature` returns, from a cache unless there are options.

    Without the cache `verifiers` spends a sixth of a short rollout on it.
    """
    if options:
        return inspect.signature(function, **options)
    if isinstance(function, MethodType) and isinstance(function.__func__, FunctionType):
        return _kept_of_method(function.__func__)  # its owner is not kept with it
    try:
        return _kept(function)
    except TypeError:  # an object that can be called, and not be kept
        return inspect.signature(function)


@functools.lru_cache(_NUM_KEPT)
def _decorated_names(kind: type, attr: str) -> tuple[str, ...]:
    """Return the names of the methods of a class and its bases that have the attribute `attr`, set by a decorator."""
    marked = (
        name for base in kind.__mro__ for name, each in vars(base).items() if callable(each) and hasattr(each, attr)
    )
    return tuple(dict.fromkeys(marked))


def discover_decorated(obj: object, attr: str) -> list[Callable[..., Any]]:
    """Return an object's methods that a decorator has marked with the attribute `attr`, by falling priority, then by
    name.

    This is the library's function of that name with a cache; the library's inspects every attribute of the object.
    """
    names = _decorated_names(type(obj), attr)
    methods = [method for name in names if hasattr(method := getattr(obj, name), attr)]
    methods.sort(key=lambda method: (-getattr(method, f"{attr}_priority", 0), method.__name__))
    return methods


class _Inspection:
    """The module `inspect`, but for `signature`."""

    signature = staticmethod(signature)

    def __getattr__(self, name: str) -> Any:
        return getattr(inspect, name)


def remember_lookups() -> None:
    """Replace lookups of signatures and decorated methods by cached ones, in the modules of `verifiers` and
    pydantic that are imported.
    """
    inspection = _Inspection()
    # A copy, because another thread may import at the same time.
    for name, module in list(sys.modules.items()):
        known = vars(module)
        if name.startswith("verifiers.") and known.get("inspect") is inspect:
            known["inspect"] = inspection
        if name.startswith("verifiers.v1.") and getattr(known.get(_DISCOVER), "__module__", "") == _DECORATORS:
            known[_DISCOVER] = discover_decorated
        if name == _PYDANTIC and known.get("signature") is inspect.signature:
            known["signature"] = signature
