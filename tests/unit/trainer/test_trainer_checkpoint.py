"""A checkpoint that exists is taken only if it is of the same history."""

from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.config.sections.shared import CheckpointConfig
from millrace.errors import ConflictError
from millrace.runlog.names import Names
from millrace.runlog.records.retirement import newest_retirement
from millrace.storage.base import ObjectStore
from millrace.storage.local import LocalStore
from millrace.storage.s3 import S3Store
from millrace.telemetry.leftovers import LEFTOVERS
from millrace.trainer.checkpoint.manifest import Author, CheckpointManifest
from millrace.trainer.checkpoint.store import CheckpointStore
from millrace.trainer.gang.distributed import Gang
from millrace_testing.s3_answers import s3_answers
from millrace_testing.undeletable import undeletable

NAMES = Names("t", "run-a")


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


KEEP_ONE = CheckpointConfig(interval=1, keep_last=1)


def _saved(store: ObjectStore, *steps: int) -> CheckpointStore:
    checkpoints = CheckpointStore(store, NAMES, gang=Gang())
    for step in steps:
        author = Author(run_hash="ab" * 32, epoch=1, determinism="strict")
        state = {"model.a": torch.ones(3)}
        written = checkpoints.write(state, step=step, lineage=0, author=author, chain_hash=b"\1" * 32)
        checkpoints.commit(written, gang=Gang())
    return checkpoints


def test_a_checkpoint_that_cannot_be_deleted_stays_whole_and_no_other_stays_for_it(tmp_path: Path) -> None:
    checkpoints = _saved(LocalStore(tmp_path), 1, 2, 3)
    with undeletable(tmp_path / NAMES.checkpoint_manifest(1)):
        dropped, left = checkpoints.prune(KEEP_ONE)
        assert dropped == [2] and [each.name for each in left] == [checkpoints.uri(1)]
        assert "Operation not permitted" in left[0].why and left[0].is_reportable
        state = {"model.a": torch.zeros(3)}
        checkpoints.load(checkpoints.read(1), state)
        assert state["model.a"].tolist() == [1, 1, 1], "its manifest is there, and so is what that names"
    LEFTOVERS.removed(left[0].name)  # its pause is over
    assert checkpoints.prune(KEEP_ONE) == ([1], []) and list(checkpoints.steps()) == [3]


def test_a_record_is_written_only_where_a_checkpoint_is_given_up(tmp_path: Path) -> None:
    """Retention takes the start model for gone once one was: then nobody starts over from it."""
    store = LocalStore(tmp_path)
    checkpoints = _saved(store, 100)
    assert checkpoints.prune(KEEP_ONE) == ([], []) and newest_retirement(store, NAMES) is None
    assert _saved(store, 200).prune(KEEP_ONE) == ([100], []) and newest_retirement(store, NAMES) is not None


def test_what_a_deletion_or_an_upload_left_behind_goes_with_the_next_one(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    checkpoints = _saved(store, 3, 4)
    store.put(f"{NAMES.checkpoint(2)}e00000001-ab/rank-00000.bin", b"its manifest is gone")
    store.put(f"{NAMES.checkpoint(5)}e00000001-ab/rank-00000.bin", b"another one uploads it")
    assert checkpoints.prune(KEEP_ONE) == ([2, 3], [])
    store.put(f"{NAMES.checkpoint(2)}e00000001-ab/rank-00000.bin", b"kept by its interval")
    assert checkpoints.prune(CheckpointConfig(interval=1, keep_last=1, keep_interval=2)) == ([], [])
    assert [key.key.split("/")[-3] for key in store.list(NAMES.checkpoints) if key.key.endswith(".bin")] == [
        f"{step:08d}" for step in (2, 4, 5)
    ]


def test_a_bucket_that_lets_nothing_be_deleted_is_asked_thrice_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testsecret")
    with s3_answers() as (handler, port):
        handler.refuses["DELETE"], handler.times["DELETE"] = (403, "AccessDenied", "no", ""), 1 << 30
        checkpoints = _saved(S3Store(bucket="b", endpoint=f"http://127.0.0.1:{port}"), 1, 2, 3, 4, 5, 6)
        dropped, left = checkpoints.prune(KEEP_ONE)
        assert not dropped and len(left) == 3 and "403 AccessDenied" in left[0].why
        assert len([kind for kind, _ in handler.seen if kind == "DELETE"]) == 3
        assert list(checkpoints.steps()) == [1, 2, 3, 4, 5, 6]
        handler.refuses.clear()
        for each in left:
            LEFTOVERS.removed(each.name)  # its pause is over
        assert checkpoints.prune(KEEP_ONE) == ([1, 2, 3, 4, 5], []) and list(checkpoints.steps()) == [6]
