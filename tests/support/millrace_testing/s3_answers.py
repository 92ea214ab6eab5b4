"""An S3 server that keeps what it is given in memory, and answers otherwise where a test says so."""

import contextlib
import http.server
import threading
import time
import urllib.parse
from collections.abc import Iterator

XML = '<?xml version="1.0" encoding="UTF-8"?><Error><Code>{}</Code><Message>{}</Message>{}</Error>'


class Server(http.server.BaseHTTPRequestHandler):
    """Keeps what it is given; `refuses` says by what an answer differs: status, code, message, rest of the XML."""

    protocol_version = "HTTP/1.1"
    refuses: dict[str, tuple[int, str, str, str]]
    """By method; `create` is a PUT with a condition."""
    times: dict[str, int]
    """How often a method is refused, where that is not always."""
    stored: dict[str, bytes]
    seen: list[tuple[str, str]]
    hosts: list[str]
    has_ranges = True
    has_conditions = True
    has_lengths = True
    """Whether an answer says how long its body is."""
    second_winners_after_s = 0.0
    """When a writer that has lost a race is told that it has won, if it is."""
    is_cut = False
    """Whether a listing says that more follows, and not how to ask for it."""

    def log_message(self, *_: object) -> None:
        pass

    def handle_one(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        kind = "create" if self.headers.get("If-None-Match") and self.has_conditions else self.command
        path, _, query = self.path.partition("?")
        self.seen.append((kind, self.path))
        self.hosts.append(self.headers["Host"].partition(":")[0])
        if kind in self.refuses and self.times.get(kind, 1):
            self.times[kind] = self.times.get(kind, 0) - 1
            status, code, message, rest = self.refuses[kind]
            return self.answer(status, XML.format(code, message, rest).encode())
        if kind == "create" and path in self.stored and self.second_winners_after_s and body != b"late":
            time.sleep(self.second_winners_after_s)
        elif kind == "create" and path in self.stored:
            return self.answer(412, XML.format("PreconditionFailed", "", "").encode())
        if self.command == "PUT":
            self.stored[path] = body
            return self.answer(200)
        if self.command == "DELETE":
            self.stored.pop(path, None)
            return self.answer(204)
        if "list-type=2" in query:
            wanted = urllib.parse.parse_qs(query).get("prefix", [""])[0]
            return self.answer(200, self.prefixes(path, wanted) if "delimiter" in query else self.listing(path, wanted))
        if path == "/b":  # the bucket itself
            return self.answer(200)
        if path not in self.stored:
            return self.answer(404, XML.format("NoSuchKey", "", "").encode())
        whole, wanted = self.stored[path], self.headers.get("Range")
        if wanted is None or not self.has_ranges:
            return self.answer(200, whole)
        first, last = map(int, wanted.removeprefix("bytes=").split("-"))
        part = whole[first : last + 1]
        return self.answer(206, part, {"Content-Range": f"bytes {first}-{first + len(part) - 1}/{len(whole)}"})

    do_GET = do_PUT = do_HEAD = do_DELETE = handle_one

    def listing(self, path: str, prefix: str) -> bytes:
        items = "".join(
            f"<Contents><Key>{name.removeprefix(path + '/')}</Key><Size>{len(data)}</Size>"
            "<LastModified>2026-11-27T10:00:00.000Z</LastModified></Contents>"
            for name, data in sorted(self.stored.items())
            if name.startswith(f"{path}/{prefix}")
        )
        cut = str(self.is_cut).lower()
        return f"<ListBucketResult><IsTruncated>{cut}</IsTruncated>{items}</ListBucketResult>".encode()

    def prefixes(self, path: str, prefix: str) -> bytes:
        begins = f"{path}/{prefix}"
        below = {name.removeprefix(begins).partition("/")[0] for name in self.stored if name.startswith(begins)}
        items = "".join(f"<CommonPrefixes><Prefix>{prefix}{each}/</Prefix></CommonPrefixes>" for each in sorted(below))
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{items}</ListBucketResult>".encode()

    def answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        if self.has_lengths:
            self.send_header("Content-Length", str(len(body)))
        else:
            self.send_header("Connection", "close")
        self.send_header("Last-Modified", "Fri, 27 Nov 2026 10:00:00 GMT")
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextlib.contextmanager
def s3_answers() -> Iterator[tuple[type[Server], int]]:
    """Run a server during the block; yield its class, which holds its state, and its port."""
    handler = type("Handler", (Server,), {"refuses": {}, "times": {}, "stored": {}, "seen": [], "hosts": []})
    listening = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=listening.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield handler, listening.server_port
    finally:
        listening.shutdown()
        thread.join()
        listening.server_close()
