"""Access to a replica's HTTP API, and limits of one request, whichever engine serves it.

The workers' token and those of the tokens file are accepted; one that may only read gets the list of models. `GET
/health` needs none and answers its status alone. See `millrace.rpc.access` for the rules and docs/security.md for how
to set it up.
"""

import json
import os
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any

from millrace.errors import InvalidSpecError, PermissionDeniedError, UnauthenticatedError, Violation
from millrace.rollouts import parameters
from millrace.rpc.access import WORKER, ServerAccess
from millrace.telemetry.settings import Settings, join_address

HEALTH = "/health"
BODY_TOO_LARGE = "millrace.body_too_large"
"""Key that is set in the scope of a request whose body has passed the limit."""
CHALLENGE = {"WWW-Authenticate": "Bearer"}

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


def http_access(host: str, port: int, environ: Mapping[str, str] | None = None) -> ServerAccess:
    """Return who may use an HTTP server at this address, by the variables `environ` (None: this process's).

    Raises InvalidSpecError if it may not listen there so: beyond loopback without tokens or TLS.
    """
    access = ServerAccess.from_environ(environ)
    access.require_safe(join_address(host, port), {WORKER}, field="MILLRACE_HTTP_LISTEN")
    return access


def http_scheme(environ: Mapping[str, str] | None = None) -> str:
    """Return `https` if `environ` (None: this process's variables) names a TLS certificate, else `http`."""
    return "https" if Settings.from_env(os.environ if environ is None else environ).tls_cert else "http"


def refusal() -> dict[str, Any]:
    """Return the body of an answer 401, in OpenAI's form; it is the same for every path."""
    message = "a valid bearer token is required"
    return {"error": {"message": message, "type": "AuthenticationError", "param": None, "code": 401}}


def vllm_flags(host: str, port: int, environ: Mapping[str, str] | None = None) -> list[str]:
    """Return the arguments with which vLLM's HTTP server at this address requires tokens and TLS as `environ` says.

    Raises InvalidSpecError if it may not listen there so.
    """
    access = http_access(host, port, environ)
    flags = [f"--middleware={__name__}.TokenGate"]
    if access.tls is not None:
        access.tls.check()
        flags += [f"--ssl-certfile={access.tls.cert}", f"--ssl-keyfile={access.tls.key}", "--enable-ssl-refresh"]
        if access.tls.client_ca is not None:
            flags += [f"--ssl-ca-certs={access.tls.client_ca}", "--ssl-cert-reqs=2"]  # 2 is ssl.CERT_REQUIRED
    return flags


def read_only_refusal(error: PermissionDeniedError) -> dict[str, Any]:
    """Return the body of an answer 403, in OpenAI's form, with the error's message."""
    return {"error": {"message": error.message, "type": "PermissionDeniedError", "param": None, "code": 403}}


class TokenGate:
    """ASGI middleware: 401 without a valid token, 403 with one that may only read, both before anything is read.

    Bodies above the limit get 413; one of no announced length is cut off for the application where it passes the limit.
    Where tokens are required, `GET /health` answers its status without a reason.
    """

    def __init__(self, app: App, *, access: ServerAccess | None = None) -> None:
        """Wrap the ASGI application `app`; `access` has the tokens, by default those that this process's variables
        name.
        """
        self._app = app
        self._access = ServerAccess.from_environ() if access is None else access
        self._is_guarded = self._access.tokens is not None or self._access.worker_tokens is not None

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Pass an ASGI request with a valid token and a body within the limit on to the application, or refuse it with
        401, 403 or 413.
        """
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        # Two Authorization headers are ambiguous: both are ignored.
        values = [value.decode("latin-1") for name, value in scope.get("headers", ()) if name == b"authorization"]
        try:
            self._access.admit_http(scope["path"], values[0] if len(values) == 1 else None)
        except UnauthenticatedError:
            await _refuse(scope, send, 401, refusal(), CHALLENGE)
            return
        except PermissionDeniedError as error:
            await _refuse(scope, send, 403, read_only_refusal(error))
            return
        size = _content_length(scope)
        if scope["type"] == "http" and size is not None and size > MAX_BODY_BYTES:
            await _answer(send, *body_too_large(size))
            return
        if self._is_guarded and scope["path"] == HEALTH:
            send = _status_only(send)
        await self._app(scope, _bounded(scope, receive), send)


async def _refuse(
    scope: Mapping[str, Any], send: Send, status: int, body: Mapping[str, Any], extra: Mapping[str, str] | None = None
) -> None:
    """Refuse a request with this status, body and further headers; a websocket is closed instead."""
    # A websocket is refused by closing it: before it is accepted there is no status to send.
    if scope["type"] != "http":
        await send({"type": "websocket.close", "code": 1008})
        return
    await _answer(send, status, body, extra)


async def _answer(send: Send, status: int, body: Mapping[str, Any], extra: Mapping[str, str] | None = None) -> None:
    """Send a whole JSON answer over ASGI; `extra` are further headers."""
    headers = [(b"content-type", b"application/json")]
    headers += [(name.lower().encode(), value.encode()) for name, value in (extra or {}).items()]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})


def _content_length(scope: Mapping[str, Any]) -> int | None:
    """Return the announced length of a request's body in bytes; None if it has none, or one that cannot be read."""
    values = [value for name, value in scope.get("headers", ()) if name == b"content-length"]
    return int(values[0]) if len(values) == 1 and values[0].isdigit() and len(values[0]) < 20 else None


