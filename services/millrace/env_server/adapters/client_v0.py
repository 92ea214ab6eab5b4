"""The v0 model client: messages in, exact tokens out, over `POST {base_url}/chat/completions`, or `/completions`.

It replaces the stock client of `verifiers` (OpenAI SDK on httpx), which costs five times the CPU and collapses at 512
concurrent requests because its connection pool is scanned per request. Errors are typed for `v0.py`, retries are
few and only where the engine did no work, and the deadline belongs to the rollout, not to the client.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

import aiohttp
import orjson
import verifiers as vf

from millrace.env_server.adapters import judges
from millrace.env_server.adapters.asked_together import AskedTogether, Reply
from millrace.env_server.adapters.samples import MAX_ROLLOUTS, SPANS, engine_spans
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
from millrace.errors import CorruptObjectError
from millrace.rollouts import parameters
from millrace.rollouts.routed_experts import RoutedCall, from_answer

logger = logging.getLogger(__name__)

_SHOWN_CHARS = 300
_BEYOND_ANY_CONTEXT = 2**31 - 1
"""`max_tokens` of a completion without a limit: the longest that a request may ask for, which our engines cut."""
_INTEGERS, _NUMBERS = frozenset({int}), frozenset({int, float})
_FINISH_REASONS = frozenset({"stop", "length", "tool_calls"})
_TOO_LONG = ("context length", "maximum model length", "prompt_too_long", "exceeded model", "configured limit")


class EngineAuthError(vf.ModelError):
    """An endpoint that is not ours refused the credentials (401, 403)."""


class EngineLostError(vf.ModelError):
    """The engine went away: nothing listens, the connection broke off, or it refuses to serve (`_status_error`)."""

    def __init__(self, message: str) -> None:
        super().__init__(f"{ENGINE_LOST_MARK} {message}")


class RetryLog:
    """Counts the failed tries of each rollout's requests, until the rollout's adapter takes the number."""

    def __init__(self) -> None:
        self._counts: OrderedDict[str, int] = OrderedDict()

    def note(self, rollout_id: str) -> None:
        """Count one more failed try of a rollout. Beyond MAX_ROLLOUTS rollouts the oldest one's count is dropped."""
        self._counts[rollout_id] = self._counts.get(rollout_id, 0) + 1
        while len(self._counts) > MAX_ROLLOUTS:
            self._counts.popitem(last=False)

    def take(self, rollout_id: str) -> int:
        """Return the number of failed tries of a rollout and set it to 0."""
        return self._counts.pop(rollout_id, 0)


