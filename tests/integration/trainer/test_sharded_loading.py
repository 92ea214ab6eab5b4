"""Ranks read their shares of the start model: together all of it, and none of them more than its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from millrace.errors import CorruptObjectError
from millrace.models.loading import empty_model, fill_model
from millrace.policies.digest import add_digests, tensor_digest
from millrace.trainer.model.pretrained import load_model
from millrace.trainer.model.published import policy_tensors
from millrace_testing.trainer.equality import make_model
from millrace_testing.trainer.families import FAMILIES, make_family

LAYOUTS: dict[str, tuple[str, dict[str, int]]] = {
    "uneven rows": ("dense", {"dp_shard": 3}),
    "copies, tied": ("tied", {"dp_shard": 2, "dp_replicate": 2}),
    "experts, and a rank without any": ("moe", {"dp_shard": 9}),
    "experts shared out": ("moe", {"dp_shard": 4, "ep": 2}),
    "a head that files name otherwise": ("gpt_neox", {"dp_shard": 2}),
}


def _ranks(directory: Path, layout: dict[str, int], ranks: list[int]) -> list[dict[str, Any]]:
    job = json.dumps({"directory": str(directory), "layout": layout, "ranks": ranks})
    command = [sys.executable, "-m", "millrace_testing.trainer.loaded_ranks", job]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environ)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", LAYOUTS)
def test_the_shares_of_all_ranks_are_the_model(case: str, tmp_path: Path):
    name, layout = LAYOUTS[case]
    directory = make_family(name, tmp_path) if name in FAMILIES else make_model(name, tmp_path)
    whole = {name: tensor_digest(t) for name, t in policy_tensors(load_model(directory), dtype=torch.float32)}
    found = _ranks(directory, layout, list(range(layout["dp_shard"] * layout.get("dp_replicate", 1))))
    parts = {name: [int(rank["digests"][name], 16) for rank in found if name in rank["digests"]] for name in whole}
    assert {name: add_digests(digests) for name, digests in parts.items()} == whole


@pytest.mark.long
@pytest.mark.timeout(300)
def test_no_rank_holds_more_than_its_share(tmp_path: Path):
    """Rank 5 of 32 of a model of 200 MB takes less than a third of it, buffers included; code is imported before."""
    sizes: dict[str, Any] = {
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 8,
        "vocab_size": 32_000,
    }
    config = Qwen3Config(**sizes, num_attention_heads=8, num_key_value_heads=8, head_dim=64, tie_word_embeddings=True)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    num_bytes = (tmp_path / "model.safetensors").stat().st_size
    [rank] = _ranks(tmp_path, {"dp_shard": 32}, [5])
    assert num_bytes > 180e6
    assert rank["held"] < num_bytes / 31
    assert rank["taken"] < num_bytes / 3


@pytest.mark.parametrize("damage", ["missing", "of another size", "cut short"])
def test_weights_that_are_not_those_of_the_config_are_refused(damage: str, tmp_path: Path):
    directory = make_model("dense", tmp_path)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    if damage == "missing":
        del tensors["model.norm.weight"]
        save_file(tensors, path)
    elif damage == "of another size":
        tensors["model.norm.weight"] = torch.zeros(3)
        save_file(tensors, path)
    else:
        path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CorruptObjectError, match="cannot be loaded"):
        fill_model(empty_model(directory), directory, device=torch.device("cpu"))
