"""config.json of a saved model says what transformers 4 and 5 call otherwise in the words of both."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from millrace.models.configs import with_older_names, with_older_tokenizer_names
from millrace.models.loading import load_config

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "dtype": "bfloat16",
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 16.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR, DYNAMIC = {"rope_type": "linear", "factor": 4.0}, {"rope_type": "dynamic", "factor": 4.0}
LONG = {"short_factor": [1.0, 1.5], "long_factor": [4.0, 5.0]}
OWN_LENGTH = {"original_max_position_embeddings": 8}
MROPE = {"rope_type": "default", "mrope_section": [1, 1]}
GEMMA = {"head_dim": 8, "rope_theta": 77.5, "rope_local_base_freq": 33.5}
CASES: list[tuple[str, dict[str, Any]]] = [
    *(("llama", {"rope_theta": 77.5, "rope_scaling": each}) for each in (None, LINEAR, DYNAMIC, YARN, LLAMA3)),
    ("qwen3", {"head_dim": 8, "rope_theta": 77.5, "rope_scaling": MROPE}),
    ("phi", {"rope_theta": 77.5, "partial_rotary_factor": 0.75, "rope_scaling": None}),
    ("glm4", {"head_dim": 8, "rope_theta": 77.5, "partial_rotary_factor": 0.75, "rope_scaling": None}),
    ("gpt_neox", {"rotary_emb_base": 77.5, "rotary_pct": 0.75, "rope_scaling": LINEAR}),
    (
        "phi3",
        {"rope_theta": 77.5, "partial_rotary_factor": 1.0, "rope_scaling": {"type": "longrope", **LONG}} | OWN_LENGTH,
    ),
    ("olmo2", {"rope_theta": 77.5, "rope_scaling": {"type": "linear", "factor": 4.0}}),
    ("gemma3_text", {**GEMMA, "rope_scaling": None}),
    ("gemma3_text", {**GEMMA, "rope_scaling": LINEAR}),
    ("gpt_oss", {"head_dim": 8, "rope_theta": 77.5, "rope_scaling": {**YARN, "truncate": False}}),
]
"""A family, and what a config of transformers 4 says of its rotary embeddings."""


def ids(case: Any) -> str:
    return case if isinstance(case, str) else str(list((case.get("rope_scaling") or {}).values())[:1])


@pytest.mark.parametrize(("family", "older"), CASES, ids=ids)
def test_what_was_read_of_transformers_4_is_said_in_its_words_again(family: str, older: dict[str, Any]) -> None:
    said, again = both_ways(made(family, **SIZES, **older))
    assert said | older == said
    assert without_type(again) == without_type(said)


@pytest.mark.parametrize("factor", [0.5, 1.0])
def test_what_was_read_of_transformers_5_is_said_in_the_words_of_4(factor: float) -> None:
    rope = {"rope_type": "default", "rope_theta": 77.5, "partial_rotary_factor": factor}
    said, again = both_ways(made("nemotron", **SIZES, rope_parameters=rope))
    assert (said["rope_theta"], said["partial_rotary_factor"], said["rope_scaling"]) == (77.5, factor, None)
    assert again == said and said["rope_parameters"] == rope


def test_one_base_of_both_kinds_of_layers_is_said_once() -> None:
    rope = {kind: {"rope_type": "default", "rope_theta": 77.5} for kind in ("full_attention", "sliding_attention")}
    rope["full_attention"] |= LINEAR
    said, again = both_ways(made("olmo3", **SIZES, rope_parameters=rope))
    assert (said["rope_theta"], said["rope_scaling"]) == (77.5, LINEAR)
    assert without_type(again) == without_type(said) and said["rope_parameters"] == rope


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("olmo3", {"full_attention": {"rope_theta": 77.5}}),
        ("gemma3_text", {"sliding_attention": LINEAR}),
        ("llama", {"rope_theta": None}),
    ],
)
def test_what_transformers_4_has_no_words_for_is_said_in_those_of_5_alone(family: str, changes: dict[str, Any]) -> None:
    config = made(family, **SIZES)
    for name, change in changes.items():
        config.rope_parameters[name] = change if name == "rope_theta" else config.rope_parameters[name] | change
    said = with_older_names(config, json.loads(config.to_json_string()))
    assert not said.keys() & {"rope_theta", "rope_scaling", "rope_local_base_freq"}


def test_every_level_has_both_words() -> None:
    inner = {**SIZES, **GEMMA, "rope_scaling": LINEAR}
    said, again = both_ways(made("gemma3", text_config=inner, dtype="bfloat16"))
    text = said["text_config"]
    assert text | {**GEMMA, "rope_scaling": LINEAR, "torch_dtype": "bfloat16"} == text
    assert said["dtype"] == said["torch_dtype"] == "bfloat16"
    assert without_type(again) == without_type(said)


def test_a_name_that_only_the_class_reads_still_is_written() -> None:
    said, again = both_ways(made("qwen3_moe", **SIZES, num_experts=6))
    assert said["num_experts"] == said["num_local_experts"] == 6
    assert again == said


def test_a_tokenizer_of_transformers_5_is_said_in_words_that_4_reads() -> None:
    saved = {"tokenizer_class": "TokenizersBackend", "extra_special_tokens": ["<a>"], "eos_token": "<b>"}
    wanted = {"tokenizer_class": "PreTrainedTokenizerFast", "additional_special_tokens": ["<a>"], "eos_token": "<b>"}
    assert with_older_tokenizer_names(saved) == wanted
    assert with_older_tokenizer_names(wanted) == wanted
    named = {"tokenizer_class": "Qwen2Tokenizer", "model_specific_special_tokens": {"image_token": "<i>"}}
    assert with_older_tokenizer_names(named) == named | {"extra_special_tokens": {"image_token": "<i>"}}


def test_olmo_3_has_the_base_that_its_older_config_names_in_every_layer(tmp_path: Path) -> None:
    """transformers 5 gives it to the full layers alone."""
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, "model_type": "olmo3", "rope_theta": 77.5}))
    rope = load_config(tmp_path).rope_parameters
    assert {kind: each["rope_theta"] for kind, each in rope.items()} == {
        "full_attention": 77.5,
        "sliding_attention": 77.5,
    }


def made(family: str, **said: Any) -> Any:
    """Return a config; transformers writes into what it is given."""
    return AutoConfig.for_model(family, **copy.deepcopy(said))


def both_ways(config: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what is said of a config, and what is said of the one that transformers 5 reads there."""
    said = with_older_names(config, json.loads(config.to_json_string()))
    read = type(config).from_dict(json.loads(json.dumps(said)))
    return said, with_older_names(read, json.loads(read.to_json_string()))


def without_type(said: Any) -> Any:
    """Without the older word for `rope_type`, which transformers 5 keeps among its own, at any depth."""
    if not isinstance(said, dict):
        return said
    return {key: without_type(value) for key, value in said.items() if key != "type" or "factor" not in str(said)}
