"""`config.json` in more spellings than transformers reads, and small files with transformers 4's keys. No torch."""

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
    """Return transformers' config of a directory, without values of `dtype` that transformers fails at.

    Unknown values ("auto", "bf16", a number) are removed, because the weight files say the format; "torch.bfloat16"
    loses its prefix. Raises the errors of transformers, and CorruptObjectError (MODEL_FILE_UNUSABLE).
    """
    from transformers import AutoConfig

    raw = read_object(directory / _CONFIG)
    known = _with_known_formats(raw)
    if known == raw:
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    # Transformers reads a config from a directory only, and the model's own must not be written into.
    with TemporaryDirectory(prefix="millrace-config-") as name:
        (Path(name) / _CONFIG).write_text(json.dumps(known))
        config = AutoConfig.from_pretrained(name, local_files_only=True, trust_remote_code=False)
    # Transformers has set it to the temporary directory, which is gone by now.
    config._name_or_path = str(directory)
    return config


def read_tokenizer(directory: Path) -> Any:
    """Return transformers' tokenizer of a directory, whose config.json it reads as `read_config` does.

    Raises the errors of transformers.
    """
    from transformers import AutoTokenizer

    given: dict[str, Any] = {}
    if (directory / _CONFIG).is_file():
        raw = read_object(directory / _CONFIG)
        given = {"config": read_config(directory)} if _with_known_formats(raw) != raw else {}
    return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False, **given)


