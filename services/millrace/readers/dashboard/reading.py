"""Asks the reader, which is a process of its own, and keeps it going while somebody looks."""

import asyncio
import itertools
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from millrace.errors import (
    CapacityError,
    CorruptObjectError,
    InvalidSpecError,
    MillraceError,
    UnavailableError,
    Violation,
)
from millrace.processes.channel import ChildLink
from millrace.readers.dashboard.answers import MAX_ANSWER_BYTES, MAX_QUESTION_BYTES, numbered, split_number
from millrace.storage.scratch import scratch_parent
from millrace.telemetry import waits

logger = logging.getLogger(__name__)

ANSWER_S = 30.0
"""How long a question may take; a page shows what it has, and asks again."""
MAX_QUESTIONS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderAnswer:
    """What the reader says: a status of HTTP, and JSON."""

    status: int
    body: bytes


@dataclass(slots=True)
class _Question:
    """A question that is not answered yet, and the process that it is sent to, once that is started."""

    future: asyncio.Future[ReaderAnswer]
    process: ChildLink | None = None


class ReaderClient:
    """The reader of this orchestrator; started with the first question, and again after its death."""

    def __init__(self, *, store_url: str, prefix: str, directory: Path) -> None:
        """Create the client; the process starts with the first question. Indexes are kept in `directory`."""
        self._order = {"store_url": store_url, "prefix": prefix, "directory": str(directory)}
        self._process: ChildLink | None = None
        self._listening: set[asyncio.Task[None]] = set()
        self._starting = asyncio.Lock()
        self._numbers = itertools.count(1)
        self._open: dict[int, _Question] = {}

    @classmethod
    def of(cls, *, store_url: str, prefix: str) -> Self:
        """Return the client of a deployment's reader, whose indexes are in the scratch directory."""
        return cls(store_url=store_url, prefix=prefix, directory=scratch_parent() / "dashboard" / prefix)

    async def ask(self, question: str, uid: str, params: Mapping[str, str]) -> ReaderAnswer:
        """Have the reader answer a question about the run `uid`, and return its answer.

        Start the reader if it does not run. UnavailableError if there is no answer in time, CapacityError where too
        many ask, InvalidSpecError if the question is too long.
        """
        if len(self._open) >= MAX_QUESTIONS:
            raise CapacityError(
                f"{MAX_QUESTIONS} questions of pages are open", reason="DASHBOARD_BUSY", remedy="ask again in a moment"
            )
        ends = time.monotonic() + ANSWER_S  # the clock of this machine, and so the reader's, too
        data = json.dumps({"question": question, "uid": uid, "params": dict(params), "ends": ends}).encode()
        number = next(self._numbers)
        data = numbered(number, data)
        if len(data) > MAX_QUESTION_BYTES:  # the reader would end, with what it answers to others
            wrong = Violation(
                field="request", message=f"has {len(data)} bytes, and at most {MAX_QUESTION_BYTES} are taken"
            )
            raise InvalidSpecError([wrong], remedy="ask with shorter filters or ids")
        asked = self._open[number] = _Question(asyncio.get_running_loop().create_future())
        try:
            with waits.waiting("an answer of the dashboard's reader", waits_on="object store", deadline_s=ANSWER_S):
                async with asyncio.timeout(ANSWER_S):
                    asked.process = await self._started()
                    await asked.process.send(data)
                    return await asked.future
        except (TimeoutError, OSError) as error:
            raise UnavailableError(
                f"the log of the run could not be read within {ANSWER_S:.0f} s",
                reason="READER_SILENT",
                remedy="see whether the object store answers; the page tries again",
            ) from error
        finally:
            self._open.pop(number, None)

    async def close(self) -> None:
        """End the reader's process; the questions that were sent to it get an UnavailableError."""
        listening = [*self._listening]
        for task in listening:
            task.cancel()
        await asyncio.gather(*listening, return_exceptions=True)

    async def _started(self) -> ChildLink:
        """Return the reader's process, started if none runs."""
        async with self._starting:
            if self._process is None or self._process.is_ended:
                self._process = await ChildLink.start("millrace.readers.dashboard.reader", self._order)
                task = asyncio.create_task(self._listen(self._process), name="reader of the dashboard")
                self._listening.add(task)
                task.add_done_callback(self._listening.discard)
            return self._process

    async def _listen(self, process: ChildLink) -> None:
        """Hand each answer of the process to the question with its number, until the process ends.

        Then kill what is left of it.
        """
        try:
            while (answer := await process.receive(most=MAX_ANSWER_BYTES)) is not None:
                number, data = split_number(answer)
                asked = self._open.get(number)
                if asked is not None and not asked.future.done():
                    asked.future.set_result(ReaderAnswer(status=int(data[:3]), body=data[3:]))
            logger.info("the reader of the dashboard ended")
        except (CorruptObjectError, ValueError) as error:
            logger.warning("the reader of the dashboard sent no answer and is ended", extra={"error": str(error)})
        finally:
            # Another process may have been started since.
            if self._process is process:
                self._process = None
            self._fail(process)
            await process.end()

    def _fail(self, process: ChildLink) -> None:
        """Have every open question that was sent to this process raise that the reader died."""
        error: MillraceError = UnavailableError(
            "the process that reads for the dashboard died", reason="READER_DIED", remedy="nothing: ask again"
        )
        for asked in self._open.values():
            if asked.process is process and not asked.future.done():
                asked.future.set_exception(error)
