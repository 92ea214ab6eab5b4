"""`millrace run export-policy`: any published version as a directory that transformers loads."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from millrace.cli.main import main
from millrace.config.sections.rl import RLConfig
from millrace.policies.host_copy import pull_tensors, read_manifest
from millrace.policies.tensors import as_float32, from_float32

Recorder = Any  # conftest.Recorder; tests are not importable from one another
MakeConfig = Callable[..., RLConfig]


def export(recorder: Recorder, directory: Path, *words: str) -> int:
    where = ("--store", recorder.store_url, "--prefix", recorder.prefix)
    return main(["run", "export-policy", recorder.uid, "--to", str(directory), *words, *where])


def manifest(recorder: Recorder, version: int) -> Any:
    return read_manifest(recorder.store, f"{recorder.root}policies/0000-{version:08d}/manifest.json")


def logprobs(directory: Path, probe: Any) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokens = torch.tensor([probe.token_ids])
    with torch.no_grad():
        logits = model(input_ids=tokens).logits[0, :-1]
    return torch.log_softmax(logits, -1).gather(-1, tokens[0, 1:, None]).squeeze(-1).numpy()


def test_a_version_of_whole_weights(
    recorder: Recorder, make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder.record(make_config(), steps=3)
    recorder.train()
    for words, version in ((("--step", "1"), 1), ((), 3)):
        directory = tmp_path / str(version)
        assert export(recorder, directory, *words) == 0
        out = capsys.readouterr().out
        assert out == f"version {version}, digest {recorder.digests()[version]}\n{directory.resolve()}\n"
        probe = manifest(recorder, version).probe
        assert np.allclose(logprobs(directory, probe), probe.logprobs, atol=1e-5, rtol=0)
    assert export(recorder, tmp_path / "9", "--step", "9") == 2
    assert "it has published versions 0 to 3" in capsys.readouterr().err
    assert export(recorder, tmp_path / "1", "--step", "2") == 2
    assert "is not an empty directory" in capsys.readouterr().err
    assert export(recorder, tmp_path / "a", "--adapter") == 2
    assert "has no adapter" in capsys.readouterr().err and not (tmp_path / "a").exists()


def test_an_adapter_alone_and_merged_into_its_base(
    recorder: Recorder, make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lora = {"rank": 4, "alpha": 8.0, "target_modules": ["q_proj", "down_proj"], "modules_to_save": ["norm"]}
    recorder.record(make_config(model={"seq_len": 32, "lora": lora}), steps=2)
    recorder.train()
    last = manifest(recorder, 2)
    assert last.adapter is not None and last.probe is not None
    assert export(recorder, tmp_path / "merged") == 0
    assert "version 2 (adapter merged into its base)" in capsys.readouterr().out
    assert not (tmp_path / "merged" / "adapter_config.json").exists()
    assert np.allclose(logprobs(tmp_path / "merged", last.probe), last.probe.logprobs, atol=1e-5, rtol=0)
    assert export(recorder, tmp_path / "adapter", "--adapter") == 0
    small = {path.name for path in (tmp_path / "merged").iterdir()} - {"config.json", "model.safetensors"}
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == small | {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    assert {"generation_config.json", "tokenizer.json"} <= small
    peft = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert peft["r"] == 4 and Path(peft["base_model_name_or_path"]).is_dir()
    assert set(pull_tensors(recorder.store, last)) == {entry.name for entry in last.tensors}


def test_rounding_to_bfloat16_is_torch_s() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)).float()
    values[:3] = torch.tensor([1.00390625, 1.01171875, -0.0])  # ties, and a zero
    rounded = from_float32(values.numpy(), dtype="bfloat16")
    assert np.array_equal(rounded.bits(), values.bfloat16().view(torch.uint16).numpy())
    assert np.array_equal(as_float32(rounded), values.bfloat16().float().numpy())
