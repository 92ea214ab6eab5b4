"""The routes of the dashboard: pages, the JSON behind them, login, and the three things that can be asked of a run."""

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib import resources
from urllib.parse import parse_qsl

from fastapi import FastAPI, Request
from fastapi.responses import Response

from millrace.decoding import decode_object
from millrace.errors import CorruptObjectError, InvalidSpecError, NotFoundError, Violation
from millrace.orchestrator.beside import RunSource
from millrace.readers.dashboard.answers import of_message, problem_of, to_json
from millrace.readers.dashboard.reading import ReaderClient
from millrace.readers.dashboard.web.guard import CODE_S, CSRF_HEADER, HEADERS, SESSION_S, Caller, Guard, Sessions

logger = logging.getLogger(__name__)

QUESTIONS = ("metrics", "events", "samples", "lineage", "timeline")
"""What the reader answers about a run, by the last part of the path."""
ACTIONS = ("pause", "resume", "cancel")
MAX_BODY_BYTES = 16 << 10
MAX_QUERY_CHARS = 8 << 10
MAX_PARAMS = 64
_PAGES = ("/", "/runs", "/compare", "/login")

Handle = Callable[[Request], Awaitable[Response]]


class Dashboard:
    """The application over one orchestrator and its reader."""

    def __init__(
        self, source: RunSource, reader: ReaderClient, guard: Guard, sessions: Sessions, *, port: int, is_tls: bool
    ) -> None:
        self._source = source
        self._reader = reader
        self._guard = guard
        self._sessions = sessions
        self._files = load()
        self._cookie = f"millrace_session_{port}"  # cookies of one host are those of all its ports
        self._is_tls = is_tls

    def app(self) -> FastAPI:
        """The ASGI application."""
        app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
        app.middleware("http")(self._answer)
        for status in (404, 405):
            app.add_exception_handler(status, _no_route)
        for path, handle in {
            "/api/session": self._session,
            "/api/runs": self._runs,
            "/api/runs/{run}": self._run,
            "/api/runs/{run}/samples/{sample}": self._sample,
            "/api/runs/{run}/samples/{sample}/tokens": self._tokens,
            "/login/{code}": self._login,
            "/static/{name}": self._static,
        }.items():
            app.add_api_route(path, handle, methods=["GET"])
        app.add_api_route("/api/runs/{run}/{question}", self._question, methods=["GET"])
        app.add_api_route("/api/login-codes", self._new_code, methods=["POST"])
        app.add_api_route("/api/login", self._login_by_form, methods=["POST"])
        app.add_api_route("/api/logout", self._logout, methods=["POST"])
        app.add_api_route("/api/runs/{run}/{action}", self._act, methods=["POST"])
        app.add_api_route("/{path:path}", self._page, methods=["GET"])
        return app

    async def _answer(self, request: Request, handle: Handle) -> Response:
        """Whatever goes wrong is an answer in the shape of the others; every answer has the headers."""
        try:
            if len(request.url.query) > MAX_QUERY_CHARS:
                wrong = Violation(field="query", message=f"has more than {MAX_QUERY_CHARS} characters")
                raise InvalidSpecError([wrong], reason="QUERY_INVALID")
            self._guard.check_host(request.headers.getlist("host"))
            response = await handle(request)
        except Exception as error:  # noqa: BLE001 - the edge of a request: the browser hears what is wrong
            status, body = problem_of(error)
            response = _Answer(to_json(body), status)
            if status == 401:
                response.headers["WWW-Authenticate"] = "Bearer"
        for name, value in HEADERS.items():
            response.headers[name] = value
        response.headers.setdefault("Cache-Control", "no-store")
        return response

    def _caller(self, request: Request) -> Caller:
        return self._guard.admit(request.headers.getlist("authorization"), request.cookies.get(self._cookie, ""))

    def _writer(self, request: Request) -> Caller:
        caller = self._caller(request)
        self._guard.admit_write(
            caller,
            csrf=request.headers.get(CSRF_HEADER, ""),
            fetch_site=request.headers.get("sec-fetch-site", ""),
        )
        return caller

    async def _session(self, request: Request) -> Response:
        caller = self._caller(request)
        csrf = caller.session.csrf if caller.session is not None else ""
        who = {"name": caller.grant.name, "csrf": csrf, "is_open": not self._guard.demands_token}
        return _Answer(to_json(who | {"may_write": caller.grant.may_write()}))

    async def _runs(self, request: Request) -> Response:
        self._caller(request)
        runs = self._source.list_runs(config=_params(request).get("config", ""))
        answer = {"runs": runs, "trouble": self._source.trouble()}
        return _Answer(await asyncio.to_thread(to_json, answer))  # thousands of runs take seconds

    async def _run(self, request: Request, run: str) -> Response:
        self._caller(request)
        found = await self._source.find_run(run)
        return _Answer(to_json(found | {"why": self._source.explain(run), "trouble": self._source.trouble()}))

    async def _question(self, request: Request, run: str, question: str) -> Response:
        self._caller(request)
        if question == "checkpoints":
            return _Answer(to_json({"checkpoints": await self._source.checkpoints(run)}))
        if question == "why":
            return _Answer(to_json(self._source.explain(run)))
        if question not in QUESTIONS:
            raise NotFoundError(f"nothing of a run is called {question[:40]!r}", reason="PAGE_NOT_FOUND")
        return await self._ask(question, run, _params(request))

    async def _sample(self, request: Request, run: str, sample: str) -> Response:
        self._caller(request)
        return await self._ask("sample", run, {"id": sample})

    async def _tokens(self, request: Request, run: str, sample: str) -> Response:
        self._caller(request)
        return await self._ask("tokens", run, {**_params(request), "id": sample})

    async def _ask(self, question: str, run: str, params: dict[str, str]) -> Response:
        answer = await self._reader.ask(question, self._source.uid_of(run), params)
        return _Answer(answer.body, answer.status)

    async def _act(self, request: Request, run: str, action: str) -> Response:
        caller = self._writer(request)
        if action == "audit":  # it changes nothing, but it costs: only our own pages and programs may ask for it
            return _Answer(to_json(of_message(await self._source.audit(run))))
        self._guard.admit_action(caller)
        if action not in ACTIONS:
            raise NotFoundError(f"nothing of a run is called {action[:40]!r}", reason="PAGE_NOT_FOUND")
        body = await _body(request)
        reason = str(body.get("reason", ""))[:500] or f"from the dashboard{_by(caller)}"
        await self._source.act(run, action, reason=reason)
        return _Answer(to_json({"done": action}))

    async def _new_code(self, request: Request) -> Response:
        grant = self._guard.bearer(request.headers.getlist("authorization"))
        code = self._sessions.new_code(grant)
        return _Answer(to_json({"path": f"/login/{code}", "expires_s": CODE_S}))

    async def _login(self, code: str) -> Response:
        secret = self._sessions.redeem(code)
        if secret is None:
            return self._file("login.html", 403)
        # A redirect would still be the request of the page that led here, and not have our cookie, which is strict.
        response = _Answer(b'<!doctype html><meta http-equiv="refresh" content="0; url=/">', 200)
        response.headers["Content-Type"] = "text/html; charset=utf-8"
        self._set_cookie(response, secret)
        return response

    async def _login_by_form(self, request: Request) -> Response:
        """A token that somebody types into the page, where no command line is at hand."""
        body = await _body(request)
        grant = self._guard.bearer([f"Bearer {body.get('token', '')}"])
        response = _Answer(b"{}")
        self._set_cookie(response, self._sessions.open(grant))
        return response

    async def _logout(self, request: Request) -> Response:
        self._sessions.end(self._writer(request).secret)
        response = _Answer(b"{}")
        response.delete_cookie(self._cookie, path="/")
        return response

    async def _static(self, request: Request, name: str) -> Response:
        if name not in self._files:
            raise NotFoundError("there is no such file", reason="PAGE_NOT_FOUND")
        return self._file(name, 200, seen=request.headers.get("if-none-match", ""))

    async def _page(self, request: Request, path: str) -> Response:
        """All pages are one document, whose script draws what the address names."""
        if path.startswith("api/") or not (f"/{path}" in _PAGES or path.startswith("runs/")):
            raise NotFoundError("there is no such page", reason="PAGE_NOT_FOUND", remedy="begin at /")
        if path == "login":
            return self._file("login.html", 200)
        secret = request.cookies.get(self._cookie, "")
        if self._sessions.find(secret) is not None:
            return self._file("index.html", 200)
        if self._guard.demands_token:
            return self._file("login.html", 401)
        response = self._file("index.html", 200)
        self._set_cookie(response, self._sessions.open(self._guard.bearer([])))
        return response

    def _set_cookie(self, response: Response, secret: str) -> None:
        response.set_cookie(
            self._cookie, secret, max_age=int(SESSION_S), path="/", httponly=True, samesite="strict",
            secure=self._is_tls,
        )  # fmt: skip

    def _file(self, name: str, status: int, *, seen: str = "") -> Response:
        file = self._files[name]
        headers = {"ETag": file.etag, "Cache-Control": "no-cache", "Content-Type": file.content_type}
        if seen == file.etag:
            return _Answer(b"", 304, headers)
        return _Answer(file.body, status, headers)


