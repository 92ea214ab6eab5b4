"""The HTTP routes of the SDK, below /api/v1, and who may call them.

| route | what |
|---|---|
| `POST client/config`, `client/dynamic_config`, `telemetry`; `GET healthz`, `get_server_capabilities` | of clients |
| `POST create_session`, `session_heartbeat`, `sessions/{id}/finish`; `GET sessions/{id}` | sessions |
| `POST create_model`, `forward_backward`, `optim_step`, `load_weights` | futures |
| `POST save_weights`, `save_weights_for_sampler` | futures |
| `POST create_sampling_session`, `asample`; `GET samplers/{id}` | samples |
| `POST retrieve_future`, `cancel_future` | results, for which a poll is held |
| `POST get_info`, `weights_info`; `GET training_runs…`, `checkpoints` | what there is |

The caller's tenant is that of its token. Every id is looked up among the tenant's own, so that another's id is one of
nothing; operators have theirs together.
"""

import asyncio
import io
import logging
import tarfile
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as RoutingError
from starlette.requests import ClientDisconnect

from millrace.errors import (
    CapacityError,
    InternalError,
    InvalidSpecError,
    MillraceError,
    NotFoundError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
)
from millrace.internal.v1.tinker_pb2 import VerbResult
from millrace.rpc.access import ServerAccess
from millrace.telemetry import waits
from millrace.tinker.api import VERBS, Future, SessionGoneError, TinkerApi, read_body
from millrace.tinker.examples import refused
from millrace.tinker.log import error_of
from millrace.tinker.workers import Workers

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 32 << 20
"""Of one request. The SDK divides what it sends into parts of `_CHUNK_BYTES`."""
_CHUNK_BYTES = 5_000_000
HOLD_S = 25.0
"""How long a poll is held: the SDK gives up after 45 s, and asks again at once."""
_LOOK_S = 2.0  # between two looks into the store: another server of it may have executed the request
SESSION_S = 3600.0
"""A session without a heartbeat for this long has ended; the SDK sends one every 10 s."""
_KEY_PREFIX = "tml-"
_PROTOBUF = "application/x-protobuf"
# The grant of a caller comes from the rules of the public API; no such method exists in it.
_READS, _WRITES = "/millrace.v1.RunService/GetRun", "/millrace.v1.Tinker/Write"

