"""The dashboard's HTTP surface: whole requests, damaged in their path, query, headers, cookie or body.

No request gets 5xx, none is left without an answer or an end, and neither the server nor its reader grows. What only a
running server knows is in a request as `@COOKIE@`, `@CSRF@` and `TOKEN`.
"""

import asyncio
import contextlib
import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote_from_bytes

import httptools

from millrace.errors import InvalidSpecError, Violation
from millrace_testing.fuzz import mutate as m
from millrace_testing.fuzz.surface import ANSWER_S, EventLoop

RUN = "letters-1"
TOKEN = "@TOKEN@".ljust(47, "@")  # as long as a token is, so that a body's length stays what its header says
OURS = {"Host": "127.0.0.1", "Cookie": "@COOKIE@"}
WRITES = {**OURS, "Content-Type": "application/json", "X-Millrace-CSRF": "@CSRF@", "Sec-Fetch-Site": "same-origin"}
PATHS = [
    "/", "/login", "/login/abc", "/static/app.js", "/api/session", "/api/runs", f"/api/runs/{RUN}",
    f"/api/runs/{RUN}/metrics?names=loss/mean,reward/mean&points=10&spread=1",
    f"/api/runs/{RUN}/events?kinds=step_completed&size=5&before=1-3",
    f"/api/runs/{RUN}/samples?outcome=trained&min_reward=0.1&sort=-reward&offset=0&size=5&env=letters&step=1",
    f"/api/runs/{RUN}/samples/1-2", f"/api/runs/{RUN}/samples/1-2/tokens?part=0&offset=0&size=4",
    f"/api/runs/{RUN}/lineage?sample=1-1", f"/api/runs/{RUN}/lineage?version=1", f"/api/runs/{RUN}/timeline?steps=2",
    f"/api/runs/{RUN}/checkpoints", f"/api/runs/{RUN}/why", f"/runs/{RUN}/samples",
]  # fmt: skip
MAX_GROWTH = 256 << 20
_LOOK_EVERY = 100
_MAY_BE_BUSY = b'"TOO_MANY_CODES"'


def requests() -> Iterator[bytes]:
    """Yield the valid requests, one for each route."""
    for path in PATHS:
        yield _request("GET", path, OURS)
    yield _request("GET", "/api/runs", {"Host": "localhost", "Authorization": f"Bearer {TOKEN}"})
    yield _request("GET", "/static/app.css", {**OURS, "If-None-Match": '"0"'})
    for action in ("pause", "resume", "cancel"):
        yield _request("POST", f"/api/runs/{RUN}/{action}", WRITES, {"reason": "enough"})
    yield _request("POST", "/api/login", WRITES, {"token": TOKEN})
    yield _request("POST", "/api/login-codes", {"Host": "[::1]", "Authorization": f"Bearer {TOKEN}"}, {})


def _request(method: str, path: str, headers: dict[str, str], body: Any = None) -> bytes:
    data = b"" if body is None else json.dumps(body).encode()
    named = {**headers, **({"Content-Length": str(len(data))} if data else {})}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in named.items()), "", ""]
    return "\r\n".join(lines).encode() + data


def damaged(rng: random.Random, data: bytes) -> bytes:
    """Return the request with one part damaged; it mostly remains a request. Sometimes any of its bytes are damaged."""
    head, end, body = data.partition(b"\r\n\r\n")
    first, *headers = head.split(b"\r\n")
    words = first.split(b" ")
    if rng.random() < 0.2 or not end or len(words) != 3:
        return m.bytes_of(rng, data)
    match rng.randrange(5):
        case 0:
            words[1] = b"/".join(_part(rng, part) for part in words[1].split(b"/"))
        case 1:
            words[1] = _queried(rng, words[1])
        case 2 if headers:
            at = rng.randrange(len(headers))
            name, _, value = headers[at].partition(b": ")
            headers[at] = name + b": " + m.bytes_of(rng, value).replace(b"\r", b"").replace(b"\n", b"")
            headers += [headers[at]] * rng.choice([0, 0, 1, 30])
        case 3:
            words[0] = rng.choice([b"GET", b"POST", b"HEAD", b"PUT", b"OPTIONS", b"DELETE", b"TRACE", b"BREW"])
        case _:
            body = m.json_of(rng, body or b'{"reason": "x", "token": "y"}')
            headers = [each for each in headers if not each.lower().startswith(b"content-length")]
            headers.append(b"Content-Length: %d" % max(0, len(body) + rng.choice([0, 0, 0, 0, -1, 1])))
    return b"\r\n".join([b" ".join(words), *headers, b"", body])


def _part(rng: random.Random, part: bytes) -> bytes:
    if rng.random() < 0.6:
        return part
    return quote_from_bytes(m.bytes_of(rng, part)[:4000], safe="").encode()


