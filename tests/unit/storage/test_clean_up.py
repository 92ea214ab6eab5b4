"""Clean-ups fail nothing: what cannot be removed stays, learns of, counted, and tried again after a pause."""

import errno
import logging
import os
from pathlib import Path

import pytest

from millrace.errors import PermissionDeniedError, UnavailableError
from millrace.storage.clean_up import TemporaryDirectory, delete, remove
from millrace.storage.local import LocalStore
from millrace.storage.scratch import owned_directory, sweep
from millrace.telemetry.leftovers import LEFTOVERS, Leftovers
from millrace_testing.undeletable import undeletable


def test_what_is_removed_is_gone_and_what_is_not_there_too(tmp_path: Path) -> None:
    (tmp_path / "tree" / "inner").mkdir(parents=True)
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for name in ("tree", "link", "nothing", "file"):
        assert remove(tmp_path / name, what="test") is None
    assert not list(tmp_path.iterdir())


def test_one_file_that_cannot_be_removed_stays_alone_and_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tree, before = tmp_path / "tree", LEFTOVERS.failures().get("a tree", 0)
    (tree / "a").mkdir(parents=True)
    (tree / "a" / "1").touch()
    (tree / "b").mkdir()
    for name in ("1", "2", "3"):
        (tree / "b" / name).touch()
    with undeletable(tree / "b" / "2"), caplog.at_level(logging.INFO):
        left = remove(tree, what="a tree")
        assert left is not None and "cannot be removed and is left for later: Operation not permitted" in str(left)
        assert str(tree / "b" / "2") in str(left)
        assert [path.name for path in tree.rglob("*")] == ["b", "2"]
        assert remove(tree, what="a tree") == left, "it is not tried again at once"
        assert LEFTOVERS.failures()["a tree"] == before + 1
    assert [record.levelname for record in caplog.records if "a tree" in record.message] == ["WARNING"]


def test_pauses_grow_and_only_doublings_of_their_number_are_told() -> None:
    now = [0.0]
    leftovers = Leftovers(clock=lambda: now[0])
    pauses = []
    for _ in range(8):
        left = leftovers.failed("file", "/a", "denied")
        pauses.append(left.retry_at - now[0])
        assert leftovers.is_paused("/a") == left and left.is_reportable == (left.num_tries == 1)
        now[0] = left.retry_at
        assert leftovers.is_paused("/a") is None
    assert pauses[:3] == [60, 120, 240] and pauses[-1] == 3600
    told = [n for n in range(2, 18) if leftovers.failed("file", f"/{n}", "denied").is_reportable]
    assert told == [2, 4, 8, 16] and leftovers.failures() == {"file": 24}
    leftovers.removed("/a")
    assert leftovers.failed("file", "/a", "denied").num_tries == 1


def test_what_a_filesystem_does_not_allow_is_no_outage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)
    store.put("a/b", b"x")
    for code, kind in (
        (errno.EPERM, PermissionDeniedError),
        (errno.EROFS, PermissionDeniedError),
        (5, UnavailableError),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", lambda *_, code=code: _refuse(code))
            with pytest.raises(kind, match="a/b"):
                store.delete("a/b")
    with undeletable(tmp_path / "a" / "b"):
        left = delete(store, "a/b", what="object")
        assert left is not None and left.name == store.uri("a/b") and "Operation not permitted" in left.why


def _refuse(code: int) -> None:
    raise OSError(code, os.strerror(code))


def test_a_temporary_directory_that_stays_raises_nothing(tmp_path: Path) -> None:
    with TemporaryDirectory(prefix="x-", directory=tmp_path) as name:
        kept = Path(name) / "kept"
        kept.touch()
        holding = undeletable(kept)
        holding.__enter__()
    assert kept.exists()
    holding.__exit__(None, None, None)


def test_scratch_that_stays_ends_neither_its_owner_nor_the_next_one(tmp_path: Path) -> None:
    with owned_directory("a", parent=tmp_path) as directory:
        (directory / "kept").touch()
        holding = undeletable(directory / "kept")
        holding.__enter__()
    assert sorted(path.name for path in directory.iterdir()) == ["kept", "owner.lock"]
    with owned_directory("b", parent=tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [directory.name]
    holding.__exit__(None, None, None)
    LEFTOVERS.removed(str(directory / "kept"))  # its pause is over
    sweep(tmp_path)
    assert not list(tmp_path.iterdir())
