"""`config.json` in more spellings than transformers takes, and small files in transformers 4's words. No torch."""

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.models.files import read_object
from millrace.storage.clean_up import TemporaryDirectory

_CONFIG = "config.json"
_FORMAT_KEYS = ("dtype", "torch_dtype")
_FORMATS = ("float64", "float32", "float16", "bfloat16", "double", "float", "half")


def read_config(directory: Path) -> Any:
    """Return the config in a directory, with the errors of transformers; CorruptObjectError (MODEL_FILE_UNUSABLE).

    A format of weights that is no name of one ("auto", "bf16", a number) says nothing, and the files do; some programs
    write "torch.bfloat16". transformers looks all of these up in torch and fails.
    """
    from transformers import AutoConfig

    raw = read_object(directory / _CONFIG)
    said = _with_known_formats(raw)
    if said == raw:
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    with TemporaryDirectory(prefix="millrace-config-") as name:
        (Path(name) / _CONFIG).write_text(json.dumps(said))
        config = AutoConfig.from_pretrained(name, local_files_only=True, trust_remote_code=False)
    config._name_or_path = str(directory)
    return config


def read_tokenizer(directory: Path) -> Any:
    """Return the tokenizer in a directory, with the errors of transformers, which reads the config there as well."""
    from transformers import AutoTokenizer

    given: dict[str, Any] = {}
    if (directory / _CONFIG).is_file():
        raw = read_object(directory / _CONFIG)
        given = {"config": read_config(directory)} if _with_known_formats(raw) != raw else {}
    return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False, **given)


