"""One layer of a config with the keys of prime-rl put where they belong here, and a note for each that changed."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from millrace.config.layers import Layer, put
from millrace.config.notes import Effect, Note
from millrace.config.prime_rl.conversions import finish
from millrace.config.prime_rl.eval_keys import EVAL_KEYS
from millrace.config.prime_rl.meanings import Meaning
from millrace.config.prime_rl.rl_keys import RL_KEYS
from millrace.config.prime_rl.sft_keys import SFT_KEYS
from millrace.config.suggest import shown
from millrace.config.tree import Kind, Path, SchemaKey, dotted
from millrace.errors import Violation

_OFF = (None, "None", "none")


def translate(layer: Layer, schema: SchemaKey) -> "Translation":
    """The layer in our schema; `schema` is that of the whole document."""
    tables = (("data", SFT_KEYS), ("orchestrator", RL_KEYS), ("trainer", RL_KEYS), ("inference", RL_KEYS))
    keys = next((keys for part, keys in tables if schema.child(part)), EVAL_KEYS)
    return Translation(layer, schema, keys)


def pattern(path: Path) -> str:
    """The path with `[]` for every index, as the tables name keys."""
    return "".join("[]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def _inner_keys(value: Any, path: Path = ()) -> Iterator[str]:
    """Return dotted names of the keys in a table or in a list of tables."""
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
        self.layer = Layer(tree={}, origin=replace(layer.origin, places=dict(layer.origin.places)))
        self.schema = schema
        self.notes: list[Note] = []
        self.violations: list[Violation] = []
        self.deferred: dict[str, tuple[Path, Any]] = {}
        """Values that need the whole layer, by key: `finish` reads them."""
        self._meanings = meanings
        self._inner = {key[:end] for key in meanings for end in range(len(key)) if key[end] in ".["}
        self.walk(layer.tree, ())
        finish(self)

    def walk(self, table: Mapping[str, Any], path: Path) -> None:
        """Translate every key of a table that stands at `path`."""
        node = self.schema.find(path)
        for written, value in table.items():
            is_free = node is not None and node.kind is Kind.FREE_TABLE
            key = written if is_free or (node and node.child(written)) else written.replace("-", "_")
            if key != written and (*path, written) in self.layer.origin.places:
                self.layer.origin.places[(*path, key)] = self.layer.origin.places[(*path, written)]
            self._key((*path, key), value)

    def _key(self, path: Path, value: Any) -> None:
        known, name = self.schema.find(path), pattern(path)
        meaning = self._meanings.get(name)
        is_section = known is not None and known.kind is Kind.SECTION
        if meaning is not None and (known is None or meaning.is_native) and isinstance(value, meaning.form):
            self._apply(meaning, path, value)
        elif isinstance(value, dict) and value and (is_section or name in self._inner):
            self.walk(value, path)
        elif isinstance(value, list) and f"{name}[]" in self._inner and all(isinstance(item, dict) for item in value):
            self.put(path, [{} for _ in value], source=path)
            for index, item in enumerate(value):
                self.walk(item, (*path, index))
        else:
            self.put(path, value, source=path)

    def _apply(self, meaning: Meaning, path: Path, value: Any) -> None:
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

    def move(self, path: Path, value: Any, to: Path) -> None:
        """Translate a value as if it had been written at `to`."""
        self._copy_places(path, to)
        self._key(to, value)

    def put(self, path: Path, value: Any, *, source: Path) -> None:
        """Set a key of ours; `source` is where the value is written."""
        if path != source and isinstance(value, dict):
            self._copy_places(source, path)
        elif path != source:
            self.layer.origin.places.setdefault(path, self.layer.origin.locate(source))
        put(self.layer.tree, path, value)

    def refuse(self, path: Path, value: Any, text: str) -> None:
        """Report a key as an error."""
        where = self.layer.origin.locate(path)
        self.violations.append(Violation(field=dotted(path), value=shown(path, value), message=text, source=where))

    def note(self, path: Path, effect: Effect, text: str, *, value: Any = None) -> None:
        """Say what became of a key; of a table `value` that is left out, with the keys in it."""
        source = self.layer.origin.locate(path)
        self.notes.append(Note(path=path, source=source, effect=effect, text=text, inner=tuple(_inner_keys(value))))

    def _copy_places(self, path: Path, to: Path) -> None:
        places = self.layer.origin.places
        for known in [known for known in places if known[: len(path)] == path]:
            places.setdefault((*to, *known[len(path) :]), places[known])
        places.setdefault(to, self.layer.origin.locate(path))
