"""A rank's share of the versions, written by a process of its own: it takes no interpreter's lock from the step.

    trainer                                         share_main, which has no torch
    snapshot in shared memory ─── open file ──────▶ maps it, read only
    begin, encode, upload, advance, one by one ───▶ does it with the same `LocalShareWriter` that a thread has
         ◀── digests and sizes, encodings ─────────

Only what is small goes over the channel: names, places and digests. What ranks agree on, the manifest and the log stay
in the trainer, so that a version is committed by the trainer that holds the run, and by nobody else.

The process may die at any moment. Who asks then gets UnavailableError (PUBLISHER_DIED), and the next question goes to a
new process, which gets the list of committed objects. What is lost are the bases of skip deltas: until
the next multiple, readers go by the deltas from version to version. Nothing is written over that a process may still
read: one that is given up has ended before the error is raised.
"""

import logging
import os
import threading
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millrace.errors import InternalError, InvalidStateError, MillraceError, UnavailableError
from millrace.policies.publish import TensorPart
from millrace.policies.share import Digests, EncodedDelta, EncodedShare
from millrace.processes.channel import HelperDiedError, HelperProcess
from millrace.processes.shared_memory import SharedMemory
from millrace.rpc.status import from_text
from millrace.telemetry import waits

logger = logging.getLogger(__name__)

MODULE = "millrace.trainer.publish.share_main"
STORE = "MILLRACE_STORE_URL"
PUBLISHER_DIED = "PUBLISHER_DIED"
"""Reason of the error that says that the process that publishes ended under a question."""
SILENT_S = 60.0
"""Longest silence under a question: it beats every two seconds, whatever the store does."""
_STARTS_WITHIN_S = 300.0  # its imports: half a second, on a machine that stands still minutes
QUIET_S = 1.0
"""A question that takes longer shows itself as a wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Committed:
    parts: Sequence[TensorPart]
    version: int
    digest: str
    digests: Digests


class ShareWriterProcess:
    """A `ShareWriter`, for parts that are in shared memory. Starts its process with the first question."""

    def __init__(
        self, store_url: str, *, skip_deltas: Sequence[int], threads: int, run: str = "", rank: int | None = None
    ) -> None:
        """Take `run`, the uid in log lines, and `rank`, this trainer's for messages if it is one of several."""
        self._store_url = store_url
        self._options = {"skip_deltas": list(skip_deltas), "threads": threads, "run": run}
        self._name = "the process that publishes" + ("" if rank is None else f" at rank {rank}")
        self._helper: HelperProcess | None = None
        self._mapped: weakref.WeakKeyDictionary[SharedMemory, int] = weakref.WeakKeyDictionary()
        """What the process has mapped, with its size there: it keeps that as long as this one does."""
        self._last: _Committed | None = None
        self._asking = threading.Lock()
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """Return the pid of the current process; None if there is none."""
        return None if self._helper is None else self._helper.pid

    def digests(self, parts: Sequence[TensorPart], version: int) -> Digests:
        """See `ShareWriter`."""
        return _digests(parts, self._ask("digests", parts, version))

    def encode(self, parts: Sequence[TensorPart], version: int) -> EncodedShare:
        """See `ShareWriter`."""
        answer = self._ask("encode", parts, version)
        deltas = tuple(EncodedDelta(**each) for each in answer["deltas"])
        return EncodedShare(digests=_digests(parts, answer), deltas=deltas)

    def upload(
        self, prefix: str, parts: Sequence[TensorPart], version: int, *, is_anchor: bool, bases: Collection[int]
    ) -> dict[str, Any]:
        """See `ShareWriter`."""
        answer = self._ask("upload", parts, version, prefix=prefix, is_anchor=is_anchor, bases=list(bases))
        return answer["encodings"]

    def advance(self, parts: Sequence[TensorPart], version: int, *, digest: str, digests: Digests) -> None:
        """See `ShareWriter`. The next request reports a process that dies now."""
        committed = _Committed(parts=parts, version=version, digest=digest, digests=digests)
        is_new, self._last = self._helper is None, committed
        if is_new:  # it will get them when it starts
            return
        try:
            self._tell(committed)
        except UnavailableError as death:
            if death.reason != PUBLISHER_DIED:
                raise
            logger.warning(death.message, extra={"version": version})

    def holds(self, parts: Sequence[TensorPart]) -> bool:
        """See `ShareWriter`."""
        return self._last is not None and bool(parts) and self._last.parts[0] is parts[0]

    def close(self) -> None:
        """End the process; who waits for an answer hears that it died. May be called from any thread."""
        self._is_closed = True
        if (helper := self._helper) is not None:
            helper.end()
            with self._asking:  # who asks has heard it by now
                helper.close()

    def _ask(self, what: str, parts: Sequence[TensorPart], version: int, **more: Any) -> dict[str, Any]:
        """Ask the process, which is started if necessary, and return its answer."""
        if self._helper is None:
            self._start()
        return self._question(what, parts, version, **more)

    def _start(self) -> None:
        if self._is_closed:
            raise _abandoned()
        try:
            self._helper = HelperProcess.start(MODULE, env={**os.environ, STORE: self._store_url})
        except OSError as error:
            raise UnavailableError(
                f"{self._name} cannot be started: {error.strerror}",
                reason=PUBLISHER_DIED,
                remedy="give the trainer's machine more memory or processes",
            ) from error
        if self._is_closed:  # meanwhile
            self._helper.end()
        self._mapped.clear()
        logger.info("a process of its own publishes", extra={"pid": self.pid})
        try:
            self._question("begin", [], 0, silent_s=_STARTS_WITHIN_S, **self._options)
            if self._last is not None:
                self._tell(self._last)
        except MillraceError:
            self._drop()
            raise

    def _drop(self) -> None:
        """Drop the current process."""
        helper, self._helper = self._helper, None
        if helper is not None:
            helper.close()

    def _tell(self, committed: _Committed) -> None:
        digests = [format(committed.digests[part.name], "x") for part in committed.parts]
        self._question("advance", committed.parts, committed.version, digest=committed.digest, digests=digests)

    def _question(
        self, what: str, parts: Sequence[TensorPart], version: int, *, silent_s: float | None = None, **more: Any
    ) -> dict[str, Any]:
        """Ask the process that is there. UnavailableError (PUBLISHER_DIED) if it ends first: it is none any more."""
        assert self._helper is not None
        silent_s = SILENT_S if silent_s is None else silent_s
        memories = _memories([*parts, *(self._last.parts if self._last is not None else ())])
        news = [memory for memory in memories if self._mapped.get(memory) != memory.size_bytes]
        self._mapped |= {memory: memory.size_bytes for memory in memories}
        question = {
            "do": what,
            "version": version,
            "parts": [_describe(part) for part in parts],
            "kept": [memory.number for memory in self._mapped],
            "new": [[memory.number, memory.size_bytes] for memory in news],
            **more,
        }
        reason = f"{_DOES[what].format(version=version)} by {self._name}"
        try:
            with self._asking, waits.waiting(reason, deadline_s=silent_s, quiet_s=QUIET_S) as wait:
                answer = self._helper.ask(
                    question,
                    [memory.fileno() for memory in news],
                    silent_s=silent_s,
                    on_beat=lambda beat: wait.update(**waited_for(reason, beat)),
                )
        except (HelperDiedError, OSError) as error:
            self._drop()
            if self._is_closed:
                raise _abandoned() from error
            raise UnavailableError(
                f"{self._name} died while it had {_HAD[what].format(version=version)}: {error}",
                reason=PUBLISHER_DIED,
                remedy="it is started again; if it is killed for memory, give the trainer's machine more, or set "
                "MILLRACE_TRAINER_PUBLISH=thread",
            ) from error
        if "error" in answer:
            raise from_text(answer["error"], what=f"an error of {self._name}", reason="PUBLISHER_MESSAGE_INVALID")
        return answer


