"""Answers the questions of pages from the object store: what is asked of which run, and where the answer is."""

import contextlib
import json
import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from millrace.decoding import decode_object
from millrace.errors import CorruptObjectError, InvalidSpecError, NotFoundError, UnavailableError, Violation
from millrace.processes.channel import ParentLink
from millrace.readers.dashboard.answers import (
    INDEX_GROWING,
    MAX_QUESTION_BYTES,
    numbered,
    problem_of,
    split_number,
    to_json,
)
from millrace.readers.dashboard.index import Columns, IndexDirectory
from millrace.readers.dashboard.query import NAMED, SampleIndex, SampleQuery, StoreRefresh, row_json, select
from millrace.readers.dashboard.views.detail import MAX_TOKENS, Details, Lineage
from millrace.readers.dashboard.views.facts import MAX_POINTS, RunFacts, Spread
from millrace.readers.dashboard.views.timeline import STEPS_DEFAULT, STEPS_MAX, timeline
from millrace.runlog.names import Names
from millrace.storage import ObjectStore, open_store
from millrace.telemetry.logging import secrets_of

MAX_OPEN = 60
"""Runs whose events and index are open at once: as many as the page of runs draws curves of. Which nobody asked for the
longest is closed first."""
MAX_OPEN_EVENTS = 300_000
"""Events of open runs that are held, at about 1 KB each; of one run there are up to `facts.MAX_EVENTS`."""
WAIT_S = 0.15
"""How long a page waits for an index that grows, before it shows what there is."""
FIRST_WAIT_S = 2.0
"""The same for the events of a run that was not looked at before: without them there is nothing to show."""
EVENTS_MAX = 500
LIST_MAX = 1000
"""Of steps or rollouts, on one page of a list of the API."""
MAX_UNREADABLE = 20
"""Batches whose rollouts cannot be read that are named, the last ones; all are counted."""
MAX_VALUES = 20_000
"""Of metrics, on one such page."""
_MAX_STEP = (1 << 31) - 1

Params = Mapping[str, str]


@dataclass(slots=True)
class _OpenRun:
    """What is held of one run."""

    facts: RunFacts
    index: SampleIndex
    details: Details
    lineage: Lineage
    spread: Spread
    users: int = 0

    @property
    def is_read(self) -> bool:
        """Return whether a look at the store for this run is under way."""
        return self.facts.looking.is_busy or self.index.looking.is_busy

    def close(self) -> None:
        """Stop reading the run, after the look that is under way."""
        self.facts.looking.close()
        self.index.close()


class Reader:
    """Reads runs for pages. Any thread may ask; the indexes are in `directory`."""

    def __init__(self, store: ObjectStore, prefix: str, directory: Path) -> None:
        """Create the reader of the runs below `prefix`; nothing is read yet. Indexes are kept below `directory`."""
        self._store = store
        self._prefix = prefix
        self._index_directory = IndexDirectory.open(directory)
        self._secrets = secrets_of(os.environ)
        self._lock = threading.Lock()
        self._open: OrderedDict[str, _OpenRun] = OrderedDict()
        self._questions: dict[str, Callable[[_OpenRun, Params], dict[str, Any]]] = {
            "metrics": _metrics,
            "events": _events,
            "samples": _samples,
            "sample": _sample,
            "tokens": _tokens,
            "lineage": _lineage,
            "timeline": _timeline,
            "list-metrics": _list_metrics,
            "list-rollouts": _list_rollouts,
            "get-lineage": _whole_lineage,
        }

    def ask(self, question: str, uid: str, params: Params) -> dict[str, Any]:
        """Return the answer to a question about the run `uid` as plain data, with the store's current problem as
        `stale`.

        `params` are the question's. Raise classes of `millrace.errors`.
        """
        if question not in self._questions:
            raise NotFoundError(f"nobody answers {question[:40]!r}", reason="QUESTION_UNKNOWN")
        run = self._acquire(uid)
        try:
            answer = self._questions[question](run, params)
            problem = ""
            for looking in (run.facts.looking, run.index.looking):
                if looking.problem:
                    problem = looking.problem
                    looking.refresh()  # also where this question needs the other one: it says when all is well again
            return answer | ({"stale": problem} if problem else {})
        finally:
            with self._lock:
                run.users -= 1

    def close(self) -> None:
        """Close every run, and unlock the directory of the indexes."""
        for run in self._open.values():
            run.close()
        self._index_directory.close()

    def _acquire(self, uid: str) -> _OpenRun:
        """Return what is held of a run, opened if needed, and count its user; the caller has to lower `users` again.

        Runs that nobody uses are closed while too many, or too many events, are held.
        """
        with self._lock:
            run = self._open.get(uid)
            if run is not None and run.index.is_outdated and not (run.users or run.is_read):
                self._open.pop(uid).close()
                run.index.columns.clear()
                run = None
            if run is None:
                run = self._open[uid] = self._opened(uid)
            self._open.move_to_end(uid)
            run.users += 1
            # A run that is being read is closed later: its look may wait for the store, and all pages for this lock.
            for other in [other for other, each in self._open.items() if not (each.users or each.is_read)]:
                num_events = sum(each.facts.num_events for each in self._open.values())
                if len(self._open) <= MAX_OPEN and num_events <= MAX_OPEN_EVENTS:
                    break
                self._open.pop(other).close()
            return run

    def _opened(self, uid: str) -> _OpenRun:
        """Return a run newly opened, with what earlier processes have kept of its index.

        Nothing else is read yet.
        """
        names = Names(self._prefix, uid)
        columns = Columns(self._index_directory.place(uid, in_use=self._open))
        facts = RunFacts(self._store, names)
        return _OpenRun(
            facts=facts,
            index=SampleIndex(self._store, names, columns, secrets=self._secrets),
            details=Details(self._store, names, columns, facts, secrets=self._secrets),
            lineage=Lineage(self._store, names, columns, facts),
            spread=Spread(),
        )


