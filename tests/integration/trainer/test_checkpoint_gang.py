"""Two real ranks (torchrun, gloo, FSDP2) and a checkpoint: each reads what it needs; both hear what is damaged."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from millrace.local.redis import free_port


@pytest.mark.timeout(300)
def test_a_rank_reads_its_shard_and_every_rank_hears_of_a_damaged_one(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]  # --standalone needs a name that resolves
    command += ["-m", "millrace_testing.trainer.checkpoint_rank", str(tmp_path)]
    scratch = tmp_path / "scratch"
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "MILLRACE_SCRATCH_DIR": str(scratch)}
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=250)
    assert ended.returncode == 0, ended.stderr[-4000:]
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
