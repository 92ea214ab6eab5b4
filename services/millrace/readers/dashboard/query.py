"""The index of samples: a row for each resolved rollout, followed from the log, and pages of rows."""

import logging
import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from millrace.errors import CorruptObjectError, InvalidSpecError, MillraceError, NotFoundError, Violation
from millrace.internal.v1 import batch_pb2
from millrace.readers.dashboard.index import ROW, Columns, Texts, number_or_none, packed
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

# Looks at the store in the background: a page never waits longer for it than it wants to.

logger = logging.getLogger(__name__)

SILENT_S = 5.0
"""From which age on a look says that the store does not answer."""


class StoreRefresh:
    """One look at a time, in a thread of its own, as often as somebody asks and the last one is old enough."""

    def __init__(self, look: Callable[[], None], *, fresh_s: float) -> None:
        """Make the keeper of looks at the store: `look` reads the store in a thread, and raises on failure.

        No look begins within `fresh_s` seconds after the last one has ended.
        """
        self._look = look
        self._fresh_s = fresh_s
        self._ended = 0.0
        self._began = 0.0
        self._thread: threading.Thread | None = None
        self._problem = ""
        self._lock = threading.Lock()
        self.is_closed = threading.Event()

    @property
    def is_busy(self) -> bool:
        """Return whether a look at the store is under way."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def problem(self) -> str:
        """Return in words what was wrong at the last look at the store, or that the current one gets no answer.

        Empty if nothing is wrong.
        """
        silent_s = time.monotonic() - self._began
        if self.is_busy and silent_s > SILENT_S:
            return self._problem or f"the object store has not answered for {silent_s:.0f} s"
        return self._problem

    def note_answer(self) -> None:
        """Note that the current look gets answers of the store, so that it may take its time.

        The last problem is over.
        """
        self._began = time.monotonic()
        self._problem = ""

    def refresh(self, wait_s: float = 0.0) -> None:
        """Start a look at the store in a thread, if none is under way and the last is old enough.

        Wait up to `wait_s` seconds for the one under way.
        """
        with self._lock:  # pages ask from threads of their own
            if not self.is_busy:
                if self.is_closed.is_set() or time.monotonic() - self._ended < self._fresh_s:
                    return
                self._began = time.monotonic()
                self._thread = threading.Thread(target=self._run, name="look", daemon=True)
                self._thread.start()
            looking = self._thread
        assert looking is not None
        looking.join(wait_s)

    def close(self) -> None:
        """Start no further look at the store, and wait for the one under way."""
        self.is_closed.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        """Look once, and keep in words what was wrong."""
        try:
            self._look()
            self._problem = ""
        except MillraceError as error:
            self._problem = error.message
        except Exception as error:  # the edge of a thread: pages say it, and the next look tries again
            problem = f"the log could not be read: {type(error).__name__}, see the orchestrator's log"
            if problem != self._problem:
                logger.exception("a look at the store failed")
            self._problem = problem
        finally:
            self._ended = time.monotonic()


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
        """Return whether the query asks for every sample, the newest first."""
        has_filter = self.names or self.lowest or self.highest or self.outcome or self.text or self.version is not None
        return not has_filter and self.rows is None and self.sort == "step" and self.is_descending

    @classmethod
    def parse(cls, raw: Mapping[str, str], *, most: int = PAGE_MAX) -> "SampleQuery":
        """Return the query that the parameters of a request describe; a page has at most `most` samples.

        InvalidSpecError names every parameter that is wrong or unknown.
        """
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
    """Return step, header's revision and place in the archive of a sample's id, such as `12-3` or `12r1-3`.

    InvalidSpecError if it is none.
    """
    match = _ID.fullmatch(text)
    if match is None:
        raise InvalidSpecError(
            [_wrong("sample", text, "must be the id of a sample, such as 12-3")], reason="SAMPLE_ID_INVALID"
        )
    return int(match["step"]), int(match["revision"] or "0"), int(match["place"])


def sample_id(row: Any) -> str:
    """Return the id of a row's sample, which stays the same as long as the run's log exists.

    `row` has the columns of `ROW`.
    """
    return rollout_id(int(row["step"]), int(row["revision"]), int(row["place"]))


def select(columns: Columns, query: SampleQuery) -> Page:
    """Return the row numbers of the page that a query asks for, and how many rows pass in all.

    Rows without a value to sort by come last, equal ones in the order of the run.
    """
    if query.is_plain:
        return _newest(columns, query)
    found = np.flatnonzero(passing(columns, query))
    found = found if query.rows is None else found[found < query.rows]
    found = columns.containing(query.text, found) if query.text else found
    values = columns.column(query.sort)[found].astype(np.float64)
    missing = np.isnan(values)
    keyed = -values if query.is_descending else values
    keyed[missing] = math.inf  # what has none comes last, either way
    end = query.offset + query.size
    if end < len(found):  # only as much as is shown is sorted
        edge = np.partition(keyed, end)[end]
        # Every row up to the key of the page's last one, equal keys included: the stable order among them is that of
        # the whole.
        near = np.flatnonzero(keyed <= edge) if not math.isnan(edge) else np.arange(len(found))
        found, keyed = found[near], keyed[near]
    total = len(values)
    order = np.argsort(keyed, kind="stable")[query.offset : end]
    return Page(rows=[int(index) for index in found[order]], total=total)


def _newest(columns: Columns, query: SampleQuery) -> Page:
    """Return the page of a query for every sample: the newest step first, a step's samples in their own order."""
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
    """Return a mask over all rows of the index: which of them pass the query's filters, but for its text."""
    column = columns.column
    mask = np.ones(columns.num_rows, bool)
    for kind, wanted in query.names.items():
        # Rows without such a name have the number -1; a name that no row has fits none.
        numbers = [-1 if name == "none" else columns.names.find(kind, name) for name in wanted]
        mask &= np.isin(column(kind), [number for number in numbers if number is not None])
    # A value that is missing is NaN, which passes no bound.
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
    """Return a row of the index (columns of `ROW`) and its texts as plain data; None for a missing value."""
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
    """Return a mask over all rows of the index: those of an outcome of `OUTCOMES`.

    "trained" are those that were trained on, "dropped" OK ones of training that were not. "failed" are all that did not
    end OK, "evaluated" all of evaluations.
    """
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
    """Return a limit in the number format of its column (`name` of `RANGES`), so that 0.1 equals a stored 0.1.

    It is returned as it is for columns of whole numbers.
    """
    kind = ROW[RANGES[name]]
    return kind.type(limit) if kind.kind == "f" else limit