def _bounded(scope: MutableMapping[str, Any], receive: Receive) -> Receive:
    """Return a `receive` for the application that reports a disconnect when the body passes the limit.

    A body that has passed the limit is noted in the scope under BODY_TOO_LARGE.
    """
    left = MAX_BODY_BYTES

    async def read() -> MutableMapping[str, Any]:
        """Return the next message, or a disconnect once the body has passed the limit."""
        nonlocal left
        message = await receive()
        left -= len(message.get("body", b""))
        if left >= 0:
            return message
        scope[BODY_TOO_LARGE] = True
        return {"type": "http.disconnect"}

    return read


def _status_only(send: Send) -> Send:
    """Return a `send` for the application that replaces its answer by one with the same status and no details."""

    async def shortened(message: MutableMapping[str, Any]) -> None:
        """Send an answer with the status alone in place of the application's start of an answer; drop its body."""
        if message["type"] == "http.response.start":
            status = message["status"]
            await _answer(send, status, {"status": "ok" if status == 200 else "unavailable"})

    return shortened


# Limits of one HTTP request, whichever engine serves it, checked before anything is computed.
#
# The error of a refused request names the field, its size, the limit, and a remedy. Limits that depend on the model are
# derived from its context: text that cannot fit into it is refused by its characters, before it is tokenized.

MAX_BODY_BYTES = 16 << 20
"""Largest body: a million token ids with their commas have about 8 MB."""
BODY_S = 60.0
"""How long a client has to send its body."""
MAX_PROMPTS = 256
"""Prompts of one request."""
MAX_CHOICES = parameters.MAX_CHOICES
"""`n`: completions of one prompt."""
MAX_COMPLETIONS = 512
"""Completions of one request: its prompts times `n`."""
MAX_STOPS = 32
MAX_STOP_CHARS = 256
"""Longest stop string, in characters; that many tokens are decoded at every step."""
MAX_MESSAGES = 2048
MAX_TOOLS = 256
MAX_CHARS_PER_TOKEN = 16
"""More than any text has on average: real text has 3 to 5 characters per token."""
MIN_CHARS = 4096
"""Characters that are accepted however small the context is: tokenizing them is cheap, and gives exact messages."""
_DEEPEST = 64


def max_chars(model_len: int) -> int:
    """Return the most characters of a prompt or chat that are tokenized, where the context has `model_len` tokens."""
    return max(MIN_CHARS, MAX_CHARS_PER_TOKEN * model_len)


def check_completions(num_prompts: int, n: int, *, n_field: str = "n") -> None:
    """Raise InvalidSpecError for too many prompts in one request, or too many completions: `n` of each prompt.

    `n_field` is the name of the request's field for `n`.
    """
    if num_prompts > MAX_PROMPTS:
        raise too_many("prompt", f"{num_prompts} prompts", MAX_PROMPTS, "send several requests at the same time")
    if num_prompts * n > MAX_COMPLETIONS:
        asked = f"{num_prompts} prompts x {n_field}={n}, which are {num_prompts * n} completions"
        raise too_many(n_field, asked, MAX_COMPLETIONS, "send several requests at the same time")


def check_prompt(prompt: Any, n: int, model_len: int) -> None:
    """Raise InvalidSpecError if a `prompt` of OpenAI's API (a text or tokens, or a list of either) is over a limit.

    Checked are the number of prompts, their completions (`n` of each), and the length of each for a context of
    `model_len` tokens.
    """
    many: list[Any] = [prompt]
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        many = prompt
    check_completions(len(many), n)
    check_texts([text for text in many if isinstance(text, str)], model_len)
    check_tokens([tokens for tokens in many if isinstance(tokens, list)], model_len)


def check_texts(texts: Sequence[str], model_len: int, *, field: str = "prompt") -> None:
    """Raise InvalidSpecError for a text of more characters than could fit into a context of `model_len` tokens.

    `field` is the request's, for the message.
    """
    limit = max_chars(model_len)
    for index, text in enumerate(texts):
        if len(text) > limit:
            where = field if len(texts) == 1 else f"{field}[{index}]"
            raise _too_long(where, len(text), limit, model_len)


