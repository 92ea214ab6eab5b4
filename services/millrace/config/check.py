"""From merged raw values to a config, or to every violation at once.

Pydantic stops where a section cannot be built, and rules over several keys need a built config. So values that are
reported are taken out, the rest is built with their defaults, and the rules run on that; a finding that involves a key
which was reported already is left out.
"""

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from millrace.config.eval import EvalRunConfig
from millrace.config.inference import ReplicaConfig
from millrace.config.paths import Path, dotted
from millrace.config.redact import shown
from millrace.config.rl import RLConfig
from millrace.config.rules_base import COLLECT_RULES, Finding
from millrace.config.sft import SFTConfig
from millrace.config.sharing import SEQ_LEN, SHARED_KEYS, fill_shared, shared_top
from millrace.config.sources import Merged, Strength
from millrace.config.suggest import close
from millrace.config.tree import Kind, Node, type_text
from millrace.errors import InvalidSpecError, Violation

ConfigT = TypeVar("ConfigT", RLConfig, SFTConfig, ReplicaConfig, EvalRunConfig)

_ROUNDS = 5
_BOUNDS = {
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "at most"),
}


def build(model: type[ConfigT], merged: Merged) -> ConfigT:
    """Build the config. Raises InvalidSpecError with every violation, those that merging found included."""
    bad: set[Path] = set()
    if model is RLConfig:
        bad |= _report_conflicts(merged)
    config = None
    for _ in range(_ROUNDS):
        try:
            config = model.model_validate(merged.tree, context={COLLECT_RULES: True})
            break
        except ValidationError as error:
            bad |= _report_and_repair(error, merged)
    if config is not None:
        involved = bad | merged.suspects
        for finding in config.broken_rules():
            if not any(_touches(path, involved) for path in finding.paths):
                _report_finding(merged, config, finding)
    if merged.violations:
        raise InvalidSpecError(_distinct(merged.violations))
    if config is None:
        raise InvalidSpecError([Violation(field="config", message="cannot be built; correct the sections above")])
    return config


def _report_finding(merged: Merged, config: BaseModel, finding: Finding) -> None:
    """Report a broken rule at its first key, or at the shared key that filled it; else say that it is a default."""
    path = finding.paths[0]
    top = shared_top(path)
    for place in (path, top):
        if place and merged.value(place)[0]:
            merged.report(place, finding.message)
            return
    here: Any = config
    for part in path:
        here = here[part] if isinstance(part, int) else getattr(here, part)
    written = next((where for other in finding.paths if (where := _written(merged, other))), None)
    default = f"default, with `{dotted(written)}` from {merged.locate(written)}" if written else "default"
    source = merged.locate(path) or default
    violation = Violation(field=dotted(path), value=shown(path, here), message=finding.message, source=source)
    merged.violations.append(violation)


def _written(merged: Merged, path: Path) -> Path | None:
    """The key, or the shared key that fills it, whichever is written; None if neither is."""
    places = (path, shared_top(path))
    return next((place for place in places if place and merged.value(place)[0]), None)


def _report_conflicts(merged: Merged) -> set[Path]:
    """Report shared keys that are set twice with different values; only the first value stays."""
    bad: set[Path] = set()
    _, conflicts = fill_shared(merged.tree)
    for conflict in conflicts:
        first, *others = conflict.values
        places = "; ".join(
            f"`{dotted(path)}` is {shown(path, value)} ({merged.locate(path)})" for path, value in others
        )
        remedy = f"set one of them only{_way_out(first[0], merged)}"
        merged.report(first[0], f"has to be equal to the keys of the same meaning, but {places}; {remedy}")
        for path, _ in others:
            bad.add(path)
            _remove(merged.tree, path)
        bad.add(first[0])
    return bad


def _way_out(path: Path, merged: Merged) -> str:
    """The flag that overrules what files say about a shared key, for the end of a message."""
    known = next((shared.top for shared in (*SHARED_KEYS, SEQ_LEN) if path in (shared.top, *shared.targets)), None)
    origin = merged.origins.get(known) if known else None
    if known is None or (origin and origin.strength is Strength.COMMAND_LINE):
        return ""
    return f", or give --{'.'.join(known).replace('_', '-')}, which overrules files"


def _report_and_repair(error: ValidationError, merged: Merged) -> set[Path]:
    """Report pydantic's errors and replace the values by something that can be built. Returns the keys concerned."""
    details = error.errors(include_url=False)
    located = [(_path(detail, merged.schema), detail) for detail in details]
    any_written = any(_is_written(path, detail, merged) for path, detail in located)
    for path, detail in located:
        if any_written and not _is_written(path, detail, merged):
            continue  # filled from a value that is reported itself
        if detail["type"] == "missing" and _touches(path, merged.suspects):
            continue  # misspelt, and reported as an unknown key
        merged.report(path, _message(detail, merged.schema.find(path)))
    bad = {path for path, _ in located}
    for path in sorted(bad, key=len, reverse=True):
        _repair(merged, path)
    return bad


