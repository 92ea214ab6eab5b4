"""The routes of the dashboard (pages, JSON, login, three actions), and the guard before them."""

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from urllib.parse import parse_qsl

from fastapi import FastAPI, Request
from fastapi.responses import Response

from millrace.decoding import decode_object
from millrace.errors import (
    CapacityError,
    CorruptObjectError,
    InvalidSpecError,
    NotFoundError,
    PermissionDeniedError,
    UnauthenticatedError,
    Violation,
)
from millrace.orchestrator.beside import RunSource, RunSources
from millrace.readers.dashboard.answers import of_message, problem_of, to_json
from millrace.readers.dashboard.reading import ReaderClient
from millrace.rpc.access import Grant, ServerAccess, is_loopback, read_only
from millrace.rpc.tokens import token_digest

logger = logging.getLogger(__name__)

QUESTIONS = ("metrics", "events", "samples", "lineage", "timeline")
"""What the reader answers about a run, by the last part of the path."""
ACTIONS = ("pause", "resume", "cancel")
MAX_BODY_BYTES = 16 << 10
MAX_QUERY_CHARS = 8 << 10
MAX_PARAMS = 64
_PAGES = ("/", "/runs", "/compare", "/login")

Handle = Callable[[Request], Awaitable[Response]]


# The door of the dashboard: hosts, tokens, cookies, and what a browser may do with an answer.
#
#     GET pages and scripts     everybody: they hold nothing of a run
#     GET /api/…                the cookie of a session, or a bearer token of the public API
#     POST /api/…               a bearer token, or a session with its CSRF token in `X-Millrace-CSRF`, from our pages
#
# What changes a run needs a token that may write, too.
#
# Where the public API demands no token, a browser gets its session without a code, and a program needs none; a page
# of another site can send neither our header, nor JSON without being asked about it, which we never answer. A name
# that resolves to this machine but is not its own (DNS rebinding) is turned away: where nobody must show a token, and
# on loopback always, `Host` must be an address or `localhost`.

CSRF_HEADER = "x-millrace-csrf"
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
    "object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Frame-Options": "DENY",
}
"""Of every answer."""


# Who looks: one-time codes become sessions, and a session is a cookie that no script can read.