def _metrics(run: _OpenRun, params: Params) -> dict[str, Any]:
    """Return the curves of the metrics in the parameter `names` (all without it), and the names of all metrics.

    `points` is the most points of a curve, `first` and `last` are the steps at its ends. With `spread=1` the curves of
    `Spread` are added, with `axes=1` the time and the trained tokens of each step that is shown.
    """
    points = _whole(params, "points", MAX_POINTS, most=MAX_POINTS)
    first = _whole(params, "first", 0, most=_MAX_STEP)
    last = _whole(params, "last", _MAX_STEP, most=_MAX_STEP)
    names = params.get("names")
    run.facts.looking.refresh(FIRST_WAIT_S if not run.facts.names else WAIT_S)
    wanted = None if names is None else [name for name in names.split(",") if name][:200]
    curves = run.facts.curves(wanted, points=points, first=first, last=last)
    answer: dict[str, Any] = {"curves": curves, "names": run.facts.names}
    if params.get("spread") == "1":
        run.index.looking.refresh(WAIT_S)
        answer["spread"] = run.spread.curves(run.index.columns, points=points, first=first, last=last)
        answer["index"] = _progress(run)
    if params.get("axes") == "1":
        every = [*curves.values(), *answer.get("spread", {}).values()]
        shown = {int(point[0]) for curve in every for point in curve}
        answer["axes"] = run.facts.axes({step + at for step in shown for at in (-1, 0)})
    return answer


def _events(run: _OpenRun, params: Params) -> dict[str, Any]:
    """Return a page of the run's events, the newest first.

    By the parameters, it has at most `size` events, of the `kinds` (all without), before the cursor `before`.
    """
    run.facts.looking.refresh(FIRST_WAIT_S if not run.facts.names else WAIT_S)
    kinds = [kind for kind in params.get("kinds", "").split(",") if kind][:32]
    size = _whole(params, "size", 100, most=EVENTS_MAX)
    return run.facts.page(kinds=kinds, before=params.get("before", ""), size=max(1, size))


def _samples(run: _OpenRun, params: Params) -> dict[str, Any]:
    """Return the page of samples that the parameters ask for (`SampleQuery`), of those that are in the index by now."""
    query = SampleQuery.parse(params)
    run.index.looking.refresh(WAIT_S)
    return _page_of_samples(run, query)


def _page_of_samples(run: _OpenRun, query: SampleQuery) -> dict[str, Any]:
    """Return the page of samples that a query asks for, the names to filter by, and how far the index is."""
    columns = run.index.columns
    began = time.monotonic()
    with run.index.lock:
        page = select(columns, query)
        rows = columns.rows()
        texts = columns.texts(page.rows)
        shown = [row_json(columns, rows[row], text) for row, text in zip(page.rows, texts, strict=True)]
        names = {kind: sorted(columns.names.by_kind.get(kind, [])) for kind in NAMED}
    return {
        "samples": shown,
        "total": page.total,
        "offset": query.offset,
        "size": query.size,
        "names": names,
        "index": _progress(run),
        "took_s": round(time.monotonic() - began, 4),
    }


def _sample(run: _OpenRun, params: Params) -> dict[str, Any]:
    """Return one sample with its conversation and group; the parameter `id` is its id."""
    run.index.looking.refresh(WAIT_S)
    with _unless_growing(run):
        return run.details.show(params.get("id", ""))


