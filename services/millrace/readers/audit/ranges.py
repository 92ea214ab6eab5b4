"""The contents of steps, which an audit spends its time on: read at once, or in ranges by processes of their own.

    the walk over the headers (`headers.py`) ──StepContents──▶ ContentsHere                   one after the other
                                             └───────────────▶ ContentsInRanges ──question──▶ helper (`process.py`)
                                                                                ◀──answer──── what it found

The walk stays one: it joins the ranges, because every header proves the one before it. A question holds everything that
its answer depends on but immutable objects, and so its sha256 names the answer: what an audit that was killed had
answered is taken from a file (`AuditRanges.resume`). That file is the auditor's own. Nothing is written into the run.
"""

import base64
import hashlib
import json
import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from millrace.decoding import decode_object
from millrace.errors import CorruptObjectError, InternalError, MillraceError, UnavailableError
from millrace.internal.v1 import batch_pb2
from millrace.processes.channel import HelperDiedError, HelperProcess
from millrace.readers.audit.findings import Audit, AuditFindings, RetirementCheck
from millrace.readers.audit.rollouts import ContentCheck, RolloutFact, StepContents
from millrace.readers.dashboard.answers import error_of
from millrace.rollouts.batch_wire import decode_header
from millrace.storage.scratch import io_errors
from millrace.telemetry import waits