def _with_known_formats(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a config without unknown values of `dtype` and `torch_dtype`, and without the prefix "torch.".

    The same is done in objects under keys that end in `_config`.
    """
    found: dict[str, Any] = {}
    for key, value in config.items():
        if key in _FORMAT_KEYS and value is not None and not isinstance(value, dict):
            name = str(value).removeprefix("torch.")
            if name in _FORMATS:
                found[key] = name
        else:
            found[key] = _with_known_formats(value) if isinstance(value, dict) and key.endswith("_config") else value
    return found


# Small files of a model with the keys of transformers 4 in addition, which transformers 5 reads as well.
#
# Readers of transformers 4 look for `rope_theta` and `rope_scaling` in `config.json`, do not know `rope_parameters`,
# and take the class's default if they find neither: they silently compute other logits. Of a tokenizer that
# transformers 5 saved they know neither the class nor the keys of its special tokens.

_FULL, _SLIDING = "full_attention", "sliding_attention"
_OLDER_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
"""Kinds of rotary embeddings that transformers 4 has."""
_TYPE_ALONE = ("olmo", "olmo2")
"""Models for which transformers 4 accepts `type` in `rope_scaling` and refuses `rope_type`; others need `rope_type`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Names:
    """Keys of transformers 4 for the base of rotary embeddings, that of sliding layers, and a head's rotated part."""

    theta: str = "rope_theta"
    partial: str = "partial_rotary_factor"
    local_theta: str | None = None

    def spelled(self, config: Any, rope: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parameters of rotary embeddings under these keys of transformers 4, for a model of this config.

        `rope` are transformers 5's `rope_parameters`, which may be by kind of layer.
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


def with_older_names(config: Any, document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `document`, which is `config` as JSON, with the keys of transformers 4 in addition.

    Those are the keys that the config's class itself reads. Values that they cannot express are left out.
    """
    found = {key: _plain_number(value) for key, value in document.items()}
    # Names that only the class reads, such as Qwen3-MoE's num_experts, which is written as num_local_experts.
    found |= {
        old: document[new] for old, new in config.attribute_map.items() if new in document and old not in document
    }
    if found.get("dtype") is not None:
        found["torch_dtype"] = found["dtype"]
    for name in config.sub_configs:
        if isinstance(found.get(name), dict):
            found[name] = with_older_names(getattr(config, name), found[name])
    rope = document.get("rope_parameters")
    return found | (_older_rope(config, document, rope) if isinstance(rope, dict) else {})


def with_older_tokenizer_names(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a `tokenizer_config.json` with the class and the keys that both transformers 4 and 5 read."""
    found = dict(document)
    if found.get("tokenizer_class") == "TokenizersBackend":
        found["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(found.get("extra_special_tokens"), list):
        found["additional_special_tokens"] = found.pop("extra_special_tokens")
    if isinstance(found.get("model_specific_special_tokens"), dict) and "extra_special_tokens" not in found:
        found["extra_special_tokens"] = found["model_specific_special_tokens"]
    return found


def restore_older_rope(config: Any, raw: Mapping[str, Any]) -> None:
    """Set the rotary base of all kinds of OLMo 3's layers, in place, to `rope_theta` of its `config.json` (`raw`).

    transformers 5 sets it for one kind of layers, and its own default for the other. Other models, and a `raw` with
    `rope_parameters`, stay as they are.
    """
    if config.model_type == "olmo3" and "rope_parameters" not in raw and "rope_theta" in raw:
        for each in config.rope_parameters.values():
            each["rope_theta"] = raw["rope_theta"]


def _plain_number(value: Any) -> Any:
    """Return the value with numbers that transformers 5 wraps as `{"__float__": …}` (infinities) unwrapped."""
    if isinstance(value, list):
        return [_plain_number(each) for each in value]
    return float(value["__float__"]) if isinstance(value, dict) and value.keys() == {"__float__"} else value


def _older_rope(config: Any, document: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary embeddings of a config under keys of transformers 4; empty if these cannot express them.

    `document` is the config as JSON, `rope` its `rope_parameters`. The keys are found by trying which of the known
    spellings the config's class reads.
    """
    if not all(_is_older(each) for each in _kinds(rope)):
        return {}
    trial = _raised(rope)  # other values than the defaults of any class
    others = {key: value for key, value in document.items() if key != "rope_parameters"}
    for names in _SPELLINGS:
        if _same(_read(config, {**others, **names.spelled(config, trial)}), trial):
            return names.spelled(config, rope)
    # transformers 5 applies OLMo 3's older keys to one kind of its layers only, transformers 4 to both.
    one = _Names().spelled(config, rope)
    is_common = len({each["rope_theta"] for each in _kinds(rope)}) == 1
    return one if is_common and _same(_read(config, {**document, **one}), rope) else {}


def _by_type(scaling: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters with the key `rope_type` renamed to `type`."""
    return {"type" if name == "rope_type" else name: value for name, value in scaling.items()}


def _kinds(rope: Mapping[str, Any]) -> list[Any]:
    """Return the rotary parameters in `rope` of each kind of layer; `rope` alone if they are for all layers."""
    return list(rope.values()) if _FULL in rope or _SLIDING in rope else [rope]


def _is_older(rope: Any) -> bool:
    """Return whether transformers 4 has keys for `rope`, the rotary parameters of one kind of layer."""
    is_whole = isinstance(rope, dict) and isinstance(rope.get("rope_theta"), int | float)
    return is_whole and rope.get("rope_type") in _OLDER_TYPES


def _raised(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of rotary parameters with every base raised by 1, so that no class has them by default."""
    raised = copy.deepcopy(dict(rope))
    for each in _kinds(raised):
        each["rope_theta"] += 1.0
    return raised


def _read(config: Any, document: Mapping[str, Any]) -> Any:
    """Return the `rope_parameters` that the class of `config` reads from a document."""
    return type(config).from_dict(copy.deepcopy(dict(document))).rope_parameters


def _same(one: Any, other: Any) -> bool:
    """Return whether two `rope_parameters` are equal, whichever key names their type."""
    return _plain(one) == _plain(other)


def _plain(rope: Any) -> dict[str, Any]:
    """Return a copy of `rope` without the keys `type`, the older name of `rope_type`, which transformers 5 leaves in.

    Empty if `rope` is no mapping.
    """
    return dict(_plain_items(rope)) if isinstance(rope, dict) else {}


def _plain_items(rope: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield keys and values of parameters without `type`, at every level."""
    for key, value in rope.items():
        if key != "type":
            yield key, _plain(value) if isinstance(value, dict) else value
