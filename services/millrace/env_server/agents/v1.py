"""Replaces the library's interception of v1 rollouts, so that it answers agents by the rules of `sessions`.

A harness gives its agent the endpoint and the secret that `launch` gets. The library itself answers chats alone where
tokens are wanted, and some releases no streams; it ignores most of what a request says. Requests to an engine of ours
are read here, asked as plain chats, and answered in the API that they came by. What foreign endpoints are asked
(`millrace eval --client.base-url`) goes through as it is.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import orjson
from aiohttp import web
from verifiers.v1.clients.train import TrainClient
from verifiers.v1.interception import InterceptionServer

from millrace.env_server.agents.asked import AgentRequest
from millrace.env_server.agents.server import shown_token, web_response
from millrace.env_server.agents.sessions import (
    CHATS,
    ROUTES,
    AgentLimits,
    AgentRules,
    AgentSession,
    CallRefusedError,
    refusal,
)
from millrace.env_server.library import v1

ENDS = "millrace_ends"
"""Field of a chat between this module and the train client: `max_tokens` and `stop` that the agent asks for."""
# Tokens of ended rollouts that are remembered: a late request is answered with 410 rather than 401.
_ENDED_KEPT = 4096
# Headers of the connection, or of the client's retries, which are answered here.
_OWN_HEADERS = frozenset(
    {"host", "connection", "accept", "accept-encoding", "authorization", "x-api-key", "api-key", "transfer-encoding"}
    | {"content-length", "content-type", "content-encoding", "x-stainless-retry-count", "x-retry-count"}
    | {"idempotency-key"}
)

_sessions: dict[str, AgentSession] = {}
_rules: dict[str, tuple[AgentLimits | None, Sequence[str]]] = {}
_ended: OrderedDict[bytes, None] = OrderedDict()


def apply_rules(secret: str, *, limits: AgentLimits | None = None, drops: Sequence[str] = ()) -> None:
    """Set the limits of the agent of one rollout, before the agent is started.

    `secret` is the argument of that name of `Harness.launch`. `limits` None are the defaults. `drops` are request
    parameters that are ignored rather than refused. The limits of the run config replace these.
    """
    _rules[secret] = (limits, drops)


def install(rules: AgentRules) -> None:
    """Replace methods of the library's interception servers in this process so that they answer agents, with the limits
    of `rules`.

    The library's own answers remain for in-process requests, other paths and clients that relay. A second call does
    nothing.
    """
    if getattr(InterceptionServer.handle_request, "_is_millraces", False):
        return
    stock_handle: Any = InterceptionServer.handle_request
    stock_unregister = InterceptionServer.unregister

    async def handle_request(self: Any, request: Any, dialect: Any) -> web.StreamResponse:
        """Answer an HTTP request at the interception: by the session of its token, or as the library does."""
        if isinstance(request, v1.InProcessRequest):
            return await stock_handle(self, request, dialect)
        api = ROUTES.get(request.path)
        secret = shown_token(request.headers)
        session = self.sessions.get(secret)
        if session is None:
            has_ended = _digest(secret) in _ended
            message = "the rollout of this token has ended" if has_ended else "this is the token of no rollout"
            return web_response(refusal(api or CHATS, 410 if has_ended else 401, message))
        if api is None or not isinstance(session.client, TrainClient):
            return await stock_handle(self, request, dialect)
        agent = _sessions.get(secret)
        if agent is None:
            limits, drops = _rules.pop(secret, (None, ()))
            ask = partial(_ask, secret)
            agent = _sessions[secret] = AgentSession(
                ask, model=session.ctx.model, limits=rules.over(limits), drops=drops
            )
        return web_response(await agent.read_and_answer(api, request))

    def unregister(self: Any, model_secret: str, state_secret: str) -> None:
        """End a rollout as the library does, close its agent's session, and remember its token as ended."""
        stock_unregister(self, model_secret, state_secret)
        _rules.pop(model_secret, None)
        if (agent := _sessions.pop(model_secret, None)) is not None:
            agent.close()
        _ended[_digest(model_secret)] = None
        while len(_ended) > _ENDED_KEPT:
            _ended.popitem(last=False)

    handle_request._is_millraces = True  # type: ignore[attr-defined]
    InterceptionServer.handle_request, InterceptionServer.unregister = handle_request, unregister


def ends_of(body: dict[str, Any], sampling: Any) -> Any:
    """Return the run's sampling with the agent's `max_tokens` and `stop`, which are removed from `body`.

    The lower `max_tokens` applies; the stop strings of both apply.
    """
    ends: Mapping[str, Any] = body.pop(ENDS, None) or {}
    if not ends:
        return sampling
    limits = [limit for limit in (sampling.max_tokens, ends.get("max_tokens")) if limit]
    own = getattr(sampling, "stop", None) or []
    stops = [*([own] if isinstance(own, str) else own), *ends.get("stop", ())]
    changes = {"max_tokens": min(limits)} if limits else {}
    return sampling.model_copy(update={**changes, **({"stop": stops} if stops else {})})


async def _ask(secret: str, asked: AgentRequest) -> Mapping[str, Any]:
    """Make one model call for the rollout of `secret` through the library's interception, and return the chat
    completion.

    Raises CallRefusedError unless the status is 200.
    """
    body: dict[str, Any] = {"model": "policy", "messages": list(asked.messages)}
    if asked.tools:
        body["tools"] = list(asked.tools)
    ends = {"max_tokens": asked.max_tokens, "stop": list(asked.stop)}
    body[ENDS] = {name: value for name, value in ends.items() if value}
    passed = {name: value for name, value in asked.headers.items() if name.lower() not in _OWN_HEADERS}
    reply = await v1.ask(secret, body, headers=passed)
    if reply.status != 200:
        # The library answers 409 when the rollout was stopped; for agents both mean that the rollout has ended.
        status = {409: 410, 499: 410}.get(reply.status, reply.status)
        raise CallRefusedError(status, reply.text[:2000])
    answer: Mapping[str, Any] = orjson.loads(reply.body)
    return answer


def _digest(secret: str) -> bytes:
    """Return a hash of a secret, by which ended rollouts are remembered."""
    return hashlib.blake2b(secret.encode(), digest_size=16).digest()
