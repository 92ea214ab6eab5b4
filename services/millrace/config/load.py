"""Loading: command line, files and environment into one config, or every violation at once.

The later source wins: defaults < `MILLRACE_CONFIG__a__b` < `@ a.toml @ b.toml` (left to right) < flags.
"""

import json
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from millrace.config.argv import RESERVED_FLAGS, read_command_line, read_environment
from millrace.config.filling import Conflict, fill
from millrace.config.layers import ABSENT, Layer, Provenance, Strength, Tree, put
from millrace.config.messages import Effect, Note, close, shown
from millrace.config.prime_rl import translate
from millrace.config.section import LOADING, BrokenRule, Document, value_at
from millrace.config.sections.rl import RLConfig
from millrace.config.tree import Kind, Path, SchemaKey, dotted, schema_tree, type_text
from millrace.decoding import decode_json
from millrace.errors import CorruptObjectError, InvalidSpecError, Violation

MAX_DOCUMENT_BYTES = 1 << 20
"""Largest config that a service takes as one document; a resolved one has about 10 kB beside environments' args."""

MOST_CHECKED = 64
"""Most checked configs that a process keeps: those of the runs that it drives, and of requests on their way."""
_checked: OrderedDict[str, Document] = OrderedDict()


# From a layered tree to a config, or to every violation at once.
#
# Pydantic stops where a section cannot be built, and rules over several keys need a built config. So values that are
# reported are taken out, the rest is built with their defaults, and the rules run on that; a rule that involves a key
# which was reported already is left out.

ConfigT = TypeVar("ConfigT", bound=Document)

_ROUNDS = 5
_LONG_ABOUT = 160  # characters of a key's description that would hide the list of its values
_BOUNDS = {
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "at most"),
}
_TYPES = {type(None): "nothing", bool: "true or false", int: "integer", float: "number", str: "string", dict: "table"}


def build(model: type[ConfigT], tree: Tree) -> ConfigT:
    """Fill the tree and return the config that it makes.

    Raises InvalidSpecError with every violation, those found while layers were laid included. Remarks are added to the
    notes of the tree.
    """
    bad: set[Path] = set()
    for conflict in fill(tree):
        _report_conflict(tree, conflict)
        bad |= {path for path, _, _ in conflict.values}
    config = None
    # A value that is replaced may let pydantic see the next wrong one.
    for _ in range(_ROUNDS):
        try:
            config = model.model_validate(tree.values, context={LOADING: True})
            break
        except ValidationError as error:
            bad |= _report_and_repair(error, tree)
    # A rule about a key that is reported already would only confuse.
    for rule in config.broken_rules() if config else ():
        if not any(_touches(path, bad | tree.suspects) for path in rule.paths):
            _report_finding(tree, config, rule)
    if tree.violations:
        raise InvalidSpecError(list(dict.fromkeys(tree.violations)))
    if config is None:
        raise InvalidSpecError([Violation(field="config", message="cannot be built; correct the sections above")])
    for remark in config.remarks():
        tree.note(
            next((path for path in remark.paths if tree.locate(path)), remark.paths[0]), Effect.MEANS, remark.message
        )
    return config


def _report_finding(tree: Tree, config: Any, rule: BrokenRule) -> None:
    """Report a broken rule at its first key: where the key is written, or where the key that it was filled from is.

    A key that is not written is reported as a default, with the first key of the rule that is.
    """
    path = rule.paths[0]
    if tree.get(path) is not ABSENT:
        tree.report(path, rule.message)
        return
    written = next((tree.source(other) for other in rule.paths if tree.get(other) is not ABSENT), None)
    default = f"default, with `{dotted(written)}` from {tree.locate(written)}" if written else "default"
    value, source = shown(path, value_at(config, path)), tree.locate(path) or default
    tree.violations.append(Violation(field=dotted(path), value=value, message=rule.message, source=source))


def _report_conflict(tree: Tree, conflict: Conflict) -> None:
    """Report a shared key with different values, and the flag that would overrule the files."""
    top, first = conflict.shared.top, conflict.values[0][0]
    remedy = "set one of them only"
    if not (tree.is_written(top) and tree.strength(top) is Strength.COMMAND_LINE):
        remedy += f", or give --{dotted(top).replace('_', '-')}, which overrules files"
    message = f"has to be equal to the keys of the same meaning, but {conflict.others()}; {remedy}"
    tree.report(first, message)


