"""A policy's config beside that of the model that vLLM was started with, which may be known by a Hub id alone."""

import json
from pathlib import Path

import huggingface_hub
import pytest

from millrace.inference.vllm import model_config
from millrace.inference.vllm.model_config import config_problem


def test_the_config_of_a_hub_id_is_that_which_vllm_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "hub" / "models--team--model"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("abc")
    snapshot, policy = cache / "snapshots" / "abc", tmp_path / "policy"
    for directory in (snapshot, policy):
        directory.mkdir(parents=True)
        (directory / "config.json").write_text(json.dumps({"hidden_size": 8, "dtype": directory.name}))
    monkeypatch.setattr(
        model_config,
        "try_to_load_from_cache",
        lambda name, file: huggingface_hub.try_to_load_from_cache(name, file, cache_dir=tmp_path / "hub"),
    )
    assert config_problem(policy, Path("team/model")) == ""
    assert "hidden_size" in config_problem(policy, Path("team/other"))
    (policy / "config.json").write_text(json.dumps({"hidden_size": 16}))
    assert "hidden_size" in config_problem(policy, Path("team/model"))
