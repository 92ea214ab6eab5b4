"""A policy's config beside that of the model that vLLM was started with, which may be known by a Hub id alone."""

import copy
import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from transformers import AutoConfig, Qwen3_5TextConfig, Qwen3Config

from millrace.inference.vllm import engine
from millrace.inference.vllm.engine import compare_configs
from millrace.models.configs import with_older_names

LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 2, "long_factor": [4.0] * 2}
SMALL = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
ROPE: dict[str, dict[str, Any]] = {
    "phi3": {**SMALL, "rope_parameters": LONGROPE, "original_max_position_embeddings": 8, "pad_token_id": None}
}


def problem(*places: Path, **options: Any) -> str:
    """Return how two configs differ."""
    return compare_configs(*places, **options)[0]


def test_the_config_of_a_hub_id_is_that_which_vllm_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "hub" / "models--team--model"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("abc")
    snapshot, policy = cache / "snapshots" / "abc", tmp_path / "policy"
    for directory in (snapshot, policy):
        directory.mkdir(parents=True)
        (directory / "config.json").write_text(json.dumps({"hidden_size": 8, "dtype": directory.name}))
    monkeypatch.setattr(
        engine,
        "try_to_load_from_cache",
        lambda name, file, *, cache_dir, revision: huggingface_hub.try_to_load_from_cache(
            name, file, cache_dir=cache_dir or tmp_path / "hub", revision=revision
        ),
    )
    assert problem(policy, Path("team/model")) == ""
    assert problem(policy, Path("team/other")) == "", "what is not known does not differ"
    (policy / "config.json").write_text(json.dumps({"hidden_size": 16}))
    assert "hidden_size" in problem(policy, Path("team/model"))
    assert problem(policy, Path("team/model"), revision="other") == ""
    assert problem(policy, Path("team/model"), download_dir=str(tmp_path / "elsewhere")) == ""
    (cache / "refs" / "v2").write_text("def")
    (cache / "snapshots" / "def").mkdir()
    (cache / "snapshots" / "def" / "config.json").write_text(json.dumps({"hidden_size": 16, "dtype": "x"}))
    assert problem(policy, Path("team/model"), revision="v2", download_dir=str(tmp_path / "hub")) == ""


@pytest.mark.parametrize("is_part", [False, True])
def test_who_wrote_a_config_makes_no_difference(is_part: bool, tmp_path: Path) -> None:
    """As older releases left out what is a default, and the text part of a model has a config of its own."""
    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 64}
    policy, started = tmp_path / "policy", tmp_path / "started"
    text = Qwen3_5TextConfig(**sizes, layer_types=["full_attention"])
    config = text if is_part else Qwen3Config(**sizes)
    config.architectures = [f"{type(config).__name__}ForCausalLM"]
    config.save_pretrained(policy)
    started.mkdir()
    whole = {"model_type": "qwen3_5", "text_config": {**sizes, "model_type": "qwen3_5_text"}}
    whole["text_config"]["layer_types"] = ["full_attention"]
    said = whole if is_part else {**sizes, "model_type": "qwen3", "torch_dtype": "bfloat16"}
    (started / "config.json").write_text(json.dumps(said))
    assert compare_configs(policy, started) == ("", is_part)
    (whole["text_config"] if is_part else said)["hidden_size"] = 32
    (started / "config.json").write_text(json.dumps(said))
    assert "differing: hidden_size" in problem(policy, started)
    (whole["text_config"] if is_part else said)["hidden_size"] = 16
    (whole["text_config"] if is_part else said)["quantization_config"] = {"quant_method": "fp8"}
    (started / "config.json").write_text(json.dumps(said))
    assert "differing: quantization_config" in problem(policy, started)


@pytest.mark.parametrize("family", ["phi3", "gemma3_text", "qwen3_moe", "gpt_neox"])
def test_a_policy_is_the_model_it_was_made_of_in_the_words_of_both_releases(family: str, tmp_path: Path) -> None:
    held = AutoConfig.for_model(family, **copy.deepcopy(ROPE.get(family, {})))
    held.save_pretrained(tmp_path / "held")
    (tmp_path / "policy").mkdir()
    said = with_older_names(held, json.loads((tmp_path / "held" / "config.json").read_text()))
    (tmp_path / "policy" / "config.json").write_text(json.dumps(said))
    assert problem(tmp_path / "policy", tmp_path / "held") == ""