def _queried(rng: random.Random, target: bytes) -> bytes:
    path, _, query = target.partition(b"?")
    pairs = [pair.partition(b"=") for pair in (query or b"step=1&sort=-reward").split(b"&")]
    made = [name + b"=" + (_part(rng, value) or b"-1") for name, _, value in pairs]
    extra = [b"min_tokens=NaN", b"sort=-", b"size=99999999999999", b"offset=-1", b"%00=%ff", b"names=" + b"," * 3000]
    return path + b"?" + b"&".join(made + rng.sample(extra, rng.choice([0, 0, 1, 2])))


class Dashboard(EventLoop):
    """A dashboard that demands a token, over a run whose completions are hostile."""

    async def _start(self) -> None:
        from millrace.rpc.access import ServerAccess
        from millrace.rpc.tokens import new_token, token_line
        from millrace.storage.local import LocalStore
        from millrace.telemetry.settings import Settings
        from millrace_testing.dashboard import HOSTILE, RunWriter, serving

        place = Path(tempfile.mkdtemp(prefix="millrace-fuzz-"))
        store, token = LocalStore(place / "store"), new_token()
        (place / "tokens").write_text(token_line(token, "ada") + "\n")
        writer = RunWriter(store=store, members=len(HOSTILE) + 1)
        for step in range(3):
            writer.step(step, HOSTILE)
        access = ServerAccess.of(Settings(tokens_file=str(place / "tokens")))
        self._stack = contextlib.AsyncExitStack()
        self._served = await self._stack.enter_async_context(serving(store, place / "index", access=access))
        self._known = {TOKEN.encode(): token.encode(), b"@COOKIE@": b"", b"@CSRF@": b""}
        await self._log_in(token)
        self._calls = self._held = 0

    async def _log_in(self, token: str) -> None:
        ask = self._served.ask
        _, headers, _ = await asyncio.to_thread(ask, "/api/login", method="POST", body={"token": token})
        cookie = headers["set-cookie"].partition(";")[0]
        _, _, body = await asyncio.to_thread(ask, "/api/session", Cookie=cookie)
        self._known |= {b"@COOKIE@": cookie.encode(), b"@CSRF@": json.loads(body)["csrf"].encode()}

    def call(self, data: bytes) -> Any:
        """Send one request and return the answer.

        Raise InvalidSpecError for a status that blames the request, AssertionError for another error.
        """
        for name, value in self._known.items():
            data = data.replace(name, value)
        self._calls += 1
        if self._calls % _LOOK_EVERY == 0:
            self._look()
        answers = self.run(_exchange(self._served.port, data))
        for status, body in answers:
            assert status < 500 or _MAY_BE_BUSY in body, f"answered {status}: {body[:200]!r}"
        if not answers or any(status >= 400 for status, _ in answers):
            raise InvalidSpecError([Violation(field="request", message=f"answered {answers!r}"[:200])])

    def _look(self) -> None:
        """Check the memory of the server and of the reader, which is another process."""
        held = sum(_resident(int(pid)) for path in Path("/proc/self/task").iterdir() for pid in _children(path))
        self._held = self._held or held
        assert held - self._held < MAX_GROWTH, f"the reader grew by {(held - self._held) >> 20} MiB"


async def _exchange(port: int, data: bytes) -> list[tuple[int, bytes]]:
    """Send the bytes, and return status and body of each answer.

    Raise TimeoutError if the server neither answers nor closes the connection.
    """
    asked, answers = _Asked(), _Answers()
    asked.read(data)
    async with asyncio.timeout(ANSWER_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.suppress(ConnectionError):  # what it does not want to read to its end
            writer.write(data)
            await writer.drain()
            if not asked.whole:
                writer.write_eof()
            while answers.count(asked.is_head) < max(1, asked.whole) and (piece := await reader.read(1 << 16)):
                answers.feed(piece)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    return answers.found


class _Asked:
    """Counts the complete requests in what is sent, with the parser that the server uses."""

    def __init__(self) -> None:
        self.whole = 0
        self.is_head = False
        self._parser = httptools.HttpRequestParser(self)

    def read(self, data: bytes) -> None:
        """Parse the bytes that are sent."""
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.whole = max(1, self.whole)  # it is told so, or hung up on

    def on_message_complete(self) -> None:
        self.whole += 1

    def on_headers_complete(self) -> None:
        self.is_head = self.is_head or self._parser.get_method() == b"HEAD"


class _Answers:
    """The server's answers, as far as they have arrived."""

    def __init__(self) -> None:
        self.found: list[tuple[int, bytes]] = []
        self._ended = 0
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def count(self, is_head: bool) -> int:
        """Return how many answers are complete; answers to HEAD end with their headers."""
        return len(self.found) if is_head else self._ended

    def on_headers_complete(self) -> None:
        self.found.append((self._parser.get_status_code(), b""))

    def on_body(self, data: bytes) -> None:
        status, body = self.found[-1]
        self.found[-1] = (status, (body + data)[:4096])

    def on_message_complete(self) -> None:
        self._ended += 1


def _children(task: Path) -> list[str]:
    with contextlib.suppress(OSError):  # a thread that has ended
        return (task / "children").read_text().split()
    return []


def _resident(pid: int) -> int:
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS:"))
    return 0