class LeanClient(OpenAIChatCompletionsClient):
    """A client of one engine; many share one HTTP session."""

    route = "chat/completions"
    """The path after the base URL."""

    def __init__(
        self, base_url: str, session: aiohttp.ClientSession, *, is_external: bool = False, api_key: str = ""
    ) -> None:
        """Make a client of the endpoint `base_url`; `session` stays the caller's to close.

        `is_external` is whether the endpoint is not ours, so that requests use OpenAI's parameters only. `api_key` is
        sent as a bearer token; "" sends none.
        """
        self._base_url = base_url.rstrip("/")
        self._session = session
        self._is_external = is_external
        self._api_key = api_key
        self._url = f"{self._base_url}/{self.route}"
        self._streams_choices = False
        self._together = AskedTogether(self._post)
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

        `prompt` and `tools` are in the API's own form. The answer gets two more keys: `_sent`, the sampling parameters
        of the request (None for an external endpoint), and `_session_id`, the id of the rollout of `kwargs["state"]`. A
        request that the engine refuses is noted in SPANS, unless a reward function made it.
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
        """Return the JSON object to post, as `request_body` makes it; engines of ours are asked for exact tokens."""
        return request_body(prompt, model, sampling_args, tools, wants_tokens=not self._is_external)

    async def _answer(self, body: Mapping[str, Any], session_id: str) -> dict[str, Any]:
        """Post the body until the answer is 200, as often as allowed, and return its JSON object; raise a vf.Error
        otherwise.

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
        """Post the body once and return the reply, which may be a network error.

        If the engine can send choices one by one, the request is joined with equal requests of other rollouts.
        """
        # With a seed, equal requests get equal answers, and choices of one request do not. A request of a reward
        # function has a deadline of its own.
        if self._streams_choices and not body.keys() & {"seed", "n", "stream"} and not judges.is_scoring():
            reply = await self._together.ask(body, session_id)
            # What comes whole is from an engine that has become another.
            self._streams_choices = reply is not None and (reply.status != 200 or reply.streams_choices)
            if reply is not None:
                return reply
        return await self._ask_alone(orjson.dumps(body), session_id)

    async def _ask_alone(self, body: bytes, session_id: str) -> Reply:
        """Post the encoded body alone and return the reply, which may be a network error.

        Remembers whether an engine of ours declares that it can send choices one by one.
        """
        try:
            async with self._post(body, session_id) as reply:
                raw, asked = await reply.read(), reply.headers.get("Retry-After")
                if reply.status == 200 and not self._is_external:
                    self._streams_choices = reply.headers.get(parameters.HEADER) == parameters.LINES
                return Reply(status=reply.status, body=raw, retry_after=asked)
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            return Reply(error=error)

    def _post(self, body: bytes, session_id: str) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Return the context manager of a POST of `body`; engines of ours get their token, others the API key."""
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
        """Return the JSON object of `body`, bytes or a parsed value; raise vf.InvalidModelResponseError if it is
        none.
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
        """Return whether a call answered with that HTTP status is tried again: of our engine 429 and 503 only.

        Of an external endpoint more statuses are, such as 408, 500 and 502, since no other replica could answer.
        """
        return status in (EXTERNAL_RETRIED_STATUSES if self._is_external else RETRIED_STATUSES)

    async def _pause(self, session_id: str, attempt: int, *, asked: str | None, problem: str) -> None:
        """Count a failed try, the `attempt`-th (from 1), of the rollout `session_id`, and sleep before the next one.

        For external endpoints alone, `asked` (a `Retry-After` header or None) sets the pause, and `problem` is logged.
        """
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
        answer passes if it has a finish reason, because it is the model's, and playing it again would flatter the
        model.
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
        """Convert an answer's JSON to the library's Response; its `tokens` are None unless ids and log-probs are all
        there.

        Tokens are noted in SPANS with their policy spans and sampling parameters, for the adapter.
        """
        choice = response["choices"][0]
        message = choice["message"]
        tokens = _tokens(response, choice)
        if tokens is not None and response["_session_id"]:
            spans, routed = engine_spans(choice), _routed(choice, tokens)
            session_id, sent = response["_session_id"], response["_sent"]
            SPANS.note(session_id, tokens.completion_ids, spans, sent, routed, prompt_ids=tokens.prompt_ids)
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
        """Return the request body of a completion of the text `prompt`: the environment's parameters, and exact tokens.

        Without `max_tokens` among the parameters there is no limit but the engine's. `tools` are ignored.
        """
        args = {key: value for key, value in sampling_args.items() if value is not None}
        extra_body = args.pop("extra_body", None) or {}
        # Left out, or null, it would be 16 tokens. A chat gets whatever fits, and our engines cut this one to that.
        asked = completed({"max_tokens": _BEYOND_ANY_CONTEXT, **merged(args, extra_body)})
        body = {"model": model, "prompt": prompt, **asked}
        return body | {"logprobs": 0, "return_token_ids": True, "return_tokens_as_token_ids": True}

    async def get_native_response(  # type: ignore[override]
        self, prompt: Any, model: str, sampling_args: dict[str, Any], tools: list[Any] | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Post the text to complete and return the answer in the shape of a chat completion; raise vf.Error types
        only.
        """
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

    `wants_tokens` is for engines of ours: missing parameters are set (`completed`), exact tokens and log-probs asked
    for, and tools lose `strict`. Other endpoints get the parameters and tools as they are.
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
    """Return the error for an answer of a status other than 200, by its status and text.

    It is EngineLostError for an engine that is gone or, if it is ours, refuses us; EngineAuthError for an external
    endpoint that refuses the credentials; vf.OverlongPromptError for a prompt that is too long; else vf.ModelError with
    the attribute `status_code`. `raw` is the answer's body; `attempts` is how often it was tried, for the message.
    """
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
    """Return the beginning of a body as text, for a message."""
    return raw[:_SHOWN_CHARS].decode("utf-8", "replace")


def _tokens(response: Mapping[str, Any], choice: Mapping[str, Any]) -> ResponseTokens | None:
    """Return the exact tokens of an answer's choice, with log-probs; None if ids or log-probs are missing or malformed.
    Their counts are not compared.
    """
    prompt_ids, completion_ids = response.get("prompt_token_ids"), choice.get("token_ids")
    reported = choice.get("logprobs") or {}
    logprobs: Any = reported.get(parameters.LOGPROBS)
    content = reported.get("content")
    if logprobs is None and isinstance(content, list):
        logprobs = [entry.get("logprob") for entry in content if isinstance(entry, Mapping)]
    if not (isinstance(prompt_ids, list) and isinstance(completion_ids, list) and isinstance(logprobs, list)):
        return None
    if not (_NUMBERS.issuperset(map(type, logprobs)) and _INTEGERS.issuperset(map(type, prompt_ids))):
        return None
    if not _INTEGERS.issuperset(map(type, completion_ids)):
        return None
    # A count that does not match is kept: samples.py says so by name. Every item's type is checked above: the library's
    # own check of five lists, one of them the whole prompt of each turn, would cost more than parsing the answer.
    return ResponseTokens.model_construct(
        prompt_ids=prompt_ids,
        prompt_mask=[0] * len(prompt_ids),
        completion_ids=completion_ids,
        completion_mask=[1] * len(completion_ids),
        completion_logprobs=logprobs,
    )


def _routed(choice: Mapping[str, Any], tokens: ResponseTokens) -> RoutedCall | None:
    """Return the experts of an answer's choice; None if the engine records none.

    Raises vf.InvalidModelResponseError for what are not the experts of its `tokens`.
    """
    try:
        return from_answer(choice, num_tokens=len(tokens.prompt_ids) + len(tokens.completion_ids))
    except CorruptObjectError as error:
        raise vf.InvalidModelResponseError(str(error)) from error


def _usage(usage: Any, tokens: ResponseTokens | None) -> Usage:
    """Return the token counts of an answer's `usage`, or the numbers of `tokens` where it has none."""
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
    """Convert an answer's tool calls to the library's type; None if there are none. One without an id gets
    `call_INDEX`.
    """
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
