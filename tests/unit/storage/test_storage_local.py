"""What only the directory store has: durability of its way of writing, leftovers, odd situations of a filesystem."""

import errno
import os
import threading
import time

import pytest

from millrace.errors import (
    CapacityError,
    ConflictError,
    InternalError,
    InvalidSpecError,
    NotFoundError,
    UnavailableError,
)
from millrace.storage import local
from millrace.storage.clean_up import RetryPolicy, TransientError
from millrace.storage.local import LocalStore


def test_objects_are_plain_files_and_nothing_else_is_left(tmp_path):
    store = LocalStore(tmp_path / "s")
    store.create("a/b.json", b"x")
    store.create("a/b.json", b"y")
    store.put("a/c", b"z")
    files = sorted(str(path.relative_to(tmp_path / "s")) for path in (tmp_path / "s").rglob("*") if path.is_file())
    assert files == ["a/b.json", "a/c"]


def test_two_stores_of_one_directory_are_one(tmp_path):
    first, second = LocalStore(tmp_path), LocalStore(tmp_path)
    assert first.create("k", b"1") and not second.create("k", b"2")


def test_everything_is_synced_before_it_is_named(tmp_path, monkeypatch):
    store = LocalStore(tmp_path)
    log: list[str] = []
    real_sync, real_link = os.fsync, os.link
    monkeypatch.setattr(local.os, "fsync", lambda fd: (log.append("sync"), real_sync(fd))[1])
    monkeypatch.setattr(local.os, "link", lambda a, b: (log.append("link"), real_link(a, b))[1])
    store.create("k", b"x")
    assert log == ["sync", "link", "sync"], "content before the name, directory after it"


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path, monkeypatch):
    store = LocalStore(tmp_path, retry=RetryPolicy(max_attempts=2))

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(local, "sync", full)
    with pytest.raises(CapacityError, match=r"No space left.*MILLRACE_STORE_URL"):
        store.create("k", b"x")
    assert store.head("k") is None and not list((tmp_path / ".tmp").iterdir())


def test_an_unusable_directory_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UnavailableError, match=r"MILLRACE_STORE_URL"):
        LocalStore(tmp_path / "file" / "below")


def test_a_key_that_is_a_directory_is_refused(tmp_path):
    store = LocalStore(tmp_path)
    store.put("a/b", b"x")
    for call in (store.put, store.create):
        with pytest.raises(ConflictError, match="directory of other objects"):
            call("a", b"y")
    assert store.get("a/b") == b"x"


def test_old_leftovers_are_removed_and_young_ones_kept(tmp_path):
    LocalStore(tmp_path)
    old, young = tmp_path / ".tmp" / "old", tmp_path / ".tmp" / "young"
    old.write_text("")
    young.write_text("")
    os.utime(old, (time.time() - 2 * 86400,) * 2)
    LocalStore(tmp_path)
    assert not old.exists() and young.exists()


def test_files_whose_names_are_no_text_are_nobodys(tmp_path):
    store = LocalStore(tmp_path)
    store.put("a/b", b"x")
    (tmp_path / "a" / os.fsdecode(b"\xff")).write_bytes(b"x")
    (tmp_path / os.fsdecode(b"\xfe")).mkdir()
    assert [info.key for info in store.list("")] == ["a/b"] and list(store.list_prefixes("")) == ["a/"]
    with pytest.raises(InvalidSpecError):
        store.get(os.fsdecode(b"a/\xff"))


def test_delete_prunes_directories_while_others_write_there(tmp_path):
    store = LocalStore(tmp_path)
    errors: list[BaseException] = []

    def churn(me: int) -> None:
        try:
            for number in range(100):
                key = f"deep/er/{me}-{number}"
                assert store.create(key, b"x")
                store.delete(key)
        except BaseException as error:  # noqa: BLE001 - threads report to the test
            errors.append(error)

    threads = [threading.Thread(target=churn, args=(me,)) for me in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert list(store.list("")) == [] and not (tmp_path / "deep").exists()


def test_a_directory_that_is_pruned_all_the_time_is_written_to(tmp_path):
    store = LocalStore(tmp_path)
    is_over = threading.Event()

    def prune() -> None:
        while not is_over.is_set():
            store.delete("deep/er/nothing")

    threads = [threading.Thread(target=prune) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for number in range(40):
            assert store.create(f"deep/er/{number}", b"x")
            store.delete(f"deep/er/{number}")
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert store.create("deep/er/0", b"x") and store.get("deep/er/0") == b"x"


def test_a_directory_that_is_pruned_at_the_worst_moment_is_made_again(tmp_path, monkeypatch):
    store, link = LocalStore(tmp_path), os.link
    left = list(range(30))

    def pruned(source, path) -> None:
        if left:
            left.pop()
            os.rmdir(os.path.dirname(path))
        link(source, path)

    monkeypatch.setattr(os, "link", pruned)
    assert store.create("deep/er/0", b"x") and not left


def test_a_directory_that_does_not_stay_is_given_up_in_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "PRUNED_DEADLINE_S", 0.2)
    store = LocalStore(tmp_path)

    def gone(*_: object) -> None:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    monkeypatch.setattr(os, "link", gone)
    began = time.monotonic()
    with pytest.raises(UnavailableError, match="No such file"):
        store.create("deep/er/0", b"x")
    assert 0.2 < time.monotonic() - began < 5
    assert not list((tmp_path / ".tmp").iterdir()), "nothing is left of it"


def test_a_put_file_of_a_missing_file_fails_as_such(tmp_path):
    with pytest.raises(UnavailableError, match="No such file"):
        LocalStore(tmp_path / "s").put_file("k", tmp_path / "nope")


class TestRetryPolicy:
    def test_it_stops_at_the_number_of_attempts(self):
        seen: list[int] = []

        def fail(number: int) -> None:
            seen.append(number)
            raise TransientError("500")

        with pytest.raises(UnavailableError, match="failed 3 times"):
            RetryPolicy(deadline_s=30, max_attempts=3).run("PUT k", "here", fail)
        assert seen == [0, 1, 2]

    def test_it_stops_at_the_deadline(self):
        def fail(_: int) -> None:
            raise TransientError("500")

        began = time.monotonic()
        with pytest.raises(UnavailableError):
            RetryPolicy(deadline_s=0.5, max_attempts=1000).run("PUT k", "here", fail)
        assert time.monotonic() - began < 2

    @pytest.mark.parametrize("error", [NotFoundError("x"), InternalError("x"), ValueError("x")])
    def test_other_errors_pass_at_once(self, error):
        calls = []

        def fail(_: int) -> None:
            calls.append(1)
            raise error

        with pytest.raises(type(error)):
            RetryPolicy().run("GET k", "here", fail)
        assert len(calls) == 1


def test_a_directory_that_cannot_be_listed_is_an_error_of_ours(tmp_path):
    """As a network's filesystem that is gone: whoever asks what is there must not believe that nothing is."""
    store = LocalStore(tmp_path / "store")
    store.put("runs/a", b"1")
    (tmp_path / "store").rename(tmp_path / "hidden")
    (tmp_path / "store").symlink_to(tmp_path / "store")  # a link to itself: whoever opens it gets an error
    with pytest.raises(UnavailableError, match="cannot list"):
        list(store.list("runs/"))
    with pytest.raises(UnavailableError, match="cannot list"):
        list(store.list_prefixes("runs/"))
