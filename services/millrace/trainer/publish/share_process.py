"""A rank's share of the versions, written by a separate process, which does not compete for the interpreter's lock.

    trainer                                         this module, which has no torch
    snapshot in shared memory ─── open file ──────▶ maps it, read only
    begin, encode, upload, advance, one by one ───▶ does it with the same `LocalShareWriter` that a thread has
         ◀── digests and sizes, encodings ─────────

Only small data goes over the channel: names, places and digests. The agreement of ranks, the manifest and the log stay
in the trainer, so that only the trainer that holds the run commits a version.

The process may die at any moment. The pending request then raises UnavailableError (PUBLISHER_DIED), and the next one
starts a new process, which first gets the last committed version to compare with. Bases of skip deltas are lost: until
the next multiple, readers use the deltas from version to version. Buffers are not overwritten while a process may read
them: one that is given up has ended before the error is raised.
"""

import logging
import os
import threading
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from millrace.errors import InternalError, InvalidStateError, MillraceError, UnavailableError
from millrace.policies.publish import TensorPart
from millrace.policies.share import Digests, EncodedDelta, EncodedShare, LocalShareWriter
from millrace.policies.tensors import bits_type
from millrace.processes import channel
from millrace.processes.channel import HelperDiedError, HelperProcess, Message
from millrace.processes.lifeline import run_service
from millrace.processes.shared_memory import SharedMemory, map_read_only
from millrace.rpc.status import from_text, to_text
from millrace.storage import open_store
from millrace.telemetry import waits
from millrace.telemetry.logging import FILE_VARIABLE, setup
from millrace.telemetry.settings import Settings

logger = logging.getLogger(__name__)


# The publishing process: `python -m millrace.trainer.publish.share_process FD PARENT`, started by `ShareWriterProcess`.
#
# It maps its trainer's snapshots, and compares, encodes and uploads their parts as requested, until the trainer is
# gone. The store is that of MILLRACE_STORE_URL, with the credentials of the environment.


class ShareServer:
    """Handles the trainer's requests, one after the other."""

    def __init__(self, store_url: str) -> None:
        self._store_url = store_url
        self._writer: LocalShareWriter | None = None
        self._run = ""
        self._memory: dict[int, memoryview] = {}
        """The mapped memory, by the trainer's numbers."""

    def answer(self, question: Message, files: list[int]) -> Message:
        """Map new memory, unmap what is not kept, do the trainer's request, and return its result or its error.

        `files` are the descriptors of the new memory, in the order of the request's `new`.
        """
        kept = set(question["kept"])
        for (number, size_bytes), file in zip(question["new"], files, strict=True):
            self._memory[number] = map_read_only(file, size_bytes)
        # A view that is dropped unmaps its memory.
        self._memory = {number: memory for number, memory in self._memory.items() if number in kept}
        try:
            with waits.of_run(question.get("run", self._run)):
                return self._do(question)
        except MillraceError as error:
            failure = error
        except Exception as error:  # the process edge: the trainer raises it
            logger.exception("publishing failed with an unexpected error")
            failure = InternalError(f"publishing failed: {type(error).__name__}: {error}")
        return {"error": to_text(failure)}

    def _do(self, question: Message) -> Message:
        """Do a request of the trainer, and return its result as plain data."""
        version = question["version"]
        if question["do"] == "begin":
            store = open_store(self._store_url)
            self._run = question["run"]
            self._writer = LocalShareWriter(store, skip_deltas=question["skip_deltas"], threads=question["threads"])
            return {}
        assert self._writer is not None, "it begins with `begin`"
        parts = [self._part(*each) for each in question["parts"]]
        match question["do"]:
            case "digests":
                digests = self._writer.digests(parts, version)
                return {"digests": [format(digests[part.name], "x") for part in parts]}
            case "encode":
                encoded = self._writer.encode(parts, version)
                deltas = [
                    {"base": delta.base, "num_changed": delta.num_changed, "size_bytes": delta.size_bytes}
                    for delta in encoded.deltas
                ]
                return {"digests": [format(encoded.digests[part.name], "x") for part in parts], "deltas": deltas}
            case "upload":
                prefix, is_anchor, bases = question["prefix"], question["is_anchor"], question["bases"]
                encodings = self._writer.upload(prefix, parts, version, is_anchor=is_anchor, bases=bases)
                return {"encodings": encodings}
            case "advance":
                named = zip((part.name for part in parts), question["digests"], strict=True)
                digests = {name: int(digest, 16) for name, digest in named}
                self._writer.advance(parts, version, digest=question["digest"], digests=digests)
                return {}
            case other:
                raise InternalError(f"the process that publishes knows no {other!r}")

    def _part(
        self, name: str, dtype: str, shape: list[int], start: int, count: int, memory: int, offset: int
    ) -> TensorPart:
        """Return the part of a tensor whose `count` elements begin at byte `offset` of memory number `memory`.

        `start` is the index of its first element in the tensor.
        """
        kind = bits_type(dtype)
        bits: Any = np.empty(0, kind)
        if count:
            bits = np.frombuffer(self._memory[memory], kind, count, offset)
        return TensorPart(name=name, dtype=dtype, shape=tuple(shape), start=start, bits=bits)


