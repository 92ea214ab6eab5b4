"""Libraries that only some exports need."""

import importlib
from types import ModuleType

from millrace.errors import InvalidStateError


def import_extra(module: str, *, extra: str) -> ModuleType:
    """The module; an error with the pip command where the extra that brings it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InvalidStateError(
            f"exporting to {extra} needs {module.partition('.')[0]}, which is not installed ({error})",
            reason="EXTRA_MISSING",
            remedy=f"pip install 'millrace[{extra}]'",
        ) from error
