"""Loading: command line, files and environment into one config, or every violation at once.

The later source wins: defaults < `MILLRACE_CONFIG__a__b` < `@ a.toml @ b.toml` (left to right) < flags.
"""

import json
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, Generic

from millrace.config.argv import RESERVED_FLAGS, read_command_line
from millrace.config.check import ConfigT, build
from millrace.config.layers import Layer, Provenance, Tree
from millrace.config.notes import Effect, Note
from millrace.config.prime_rl import translate
from millrace.config.section import Document
from millrace.config.sections.rl import RLConfig
from millrace.config.text import read_environment
from millrace.config.tree import dotted, schema_tree
from millrace.decoding import decode_json
from millrace.errors import CorruptObjectError, InvalidSpecError, Violation

MAX_DOCUMENT_BYTES = 1 << 20
"""Largest config that a service takes as one document; a resolved one has about 10 kB beside environments' args."""

MOST_CHECKED = 64
"""Most checked configs that a process keeps: those of the runs that it drives, and of requests on their way."""
_checked: OrderedDict[str, Document] = OrderedDict()


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded(Generic[ConfigT]):
    """A config and where its values come from.

    ``sources`` maps each dotted path that is written anywhere to its place; all others are defaults or filled from a
    shared key. ``flags`` holds the reserved flags of the command that were given.
    """

    config: ConfigT
    sources: Mapping[str, str]
    flags: Mapping[str, str | bool]
    files: tuple[str, ...]
    notes: tuple[Note, ...] = ()
    """What became of keys that our schema does not have."""
    layers: tuple[Layer, ...] = ()
    """Environment, files and command line, in our schema."""


def load(
    model: type[ConfigT],
    argv: Sequence[str],
    env: Mapping[str, str] | None = None,
    *,
    reserved: Mapping[str, bool] = RESERVED_FLAGS,
    cwd: FilePath | None = None,
    base: Layer | None = None,
    section: str = "",
) -> Loaded[ConfigT]:
    """Load a config from a command line without the program's name.

    ``env`` is the process environment if left out; ``reserved`` are the flags that belong to the command (name in kebab
    case -> whether it takes a value) and come back in ``flags``; file names are relative to ``cwd``;
    ``base`` is weaker than everything else; `PRIME_*` variables may leave out the name of
    ``section``. Raises InvalidSpecError with every violation.
    """
    schema = schema_tree(model)
    environment, violations = read_environment(os.environ if env is None else env, schema, section=section)
    line = read_command_line(argv, schema, reserved=reserved, cwd=cwd)
    layers = [translate(layer, schema) for layer in (environment, *line.files, line.values)]
    tree = Tree(schema)
    tree.violations += [*violations, *line.violations, *(wrong for each in layers for wrong in each.violations)]
    tree.lay([*([base] if base else []), *(each.layer for each in layers)])
    if any(violation.field == "@" for violation in line.violations):
        # Without one of the files nothing can be said about keys that are missing or do not fit together.
        raise InvalidSpecError(tree.violations)
    config = build(model, tree)
    sources = {dotted(path): origin.locate(path) for path, origin in tree.origins.items()}
    return Loaded(
        config=config,
        sources=sources,
        flags=line.flags,
        files=tuple(file.origin.label for file in line.files),
        notes=(*(note for each in layers for note in each.notes), *tree.notes),
        layers=tuple(each.layer for each in layers),
    )


def validate_document(
    document: str | bytes | Mapping[str, Any], model: type[ConfigT] = RLConfig, *, source: str = "config_json"
) -> ConfigT:
    """Check a config that arrives as one JSON document, as a server does. Raises InvalidSpecError like ``load``."""
    tree: Any = document
    if isinstance(document, str | bytes):
        try:
            tree = decode_json(document, what="it", reason="CONFIG_INVALID", max_bytes=MAX_DOCUMENT_BYTES)
        except CorruptObjectError as error:
            message = f"malformed JSON: {error}; send the output of resolved_json()"
            raise InvalidSpecError([Violation(field=source, message=message, source=source)]) from error
    if not isinstance(tree, Mapping):
        message = f"must be one JSON object, not a {type(tree).__name__}"
        raise InvalidSpecError([Violation(field=source, message=message, source=source)])
    schema = schema_tree(model)
    layer = translate(Layer(tree=dict(tree), origin=Provenance(label=source)), schema)
    layers = Tree(schema)
    layers.violations += [*layer.violations, *_unbuilt(layer.notes, layer.layer)]
    layers.lay([layer.layer])
    config = build(model, layers)
    _keep(config)
    return config


def _unbuilt(notes: Sequence[Note], layer: Layer) -> Iterator[Violation]:
    """Errors about keys without effect: a document has nobody to be warned."""
    for note in notes:
        if note.effect in (Effect.LATER, Effect.BLOCKS):
            yield Violation(field=dotted(note.path), message=note.text, source=layer.origin.label)


def from_resolved(document: Mapping[str, Any], model: type[ConfigT]) -> ConfigT:
    """The config that a run's record holds; ValueError if it is of another release.

    A document is checked once per process: what `validate_document` took, or this has read, is not read again.
    """
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    config = _checked.get(text)
    if not isinstance(config, model):
        config = model.model_validate_json(text)
        _keep(config)
    return config


def _keep(config: Document) -> None:
    _checked[config.resolved_json()] = config
    while len(_checked) > MOST_CHECKED:
        _checked.popitem(last=False)
