"""Has an error of a missing column say which columns the data set has: `datasets` raises a bare KeyError of a row's."""

import functools
from collections.abc import Callable
from typing import Any

import datasets

_WATCHED = "_millrace_watched"


def tell_columns() -> None:
    """Watch what calls a function with rows of a data set, in this process. Idempotent."""
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
            is_told = bool(getattr(error, "__notes__", ()))  # one of these may call another
            if isinstance(key, str) and key not in self.column_names and not is_told:
                error.add_note(f"the data set has columns {', '.join(map(repr, self.column_names)) or '(none)'}")
            raise

    setattr(call, _WATCHED, True)
    return call
