"""Files and layers with keys of prime-rl in our words, and a note for each key that changed."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from millrace.config.layers import Layer, put
from millrace.config.messages import Effect, Note, close, is_trl, shown
from millrace.config.prime_rl.conversions import finish
from millrace.config.prime_rl.keys import EVAL_KEYS, RL_KEYS, SFT_KEYS
from millrace.config.prime_rl.lab import spread_arguments
from millrace.config.prime_rl.meanings import Meaning
from millrace.config.tree import Kind, SchemaKey, dotted
from millrace.config.tree import Path as KeyPath
from millrace.errors import Violation

_OFF = (None, "None", "none")


def translate(layer: Layer, schema: SchemaKey) -> "Translation":
    """Return the translation of a layer from keys of prime-rl into our schema.

    `schema` is the root of the whole document.
    """
    # A part of a run has only one of these sections; an evaluation has none.
    tables = (("data", SFT_KEYS), ("orchestrator", RL_KEYS), ("trainer", RL_KEYS), ("inference", RL_KEYS))
    keys = next((keys for part, keys in tables if schema.child(part)), EVAL_KEYS)
    return Translation(layer, schema, keys)


def pattern(path: KeyPath) -> str:
    """Return a path as the tables of meanings write it: dotted, with `[]` for every list index."""
    return "".join("[]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def _inner_keys(value: Any, path: KeyPath = ()) -> Iterator[str]:
    """Yield dotted names of the innermost keys in a table or in a list of tables, without indices.

    `path` comes before them.
    """
    match value:
        case dict():
            for key, item in value.items():
                below = list(_inner_keys(item, (*path, key)))
                yield from below or [dotted((*path, key))]
        case list():
            for index, item in enumerate(value):
                yield from _inner_keys(item, (*path, index))
        case _:
            return


class Translation:
    """The pass over one layer. ``layer`` is the result; ``notes`` and ``violations`` are in the order of the keys."""

    def __init__(self, layer: Layer, schema: SchemaKey, meanings: Mapping[str, Meaning]) -> None:
        """Translate `layer`, which is not changed; `meanings` has what a key means here, by pattern."""
        self.layer = Layer(tree={}, origin=replace(layer.origin, places=dict(layer.origin.places)))
        self.schema = schema
        self.notes: list[Note] = []
        self.violations: list[Violation] = []
        self.deferred: dict[str, tuple[KeyPath, Any]] = {}
        """Values that need the whole layer, by key: `finish` reads them."""
        self._meanings = meanings
        # Every table on the way to a known key, such as `trainer.args`: unknown keys in it are errors.
        self._inner = {key[:end] for key in meanings for end in range(len(key)) if key[end] in ".["}
        self.walk(spread_arguments(layer), ())
        finish(self)

    def walk(self, table: Mapping[str, Any], path: KeyPath) -> None:
        """Translate every key of `table`, which is written at `path`; dashes in names of keys become underscores."""
        node = self.schema.find(path)
        for written, value in table.items():
            is_free = node is not None and node.kind is Kind.FREE_TABLE
            key = written if is_free or (node and node.child(written)) else written.replace("-", "_")
            if key != written and (*path, written) in self.layer.origin.places:
                self.layer.origin.places[(*path, key)] = self.layer.origin.places[(*path, written)]
            self._key((*path, key), value)

    def _key(self, path: KeyPath, value: Any) -> None:
        """Translate the value of one key.

        That is done by its meaning, key by key in a table or list of tables; another value is put as it is.
        """
        known, name = self.schema.find(path), pattern(path)
        meaning = self._meanings.get(name)
        is_section = known is not None and known.kind is Kind.SECTION
        # A key that our schema has is ours, unless its meaning says that it reads the key differently.
        if meaning is not None and (known is None or meaning.is_native) and isinstance(value, meaning.form):
            self._apply(meaning, path, value)
        elif isinstance(value, dict) and value and (is_section or name in self._inner):
            self.walk(value, path)
        elif isinstance(value, list) and f"{name}[]" in self._inner and all(isinstance(item, dict) for item in value):
            self.put(path, [{} for _ in value], source=path)
            for index, item in enumerate(value):
                self.walk(item, (*path, index))
        elif known is None and self.schema.find(path[:-1]) is None and pattern(path[:-1]) in self._inner:
            self._unknown(path, value)
        else:
            self.put(path, value, source=path)

    def _unknown(self, path: KeyPath, value: Any) -> None:
        """Refuse the key at `path`, which no table of meanings has, with the name it is most like, or with the known
        ones.
        """
        above = f"{pattern(path[:-1])}."
        names = {
            name.removeprefix(above).split(".")[0].removesuffix("[]")
            for name in self._meanings
            if name.startswith(above)
        }
        near = close(str(path[-1]), sorted(names))
        meant = " or ".join(f"`{dotted((*path[:-1], name))}`" for name in near)
        text = f"did you mean {meant}?" if near else f"the keys here are {', '.join(sorted(names))}"
        self.refuse(path, value, f"unknown key; {text}")

    def _apply(self, meaning: Meaning, path: KeyPath, value: Any) -> None:
        """Do what the meaning of the key at `path` says: translate, move or refuse the value, or only note it.

        A value that asks for what happens here anyway (`neutral`) is only noted as the same.
        """
        if value in _OFF or any(value is each or value == each for each in meaning.neutral):
            self.note(path, Effect.SAME, "", value=value)
            return
        if meaning.act is not None:
            meaning.act(self, path, value)
        elif meaning.effect is Effect.REFUSED:
            self.refuse(path, value, meaning.text)
        elif meaning.effect is Effect.MEANS:
            self.note(path, Effect.MEANS, meaning.text)
            self.move(path, value, tuple(meaning.to.split(".")))
        else:
            self.note(path, meaning.effect, meaning.text, value=value)

    def move(self, path: KeyPath, value: Any, to: KeyPath) -> None:
        """Translate `value`, which is written at `path`, as if it had been written at `to`."""
        self._copy_places(path, to)
        self._key(to, value)

    def put(self, path: KeyPath, value: Any, *, source: KeyPath) -> None:
        """Set the key at `path` of the target schema to `value`.

        `source` is the path at which the user wrote it, for messages.
        """
        if path != source and isinstance(value, dict):
            self._copy_places(source, path)
        elif path != source:
            self.layer.origin.places.setdefault(path, self.layer.origin.locate(source))
        put(self.layer.tree, path, value)

    def refuse(self, path: KeyPath, value: Any, text: str) -> None:
        """Record an error of `value` at `path`; `text` says what is wrong and what to write instead."""
        where = self.layer.origin.locate(path)
        self.violations.append(Violation(field=dotted(path), value=shown(path, value), message=text, source=where))

    def note(self, path: KeyPath, effect: Effect, text: str, *, value: Any = None) -> None:
        """Record for the user what became of the key at `path`.

        The keys within a table `value` are named in the note.
        """
        source = self.layer.origin.locate(path)
        self.notes.append(Note(path=path, source=source, effect=effect, text=text, inner=tuple(_inner_keys(value))))

    def _copy_places(self, path: KeyPath, to: KeyPath) -> None:
        """Note for `to`, and for the keys below it, the places in the file of `path` and of the keys below that."""
        places = self.layer.origin.places
        # A list, because the dictionary grows meanwhile.
        for known in [known for known in places if known[: len(path)] == path]:
            places.setdefault((*to, *known[len(path) :]), places[known])
        places.setdefault(to, self.layer.origin.locate(path))


# Whole files of prime-rl as one file of ours: which document they are, and the text in our schema.

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_DOCUMENT_KEYS = {
    "rl": {"orchestrator", "trainer", "inference_gpu_ids", "trainer_gpu_ids"},
    "sft": {"data", "val", "loss_impl"},
    "eval": {
        *("environment_ids", "client", "weights_dir", "use_tqdm", "source", "endpoint_id", "endpoints_path"),
        *("num_tasks", "num_rollouts", "ablation", "taskset", "env_id", "select"),
    },
    "orchestrator": {
        *("batch_size", "token_batch_size", "rollouts_per_example", "group_size", "environment", "env", "sampling"),
        *("buffer", "train", "algo", "renderer", "oversampling_factor", "max_off_policy_steps"),
    },
    "trainer": {"optim", "scheduler", "loss", "weights", "micro_batch_tokens"},
    "inference": {
        *("parallel", "server", "vllm", "gpu_memory_utilization", "max_num_seqs", "enable_lora", "router"),
        *("api_server_count", "backend_port", "enable_expert_parallel"),
    },
}
"""Keys at the top that only one kind of document has, the surest kind first."""
_NAMES = (("sft", "sft"), ("train", "trainer"), ("orch", "orchestrator"), ("infer", "inference"), ("eval", "eval"))
WHOLE = ("rl", "sft", "eval")


def kind_of(tree: Mapping[str, Any], name: str) -> str | None:
    """Return which document the file `name` with the content `tree` is.

    It is `rl`, `sft` or `eval`, or the service that it is a part of: `orchestrator`, `trainer` or `inference`. None if
    neither name nor keys tell.
    """
    stem = f"{Path(name).parent.name}/{Path(name).stem}" if Path(name).stem in ("config",) else Path(name).stem
    named = next((kind for part, kind in _NAMES if part in stem.lower()), None)
    if named in ("orchestrator", "trainer", "inference") and not _DOCUMENT_KEYS["rl"] & tree.keys():
        return named  # files of the split form are called so, and may hold next to nothing
    flat = _flat_kind(tree)
    if flat is not None:
        return flat
    found = next((kind for kind, keys in _DOCUMENT_KEYS.items() if keys & tree.keys()), None)
    if found == "trainer" and named == "sft":
        return "sft"  # `[optim]` alone
    return found or named or ("rl" if is_trl(tree) else None)


def _flat_kind(tree: Mapping[str, Any]) -> str | None:
    """Return which document a flat file is, as Hosted Training and commands of verifiers have them.

    None for other files.
    """
    if isinstance(tree.get("eval"), list):
        return "eval"
    is_flat = isinstance(tree.get("model"), str)
    if isinstance(tree.get("sft"), dict) or (is_flat and isinstance(tree.get("dataset"), str)):
        return "sft"
    if _DOCUMENT_KEYS["eval"] & tree.keys() and not _DOCUMENT_KEYS["rl"] & tree.keys() and "data" not in tree:
        return "eval"
    return "rl" if is_flat and "env" in tree else None


def toml(tree: Mapping[str, Any]) -> str:
    """Return a tree as TOML text: values first, then tables.

    Keys with None are left out, for TOML has no such value.
    """
    return "\n".join(_table(tree, ())).strip() + "\n"


def _table(table: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    """Return the TOML lines of a table's values and of the tables in it; `path` is the table's own, for the headers."""
    lines: list[str] = []
    inner = {key: value for key, value in table.items() if _is_table(value) or _is_tables(value)}
    lines += [
        f"{_key(key)} = {_value(value)}" for key, value in table.items() if key not in inner and value is not None
    ]
    for key, value in inner.items():
        here = (*path, key)
        header = ".".join(map(_key, here))
        if _is_tables(value):
            for item in value:
                lines += ["", f"[[{header}]]", *_inline(item)]
        else:
            body = _table(value, here)
            is_only_tables = value and all(_is_table(each) or _is_tables(each) for each in value.values())
            lines += body if is_only_tables else ["", f"[{header}]", *body]
    return lines


def _inline(item: Mapping[str, Any]) -> list[str]:
    """Return `KEY = VALUE` of each key of a table that is not None."""
    return [f"{_key(key)} = {_value(value)}" for key, value in item.items() if value is not None]


def _is_table(value: Any) -> bool:
    return isinstance(value, dict)


def _is_tables(value: Any) -> bool:
    """Return whether the value is a list of tables, and not empty."""
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _key(key: str) -> str:
    """Return a key as TOML writes it, in quotes if need be."""
    return key if _BARE.fullmatch(key) else json.dumps(key)


def _value(value: Any) -> str:
    """Return a value as TOML writes it in one line."""
    match value:
        case bool():
            return "true" if value else "false"
        case dict():
            return "{ " + ", ".join(_inline(value)) + " }" if value else "{}"
        case list():
            return "[" + ", ".join(_value(item) for item in value if item is not None) + "]"
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case _:
            return repr(value) if isinstance(value, float) else str(value)


def merged(trees: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one tree of all: tables are merged key by key, and of other values the last tree's counts."""
    result: dict[str, Any] = {}
    for tree in trees:
        for key, value in tree.items():
            known = result.get(key)
            result[key] = merged([known, value]) if isinstance(known, dict) and isinstance(value, dict) else value
    return result
