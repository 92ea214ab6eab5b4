"""Ask the dashboard's reader about a run in this process. It reads the object store, so no server is needed."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from millrace.errors import UnavailableError
from millrace.readers.dashboard.answers import INDEX_GROWING
from millrace.readers.dashboard.reader import Reader
from millrace.runlog.names import Names
from millrace.runlog.records.run_record import RunRecord
from millrace.storage import ObjectStore
from millrace.storage.scratch import scratch_parent

GIVE_UP_S = 1800.0
"""How long building an index may take. The first index of a million rollouts takes minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogHere:
    """One run's record, with a reader that answers questions about its log."""

    record: RunRecord
    reader: Reader
    note: Callable[[str], None]

    def ask(self, question: str, params: Mapping[str, str]) -> dict[str, Any]:
        """Return the answer to a question of the dashboard's reader, such as "get-lineage", with its parameters.

        While the index is being built, wait and report the progress with `note`. Raises UnavailableError if the index
        is not built within `GIVE_UP_S` seconds.
        """
        begun = time.monotonic()
        while True:
            try:
                return self.reader.ask(question, self.record.uid, params)
            except UnavailableError as error:
                if error.reason != INDEX_GROWING or time.monotonic() - begun > GIVE_UP_S:
                    raise
                self.note(error.message)  # and the next question waits, too


@contextlib.contextmanager
def open_log(store: ObjectStore, prefix: str, uid: str, *, note: Callable[[str], None]) -> Iterator[LogHere]:
    """Open the log of the run `uid` below `prefix` in a store, with an index in the scratch directory.

    The reader is closed at the end of the block. `note` is called with the progress of the index.
    """
    names = Names(prefix, uid)
    record = RunRecord.parse(store.get(names.run_json), where=store.uri(names.run_json), needs=["uid", "name"])
    reader = Reader(store, prefix, scratch_parent() / "dashboard" / "commands")
    try:
        yield LogHere(record=record, reader=reader, note=note)
    finally:
        reader.close()