def beat() -> Message:
    """Return a heartbeat, whose `waits` has this process's longest wait: reason, component waited for, and deadline.

    The deadline is the age in seconds at which the wait is overdue. The list is empty if the process waits for nothing.
    """
    return {"waits": [[wait.reason[:500], wait.waits_on, wait.deadline_s] for wait in waits.snapshot("")[:1]]}


def _serve() -> NoReturn:
    """Set up logging, and serve the requests of the trainer that started this process until it is gone."""
    settings = Settings.from_env(os.environ, required=["store_url"])
    environ = {
        name: text for name, text in os.environ.items() if name != FILE_VARIABLE
    }  # the trainer rotates that file
    setup("trainer", level=settings.log_level, json_lines=settings.log_json, environ=environ)
    server = ShareServer(settings.require("store_url"))
    channel.serve(server.answer, beat=beat)


def main() -> NoReturn:
    """Serve the trainer's requests until the trainer is gone."""
    run_service(_serve)


MODULE = "millrace.trainer.publish.share_process"
STORE = "MILLRACE_STORE_URL"
PUBLISHER_DIED = "PUBLISHER_DIED"
"""Reason of the error that the publishing process ended during a request."""
SILENT_S = 60.0
"""Longest silence during a request: the process sends a heartbeat every two seconds, also while the store hangs."""
_STARTS_WITHIN_S = 300.0  # for its imports: half a second, but minutes on an overloaded machine
QUIET_S = 1.0
"""A request that takes longer is reported as a wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Committed:
    parts: Sequence[TensorPart]
    version: int
    digest: str
    digests: Digests


class ShareWriterProcess:
    """A `ShareWriter` for parts in shared memory. Starts its process at the first request."""

    def __init__(
        self, store_url: str, *, skip_deltas: Sequence[int], threads: int, run: str = "", rank: int | None = None
    ) -> None:
        """Prepare a writer whose process opens `store_url` with `threads` threads; start no process yet.

        `skip_deltas` are the numbers of versions that skip deltas go over. `run` is the uid in log lines, and `rank`
        this trainer's for messages if it is one of several.
        """
        self._store_url = store_url
        self._options = {"skip_deltas": list(skip_deltas), "threads": threads, "run": run}
        self._name = "the process that publishes" + ("" if rank is None else f" at rank {rank}")
        self._helper: HelperProcess | None = None
        self._mapped: weakref.WeakKeyDictionary[SharedMemory, int] = weakref.WeakKeyDictionary()
        """The memory that the process has mapped, with its size there.

        It stays mapped as long as this process has it.
        """
        self._last: _Committed | None = None
        self._asking = threading.Lock()
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """Return the pid of the current process; None if there is none."""
        return None if self._helper is None else self._helper.pid

    def digests(self, parts: Sequence[TensorPart], version: int) -> Digests:
        """Return the digests of this rank's parts of a version, computed by the process."""
        return _digests(parts, self._ask("digests", parts, version))

    def encode(self, parts: Sequence[TensorPart], version: int) -> EncodedShare:
        """Have the process encode this rank's parts of a version as deltas; return digests and the deltas' sizes."""
        answer = self._ask("encode", parts, version)
        deltas = tuple(EncodedDelta(**each) for each in answer["deltas"])
        return EncodedShare(digests=_digests(parts, answer), deltas=deltas)

    def upload(
        self, prefix: str, parts: Sequence[TensorPart], version: int, *, is_anchor: bool, bases: Collection[int]
    ) -> dict[str, Any]:
        """Have the process upload this rank's parts of a version under keys that begin with `prefix`.

        Return the encodings. They are uploaded in full if `is_anchor`, and as deltas against the versions `bases`.
        """
        answer = self._ask("upload", parts, version, prefix=prefix, is_anchor=is_anchor, bases=list(bases))
        return answer["encodings"]

    def advance(self, parts: Sequence[TensorPart], version: int, *, digest: str, digests: Digests) -> None:
        """Record `parts` as committed, so that the process compares the next version with them.

        `digest` is the whole version's, and `digests` are those of the parts. If the process dies, that is only logged:
        the next one gets the parts when it starts.
        """
        committed = _Committed(parts=parts, version=version, digest=digest, digests=digests)
        is_new, self._last = self._helper is None, committed
        if is_new:  # a process gets them when it starts
            return
        try:
            self._send(committed)
        except UnavailableError as death:
            if death.reason != PUBLISHER_DIED:
                raise
            logger.warning(death.message, extra={"version": version})

    def holds(self, parts: Sequence[TensorPart]) -> bool:
        """Return whether these are the parts of the last `advance`, whose memory the process may read."""
        return self._last is not None and bool(parts) and self._last.parts[0] is parts[0]

    def close(self) -> None:
        """End the process, for good; a pending request raises InvalidStateError. May be called from any thread."""
        self._is_closed = True
        if (helper := self._helper) is not None:
            # This makes a pending request raise, which releases the lock; the channel may be closed only then.
            helper.end()
            with self._asking:  # until a pending request has raised
                helper.close()

    def _ask(self, what: str, parts: Sequence[TensorPart], version: int, **more: Any) -> dict[str, Any]:
        """Start the process if there is none, send it the request `what` about a version, and return its answer.

        `more` are the request's further fields.
        """
        if self._helper is None:
            self._start()
        return self._question(what, parts, version, **more)

    def _start(self) -> None:
        """Start the process, and give it what it has to compare the next version with.

        Raises UnavailableError if it cannot be started or dies, and InvalidStateError after `close`.
        """
        if self._is_closed:
            raise _abandoned()
        try:
            self._helper = HelperProcess.start(MODULE, env={**os.environ, STORE: self._store_url})
        except OSError as error:
            # Counts as a death, so that the version is tried again a few times.
            raise UnavailableError(
                f"{self._name} cannot be started: {error.strerror}",
                reason=PUBLISHER_DIED,
                remedy="give the trainer's machine more memory or processes",
            ) from error
        # `close` may have run meanwhile, without seeing this process.
        if self._is_closed:  # meanwhile
            self._helper.end()
        # The new process has mapped nothing yet.
        self._mapped.clear()
        logger.info("a process of its own publishes", extra={"pid": self.pid})
        try:
            self._question("begin", [], 0, silent_s=_STARTS_WITHIN_S, **self._options)
            if self._last is not None:
                self._send(self._last)
        except MillraceError:
            self._drop()
            raise

    def _drop(self) -> None:
        """End the current process, if any, so that the next request starts another one."""
        helper, self._helper = self._helper, None
        if helper is not None:
            helper.close()

    def _send(self, committed: _Committed) -> None:
        """Send the process the parts of the last committed version, with which the next one is compared."""
        digests = [format(committed.digests[part.name], "x") for part in committed.parts]
        self._question("advance", committed.parts, committed.version, digest=committed.digest, digests=digests)

    def _question(
        self, what: str, parts: Sequence[TensorPart], version: int, *, silent_s: float | None = None, **more: Any
    ) -> dict[str, Any]:
        """Send the current process a request with its new shared memory, and return its answer.

        `silent_s` is how long it may send no heartbeat; None is 60 s. Raises the error in the answer; UnavailableError
        (PUBLISHER_DIED) if the process ends, after dropping it; and InvalidStateError if `close` ended it.
        """
        assert self._helper is not None
        silent_s = SILENT_S if silent_s is None else silent_s
        # Also the memory of the last committed version, with which the process compares the next one.
        memories = _memories([*parts, *(self._last.parts if self._last is not None else ())])
        news = [memory for memory in memories if self._mapped.get(memory) != memory.size_bytes]
        self._mapped |= {memory: memory.size_bytes for memory in memories}
        question = {
            "do": what,
            "version": version,
            "parts": [_describe(part) for part in parts],
            # Memory that this process has dropped is no key any more, and is unmapped there.
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
"""The reason of the wait for each request."""
_HAD = {
    "begin": "to start",
    "digests": "to digest policy {version}",
    "encode": "to compare and encode policy {version}",
    "upload": "to upload policy {version}",
    "advance": "to take note of policy {version}",
}


def _abandoned() -> InvalidStateError:
    """Make the error that nothing is published any more, because the trainer ends."""
    return InvalidStateError(
        "no policy is published any more: the trainer lets go",
        reason="POLICY_ABANDONED",
        remedy="the trainer that continues the run publishes it",
    )


def _memories(parts: Sequence[TensorPart]) -> list[SharedMemory]:
    """Return the shared memories of the parts, each once; raise InternalError for a part that is not in one."""
    found: dict[int, SharedMemory] = {}
    for part in parts:
        if part.place is None:
            raise InternalError(f"the snapshot of tensor {part.name} is not in shared memory")
        found[part.place.memory.number] = part.place.memory
    return list(found.values())


def _describe(part: TensorPart) -> list[Any]:
    """Return name, format, shape, range and place in shared memory of a part, as plain data."""
    assert part.place is not None
    return [part.name, part.dtype, part.shape, part.start, part.count, part.place.memory.number, part.place.offset]


def _digests(parts: Sequence[TensorPart], answer: Mapping[str, Any]) -> Digests:
    """Return the digests in an answer, by name of the part."""
    return {part.name: int(digest, 16) for part, digest in zip(parts, answer["digests"], strict=True)}


def waited_for(reason: str, beat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the registered wait for the process, with what the process itself waits for.

    `reason` is the wait's own, and `beat` the process's last heartbeat, which may have no wait.
    """
    if not beat["waits"]:
        return {"reason": reason, "waits_on": "", "deadline_s": 0.0}
    inner, waits_on, deadline_s = beat["waits"][0]
    return {"reason": f"{reason}: {inner}", "waits_on": waits_on, "deadline_s": deadline_s}


if __name__ == "__main__":
    main()
