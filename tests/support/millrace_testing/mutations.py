"""Hostile variants of stored JSON objects: what decoders of bytes that others wrote are tried with."""

import copy
import json
from typing import Any

from hypothesis import strategies as st

HOSTILE_VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    1 << 31,
    1 << 62,
    1 << 64,
    10**30,
    -(1 << 70),
    0.5,
    1e300,
    float("nan"),
    float("inf"),
    "",
    "x",
    "../../x",
    "\ud800",
    "\0",
    "9" * 400,
    [],
    {},
    [[]],
    [0] * 5000,
    {"a": {"a": {"a": 1}}},
)


def mutated_json(valid: bytes) -> st.SearchStrategy[bytes]:
    """Return the document with one of its values, keys or items replaced, removed, repeated or renamed."""
    document = json.loads(valid)
    places = list(_places(document))

    @st.composite
    def mutate(draw: st.DrawFn) -> bytes:
        changed = copy.deepcopy(document)
        for _ in range(draw(st.integers(1, 2))):
            path = draw(st.sampled_from(places))
            _apply(changed, path, draw(st.sampled_from(("replace", "remove", "repeat"))), draw)
        return json.dumps(changed).encode()

    return mutate()


def mutated_bytes(valid: bytes) -> st.SearchStrategy[bytes]:
    """Return the bytes cut, with some replaced, or with some put in."""

    @st.composite
    def mutate(draw: st.DrawFn) -> bytes:
        data = bytearray(valid)
        for _ in range(draw(st.integers(1, 4))):
            begin = draw(st.integers(0, len(data)))
            end = draw(st.integers(begin, min(len(data), begin + 40)))
            data[begin:end] = draw(st.sampled_from((b"", b"\xff", b"[" * 200, b'"', b"1e999", b"-", b"{}", b"\0" * 9)))
        return bytes(data)

    return mutate()


def _places(value: Any, path: tuple[Any, ...] = ()) -> Any:
    """Yield the paths to every value inside a document, of long arrays to the first few."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from _places(inner, (*path, key))


def _is_index(key: Any, holder: list[Any]) -> bool:
    """Return whether `key` is a valid index of a list.

    False for the key of a dict that an earlier change has replaced by a list.
    """
    return isinstance(key, int) and 0 <= key < len(holder)


def _apply(document: Any, path: tuple[Any, ...], action: str, draw: st.DrawFn) -> None:
    *outer, last = path
    holder = document
    for key in outer:
        try:
            holder = holder[key]
        except (KeyError, IndexError, TypeError):
            return  # the first change took it away
    if not isinstance(holder, dict | list) or (isinstance(holder, list) and not _is_index(last, holder)):
        return
    if action == "replace":
        holder[last] = copy.deepcopy(draw(st.sampled_from(HOSTILE_VALUES)))
    elif action == "remove":
        holder.pop(last, None) if isinstance(holder, dict) else holder.pop(last)
    elif isinstance(holder, list):
        holder.append(copy.deepcopy(holder[last]))
    elif last in holder:
        holder[draw(st.sampled_from(("x", "format", "key")))] = copy.deepcopy(holder[last])