def _path(detail: ErrorDetails, schema: Node) -> Path:
    """The path of the key that an error is about; inside free tables and lists of values that is the whole of them."""
    node: Node | None = schema
    path: Path = ()
    for part in detail["loc"]:
        if node is None or node.kind in (Kind.FREE_TABLE, Kind.LEAF):
            break
        path = (*path, part)
        node = node if isinstance(part, int) else node.child(part)
    return path


def _is_written(path: Path, detail: ErrorDetails, merged: Merged) -> bool:
    """Whether an error is about what the user wrote or left out, and not about a value filled from elsewhere."""
    if detail["type"] != "missing":
        return merged.value(path)[0]
    indices = [position for position, part in enumerate(path) if isinstance(part, int)]
    return not indices or merged.value(path[: indices[-1] + 1])[0]


def _repair(merged: Merged, path: Path) -> None:
    """Take out the value at a path, or put in the least that can be built where one is required."""
    node = merged.schema.find(path)
    if not path or node is None:
        merged.tree.clear()
        return
    if isinstance(path[-1], int):
        _put(merged.tree, path, _least(node, index=path[-1]))
    elif node.is_required:
        _put(merged.tree, path, _placeholder(node, index=next((part for part in path if isinstance(part, int)), 0)))
    else:
        _remove(merged.tree, path)


def _placeholder(node: Node, *, index: int) -> Any:
    """The least value of a required key."""
    match node.kind:
        case Kind.SECTION:
            return _least(node, index=index)
        case Kind.SECTION_LIST:
            return [_least(node, index=index)]
        case Kind.FREE_TABLE:
            return {}
        case Kind.LEAF:
            return f"placeholder-{index}"


def _least(node: Node, *, index: int) -> dict[str, Any]:
    """The least section: its required keys only."""
    return {key: _placeholder(child, index=index) for key, child in node.children.items() if child.is_required}


def _parent(tree: dict[str, Any], path: Path) -> Any:
    """The table or list that holds the value at a path; None if there is none."""
    here: Any = tree
    for part in path[:-1]:
        match here, part:
            case dict(), str() if part in here:
                here = here[part]
            case list(), int() if part < len(here):
                here = here[part]
            case _:
                return None
    return here


def _put(tree: dict[str, Any], path: Path, value: Any) -> None:
    match _parent(tree, path), path[-1]:
        case dict() as table, str() as key:
            table[key] = value
        case list() as items, int() as index if index < len(items):
            items[index] = value
        case None, str() if len(path) > 1:
            _put(tree, path[:-1], {path[-1]: value})


def _remove(tree: dict[str, Any], path: Path) -> None:
    match _parent(tree, path), path[-1]:
        case dict() as table, str() as key:
            table.pop(key, None)


def _touches(path: Path, others: set[Path]) -> bool:
    """Whether a key, or a section that contains it or lies in it, is among others."""
    return any(path[: len(other)] == other or other[: len(path)] == path for other in others)


def _distinct(violations: list[Violation]) -> list[Violation]:
    """Violations without repetitions, in the order of their discovery."""
    return list(dict.fromkeys(violations))


def _message(detail: ErrorDetails, node: Node | None) -> str:
    """What is wrong and what would be right, for one pydantic error."""
    kind, context = detail["type"], detail.get("ctx", {})
    description = node.description if node is not None else ""
    if kind == "missing":
        return f"is required; {_how_to_write(node)}"
    elif kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        bound = f"{words} {context[name]:g}"
        wrong = f"must be {bound}"
        description = description.replace(f", {bound}", "", 1)  # said once is enough
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
        wrong = str(context.get("error", detail["msg"]))
    elif node is not None and kind.endswith(("_type", "_parsing", "_from_float", "_overflow")):
        wrong = f"must be {_article(type_text(node))}, not {_article(_type_of(detail['input']))}"
    else:
        wrong = detail["msg"][:1].lower() + detail["msg"][1:]
    if not description:
        return wrong
    return f"{wrong}{'' if wrong.endswith('?') else '.'} {description}"


def _how_to_write(node: Node | None) -> str:
    """How a required key is written, as the end of a message."""
    match node:
        case Node(kind=Kind.SECTION, path=path):
            return f"write a table [{'.'.join(map(str, path))}] into the config file"
        case Node(kind=Kind.SECTION_LIST, path=path):
            return f"write a table [[{'.'.join(map(str, path))}]] into the config file"
        case _:
            return "write it into the config file"


def _article(noun: str) -> str:
    if noun.startswith(("list of", "nothing", "true", '"')):
        return noun
    return f"an {noun}" if noun[:1] in "aeiou" else f"a {noun}"


def _type_of(value: Any) -> str:
    """The type of a raw value for people."""
    match value:
        case None:
            return "nothing"
        case bool():
            return "true or false"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "list"
        case dict() | BaseModel():
            return "table"
        case _:
            return type(value).__name__
