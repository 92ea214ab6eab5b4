"""The v0 model client: messages in, exact tokens out, over `POST {base_url}/chat/completions`, or `/completions`.

It replaces the stock client of `verifiers` (OpenAI SDK on httpx), which costs five times the CPU and collapses at 512
concurrent requests because its connection pool is scanned per request. Errors are typed for `v0.py`, retries are
few and only where the engine did no work, and the deadline belongs to the rollout, not to the client.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson
import verifiers as vf

from millrace.env_server.adapters.samples import MAX_ROLLOUTS, SPANS, engine_spans
from millrace.env_server.adapters.scoring import judges
from millrace.env_server.engine_access import (
    ENGINE_LOST_MARK,
    EXTERNAL_MAX_ATTEMPTS,
    EXTERNAL_RETRIED_STATUSES,
    LOST_STATUSES,
    MAX_ATTEMPTS,
    REFUSED_STATUSES,
    RETRIED_STATUSES,
    engine_access,
    external_pause_s,
    retry_pause_s,
)
from millrace.env_server.library.endpoints import arguments_text, sentence_of
from millrace.env_server.library.v0 import (
    ClientConfig,
    OpenAIChatCompletionsClient,
    OpenAICompletionsClient,
    Response,
    ResponseMessage,
    ResponseTokens,
    ToolCall,
    Usage,
)
from millrace.env_server.own_sampling import completed, merged, sent_of
from millrace.rollouts import parameters

logger = logging.getLogger(__name__)

_SHOWN_CHARS = 300
_BEYOND_ANY_CONTEXT = 2**31 - 1
"""`max_tokens` of a completion without a limit: the longest that a request may ask for, which our engines cut."""
_FINISH_REASONS = frozenset({"stop", "length", "tool_calls"})
_TOO_LONG = ("context length", "maximum model length", "prompt_too_long", "exceeded model", "configured limit")


class EngineAuthError(vf.ModelError):
    """An endpoint that is not ours refused the credentials (401, 403)."""


class EngineLostError(vf.ModelError):
    """The engine went away: nothing listens, the connection broke off, or it does not serve us (see `engine_loss`)."""

    def __init__(self, message: str) -> None:
        super().__init__(f"{ENGINE_LOST_MARK} {message}")


class RetryLog:
    """Counts the tries of each rollout that had to be repeated, until the rollout's adapter takes the number."""

    def __init__(self) -> None:
        self._counts: OrderedDict[str, int] = OrderedDict()

    def note(self, rollout_id: str) -> None:
        """Count a failed try of a rollout. Beyond MAX_ROLLOUTS rollouts the oldest count is forgotten."""
        self._counts[rollout_id] = self._counts.get(rollout_id, 0) + 1
        while len(self._counts) > MAX_ROLLOUTS:
            self._counts.popitem(last=False)

    def take(self, rollout_id: str) -> int:
        """Return the number of failed tries of a rollout, and forget it."""
        return self._counts.pop(rollout_id, 0)


# Equal requests that rollouts make at the same time, such as the first turns of a group, become one request with
# several choices.
#
# One request costs a fraction of what many cost, on both sides. The engine answers each choice as soon as it has
# ended (`rollouts.choices_wire`), so no rollout waits for a longer one. Each rollout gets the status, tokens,
# log-probs, spans and errors of its own choice, as from a request of its own. A cancelled rollout does not disturb the
# others; its choice is computed to its end, unless no other rollout waits for the request.
WINDOW_S = 0.005
"""How long the first rollout waits for others with the same request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The result of a request: a status with its body, parsed or not, or the error that broke it off."""

    status: int = 0
    body: Any = b""
    retry_after: str | None = None
    streams_choices: bool = False
    """Whether the server declares that it can send choices one by one."""
    error: Exception | None = None


