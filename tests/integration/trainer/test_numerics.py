"""One process computes what a gang of two computes, bit for bit: log-probs, loss, gradients, and the step."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from millrace.config.sections.rl import RLConfig
from millrace.readers.replay import replay
from millrace.runlog import Names
from millrace_testing.trainer.equality import make_model
from millrace_testing.trainer.forked_ranks import run_ranks

Recorder = Any  # conftest.Recorder; tests are not importable from one another

LORA = {"lora": {"rank": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], "dropout": 0.0}}
SAVED = {"lora": {**LORA["lora"], "modules_to_save": ["norm"]}}


MODELS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16 all over": {"dtype": "bfloat16", "optimization_dtype": "bfloat16"},
    "float32": {"dtype": "float32"},
    "lora": {"dtype": "bfloat16", **LORA},
    "lora and norms": {"dtype": "bfloat16", **SAVED},
}


def _compute(configs: Path, facts: Path, *, world_size: int) -> None:
    """Have a gang of so many compute what the configs say."""
    facts.mkdir()
    rank = "millrace_testing.trainer.numerics_rank"
    run_ranks(rank, configs, facts, count=world_size, timeout_s=280)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_one_process_equals_two(make_config: Callable[..., RLConfig], tmp_path: Path) -> None:
    configs = tmp_path / "configs"
    configs.mkdir()
    for name, model in MODELS.items():
        config = make_config(model={"seq_len": 32, **model}, optim={"lr": 1e-3, "max_norm": 1e6})
        (configs / f"{name}.json").write_text(config.resolved_json())
    _compute(configs, tmp_path / "one", world_size=1)
    _compute(configs, tmp_path / "two", world_size=2)
    for name in MODELS:
        one = load_file(tmp_path / "one" / f"{name}-0.safetensors")
        ranks = [load_file(tmp_path / "two" / f"{name}-{rank}.safetensors") for rank in range(2)]
        assert ranks[0].keys() | ranks[1].keys() == one.keys()
        for rank in ranks:
            for key, tensor in rank.items():
                if key == "grad_norm":  # the squares are summed shard by shard
                    assert float(tensor) == pytest.approx(float(one[key]), rel=1e-6), name
                else:
                    assert torch.equal(tensor, one[key]), f"{key} of {name}"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_gang_saves_weights_and_moments_in_the_format_that_they_are_stepped_in(
    make_config: Callable[..., RLConfig], tmp_path: Path
) -> None:
    """Two ranks that compute in bfloat16: five steps, and those after a checkpoint again, bit for bit."""
    found: dict[str, list[dict[str, Any]]] = {}
    for held in ("float32", "bfloat16"):
        directory = tmp_path / held
        directory.mkdir()
        model = {"seq_len": 32, "dtype": "bfloat16", "optimization_dtype": held}
        config = make_config(model=model, optim={"lr": 1e-2}, determinism="strict")
        (tmp_path / f"{held}.json").write_text(config.resolved_json())
        rank = "millrace_testing.trainer.format_rank"
        run_ranks(rank, tmp_path / f"{held}.json", directory, count=2, timeout_s=140)
        found[held] = [json.loads((directory / f"rank-{rank}.json").read_text()) for rank in range(2)]
        for facts in found[held]:
            weights = {name: tag for name, tag in facts["formats"].items() if name.startswith("model.")}
            moments = {name: tag for name, tag in facts["formats"].items() if ".exp_avg" in name}
            assert set(weights.values()) == set(moments.values()) == {held}
            assert len(moments) == 2 * len(weights) and not facts["whole"], "and each rank saves its share only"
            assert facts["digests"] == found[held][0]["digests"] and len(set(facts["digests"])) == 5
            assert facts["again"] == facts["digests"][3:]
    # The norms of a layer are ones at first; a share of them may still be after three steps, and no matrix is.
    assert [name for name in found["float32"][0]["rounded"] if "norm" not in name] == []
    whole, half = (found[held][0] for held in ("float32", "bfloat16"))
    assert half["state_bytes"] == whole["state_bytes"] / 2
    # What else is saved (generators, names, shapes) is the same.
    assert whole["bytes"] - half["bytes"] == pytest.approx(half["state_bytes"], rel=0.02)
    assert found["bfloat16"][0]["digests"] != found["float32"][0]["digests"]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("saved", [["norm"], ["lm_head"]], ids=["norms", "head"])
def test_a_gang_with_adapters_saves_masters_also_of_the_root(
    saved: list[str], make_config: Callable[..., RLConfig], tmp_path: Path
) -> None:
    """The last norm and the head are the root's, which FSDP leaves whole and in bfloat16 after a probe."""
    model = {"seq_len": 32, "dtype": "bfloat16", "lora": {**LORA["lora"], "modules_to_save": saved}}
    directory = make_model("dense", tmp_path)  # whose head is not tied
    config = make_config(name=str(directory), model=model, optim={"lr": 1e-2}, determinism="strict")
    (tmp_path / "config.json").write_text(config.resolved_json())
    run_ranks("millrace_testing.trainer.format_rank", tmp_path / "config.json", tmp_path, count=2, timeout_s=140)
    for rank in range(2):
        facts = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        weights = {name: tag for name, tag in facts["formats"].items() if name.startswith("model.")}
        assert f"model.{'model.norm' if saved == ['norm'] else 'lm_head'}.weight" in weights
        assert any("lora_A" in name for name in weights) and not any(".embed_tokens." in name for name in weights)
        assert set(weights.values()) == {"float32"} and not facts["whole"], "and each rank saves its share only"
        moments = {name: tag for name, tag in facts["formats"].items() if ".exp_avg" in name}
        assert set(moments.values()) == {"float32"} and len(moments) == 2 * len(weights)
        assert not facts["rounded"]
        assert len(set(facts["digests"])) == 5 and facts["again"] == facts["digests"][3:]


@pytest.mark.parametrize(
    "model", [MODELS["bfloat16"], pytest.param(MODELS["lora and norms"], marks=pytest.mark.long)], ids=["whole", "lora"]
)
def test_a_run_in_bfloat16_is_published_resumed_and_replayed(
    model: dict[str, Any], new_recorder: Callable[[], Recorder], make_config: Callable[..., RLConfig]
) -> None:
    config = make_config(model={"seq_len": 32, **model}, ckpt={"interval": 2}, determinism="strict", optim={"lr": 1e-3})
    unbroken, broken = new_recorder(), new_recorder()
    for recorder in (unbroken, broken):
        recorder.record(config, steps=4)
    unbroken.train()
    assert broken.train(stop_at=3) == 3
    broken.train()
    assert len(set(unbroken.digests().values())) == 5
    assert broken.digests() == unbroken.digests()
    for step in (0, 3):  # from the start model, and from a checkpoint
        report = replay(unbroken.store, Names(unbroken.prefix, unbroken.uid), step=step)
        assert report.computed_digest == report.published_digest == unbroken.digests()[step + 1]
