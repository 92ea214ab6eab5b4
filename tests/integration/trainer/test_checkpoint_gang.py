"""Two real ranks (gloo, FSDP2) and a checkpoint: each reads what it needs; both hear what is damaged."""

import json
from pathlib import Path

import pytest

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