@dataclass(eq=False, slots=True)
class _Asking:
    """Rollouts with the same request; the request is sent with the session id of the first one."""

    session_id: str
    waiting: list["asyncio.Future[Reply | None]"] = field(default_factory=list)
    sending: "asyncio.Task[None] | None" = None

    @property
    def is_abandoned(self) -> bool:
        """Return whether no rollout waits for a reply any more."""
        return all(waiter.done() for waiter in self.waiting)


Post = Callable[[bytes, str], AbstractAsyncContextManager[aiohttp.ClientResponse]]
"""Sends a body, with the id of a session."""


class AskedTogether:
    """Sends equal requests of one client as one; `alone` sends a single one and returns network errors as a Reply."""

    def __init__(self, post: Post, alone: Callable[[bytes, str], Awaitable[Reply]]) -> None:
        self._post = post
        self._alone = alone
        self._open: dict[bytes, _Asking] = {}
        self._sending: set[asyncio.Task[None]] = set()

    async def ask(self, body: Mapping[str, Any], session_id: str) -> Reply | None:
        """Send a request, together with equal ones that come within `WINDOW_S`, and return this one's reply.

        Returns None if the server does not split choices, so that the caller has to send the request alone. Network
        errors are in the reply. If all who wait are cancelled, the request is too.
        """
        loop = asyncio.get_running_loop()
        key = orjson.dumps(body)
        asking = self._open.get(key)
        if asking is None:
            asking = self._open[key] = _Asking(session_id)
            loop.call_later(WINDOW_S, self._send, key, asking)
        waiter: asyncio.Future[Reply | None] = loop.create_future()
        asking.waiting.append(waiter)
        if len(asking.waiting) == parameters.MAX_CHOICES:
            self._send(key, asking)
        try:
            return await waiter
        except asyncio.CancelledError:
            if asking.sending is not None and asking.is_abandoned:
                asking.sending.cancel()  # the engine ends what it generates when the connection closes
            raise

    def _send(self, key: bytes, asking: _Asking) -> None:
        """Send the equal requests that came so far as one, without those that were cancelled.

        A second call does nothing.
        """
        if asking.sending is not None:
            return  # there were as many as one request takes before the time was over
        del self._open[key]
        asking.waiting = [waiter for waiter in asking.waiting if not waiter.done()]
        if asking.waiting:
            asking.sending = asyncio.create_task(self._answer(key, asking), name="asked together")
            self._sending.add(asking.sending)
            asking.sending.add_done_callback(self._sending.discard)

    async def _answer(self, key: bytes, asking: _Asking) -> None:
        """Make the request and give every waiter its reply; any error becomes the reply of those that have none."""
        error: Exception | None = None
        try:
            if len(asking.waiting) == 1:
                _give(asking.waiting[0], await self._alone(key, asking.session_id))
            else:
                await self._answer_many(key, asking)
        except Exception as problem:  # noqa: BLE001 - crosses to the rollouts that wait, which raise it
            error = problem
        finally:
            lost = error or aiohttp.ClientPayloadError("the answer ended before every choice was there")
            for waiter in asking.waiting:
                _give(waiter, Reply(error=lost))

    async def _answer_many(self, key: bytes, asking: _Asking) -> None:
        waiting = asking.waiting
        more = orjson.dumps({"n": len(waiting), parameters.FIELD: True})
        combined = key[:-1] + b"," + more[1:]  # the bytes that all agreed on, a JSON object that is not empty
        async with self._post(combined, asking.session_id) as reply:
            if reply.status != 200 or reply.content_type != parameters.CONTENT_TYPE:
                raw, after = await reply.read(), reply.headers.get("Retry-After")
                whole = None if reply.status == 200 else Reply(status=reply.status, body=raw, retry_after=after)
                for waiter in waiting:
                    _give(waiter, whole)
                return
            rest = bytearray()
            async for part in reply.content.iter_any():
                *lines, last = part.split(b"\n")
                for line in lines:
                    _take(waiting, bytes(rest) + line)
                    rest.clear()
                rest += last


