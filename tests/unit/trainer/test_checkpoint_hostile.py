"""A checkpoint whose index was written by somebody else runs no code and takes no memory: it is damaged, and named."""

import hashlib
import json
import tracemalloc
from pathlib import Path

import pytest
import torch

from millrace.errors import CorruptObjectError
from millrace.runlog.names import Names
from millrace.storage.base import with_checksum
from millrace.storage.local import LocalStore
from millrace.trainer.checkpoint.manifest import Author
from millrace.trainer.checkpoint.store import CheckpointStore
from millrace.trainer.gang.distributed import Gang

# One entry of the memo, far behind its end: the table is made as long as that, 16 bytes an entry.
_TAKES_MEMORY = b"\x80\x04N" + b"r\x00\x00\x00\x04" + b"."


def _runs_code(command: str) -> bytes:
    data = command.encode()
    return (
        b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x09os.system\x93X"
        + len(data).to_bytes(4, "little")
        + data
        + b"\x85R."
    )


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def _load_with_index(store: LocalStore, index: bytes) -> None:
    """Saves a checkpoint, replaces its index with every hash redone, and loads it."""
    checkpoints = CheckpointStore(store, Names("t", "run-a"), gang=Gang())
    state = {"model.a": torch.ones(3)}
    author = Author(run_hash="ab" * 32, epoch=1, determinism="strict")
    written = checkpoints.write(state, step=4, lineage=0, chain_hash=b"\1" * 32, author=author)
    checkpoints.commit(written, gang=Gang())
    key = "t/runs/run-a/checkpoints/00000004/manifest.json"
    raw = json.loads(store.get(key))
    (item,) = [item for item in raw["objects"] if item["name"] == "index.json"]
    store.put(item["key"], index)
    item |= {"sha256": hashlib.sha256(index).hexdigest(), "size_bytes": len(index)}
    store.put(key, with_checksum(raw))
    checkpoints.load(checkpoints.read(4), state)


def test_an_index_runs_no_code(store: LocalStore, tmp_path: Path) -> None:
    made = tmp_path / "made"
    with pytest.raises(CorruptObjectError):
        _load_with_index(store, _runs_code(f"touch {made}"))
    assert not made.exists()


def test_an_index_takes_no_memory(store: LocalStore) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(CorruptObjectError):
            _load_with_index(store, _TAKES_MEMORY)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
