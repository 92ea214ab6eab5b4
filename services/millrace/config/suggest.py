"""The words of messages: did-you-mean for keys and values, and values that are short and never a secret."""

import difflib
import json
import re
from collections.abc import Iterable
from typing import Any

from millrace.config.tree import Path, SchemaKey, dotted

_CUTOFF = 0.6
_CUTOFF_ELSEWHERE = 0.8
_MOST_KEYS = 24
_SECRET_KEY = re.compile(r"(^|_)(api_?key(_var)?|token|secret|password|credentials?)$")
_SECRET_VALUE = re.compile(r"^(sk-|hf_|ghp_|AKIA|Bearer )")
_LONGEST = 80

MOVED = {
    "orchestrator.train": "sources are `[[orchestrator.env]]` with `id`, `name`, `args`, `weight`; sampling is "
    "`[orchestrator.sampling]`",
    "orchestrator.eval.source": "use `[[orchestrator.eval.env]]` with `id`, `name`, `args`",
    "orchestrator.token_batch_size": "batches are counted in rollouts: use `orchestrator.batch_size`",
    "orchestrator.buffer": "there is no rollout buffer; see `orchestrator.filter_zero_advantages`",
    "orchestrator.ckpt": "the orchestrator's state is part of every checkpoint: use `[ckpt]`",
    "orchestrator.client": "engines register with the orchestrator by themselves; there is no endpoint to set",
    "trainer.max_async_level": "use `async_level` at the top",
    "trainer.weight_broadcast": "policies go through the object store; there is nothing to choose",
    "orchestrator.weight_broadcast": "policies go through the object store; there is nothing to choose",
    "weight_broadcast": "policies go through the object store; there is nothing to choose",
    "rollout_transport": "rollouts go through Redis; there is nothing to choose",
    "monitors": "use `[wandb]`",
    "bench": "not there yet",
}
"""Keys of prime-rl that have another place or no meaning here."""


def close(word: str, words: Iterable[str], *, most: int = 3) -> list[str]:
    """The words that are most like a word, best first."""
    return difflib.get_close_matches(word, list(words), n=most, cutoff=_CUTOFF)


def unknown_key_message(key: str, node: SchemaKey, path: Path, *, schema: SchemaKey) -> tuple[str, set[Path]]:
    """What to say about a key that a section does not have, and which keys it may have been meant to be."""
    if moved := MOVED.get(dotted((*path, key))):
        return f"unknown key: {moved}", set()
    spelled = key.replace("-", "_")
    names = {name: child.name for child in node.children.values() for name in (child.name, *child.aliases)}
    siblings = list(dict.fromkeys(names[name] for name in close(spelled, names)))
    meant: set[Path] = {(*path, name) for name in siblings}
    if siblings:
        return f"unknown key; did you mean {_or(dotted((*path, name)) for name in siblings)}?", meant
    elsewhere = _elsewhere(spelled, schema)
    if elsewhere:
        return f"unknown key; did you mean {_or(elsewhere)}?", meant
    return f"unknown key; the keys here are {', '.join(sorted(node.children)[:_MOST_KEYS])}", meant


def _elsewhere(key: str, schema: SchemaKey) -> list[str]:
    """Full paths of other sections that end in the key, or nearly so."""
    everywhere = {dotted(other.path): other for other in schema.walk()}
    exact = [name for name, other in everywhere.items() if key == other.name or key in other.aliases]
    if exact:
        return exact[:3]
    near = difflib.get_close_matches(key, {other.name for other in schema.walk()}, n=1, cutoff=_CUTOFF_ELSEWHERE)
    return [name for name, other in everywhere.items() if near and other.name == near[0]][:3]


def _or(names: Iterable[str]) -> str:
    return " or ".join(f"`{name}`" for name in names)


def shown(path: Path, value: Any) -> str | None:
    """A value as JSON-like text, cut to 80 characters; None for what looks like a secret."""
    if _is_secret(path, value):
        return None
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = str(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _is_secret(path: Path, value: Any) -> bool:
    """Whether the key's name or the value's form, here or below, says that the value is a secret."""
    match value:
        case dict():
            return any(_is_secret((*path, key), item) for key, item in value.items())
        case list():
            return any(_is_secret(path, item) for item in value)
        case str() if _SECRET_VALUE.match(value):
            return True
        case _:
            last = next((part for part in reversed(path) if isinstance(part, str)), "")
            return isinstance(value, str) and bool(_SECRET_KEY.search(last.lower().replace("-", "_")))