def _ranges(raw: Mapping[str, str], wrong: list[Violation]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the lower and upper limits by number in a request's parameters; wrong ones are added to `wrong`."""
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
    """Return a parameter as a whole number from 0 to `most`.

    None if it is missing, or wrong: then it is added to `wrong`.
    """
    text = raw.get(name, "")
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 12 and int(text) <= most):
        wrong.append(_wrong(name, text, f"must be a whole number from 0 to {most}"))
        return None
    return int(text)


def _wrong(name: str, value: str, message: str) -> Violation:
    """Make the violation for a parameter `name` with this value."""
    return Violation(field=name[:80], value=value[:80], message=message, source="request")


# Follows the committed headers of a run and writes a row for each rollout that they resolved.

FRESH_S = 2.0
"""How old the last look at the store may be for another one to be left out."""
LOOK_AGAIN_S = 30.0
"""How often what could not be read is looked at again: it may have been repaired."""


class SampleIndex:
    """The index of one run, brought up to date by a thread of its own for as long as somebody asks."""

    def __init__(self, store: ObjectStore, names: Names, columns: Columns, *, secrets: tuple[str, ...]) -> None:
        """Create the index of a run over `columns`; nothing is read before `looking` is asked to.

        `secrets` are masked in texts.
        """
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
        """Add the batches that were committed since the last look to the index; called in the thread of `looking`."""
        new = list(self._new_headers())
        self.known_headers = len(self.columns.segments) + len(new)
        for step, key in new:
            if self.looking.is_closed.is_set():
                return
            self._add(step, key)
            self.looking.note_answer()
        self._look_again()

    def _look_again(self) -> None:
        """Try once more, seldom, to read the last batch that could not be read; set `is_outdated` if it can be read.

        All batches of a run are repaired together.
        """
        unreadable = next((each for each in reversed(self.columns.segments) if each.problem), None)
        now = time.monotonic()
        if unreadable is None or now - self._looked_again_at < LOOK_AGAIN_S:
            return
        self._looked_again_at = now
        try:
            self._read_rows(unreadable.step, unreadable.key)
        except (CorruptObjectError, NotFoundError):
            return
        self.is_outdated = True

    def _new_headers(self) -> Iterator[tuple[int, str]]:
        """Yield step and key of the headers after the last one in the index, in the order of the run."""
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
        """Add the rollouts that a header resolved to the index.

        Without rows, and with the problem, if they cannot be read.
        """
        rows, texts, problem = np.zeros(0, ROW), b"", ""
        try:
            rows, texts = self._read_rows(step, key)
        except (CorruptObjectError, NotFoundError) as error:  # damaged or pruned: the other steps can be shown
            problem = error.message
        # Pages read rows, texts and names under this lock, so that they belong together.
        with self.lock:
            self.columns.append(
                step=step, revision=revision_of(key), key=key, rows=rows, texts=texts, problem=problem[:500]
            )

    def _read_rows(self, step: int, key: str) -> tuple[np.ndarray, bytes]:
        """Read a header and its archive, and return rows (of `ROW`) and packed texts of the rollouts that it resolved.

        Raise CorruptObjectError or NotFoundError if either is missing or damaged.
        """
        header = decode_header(self._store.get(key, max_bytes=MAX_HEADER_BYTES))
        return self._rows(step, revision_of(key), header, read_rollouts(self._store, header))

    def _rows(
        self, step: int, revision: int, header: batch_pb2.BatchHeader, rollouts: list[Rollout]
    ) -> tuple[np.ndarray, bytes]:
        """Return rows (of `ROW`) and packed texts of a header's rollouts; duplicates are left out."""
        trained = {(entry.ordinal, entry.member, entry.attempt) for entry in header.samples}
        reasons = {each.ordinal: each.reason for each in header.resolutions}
        advantages = advantages_of(self._store, header)
        kept = [(place, rollout) for place, rollout in enumerate(rollouts) if not rollout.is_duplicate]
        rows, texts = np.zeros(len(kept), ROW), bytearray()
        for index, (place, rollout) in enumerate(kept):
            member = (rollout.ordinal, rollout.member, rollout.attempt)
            is_train = rollout.purpose is Purpose.TRAIN
            # The samples of a closing header are those of evaluations: nothing was trained on them.
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
        """Return the texts of a rollout that are kept, cut and without secrets."""
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
        """Return the fields of `ROW`, in its order, for a rollout; `at` has step, revision and place in the archive.

        `advantage` is NaN and `reason` empty where there is none.
        """
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
