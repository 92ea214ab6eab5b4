"""The index of samples: a row for each resolved rollout, followed from the log, and pages of rows."""

import math
import re
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from millrace.errors import CorruptObjectError, InvalidSpecError, NotFoundError, Violation
from millrace.internal.v1 import batch_pb2
from millrace.readers.dashboard.index import ROW, Columns, Texts, number_or_none, packed
from millrace.readers.dashboard.looking import StoreRefresh
from millrace.readers.exports.conversation import answer_of, messages_of
from millrace.readers.exports.samples import ExportedSample, advantages_of
from millrace.rollouts.batch_wire import MAX_HEADER_BYTES, decode_header
from millrace.rollouts.types import Purpose, Rollout
from millrace.runlog.catalogue import BATCH_HEADER
from millrace.runlog.names import Names, rollout_id
from millrace.runlog.records.revisions import read_rollouts
from millrace.storage import ObjectStore
from millrace.storage.base import revision_of
from millrace.telemetry.logging import redacted_beginning, redacted_end

PAGE_DEFAULT, PAGE_MAX = 50, 200
MAX_SKIP = 10_000_000
MAX_TEXT = 200
NAMED = ("env", "purpose", "status", "stop", "reason")
"""Filters by name; `reason` is why a rollout was dropped."""
RANGES = {
    "step": "step", "reward": "reward", "advantage": "advantage", "tokens": "tokens", "sampled": "sampled",
    "turns": "turns", "seconds": "seconds", "ordinal": "ordinal",
}  # fmt: skip
"""Filters by number: `reward=1`, `min_reward=0.5`, `max_reward=1`; with the column that they look at."""
SORTS = (
    "step", "reward", "advantage", "tokens", "sampled", "turns", "seconds", "version_min", "version_max", "finished",
)  # fmt: skip
OUTCOMES = ("trained", "dropped", "failed", "evaluated")
_ID = re.compile(r"(?P<step>\d{1,9})(?:r(?P<revision>\d{1,4}))?-(?P<place>\d{1,9})")
_NUMBER = re.compile(r"[+-]?(\d{1,18}(\.\d{0,18})?|\.\d{1,18})([eE][+-]?\d{1,3})?")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleQuery:
    """Which samples are asked for, in which order, and which page of them."""

    names: Mapping[str, tuple[str, ...]]
    """Of `NAMED`: those that pass. The name `none` is that of samples without one."""
    lowest: Mapping[str, float]
    highest: Mapping[str, float]
    version: int | None = None
    """Only samples with tokens of this policy version."""
    outcome: str = ""
    text: str = ""
    """Only samples of which a kept text holds this."""
    sort: str = "step"
    is_descending: bool = True
    offset: int = 0
    size: int = PAGE_DEFAULT
    rows: int | None = None
    """Only of the first so many rows of the index, so that pages of one listing fit together while it grows."""

    @property
    def is_plain(self) -> bool:
        """Return whether it asks for every sample, the newest first."""
        has_filter = self.names or self.lowest or self.highest or self.outcome or self.text or self.version is not None
        return not has_filter and self.rows is None and self.sort == "step" and self.is_descending

    @classmethod
    def parse(cls, raw: Mapping[str, str], *, most: int = PAGE_MAX) -> "SampleQuery":
        """Parse the parameters of a request, at most `most` samples a page; InvalidSpecError names every wrong one."""
        wrong: list[Violation] = []
        lowest, highest = _ranges(raw, wrong)
        names = {kind: tuple(raw[kind].split(",")[:64]) for kind in NAMED if raw.get(kind)}
        order = raw.get("sort") or "-step"
        if order.removeprefix("-") not in SORTS:
            wrong.append(_wrong("sort", order, f"must be one of {', '.join(SORTS)}, with - in front for descending"))
        outcome = raw.get("outcome", "")
        if outcome and outcome not in OUTCOMES:
            wrong.append(_wrong("outcome", outcome, f"must be one of {', '.join(OUTCOMES)}"))
        text = raw.get("text", "")
        if len(text) > MAX_TEXT:
            wrong.append(_wrong("text", text, f"must have at most {MAX_TEXT} characters"))
        version = _whole(raw, "version", wrong)
        offset = _whole(raw, "offset", wrong, most=MAX_SKIP)
        size = _whole(raw, "size", wrong, most=most)
        rows = _whole(raw, "rows", wrong)
        known = {*NAMED, "text", "sort", "outcome", "version", "offset", "size", "rows"}
        known |= {f"{prefix}{name}" for name in RANGES for prefix in ("", "min_", "max_")}
        wrong += [_wrong(name, raw[name], "is no parameter of samples") for name in raw if name not in known]
        if wrong:
            raise InvalidSpecError(wrong, reason="QUERY_INVALID", remedy="correct the parameters, or leave them out")
        return cls(
            names=names, lowest=lowest, highest=highest, version=version, outcome=outcome, text=text,
            sort=order.removeprefix("-"), is_descending=order.startswith("-"),
            offset=0 if offset is None else offset, size=PAGE_DEFAULT if size is None else max(1, size), rows=rows,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """The rows of a page, and how many pass in all."""

    rows: list[int]
    total: int


def parse_id(text: str) -> tuple[int, int, int]:
    """Parse a sample's id into the step, the header's revision and the place in the archive.

    InvalidSpecError if it is none.
    """
    match = _ID.fullmatch(text)
    if match is None:
        raise InvalidSpecError(
            [_wrong("sample", text, "must be the id of a sample, such as 12-3")], reason="SAMPLE_ID_INVALID"
        )
    return int(match["step"]), int(match["revision"] or "0"), int(match["place"])


def sample_id(row: Any) -> str:
    """Return the id of a row's sample, which is stable for as long as the run's log exists."""
    return rollout_id(int(row["step"]), int(row["revision"]), int(row["place"]))


def select(columns: Columns, query: SampleQuery) -> Page:
    """Return the rows of the page that a query asks for.

    Rows without a value come last, equal ones in the order of the run.
    """
    if query.is_plain:
        return _newest(columns, query)
    found = np.flatnonzero(passing(columns, query))
    found = found if query.rows is None else found[found < query.rows]
    found = columns.saying(query.text, found) if query.text else found
    values = columns.column(query.sort)[found].astype(np.float64)
    missing = np.isnan(values)
    keyed = -values if query.is_descending else values
    keyed[missing] = math.inf  # what has none comes last, either way
    end = query.offset + query.size
    if end < len(found):  # only as much as is shown is sorted
        edge = np.partition(keyed, end)[end]
        near = np.flatnonzero(keyed <= edge) if not math.isnan(edge) else np.arange(len(found))
        found, keyed = found[near], keyed[near]
    total = len(values)
    order = np.argsort(keyed, kind="stable")[query.offset : end]
    return Page(rows=[int(index) for index in found[order]], total=total)


def _newest(columns: Columns, query: SampleQuery) -> Page:
    """Return the page of every sample, the newest step first; a step's samples are in their own order."""
    skipped, rows = query.offset, []
    for segment in reversed(columns.segments):
        if skipped >= segment.count:
            skipped -= segment.count
            continue
        end = min(segment.count, skipped + query.size - len(rows))
        rows += range(segment.first + skipped, segment.first + end)
        skipped = 0
        if len(rows) == query.size:
            break
    return Page(rows=rows, total=columns.num_rows)


def passing(columns: Columns, query: SampleQuery) -> np.ndarray:
    """Return a mask over all rows: which of them pass the query's filters, but for its text."""
    column = columns.column
    mask = np.ones(columns.num_rows, bool)
    for kind, wanted in query.names.items():
        numbers = [-1 if name == "none" else columns.names.find(kind, name) for name in wanted]
        mask &= np.isin(column(kind), [number for number in numbers if number is not None])
    with np.errstate(invalid="ignore"):
        for name, limit in query.lowest.items():
            mask &= column(RANGES[name]) >= _as_value(name, limit)
        for name, limit in query.highest.items():
            mask &= column(RANGES[name]) <= _as_value(name, limit)
    if query.version is not None:
        mask &= (column("version_min") <= query.version) & (query.version <= column("version_max"))
    if query.outcome:
        mask &= _of_outcome(columns, query.outcome)
    return mask


def row_json(columns: Columns, row: Any, texts: Texts) -> dict[str, Any]:
    """Return a row and its texts as plain data."""
    name = columns.names.name
    return {
        "id": sample_id(row),
        "step": int(row["step"]),
        "ordinal": int(row["ordinal"]),
        "member": int(row["member"]),
        "attempt": int(row["attempt"]),
        **{kind: name(kind, int(row[kind])) for kind in NAMED},
        "reward": number_or_none(row["reward"]),
        "advantage": number_or_none(row["advantage"]),
        **{each: int(row[each]) for each in ("tokens", "sampled", "turns")},
        "version_min": int(row["version_min"]) if row["version_min"] >= 0 else None,
        "version_max": int(row["version_max"]) if row["version_max"] >= 0 else None,
        "is_truncated": bool(row["truncated"]),
        "is_trained": bool(row["trained"]),
        "seconds": number_or_none(row["seconds"]),
        **texts._asdict(),
    }


def _of_outcome(columns: Columns, outcome: str) -> np.ndarray:
    column = columns.column
    is_train = column("purpose") == columns.names.find("purpose", "train")
    is_ok = column("status") == columns.names.find("status", "ok")
    match outcome:
        case "trained":
            return column("trained") == 1
        case "dropped":
            return is_train & is_ok & (column("trained") == 0)
        case "failed":
            return ~is_ok
        case _:
            return ~is_train


def _as_value(name: str, limit: float) -> Any:
    """Return a limit in the number format of its column, so that 0.1 equals 0.1; as it is for whole numbers."""
    kind = ROW[RANGES[name]]
    return kind.type(limit) if kind.kind == "f" else limit


def _ranges(raw: Mapping[str, str], wrong: list[Violation]) -> tuple[dict[str, float], dict[str, float]]:
    lowest: dict[str, float] = {}
    highest: dict[str, float] = {}
    for name in RANGES:
        for prefix, sides in (("", (lowest, highest)), ("min_", (lowest,)), ("max_", (highest,))):
            text = raw.get(prefix + name, "")
            if not text:
                continue
            if not _NUMBER.fullmatch(text):
                wrong.append(_wrong(prefix + name, text, "must be a number"))
                continue
            for side in sides:
                side[name] = float(text)
    return lowest, highest


def _whole(raw: Mapping[str, str], name: str, wrong: list[Violation], *, most: int = (1 << 31) - 1) -> int | None:
    text = raw.get(name, "")
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 12 and int(text) <= most):
        wrong.append(_wrong(name, text, f"must be a whole number from 0 to {most}"))
        return None
    return int(text)


