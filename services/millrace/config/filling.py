"""What fields and presets declare about other keys' values, applied to a tree in one pass.

A shared key fills the services' keys of the same meaning where those are absent. Where only the services' keys are set
(the split form: one file per service) and agree, they fill the shared key. What a stronger layer sets overrules the
other spellings of weaker ones: command line > files > environment. All files are equally strong, and a contradiction
between two of them is the user's to solve. Filling a filled tree changes nothing, so a resolved config loads unchanged.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from pydantic import BaseModel

from millrace.config.layers import ABSENT, Tree, as_tree, put
from millrace.config.messages import Effect, shown
from millrace.config.tree import Kind, Path, SchemaKey, dotted, schema_tree


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedKey:
    """A key at the top and the services' keys of the same meaning."""

    top: Path
    targets: tuple[Path, ...]
    may_differ: bool = False
    """Whether the targets may have different values, and the key at the top none."""

    @property
    def places(self) -> tuple[Path, ...]:
        """Return all places of the shared key, the top first."""
        return (self.top, *self.targets)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """One meaning with different values in different places; each with where it is written."""

    shared: SharedKey
    values: tuple[tuple[Path, Any, str | None], ...]

    def describe(self) -> str:
        """Return the conflict in one line, with the remedy."""
        places = " and ".join(f"`{dotted(path)}` is {value!r}" for path, value, _ in self.values)
        return f"{places}, but they have to be equal; set one of them only"

    def others(self) -> str:
        """Return all places but the first, with their values and where these are written, for a message about the
        first.
        """
        return "; ".join(
            f"`{dotted(path)}` is {shown(path, value)} ({where})" for path, value, where in self.values[1:]
        )


@cache
def shared_keys(model: type[BaseModel]) -> tuple[SharedKey, ...]:
    """Return the keys at the top of a document that services' keys share (`Facts.shared`), each with those keys."""
    targets: dict[str, list[Path]] = {}
    for node in _declaring(model, "shared"):
        targets.setdefault(node.facts.shared or "", []).append(node.path)
    tops = {name: schema_tree(model).find(tuple(name.split("."))) for name in targets}
    return tuple(
        SharedKey(top=top.path, targets=tuple(targets[name]), may_differ=top.facts.may_differ)
        for name, top in tops.items()
        if top is not None
    )


@cache
def _declaring(model: type[BaseModel], fact: Literal["shared", "follows", "limit", "needs"]) -> tuple[SchemaKey, ...]:
    """Return the keys of a document whose fields declare the fact."""
    return tuple(node for node in schema_tree(model).walk() if getattr(node.facts, fact))