def _tokens(run: _OpenRun, params: Params) -> dict[str, Any]:
    """Return a page of the tokens of one of a sample's sequences.

    The parameters are the sample's `id`, the number of the sequence (`part`), and `offset` and `size` of the page.
    """
    run.facts.looking.refresh(FIRST_WAIT_S if not run.facts.names else 0.0)
    run.index.looking.refresh()
    with _unless_growing(run):
        return run.details.tokens(
            params.get("id", ""),
            part=_whole(params, "part", 0, most=1 << 20),
            offset=_whole(params, "offset", 0, most=1 << 30),
            size=max(1, _whole(params, "size", 1024, most=MAX_TOKENS)),
        )


def _lineage(run: _OpenRun, params: Params) -> dict[str, Any]:
    """Return where a sample or a version comes from and what came of it.

    The parameter `sample` is a sample's id, `version` a policy version. InvalidSpecError unless exactly one is given.
    """
    run.facts.looking.refresh(FIRST_WAIT_S if not run.facts.names else WAIT_S)
    run.index.looking.refresh(WAIT_S)
    sample, version = params.get("sample"), params.get("version")
    if (sample is None) == (version is None):
        wrong = Violation(field="sample, version", message="exactly one of them must be given", source="request")
        raise InvalidSpecError([wrong], reason="QUERY_INVALID", remedy="?sample=12-3 or ?version=12")
    if sample is not None:
        with _unless_growing(run):
            return run.lineage.of_sample(run.details.row(sample), run.details.tokens_by_version(sample))
    return run.lineage.of_version(_whole(params, "version", 0, most=_MAX_STEP))


def _timeline(run: _OpenRun, params: Params) -> dict[str, Any]:
    """Return who did what in the last steps, and why they took so long.

    The parameter `steps` is the number of steps.
    """
    run.facts.looking.refresh(FIRST_WAIT_S if not run.facts.names else WAIT_S)
    run.index.looking.refresh(WAIT_S)
    steps = max(1, _whole(params, "steps", STEPS_DEFAULT, most=STEPS_MAX))
    return timeline(run.facts, run.index.columns, num_steps=steps) | {"index": _progress(run)}


def _list_metrics(run: _OpenRun, params: Params) -> dict[str, Any]:
    """Return metrics by step from the step `first` on, and the next step after them, None at the end.

    The other parameters are `size`, the most steps, and `names`, those of metrics (all without). Raise UnavailableError
    while events are being read.
    """
    first, size = _whole(params, "first", 0, most=_MAX_STEP), _whole(params, "size", LIST_MAX, most=LIST_MAX)
    _require_all(run.facts.looking, "the events of the run are being read")
    names = [name for name in params.get("names", "").split(",") if name]
    rows, following = run.facts.by_step(names, first=first, size=size, most=MAX_VALUES)
    return {"steps": rows, "next": following}


def _list_rollouts(run: _OpenRun, params: Params) -> dict[str, Any]:
    """Return a page of rollouts as `_samples` does, of a complete index, and the number of rows that further pages are
    made of.

    Raise UnavailableError while batches are being read, InvalidSpecError for a page of an index that is gone.
    """
    query = SampleQuery.parse(params, most=LIST_MAX)
    _require_index(run)
    num_rows = run.index.columns.num_rows
    if query.rows is not None and query.rows > num_rows:
        wrong = Violation(field="page_token", message="belongs to an index that is not there any more")
        raise InvalidSpecError([wrong], reason="PAGE_TOKEN_EXPIRED", remedy="leave it out: begin with the first page")
    rows = num_rows if query.rows is None else query.rows
    return _page_of_samples(run, replace(query, rows=rows)) | {"rows": rows}


def _whole_lineage(run: _OpenRun, params: Params) -> dict[str, Any]:
    """Return the lineage as `_lineage` does; raise UnavailableError until all that is in the log is read."""
    _require_all(run.facts.looking, "the events of the run are being read")
    _require_index(run)
    return _lineage(run, params)


@contextlib.contextmanager
def _unless_growing(run: _OpenRun) -> Iterator[None]:
    """Turn a NotFoundError of the block into UnavailableError while batches are still being read: the sample may
    come.
    """
    try:
        yield
    except NotFoundError as error:
        if not run.index.looking.is_busy:
            raise
        raise UnavailableError(_growth(run), reason=INDEX_GROWING, remedy="ask again in a moment") from error


def _require_index(run: _OpenRun) -> None:
    """Raise UnavailableError unless every batch that is known is in the index; wait a moment for that."""
    run.index.looking.refresh(FIRST_WAIT_S)
    _require_all(run.index.looking, _growth(run))