MODULE = "millrace.readers.audit.process"
RANGE_SAMPLES = 4096
"""A range ends with the step that reaches so many samples, if not before (`AuditRanges.range_steps`)."""
SILENT_S = 60.0
_TRIES = 2  # processes that may die over one range
_LOOK_S = 0.5
_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRanges:
    """How the contents of steps are read."""

    store_url: str
    """The audited store, for other processes."""
    jobs: int = 1
    """Processes at most; 1 reads everything in the process of the audit."""
    resume: Path | None = None
    """File that keeps what was read: a killed audit goes on from there, and a complete one removes it."""
    range_steps: int = 16
    """Most steps of a range."""
    least_steps: int = 64
    """Steps for each process at least: a process takes as much CPU to start as to read some dozens of them."""

    def jobs_for(self, num_steps: int) -> int:
        """Return how many processes are worth their start for a run of so many steps, at least 1."""
        return max(1, min(self.jobs, num_steps // self.least_steps))


@dataclass(slots=True)
class ContentCounts:
    """What was read so far."""

    chunks: int = 0
    """Chunks that have the sha256 that their header names."""
    rollouts: int = 0
    duplicates: int = 0


class Contents(Protocol):
    """Takes the steps of a run in order, and reports what is wrong with their contents."""

    counts: ContentCounts

    def begin(self, num_steps: int) -> None:
        """Prepare for a run of so many steps; called before the first `add`."""
        ...

    def add(self, step: StepContents) -> None:
        """Check the contents of the next step, now or later."""
        ...

    def finish(self) -> None:
        """Wait until every step that was added is checked, report what is wrong, and set `counts`."""
        ...


class ContentsHere:
    """Reads each step when it is added."""

    def __init__(self, audit: Audit, retired: RetirementCheck) -> None:
        """Make a reader of the contents of steps; an object that is missing must be covered by `retired`."""
        self.counts = ContentCounts()
        self._retired, self._audit = retired, audit
        self._check = ContentCheck(audit, on_missing=self._missing)

    def begin(self, num_steps: int) -> None:
        """Do nothing: every step is read by this process."""

    def add(self, step: StepContents) -> None:
        """Read the contents of a step, and report what is wrong with them."""
        self._check.check(step)

    def finish(self) -> None:
        """Set `counts` to what was read."""
        check = self._check
        self.counts = ContentCounts(check.num_chunks, check.num_rollouts, check.num_duplicates)

    def _missing(self, key: str, check: str, message: str) -> None:
        """Report an object that does not exist, unless it was retired; `key` is whole."""
        if not self._retired.covers(key):
            self._audit.findings.violation(check, message)


class ContentsInRanges:
    """Has ranges of steps read by other processes, or by this one where there is one job only.

    Use it as a context manager: its processes end with the block.
    """

    def __init__(self, audit: Audit, retired: RetirementCheck, plan: AuditRanges) -> None:
        """Make a reader of the contents of steps; an object that is missing must be covered by `retired`.

        `plan` says how many processes read, and in which file their answers are kept. The file of an earlier audit is
        read, if the plan names one; UnavailableError if it cannot be opened.
        """
        self.counts = ContentCounts()
        self._audit, self._retired, self._plan, self._jobs = audit, retired, plan, 1
        self._place = {"store_url": plan.store_url, "prefix": audit.names.prefix, "uid": audit.names.uid}
        self._kept = None if plan.resume is None else KeptAnswers(plan.resume, self._place)
        self._steps: list[dict[str, Any]] = []
        self._headers: list[batch_pb2.BatchHeader] = []
        self._num_samples = 0
        self._pending: deque[tuple[Future[dict[str, Any]], list[batch_pb2.BatchHeader]]] = deque()
        self._pool: ThreadPoolExecutor | None = None
        self._idle: list[HelperProcess] = []
        self._helpers: set[HelperProcess] = set()
        self._lock = threading.Lock()
        self._is_closed = False

    def __enter__(self) -> "ContentsInRanges":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """End the helper processes, give up the ranges that are still being read, and close the file of answers."""
        with self._lock:
            self._is_closed = True
            helpers = list(self._helpers)
        # In this order: a thread that waits for an answer returns when its helper is dead, and only then may the
        # channel be closed under it.
        for helper in helpers:
            helper.end()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        for helper in helpers:
            helper.close()
        if self._kept is not None:
            self._kept.close()

    def begin(self, num_steps: int) -> None:
        """Decide by the number of steps how many processes read; they are started with the first ranges."""
        self._jobs = self._plan.jobs_for(num_steps)
        self._pool = ThreadPoolExecutor(self._jobs, thread_name_prefix="audit-ranges")

    def add(self, step: StepContents) -> None:
        """Add the next step, and have its range read once that is large enough.

        Blocks while as many ranges as two for each process are being read.
        """
        self._steps.append(_to_json(step))
        self._headers.append(step.header)
        self._num_samples += len(step.header.samples)
        if len(self._steps) == self._plan.range_steps or self._num_samples >= RANGE_SAMPLES:
            self._submit()

    def finish(self) -> None:
        """Wait until all ranges are read, and report what was found in them."""
        if self._steps:
            self._submit()
        while self._pending:
            self._take()
        if self._kept is not None and self._kept.num_taken:
            self._audit.findings.note("RESUMED", self._kept.describe())

    def _submit(self) -> None:
        """Have the steps that were added since the last range read as a range; wait while too many are being read."""
        question = {"do": "steps", "place": self._place, "steps": self._steps}
        assert self._pool is not None  # `begin` made it
        self._pending.append((self._pool.submit(self._answer, question), self._headers))
        self._steps, self._headers, self._num_samples = [], [], 0
        # Bounded: every range that is being read keeps its headers in memory.
        while len(self._pending) > 2 * self._jobs:
            self._take()

    def _take(self) -> None:
        """Wait until the oldest range is read, report what was found in it, and count what was read."""
        answered, headers = self._pending.popleft()
        self._audit.progress(f"the contents of step {headers[0].step}")
        # Not `result(_LOOK_S)`, whose TimeoutError could also be one that the range has ended with.
        while not wait_for([answered], _LOOK_S).done:
            self._audit.progress(f"the contents of step {headers[0].step}")
        answer = answered.result()
        for header in headers:  # the other process noted these keys for itself
            for key in (*(chunk.key for chunk in header.chunks), header.rollouts_key):
                _ = key and self._audit.is_own(key)
        for key, check, message in answer["found"]:
            if not key or not self._retired.covers(key):
                self._audit.findings.violation(check, message)
        self.counts.chunks += answer["chunks"]
        self.counts.rollouts += answer["rollouts"]
        self.counts.duplicates += answer["duplicates"]

    def _answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a question: the one that an earlier audit has kept, or a new one, which is kept."""
        if self._kept is None:
            return self._ask(question)
        sha256 = hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()
        if (kept := self._kept.find(sha256)) is not None:
            return kept
        answer = self._ask(question)
        if not answer["found"]:  # a damaged range is read again: it may have been repaired
            self._kept.add(sha256, answer)
        return answer

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Read the range in a question here or by a helper process, and return the answer.

        UnavailableError if `_TRIES` processes died over it, or an error of the store.
        """
        if self._jobs == 1:
            return answer_steps(self._audit, question)
        died: HelperDiedError | None = None
        for _ in range(_TRIES):
            helper = self._helper()
            try:
                with waits.waiting("an audit: the contents of a range of steps", waits_on="object store"):
                    answer = helper.ask(question, silent_s=SILENT_S)
            except HelperDiedError as error:
                died = error
                self._drop(helper)
                continue
            with self._lock:
                self._idle.append(helper)
            return require_answer(answer)
        raise died_twice(died)

    def _helper(self) -> HelperProcess:
        """Return a helper process that has nothing to do, started if there is none.

        InternalError once the block has ended.
        """
        with self._lock:
            if self._is_closed:
                raise InternalError("the audit has ended", reason="AUDIT_ENDED")
            if self._idle:
                return self._idle.pop()
            helper = start_helper()
            self._helpers.add(helper)
            return helper

    def _drop(self, helper: HelperProcess) -> None:
        """Forget a helper process that died, and close its channel."""
        with self._lock:
            self._helpers.discard(helper)
            if not self._is_closed:  # else the end of the block closes it
                helper.close()


class KeptAnswers:
    """The file of an audit that can be resumed: one answer a line, by the sha256 of its question."""

    def __init__(self, path: Path, place: Mapping[str, str]) -> None:
        """Open the file at `path`, and read the answers that an earlier audit of the same run left in it.

        `place` says which run is audited; a file of another run's audit is overwritten. UnavailableError if the file
        cannot be opened, or is no file of an audit.
        """
        self._path, self._lock = path, threading.Lock()
        self._answers: dict[str, dict[str, Any]] = {}
        self.num_taken = 0
        """Ranges that were not read again."""
        self._since = ""
        head = {"format": _FORMAT, "place": dict(place)}
        try:
            before = path.read_bytes() if path.exists() else b""
            if before and not _is_kept(before, path):
                raise UnavailableError(
                    f"{path} is no file of an audit's answers, and is left as it is",
                    reason="AUDIT_FILE",
                    remedy="name another file with --resume",
                )
            is_ours = bool(before) and self._read(before, head)
            # Unbuffered, so that a line that cannot be written is not tried again when the file is closed.
            self._file = path.open("ab" if is_ours else "wb", buffering=0)
            path.chmod(0o600)
            if not is_ours:
                self._write({**head, "time": datetime.now(UTC).isoformat(timespec="seconds")})
        except OSError as error:
            raise UnavailableError(
                f"{path}, which is to keep what the audit has read, cannot be opened: {error.strerror}",
                reason="AUDIT_FILE",
                remedy="name another file with --resume",
            ) from error

    def find(self, sha256: str) -> dict[str, Any] | None:
        """Return the answer to a question by the question's sha256 (hex), and count it as taken.

        None if there is none.
        """
        found = self._answers.get(sha256)
        with self._lock:
            self.num_taken += found is not None
        return found

    def add(self, sha256: str, answer: Mapping[str, Any]) -> None:
        """Write an answer into the file, by the sha256 (hex) of its question; raise the errors of `io_errors`."""
        with io_errors(self._path, "write", setting=None):
            self._write({"question": sha256, "answer": answer})

    def describe(self) -> str:
        """Return in words what was taken from an earlier audit."""
        return (
            f"the contents of {self.num_taken} ranges of steps were read by an audit that began at {self._since} and "
            "was interrupted: what was changed in them since was not seen"
        )

    def close(self) -> None:
        """Close the file, which stays until the audit is complete."""
        with self._lock:
            self._file.close()

    def _read(self, data: bytes, head: Mapping[str, Any]) -> bool:
        """Keep the answers in a file's bytes.

        Return False, and keep none, if it is not of the run that `head` describes.
        """
        for number, line in enumerate(data.splitlines()):
            try:
                found = decode_object(line, what=str(self._path), reason="AUDIT_FILE_CORRUPT")
            except CorruptObjectError:
                continue  # the audit was killed while it wrote this line
            if number == 0:
                if {name: found.get(name) for name in head} != head:
                    return False
                self._since = str(found.get("time", ""))
            elif (answer := as_answer(found.get("answer"))) is not None:
                self._answers[str(found.get("question"))] = answer
        return bool(self._since)

    def _write(self, line: Mapping[str, Any]) -> None:
        """Append a line of JSON to the file; do nothing once it is closed."""
        with self._lock:
            if not self._file.closed:
                # A line break first: the line before may be the torn one of an audit that was killed.
                text = json.dumps(line) + "\n" if self._file.tell() == 0 else f"\n{json.dumps(line)}"
                left = text.encode()
                while left:  # a disk that is nearly full takes a part
                    left = left[self._file.write(left) :]


def _is_kept(data: bytes, path: Path) -> bool:
    """Return whether a file's bytes begin like the file of an audit, of whatever run."""
    try:
        found = decode_object(data.partition(b"\n")[0], what=str(path), reason="AUDIT_FILE_CORRUPT")
    except CorruptObjectError:
        return False
    return "format" in found and "place" in found


# Questions and answers.


class _FoundInRange(AuditFindings):
    """The violations of a range in order, all of them: who asked limits what is written out."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str, str]] = []

    def violation(self, check: str, message: str) -> None:
        """Add a violation of a range, however many there are; `check` is its UPPER_SNAKE name."""
        self.found.append(("", check, message))


def answer_steps(audit: Audit, question: Mapping[str, Any]) -> dict[str, Any]:
    """Read the contents of the steps in a question, and return what was found.

    That is key, check and message of each violation (the key only of an object that does not exist and may have been
    retired), and how much was read. `audit` has the store and the names of the run; nothing is added to it.
    """
    findings = _FoundInRange()
    own = Audit(store=audit.store, names=audit.names, report=audit.report, findings=findings)
    check = ContentCheck(own, on_missing=lambda *missing: findings.found.append(missing))
    for step in question["steps"]:
        check.check(_of_json(step))
    counts = {"chunks": check.num_chunks, "rollouts": check.num_rollouts, "duplicates": check.num_duplicates}
    return {"found": findings.found, **counts}


def as_answer(document: Any) -> dict[str, Any] | None:
    """Return a JSON document if it has the form of an answer of `answer_steps`; else None."""
    if not isinstance(document, dict):
        return None
    counts = [document.get(name) for name in ("chunks", "rollouts", "duplicates")]
    found = document.get("found")
    is_whole = isinstance(found, list) and all(map(_is_finding, found))
    return document if is_whole and all(type(each) is int for each in counts) else None


def require_answer(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer of a helper process; raise the error that it holds, if it holds one."""
    if "error" in answer:
        raise error_of(int(answer["status"]), dict(answer))
    return dict(answer)


def start_helper() -> HelperProcess:
    """Start a process that answers questions of audits; raise UnavailableError if that is not possible."""
    try:
        return HelperProcess.start(MODULE, env=os.environ)
    except OSError as error:
        raise UnavailableError(
            f"a process that audits cannot be started: {error.strerror}",
            reason="AUDIT_NOT_STARTED",
            remedy="give this machine more memory or processes, or take fewer of them (--jobs)",
        ) from error


def died_twice(error: HelperDiedError | None) -> MillraceError:
    """Make (not raise) the error of an audit whose process died again and again; `error` says how it died last."""
    return UnavailableError(
        f"the process that audits died {_TRIES} times over the same steps: {error}",
        reason="AUDIT_DIED",
        remedy="if it is killed for memory, audit with fewer processes (--jobs) or on a larger machine",
    )


def _is_finding(each: object) -> bool:
    """Return whether a value is three texts in a list: key, check and message."""
    return isinstance(each, list) and len(each) == 3 and all(isinstance(text, str) for text in each)


def _to_json(step: StepContents) -> dict[str, Any]:
    """Return a step as JSON, from which `_of_json` makes an equal one."""
    resolved = {item.ordinal for item in step.header.resolutions}
    return {
        "header": base64.b64encode(step.header.SerializeToString(deterministic=True)).decode(),
        # What a sound header resolves it also trains or drops itself: only the difference is sent.
        "not_trained": sorted(_claimed(step.header) - step.trained) if resolved else [],
        "scored_whole": sorted(step.scored_whole),
        "in_redis": [
            [ordinal, member, [asdict(fact) for fact in facts]]
            for (ordinal, member), facts in sorted(step.in_redis.items())
        ],
    }


def _of_json(step: Mapping[str, Any]) -> StepContents:
    """Return the step in JSON of `_to_json`."""
    header = decode_header(base64.b64decode(step["header"]))
    in_redis: dict[tuple[int, int], Sequence[RolloutFact]] = {
        (ordinal, member): [RolloutFact(**fact) for fact in facts] for ordinal, member, facts in step["in_redis"]
    }
    return StepContents(
        header=header,
        trained=_claimed(header) - set(step["not_trained"]),
        scored_whole=frozenset(step["scored_whole"]),
        in_redis=in_redis,
    )


def _claimed(header: batch_pb2.BatchHeader) -> set[int]:
    """Return the ordinals that a header says it trains."""
    return {item.ordinal for item in header.resolutions if item.outcome == batch_pb2.ORDINAL_OUTCOME_TRAINED}
