"""Two real ranks (gloo, FSDP2), a checkpoint and a saved model: each reads what it needs; both hear what is wrong."""

import json
from pathlib import Path

import pytest
import safetensors.torch

from millrace_testing.trainer.forked_ranks import run_ranks


@pytest.mark.timeout(300)
def test_a_rank_reads_its_shard_and_every_rank_hears_of_a_damaged_one(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    rank = "millrace_testing.trainer.checkpoint_rank"
    run_ranks(rank, tmp_path, count=2, timeout_s=250, MILLRACE_SCRATCH_DIR=str(scratch))
    first, second = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2))
    assert first["is_equal"] and second["is_equal"]
    assert first["read"] == ["rank-00000.bin"]
    assert second["read"] == ["rank-00000.bin", "rank-00001.bin"]
    assert first["error"] == second["error"]
    kind, reason, message = first["error"]
    assert (kind, reason) == ("CorruptObjectError", "CHECKPOINT_HASH_MISMATCH") and "rank-00001.bin" in message
    assert first["differing"] == second["differing"], "of two that fail, the lowest rank is heard"
    assert first["refused"] == second["refused"]
    assert first["refused"][:2] == ["UnavailableError", "SCRATCH_UNUSABLE"] and "File too large" in first["refused"][2]
    assert list(scratch.iterdir()) == []
    # A disk that is full at rank 0 while tensors are still gathered ends every rank, and what can be saved is whole.
    assert first["unsaved"][0] == "UnavailableError" and "File too large" in first["unsaved"][1]
    assert second["unsaved"][0] == "UnavailableError" and "File too large" in second["unsaved"][1]
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["config.json", "model.safetensors"]
    saved = safetensors.torch.load_file(tmp_path / "saved" / "model.safetensors")
    assert {name: list(tensor.shape) for name, tensor in saved.items()} == {
        f"{layer}.{part}": shape for layer in range(6) for part, shape in (("weight", [16, 16]), ("bias", [16]))
    }
