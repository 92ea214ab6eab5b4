"""Shared keys: written once at the top of a combined file, meant for several services.

Each shared key fills the services' keys of the same meaning where those are absent. Where only the services' keys are
set (the split form: one file per service) and agree, they fill the shared key. Set twice with different values is an
error that lists every place; what stronger sources overrule is gone by then (see ``precedence``). Filling a filled
config changes nothing, so a resolved config loads unchanged.
"""

from dataclasses import dataclass
from typing import Any

from millrace.config.section import as_tree
from millrace.config.trainer import DEFAULT_SEQ_LEN

KeyPath = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedKey:
    """A key at the top and the services' keys that it fills."""

    top: KeyPath
    targets: tuple[KeyPath, ...]


SHARED_KEYS = (
    SharedKey(
        top=("model", "name"),
        targets=(("trainer", "model", "name"), ("orchestrator", "model", "name"), ("inference", "model", "name")),
    ),
    SharedKey(top=("max_steps",), targets=(("trainer", "max_steps"), ("orchestrator", "max_steps"))),
    SharedKey(top=("seed",), targets=(("orchestrator", "seed"),)),
    SharedKey(top=("async_level",), targets=(("orchestrator", "async_level"),)),
    SharedKey(top=("ckpt",), targets=(("trainer", "ckpt"),)),
)
"""Keys that have to be equal everywhere. `seq_len` is the other shared key: the services' values may differ."""

SEQ_LEN = SharedKey(top=("seq_len",), targets=(("trainer", "model", "seq_len"), ("orchestrator", "seq_len")))


def shared_top(path: tuple[str | int, ...]) -> KeyPath | None:
    """The shared key that fills a key of a service; None if no shared key does."""
    return next((shared.top for shared in (*SHARED_KEYS, SEQ_LEN) if path in shared.targets), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """One meaning with different values in different places."""

    values: tuple[tuple[KeyPath, Any], ...]

    def describe(self) -> str:
        """The conflict in one line, with the remedy."""
        places = " and ".join(f"`{'.'.join(path)}` is {value!r}" for path, value in self.values)
        return f"{places}, but they have to be equal; set one of them only"


_ABSENT = object()


def _get(tree: dict[str, Any], path: KeyPath) -> Any:
    """The value at a path, or ``_ABSENT``."""
    here: Any = tree
    for key in path:
        if not isinstance(here, dict) or key not in here:
            return _ABSENT
        here = here[key]
    return here


def _set(tree: dict[str, Any], path: KeyPath, value: Any) -> None:
    """Set the value at a path; a non-table on the way is left for the schema to complain about."""
    here = tree
    for key in path[:-1]:
        below = here.setdefault(key, {})
        if not isinstance(below, dict):
            return
        here = below
    here[path[-1]] = value


def _merge(found: list[tuple[KeyPath, Any]]) -> tuple[Any, list[Conflict]]:
    """The one value that all places agree on; tables agree if their common keys do, and are united."""
    if not all(isinstance(value, dict) for _, value in found):
        first = found[0][1]
        return first, [] if all(value == first for _, value in found) else [Conflict(values=tuple(found))]
    united: dict[str, Any] = {}
    conflicts: list[Conflict] = []
    for key in dict.fromkeys(key for _, value in found for key in value):
        inner = [((*path, key), value[key]) for path, value in found if key in value]
        united[key], clashes = _merge(inner)
        conflicts += clashes
    return united, conflicts


def fill_shared(document: dict[str, Any]) -> tuple[dict[str, Any], list[Conflict]]:
    """A copy of a raw RL config with the shared keys filled, and every conflict."""
    tree = as_tree(document)
    conflicts: list[Conflict] = []
    for shared in SHARED_KEYS:
        places = (shared.top, *shared.targets)
        found = [(path, value) for path in places if (value := _get(tree, path)) is not _ABSENT]
        if not found:
            continue
        value, clashes = _merge(found)
        conflicts += clashes
        for path in places:
            _set(tree, path, as_tree(value))
    conflicts += _fill_seq_len(tree)
    return tree, conflicts


def _fill_seq_len(tree: dict[str, Any]) -> list[Conflict]:
    """Fill ``seq_len``: the trainer may take longer samples than the orchestrator sends, so only the top must agree."""
    top = _get(tree, SEQ_LEN.top)
    found = [(path, value) for path in SEQ_LEN.targets if (value := _get(tree, path)) is not _ABSENT]
    if top is _ABSENT or top is None:
        values = [DEFAULT_SEQ_LEN if (value := _get(tree, path)) is _ABSENT else value for path in SEQ_LEN.targets]
        _set(tree, SEQ_LEN.top, values[0] if values[0] == values[1] else None)
        return []
    for path in SEQ_LEN.targets:
        if _get(tree, path) is _ABSENT:
            _set(tree, path, top)
    clashes = tuple((path, value) for path, value in found if value != top)
    return [Conflict(values=((SEQ_LEN.top, top), *clashes))] if clashes else []
