"""Runs that train adapters: published as adapters on version 0, resumed bit for bit, replayed, kept to their base."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from millrace.config.sections.rl import RLConfig
from millrace.errors import InvalidStateError
from millrace.policies.fetch import pull_files
from millrace.policies.host_copy import download_hf, pull_tensors, read_manifest
from millrace.policies.manifest import PolicyManifest
from millrace.readers.replay import replay
from millrace.runlog import Names
from millrace_testing.model_files import write_tokenizer
from millrace_testing.trainer.torchrun import train_gang

Recorder = Any  # conftest.Recorder; tests are not importable from one another

STEPS = 4
LORA = {"rank": 4, "alpha": 8.0, "dropout": 0.1, "target_modules": ["q_proj", "v_proj", "down_proj"]}


@pytest.fixture
def config(make_config: Callable[..., RLConfig]) -> RLConfig:
    return make_config(max_steps=STEPS, model={"seq_len": 32, "lora": LORA}, ckpt={"interval": 2}, determinism="strict")


def _manifest(recorder: Recorder, version: int) -> PolicyManifest:
    return read_manifest(recorder.store, f"{recorder.root}policies/0000-{version:08d}/manifest.json")


def _merged_logprobs(recorder: Recorder, version: int, directory: Path) -> np.ndarray:
    """Return log-probs of the version's probe under a fresh model: the base, with the adapter merged into its
    weights.
    """
    manifest = _manifest(recorder, version)
    base = download_hf(recorder.store, _manifest(recorder, 0), directory / str(version))
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tensors = {name: torch.from_numpy(t.numpy().copy()) for name, t in pull_tensors(recorder.store, manifest).items()}
    for name in [name for name in tensors if name.endswith("lora_A.weight")]:
        layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        update = tensors[name.replace("lora_A", "lora_B")] @ tensors[name]
        model.get_submodule(layer).weight.data += LORA["alpha"] / LORA["rank"] * update
    assert manifest.probe is not None
    tokens = torch.tensor([manifest.probe.token_ids])
    logits = model(input_ids=tokens).logits[0, :-1]
    return torch.log_softmax(logits, -1).gather(-1, tokens[0, 1:, None]).squeeze(-1).detach().numpy()


def test_adapters_are_published_resumed_and_replayed(recorder: Recorder, config: RLConfig, tmp_path: Path) -> None:
    recorder.record(config, steps=STEPS)
    recorder.train()
    unbroken = recorder.digests()
    assert len(set(unbroken.values())) == STEPS + 1

    base, last = _manifest(recorder, 0), _manifest(recorder, STEPS)
    assert base.adapter is None and last.adapter is not None
    assert (last.adapter.base_key, last.adapter.base_digest) == (base.key, base.digest)
    assert last.codecs == "adapter" and last.full_bytes > base.full_bytes
    assert {entry.name.rpartition(".lora_")[2] for entry in last.tensors} == {"A.weight", "B.weight"}
    peft = json.loads(pull_files(recorder.store, last)["adapter_config.json"])
    assert (peft["r"], peft["lora_alpha"], set(peft["target_modules"])) == (4, 8.0, set(LORA["target_modules"]))
    assert last.probe is not None
    assert np.allclose(_merged_logprobs(recorder, STEPS, tmp_path), last.probe.logprobs, atol=1e-5, rtol=0)
    assert not np.allclose(_merged_logprobs(recorder, 1, tmp_path), last.probe.logprobs, atol=1e-4, rtol=0)

    names = Names(recorder.prefix, recorder.uid)
    for step in (0, 3):  # from the base alone, and from a checkpoint of adapters
        report = replay(recorder.store, names, step=step)
        assert report.computed_digest == report.published_digest == unbroken[step + 1]

    recorder.forget_training()
    assert recorder.train(stop_at=3) == 3
    assert recorder.checkpoints() == [2, 3]
    recorder.train()
    assert recorder.digests() == unbroken


def test_a_checkpoint_of_adapters_refuses_another_base(
    new_recorder: Callable[[], Recorder], config: RLConfig, tiny_model: Path, tmp_path: Path
) -> None:
    recorder = new_recorder()
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    own = tmp_path / "own"
    model.save_pretrained(own)
    write_tokenizer(own, num_tokens=16)
    changed = {**config.model_dump(), "model": {"name": str(own)}}
    for section in ("trainer", "orchestrator", "inference"):
        changed[section]["model"]["name"] = str(own)
    recorder.record(RLConfig.model_validate_json(json.dumps(changed)), steps=STEPS)
    recorder.train(stop_at=2)
    manifest = json.loads(recorder.store.get(f"{recorder.root}checkpoints/00000002/manifest.json"))
    assert manifest["base_digest"] == recorder.digests()[0]
    model.get_parameter("model.norm.weight").data += 0.01
    model.save_pretrained(own)
    with pytest.raises(InvalidStateError, match=r"checkpoint 2 .* start model of digest ") as raised:
        recorder.train()
    assert raised.value.reason == "CHECKPOINT_BASE_DIFFERS"
    assert "`model.name`" in (raised.value.remedy or "")


@pytest.mark.slow
def test_two_ranks_train_the_adapter_of_one(new_recorder: Callable[[], Recorder], make_config: Any) -> None:
    lora = {**LORA, "dropout": 0.0}  # each rank draws its own
    config = make_config(model={"seq_len": 32, "lora": lora}, ckpt={"interval": 2}, optim={"lr": 1e-3})
    alone, gang, broken = new_recorder(), new_recorder(), new_recorder()
    for recorder in (alone, gang, broken):
        recorder.record(config, steps=STEPS)
    alone.train()
    train_gang(gang)
    assert gang.digests()[0] == alone.digests()[0]
    tensors = [pull_tensors(r.store, _manifest(r, STEPS)) for r in (alone, gang)]
    for name, tensor in tensors[0].items():
        assert np.allclose(tensor.numpy(), tensors[1][name].numpy(), atol=1e-3), name
    train_gang(broken, stop_at="3")
    train_gang(broken)
    assert broken.digests() == gang.digests()