CODE_S = 120.0
"""How long a code can be used."""
SESSION_S = 12 * 3600.0
"""How long a session lasts; the token that it came from may end it before."""
MAX_CODES, MAX_SESSIONS = 256, 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A browser that has logged in."""

    grant: Grant
    csrf: str
    """What its writes must show in a header."""
    ends: float


class Sessions:
    """Codes and sessions, kept as digests; nothing of them outlives the process."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._codes: OrderedDict[bytes, tuple[Grant, float]] = OrderedDict()
        self._sessions: OrderedDict[bytes, Session] = OrderedDict()

    def new_code(self, grant: Grant) -> str:
        """Return a one-time code that opens a session with this grant within `CODE_S` seconds.

        CapacityError while too many codes are unused.
        """
        now = self._clock()
        for digest in [digest for digest, (_, ends) in self._codes.items() if ends <= now]:
            del self._codes[digest]
        if len(self._codes) >= MAX_CODES:
            raise CapacityError(
                f"{MAX_CODES} codes are unused", reason="TOO_MANY_CODES", remedy=f"try again in {CODE_S:.0f} s"
            )
        code = secrets.token_urlsafe(24)
        self._codes[token_digest(code)] = (grant, now + CODE_S)
        return code

    def redeem(self, code: str) -> str | None:
        """Open a session for a one-time code and return the secret for its cookie; the code cannot be used again.

        None if it is invalid or too old, or its token is not accepted any more.
        """
        found = self._codes.pop(token_digest(code), None)
        if found is None:
            return None
        grant, ends = found
        return self.open(grant) if self._clock() < ends and grant.holds() else None

    def open(self, grant: Grant) -> str:
        """Open a session with this grant and return the secret for its cookie.

        Where there are too many, the oldest ends.
        """
        while len(self._sessions) >= MAX_SESSIONS:
            self._sessions.popitem(last=False)
        secret = secrets.token_urlsafe(32)
        self._sessions[token_digest(secret)] = Session(
            grant=grant, csrf=secrets.token_urlsafe(24), ends=self._clock() + SESSION_S
        )
        return secret

    def find(self, secret: str) -> Session | None:
        """Return the session with the `secret` of a cookie; None if there is none.

        None also if the session or its token has expired; the session is then removed.
        """
        digest = token_digest(secret)
        session = self._sessions.get(digest)
        if session is None:
            return None
        if self._clock() >= session.ends or not session.grant.holds():
            del self._sessions[digest]
            return None
        return session

    def end(self, secret: str) -> None:
        """End the session with this secret, if there is one."""
        self._sessions.pop(token_digest(secret), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who has been let in."""

    grant: Grant
    session: Session | None
    """None for a bearer token, and for programs where none is demanded."""
    is_bearer: bool = False
    secret: str = ""
    """Of the session."""


class Guard:
    """Decides for one server."""

    def __init__(self, access: ServerAccess, sessions: Sessions, *, host: str) -> None:
        """Create the guard; `access` is that of the public API, `host` is where the server listens."""
        self._access = access
        self._sessions = sessions
        self._is_checking_host = is_loopback(host) or not self.demands_token

    @property
    def demands_token(self) -> bool:
        """Return whether callers need a token, because the public API demands one."""
        return self._access.tokens is not None

    def check_host(self, values: Sequence[str]) -> None:
        """Raise InvalidSpecError unless there is one `Host` header, and it is an address or localhost.

        `values` are the values of all `Host` headers. Any other name may be another site's for this machine. Nothing is
        checked where the server listens beyond loopback and demands tokens.
        """
        if not self._is_checking_host:
            return
        value = values[0] if len(values) == 1 else ""
        if not _is_own(value):
            wrong = Violation(field="Host", value=value[:100], message="is neither an address nor localhost")
            raise InvalidSpecError(
                [wrong], reason="HOST_REFUSED", remedy="open the dashboard as http://127.0.0.1:PORT/, or set up tokens"
            )

    def bearer(self, authorizations: Sequence[str]) -> Grant:
        """Return the grant of a token of the public API, given the values of all authorization headers.

        Raise UnauthenticatedError without a valid one, where it is demanded.
        """
        metadata = [("authorization", value) for value in authorizations]
        # As a method that only reads. What changes a run is checked by `admit_action`.
        return self._access.admit("/millrace.v1.RunService/GetRun", metadata)

    def admit(self, authorizations: Sequence[str], secret: str) -> Caller:
        """Return the caller of a request, by the token in its authorization headers, or by the session `secret` of its
        cookie.

        Raise UnauthenticatedError without either, where the public API demands a token.
        """
        if authorizations:
            return Caller(grant=self.bearer(authorizations), session=None, is_bearer=True)
        session = self._sessions.find(secret) if secret else None
        if session is None and not self.demands_token:
            return Caller(grant=self.bearer([]), session=None)
        if session is None:
            raise UnauthenticatedError(
                "log in first",
                reason="UNAUTHENTICATED",
                remedy="`millrace dashboard` opens this page with a code that logs you in",
            )
        return Caller(grant=session.grant, session=session, secret=secret)

    def admit_write(self, caller: Caller, *, csrf: str, fetch_site: str) -> None:
        """Raise PermissionDeniedError unless a POST comes from a page of this server, or from a caller with a token.

        `csrf` is the value of our header, which a session must show, `fetch_site` that of `Sec-Fetch-Site`; empty if
        missing.
        """
        if caller.is_bearer and self.demands_token:
            return
        # Without a session (no token is demanded) the browser's own header alone can show that another site's page
        # asks.
        is_known = caller.session is None or hmac.compare_digest(
            caller.session.csrf.encode(), csrf.encode(errors="surrogateescape")
        )
        if not is_known or fetch_site not in ("", "same-origin"):
            raise PermissionDeniedError(
                "this did not come from a page of the dashboard",
                reason="CSRF_REFUSED",
                remedy="load the page again; programs show a bearer token instead of a cookie",
            )

    def admit_action(self, caller: Caller) -> None:
        """Raise PermissionDeniedError unless the caller's token may change something."""
        if not caller.grant.may_write():
            raise read_only()


def _is_own(value: str) -> bool:
    """Return whether a `Host` header is an IP address or `localhost`, with or without a port.

    Anything else may be a name of another site that leads here.
    """
    name, bracket, rest = value.partition("]") if value.startswith("[") else ("", "", "")
    if bracket:
        host, port = name[1:], rest.removeprefix(":")
        if rest and not rest.startswith(":"):
            return False
    else:
        host, _, port = value.partition(":")
    if port and not (port.isascii() and port.isdecimal()):
        return False
    if host.lower() == "localhost":
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class Dashboard:
    """The application over one orchestrator and its reader."""

    def __init__(
        self, sources: RunSources, reader: ReaderClient, guard: Guard, sessions: Sessions, *, port: int, is_tls: bool
    ) -> None:
        """Create the dashboard.

        `sources` answers for the orchestrator, `reader` for the log, `port` is where it listens.
        """
        self._sources = sources
        self._reader = reader
        self._guard = guard
        self._sessions = sessions
        self._files = load()
        self._cookie = f"millrace_session_{port}"  # cookies of one host are those of all its ports
        self._is_tls = is_tls

    def app(self) -> FastAPI:
        """Return the ASGI application with all routes."""
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
        # Last, because it matches every path.
        app.add_api_route("/{path:path}", self._page, methods=["GET"])
        return app

    async def _answer(self, request: Request, handle: Handle) -> Response:
        """Answer a request by `handle`, after checking its size and host; an error becomes an answer of JSON.

        Every answer gets the security headers.
        """
        try:
            if len(request.url.query) > MAX_QUERY_CHARS:
                wrong = Violation(field="query", message=f"has more than {MAX_QUERY_CHARS} characters")
                raise InvalidSpecError([wrong], reason="QUERY_INVALID")
            self._guard.check_host(request.headers.getlist("host"))
            response = await handle(request)
        except Exception as error:  # noqa: BLE001 - the edge of a request: the browser gets the error
            status, body = problem_of(error)
            response = _Answer(to_json(body), status)
            if status == 401:
                response.headers["WWW-Authenticate"] = "Bearer"
        for name, value in HEADERS.items():
            response.headers[name] = value
        # Static files name their own.
        response.headers.setdefault("Cache-Control", "no-store")
        return response

    def _caller(self, request: Request) -> Caller:
        """Return who sent a request; UnauthenticatedError if it may not be answered."""
        return self._guard.admit(request.headers.getlist("authorization"), request.cookies.get(self._cookie, ""))

    def _seen(self, request: Request) -> RunSource:
        """Return the runs that the sender of a request sees; UnauthenticatedError if it may not be answered."""
        return self._sources.seen_by(self._caller(request).grant.tenant)

    def _writer(self, request: Request) -> Caller:
        """Return who sent a POST; PermissionDeniedError unless it comes from one of our pages, or with a token."""
        caller = self._caller(request)
        self._guard.admit_write(
            caller,
            csrf=request.headers.get(CSRF_HEADER, ""),
            fetch_site=request.headers.get("sec-fetch-site", ""),
        )
        return caller

    async def _session(self, request: Request) -> Response:
        """Answer with the caller's name, tenant and CSRF token, whether it may write, and whether no token is
        demanded.
        """
        caller = self._caller(request)
        csrf = caller.session.csrf if caller.session is not None else ""
        who = {
            "name": caller.grant.name,
            "tenant": caller.grant.tenant,
            "csrf": csrf,
            "is_open": not self._guard.demands_token,
        }
        return _Answer(to_json(who | {"may_write": caller.grant.may_write()}))

    async def _runs(self, request: Request) -> Response:
        """Answer with all runs that the caller sees, and what of Redis or the store does not answer.

        With the parameter `config` only with the runs whose configs match its words.
        """
        seen = self._seen(request)
        runs = seen.list_runs(config=_params(request).get("config", ""))
        answer = {"runs": runs, "trouble": seen.trouble()}
        return _Answer(await asyncio.to_thread(to_json, answer))  # thousands of runs take seconds

    async def _run(self, request: Request, run: str) -> Response:
        """Answer with the run `run`, with why it does not move, and with what of Redis or the store does not answer."""
        seen = self._seen(request)
        found = await seen.find_run(run)
        return _Answer(to_json(found | {"why": seen.explain(run), "trouble": seen.trouble()}))

    async def _question(self, request: Request, run: str, question: str) -> Response:
        """Answer the question `question` about a run.

        The orchestrator answers for checkpoints and waits, the reader for everything else.
        """
        seen = self._seen(request)
        if question == "checkpoints":
            return _Answer(to_json({"checkpoints": await seen.checkpoints(run)}))
        if question == "why":
            return _Answer(to_json(seen.explain(run)))
        if question not in QUESTIONS:
            raise NotFoundError(f"nothing of a run is called {question[:40]!r}", reason="PAGE_NOT_FOUND")
        return await self._ask(question, seen.uid_of(run), _params(request))

    async def _sample(self, request: Request, run: str, sample: str) -> Response:
        """Answer with the sample `sample` (its id) of the run `run`."""
        return await self._ask("sample", self._seen(request).uid_of(run), {"id": sample})

    async def _tokens(self, request: Request, run: str, sample: str) -> Response:
        """Answer with a page of the tokens of a run's sample `sample` (its id); the request's parameters choose the
        page.
        """
        return await self._ask("tokens", self._seen(request).uid_of(run), {**_params(request), "id": sample})

    async def _ask(self, question: str, uid: str, params: dict[str, str]) -> Response:
        """Pass a question about the run `uid` on to the reader, and return the reader's answer."""
        answer = await self._reader.ask(question, uid, params)
        return _Answer(answer.body, answer.status)

    async def _act(self, request: Request, run: str, action: str) -> Response:
        """Pause, resume, cancel or audit a run, if the caller may; an audit is answered with its report."""
        caller = self._writer(request)
        seen = self._sources.seen_by(caller.grant.tenant)
        if action == "audit":  # it changes nothing, but it costs: only our own pages and programs may ask for it
            return _Answer(to_json(of_message(await seen.audit(run))))
        self._guard.admit_action(caller)
        if action not in ACTIONS:
            raise NotFoundError(f"nothing of a run is called {action[:40]!r}", reason="PAGE_NOT_FOUND")
        body = await _body(request)
        reason = str(body.get("reason", ""))[:500] or f"from the dashboard{_by(caller)}"
        await seen.act(run, action, reason=reason)
        return _Answer(to_json({"done": action}))

    async def _new_code(self, request: Request) -> Response:
        """Answer with the path of a one-time login for the caller's token."""
        grant = self._guard.bearer(request.headers.getlist("authorization"))
        code = self._sessions.new_code(grant)
        return _Answer(to_json({"path": f"/login/{code}", "expires_s": CODE_S}))

    async def _login(self, code: str) -> Response:
        """Open a session for a one-time code and set its cookie, on a page that leads the browser to the first page.

        If the code is invalid, answer with the login page.
        """
        secret = self._sessions.redeem(code)
        if secret is None:
            return self._file("login.html", 403)
        # A redirect would still be the request of the page that led here, and not have our cookie, which is strict.
        response = _Answer(b'<!doctype html><meta http-equiv="refresh" content="0; url=/">', 200)
        response.headers["Content-Type"] = "text/html; charset=utf-8"
        self._set_cookie(response, secret)
        return response

    async def _login_by_form(self, request: Request) -> Response:
        """Open a session for the token in the request's body, which a user typed into the page, and set its cookie."""
        body = await _body(request)
        grant = self._guard.bearer([f"Bearer {body.get('token', '')}"])
        response = _Answer(b"{}")
        self._set_cookie(response, self._sessions.open(grant))
        return response

    async def _logout(self, request: Request) -> Response:
        """End the caller's session and delete its cookie."""
        self._sessions.end(self._writer(request).secret)
        response = _Answer(b"{}")
        response.delete_cookie(self._cookie, path="/")
        return response

    async def _static(self, request: Request, name: str) -> Response:
        """Answer with the file `name` of the package; with 304 if the browser has it already."""
        if name not in self._files:
            raise NotFoundError("there is no such file", reason="PAGE_NOT_FOUND")
        return self._file(name, 200, seen=request.headers.get("if-none-match", ""))

    async def _page(self, request: Request, path: str) -> Response:
        """Answer with the one document of all pages, whose script draws what the address names, or with the login page.

        Where no token is demanded, a browser gets its session here. NotFoundError if there is no page at `path`.
        """
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
        """Set the session's cookie, which no script can read and no other site's request carries."""
        response.set_cookie(
            self._cookie, secret, max_age=int(SESSION_S), path="/", httponly=True, samesite="strict",
            secure=self._is_tls,
        )  # fmt: skip

    def _file(self, name: str, status: int, *, seen: str = "") -> Response:
        """Return the answer with a file of the package; 304 if `seen`, the ETag that the browser has, is the file's."""
        file = self._files[name]
        headers = {"ETag": file.etag, "Cache-Control": "no-cache", "Content-Type": file.content_type}
        if seen == file.etag:
            return _Answer(b"", 304, headers)
        return _Answer(file.body, status, headers)


async def _no_route(_: Request, __: Exception) -> Response:
    """Return the 404 for an address or method that no route has."""
    error = NotFoundError("there is no such page", reason="PAGE_NOT_FOUND", remedy="begin at /")
    status, body = problem_of(error)
    return _Answer(to_json(body), status)


class _Answer(Response):
    """An answer of ours; JSON unless its headers say otherwise."""

    media_type = "application/json"


def _params(request: Request) -> dict[str, str]:
    """Return the parameters of a request's query; InvalidSpecError if one comes twice, or there are too many."""
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
    """Return the JSON object in a write's body, empty without a body; raise InvalidSpecError for anything else."""
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
    """Return " by NAME" for a caller whose token has a name; else an empty text."""
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
    """Read every static file of the dashboard, and return them by name."""
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
