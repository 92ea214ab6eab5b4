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
        lambda name, file, *, cache_dir, revision: huggingface_hub.try_to_load_from_cache(
            name, file, cache_dir=cache_dir or tmp_path / "hub", revision=revision
        ),
    )
    assert config_problem(policy, Path("team/model")) == ""
    assert config_problem(policy, Path("team/other")) == "", "what is not known does not differ"
    (policy / "config.json").write_text(json.dumps({"hidden_size": 16}))
    assert "hidden_size" in config_problem(policy, Path("team/model"))
    assert config_problem(policy, Path("team/model"), revision="other") == ""
    assert config_problem(policy, Path("team/model"), download_dir=str(tmp_path / "elsewhere")) == ""
    (cache / "refs" / "v2").write_text("def")
    (cache / "snapshots" / "def").mkdir()
    (cache / "snapshots" / "def" / "config.json").write_text(json.dumps({"hidden_size": 16, "dtype": "x"}))
    assert config_problem(policy, Path("team/model"), revision="v2", download_dir=str(tmp_path / "hub")) == ""