def _take(waiting: list["asyncio.Future[Reply | None]"], line: bytes) -> None:
    """Give a line's choice to the waiter with its index; raise aiohttp.ClientPayloadError for a malformed line."""
    try:
        choice = orjson.loads(line)
        index, status, body = choice["index"], choice["status"], choice["body"]
        waiter = waiting[index] if isinstance(index, int) and index >= 0 else None
    except (ValueError, KeyError, TypeError, IndexError):
        waiter, status, body = None, None, None
    if waiter is None or not isinstance(status, int) or not isinstance(body, dict):
        raise aiohttp.ClientPayloadError(f"no line with a choice: {line[:200].decode('utf-8', 'replace')}")
    _give(waiter, Reply(status=status, body=body, streams_choices=True))


def _give(waiter: "asyncio.Future[Reply | None]", reply: Reply | None) -> None:
    if not waiter.done():
        waiter.set_result(reply)


class LeanClient(OpenAIChatCompletionsClient):
    """A client of one engine; many share one HTTP session."""

    route = "chat/completions"
    """The path after the base URL."""

    def __init__(
        self, base_url: str, session: aiohttp.ClientSession, *, is_external: bool = False, api_key: str = ""
    ) -> None:
        """Take `is_external`: whether the endpoint is not ours, so that requests use OpenAI's parameters only."""
        self._base_url = base_url.rstrip("/")
        self._session = session
        self._is_external = is_external
        self._api_key = api_key
        self._url = f"{self._base_url}/{self.route}"
        self._streams_choices = False
        self._together = AskedTogether(self._post, self._ask_alone)
        self.retries = RetryLog()
        super().__init__(ClientConfig(api_base_url=base_url))

    def setup_client(self, config: ClientConfig) -> Any:
        """Return None, because no SDK client is used."""
        return None

    async def close(self) -> None:
        """Do nothing: the HTTP session is its owner's to close."""

    async def get_native_response(  # type: ignore[override]
        self, prompt: Any, model: str, sampling_args: dict[str, Any], tools: list[Any] | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Post the request and return the answer as parsed JSON; raise vf.Error types only.

        What was sent of sampling parameters is added as `_sent`, the rollout's id as `_session_id`. A request that the
        engine refuses is noted in SPANS, unless a reward function made it.
        """
        body = self.native_body(prompt, model, sampling_args, tools)
        state = kwargs.get("state")
        session_id = str(state.get("trajectory_id") or "") if state is not None else ""
        sent = None if self._is_external else sent_of(body)
        try:
            response = await self._answer(body, session_id)
        except vf.ModelError as error:
            if hasattr(error, "status_code") and sent is not None and session_id and not judges.is_scoring():
                SPANS.note(session_id, (), (), sent)
            raise
        response["_session_id"], response["_sent"] = session_id, sent
        return response

    def native_body(
        self, prompt: Any, model: str, sampling_args: Mapping[str, Any], tools: list[Any] | None
    ) -> dict[str, Any]:
        """Return the JSON object to post, in the form of `request_body`."""
        return request_body(prompt, model, sampling_args, tools, wants_tokens=not self._is_external)

    async def _answer(self, body: Mapping[str, Any], session_id: str) -> dict[str, Any]:
        """Post until the answer is 200, as often as allowed, and return its object; raise a vf.Error otherwise.

        An endpoint of ours is tried again only where it did no work: for some statuses and failed connections.
        """
        url = self._url
        attempts = EXTERNAL_MAX_ATTEMPTS if self._is_external else MAX_ATTEMPTS
        for attempt in range(1, attempts + 1):
            reply = await self._ask(body, session_id)
            if reply.status == 200:
                return self._parsed(reply.body)
            match reply.error:
                case None:
                    if attempt == attempts or not self._is_retried(reply.status):
                        raw = reply.body if isinstance(reply.body, bytes) else orjson.dumps(reply.body)
                        raise _status_error(url, reply.status, raw, attempts=attempt, is_external=self._is_external)
                    problem = f"status {reply.status}"
                case aiohttp.ClientConnectorError() as error:
                    if attempt == attempts:
                        raise EngineLostError(f"cannot connect to {url}, {attempt} attempts: {error}") from error
                    problem = str(error)
                case aiohttp.ClientError() | TimeoutError() | ConnectionError() as error:
                    if attempt == attempts or not self._is_external:
                        raise EngineLostError(f"POST {url} broke off: {type(error).__name__}: {error}") from error
                    problem = f"broke off: {type(error).__name__}"
                case error:
                    raise error
            await self._pause(session_id, attempt, asked=reply.retry_after, problem=problem)
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _ask(self, body: Mapping[str, Any], session_id: str) -> Reply:
        """Post once: together with equal requests of other rollouts, if the engine sends choices one by one."""
        # With a seed, equal requests get equal answers, and choices of one request do not. A request of a reward
        # function has a deadline of its own.
        if self._streams_choices and not body.keys() & {"seed", "n", "stream"} and not judges.is_scoring():
            reply = await self._together.ask(body, session_id)
            self._streams_choices = reply is not None
            if reply is not None:
                return reply
        return await self._ask_alone(orjson.dumps(body), session_id)

    async def _ask_alone(self, body: bytes, session_id: str) -> Reply:
        try:
            async with self._post(body, session_id) as reply:
                raw, asked = await reply.read(), reply.headers.get("Retry-After")
                if reply.status == 200 and not self._is_external:
                    self._streams_choices = reply.headers.get(parameters.HEADER) == parameters.LINES
                return Reply(status=reply.status, body=raw, retry_after=asked)
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            return Reply(error=error)

    def _post(self, body: bytes, session_id: str) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        headers = {"content-type": "application/json"}
        if session_id:
            headers["X-Session-ID"] = session_id
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        trust = None
        if not self._is_external:
            headers |= engine_access().headers(self._url)
            trust = engine_access().context()
        # A redirect would carry the key and the prompt to a server that the config does not name.
        return self._session.post(
            self._url, data=body, allow_redirects=False, headers=headers, ssl=True if trust is None else trust
        )

    def _parsed(self, body: Any) -> dict[str, Any]:
        """Return the JSON object of a body, which may be parsed already.

        Raise vf.InvalidModelResponseError if it is none.
        """
        raw = body
        if isinstance(body, bytes):
            try:
                body = orjson.loads(raw)
            except orjson.JSONDecodeError as error:
                raise vf.InvalidModelResponseError(
                    f"{self._base_url} answered 200 with what is not JSON ({error}): {_shown(raw)}"
                ) from error
        if not isinstance(body, dict):
            raise vf.InvalidModelResponseError(f"{self._base_url} answered with no JSON object: {_shown(raw)}")
        return body

    def _is_retried(self, status: int) -> bool:
        return status in (EXTERNAL_RETRIED_STATUSES if self._is_external else RETRIED_STATUSES)

    async def _pause(self, session_id: str, attempt: int, *, asked: str | None, problem: str) -> None:
        self.retries.note(session_id)
        if not self._is_external:
            await asyncio.sleep(retry_pause_s(attempt))
            return
        pause_s = external_pause_s(attempt, asked)
        fields = {"url": self._base_url, "problem": problem, "attempt": attempt, "pause_s": round(pause_s, 1)}
        logger.warning("the endpoint did not serve a request, trying again", extra=fields)
        await asyncio.sleep(pause_s)

    async def raise_from_native_response(self, response: Any) -> None:
        """Raise a vf error unless the answer has exactly one choice, with a message that is not empty.

        A choice of our engines without text passes if it has tokens: one whose only token ends the sequence is what the
        policy chose, and it is trained on with the reward that it earns. Other endpoints send no tokens: their empty
        answer passes if it ended by itself, because it is the model's, and playing it again would flatter the model.
        """
        choices = response.get("choices")
        if not isinstance(choices, list) or len(choices) != 1:
            count = len(choices) if isinstance(choices, list) else 0
            raise vf.InvalidModelResponseError(f"{self._base_url} answered with {count} choices, expected 1")
        choice = choices[0]
        if not isinstance(choice, Mapping) or not isinstance(choice.get("message"), Mapping):
            raise vf.InvalidModelResponseError(f"{self._base_url} answered with a choice without a message")
        message = choice["message"]
        is_answer = self._is_external and choice.get("finish_reason") in _FINISH_REASONS
        if not (message.get("content") or message.get("tool_calls") or choice.get("token_ids") or is_answer):
            raise vf.EmptyModelResponseError(f"{self._base_url} answered with no text, no tool calls and no tokens")

    async def from_native_response(self, response: Any) -> Response:
        """Return the typed response; its `tokens` are None unless ids and log-probs are all there.

        Tokens are noted in SPANS with their policy spans, for the adapter.
        """
        choice = response["choices"][0]
        message = choice["message"]
        tokens = _tokens(response, choice)
        if tokens is not None and response["_session_id"]:
            SPANS.note(response["_session_id"], tokens.completion_ids, engine_spans(choice), response["_sent"])
        finish_reason = choice.get("finish_reason")
        return Response(
            id=str(response.get("id") or ""),
            created=0 if (created := response.get("created")) is None else int(created),
            model=str(response.get("model") or ""),
            usage=_usage(response.get("usage"), tokens),
            message=ResponseMessage(
                content=message.get("content") or "",
                reasoning_content=message.get("reasoning") or message.get("reasoning_content"),
                tool_calls=_tool_calls(message.get("tool_calls")),
                finish_reason=finish_reason if finish_reason in _FINISH_REASONS else None,
                is_truncated=finish_reason == "length",
                tokens=tokens,
            ),
        )


class LeanCompletionsClient(LeanClient):
    """Posts texts to complete to our engines, for environments of the library's `message_type="completion"`.

    The policy continues the prompt, without a chat template. Messages are joined as the library's own client does it.
    Answers are brought into the shape of chat completions, and then treated like those.
    """

    route = "completions"
    to_native_prompt = OpenAICompletionsClient.to_native_prompt  # type: ignore[assignment] - of messages, a text
    to_native_tool = OpenAICompletionsClient.to_native_tool  # type: ignore[assignment] - there are none

    def native_body(
        self, prompt: Any, model: str, sampling_args: Mapping[str, Any], tools: list[Any] | None
    ) -> dict[str, Any]:
        """Return the request body: the environment's parameters and the request for exact tokens."""
        args = {key: value for key, value in sampling_args.items() if value is not None}
        extra_body = args.pop("extra_body", None) or {}
        # Left out, or null, it would be 16 tokens. A chat gets whatever fits, and our engines cut this one to that.
        asked = completed({"max_tokens": _BEYOND_ANY_CONTEXT, **merged(args, extra_body)})
        body = {"model": model, "prompt": prompt, **asked}
        return body | {"logprobs": 0, "return_token_ids": True, "return_tokens_as_token_ids": True}

    async def get_native_response(  # type: ignore[override]
        self, prompt: Any, model: str, sampling_args: dict[str, Any], tools: list[Any] | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Post the request and return the answer in the shape of a chat completion; raise vf.Error types only."""
        answer = await super().get_native_response(prompt, model, sampling_args, tools, **kwargs)
        choices = answer.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict) and isinstance(choice.get("text"), str):
                choice["message"] = {"role": "assistant", "content": choice["text"]}
                answer["prompt_token_ids"] = choice.get("prompt_token_ids")
        return answer


def request_body(
    prompt: Any, model: str, sampling_args: Mapping[str, Any], tools: list[Any] | None, *, wants_tokens: bool = True
) -> dict[str, Any]:
    """Return the JSON object of a chat request with the environment's sampling parameters, without those that are None.

    `wants_tokens` is for engines of ours: every parameter that is missing is then set (`completed`), and exact tokens
    and log-probs are asked for. Other endpoints get the parameters and tools as they are.
    """
    args = {key: value for key, value in sampling_args.items() if value is not None}
    extra_body = args.pop("extra_body", None) or {}
    if "max_tokens" in args:
        args["max_completion_tokens"] = args.pop("max_tokens")
    asked = completed(merged(args, extra_body)) if wants_tokens else {**args, **extra_body}
    body: dict[str, Any] = {"model": model, "messages": prompt, **asked}
    if wants_tokens:
        body |= {"logprobs": True, "return_token_ids": True}
    if tools:
        body["tools"] = [_unconstrained(tool) for tool in tools] if wants_tokens else tools
    return body


def _unconstrained(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tool without `strict`, which the library sets on every tool.

    With it vLLM samples no call that breaks the schema, so the trainer would compute other log-probs than the engine.
    """
    function = {key: value for key, value in tool["function"].items() if key != "strict"}
    return {**tool, "function": function}


def _status_error(url: str, status: int, raw: bytes, *, attempts: int, is_external: bool) -> vf.Error:
    text = raw.decode("utf-8", "replace").lower()
    tries = f" ({attempts} attempts)" if attempts > 1 else ""
    message = f"POST {url} answered {status}{tries}: {_shown(raw)}"
    if status in LOST_STATUSES or (status in REFUSED_STATUSES and not is_external):
        return EngineLostError(message)
    if status in REFUSED_STATUSES:
        return EngineAuthError(message)
    if status == 400 and any(phrase in text for phrase in _TOO_LONG):
        return vf.OverlongPromptError(sentence_of(raw) or message)
    error = vf.ModelError(message)
    error.status_code = status  # type: ignore[attr-defined] - as other clients' errors have it
    return error


def _shown(raw: bytes) -> str:
    return raw[:_SHOWN_CHARS].decode("utf-8", "replace")


def _tokens(response: Mapping[str, Any], choice: Mapping[str, Any]) -> ResponseTokens | None:
    prompt_ids, completion_ids = response.get("prompt_token_ids"), choice.get("token_ids")
    reported = choice.get("logprobs") or {}
    logprobs: Any = reported.get(parameters.LOGPROBS)
    content = reported.get("content")
    if logprobs is None and isinstance(content, list):
        logprobs = [entry.get("logprob") for entry in content if isinstance(entry, Mapping)]
    if not (isinstance(prompt_ids, list) and isinstance(completion_ids, list) and isinstance(logprobs, list)):
        return None
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in logprobs):
        return None
    # A count that does not match is kept: samples.py says so by name.
    return ResponseTokens(
        prompt_ids=prompt_ids,
        prompt_mask=[0] * len(prompt_ids),
        completion_ids=completion_ids,
        completion_mask=[1] * len(completion_ids),
        completion_logprobs=logprobs,
    )


def _usage(usage: Any, tokens: ResponseTokens | None) -> Usage:
    known = usage if isinstance(usage, Mapping) else {}
    num_prompt = int(known.get("prompt_tokens") or (len(tokens.prompt_ids) if tokens else 0))
    num_completion = int(known.get("completion_tokens") or (len(tokens.completion_ids) if tokens else 0))
    return Usage(
        prompt_tokens=num_prompt,
        reasoning_tokens=0,
        completion_tokens=num_completion,
        total_tokens=num_prompt + num_completion,
    )


def _tool_calls(raw: Any) -> list[ToolCall] | None:
    calls: list[ToolCall] = []
    for index, item in enumerate(raw or ()):
        function = item.get("function") or {}
        calls.append(
            ToolCall(
                id=str(item.get("id") or f"call_{index}"),
                name=str(function.get("name") or ""),
                arguments=arguments_text(function.get("arguments")),
            )
        )
    return calls or None
