"""The choices of one request as lines, each as soon as it has ended (`rollouts.choices_wire`).

Rollouts of a group ask the same at the same time: one request costs less than many, and none waits for a longer one.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from typing import Any

import orjson
from fastapi import Response

from millrace.errors import InternalError, MillraceError
from millrace.inference.engine import GenerateRequest
from millrace.inference.http.access import Receive, Send
from millrace.inference.http.responses import Completed, error_body
from millrace.rollouts.choices_wire import CONTENT_TYPE, HEADER, LINES

logger = logging.getLogger(__name__)


class ChoiceLines(Response):
    """Generates while it answers; a client that hangs up cancels every choice."""

    media_type = CONTENT_TYPE

    def __init__(
        self,
        choices: Sequence[GenerateRequest],
        generate: Callable[[GenerateRequest], Coroutine[Any, Any, Completed]],
        whole: Callable[[Completed], dict[str, Any]],
        *,
        is_open: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """`whole` makes the body of an answer with one choice; `is_open` is entered while this one is sent."""
        super().__init__(headers={HEADER: LINES})
        self._choices = choices
        self._generate = generate
        self._whole = whole
        self._is_open = is_open

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Send a line per choice."""
        ended: list[tuple[int, asyncio.Task[Completed]]] = []
        news = asyncio.Event()

        def begin(index: int, choice: GenerateRequest) -> asyncio.Task[Completed]:
            def end(task: asyncio.Task[Completed]) -> None:
                ended.append((index, task))
                news.set()

            task = asyncio.create_task(self._generate(choice))
            task.add_done_callback(end)
            return task

        with self._is_open():
            tasks = [begin(index, choice) for index, choice in enumerate(self._choices)]
            hung_up = asyncio.ensure_future(receive())  # behind the whole body only a disconnect comes
            hung_up.add_done_callback(lambda _: news.set())
            try:
                headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                left = len(tasks)
                # It waits for this engine's generations, which a client ends by hanging up.
                while left and not hung_up.done():
                    await news.wait()
                    news.clear()
                    taken, ended[:] = list(ended), []
                    left -= len(taken)
                    if lines := b"".join(self._line(index, task) for index, task in taken):
                        await send({"type": "http.response.body", "body": lines, "more_body": True})
                if not left:
                    await send({"type": "http.response.body", "body": b""})
            finally:
                over: list[asyncio.Task[Any]] = [*tasks, hung_up]
                for task in over:
                    task.cancel()
                await asyncio.gather(*over, return_exceptions=True)

    def _line(self, index: int, task: "asyncio.Task[Completed]") -> bytes:
        try:
            status, body = 200, self._whole(task.result())
        except MillraceError as error:
            status, body = error_body(error)
        except Exception:  # the edge of the process, as in `server`
            logger.exception("a choice failed", extra={"index": index})
            status, body = error_body(InternalError("internal error; see the server's log"))
        return orjson.dumps({"index": index, "status": status, "body": body}) + b"\n"
