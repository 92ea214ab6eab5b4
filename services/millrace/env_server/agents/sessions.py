"""One rollout's model calls by an agent over HTTP: a token, limits, and answers in the API of the request."""

import asyncio
import hashlib
import logging
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson
from aiohttp import web

from millrace.decoding import decode_object
from millrace.env_server.agents.apis import Chats, Messages, Responses
from millrace.env_server.agents.asked import AgentRequest, Api, PolicyReply
from millrace.env_server.agents.branches import DEFAULT, MODES, AgentCall
from millrace.errors import CorruptObjectError, InvalidSpecError, MillraceError, Violation

logger = logging.getLogger(__name__)

CHATS = Chats()
ROUTES: Mapping[str, Api] = {
    "/v1/chat/completions": CHATS,
    "/v1/responses": Responses(),
    "/v1/messages": Messages(),
}
NOT_APPLIED_HEADER = "X-Millrace-Not-Applied"
"""Header of an answer: the parameters of its request that were ignored."""
_RETRY_HEADERS = ("x-stainless-retry-count", "x-retry-count")
_KEPT_ANSWERS = 64
_MAX_JSON_BYTES = 64 << 20

Ask = Callable[[AgentRequest], Awaitable[Mapping[str, Any]]]
"""Makes one model call of a rollout and returns a chat completion with one choice. Raises CallRefusedError."""


