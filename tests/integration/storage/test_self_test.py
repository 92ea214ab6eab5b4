"""The self-test passes on stores that keep their promises and names what the others get wrong."""

import threading
import time
from collections.abc import Iterator

import pytest

from millrace.errors import InvalidStateError
from millrace.storage import ObjectInfo, ObjectStore, prepare
from millrace.storage.local import LocalStore
from millrace.storage.self_test import require_tested, self_test
from millrace_testing.patience import patient


class Forgetful(LocalStore):
    """A server that accepts the condition and ignores it."""

    def create(self, key: str, data: bytes) -> bool:
        self.put(key, data)
        return True


class Racy(LocalStore):
    """A server that looks first and writes then, as one user reported of a real one."""

    def create(self, key: str, data: bytes) -> bool:
        if self.head(key) is not None:
            return False
        self.put(key, data)
        return True


class Locking(LocalStore):
    """A server whose losers wait for a lock until they are let go on, as SeaweedFS' sleep; two of them may be liars."""

    def __init__(self, root, *, late: bool) -> None:
        super().__init__(root)
        self.released = threading.Event()
        self._late = late

    def create(self, key: str, data: bytes) -> bool:
        if super().create(key, data):
            return True
        if data != b"late":
            self.released.wait(60)
            if self._late:
                self.put(key, data)
        return self._late and data != b"late"


def test_losers_that_wait_for_a_lock_are_judged_later(tmp_path) -> None:
    store = Locking(tmp_path / "store", late=False)
    began = time.monotonic()
    answered = require_tested(store, prefix="p")
    assert time.monotonic() - began < patient(1) and not answered.done()
    assert not [item.key for item in store.list("p/") if "passed" in item.key], "not known yet"
    store.released.set()
    answered.result(30)
    [left] = store.list("p/")
    assert "passed" in left.key
    assert require_tested(store, prefix="p").done()


def test_a_winner_that_comes_late_is_found(tmp_path, caplog) -> None:
    store = Locking(tmp_path / "store", late=True)
    answered = require_tested(store, prefix="p")
    store.released.set()
    with pytest.raises(InvalidStateError, match="create-only"):
        answered.result(30)
    assert list(store.list("p/")) == [] and "late" in caplog.text


class Slow(Locking):
    """A server whose second winners answer while the self-test is still busy with its listing."""

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self.released.set()
        time.sleep(0.5)  # for the other threads to have their answers
        return super().list(prefix)


def test_a_winner_that_comes_between_two_looks_is_found(tmp_path) -> None:
    answered = require_tested(Slow(tmp_path / "store", late=True), prefix="p")
    with pytest.raises(InvalidStateError, match="create-only"):
        answered.result(30)


def test_real_stores_pass_and_keep_nothing(make_store) -> None:
    store: ObjectStore = make_store()
    self_test(store, prefix="p").result()
    assert list(store.list("p/")) == []


class Overwriting(LocalStore):
    """A server that tells losers that they have lost, when it has written what they sent."""

    def create(self, key: str, data: bytes) -> bool:
        is_first = super().create(key, data)
        self.put(key, b"lost" if is_first else data)
        return is_first


def test_what_the_winner_wrote_must_lie_there(tmp_path) -> None:
    with pytest.raises(InvalidStateError, match=r"one of [24] create-only PUTs .* other bytes than it wrote"):
        self_test(Overwriting(tmp_path / "store"), prefix="p")


@pytest.mark.parametrize("broken", [Forgetful, Racy])
def test_a_store_without_create_only_puts_is_refused(tmp_path, broken) -> None:
    with pytest.raises(InvalidStateError, match="create-only"):
        for _ in range(50):  # a race is not lost every time
            self_test(broken(tmp_path / "store"), prefix="p").result()


def test_the_command_says_what_it_prepared(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("MILLRACE_STORE_URL", (tmp_path / "store").as_uri())
    (tmp_path / "store").mkdir()
    assert prepare.main(["--create-bucket"]) == 0
    assert "is ready" in capsys.readouterr().out


def test_the_command_names_a_missing_variable(monkeypatch, capsys) -> None:
    monkeypatch.delenv("MILLRACE_STORE_URL", raising=False)
    assert prepare.main([]) == 2
    assert "MILLRACE_STORE_URL" in capsys.readouterr().err