def _wrong(name: str, value: str, message: str) -> Violation:
    return Violation(field=name[:80], value=value[:80], message=message, source="request")


# Follows the committed headers of a run and writes a row for each rollout that they resolved.

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
        self.looking = StoreRefresh(self._follow, fresh_s=FRESH_S)
        self.known_headers = len(columns.segments)
        """Headers that the store has, as far as is known."""
        self.is_outdated = False
        """What could not be read can be by now: the index has to be begun anew."""
        self._looked_again_at = -math.inf

    def close(self) -> None:
        """Stop following the run, after the look that is under way."""
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
        """Try the last batch that could not be read once more; if it can be read, the index is outdated.

        All of a run are repaired together.
        """
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
        """Return step and key of the headers after the last one in the index, in the order of the run.

        A key sorts after those of earlier steps.
        """
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
        """Return rows and texts of the rollouts that a header resolved.

        Raise if header or archive is missing or damaged.
        """
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
        """Return the texts that are kept, without secrets."""
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
        """Return the fields of `ROW`, in its order; `at` has step, revision and place in the archive."""
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
    """Return when Redis received the rollout, in seconds since 1970; 0 if its entry id has no time."""
    milliseconds = entry_id.partition("-")[0]
    return int(milliseconds) / 1000 if milliseconds.isdecimal() and len(milliseconds) < 16 else 0.0
