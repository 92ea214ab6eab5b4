"""Signatures of functions: `verifiers` and pydantic look at the same ones in every rollout; here they are kept.

Nothing that an environment can see changes: a signature is the function's own.
"""

import functools
import inspect
import sys
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

_NUM_KEPT = 1024
_SELF = object()
# pydantic asks for that of a field's default factory whenever it makes a model without validation.
_PYDANTIC = "pydantic._internal._typing_extra"


@functools.lru_cache(_NUM_KEPT)
def _kept(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


@functools.lru_cache(_NUM_KEPT)
def _kept_of_method(function: FunctionType) -> inspect.Signature:
    return inspect.signature(MethodType(function, _SELF))


def signature(function: Callable[..., Any], **options: Any) -> inspect.Signature:
    """As `inspect.signature`, which takes `verifiers` a sixth of a short rollout; computed once."""
    if options:
        return inspect.signature(function, **options)
    if isinstance(function, MethodType) and isinstance(function.__func__, FunctionType):
        return _kept_of_method(function.__func__)  # its owner is not kept with it
    try:
        return _kept(function)
    except TypeError:  # an object that can be called, and not be kept
        return inspect.signature(function)


class _Inspection:
    """The module `inspect`, but for `signature`."""

    signature = staticmethod(signature)

    def __getattr__(self, name: str) -> Any:
        return getattr(inspect, name)


def remember_signatures() -> None:
    """Have the libraries' modules that look at signatures in every rollout ask for each of them once."""
    inspection = _Inspection()
    for name, module in list(sys.modules.items()):
        if name.startswith("verifiers.") and vars(module).get("inspect") is inspect:
            vars(module)["inspect"] = inspection
        if name == _PYDANTIC and vars(module).get("signature") is inspect.signature:
            vars(module)["signature"] = signature