def _growth(run: _OpenRun) -> str:
    """Return in words how many of the run's batches are read."""
    at = _progress(run)
    return f"{at['batches']} of {at['known_batches']} batches of the run are read"


def _require_all(looking: StoreRefresh, meanwhile: str) -> None:
    """Raise UnavailableError unless everything that existed at the last look is read, so that a list has no gaps.

    A look is started and waited for a moment. `meanwhile` is the message while it is being read.
    """
    looking.refresh(FIRST_WAIT_S)
    if looking.problem:
        raise UnavailableError(
            f"the log of the run cannot be read now: {looking.problem}",
            reason="LOG_UNREADABLE",
            remedy="see whether the object store answers, and ask again",
        )
    if looking.is_busy:
        raise UnavailableError(meanwhile, reason=INDEX_GROWING, remedy="ask again in a moment")


def _progress(run: _OpenRun) -> dict[str, Any]:
    """Return how far the index of a run is: its rollouts, batches read and known, and batches that cannot be read."""
    columns = run.index.columns
    unreadable = [{"step": each.step, "problem": each.problem} for each in columns.segments if each.problem]
    return {
        "rollouts": columns.num_rows,
        "batches": len(columns.segments),
        "known_batches": max(run.index.known_headers, len(columns.segments)),
        "is_growing": run.index.looking.is_busy,
        "num_unreadable": len(unreadable),
        "unreadable": unreadable[-MAX_UNREADABLE:],
    }


def _whole(params: Params, name: str, default: int, *, most: int) -> int:
    """Return a parameter as a whole number from 0 to `most`, `default` if it is missing.

    InvalidSpecError if it is wrong.
    """
    text = params.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 12 and int(text) <= most):
        wrong = Violation(
            field=name, value=text[:80], message=f"must be a whole number from 0 to {most}", source="request"
        )
        raise InvalidSpecError([wrong], reason="QUERY_INVALID", remedy="correct the parameter, or leave it out")
    return int(text)


# The process of the reader. An archive may have gigabytes, and nothing that somebody looks at may slow down a run.
#
# Its first frame says where the store is; then each is a question, whose answer has the same number: a status of HTTP
# in three digits, and JSON. The end of its standard input is the end of its parent.
#
# Questions that wait for the store have threads of their own, so that what is answered from what was read before goes
# on while it hangs. A question that gets its turn too late is left out: nobody waits for it any more.

THREADS = 4
_ASKS_STORE = ("sample", "tokens", "lineage", "get-lineage")
_NICENESS = 10


def main() -> NoReturn:
    """Answer the questions on the standard input, several at once, until the parent is gone, then exit.

    The first frame says where the store is, and where indexes may be kept.
    """
    parent = ParentLink()
    os.nice(_NICENESS)
    order = parent.order
    reader = Reader(open_store(order["store_url"]), order["prefix"], Path(order["directory"]))
    secrets = secrets_of(os.environ)

    def answer(number: int, asked: dict[str, Any]) -> None:
        """Answer one question on the output, unless nobody waits for it any more."""
        if time.monotonic() > float(asked.get("ends", math.inf)):
            return
        status, body = _answer(reader, asked, secrets)
        parent.send(numbered(number, str(status).encode() + body))

    pools = [ThreadPoolExecutor(THREADS, thread_name_prefix=name) for name in ("question", "question of the store")]
    while (found := parent.receive(most=MAX_QUESTION_BYTES)) is not None:
        number, question = split_number(found)
        asked = _decoded(question)
        pools[asked.get("question") in _ASKS_STORE].submit(answer, number, asked)
    os._exit(0)  # nobody reads the answers that are still being made


def _decoded(data: bytes) -> dict[str, Any]:
    """Return the question in a frame; an empty one, which is answered with an error, if it cannot be decoded."""
    try:
        return decode_object(data, what="a question", reason="QUESTION_UNREADABLE")
    except CorruptObjectError:
        return {}


def _answer(reader: Reader, asked: dict[str, Any], secrets: tuple[str, ...]) -> tuple[int, bytes]:
    """Return HTTP status and JSON body of the answer to a question; an error is an answer, too.

    `secrets` are masked.
    """
    try:
        found = reader.ask(str(asked["question"]), str(asked["uid"]), dict(asked["params"]))
        return 200, to_json(found, secrets=secrets)
    except Exception as error:  # noqa: BLE001 - the edge of a question: the page shows what is wrong, the others go on
        status, problem = problem_of(error)
        return status, json.dumps(problem).encode()


if __name__ == "__main__":
    main()