def _with_known_formats(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config, and those in it, without formats of weights that are none."""
    found: dict[str, Any] = {}
    for key, value in said.items():
        if key in _FORMAT_KEYS and value is not None and not isinstance(value, dict):
            name = str(value).removeprefix("torch.")
            if name in _FORMATS:
                found[key] = name
        else:
            found[key] = _with_known_formats(value) if isinstance(value, dict) and key.endswith("_config") else value
    return found


# What the small files of a model say in the words of transformers 4, too, which transformers 5 reads as well.
#
# Readers of transformers 4 look for `rope_theta` and `rope_scaling` in `config.json`, know nothing of
# `rope_parameters`, and take the class's default where they find neither: other logits, without a word. Of a
# tokenizer that transformers 5 saved they know neither the class nor where its special tokens are.

_FULL, _SLIDING = "full_attention", "sliding_attention"
_OLDER_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
"""Kinds of rotary embeddings that transformers 4 has."""
_TYPE_ALONE = ("olmo", "olmo2")
"""Models of which transformers 4 takes `type` in `rope_scaling` and refuses `rope_type`; of others it wants that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Names:
    """Keys of transformers 4 for the base of rotary embeddings, that of sliding layers, and the part of a head."""

    theta: str = "rope_theta"
    partial: str = "partial_rotary_factor"
    local_theta: str | None = None

    def spelled(self, config: Any, rope: Mapping[str, Any]) -> dict[str, Any]:
        """Return values by these keys for a model of this config.

        `rope` as transformers 5 has it, maybe by kind of layer.
        """
        scaling = dict(rope.get(_FULL, rope))
        found: dict[str, Any] = {self.theta: scaling.pop("rope_theta")}
        if "partial_rotary_factor" in scaling:
            found[self.partial] = scaling.pop("partial_rotary_factor")
        if self.local_theta is not None and _SLIDING in rope:
            found[self.local_theta] = rope[_SLIDING].get("rope_theta")
        if scaling == {"rope_type": "default"}:
            return found | {"rope_scaling": None}
        if hasattr(config, "original_max_position_embeddings"):  # Phi-3, which takes three keys and no other
            scaling = {name: scaling.get(name) for name in ("rope_type", "short_factor", "long_factor")}
            return found | {"rope_scaling": _by_type(scaling)}
        return found | {"rope_scaling": _by_type(scaling) if config.model_type in _TYPE_ALONE else scaling}


_SPELLINGS = (
    _Names(),
    _Names(local_theta="rope_local_base_freq"),
    _Names(theta="global_rope_theta", local_theta="local_rope_theta"),
    _Names(theta="rotary_emb_base", partial="rotary_pct"),
)


def with_older_names(config: Any, said: Mapping[str, Any]) -> dict[str, Any]:
    """Return `said`, a config of transformers as JSON, with the words of transformers 4 in addition.

    Which words these are for a class is what the class itself reads. What they cannot say is left out.
    """
    found = {key: _plain_number(value) for key, value in said.items()}
    # Names that only the class reads still, such as Qwen3-MoE's num_experts, which is written as num_local_experts.
    found |= {old: said[new] for old, new in config.attribute_map.items() if new in said and old not in said}
    if found.get("dtype") is not None:
        found["torch_dtype"] = found["dtype"]
    for name in config.sub_configs:
        if isinstance(found.get(name), dict):
            found[name] = with_older_names(getattr(config, name), found[name])
    rope = said.get("rope_parameters")
    return found | (_older_rope(config, said, rope) if isinstance(rope, dict) else {})


def with_older_tokenizer_names(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `tokenizer_config.json` in words that transformers 4 and 5 have in common."""
    found = dict(said)
    if found.get("tokenizer_class") == "TokenizersBackend":
        found["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(found.get("extra_special_tokens"), list):
        found["additional_special_tokens"] = found.pop("extra_special_tokens")
    if isinstance(found.get("model_specific_special_tokens"), dict) and "extra_special_tokens" not in found:
        found["extra_special_tokens"] = found["model_specific_special_tokens"]
    return found


def restore_older_rope(config: Any, raw: Mapping[str, Any]) -> None:
    """Give every kind of OLMo 3's layers the base that its `config.json` names in the words of transformers 4.

    transformers 5 gives it to one kind, and its own default to the other.
    """
    if config.model_type == "olmo3" and "rope_parameters" not in raw and "rope_theta" in raw:
        for each in config.rope_parameters.values():
            each["rope_theta"] = raw["rope_theta"]


def _plain_number(value: Any) -> Any:
    """Return an infinity as Python's JSON has it, and not as transformers 5 wraps it."""
    if isinstance(value, list):
        return [_plain_number(each) for each in value]
    return float(value["__float__"]) if isinstance(value, dict) and value.keys() == {"__float__"} else value


def _older_rope(config: Any, said: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary embeddings of a config in the words of transformers 4; nothing where it has none for them."""
    if not all(_is_older(each) for each in _kinds(rope)):
        return {}
    trial = _raised(rope)  # to other values than the defaults of any class
    others = {key: value for key, value in said.items() if key != "rope_parameters"}
    for names in _SPELLINGS:
        if _same(_read(config, {**others, **names.spelled(config, trial)}), trial):
            return names.spelled(config, rope)
    # transformers 5 reads OLMo 3's older words for one kind of its layers only, transformers 4 for both.
    one = _Names().spelled(config, rope)
    is_common = len({each["rope_theta"] for each in _kinds(rope)}) == 1
    return one if is_common and _same(_read(config, {**said, **one}), rope) else {}


def _by_type(scaling: Mapping[str, Any]) -> dict[str, Any]:
    return {"type" if name == "rope_type" else name: value for name, value in scaling.items()}


def _kinds(rope: Mapping[str, Any]) -> list[Any]:
    """Return the parameters of each kind of layer; of all at once where they have the same."""
    return list(rope.values()) if _FULL in rope or _SLIDING in rope else [rope]


def _is_older(rope: Any) -> bool:
    """Return whether transformers 4 has words for the parameters of a kind of layer."""
    is_whole = isinstance(rope, dict) and isinstance(rope.get("rope_theta"), int | float)
    return is_whole and rope.get("rope_type") in _OLDER_TYPES


def _raised(rope: Mapping[str, Any]) -> dict[str, Any]:
    raised = copy.deepcopy(dict(rope))
    for each in _kinds(raised):
        each["rope_theta"] += 1.0
    return raised


def _read(config: Any, said: Mapping[str, Any]) -> Any:
    """Return the parameters that the class of a config reads."""
    return type(config).from_dict(copy.deepcopy(dict(said))).rope_parameters


def _same(one: Any, other: Any) -> bool:
    return _plain(one) == _plain(other)


def _plain(rope: Any) -> dict[str, Any]:
    """Return the config without the older word for `rope_type`, which stays where transformers 5 has read it."""
    return dict(_plain_items(rope)) if isinstance(rope, dict) else {}


def _plain_items(rope: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in rope.items():
        if key != "type":
            yield key, _plain(value) if isinstance(value, dict) else value
