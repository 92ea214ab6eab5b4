"""The interception of a v1 rollout, asked without a connection.

The library catches a harness's model calls with an HTTP server, because a harness is a program. Ours is a coroutine in
the server's own process: it gives the server's handler what a request would have brought, and takes its answer. What
the handler does is the same: limits and stops, the model call, the trace. Tool servers, which are programs, still come
over HTTP.
"""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from multidict import CIMultiDict
from verifiers.v1.dialects import DIALECTS
from verifiers.v1.dialects.chat import ChatDialect
from verifiers.v1.interception import InterceptionServer

_PATH = "/v1/chat/completions"
_CHAT = next(dialect for dialect in DIALECTS if isinstance(dialect, ChatDialect))

servers: dict[str, InterceptionServer] = {}
"""That of each rollout, by the secret that its harness is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallAnswer:
    """What the handler answered."""

    status: int
    body: bytes

    @property
    def text(self) -> str:
        """The body, for messages."""
        return self.body.decode("utf-8", "replace")


class InProcessRequest(dict[Any, Any]):
    """As much of an aiohttp request as the handler reads, which also keeps things in it."""

    def __init__(self, secret: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> None:
        super().__init__()
        self.path = _PATH
        own = {"Authorization": f"Bearer {secret}", "Content-Type": "application/json"}
        self.headers = CIMultiDict({**headers, **own})
        self._read_bytes: bytes | None = json.dumps(body).encode()  # the handler forgets it once it has read it

    async def read(self) -> bytes:
        """The body."""
        return self._read_bytes or b""


def install() -> None:
    """Have every interception server of this process be known by the secrets of its rollouts. Idempotent."""
    if getattr(InterceptionServer.register, "_is_millraces", False):
        return
    stock_register, stock_unregister = InterceptionServer.register, InterceptionServer.unregister

    def register(self: InterceptionServer, session: Any) -> tuple[str, str]:
        secrets = stock_register(self, session)
        servers[secrets[0]] = self
        return secrets

    def unregister(self: InterceptionServer, model_secret: str, state_secret: str) -> None:
        servers.pop(model_secret, None)
        stock_unregister(self, model_secret, state_secret)

    register._is_millraces = True  # type: ignore[attr-defined]
    InterceptionServer.register, InterceptionServer.unregister = register, unregister


async def ask(secret: str, body: Mapping[str, Any], *, headers: Mapping[str, str] | None = None) -> CallAnswer:
    """Make a model call for the rollout with this secret; `headers` are those of the program that asks, if one does."""
    handler: Any = servers[secret].handle_request
    # A task of its own, as in a server: the library cancels what still answers when the rollout is over.
    answering = asyncio.create_task(
        handler(InProcessRequest(secret, body, headers or {}), _CHAT), name="model call of a v1 rollout"
    )
    await asyncio.wait({answering})
    if answering.cancelled():
        return CallAnswer(status=499, body=b"the rollout ended before the model call did")
    if error := answering.exception():  # a defect of the handler: what it foresees it answers
        return CallAnswer(status=500, body=f"{type(error).__name__}: {error}".encode())
    response = answering.result()
    return CallAnswer(status=response.status, body=bytes(response.body or b""))
