"""Saving while the training goes on: what is saved is of its step, one at a time, and a failure is not lost."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from millrace.config.sections.shared import CheckpointConfig
from millrace.errors import FencedError, UnavailableError
from millrace.runlog.names import Names
from millrace.storage.local import LocalStore
from millrace.trainer.checkpoint.manifest import Author
from millrace.trainer.checkpoint.resume import Checkpointer, SavedCheckpoint
from millrace.trainer.checkpoint.store import CheckpointStore
from millrace.trainer.gang.distributed import Gang
from millrace_testing.undeletable import undeletable

NAMES = Names("t", "run-a")


class SlowStore(LocalStore):
    """Uploads files only when it is allowed to."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.may_upload = threading.Event()
        self.failure: Exception | None = None

    def put_file(self, key: str, path: Path) -> None:
        assert self.may_upload.wait(20)
        if self.failure is not None:
            raise self.failure
        super().put_file(key, path)


class Saving:
    """A checkpointer over a slow store, with a state of one tensor."""

    def __init__(self, root: Path, *, save_async: bool, keep_last: int | None = None) -> None:
        self.store = SlowStore(root)
        self.checkpoints = CheckpointStore(self.store, NAMES, gang=Gang())
        self.saved: list[SavedCheckpoint] = []
        self.told: list[str] = []
        self.state = {"model.a": torch.zeros(3)}
        self.checkpointer = Checkpointer(
            self.checkpoints,
            CheckpointConfig(interval=1, save_async=save_async, keep_last=keep_last),
            gang=Gang(),
            author=Author(run_hash="ab" * 32, epoch=1, determinism="strict"),
            on_saved=self.saved.append,
            on_left=self.told.append,
        )

    def save(self, step: int) -> None:
        self.state["model.a"].fill_(step)
        self.checkpointer.save(self.state, step=step, lineage=0, chain_hash=bytes([step]) * 32)

    def loaded(self, step: int) -> list[float]:
        state = {"model.a": torch.full((3,), -1.0)}
        self.checkpoints.load(self.checkpoints.read(step), state)
        return state["model.a"].tolist()


@pytest.fixture
def saving(tmp_path: Path) -> Iterator[Saving]:
    made = Saving(tmp_path, save_async=True)
    yield made
    made.store.may_upload.set()


def test_training_goes_on_while_a_checkpoint_of_its_step_is_uploaded(saving: Saving) -> None:
    with saving.checkpointer:
        saving.save(1)
        saving.state["model.a"].fill_(99)  # the next step, while nothing of the upload has begun
        assert list(saving.checkpoints.steps()) == [] and saving.saved == []
        saving.store.may_upload.set()
    assert [saved.step for saved in saving.saved] == [1]
    assert saving.loaded(1) == [1.0, 1.0, 1.0]


def test_one_is_saved_at_a_time_in_order(saving: Saving) -> None:
    threading.Timer(0.2, saving.store.may_upload.set).start()
    with saving.checkpointer:
        saving.save(1)
        saving.save(2)
        assert list(saving.checkpoints.steps())[:1] == [1], "the second one begins when the first one is durable"
    assert [saved.step for saved in saving.saved] == [1, 2] and saving.loaded(2) == [2.0, 2.0, 2.0]


def test_without_async_it_is_durable_when_training_goes_on(tmp_path: Path) -> None:
    saving = Saving(tmp_path, save_async=False)
    saving.store.may_upload.set()
    with saving.checkpointer:
        saving.save(1)
        assert list(saving.checkpoints.steps()) == [1] and [saved.step for saved in saving.saved] == [1]


@pytest.mark.parametrize("noticed_by", ["the next step", "the next checkpoint", "the end"])
def test_a_failure_is_raised_by_whatever_comes_next(saving: Saving, noticed_by: str) -> None:
    saving.store.failure = UnavailableError("the store is full", reason="STORE_UNREACHABLE")
    with pytest.raises(UnavailableError, match="the store is full"), saving.checkpointer:
        saving.save(1)
        saving.checkpointer.raise_failure()  # nothing is known yet
        saving.store.may_upload.set()
        if noticed_by == "the next step":
            for _ in range(200):
                saving.checkpointer.raise_failure()
                threading.Event().wait(0.02)
            pytest.fail("nobody heard of it")
        if noticed_by == "the next checkpoint":
            saving.save(2)
            pytest.fail("nobody heard of it")
    assert list(saving.checkpoints.steps()) == [] and saving.saved == []


def test_where_training_fails_the_checkpoint_that_is_whole_is_still_saved(saving: Saving) -> None:
    threading.Timer(0.2, saving.store.may_upload.set).start()
    with pytest.raises(ZeroDivisionError), saving.checkpointer:
        saving.save(1)
        raise ZeroDivisionError
    assert list(saving.checkpoints.steps()) == [1]


def test_a_trainer_that_lost_its_run_does_not_wait(saving: Saving) -> None:
    with pytest.raises(FencedError), saving.checkpointer:
        saving.save(1)
        raise FencedError("another trainer has the run", reason="FENCED")
    assert list(saving.checkpoints.steps()) == []


def test_saved_is_saved_whatever_becomes_of_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saving = Saving(tmp_path, save_async=True, keep_last=1)
    saving.store.may_upload.set()
    with saving.checkpointer:
        saving.save(1)
        saving.checkpointer.finish()
        with undeletable(tmp_path / NAMES.checkpoint_manifest(1)):
            for step in (2, 3, 4):
                saving.save(step)
            saving.checkpointer.finish()
        monkeypatch.setattr(saving.store, "list_prefixes", _away)
        saving.checkpoints.steps = lambda: iter([1, 4, 5])  # type: ignore[method-assign]
        saving.save(5)
    assert [saved.step for saved in saving.saved] == [1, 2, 3, 4, 5]
    assert len(saving.told) == 2, "once of each, however often it is tried"
    assert "checkpoints/00000001/manifest.json cannot be removed" in saving.told[0] and "is away" in saving.told[1]


def _away(_: str) -> Iterator[str]:
    raise UnavailableError("the store is away", reason="STORE_UNREACHABLE")