def fill_document(model: type[BaseModel], values: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a raw document in which all is filled that its keys declare.

    Raise ValueError if keys of the same meaning have different values.
    """
    tree = Tree(schema_tree(model), as_tree(values))
    if conflicts := fill(tree):
        raise ValueError("; ".join(conflict.describe() for conflict in conflicts))
    return tree.values


def fill(tree: Tree) -> list[Conflict]:
    """Fill keys of the tree that others decide: shared keys, the preset, keys that follow others, and lowered bounds.

    Returns the conflicts of shared keys, of which the first value stays. Notes keys that are written and have no
    effect.
    """
    model = tree.schema.annotation
    conflicts = [conflict for shared in shared_keys(model) for conflict in _share(tree, shared)]
    if tree.schema.find(KEY) is not None:
        apply_preset(tree)
    for node in _declaring(model, "follows"):
        _follow(tree, node)
    for node in _declaring(model, "limit"):
        _clamp(tree, node)
    for node in _declaring(model, "needs"):
        _note_without_effect(tree, node)
    return conflicts


def _share(tree: Tree, shared: SharedKey) -> list[Conflict]:
    """Copy the value of a shared key to all its places; return the conflicts if places have different values.

    Tables are shared key by key.
    """
    written = {path: value for path in shared.places if (value := tree.get(path)) is not ABSENT}
    tables = [value for value in written.values() if isinstance(value, dict)]
    if tables and len(tables) == len(written):  # they are united: each of their keys is a shared key of its own
        _copy(tree, shared, next(iter(written)), {})
        keys = dict.fromkeys(key for value in tables for key in value)
        inner = [SharedKey(top=(*shared.top, key), targets=tuple((*p, key) for p in shared.targets)) for key in keys]
        return [conflict for one in inner for conflict in _share(tree, one)]
    _overrule(tree, shared, written)
    if shared.may_differ and written.get(shared.top) is None:
        _summarise(tree, shared)
        return []
    conflicts = _settle(tree, shared, written)
    for path in list(written)[:1]:
        _copy(tree, shared, path, written[path])
    return conflicts


def _copy(tree: Tree, shared: SharedKey, source: Path, value: Any) -> None:
    """Fill the places of a shared key that have no value with `value`, which is written at `source`."""
    for path in shared.places:
        if tree.get(path) is ABSENT:
            tree.fill(path, value, source)


def _overrule(tree: Tree, shared: SharedKey, written: dict[Path, Any]) -> None:
    """Remove the values of a shared key that a stronger layer overrules, from the tree and from `written`, its values
    by path.

    The key at the top overrules the services' keys of weaker layers. It is overruled itself only if every service's key
    is written in a stronger layer: one of several services' keys alone does not speak for the others.
    """
    if shared.top not in written:
        return
    strength = tree.strength(shared.top)
    is_overruled = len(written) == len(shared.places) and all(tree.strength(p) > strength for p in shared.targets)
    weaker = [shared.top] if is_overruled else [path for path in written if tree.strength(path) < strength]
    for path in weaker:
        tree.drop(path)
        del written[path]


def _summarise(tree: Tree, shared: SharedKey) -> None:
    """Fill the key at the top of services whose values may differ.

    It gets their value if all have the same, else None.
    """
    defaults = {path: node.default for path in shared.targets if (node := tree.schema.find(path))}
    values = [default if (value := tree.get(path)) is ABSENT else value for path, default in defaults.items()]
    tree.fill(shared.top, values[0] if all(value == values[0] for value in values) else None, shared.targets[0])


def _settle(tree: Tree, shared: SharedKey, written: dict[Path, Any]) -> list[Conflict]:
    """Return a conflict if values of a shared key differ from the first value, and remove the differing values from the
    tree.

    `written` has the values by path. Returns an empty list if all values are equal, or if there is none.
    """
    first = next(iter(written), None)
    clashes = [path for path in written if first and path != first and written[path] != written[first]]
    if not first or not clashes:
        return []
    values = tuple((path, written[path], tree.locate(path)) for path in (first, *clashes))
    for path in clashes:
        tree.drop(path)
    return [Conflict(shared=shared, values=values)]


def _follow(tree: Tree, node: SchemaKey) -> None:
    """Fill the key `node`, if it is left out, with the value of the key that it follows.

    Nothing is filled if the followed key has no value, or if an optional table around `node` is left out. An empty list
    of tables counts as left out. Of the tables in a followed list only the keys are taken that those of `node` have.
    """
    source: Path = node.other(node.facts.follows or "")
    value, own = tree.get(source), tree.get(node.path)
    is_list = node.kind is Kind.SECTION_LIST
    # An empty list of tables says as little as none.
    if value is ABSENT or not (own is ABSENT or (is_list and not own)):
        return
    above = [tree.schema.find(node.path[:length]) for length in range(1, len(node.path))]
    if any(table and table.is_optional and not isinstance(tree.get(table.path), dict) for table in above):
        return
    if is_list and isinstance(value, list):  # tables of another kind: with the keys that they have in common
        known = {key for key, child in node.children.items() if not child.facts.is_own}
        value = [{key: item[key] for key in item if key in known} if isinstance(item, dict) else item for item in value]
    if isinstance(value, list) or not is_list:
        tree.fill(node.path, value, source)


def _clamp(tree: Tree, node: SchemaKey) -> None:
    """Lower an integer by one, with a note, if it is equal to the bound that it has to be below.

    Only limits that are declared as clamped are applied.
    """
    limit = node.facts.limit
    other = tree.schema.find(node.other(limit.key)) if limit and limit.is_clamped else None
    if limit is None or other is None:
        return
    bound = tree.get(other.path)
    bound = other.default if bound is ABSENT else bound
    for path in _places(tree, node.path):
        value = tree.get(path)
        # 1 would become 0, which means something else.
        if type(value) is not int or value != bound or value < 2:
            continue
        if tree.is_written(path):
            text = f"is {value - 1}: it must be {limit.words} `{dotted(other.path)}`{limit.why}"
            tree.note(path, Effect.MEANS, text)
        put(tree.values, path, value - 1)


def _places(tree: Tree, path: Path) -> Iterator[Path]:
    """Yield where a key of the schema is in the tree: at `path` itself, or once per table of a list on the way."""
    for at in range(1, len(path)):
        if isinstance(path[at], str) and isinstance(items := tree.get(path[:at]), list):
            for index in range(len(items)):
                yield from _places(tree, (*path[:at], index, *path[at:]))
            return
    yield path


def _note_without_effect(tree: Tree, node: SchemaKey) -> None:
    """Note that a written key has no effect, if the key that it needs is left out."""
    key, why = node.facts.needs or ("", "")
    other = node.other(key)
    if tree.is_written(node.path) and tree.get(node.path) is not None and tree.get(other) in (ABSENT, None):
        tree.note(node.path, Effect.NOTHING, f"has no effect without `{dotted(other)}`: {why}")


# `[algo] preset`: one word that fills both sides of an algorithm, the advantages and the loss.
#
# A preset fills keys that nobody has written. Where the `type` of a side is written and another one, the preset's
# other keys of that side are left alone: they belong to its own type.

KEY: Path = ("algo", "preset")
ADVANTAGE: Path = ("orchestrator", "algo")
LOSS: Path = ("trainer", "loss")
_SEQ_LEN: Path = ("trainer", "model", "seq_len")

PRESETS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"type": "grpo", "std_norm": "group"}, {"type": "ppo", "aggregation": "sequence"}),
    "dr_grpo": ({"type": "grpo"}, {"type": "ppo", "aggregation": "constant", "constant_tokens": _SEQ_LEN}),
    "dapo": ({"type": "grpo", "std_norm": "group"}, {"type": "ppo", "clip_high": 0.28}),
    "gspo": ({"type": "grpo", "std_norm": "group"}, {"type": "gspo"}),
    "cispo": ({"type": "grpo", "std_norm": "group"}, {"type": "cispo"}),
    "rloo": ({"type": "rloo"}, {"type": "importance_sampling", "aggregation": "sequence"}),
    "opo": ({"type": "opo"}, {"type": "importance_sampling"}),
    "reinforce_pp": ({"type": "reinforce_pp"}, {"type": "ppo"}),
    "max_rl": ({"type": "max_rl"}, {"type": "importance_sampling"}),
    "opd": ({"type": "opd"}, {"type": "importance_sampling"}),
    "opsd": ({"type": "opsd"}, {"type": "importance_sampling"}),
}
"""Of each preset, the keys of `[orchestrator.algo]` and of `[trainer.loss]`; a path represents the value there."""
_MORE: dict[str, dict[Path, Any]] = {"dapo": {("orchestrator", "filter_zero_advantages"): "refill"}}


def apply_preset(tree: Tree) -> None:
    """Fill the keys of the preset that `algo.preset` names; without one, or with an unknown one, nothing."""
    preset = tree.get(KEY)
    if not isinstance(preset, str) or preset not in PRESETS:
        return  # none, or one that does not exist, which is reported when the config is built
    advantage, loss = PRESETS[preset]
    for table, keys in ((ADVANTAGE, advantage), (LOSS, loss)):
        if tree.get((*table, "type")) in (ABSENT, keys["type"]):
            for name, value in keys.items():
                _fill(tree, (*table, name), value)
    for path, value in _MORE.get(preset, {}).items():
        _fill(tree, path, value)


def _fill(tree: Tree, path: Path, value: Any) -> None:
    """Fill the key at `path` with the value of the preset, unless the key has a value.

    If `value` is a tuple, it is the path of another key, whose value (or default) is taken.
    """
    if tree.get(path) is not ABSENT:
        return
    if isinstance(value, tuple):
        other, node = tree.get(value), tree.schema.find(value)
        value = node.default if other is ABSENT and node else other
    tree.fill(path, value, KEY)
