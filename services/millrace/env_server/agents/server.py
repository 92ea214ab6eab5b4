"""The HTTP server at which agents of a worker's rollouts find the policy; each shows the token of its rollout.

It listens on loopback, at a port that the system gives it. `MILLRACE_AGENT_LISTEN` of the env-server (`HOST` or
`HOST:FIRST-LAST`, see `listen`) has it listen elsewhere, for agents in containers or on other hosts.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence

from aiohttp import web

from millrace.env_server.agents.asked import Api
from millrace.env_server.agents.sessions import (
    CHATS,
    ROUTES,
    AgentAddress,
    AgentAnswer,
    AgentLimits,
    AgentSession,
    Ask,
    refusal,
)
from millrace.env_server.isolation.inherited import LISTEN_VARIABLE, AgentListen
from millrace.errors import UnavailableError

logger = logging.getLogger(__name__)

# Tokens of ended rollouts that are remembered: a late request is answered with 410 rather than 401.
_ENDED_KEPT = 4096
# aiohttp's own limit is 1 MiB, which a long conversation exceeds.
_MAX_BODY_BYTES = 64 << 20


class AgentServer:
    """The HTTP server of one worker, opened with the first address."""

    def __init__(self, listen: AgentListen | None = None) -> None:
        """Make a server that does not listen yet; `listen` is where it shall, by default as this process's
        variables say.
        """
        self._listen = AgentListen.from_environ(os.environ) if listen is None else listen
        self._sessions: dict[str, AgentSession] = {}
        self._ended: OrderedDict[bytes, None] = OrderedDict()
        self._runner: web.AppRunner | None = None
        self._opening = asyncio.Lock()
        self._port = 0

    @contextlib.asynccontextmanager
    async def opened(
        self, ask: Ask, *, model: str, limits: AgentLimits | None = None, drops: Sequence[str] = ()
    ) -> AsyncIterator[tuple[AgentAddress, AgentSession]]:
        """Yield an address for the agent of one rollout, and its session, until the block is left.

        `ask` makes the model calls that the agent asks for, and `model` is the name that answers show. `limits` bound
        the agent's calls, None by the defaults. `drops` are request parameters that are ignored rather than refused.
        Once the block is left, requests with the address's token get 410. Starts to listen at the first call; raises
        UnavailableError if no port is free.
        """
        # Rollouts that begin at the same time must not open two servers.
        async with self._opening:
            if self._runner is None:
                await self._start()
        session = AgentSession(ask, model=model, limits=limits, drops=drops)
        self._sessions[session.token] = session
        host = (
            # IPv6 addresses are in brackets in a URL.
            f"[{self._listen.advertised_host}]" if ":" in self._listen.advertised_host else self._listen.advertised_host
        )
        try:
            yield AgentAddress(base_url=f"http://{host}:{self._port}/v1", api_key=session.token, model=model), session
        finally:
            del self._sessions[session.token]
            session.close()
            self._ended[_digest(session.token)] = None
            while len(self._ended) > _ENDED_KEPT:
                self._ended.popitem(last=False)

    async def close(self) -> None:
        """Stop listening; do nothing if no address was opened."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _start(self) -> None:
        """Start to listen at the first free of the configured ports; raise UnavailableError if none is free."""
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        for path, api in ROUTES.items():
            app.router.add_post(path, self._handler(api))
        app.router.add_get("/v1/models", self._models)
        app.router.add_route("*", "/{path:.*}", _no_such_path)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        problem: OSError | None = None
        for port in self._listen.ports:
            site = web.TCPSite(runner, self._listen.host, port)
            try:
                await site.start()
            except OSError as error:
                problem = error
                continue
            # Port 0 lets the system choose.
            self._port = runner.addresses[0][1]
            self._runner = runner
            return
        await runner.cleanup()
        where = f"{self._listen.host}:{self._listen.ports[0]}-{self._listen.ports[-1]}"
        raise UnavailableError(
            f"no address for agents can be opened at {where}: {problem}",
            reason="AGENT_ADDRESS_UNAVAILABLE",
            remedy=f"give {LISTEN_VARIABLE} of the env-server a host of its own and a port for each worker",
        )

    def _handler(self, api: Api) -> "web.Handler":  # type: ignore[name-defined]
        """Return the handler of HTTP requests of one API: it passes each to the session of its token, or refuses it."""

        async def handle(request: web.Request) -> web.StreamResponse:
            """Answer one HTTP request by the session of its token, or refuse it."""
            found = self._session(api, request)
            if isinstance(found, AgentAnswer):
                return web_response(found)
            return web_response(await found.read_and_answer(api, request))

        return handle

    async def _models(self, request: web.Request) -> web.StreamResponse:
        """Answer `GET /v1/models` with the rollout's only model."""
        found = self._session(CHATS, request)
        if isinstance(found, AgentAnswer):
            return web_response(found)
        card = {"id": found.model, "object": "model", "created": 0, "owned_by": "millrace"}
        return web.json_response({"object": "list", "data": [card]})

    def _session(self, api: Api, request: web.Request) -> AgentSession | AgentAnswer:
        """Return the session that a request's token names, or the answer that refuses it in the form of `api`."""
        token = shown_token(request.headers)
        if not token:
            return refusal(api, 401, "the token of a rollout is required, as a bearer token or `x-api-key`")
        if (session := self._sessions.get(token)) is not None:
            return session
        if _digest(token) in self._ended:
            return refusal(api, 410, "the rollout of this token has ended")
        return refusal(api, 401, "this is the token of no rollout that is played here")


def shown_token(headers: Mapping[str, str]) -> str:
    """Return the token in a request's headers, as bearer token or API key; "" if there is none."""
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", headers.get("api-key", "")).strip()


def web_response(answer: AgentAnswer) -> web.Response:
    """Convert an answer to aiohttp's response."""
    kind = "text/event-stream" if answer.streams else "application/json"
    headers = {**answer.headers, "Content-Type": kind, "Cache-Control": "no-cache"}
    if answer.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return web.Response(status=answer.status, body=answer.body, headers=headers)


async def _no_such_path(request: web.Request) -> web.StreamResponse:
    """Answer a request of an unknown path with 404 and the paths that there are."""
    paths = ", ".join(f"POST {path}" for path in ROUTES)
    message = f"{request.method} {request.path[:200]} is not answered here; {paths} and GET /v1/models are"
    return web_response(refusal(CHATS, 404, message))


def _digest(token: str) -> bytes:
    """Return a hash of a token, by which ended rollouts are remembered."""
    return hashlib.blake2b(token.encode(), digest_size=16).digest()


_OURS: list[AgentServer] = []


def agent_server() -> AgentServer:
    """Return this worker's server, made at the first call."""
    if not _OURS:
        _OURS.append(AgentServer())
    return _OURS[0]
