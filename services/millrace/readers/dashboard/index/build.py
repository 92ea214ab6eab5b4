"""Follows the committed headers of a run and writes a row for each rollout that they resolved."""

import math
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from millrace.errors import CorruptObjectError, NotFoundError
from millrace.internal.v1 import batch_pb2
from millrace.readers.dashboard.index.columns import ROW, Columns, Texts, packed
from millrace.readers.dashboard.looking import Looking
from millrace.readers.exports.conversation import answer_of, messages_of
from millrace.readers.exports.samples import ExportedSample, advantages_of
from millrace.rollouts.batch_wire import MAX_HEADER_BYTES, decode_header
from millrace.rollouts.types import Purpose, Rollout
from millrace.runlog.catalogue import BATCH_HEADER
from millrace.runlog.names import Names
from millrace.runlog.records.revisions import read_rollouts
from millrace.storage import ObjectStore
from millrace.storage.commit_points import revision_of
from millrace.telemetry.redact import redacted_beginning, redacted_end

FRESH_S = 2.0
"""How old the last look at the store may be for another one to be left out."""
LOOK_AGAIN_S = 30.0
"""How often what could not be read is looked at again: it may have been repaired."""


class SampleIndex:
    """The index of one run, brought up to date by a thread of its own for as long as somebody asks."""

    def __init__(self, store: ObjectStore, names: Names, columns: Columns, *, secrets: tuple[str, ...]) -> None:
        self.columns = columns
        self.lock = threading.Lock()
        self._store = store
        self._names = names
        self._secrets = secrets
        self.looking = Looking(self._follow, fresh_s=FRESH_S)
        self.known_headers = len(columns.segments)
        """Headers that the store has, as far as is known."""
        self.is_outdated = False
        """What could not be read can be by now: the index has to be begun anew."""
        self._looked_again_at = -math.inf

    def close(self) -> None:
        """Stop."""
        self.looking.close()

    def _follow(self) -> None:
        new = list(self._new_headers())
        self.known_headers = len(self.columns.segments) + len(new)
        for step, key in new:
            if self.looking.is_closed.is_set():
                return
            self._add(step, key)
            self.looking.alive()
        self._look_again()

    def _look_again(self) -> None:
        """See whether the last batch that could not be read can be; all of a run are repaired together."""
        unreadable = next((each for each in reversed(self.columns.segments) if each.problem), None)
        now = time.monotonic()
        if unreadable is None or now - self._looked_again_at < LOOK_AGAIN_S:
            return
        self._looked_again_at = now
        try:
            self._made(unreadable.step, unreadable.key)
        except (CorruptObjectError, NotFoundError):
            return
        self.is_outdated = True

    def _new_headers(self) -> Iterator[tuple[int, str]]:
        """Headers behind the last one, in the order of the run: a key sorts behind those of earlier steps."""
        prefix, segments = self._names.batches, self.columns.segments
        last = segments[-1] if segments else None
        known = (last.step, last.revision) if last else (-1, 0)
        # From the first header of the last step on: among its revisions, the tenth sorts before the second.
        after = self._names.batch_header(last.step) if last else ""
        found = [
            (int(place["step"]), int(place["revision"]), info.key)
            for info in self._store.list(prefix, start_after=after)
            if (place := BATCH_HEADER.parse(info.key.removeprefix(self._names.root)))
        ]
        return ((step, key) for step, revision, key in sorted(found) if (step, revision) > known)

    def _add(self, step: int, key: str) -> None:
        rows, texts, problem = np.zeros(0, ROW), b"", ""
        try:
            rows, texts = self._made(step, key)
        except (CorruptObjectError, NotFoundError) as error:  # damaged or pruned: the other steps can be shown
            problem = error.message
        with self.lock:
            self.columns.append(
                step=step, revision=revision_of(key), key=key, rows=rows, texts=texts, problem=problem[:500]
            )

    def _made(self, step: int, key: str) -> tuple[np.ndarray, bytes]:
        """Rows and texts of the rollouts that a header resolved."""
        header = decode_header(self._store.get(key, max_bytes=MAX_HEADER_BYTES))
        return self._rows(step, revision_of(key), header, read_rollouts(self._store, header))

    def _rows(
        self, step: int, revision: int, header: batch_pb2.BatchHeader, rollouts: list[Rollout]
    ) -> tuple[np.ndarray, bytes]:
        trained = {(entry.ordinal, entry.member, entry.attempt) for entry in header.samples}
        reasons = {each.ordinal: each.reason for each in header.resolutions}
        advantages = advantages_of(self._store, header)
        kept = [(place, rollout) for place, rollout in enumerate(rollouts) if not rollout.is_duplicate]
        rows, texts = np.zeros(len(kept), ROW), bytearray()
        for index, (place, rollout) in enumerate(kept):
            member = (rollout.ordinal, rollout.member, rollout.attempt)
            is_train = rollout.purpose is Purpose.TRAIN
            is_trained = is_train and member in trained
            rows[index] = self._row(
                rollout,
                at=(step, revision, place),
                advantage=advantages.get(member, math.nan) if is_train else math.nan,
                is_trained=is_trained,
                reason="" if is_trained or not is_train else reasons.get(rollout.ordinal, ""),
            )
            texts += packed(self._texts(rollout))
        return rows, bytes(texts)

    def _texts(self, rollout: Rollout) -> Texts:
        """Return what is kept of its texts, without secrets."""
        sample = ExportedSample(step=0, rollout=rollout, advantage=None, messages=messages_of(rollout))
        error = "" if rollout.error is None else f"{rollout.error.type}: {rollout.error.message}"
        return Texts(
            prompt=redacted_end(sample.prompt, 400, secrets=self._secrets),
            completion=redacted_beginning(sample.completion, 800, secrets=self._secrets),
            answer=redacted_beginning(answer_of(rollout), 256, secrets=self._secrets),
            error=redacted_beginning(error, 512, secrets=self._secrets),
        )

    def _row(
        self, rollout: Rollout, *, at: tuple[int, int, int], advantage: float, is_trained: bool, reason: str
    ) -> tuple[Any, ...]:
        """The fields of `ROW`, in its order."""
        number = self.columns.names.number
        step, revision, place = at
        lowest, highest = rollout.min_version, rollout.max_version
        return (
            step, place, rollout.ordinal, rollout.member, rollout.attempt,
            number("env", rollout.env), number("purpose", rollout.purpose.value),
            number("status", rollout.status.value), number("stop", rollout.stop_condition),
            number("reason", reason), number("server", rollout.env_server), number("evaluation", rollout.eval_id),
            rollout.reward, advantage, rollout.num_tokens, rollout.num_loss_tokens, rollout.num_turns,
            -1 if lowest is None else lowest, -1 if highest is None else highest,
            rollout.is_truncated, is_trained, revision,
            rollout.seconds, rollout.model_seconds, _finished(rollout.entry_id),
        )  # fmt: skip


def _finished(entry_id: str) -> float:
    """When Redis took the rollout, in seconds since 1970; 0 if it does not say."""
    milliseconds = entry_id.partition("-")[0]
    return int(milliseconds) / 1000 if milliseconds.isdecimal() and len(milliseconds) < 16 else 0.0
