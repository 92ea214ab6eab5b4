"""The self-test passes on stores that keep their promises and names what the others get wrong."""

import pytest

from millrace.errors import InvalidStateError
from millrace.storage import ObjectStore, prepare
from millrace.storage.local import LocalStore
from millrace.storage.self_test import self_test


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


def test_real_stores_pass_and_keep_nothing(make_store) -> None:
    store: ObjectStore = make_store()
    self_test(store, prefix="p")
    assert list(store.list("p/")) == []


@pytest.mark.parametrize("broken", [Forgetful, Racy])
def test_a_store_without_create_only_puts_is_refused(tmp_path, broken) -> None:
    with pytest.raises(InvalidStateError, match="create-only"):
        for _ in range(50):  # a race is not lost every time
            self_test(broken(tmp_path / "store"), prefix="p")


def test_the_command_says_what_it_prepared(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("MILLRACE_STORE_URL", (tmp_path / "store").as_uri())
    (tmp_path / "store").mkdir()
    assert prepare.main(["--create-bucket"]) == 0
    assert "is ready" in capsys.readouterr().out


def test_the_command_names_a_missing_variable(monkeypatch, capsys) -> None:
    monkeypatch.delenv("MILLRACE_STORE_URL", raising=False)
    assert prepare.main([]) == 2
    assert "MILLRACE_STORE_URL" in capsys.readouterr().err