class CallRefusedError(Exception):
    """The policy did not answer: an HTTP status of at least 400, and why."""

    def __init__(self, status: int, message: str, *, param: str | None = None) -> None:
        """Make the error with the HTTP `status` of the answer; `param` is the name of the request's wrong
        parameter, if one is.
        """
        super().__init__(message)
        self.status = status
        self.param = param


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLimits:
    """Limits of what an agent may do with its address; 0 is no limit."""

    max_requests: int = 0
    """Most model calls; one with `n` choices counts as `n`."""
    max_tokens: int = 0
    """Most sampled tokens of all calls together."""
    max_concurrent: int = 16
    """Most model calls at once; others wait."""
    max_body_bytes: int = 16 << 20
    """Most bytes in the body of one request."""
    deadline_s: float = 0.0
    """Seconds from the opening of the address until it answers no more."""

    def __post_init__(self) -> None:
        """Raise InvalidSpecError if a limit is not a number of at least 0."""
        for name in ("max_requests", "max_tokens", "max_concurrent", "max_body_bytes", "deadline_s"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 2**40:
                message = "must be a number of at least 0; 0 is no limit"
                raise InvalidSpecError([Violation(field=f"limits.{name}", value=f"{value!r:.100}", message=message)])


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRules:
    """The run config's settings for an environment's agents (`EnvSpec.agent_json`)."""

    branches: str = DEFAULT
    """Which calls are trained on (`agents.branches`)."""
    limits: Mapping[str, float] = field(default_factory=dict)
    """Limits by name, which replace the environment's own."""
    is_set: bool = False
    """Whether the config has any of these settings."""

    @classmethod
    def decode(cls, text: str) -> "AgentRules":
        """Decode the rules for agents from the JSON of `EnvSpec.agent_json`; "" gives the defaults.

        Raises CorruptObjectError for what is no JSON object, and InvalidSpecError for wrong values.
        """
        fields = decode_object(text or "{}", what="agent", reason="ENV_ARGS_INVALID")
        branches, limits = fields.get("branches", DEFAULT), fields.get("limits", {})
        if branches not in MODES:
            message = f"must be one of {', '.join(MODES)}"
            raise InvalidSpecError([Violation(field="agent.branches", value=f"{branches!r:.100}", message=message)])
        names = AgentLimits.__dataclass_fields__
        if not isinstance(limits, dict) or not limits.keys() <= names.keys():
            message = f"must be a table with some of {', '.join(names)}"
            raise InvalidSpecError([Violation(field="agent.limits", value=f"{limits!r:.100}", message=message)])
        AgentLimits(**limits)
        return cls(branches=branches, limits=limits, is_set=bool(fields))

    def over(self, own: AgentLimits | None) -> AgentLimits:
        """Return the environment's own limits, None for the defaults, with the limits that the run config sets in
        their place.
        """
        changes: dict[str, Any] = dict(self.limits)
        return replace(own or AgentLimits(), **changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentAddress:
    """The URL, token and model name by which an agent reaches the policy of its rollout."""

    base_url: str
    """The base URL for OpenAI's APIs; it ends with `/v1`."""
    api_key: str
    """The token that identifies the rollout; it is refused once the rollout has ended."""
    model: str
    """The model's name for requests; other names are answered as well."""

    def environ(self) -> dict[str, str]:
        """Return the address as variables that the SDKs of OpenAI and Anthropic, and programs built on them, read."""
        root = self.base_url.removesuffix("/v1")
        return {
            **dict.fromkeys(("OPENAI_BASE_URL", "OPENAI_API_BASE"), self.base_url),
            **dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"), self.api_key),
            **dict.fromkeys(("OPENAI_MODEL", "OPENAI_DEFAULT_MODEL"), self.model),
            "ANTHROPIC_BASE_URL": root,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentAnswer:
    """An HTTP response: JSON, or the events of a stream."""

    status: int
    body: bytes
    streams: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)


class AgentSession:
    """Answers the model calls of one rollout's agent, each made by `ask`."""

    def __init__(
        self,
        ask: Ask,
        *,
        model: str,
        limits: AgentLimits | None = None,
        drops: Sequence[str] = (),
    ) -> None:
        """Make the session of one rollout, with a new token.

        `ask` makes one model call, and `model` is the name that answers show. `limits` bound the agent's calls, None by
        the defaults. `drops` are request parameters that are ignored rather than refused, and named in a header of the
        answer.
        """
        self.token = secrets.token_urlsafe(24)
        self.limits = limits or AgentLimits()
        self.made: list[AgentCall] = []
        """The calls that were answered."""
        self.last_refusal = ""
        """Status and message of the last refused call."""
        self.is_closed = False
        self._ask = ask
        self.model = model
        self._drops = tuple(drops)
        self._begun = time.monotonic()
        self._num_calls = 0
        self._num_tokens = 0
        self._free = asyncio.Semaphore(self.limits.max_concurrent or 2**31)
        self._answers: dict[bytes, asyncio.Task[AgentAnswer]] = {}

    @property
    def is_late(self) -> bool:
        """Return whether more seconds than the limit `deadline_s` have passed since the session was made."""
        return bool(self.limits.deadline_s) and time.monotonic() - self._begun > self.limits.deadline_s

    def close(self) -> None:
        """Refuse all further model calls with 410, and cancel those in progress."""
        self.is_closed = True
        for task in self._answers.values():
            task.cancel()

    async def read_and_answer(self, api: Api, request: web.Request) -> AgentAnswer:
        """Read an agent's HTTP request in the form of `api` and return the answer.

        A body over the limit is refused with 413, unread if its length is declared.
        """
        size, limit = 0 if request.content_length is None else request.content_length, self.limits.max_body_bytes
        # Before the body is read where its size is announced, and after that where it is not (chunked transfer).
        raw = b"" if limit and size > limit else await request.read()
        if limit and max(size, len(raw)) > limit:
            return self.refused(api, 413, f"the body has more than {limit} bytes")
        return await self.answer(api, raw, request.headers)

    async def answer(self, api: Api, raw: bytes, headers: Mapping[str, str]) -> AgentAnswer:
        """Return the answer to a request of the API `api` with the body `raw`; errors are answers with a status.

        The same body again, marked as a retry by its headers, gets the answer of the first, unless that failed. A model
        call goes on when its client closes the connection.
        """
        # A client's retry has the same body; its headers differ in the count of retries.
        key = hashlib.blake2b(api.name.encode() + raw, digest_size=16).digest()
        known = self._answers.get(key)
        if known is None or known.cancelled() or not _is_repeated(headers) or _has_failed(known):
            known = asyncio.create_task(self._answer(api, raw, headers), name="model call of an agent")
            # Removed first, so that the new call is the last in the order in which answers are dropped.
            self._answers.pop(key, None)
            self._answers[key] = known
            while len(self._answers) > _KEPT_ANSWERS and (old := _done(self._answers)) is not None:
                del self._answers[old]
        # The call goes on when its client hangs up: its tokens are sampled, and a retry of the client gets them.
        await asyncio.wait({known})
        return self._ended(api) if known.cancelled() else known.result()

    async def _answer(self, api: Api, raw: bytes, headers: Mapping[str, str]) -> AgentAnswer:
        """Parse a request's body, make its model calls and return the answer; errors are answers with a status.

        `raw` is the body in the form of `api`, in which the answer is, too; `headers` are the request's.
        """
        try:
            self._require_open()
            body = decode_object(raw, what="the request", reason="REQUEST_INVALID", max_bytes=_MAX_JSON_BYTES)
            asked = replace(api.read(body, drops=self._drops), headers=headers)
            self._require_left(asked.n)
            # Counted before the calls: requests at the same time must not pass the limit together.
            self._num_calls += asked.n
            replies = await self._call_policy(asked)
            model = body.get("model")
            return _written(api, asked, replies, model if isinstance(model, str) and model else self.model)
        except InvalidSpecError as error:
            return self.refused(api, 400, str(error), param=error.violations[0].field)
        except (CorruptObjectError, MillraceError) as error:
            return self.refused(api, 400, str(error))
        except CallRefusedError as error:
            return self.refused(api, error.status, str(error), param=error.param)

    async def _call_policy(self, asked: AgentRequest) -> list[PolicyReply]:
        """Make the request's `n` model calls, one after the other, note them in `made` and return the replies.

        Raises CallRefusedError.
        """
        # The choices are made one after the other, because each is a turn of the rollout.
        replies: list[PolicyReply] = []
        for _ in range(asked.n):
            async with self._free:
                # Asked again, because the call may have waited long for its turn.
                self._require_open()
                one = PolicyReply.of(await self._ask(asked))
            self._num_tokens += one.num_tokens
            self.made.append(AgentCall(prompt=asked.messages, reply=one.message, num_tokens=one.num_tokens))
            replies.append(one)
        return replies

    def _require_open(self) -> None:
        """Raise CallRefusedError (410) if the session is closed or its deadline has passed."""
        if self.is_closed:
            raise CallRefusedError(410, "the rollout of this token has ended")
        if self.is_late:
            raise CallRefusedError(410, f"the deadline of this address has passed ({self.limits.deadline_s:g} s)")

    def _require_left(self, count: int) -> None:
        """Raise CallRefusedError (403) if `count` more model calls would exceed a limit, or the limit of tokens is
        reached.
        """
        limits = self.limits
        if limits.max_requests and self._num_calls + count > limits.max_requests:
            raise CallRefusedError(403, f"the rollout may make {limits.max_requests} model calls, and has made them")
        if limits.max_tokens > 0 and self._num_tokens >= limits.max_tokens:
            raise CallRefusedError(403, f"the rollout may sample {limits.max_tokens} tokens, and has sampled them")

    def _ended(self, api: Api) -> AgentAnswer:
        """Return the answer for a call that was cancelled because the rollout has ended."""
        return self.refused(api, 410, "the rollout of this token has ended")

    def refused(self, api: Api, status: int, message: str, *, param: str | None = None) -> AgentAnswer:
        """Return the answer that refuses a call, and keep it as `last_refusal`, for the error of an agent that ends
        because of it.

        `param` is the request's wrong parameter, if one is.
        """
        self.last_refusal = f"{status}: {message}"
        return refusal(api, status, message, param=param)


def refusal(api: Api, status: int, message: str, *, param: str | None = None) -> AgentAnswer:
    """Return the answer of an HTTP status with an error in the form of `api`; `param` is the wrong parameter, if
    one is.
    """
    return AgentAnswer(status=status, body=orjson.dumps(api.error(status, message, param)))


def program_environ(address: AgentAddress) -> dict[str, str]:
    """Return the variables for an agent's program: this process's without `MILLRACE_*`, and those of its address."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("MILLRACE_")}
    return {**ours, **address.environ()}


def _written(api: Api, asked: AgentRequest, replies: Sequence[PolicyReply], model: str) -> AgentAnswer:
    """Return the answer with the replies in the form of `api`, as one body or as a stream, as the request asks.

    A header names the parameters that had no effect.
    """
    headers = {NOT_APPLIED_HEADER: ", ".join(asked.not_applied)} if asked.not_applied else {}
    if not asked.streams:
        return AgentAnswer(status=200, body=orjson.dumps(api.body(asked, replies, model)), headers=headers)
    events = b"".join(_event(kind, data) for kind, data in api.events(asked, replies, model))
    return AgentAnswer(status=200, body=events, streams=True, headers=headers)


def _event(kind: str, data: Mapping[str, Any] | None) -> bytes:
    """Return one server-sent event as bytes; without data it is the mark `[DONE]`."""
    name = f"event: {kind}\n".encode() if kind else b""
    return name + b"data: " + (b"[DONE]" if data is None else orjson.dumps(data)) + b"\n\n"


def _is_repeated(headers: Mapping[str, str]) -> bool:
    """Return whether a request's headers mark it as a retry of an SDK."""
    return any(headers.get(name, "0") not in ("", "0") for name in _RETRY_HEADERS)


def _has_failed(task: "asyncio.Task[AgentAnswer]") -> bool:
    """Return whether a call has ended with cancellation, an exception or an answer of status 400 or above."""
    return task.done() and (task.cancelled() or task.exception() is not None or task.result().status >= 400)


def _done(answers: "Mapping[bytes, asyncio.Task[AgentAnswer]]") -> bytes | None:
    """Return the key of the oldest answer whose call has ended; None if all are in progress."""
    return next((key for key, task in answers.items() if task.done()), None)
