"""Archived events by cursor: what is damaged is found out once, however often it is asked for."""

import hashlib
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from millrace.runlog.event_archive import ArchivePages, encode_archive
from millrace.runlog.names import Names
from millrace.runlog.redis.entry import Entry
from millrace.storage.local import LocalStore
from millrace.v1 import event_pb2

NAMES = Names("millrace", "01a205f04e00c6b2d345401dca64")


class CountedStore(LocalStore):
    """A store that counts how often each object is fetched."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.gets: Counter[str] = Counter()

    def get(self, key: str, **limits: Any) -> bytes:
        self.gets[key] += 1
        return super().get(key, **limits)


def archive(store: LocalStore, first: int, last: int, *, is_damaged: bool = False) -> str:
    """Store an object with the events from number `first` to `last`, and return its key."""
    entries = []
    for number in range(first, last + 1):
        data = event_pb2.Event(writer="w", writer_sequence=number + 1).SerializeToString()
        entries.append(Entry(id=f"1-{number}", v=1, h=hashlib.sha256(data).hexdigest(), d=data, tp=""))
    key = NAMES.archived_events(entries[0].id, entries[-1].id)
    store.create(key, b"damaged" if is_damaged else encode_archive(entries))
    return key


def ids(entries: list[Entry]) -> list[str]:
    return [entry.id for entry in entries]


@pytest.mark.parametrize("is_last", [True, False])
def test_a_damaged_object_is_fetched_once_and_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, is_last: bool
) -> None:
    store = CountedStore(tmp_path)
    archive(store, 0, 3)
    damaged = archive(store, 4, 7, is_damaged=True)
    if not is_last:
        archive(store, 8, 9)
    pages = ArchivePages(store, NAMES)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):  # as a page does that looks for what is new
            assert ids(pages.read(after="", before="1-20", count=9)) == [f"1-{number}" for number in range(4)]
            assert ids(pages.read(after="1-3", before="1-20", count=9)) == ([] if is_last else ["1-8", "1-9"])
    assert store.gets[damaged] == 1
    assert len([record for record in caplog.records if "damaged or missing" in record.message]) == 1


def test_what_is_archived_later_is_found_behind_a_damaged_object(tmp_path: Path) -> None:
    store = CountedStore(tmp_path)
    damaged = archive(store, 0, 3, is_damaged=True)
    pages = ArchivePages(store, NAMES)
    assert pages.read(after="", before="1-20", count=9) == []
    archive(store, 4, 5)
    assert ids(pages.read(after="", before="1-20", count=9)) == ["1-4", "1-5"]
    assert store.gets[damaged] == 1