def _report_and_repair(error: ValidationError, tree: Tree) -> set[Path]:
    """Report pydantic's errors, and replace the wrong values in the tree by ones that can be built.

    Returns the paths of the wrong keys. Errors that follow from another reported one are left out.
    """
    details = error.errors(include_url=False)
    located = [(_path(detail, tree.schema), detail) for detail in details]
    any_written = any(_is_written(path, detail, tree) for path, detail in located)
    for path, detail in located:
        if any_written and not _is_written(path, detail, tree):
            continue  # filled from a value that is reported itself
        if detail["type"] == "missing" and _touches(path, tree.suspects):
            continue  # misspelt, and reported as an unknown key
        tree.report(path, _message(detail, tree.schema.find(path)))
    bad = {path for path, _ in located}
    # The innermost first: a table that was replaced no longer has what is wrong in it.
    for path in sorted(bad, key=len, reverse=True):
        _repair(tree, path)
    return bad


def _path(detail: ErrorDetails, schema: SchemaKey) -> Path:
    """Return the path of the key that one of pydantic's errors is about.

    An error within a free table, or within a list of values, is about the whole of it.
    """
    node: SchemaKey | None = schema
    path: Path = ()
    for part in detail["loc"]:
        if node is None or node.kind in (Kind.FREE_TABLE, Kind.LEAF):
            break
        path = (*path, part)
        node = node if isinstance(part, int) else node.child(part)
    return path


def _is_written(path: Path, detail: ErrorDetails, tree: Tree) -> bool:
    """Return whether an error is about what the user wrote or left out, and not about a value filled from elsewhere."""
    if detail["type"] != "missing":
        return tree.is_written(path)
    indices = [position for position, part in enumerate(path) if isinstance(part, int)]
    return not indices or tree.is_written(path[: indices[-1] + 1])


def _repair(tree: Tree, path: Path) -> None:
    """Remove the value at a path from the tree; a required one is replaced by the least value that can be built."""
    node = tree.schema.find(path)
    if not path or node is None:
        tree.values.clear()
    elif isinstance(path[-1], int):
        put(tree.values, path, _least(node, index=path[-1]))
    elif node.is_required:
        put(tree.values, path, _placeholder(node, index=next((part for part in path if isinstance(part, int)), 0)))
    else:
        tree.drop(path)


def _placeholder(node: SchemaKey, *, index: int) -> Any:
    """Return the least value that can be built for a required key.

    `index` makes names in several tables of a list differ.
    """
    match node.kind:
        case Kind.SECTION:
            return _least(node, index=index)
        case Kind.SECTION_LIST:
            return [_least(node, index=index)]
        case Kind.FREE_TABLE:
            return {}
        case Kind.LEAF:
            if get_origin(node.annotation) is Literal:
                return get_args(node.annotation)[0]
            return node.annotation(1) if node.annotation in (int, float) else f"placeholder-{index}"


def _least(node: SchemaKey, *, index: int) -> dict[str, Any]:
    """Return the least table that can be built for a section: its required keys; `index` makes names in it differ."""
    return {key: _placeholder(child, index=index) for key, child in node.children.items() if child.is_required}


def _touches(path: Path, others: set[Path]) -> bool:
    """Return whether one of `others` is the same path, one above it or one below it."""
    return any(path[: len(other)] == other or other[: len(path)] == path for other in others)