def check_tokens(prompts: Sequence[Sequence[int]], model_len: int, *, field: str = "prompt") -> None:
    """Raise InvalidSpecError for a prompt with at least as many tokens as the context has, `model_len`.

    `field` is the request's, for the message.
    """
    for prompt in prompts:
        if len(prompt) >= model_len:
            raise InvalidSpecError(
                [Violation(field=field, value=f"{len(prompt)} tokens", message=f"must have fewer than {model_len}")],
                message=f"This model's maximum context length is {model_len} tokens. However, your prompt has "
                f"{len(prompt)} tokens, which leaves no room for a completion. Please reduce its length.",
                reason="PROMPT_TOO_LONG",
            )


def check_chat(messages: Sequence[Any], tools: Sequence[Any] | None, model_len: int) -> None:
    """Raise InvalidSpecError for too many messages or tools, or more characters in either than fit into `model_len`
    tokens.
    """
    if len(messages) > MAX_MESSAGES:
        raise too_many("messages", f"{len(messages)} messages", MAX_MESSAGES, "leave old ones out")
    if tools and len(tools) > MAX_TOOLS:
        raise too_many("tools", f"{len(tools)} tools", MAX_TOOLS, "leave out those that are not needed")
    limit = max_chars(model_len)
    for field, part in (("messages", messages), ("tools", tools or ())):
        if (count := count_chars(part)) > limit:
            raise _too_long(field, count, limit, model_len)


def check_stops(stop: str | Sequence[str] | None, *, field: str = "stop") -> None:
    """Raise InvalidSpecError for too many stop strings, or one that is too long; None is no stop string.

    `field` is the request's, for the message.
    """
    stops = [stop] if isinstance(stop, str) else list(stop or ())
    if len(stops) > MAX_STOPS:
        raise too_many(field, f"{len(stops)} stop strings", MAX_STOPS, "leave out those that contain another one")
    for text in stops:
        if len(text) > MAX_STOP_CHARS:
            raise too_many(field, f"a stop string of {len(text)} characters", MAX_STOP_CHARS, "shorten it")


def count_chars(value: Any) -> int:
    """Return the characters of all strings in a JSON value, keys included, with one for every other scalar.

    Raises InvalidSpecError for a value that nests too deeply.
    """
    # Level by level and not by recursion, because a body may nest as deep as its size allows.
    total, level = 0, [value]
    for _ in range(_DEEPEST):
        deeper: list[Any] = []
        for item in level:
            if isinstance(item, str):
                total += len(item)
            elif isinstance(item, dict | Mapping):  # `dict` first: a check of an abstract class is slow
                total += sum(map(len, map(str, item)))
                deeper.extend(item.values())
            elif isinstance(item, list | tuple):
                deeper.extend(item)
            else:
                total += 1
        if not deeper:
            return total
        level = deeper
    raise InvalidSpecError(
        [Violation(field="body", message=f"nests deeper than {_DEEPEST} levels; flatten it")], reason="REQUEST_INVALID"
    )


def body_too_large(size: int | None) -> tuple[int, dict[str, Any]]:
    """Return (status, body) of the answer to a request whose body is above the limit.

    `size` is its bytes, None if the length was not announced.
    """
    had = "more" if size is None else f"{size} bytes"
    message = (
        f"body: has {had}, and at most {MAX_BODY_BYTES} bytes are taken; send several smaller requests at the same time"
    )
    return 413, {"error": {"message": message, "type": "RequestTooLargeError", "param": "body", "code": 413}}


def too_many(field: str, asked: str, limit: int, remedy: str) -> InvalidSpecError:
    """Make the InvalidSpecError (REQUEST_TOO_LARGE) of a field that asks for more than `limit`.

    `asked` describes what it asks for.
    """
    wrong = Violation(field=field, value=asked, message=f"at most {limit} are taken in one request")
    return InvalidSpecError([wrong], reason="REQUEST_TOO_LARGE", remedy=remedy)


def _too_long(field: str, count: int, limit: int, model_len: int) -> InvalidSpecError:
    """Make the InvalidSpecError (PROMPT_TOO_LONG) of a field with `count` characters, where at most `limit` are
    taken.
    """
    wrong = Violation(field=field, value=f"{count} characters", message=f"at most {limit} are taken")
    return InvalidSpecError(
        [wrong],
        message=f"This model's maximum context length is {model_len} tokens. However, {field} has {count} characters, "
        f"and at most {limit} are taken. Please reduce its length.",
        reason="PROMPT_TOO_LONG",
    )