async def _no_route(_: Request, __: Exception) -> Response:
    error = NotFoundError("there is no such page", reason="PAGE_NOT_FOUND", remedy="begin at /")
    status, body = problem_of(error)
    return _Answer(to_json(body), status)


class _Answer(Response):
    """An answer of ours; JSON unless its headers say otherwise."""

    media_type = "application/json"


def _params(request: Request) -> dict[str, str]:
    """The parameters of a request, each once."""
    query = request.url.query
    if query.count("&") >= MAX_PARAMS:
        wrong = Violation(field="query", message=f"has more than {MAX_PARAMS} parameters", source="request")
        raise InvalidSpecError([wrong], reason="QUERY_INVALID", remedy="give each parameter once")
    pairs = parse_qsl(query, keep_blank_values=True, errors="replace")
    found = dict(pairs)
    if len(found) < len(pairs):
        wrong = Violation(field="query", message="names a parameter twice", source="request")
        raise InvalidSpecError([wrong], reason="QUERY_INVALID", remedy="give each parameter once")
    return found


async def _body(request: Request) -> dict[str, object]:
    """The JSON object that a write brings, if any."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        wrong = Violation(field="Content-Type", message="must be application/json", source="request")
        raise InvalidSpecError([wrong], reason="BODY_INVALID", remedy="send a JSON object, or {}")
    try:
        data = await request.body() or b"{}"
        return decode_object(data, what="the body", reason="BODY_INVALID", max_bytes=MAX_BODY_BYTES)
    except CorruptObjectError as error:
        wrong = Violation(field="body", message=error.message, source="request")
        raise InvalidSpecError([wrong], reason="BODY_INVALID", remedy="send a JSON object, or {}") from error


def _by(caller: Caller) -> str:
    return f" by {caller.grant.name}" if caller.grant.name else ""


# The files that browsers get: read once, from the package alone.

_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticFile:
    """One file."""

    body: bytes
    content_type: str
    etag: str


def load() -> dict[str, StaticFile]:
    """Every file by its name."""
    found: dict[str, StaticFile] = {}
    for entry in resources.files("millrace.readers.dashboard").joinpath("static").iterdir():
        ending = entry.name[entry.name.rfind(".") :]
        if ending in _TYPES:
            body = entry.read_bytes()
            found[entry.name] = StaticFile(
                body=body,
                content_type=f"{_TYPES[ending]}; charset=utf-8",
                etag=f'"{hashlib.sha256(body).hexdigest()[:16]}"',
            )
    return found
