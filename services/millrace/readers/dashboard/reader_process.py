"""The process that reads runs for the dashboard: archives are decoded and indexed here, beside the orchestrator.

A process of its own, because an archive may have gigabytes, and nothing that somebody looks at may slow down a run.
Its first frame says where the store is; then each is a question, whose answer has the same number: a status of HTTP in
three digits, and JSON. The end of its standard input is the end of its parent.

Questions that wait for the store have threads of their own, so that what is answered from what was read before goes
on while it hangs. What comes to its turn too late is left out: nobody waits for it any more.
"""

import json
import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

from millrace.decoding import decode_object
from millrace.errors import CorruptObjectError
from millrace.processes.channel import ParentLink
from millrace.readers.dashboard.answers import MAX_QUESTION_BYTES, numbered, problem_of, split_number, to_json
from millrace.readers.dashboard.reader import Reader
from millrace.storage import open_store
from millrace.telemetry.logging import secrets_of

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
