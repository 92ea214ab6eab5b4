"""What a task is scored with, as the log keeps it: JSON of a bounded size, whatever an environment's author put there.

An answer or an info may be anything: an array, bytes, an object of a class, a table of a gigabyte, itself. None of it
may cost a rollout or hold up the worker, so no more of a value is looked at than is kept.
"""

import itertools
import json
import math
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from numbers import Integral, Real
from typing import Any

import numpy as np

from millrace.rollouts.types import MAX_TASK_JSON_BYTES

_MAX_DEPTH = 16
_MAX_NAME_CHARS = 200
_MAX_INTEGER = 1 << 53
"""What every reader of JSON has exactly; larger ones are text."""
_MAX_NAMES = 256
_LEFT_OUT = "…"
"""The name under which a mapping says how many of its names are left out."""
_ROOM_OF_LEFT_OUT = 64


class _Budget:
    """How many more characters of one value are kept."""

    def __init__(self, chars: int) -> None:
        self.chars = chars
        self.is_cut = False

    def take(self, count: int) -> bool:
        """Return whether there is room for so many more characters; from the first refusal on there is none."""
        self.chars -= count
        self.is_cut = self.is_cut or self.chars < 0
        return not self.is_cut


def bounded_object(given: Mapping[str, Any], *, limit_bytes: int = MAX_TASK_JSON_BYTES) -> str:
    """Return a mapping as a JSON object of at most `limit_bytes`, `answer` first; "" for an empty one.

    A value whose JSON is long is cut, and kept as text; names that do not fit then are left out, and counted. What JSON
    does not have (arrays, objects of classes, NaN) is a list or text.
    """
    kept: dict[str, Any] = {}
    used, left_out = 2, 0
    for name in itertools.islice(_names(given), _MAX_NAMES):
        shown = storable(shortened(str(name), _MAX_NAME_CHARS))
        item = _bounded(given[name], limit_bytes // 8)
        size = len(json.dumps({shown: item}, ensure_ascii=False).encode())
        if used + size > limit_bytes - _ROOM_OF_LEFT_OUT:
            left_out += 1
            continue
        used += size
        kept[shown] = item
    left_out += max(len(given) - _MAX_NAMES, 0)
    if left_out:
        kept[_LEFT_OUT] = f"{left_out} more left out"
    return json.dumps(kept, ensure_ascii=False) if kept else ""


def _names(given: Mapping[str, Any]) -> list[str]:
    """The names, `answer` first; the others in order, unless there are so many that ordering them takes its time."""
    others = [name for name in itertools.islice(given, _MAX_NAMES) if name != "answer"]
    return [*(["answer"] if "answer" in given else []), *sorted(others, key=str)]


def _bounded(value: Any, limit: int) -> Any:
    """Return a value as plain data whose JSON has about `limit` characters at most."""
    try:
        if isinstance(value, str):
            return storable(shortened(value, limit))
        budget = _Budget(limit)
        plain = _plain(value, budget, 0)
        if not budget.is_cut:
            return plain
        return f"{json.dumps(plain, ensure_ascii=False)[:limit]}… (cut)"
    except Exception as error:  # noqa: BLE001 - methods of the author's objects: a sample without one is still a sample
        return f"<{type(value).__name__} that cannot be shown: {type(error).__name__}>"


def _plain(value: Any, budget: _Budget, depth: int) -> Any:
    """As much of a value as there is room for, as plain data."""
    if value is None or isinstance(value, bool | np.bool_):
        budget.take(5)
        return None if value is None else bool(value)
    if isinstance(value, Integral) and abs(int(value)) <= _MAX_INTEGER:
        budget.take(8)
        return int(value)
    if isinstance(value, Real) and not isinstance(value, Integral) and math.isfinite(number := float(value)):
        budget.take(12)
        return number
    if isinstance(value, np.ndarray) and value.ndim and value.size <= budget.chars:
        value = value.tolist()
    if depth < _MAX_DEPTH and isinstance(value, Mapping):
        return _plain_mapping(value, budget, depth)
    if depth < _MAX_DEPTH and isinstance(value, list | tuple | AbstractSet):
        return _plain_list(value, budget, depth)
    text = storable(_text(value, max(budget.chars, 1)))
    budget.take(len(text) + 2)
    return text


def _plain_mapping(value: Mapping[Any, Any], budget: _Budget, depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, item in value.items():
        shown = storable(shortened(str(name), _MAX_NAME_CHARS))
        if not budget.take(len(shown) + 6):
            break
        found[shown] = _plain(item, budget, depth + 1)
    return found


def _plain_list(value: Iterable[Any], budget: _Budget, depth: int) -> list[Any]:
    found: list[Any] = []
    for item in value:
        if not budget.take(2):
            break
        found.append(_plain(item, budget, depth + 1))
    return found


def _text(value: Any, limit: int) -> str:
    """Return the value as text of at most about `limit` characters."""
    if isinstance(value, bytes | bytearray | memoryview):
        return shortened(str(bytes(value[:limit])), limit) + ("…" if len(value) > limit else "")
    if isinstance(value, Mapping | list | tuple | AbstractSet):
        return "…"  # nested too deeply: what it has may have no end
    return shortened(str(value), limit)


def shortened(text: str, limit: int) -> str:
    """Return the text, or its beginning and how much is missing."""
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text) - limit} characters cut)"


def storable(text: str) -> str:
    """Return the text without lone surrogates, which cannot be stored as UTF-8."""
    return text.encode("utf-8", "replace").decode("utf-8")