def _message(detail: ErrorDetails, node: SchemaKey | None) -> str:
    """Return one of pydantic's errors as a message: what is wrong, what would be right, and what the key is for.

    `node` is the key; None if the schema has none there.
    """
    kind, context, said = detail["type"], detail.get("ctx", {}), ""
    if kind == "missing":
        return f"is required; {_how_to_write(node)}"
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        said = f"{words} {context[name]:g}"
        wrong = f"must be {said}"
    elif kind == "literal_error" and node is not None:
        near = close(str(detail["input"]), type_text(node).replace('"', "").split(" or "), most=1)
        wrong = f"must be {type_text(node)}" + (f'; did you mean "{near[0]}"?' if near else "")
    elif kind == "string_pattern_mismatch":
        wrong = f"must match {context['pattern']}"
    elif kind in ("too_short", "string_too_short"):
        wrong = "must not be empty"
    elif kind == "finite_number":
        wrong = "must be a finite number"
    elif kind == "value_error":
        # A validator of ours has raised: its text is a whole message already.
        wrong = str(context.get("error", detail["msg"]))
    elif node is not None and kind.endswith(("_type", "_parsing", "_from_float", "_overflow")):
        # pydantic has a kind per type and reason (`int_parsing`, `float_type`, …), all with the same remedy.
        given = _TYPES.get(type(detail["input"]), type(detail["input"]).__name__)
        wrong = f"must be {_article(type_text(node))}, not {_article(given)}"
    else:
        wrong = detail["msg"][:1].lower() + detail["msg"][1:]
    about = node.about(said=said) if node is not None else ""
    if kind == "literal_error" and len(about) > _LONG_ABOUT:
        about = "docs/configuration.md says what each of them is"
    return f"{wrong}{'' if wrong.endswith('?') else '.'} {about}" if about else wrong


def _how_to_write(node: SchemaKey | None) -> str:
    """Return how a required key is written, as the end of a message."""
    table = {Kind.SECTION: "[{}]", Kind.SECTION_LIST: "[[{}]]"}.get(node.kind) if node else None
    what = f"a table {table.format(dotted(node.path))}" if node and table else "it"
    inner = next((child for child in node.children.values() if child.is_required), node) if node else None
    is_one = inner is not None and inner.kind is Kind.LEAF and node is not None and node.kind is not Kind.SECTION_LIST
    flag = f", or give --{dotted(inner.path).replace('_', '-')}" if inner and is_one else ""
    return f"write {what} into the config file{flag}"


def _article(noun: str) -> str:
    """Return a type in words with "a" or "an" before it, where one belongs."""
    if noun.startswith(("list of", "nothing", "true", '"')):
        return noun
    return f"an {noun}" if noun[:1] in "aeiou" else f"a {noun}"


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
    """Load a config of the class `model` from a command line (without the program's name), the files it names, and
    `env`.

    ``env`` None is the process environment. ``reserved`` are the flags of the command itself (name in kebab case ->
    whether it takes a value), which come back in ``flags``. File names are relative to ``cwd``. ``base`` is weaker than
    everything else. `PRIME_*` variables may leave out the name of ``section``. Raises InvalidSpecError with every
    violation.
    """
    schema = schema_tree(model)
    environment, violations = read_environment(os.environ if env is None else env, schema, section=section)
    line = read_command_line(argv, schema, reserved=reserved, cwd=cwd)
    layers = [translate(layer, schema) for layer in (environment, *line.files, line.values)]
    tree = Tree(schema)
    tree.violations += [*violations, *line.violations, *(wrong for each in layers for wrong in each.violations)]
    tree.lay([*([base] if base else []), *(each.layer for each in layers)])
    if any(violation.field == "@" for violation in line.violations):
        # Without one of the files it is unknown which keys are missing or do not fit together.
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
    """Return the config that one JSON document makes, as a server receives it.

    Raise InvalidSpecError with every violation. Keys without effect, which `load` only notes, are errors. `source`
    names the document in messages. The config is kept for `from_resolved`.
    """
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
    """Yield an error for each note about a feature that is missing here: nobody reads the notes of a document."""
    for note in notes:
        if note.effect in (Effect.LATER, Effect.BLOCKS):
            yield Violation(field=dotted(note.path), message=note.text, source=layer.origin.label)


def from_resolved(document: Mapping[str, Any], model: type[ConfigT]) -> ConfigT:
    """Return the config in a run's record; raise ValueError if it does not fit this release's schema.

    Configs are cached in the process: one that this function or `validate_document` has built before is returned again.
    """
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    config = _checked.get(text)
    if not isinstance(config, model):
        config = model.model_validate_json(text)
        _keep(config)
    return config


def _keep(config: Document) -> None:
    """Add a config to the process's cache, which forgets the oldest beyond `MOST_CHECKED`."""
    _checked[config.resolved_json()] = config
    while len(_checked) > MOST_CHECKED:
        _checked.popitem(last=False)
