"""A checkpoint that exists is taken only if it is of the same history."""

from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.errors import ConflictError
from millrace.runlog.names import Names
from millrace.storage.local import LocalStore
from millrace.trainer.checkpoint.manifest import Author, CheckpointManifest
from millrace.trainer.checkpoint.store import CheckpointStore
from millrace.trainer.gang.distributed import Gang


def _save(store: LocalStore, **changes: Any) -> CheckpointManifest:
    facts: dict[str, Any] = {"chain_hash": b"\1" * 32, "run_hash": "ab" * 32, "epoch": 1, **changes}
    author = Author(run_hash=facts.pop("run_hash"), epoch=facts.pop("epoch"), determinism="strict")
    checkpoints = CheckpointStore(store, Names("t", "run-a"), gang=Gang())
    written = checkpoints.write({"model.a": torch.ones(3)}, step=4, lineage=0, author=author, **facts)
    return checkpoints.commit(written, gang=Gang())


def test_the_same_checkpoint_again_is_returned_as_it_is(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    assert _save(store, epoch=2) == _save(store, epoch=3)


@pytest.mark.parametrize(
    ("change", "name", "found", "ours"),
    [
        ({"chain_hash": b"\2" * 32}, "chain_hash", "01" * 32, "02" * 32),
        ({"run_hash": "cd" * 32}, "run_hash", "ab" * 32, "cd" * 32),
    ],
)
@pytest.mark.parametrize("is_race", [False, True])
def test_a_checkpoint_of_another_history_is_a_conflict(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any],
    name: str,
    found: str,
    ours: str,
    is_race: bool,
) -> None:
    store = LocalStore(tmp_path)
    _save(store)
    if is_race:  # the other writer commits between our look and our commit
        listed, nothing_yet = store.list, [()]
        monkeypatch.setattr(store, "list", lambda prefix: nothing_yet.pop() if nothing_yet else listed(prefix))
    with pytest.raises(ConflictError, match="checkpoint 4 of run run-a") as raised:
        _save(store, **change)
    assert raised.value.reason == "CHECKPOINT_CONFLICT"
    assert all(word in str(raised.value) for word in (name, found, ours, "manifest.json"))
