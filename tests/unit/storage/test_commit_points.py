"""The successor of a damaged commit point is what counts; nothing else beside it does."""

from pathlib import Path

import pytest

from millrace.storage.base import newest_revision, revision_key, revision_of
from millrace.storage.local import LocalStore

KEY = "t/runs/u/policies/0000-00000001/manifest.json"


def test_names_of_revisions() -> None:
    first, second = revision_key(KEY, 1), revision_key(KEY, 12)
    assert first == "t/runs/u/policies/0000-00000001/manifest.r1.json"
    assert (revision_of(KEY), revision_of(first), revision_of(second)) == (0, 1, 12)
    assert revision_key(second, 0) == KEY and revision_key(first, 2) == revision_key(KEY, 2)
    assert revision_key("b/00000004.pb", 1) == "b/00000004.r1.pb"


def test_the_newest_revision_counts(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    assert newest_revision(store, KEY) == KEY, "of nothing it is the name itself"
    for number in (0, 1, 2, 10):
        store.put(revision_key(KEY, number), b"x")
        assert newest_revision(store, KEY) == newest_revision(store, revision_key(KEY, 1)) == revision_key(KEY, number)


@pytest.mark.parametrize(
    "name", ["manifest.r01.json", "manifest.r0.json", "manifest.r1.pb", "manifest.r-1.json", "manifest.rx.json"]
)
def test_other_names_are_no_revisions(tmp_path: Path, name: str) -> None:
    store = LocalStore(tmp_path)
    store.put(KEY, b"x")
    store.put(KEY.replace("manifest.json", name), b"x")
    assert newest_revision(store, KEY) == KEY