_DOES = {
    "begin": "the start of publishing",
    "digests": "policy {version} to be digested",
    "encode": "policy {version} to be compared and encoded",
    "upload": "policy {version} to be uploaded",
    "advance": "policy {version} to be noted",
}
"""What is waited for with each question."""
_HAD = {
    "begin": "to start",
    "digests": "to digest policy {version}",
    "encode": "to compare and encode policy {version}",
    "upload": "to upload policy {version}",
    "advance": "to take note of policy {version}",
}


def _abandoned() -> InvalidStateError:
    return InvalidStateError(
        "no policy is published any more: the trainer lets go",
        reason="POLICY_ABANDONED",
        remedy="the trainer that continues the run publishes it",
    )


def _memories(parts: Sequence[TensorPart]) -> list[SharedMemory]:
    """Return the shared memories of the parts, each once."""
    found: dict[int, SharedMemory] = {}
    for part in parts:
        if part.place is None:
            raise InternalError(f"the snapshot of tensor {part.name} is not in shared memory")
        found[part.place.memory.number] = part.place.memory
    return list(found.values())


def _describe(part: TensorPart) -> list[Any]:
    assert part.place is not None
    return [part.name, part.dtype, part.shape, part.start, part.count, part.place.memory.number, part.place.offset]


def _digests(parts: Sequence[TensorPart], answer: Mapping[str, Any]) -> Digests:
    return {part.name: int(digest, 16) for part, digest in zip(parts, answer["digests"], strict=True)}


def waited_for(reason: str, beat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a wait on the process, by its heartbeat: working, or waiting itself, as for the store."""
    if not beat["waits"]:
        return {"reason": reason, "waits_on": "", "deadline_s": 0.0}
    inner, waits_on, deadline_s = beat["waits"][0]
    return {"reason": f"{reason}: {inner}", "waits_on": waits_on, "deadline_s": deadline_s}
