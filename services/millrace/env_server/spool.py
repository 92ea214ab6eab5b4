"""Finished rollouts on local disk, until they cannot be needed again.

A finished rollout may have cost minutes of GPU time. It is a file here before its append to the log is sent, and it
stays one until the run's resolved watermark passes its ordinal: so neither `kill -9` of this process nor a Redis that
lost its tail or everything costs a finished rollout. `sink` appends the files to the log, again to a rebuilt one.

    {MILLRACE_SPOOL_DIR}/.lock                                        one env-server per directory
    {MILLRACE_SPOOL_DIR}/{uid}/{ordinal}-{sha256}.rollouts            named by its first rollout
    {MILLRACE_SPOOL_DIR}/.dropped-{time}-{uid}/                       of a run that ended: being deleted
    {MILLRACE_SPOOL_DIR}/damaged/{uid}-{name}                         without its sha256: never appended

A file has the rollouts that finished while the one before it was written: with hundreds of short rollouts per second a
file for each costs more than everything else here, because Python's lock changes hands at every call to the kernel. A
file is deleted with the last of its rollouts; so a successor may find resolved ones, which are not counted again. A
file appears whole by a rename and is not fsynced: the kernel keeps what a killed process wrote, and a machine that
loses power loses at most the last half minute of files. Torn ones are found by their sha256, and lost rollouts are
played again. An fsync per file would cost every run milliseconds per rollout to save that.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import logging
import os
import re
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple, TypeVar

from millrace.backoff import Backoff
from millrace.errors import CapacityError, InvalidStateError
from millrace.rollouts.requests import NUM_RUNS
from millrace.rollouts.types import Purpose, Rollout
from millrace.rollouts.wire import encode_rollout
from millrace.storage.clean_up import remove
from millrace.telemetry import waits

logger = logging.getLogger(__name__)

_NAME = re.compile(r"\d{12,}-[0-9a-f]{64}\.rollouts")
_PARTIAL = re.compile(r"\.[0-9a-f]{64}\.tmp")
_DAMAGED = "damaged"
_LOCK = ".lock"
_DROPPED = ".dropped-"
_SPOOLED = "spool file"
_SLOW_DISK_S = 10.0  # a write above this is overdue in `run why`; the kernel ends it
_QUIET_DISK_S = 2.0  # a queue of writes that lasts no longer is ordinary
_RETRIES = Backoff(0.5, 5.0)

T = TypeVar("T")


# The files of the spool: rollouts that were written together, one record after the other.
#
#     record    "MRR1", flags uint32 (1: of an evaluation), ordinal uint64, size uint64, sha256 [32], all little-endian,
#               then the bytes of the log's entry
#
# A file appears whole, by a rename, and is never changed.

_HEAD = struct.Struct("<4sIQQ32s")
_MARK = b"MRR1"
_IS_EVAL = 1


class Record(NamedTuple):
    """A rollout's record in a file; the rollout's bytes begin at `offset`."""

    is_eval: bool
    ordinal: int
    h: str
    offset: int
    size_bytes: int


@dataclass(slots=True, eq=False)
class SpoolFile:
    """A file, and how many of its rollouts are still kept."""

    path: Path
    num_kept: int = 0

    def read(self, offset: int, size_bytes: int) -> bytes:
        """Read `size_bytes` of the file from `offset` on, fewer at its end; raise OSError."""
        with self.path.open("rb") as file:
            file.seek(offset)
            return file.read(size_bytes)


def file_name(ordinal: int, h: str) -> str:
    """Return the name of the file whose first rollout has this ordinal and sha256."""
    return f"{ordinal:012d}-{h}.rollouts"


def write_file(folder: str, rollouts: Sequence[tuple[bool, int, str, bytes]]) -> tuple[SpoolFile, list[int]]:
    """Write rollouts of one run, (is_eval, ordinal, sha256 in hex, data) of each, into a new file in `folder`.

    Returns the file, and the offset in it at which the data of each begins. Raises OSError, and then leaves no file.
    """
    parts: list[bytes] = []
    offsets: list[int] = []
    end = 0
    for is_eval, ordinal, h, data in rollouts:
        head = _HEAD.pack(_MARK, _IS_EVAL if is_eval else 0, ordinal, len(data), bytes.fromhex(h))
        parts += (head, data)
        offsets.append(end + _HEAD.size)
        end += _HEAD.size + len(data)
    _, ordinal, h, _ = rollouts[0]
    partial, path = f"{folder}/.{h}.tmp", f"{folder}/{file_name(ordinal, h)}"
    os.makedirs(folder, exist_ok=True)
    try:
        with open(partial, "wb", buffering=0) as file:
            written, whole = 0, b"".join(parts)
            while written < len(whole):  # a disk that is nearly full takes a part
                written += file.write(memoryview(whole)[written:])
        os.rename(partial, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise
    return SpoolFile(Path(path)), offsets


def scan_file(path: Path) -> tuple[list[Record], str]:
    """Read where the rollouts of a spool file are: return the records before the first problem, and that problem or "".

    Contents are not checked against their sha256. Raises OSError.
    """
    found: list[Record] = []
    size, at = path.stat().st_size, 0
    with path.open("rb") as file:
        while at < size:
            file.seek(at)
            head = file.read(_HEAD.size)
            if len(head) < _HEAD.size or not head.startswith(_MARK):
                return found, f"no record at byte {at} of {size}"
            _, flags, ordinal, num_bytes, digest = _HEAD.unpack(head)
            if num_bytes > size - at - _HEAD.size:
                return found, f"the record at byte {at} of {size} is cut short"
            offset = at + _HEAD.size
            found.append(Record(bool(flags & _IS_EVAL), ordinal, digest.hex(), offset, num_bytes))
            at = offset + num_bytes
    return found, "" if found else "the file is empty"


@dataclass(slots=True, kw_only=True, eq=False)
class Kept:
    """A finished rollout in the spool.

    `data`, its bytes, is in memory until it is both written to a file and appended to the log.
    """

    run_uid: str
    is_eval: bool
    ordinal: int
    h: str
    """sha256 of its bytes in hex; the field `h` of its entry in the log."""
    size_bytes: int
    planned_step: int = 0
    data: bytes | None = field(default=None, repr=False)
    file: SpoolFile | None = None
    """The file with its bytes; None while they are not written."""
    offset: int = 0
    """Where its bytes begin in the file."""
    appended_at: float | None = None
    """Monotonic time at which it was first known to be in the log; None before."""

    @property
    def is_written(self) -> bool:
        """Return whether the rollout is in a file of the spool."""
        return self.file is not None


class Spool:
    """The kept rollouts of every run. Used by one event loop; files are touched by one thread of its own."""

    def __init__(self, directory: Path | None, *, limit_bytes: int) -> None:
        """Lock the directory for this process and take over the rollouts in it.

        With None a temporary directory is used, which `close` deletes. `limit_bytes` is what may be kept before
        `require_room` raises. Raises InvalidStateError if another env-server uses the directory.
        """
        self._is_private = directory is None
        self.directory = Path(tempfile.mkdtemp(prefix="millrace-spool-")) if directory is None else directory
        self.limit_bytes = limit_bytes
        self.num_bytes = 0
        self._runs: dict[str, dict[str, Kept]] = {}
        self._unwritten: dict[str, Kept] = {}
        self._disk_problem = ""
        self._rewriting: asyncio.Task[None] | None = None
        self._queue: list[Kept] = []
        self._next_write: asyncio.Task[None] | None = None
        """The task that will write the queue."""
        self._one_write = asyncio.Lock()
        self.executor = ThreadPoolExecutor(1, "spool")
        # Locked before it is read: another env-server may still write there.
        self._lock_file = self._take()
        self._scan()

    @property
    def num_rollouts(self) -> int:
        """Return the number of rollouts in the spool."""
        return sum(map(len, self._runs.values()))

    @property
    def run_uids(self) -> list[str]:
        """Return the uids of runs with rollouts in the spool."""
        return list(self._runs)

    def of_run(self, run_uid: str) -> list[Kept]:
        """Return the rollouts that the spool has of a run, in the order in which they were added."""
        return list(self._runs.get(run_uid, {}).values())

    def holds(self, kept: Kept) -> bool:
        """Return whether the rollout has not been dropped from the spool."""
        return kept.h in self._runs.get(kept.run_uid, {})

    def require_room(self) -> None:
        """Raise CapacityError if no new rollouts are to be played: `limit_bytes` are kept, or the disk refuses
        writes.
        """
        count = self.num_rollouts
        if self._unwritten:
            raise CapacityError(
                f"{len(self._unwritten)} finished rollouts could not be written to {self.directory}: "
                f"{self._disk_problem}; they are kept in memory",
                reason="SPOOL_UNWRITABLE",
                remedy="free space on that disk, or set MILLRACE_SPOOL_DIR to another one",
            )
        if self.num_bytes >= self.limit_bytes:
            raise CapacityError(
                f"the spool {self.directory} keeps {count} finished rollouts of {len(self._runs)} runs in "
                f"{_mib(self.num_bytes)} and its bound is {_mib(self.limit_bytes)}",
                reason="SPOOL_FULL",
                remedy="wait until the runs resolve them, or raise MILLRACE_SPOOL_BYTES",
                metadata={NUM_RUNS: str(len(self._runs))},
            )

    async def keep(self, rollout: Rollout) -> Kept:
        """Add a finished rollout to the spool, wait until it is written to a file, and return it as it is kept.

        If the disk refuses the write, the rollout stays in memory, this returns, and the write is tried again.
        """
        data = encode_rollout(rollout)
        kept = Kept(
            run_uid=rollout.run_uid,
            is_eval=rollout.purpose is Purpose.EVAL,
            ordinal=rollout.ordinal,
            h=hashlib.sha256(data).hexdigest(),
            size_bytes=len(data),
            planned_step=rollout.planned_step,
            data=data,
        )
        self._add(kept)
        self._queue.append(kept)
        if self._next_write is None:
            self._next_write = asyncio.create_task(self._write_queue(), name="spool write")
        with self._disk_wait():
            # The write is of other callers' rollouts, too: the cancellation of one must not end it.
            await asyncio.shield(self._next_write)
        return kept

    async def _write_queue(self) -> None:
        """Write the rollouts that are queued, one file per run, once the write before it is done.

        Those that are queued meanwhile are written together after it.
        """
        async with self._one_write:
            # Taken in one step: what is queued from here on is written by the next call.
            batch, self._queue, self._next_write = self._queue, [], None
            by_run: dict[str, list[Kept]] = {}
            for kept in batch:
                by_run.setdefault(kept.run_uid, []).append(kept)
            for together in by_run.values():
                try:
                    await self._write(together)
                except OSError as error:
                    await self._write_alone(together, error)

    async def _write_alone(self, refused: Sequence[Kept], error: OSError) -> None:
        """Write rollouts one by one that the disk has refused together with `error`, as some may fit.

        The others stay in memory and are tried again.
        """
        for kept in refused:
            try:
                if len(refused) == 1:
                    raise error
                await self._write([kept])
            except OSError as problem:
                if self.holds(kept):
                    self._note_unwritten(kept, problem)

    async def read(self, kept: Kept) -> bytes | None:
        """Return the bytes of a kept rollout; None if it was dropped, or its file is damaged or lost.

        A damaged rollout is dropped, and its bytes are copied into the directory `damaged`.
        """
        if kept.data is not None:
            return kept.data
        if not self.holds(kept):
            return None
        problem = ""
        try:
            data = await self._in_thread(lambda: _read(kept))
        except OSError as error:
            data, problem = b"", str(error)
        if not self.holds(kept):  # dropped while it was read
            return None
        if not problem and hashlib.sha256(data).hexdigest() != kept.h:
            problem = f"its {len(data)} bytes do not have the sha256 of its record"
        if not problem:
            return data
        aside = self.directory / _DAMAGED / f"{kept.run_uid}-{kept.ordinal:012d}-{kept.h}"
        logger.error("rollout is damaged in the spool and put aside", extra={"path": str(aside), "problem": problem})
        if data:
            await self._in_thread(lambda: _put_aside(aside, data))
        await self.drop([kept])
        return None

    def note_appended(self, kept: Kept) -> None:
        """Note that a rollout is in the log: its file stays, and its bytes in memory are freed once they are
        written.
        """
        kept.appended_at = time.monotonic()
        if kept.is_written:
            kept.data = None

    async def drop(self, dropped: Iterable[Kept]) -> None:
        """Remove rollouts from the spool, and delete the files of which no rollout is left."""
        # Out of the index first: nobody begins to read a file that is being deleted.
        paths = [file.path for kept in dropped if (file := self._forget(kept)) is not None and not file.num_kept]
        if paths:
            await self._in_thread(lambda: _delete(paths))

    def forget_run(self, run_uid: str) -> None:
        """Remove a run's rollouts from the spool's index; their files stay until `drop_run`."""
        for kept in self.of_run(run_uid):
            self._forget(kept)

    async def drop_run(self, run_uid: str) -> None:
        """Remove a run's rollouts from the spool, then move its directory aside and delete it."""
        self.forget_run(run_uid)
        # Renamed first, which is one call: a run that is reopened meanwhile writes into a new directory.
        aside = self.directory / f"{_DROPPED}{time.time_ns()}-{run_uid}"
        # In the spool's own thread, which does the run's queued writes before.
        await self._in_thread(lambda: _move(self.directory / run_uid, aside))
        # In another one, because a large directory takes long and writes of other runs wait for the spool's thread.
        await asyncio.to_thread(lambda: remove(aside, what=_SPOOLED))

    async def close(self) -> None:
        """Finish writing, try once more what the disk refused, and release the directory for a successor.

        What the disk still refuses is lost. A temporary directory is deleted.
        """
        if self._next_write is not None:
            await self._next_write
        async with self._one_write:  # the write before it is done
            pass
        if self._rewriting is not None:
            self._rewriting.cancel()
            await asyncio.gather(self._rewriting, return_exceptions=True)
        if self._unwritten and not await self._write_again():
            extra = {"rollouts": len(self._unwritten), "problem": self._disk_problem}
            logger.error("finished rollouts die with this process: the disk does not take them", extra=extra)
        self.executor.shutdown()
        self._lock_file.close()
        if self._is_private:
            remove(self.directory, what=_SPOOLED)

    def _add(self, kept: Kept) -> None:
        """Add a rollout to the index and its size to the total."""
        self._runs.setdefault(kept.run_uid, {})[kept.h] = kept
        self.num_bytes += kept.size_bytes

    def _forget(self, kept: Kept) -> SpoolFile | None:
        """Remove a rollout from the index, free its bytes in memory, and return its file.

        None if it was not known, or is in no file. The file itself is not deleted.
        """
        run = self._runs.get(kept.run_uid, {})
        if run.pop(kept.h, None) is None:
            return None
        if not run:
            del self._runs[kept.run_uid]
        self._unwritten.pop(kept.h, None)
        self.num_bytes -= kept.size_bytes
        kept.data = None
        file = kept.file
        if file is not None:
            file.num_kept -= 1
        return file

    async def _in_thread(self, function: Callable[[], T]) -> T:
        """Call the function in the spool's only thread and return its result; a slow disk is a visible wait."""
        with self._disk_wait():
            return await asyncio.get_running_loop().run_in_executor(self.executor, function)

    def _disk_wait(self) -> contextlib.AbstractContextManager[object]:
        """Return a context manager: its block is registered as a wait for the disk."""
        reason = f"{waits.COUNT} reads and writes of the spool {self.directory}"
        return waits.shared(reason, waits_on="disk", deadline_s=_SLOW_DISK_S, quiet_s=_QUIET_DISK_S)

    async def _write(self, batch: Sequence[Kept]) -> None:
        """Write rollouts of one run into one new file, and note in each where its bytes are. Raises OSError.

        Those that were dropped meanwhile are left out; a file of which none is left is deleted.
        """
        rollouts = [(kept.is_eval, kept.ordinal, kept.h, kept.data) for kept in batch if kept.data is not None]
        if not rollouts:
            return  # dropped meanwhile
        folder = f"{self.directory}/{batch[0].run_uid}"
        written = asyncio.get_running_loop().run_in_executor(self.executor, write_file, folder, rollouts)
        file, offsets = await written
        places = {h: offset for (_, _, h, _), offset in zip(rollouts, offsets, strict=True)}
        for kept in batch:
            if kept.h in places and self.holds(kept):  # else it was dropped meanwhile
                kept.file, kept.offset = file, places[kept.h]
                file.num_kept += 1
        if not file.num_kept:
            await self._in_thread(lambda: _delete([file.path]))

    def _note_unwritten(self, kept: Kept, error: OSError) -> None:
        """Note that the disk refused a rollout with `error`, and start the task that tries again, if none runs."""
        self._disk_problem = f"{type(error).__name__}: {error.strerror or error}"
        self._unwritten[kept.h] = kept
        extra = {"run": kept.run_uid, "ordinal": kept.ordinal, "problem": self._disk_problem}
        logger.error("finished rollout stays in memory: the disk does not take it", extra=extra)
        if self._rewriting is None or self._rewriting.done():
            self._rewriting = asyncio.create_task(self._rewrite(), name="spool rewrite")

    async def _rewrite(self) -> None:
        """Try again to write what is in memory, until the disk takes it; `require_room` raises meanwhile."""
        num_failed = 1
        with waits.waiting("the disk of the spool", waits_on="disk") as wait:
            while self._unwritten:
                count, problem = len(self._unwritten), self._disk_problem
                wait.update(reason=f"room for {count} finished rollouts in {self.directory}: {problem}")
                await asyncio.sleep(_RETRIES.after(num_failed))
                num_failed = 1 if await self._write_again() else num_failed + 1

    async def _write_again(self) -> bool:
        """Write the rollouts that the disk has refused, until it refuses one again; return whether it took all."""
        for kept in list(self._unwritten.values()):
            try:
                await self._write([kept])
            except OSError as error:
                self._disk_problem = f"{type(error).__name__}: {error.strerror or error}"
                return False
            self._unwritten.pop(kept.h, None)
            if kept.appended_at is not None:
                kept.data = None
        return True

    def _take(self) -> IO[str]:
        """Lock the spool's directory for this process and return the lock's file, which must stay open.

        Raises InvalidStateError if another process has the lock. The kernel releases it with the process, however that
        ends.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        # Opened without truncation: until the lock is ours the text is the pid of its holder.
        file = (self.directory / _LOCK).open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            file.close()
            raise InvalidStateError(
                f"another env-server (pid {holder}) uses the spool {self.directory}",
                reason="SPOOL_IN_USE",
                remedy="give every env-server a directory of its own (MILLRACE_SPOOL_DIR)",
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        return file

    def _scan(self) -> None:
        """Add the rollouts that a predecessor has left in the directory, and delete its partial and dropped files.

        Contents are not read: `read` checks them.
        """
        for directory in self.directory.iterdir():
            if not directory.is_dir() or directory.name == _DAMAGED:
                continue
            if directory.name.startswith(_DROPPED):  # a deletion that was cut short
                # In a thread of its own: the env-server's start does not wait for the deletion.
                threading.Thread(target=remove, args=(directory,), kwargs={"what": _SPOOLED}).start()
                continue
            for path in directory.iterdir():
                if _NAME.fullmatch(path.name) is not None:
                    self._take_over(path)
                elif _PARTIAL.fullmatch(path.name):  # a write that was cut short; other files are not ours
                    remove(path, what=_SPOOLED)
        if self._runs:
            extra = {"rollouts": sum(map(len, self._runs.values())), "runs": len(self._runs), "bytes": self.num_bytes}
            logger.info("spool taken over", extra={"directory": str(self.directory), **extra})

    def _take_over(self, path: Path) -> None:
        """Add the rollouts of a file that a predecessor has left.

        A damaged file is copied aside, and deleted if no record in it can be read. A file that cannot be opened is only
        logged.
        """
        try:
            records, problem = scan_file(path)
        except OSError as error:  # one that cannot be read keeps no env-server from starting; it goes with its run
            logger.error("spool file cannot be read", extra={"path": str(path), "problem": str(error)})
            return
        file = SpoolFile(path)
        for record in records:
            kept = Kept(
                run_uid=path.parent.name,
                is_eval=record.is_eval,
                ordinal=record.ordinal,
                h=record.h,
                size_bytes=record.size_bytes,
                file=file,
                offset=record.offset,
            )
            file.num_kept += 1
            self._add(kept)
        if problem:
            aside = self.directory / _DAMAGED / f"{path.parent.name}-{path.name}"
            logger.error("spool file is damaged", extra={"path": str(path), "problem": problem, "aside": str(aside)})
            _put_aside(aside, path)
        if not records:
            remove(path, what=_SPOOLED)


def _read(kept: Kept) -> bytes:
    """Read a kept rollout's bytes from its file; b"" if it is in none."""
    return b"" if kept.file is None else kept.file.read(kept.offset, kept.size_bytes)


def _put_aside(aside: Path, data: bytes | Path) -> None:
    """Write the bytes, or a copy of the file `data`, to `aside`; a failure is only logged."""
    try:
        aside.parent.mkdir(exist_ok=True)
        aside.write_bytes(data.read_bytes() if isinstance(data, Path) else data)
    except OSError as error:
        logger.error("damaged rollout could not be put aside", extra={"path": str(aside), "problem": str(error)})


def _move(path: Path, aside: Path) -> None:
    """Rename `path` to `aside`, whose directory is made; a missing `path` is no error, and other failures are only
    logged.
    """
    try:
        aside.parent.mkdir(exist_ok=True)
        path.rename(aside)
    except FileNotFoundError:
        pass  # nothing of it was written, or somebody else deleted it
    except OSError as error:
        logger.error("spool file could not be moved", extra={"path": str(path), "problem": str(error)})


def _delete(paths: Iterable[Path]) -> None:
    """Delete these spool files."""
    for path in paths:
        remove(path, what=_SPOOLED)


def _mib(count: int) -> str:
    """Format a number of bytes, as in `1.5 MiB`."""
    return f"{count / 2**20:.1f} MiB"
