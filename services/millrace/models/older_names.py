"""What `config.json` says twice: in the words of transformers 5, and in those that transformers 4 reads.

Readers of transformers 4 look for `rope_theta` and `rope_scaling`, know nothing of `rope_parameters`, and take the
class's default where they find neither: other logits, without a word. transformers 5 reads the older words as well.
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_FULL, _SLIDING = "full_attention", "sliding_attention"
_OLDER_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
"""Kinds of rotary embeddings that transformers 4 has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Names:
    """Keys of transformers 4 for the base of rotary embeddings, that of sliding layers, and the part of a head."""

    theta: str = "rope_theta"
    partial: str = "partial_rotary_factor"
    local_theta: str | None = None

    def spelled(self, rope: Mapping[str, Any], *, has_own_length: bool) -> dict[str, Any]:
        """Values by these keys; `rope` as transformers 5 has it, of all layers or by kind of layer."""
        scaling = dict(rope.get(_FULL, rope))
        found: dict[str, Any] = {self.theta: scaling.pop("rope_theta")}
        if "partial_rotary_factor" in scaling:
            found[self.partial] = scaling.pop("partial_rotary_factor")
        if self.local_theta is not None and _SLIDING in rope:
            found[self.local_theta] = rope[_SLIDING].get("rope_theta")
        if has_own_length and scaling.get("rope_type") == "longrope":  # Phi-3, which takes three keys and no other
            scaling = {"type": "longrope"} | {name: scaling.get(name) for name in ("short_factor", "long_factor")}
        return found | {"rope_scaling": None if scaling == {"rope_type": "default"} else scaling}


_SPELLINGS = (
    _Names(),
    _Names(local_theta="rope_local_base_freq"),
    _Names(theta="global_rope_theta", local_theta="local_rope_theta"),
    _Names(theta="rotary_emb_base", partial="rotary_pct"),
)


def with_older_names(config: Any, said: Mapping[str, Any]) -> dict[str, Any]:
    """`said`, which is what a config of transformers says of itself as JSON, with the words of transformers 4 as well.

    Which words these are for a class is what the class itself reads. What they cannot say is left out.
    """
    found = dict(said)
    if found.get("dtype") is not None:
        found["torch_dtype"] = found["dtype"]
    for name in config.sub_configs:
        if isinstance(found.get(name), dict):
            found[name] = with_older_names(getattr(config, name), found[name])
    rope = said.get("rope_parameters")
    return found | (_older_rope(config, said, rope) if isinstance(rope, dict) else {})


def _older_rope(config: Any, said: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary embeddings of a config in the words of transformers 4; nothing where it has none for them."""
    if not all(_is_older(each) for each in _kinds(rope)):
        return {}
    has_own_length = hasattr(config, "original_max_position_embeddings")
    trial = _raised(rope)  # to other values than the defaults of any class
    others = {key: value for key, value in said.items() if key != "rope_parameters"}
    for names in _SPELLINGS:
        if _same(_read(config, {**others, **names.spelled(trial, has_own_length=has_own_length)}), trial):
            return names.spelled(rope, has_own_length=has_own_length)
    # transformers 5 reads OLMo 3's older words for one kind of its layers only, transformers 4 for both.
    one = _Names().spelled(rope, has_own_length=has_own_length)
    is_common = len({each["rope_theta"] for each in _kinds(rope)}) == 1
    return one if is_common and _same(_read(config, {**said, **one}), rope) else {}


def _kinds(rope: Mapping[str, Any]) -> list[Any]:
    """The parameters of each kind of layer; of all at once where they have the same."""
    return list(rope.values()) if _FULL in rope or _SLIDING in rope else [rope]


def _is_older(rope: Any) -> bool:
    """Whether transformers 4 has words for the parameters of a kind of layer."""
    is_whole = isinstance(rope, dict) and isinstance(rope.get("rope_theta"), int | float)
    return is_whole and rope.get("rope_type") in _OLDER_TYPES


def _raised(rope: Mapping[str, Any]) -> dict[str, Any]:
    raised = copy.deepcopy(dict(rope))
    for each in _kinds(raised):
        each["rope_theta"] += 1.0
    return raised


def _read(config: Any, said: Mapping[str, Any]) -> Any:
    """The parameters that the class of a config reads."""
    return type(config).from_dict(copy.deepcopy(dict(said))).rope_parameters


def _same(one: Any, other: Any) -> bool:
    return _plain(one) == _plain(other)


def _plain(rope: Any) -> dict[str, Any]:
    """Without the older word for `rope_type`, which stays where transformers 5 has read it."""
    return dict(_plain_items(rope)) if isinstance(rope, dict) else {}


def _plain_items(rope: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in rope.items():
        if key != "type":
            yield key, _plain(value) if isinstance(value, dict) else value