Handler = Callable[[Request, str], Awaitable[Response]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AppSettings:
    """Bounds of the API."""

    hold_s: float = HOLD_S
    session_s: float = SESSION_S


class TinkerApp:
    """Handlers of the routes, over the calls and the workers."""

    def __init__(
        self, api: TinkerApi, workers: Workers, *, access: ServerAccess, settings: AppSettings | None = None
    ) -> None:
        self._api = api
        self._workers = workers
        self._access = access
        self._settings = settings or AppSettings()
        self._heard: dict[tuple[str, str], float] = {}
        """When each session that there is was heard of (monotonic)."""

    def make_app(self) -> FastAPI:
        """Return the application with all routes."""
        app = FastAPI(openapi_url=None, redirect_slashes=False)
        app.add_exception_handler(RoutingError, _routing_error)

        def route(method: str, path: str, handler: Handler, *, reads: bool = False) -> None:
            app.add_route(f"/api/v1/{path}", self._guarded(handler, reads=reads), methods=[method])

        app.add_route("/api/v1/healthz", _healthy, methods=["GET"])
        for path, answer in (
            ("client/config", _CLIENT_CONFIG),
            ("client/dynamic_config", {}),
            ("telemetry", {"status": "accepted"}),
            ("cancel_future", {}),
        ):
            route("POST", path, _fixed(answer), reads=True)
        route("GET", "get_server_capabilities", self.capabilities, reads=True)
        route("POST", "create_session", self._json(self._api.create_session))
        route("POST", "session_heartbeat", self.heartbeat)
        route("POST", "sessions/{session}/finish", self._of_path(self._api.finish_session, "session"))
        route("GET", "sessions/{session}", self._of_path(self._api.describe_session, "session"), reads=True)
        route("POST", "create_model", self._future(self._api.create_model))
        route("POST", "forward_backward", self.forward_backward)
        for kind in VERBS:
            route("POST", kind, self._future(partial(_verb, self._api, kind)))
        route("POST", "create_sampling_session", self._json(self._api.create_sampling_session))
        route("POST", "asample", self.sample)
        route("POST", "retrieve_future", self.retrieve, reads=True)
        route("POST", "get_info", self._json(self._api.get_info), reads=True)
        route("POST", "weights_info", self._json(self._api.weights_info), reads=True)
        route("GET", "samplers/{sampler}", self._of_path(self._api.get_sampler, "sampler"), reads=True)
        route("GET", "training_runs", self.training_runs, reads=True)
        route("GET", "training_runs/{model}", self._of_path(self._api.training_run, "model"), reads=True)
        route("GET", "training_runs/{model}/checkpoints", self.model_checkpoints, reads=True)
        route("GET", "training_runs/{model}/checkpoints/{folder}/{name}/archive", self.archive, reads=True)
        route("GET", "checkpoints", self.all_checkpoints, reads=True)
        return app

    def _guarded(self, handler: Handler, *, reads: bool) -> Callable[[Request], Awaitable[Response]]:
        """Return a route that calls the handler with the caller's tenant, and answers errors as the SDK reads them.

        `reads` says that a token that may only read is enough.
        """

        async def guarded(request: Request) -> Response:
            try:
                return await handler(request, self._tenant(request, reads=reads))
            except (MillraceError, ValueError) as error:
                return _refusal(error)
            except ClientDisconnect:
                return Response(status_code=499)
            except Exception as error:  # the edge of a request: it is answered, whatever happened
                logger.exception("a request failed", extra={"path": request.url.path})
                return _refusal(InternalError(f"{type(error).__name__}", remedy="see the server's log"))

        return guarded

    def _tenant(self, request: Request, *, reads: bool) -> str:
        """Return the tenant of the caller's token, empty for an operator and where no token is demanded.

        UnauthenticatedError without a valid one.

        The SDK demands that keys begin with `tml-`, so that a token is given to it with this before it.
        """
        shown = request.headers.getlist("x-api-key")
        values = [f"Bearer {key.removeprefix(_KEY_PREFIX)}" for key in shown] or request.headers.getlist(
            "authorization"
        )
        grant = self._access.admit(_READS if reads else _WRITES, [("authorization", value) for value in values])
        return grant.tenant

    def _json(self, call: Callable[[str, dict[str, Any]], dict[str, Any]]) -> Handler:
        """Return the handler of a call that takes a JSON body and returns one."""

        async def handler(request: Request, tenant: str) -> Response:
            body = read_body(await _body(request))
            self._touch(tenant, body.get("session_id"))
            return JSONResponse(await asyncio.to_thread(call, tenant, body))

        return handler

    def _of_path(self, call: Callable[[str, object], Any], field: str) -> Handler:
        """Return the handler of a call that takes an id of the path."""

        async def handler(request: Request, tenant: str) -> Response:
            return JSONResponse(await asyncio.to_thread(call, tenant, request.path_params[field]))

        return handler

    def _future(self, call: Callable[[str, dict[str, Any]], Future]) -> Handler:
        """Return the handler of a call that stores a request of a model."""

        async def handler(request: Request, tenant: str) -> Response:
            body = read_body(await _body(request))
            self._touch(tenant, body.get("session_id") or str(body.get("model_id", "")).partition(":")[0])
            return self._promise(await asyncio.to_thread(call, tenant, body))

        return handler

    def _promise(self, future: Future, **more: Any) -> Response:
        """Tell the worker of a request, and answer the id of its future."""
        self._workers.of(future).ask(future)
        return JSONResponse({"request_id": future.id, **more})

    def _touch(self, tenant: str, session_id: object, *, is_found: bool = False) -> None:
        """Note that a session is used; SessionGoneError if it was not for `session_s`.

        `is_found` says that there is such a session: what clients may make up is not remembered.
        """
        now, key = time.monotonic(), (tenant, str(session_id))
        if not is_found and key not in self._heard:
            return
        if now - self._heard.get(key, now) > self._settings.session_s:
            raise SessionGoneError(
                f"session {str(session_id)[:64]} had no heartbeat for {self._settings.session_s:g} s",
                remedy="make a new ServiceClient; models and checkpoints are kept",
            )
        self._heard[key] = now

    async def capabilities(self, _: Request, __: str) -> Response:
        """Answer which models there are."""
        most = self._workers.trainer.max_tokens or None
        models = [{"model_name": name, "max_context_length": most} for name in self._api.base_names]
        return JSONResponse({"supported_models": models})

    async def heartbeat(self, request: Request, tenant: str) -> Response:
        """Note that a session's client lives."""
        body = read_body(await _body(request))
        name = await asyncio.to_thread(self._api.session, tenant, body.get("session_id"))
        self._touch(tenant, name.session, is_found=True)
        return JSONResponse({"type": "session_heartbeat"})

    async def forward_backward(self, request: Request, tenant: str) -> Response:
        """Store a request to compute a loss, which comes as protobuf."""
        data = await _body(request)
        if _PROTOBUF not in request.headers.get("content-type", ""):
            raise refused("content-type", f"must be {_PROTOBUF}", request.headers.get("content-type"))
        future = await asyncio.to_thread(self._api.forward_backward, tenant, data)
        self._touch(tenant, future.name.home.session, is_found=True)
        return self._promise(future)

    async def sample(self, request: Request, tenant: str) -> Response:
        """Store a request for samples."""
        body = read_body(await _body(request))
        future, ids = await asyncio.to_thread(self._api.sample, tenant, body)
        self._touch(tenant, future.name.home.session, is_found=True)
        return self._promise(future, sample_sequence_ids=ids)

    async def retrieve(self, request: Request, tenant: str) -> Response:
        """Answer a request's result; hold the poll until there is one, or say that there is none yet."""
        body = read_body(await _body(request))
        future = await asyncio.to_thread(self._api.future, tenant, body.get("request_id"))
        worker = self._workers.of(future)
        ends = time.monotonic() + self._settings.hold_s
        with waits.waiting(f"the result of {future.id}", waits_on="", deadline_s=self._settings.hold_s):
            while (result := await asyncio.to_thread(self._api.result, future)) is None:
                left = ends - time.monotonic()
                if (why := self._broken(future)) is not None:
                    return JSONResponse({"error": why, "category": "server"})
                if left <= 0:
                    return JSONResponse(await self._pending(future))
                event = worker.ask(future)
                try:
                    await asyncio.wait_for(event.wait(), min(left, _LOOK_S))
                except TimeoutError:
                    continue
        worker.forget(future)
        return _answer(result)

    def _broken(self, future: Future) -> str | None:
        """Return why a request's model cannot go on; None if it can."""
        return next((why for name, why in self._workers.trainer.broken.items() if name == future.name), None)

    async def _pending(self, future: Future) -> dict[str, Any]:
        """Return what is answered of a request without a result, with the reason."""
        worker = self._workers.of(future)
        reason = None
        if not worker.ready.is_set():
            reason = "the server's worker is being started"
        else:
            executed = next((n for name, n in worker.executed.items() if name == future.name), 0)
            missing = await asyncio.to_thread(self._api.missing_before, future, executed=executed)
            if missing is not None:
                reason = f"request {missing} of the model has not arrived, which comes before this one"
                logger.warning("a model waits for a request", extra={"request": future.id, "missing": missing})
        pending = {"type": "try_again", "request_id": future.id, "queue_state": "active"}
        return pending if reason is None else {**pending, "queue_state_reason": reason}

    async def training_runs(self, request: Request, tenant: str) -> Response:
        """Answer the tenant's models."""
        found = await asyncio.to_thread(self._api.training_runs, tenant)
        page, cursor = _page(request, found)
        return JSONResponse({"training_runs": page, "cursor": cursor})

    async def model_checkpoints(self, request: Request, tenant: str) -> Response:
        """Answer the checkpoints of one model."""
        found = await asyncio.to_thread(self._api.checkpoints, tenant, request.path_params["model"])
        return JSONResponse({"checkpoints": found, "cursor": None})

    async def all_checkpoints(self, request: Request, tenant: str) -> Response:
        """Answer the checkpoints of all of the tenant's models."""

        def find() -> list[dict[str, Any]]:
            runs = self._api.training_runs(tenant)
            return [each for run in runs for each in self._api.checkpoints(tenant, run["training_run_id"])]

        page, cursor = _page(request, await asyncio.to_thread(find))
        return JSONResponse({"checkpoints": page, "cursor": cursor})

    async def archive(self, request: Request, tenant: str) -> Response:
        """Answer the adapter of a checkpoint as a tar of PEFT's two files."""
        params = request.path_params
        place = f"{params['folder']}/{params['name']}"
        data = await asyncio.to_thread(self._archive, tenant, params["model"], place)
        return Response(data, media_type="application/x-tar")

    def _archive(self, tenant: str, model_id: str, checkpoint_id: str) -> bytes:
        """Return the tar of a checkpoint's adapter."""
        files = self._api.peft_files(tenant, model_id, checkpoint_id)
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            for name, content in files.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
        return packed.getvalue()


_CLIENT_CONFIG = {
    "pjwt_auth_enabled": False,
    "proto_compress_fwdbwd": False,
    "fwdbwd_max_chunk_bytes_count": _CHUNK_BYTES,
    "sample_use_retrieve_futures": False,
    "custom_loss_server_side": False,
    "sample_join_sampling_session": False,
}
"""What the SDK asks first: which of its ways this server has."""


def _verb(api: TinkerApi, kind: str, tenant: str, body: dict[str, Any]) -> Future:
    """Store a request of a model of this kind."""
    return api.verb(tenant, kind, body)


def _fixed(answer: Mapping[str, Any]) -> Handler:
    """Return a handler that reads the body and always answers the same."""

    async def handler(request: Request, _: str) -> Response:
        await _body(request)
        return JSONResponse(dict(answer))

    return handler


async def _healthy(_: Request) -> Response:
    """Answer that the server lives."""
    return JSONResponse({"status": "ok"})


async def _body(request: Request) -> bytes:
    """Return a request's body; CapacityError (TOO_LARGE) past `MAX_BODY_BYTES`, before all of it is read."""
    parts, size = list[bytes](), 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise CapacityError(
                f"the body has more than {MAX_BODY_BYTES} bytes",
                reason="TOO_LARGE",
                remedy="send less at once; the SDK divides what it sends by what client/config says",
            )
        parts.append(part)
    return b"".join(parts)


def _page(request: Request, found: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Return the part of a list that `limit` and `offset` of the query ask for, and where it is in the list."""

    def number(name: str, default: int) -> int:
        text = request.query_params.get(name, str(default))
        if not (text.isascii() and text.isdigit()) or len(text) > 9:
            raise refused(name, "must be a whole number", text)
        return int(text)

    limit, offset = number("limit", 100), number("offset", 0)
    return found[offset : offset + limit], {"limit": limit, "offset": offset, "total_count": len(found)}


def _answer(result: VerbResult) -> Response:
    """Return a stored result as the SDK reads it."""
    match result.WhichOneof("result"):
        case "protobuf":
            return Response(result.protobuf, media_type=_PROTOBUF)
        case "json":
            return Response(result.json, media_type="application/json")
        case _:
            return JSONResponse({"error": result.error.message, "category": result.error.category or "server"})


_STATUS: dict[type[MillraceError], int] = {
    UnauthenticatedError: 401,
    PermissionDeniedError: 403,
    NotFoundError: 404,
    SessionGoneError: 410,
    CapacityError: 413,
    UnavailableError: 503,
    InternalError: 500,
}
"""Statuses of errors; what is missing is 400. Never 409: the SDK would repeat what can never succeed."""


def _refusal(error: MillraceError | ValueError) -> Response:
    """Return an error as the SDK reads it."""
    if not isinstance(error, MillraceError):  # of a field of the body
        error = InvalidSpecError(refused("body", str(error)).violations)
    status = next((code for kind, code in _STATUS.items() if isinstance(error, kind)), 400)
    made = error_of(error)
    return JSONResponse({"error": made.message, "category": made.category, "reason": error.reason}, status_code=status)


async def _routing_error(request: Request, error: Exception) -> Response:
    """Answer a path or method that there is not."""
    status = error.status_code if isinstance(error, RoutingError) else 500
    message = f"there is no {request.method} {request.url.path}"
    return JSONResponse({"error": message, "category": "user", "reason": "NO_ROUTE"}, status_code=status)
