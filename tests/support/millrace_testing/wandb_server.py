"""A W&B server on this machine, as much of one as the `wandb` library needs to write a run and to go on with it.

Its GraphQL API (which runs there are, and how far their history is), file streams (the lines of a history, each at
an offset) and uploads, which are taken and forgotten.
"""

import contextlib
import gzip
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ENTITY = "team"
_STREAM = re.compile(r"/files/[^/]+/[^/]+/([^/]+)/file_stream")


@dataclass(slots=True)
class StoredRun:
    """A run that was written to the server."""

    id: str
    project: str
    config: str = "{}"
    name: str = ""
    history: dict[int, str] = field(default_factory=dict)
    """JSON lines by their offsets."""
    num_repeated: int = 0
    """Lines whose offset was taken."""
    is_complete: bool = False

    def rows(self) -> list[dict[str, Any]]:
        """Return the history, in order."""
        return [json.loads(self.history[offset]) for offset in sorted(self.history)]


class WandbServer:
    """Keeps what clients write. Safe for several threads."""

    def __init__(self) -> None:
        self.url = ""
        self.runs: dict[str, StoredRun] = {}
        self.num_resumed = 0
        """Sessions that asked how far a run is, and were told."""
        self.unknown: list[str] = []
        """Operations that were asked for, and that it does not know."""
        self._lock = threading.Lock()

    def graphql(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Return the response to a GraphQL request."""
        found = re.search(r"(?:query|mutation)\s+(\w+)", asked["query"])
        given = asked.get("variables") or {}
        with self._lock:
            match found and found[1]:
                case "ServerFeaturesQuery":
                    return {"serverInfo": {"features": []}}
                case "Viewer":
                    teams: dict[str, list[object]] = {"edges": []}
                    return {"viewer": {"id": "1", "entity": ENTITY, "username": "ada", "flags": "{}", "teams": teams}}
                case "RunResumeStatus":
                    owner = {"id": "2", "name": ENTITY}
                    known = self.runs.get(given["name"])
                    self.num_resumed += known is not None
                    bucket = None if known is None else _resumed(known)
                    return {"model": {"id": "3", "name": given["project"], "entity": owner, "bucket": bucket}}
                case "UpsertBucket":
                    return {"upsertBucket": self._upsert(given)}
                case "CreateRunFiles":
                    files = [{"name": name, "uploadUrl": f"{self.url}/upload"} for name in given["files"]]
                    return {"createRunFiles": {"runID": given["run"], "uploadHeaders": [], "files": files}}
                case other:
                    self.unknown.append(str(other))
                    return {}

    def _upsert(self, given: dict[str, Any]) -> dict[str, Any]:
        id_ = given.get("name") or given["id"]
        is_new = id_ not in self.runs
        run = self.runs.setdefault(id_, StoredRun(id_, given.get("project") or ""))
        run.config = given.get("config") or run.config
        run.name = given.get("displayName") or run.name
        project = {"id": "3", "name": run.project, "entity": {"id": "2", "name": ENTITY}}
        bucket = {"id": run.id, "name": run.id, "displayName": run.name, "config": run.config, "project": project}
        return {"bucket": bucket | {"historyLineCount": len(run.history)}, "inserted": is_new}

    def stream(self, id_: str, sent: dict[str, Any]) -> None:
        """Keep the lines of a history."""
        with self._lock:
            run = self.runs[id_]
            run.is_complete |= bool(sent.get("complete"))
            part = (sent.get("files") or {}).get("wandb-history.jsonl") or {"offset": 0, "content": []}
            for at, line in enumerate(part["content"], start=part["offset"]):
                run.num_repeated += at in run.history
                run.history[at] = line


def _resumed(run: StoredRun) -> dict[str, Any]:
    lines = [run.history[at] for at in sorted(run.history)]
    return {
        "id": run.id,
        "name": run.id,
        "displayName": run.name,
        "config": run.config,
        "summaryMetrics": "{}",
        "historyLineCount": len(lines),
        "historyTail": json.dumps(lines[-1:]),
        "eventsLineCount": 0,
        "eventsTail": "[]",
        "logLineCount": 0,
        "tags": [],
        "notes": None,
        "wandbConfig": '{"t": 1}',
    }


@contextlib.contextmanager
def serving(server: WandbServer) -> Iterator[WandbServer]:
    """Serve it on a free port of this machine; `WANDB_BASE_URL` is its `url`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            data = self._body()
            if self.path == "/graphql":
                self._answer({"data": server.graphql(json.loads(data))})
            elif stream := _STREAM.fullmatch(self.path):
                server.stream(stream[1], json.loads(data))
                self._answer({})
            else:
                self._answer({}, status=404)

        def do_PUT(self) -> None:
            self._body()
            self._answer({})

        def _body(self) -> bytes:
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            return gzip.decompress(data) if self.headers.get("Content-Encoding") == "gzip" else data

        def _answer(self, value: dict[str, Any], status: int = 200) -> None:
            body = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            """Ignore the error, because clients are killed in these tests."""

    http = Server(("127.0.0.1", 0), Handler)
    server.url = f"http://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join(10)
