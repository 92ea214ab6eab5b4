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
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NoReturn

from millrace.decoding import decode_object
from millrace.errors import CorruptObjectError
from millrace.readers.dashboard.answers import LENGTH, MAX_QUESTION_BYTES, frame, problem_of, to_json
from millrace.readers.dashboard.reader import Reader
from millrace.storage import open_store
from millrace.telemetry.logging import secrets_of

THREADS = 4
_ASKS_STORE = ("sample", "tokens", "lineage", "get-lineage")
_NICENESS = 10


def _read_frame(source: IO[bytes]) -> tuple[int, bytes] | None:
    head = source.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    size, number = LENGTH.unpack(head)
    if size > MAX_QUESTION_BYTES:
        raise CorruptObjectError(f"a question of {size} bytes", reason="QUESTION_TOO_LARGE")
    data = source.read(size)
    return (number, data) if len(data) == size else None


def main() -> NoReturn:
    """Answer the questions on the standard input until the parent is gone, then exit."""
    source = sys.stdin.buffer
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what foreign code prints is no answer
    os.nice(_NICENESS)
    first = _read_frame(source)
    if first is None:
        os._exit(0)
    order = decode_object(first[1], what="the order of a reader", reason="ORDER_UNREADABLE")
    reader = Reader(open_store(order["store_url"]), order["prefix"], Path(order["directory"]))
    secrets = secrets_of(os.environ)
    lock = threading.Lock()

    def answer(number: int, asked: dict[str, Any]) -> None:
        if time.monotonic() > float(asked.get("ends", math.inf)):
            return
        status, body = _answer(reader, asked, secrets)
        with lock:
            sink.write(frame(number, str(status).encode() + body))
            sink.flush()

    pools = [ThreadPoolExecutor(THREADS, thread_name_prefix=name) for name in ("question", "question of the store")]
    while (found := _read_frame(source)) is not None:
        asked = _decoded(found[1])
        pools[asked.get("question") in _ASKS_STORE].submit(answer, found[0], asked)
    os._exit(0)  # nobody hears what is still being answered


def _decoded(data: bytes) -> dict[str, Any]:
    """Return the question in a frame; an empty one, which is answered as well, if it cannot be decoded."""
    try:
        return decode_object(data, what="a question", reason="QUESTION_UNREADABLE")
    except CorruptObjectError:
        return {}


def _answer(reader: Reader, asked: dict[str, Any], secrets: tuple[str, ...]) -> tuple[int, bytes]:
    """Return status and body of the answer; an error is an answer, too."""
    try:
        found = reader.ask(str(asked["question"]), str(asked["uid"]), dict(asked["params"]))
        return 200, to_json(found, secrets=secrets)
    except Exception as error:  # noqa: BLE001 - the edge of a question: the page shows what is wrong, the others go on
        status, problem = problem_of(error)
        return status, json.dumps(problem).encode()


if __name__ == "__main__":
    main()
