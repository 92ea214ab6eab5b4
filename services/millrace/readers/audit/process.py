"""The process of an audit: it reads ranges of steps for another one, or audits a whole run beside an orchestrator.

An orchestrator drives runs on one event loop, and an audit computes for minutes: so it asks `audit_beside`, which has a
process of its own do it, at low priority.
"""

import asyncio
import base64
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from millrace.processes.channel import HelperDiedError, HelperProcess, Message, serve
from millrace.readers.audit.audit import audit_run
from millrace.readers.audit.findings import Audit
from millrace.readers.audit.ranges import (
    SILENT_S,
    AuditRanges,
    answer_steps,
    died_twice,
    require_answer,
    start_helper,
)
from millrace.readers.dashboard.answers import problem_of
from millrace.runlog import open_redis
from millrace.runlog.names import Names
from millrace.storage import ObjectStore, open_store
from millrace.telemetry import waits
from millrace.v1 import audit_pb2

_NICENESS = 10


async def audit_beside(
    *, redis_url: str, store_url: str, prefix: str, uid: str, on_progress: Callable[[str], None]
) -> audit_pb2.AuditReport:
    """Audit a run in a process of its own and return the report.

    `on_progress` gets, from another thread, what is being read. Raises what `audit_run` raises, and UnavailableError if
    the process dies. A cancellation ends the process.
    """
    starting = asyncio.create_task(asyncio.to_thread(start_helper))
    try:
        helper = await asyncio.shield(starting)
    except asyncio.CancelledError:
        starting.add_done_callback(_close_started)  # the thread goes on, and its process would be nobody's
        raise
    question = {"do": "audit", "redis_url": redis_url, "store_url": store_url, "prefix": prefix, "uid": uid}

    def ask() -> Message:
        return helper.ask(question, silent_s=SILENT_S, on_beat=lambda beat: on_progress(str(beat.get("text", ""))))

    try:
        with waits.waiting(f"an audit of run {uid} by a process of its own", waits_on="object store"):
            answer = require_answer(await asyncio.to_thread(ask))
    except HelperDiedError as error:
        raise died_twice(error) from error
    finally:
        await asyncio.to_thread(helper.close)
    return audit_pb2.AuditReport.FromString(base64.b64decode(answer["report"]))


def _close_started(starting: asyncio.Task[HelperProcess]) -> None:
    """Close, in a thread, the helper process that a finished task has started, if it has started one."""
    if not starting.cancelled() and starting.exception() is None:
        starting.get_loop().run_in_executor(None, starting.result().close)


class _Answers:
    """Answers the questions of one parent."""

    def __init__(self) -> None:
        self.progress = ""
        self._stores: dict[str, ObjectStore] = {}

    def answer(self, question: Message, files: list[int]) -> Message:
        """Answer a question of the parent: steps to be read, or a run to be audited; an error is an answer, too.

        Questions come without files.
        """
        try:
            return self._steps(question) if question["do"] == "steps" else asyncio.run(self._audit(question))
        except Exception as error:  # noqa: BLE001 - the edge of a question: who asked raises the error
            status, problem = problem_of(error)
            return {**problem, "status": status}

    def _steps(self, question: Mapping[str, Any]) -> Message:
        """Read the contents of the steps in a question, and return what was found."""
        place = question["place"]
        names = Names(place["prefix"], place["uid"])
        report = audit_pb2.AuditReport(run_uid=names.uid)
        return answer_steps(Audit(store=self._store(place["store_url"]), names=names, report=report), question)

    async def _audit(self, question: Mapping[str, Any]) -> Message:
        """Audit the run that a question names, at low priority, and return the report as base64 text."""
        os.nice(_NICENESS)
        redis, url = open_redis(question["redis_url"]), question["store_url"]
        try:
            report = await audit_run(
                redis,
                self._store(url),
                prefix=question["prefix"],
                uid=question["uid"],
                on_progress=self._hear,
                # A quarter of the processors: the orchestrator works on this machine.
                ranges=AuditRanges(store_url=url, jobs=max(1, (os.cpu_count() or 1) // 4)),
            )
        finally:
            await redis.aclose()
        return {"report": base64.b64encode(report.SerializeToString()).decode()}

    def _hear(self, text: str) -> None:
        """Keep the text that says what is being read, for the next heartbeat."""
        self.progress = text

    def _store(self, url: str) -> ObjectStore:
        """Return the store at a URL, which is opened the first time only."""
        if url not in self._stores:
            self._stores[url] = open_store(url)
        return self._stores[url]


def main() -> None:
    """Answer the questions of the parent until it is gone."""
    answers = _Answers()
    os.dup2(2, 1)  # what foreign code prints is no output of a command
    serve(answers.answer, beat=lambda: {"text": answers.progress})


if __name__ == "__main__":
    sys.exit(main())
