"""Bodies of the HTTP responses: OpenAI's shapes with vLLM's token ids, and the policy spans that Millrace adds.

Every choice carries `policy_spans`: which policy generated which tokens, as [start, end) over the completion's tokens.
"""

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import orjson
from fastapi import Response
from transformers import PreTrainedTokenizerBase

from millrace.errors import (
    CapacityError,
    InternalError,
    InvalidSpecError,
    InvalidStateError,
    MillraceError,
    NotFoundError,
    UnavailableError,
    Violation,
)
from millrace.inference.engine import FinishReason, GenerateRequest, Generation, PromptScores
from millrace.inference.http.access import Receive, Send
from millrace.inference.http.parsers import ChatParsers, ToolCall
from millrace.inference.http.schema import ChatBody, CompletionBody, CompletionCommon, GenerateBody, SamplingBody
from millrace.rollouts import parameters
from millrace.rollouts.parameters import CONTENT_TYPE, HEADER, LINES
from millrace.rollouts.routed_experts import FIELD, START_FIELD, to_answer

MIN_LOGPROB = -9999.0
"""Written for minus infinity, which JSON does not have; vLLM writes the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """A prompt and one completion of it."""

    prompt_ids: tuple[int, ...]
    generation: Generation


def error_body(error: MillraceError) -> tuple[int, dict[str, Any]]:
    """Return the HTTP status for an error, and the answer's body in OpenAI's form."""
    status, kind = next((entry for cls, *entry in _STATUS if isinstance(error, cls)), (500, "InternalServerError"))
    param = error.violations[0].field if isinstance(error, InvalidSpecError) else None
    return status, {"error": {"message": str(error), "type": kind, "param": param, "code": status}}


_STATUS: list[Any] = [
    (InvalidSpecError, 400, "BadRequestError"),
    (InvalidStateError, 400, "BadRequestError"),
    (NotFoundError, 404, "NotFoundError"),
    (CapacityError, 429, "RateLimitError"),
    (UnavailableError, 503, "ServiceUnavailableError"),
    (InternalError, 500, "InternalServerError"),
]


def completion_text(tokenizer: PreTrainedTokenizerBase, generation: Generation, sampling: SamplingBody) -> str:
    """Return a completion as text, up to the stop string that ended it.

    `sampling` is the request's. The token or string that ended it is left out, unless `include_stop_str_in_output` is
    set.
    """
    ids = generation.token_ids.tolist()
    is_stopped = generation.finish_reason is FinishReason.STOP
    if is_stopped and not isinstance(generation.stop_reason, str) and not sampling.include_stop_str_in_output:
        ids.pop()
    text = str(tokenizer.decode(ids, skip_special_tokens=sampling.skip_special_tokens))
    if is_stopped and isinstance(stop := generation.stop_reason, str):
        begin = 0
        if sampling.min_tokens:  # a stop string within the least length ended nothing
            before = str(tokenizer.decode(ids[:-1], skip_special_tokens=sampling.skip_special_tokens))
            # The last token has completed the stop string, which therefore cannot begin before this place.
            begin = max(0, len(before) - len(stop) + 1)
        if (at := text.find(stop, begin)) < 0:
            return text
        text = text[: at + len(stop)] if sampling.include_stop_str_in_output else text[:at]
    return text


def chat_body(
    request_id: str,
    model: str,
    body: ChatBody,
    tokenizer: PreTrainedTokenizerBase,
    completed: list[Completed],
    *,
    parsers: ChatParsers,
) -> dict[str, Any]:
    """Return the body of an answer to the chat request `body`, with a choice for each of `completed`.

    `model` is the name that it shows; `parsers` find tool calls and reasoning in texts.
    """
    choices = []
    for index, item in enumerate(completed):
        message, finish = _message(body, tokenizer, item.generation, parsers), str(item.generation.finish_reason)
        if "tool_calls" in message and item.generation.finish_reason is FinishReason.STOP:
            finish = "tool_calls"
        choice: dict[str, Any] = {"index": index, "message": message, "finish_reason": finish}
        choice["logprobs"] = _chat_logprobs(body, tokenizer, item.generation) if body.logprobs else None
        choices.append({**choice, **_extras(body, item)})
    whole = _envelope(request_id, "chat.completion", model, choices, _usage(completed, body.n))
    if body.return_token_ids:
        whole["prompt_token_ids"] = list(completed[0].prompt_ids)
    return whole


def _message(
    body: ChatBody, tokenizer: PreTrainedTokenizerBase, generation: Generation, parsers: ChatParsers
) -> dict[str, Any]:
    """Return a completion as a chat message, with tool calls and reasoning if the parsers find any.

    Parsers get the text with special tokens, because some models mark their calls with them.
    """
    parsed = None
    if parsers.may_find(tools=body.offered_tools):
        whole = body.model_copy(update={"skip_special_tokens": False})
        text = completion_text(tokenizer, generation, whole)
        parsed = parsers.parse_completion(
            text, tools=body.offered_tools, template_kwargs=body.chat_template_kwargs or {}
        )
    if parsed is None:
        return {"role": "assistant", "content": completion_text(tokenizer, generation, body)}
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
    if parsed.reasoning is not None:
        message["reasoning"] = parsed.reasoning
    if parsed.calls:
        message["tool_calls"] = [_tool_call(call) for call in parsed.calls]
    return message


def _tool_call(call: ToolCall) -> dict[str, Any]:
    """Return a tool call in OpenAI's form, with a new id."""
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": call._asdict()}


def text_body(
    request_id: str, model: str, body: CompletionBody, tokenizer: PreTrainedTokenizerBase, completed: list[Completed]
) -> dict[str, Any]:
    """Return the body of an answer to the request `body` of `/v1/completions`, with a choice for each of `completed`.

    `model` is the name that it shows.
    """
    choices = []
    for index, item in enumerate(completed):
        choice: dict[str, Any] = {
            "index": index,
            "text": completion_text(tokenizer, item.generation, body),
            "finish_reason": str(item.generation.finish_reason),
            "logprobs": None,
        }
        if body.logprobs is not None:
            choice["logprobs"] = {parameters.LOGPROBS: item.generation.logprobs.tolist()}
            if not body.stream_choices:  # whose clients read one column, without a name for every token
                choice["logprobs"]["tokens"] = _token_names(body, tokenizer, item.generation)
        choice |= _extras(body, item)
        if body.return_token_ids:
            choice["prompt_token_ids"] = list(item.prompt_ids)
        choices.append(choice)
    return _envelope(request_id, "text_completion", model, choices, _usage(completed, body.n))


def generate_body(request_id: str, body: GenerateBody, completed: list[Completed]) -> dict[str, Any]:
    """Return the body of an answer to the request `body` of `/inference/v1/generate`, with a choice for each of
    `completed`.

    Log-probs are always included, with tokens named `token_id:N`, as the route's clients require.
    """
    choices = []
    for index, item in enumerate(completed):
        ids, logprobs = item.generation.token_ids.tolist(), item.generation.logprobs.tolist()
        choices.append(
            {
                "index": index,
                "token_ids": ids,
                "logprobs": {
                    "content": [
                        {"token": f"token_id:{token}", "token_id": token, "logprob": logprob}
                        for token, logprob in zip(ids, logprobs, strict=True)
                    ]
                },
                "finish_reason": str(item.generation.finish_reason),
                "stop_reason": item.generation.stop_reason,
                "policy_spans": _spans(item.generation),
                **_experts(body.sampling_params, item),
            }
        )
    return {
        "request_id": request_id,
        "choices": choices,
        "prompt_logprobs": None,
        "kv_transfer_params": None,
        "usage": _usage(completed, body.sampling_params.n),
    }


def prompt_logprobs(
    prompt: Sequence[int], scores: PromptScores, tokenizer: PreTrainedTokenizerBase | None
) -> list[dict[str, Any] | None]:
    """Return a prompt's scores in vLLM's form: for each token a table with its id as key, None for the first token.

    Without a tokenizer the tokens' texts are None.
    """
    rows: list[dict[str, Any] | None] = [None]
    for token, logprob, rank in zip(prompt[1:], scores.logprobs.tolist(), scores.ranks.tolist(), strict=True):
        text = None if tokenizer is None else str(tokenizer.decode([token]))
        shown = max(logprob, MIN_LOGPROB)
        rows.append({str(token): {"logprob": shown, "rank": rank, "decoded_token": text}})
    return rows


def scored(prompt: Sequence[int], scores: PromptScores, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any]:
    """Return the two fields of an answer with a prompt's scores: `prompt_logprobs` in vLLM's form, and `prompt_policy`.

    The latter is the policy that computed the scores, None if it is not known.
    """
    policy = scores.policy
    whose = None if policy is None else {"lineage": policy.lineage, "version": policy.version}
    return {"prompt_logprobs": prompt_logprobs(prompt, scores, tokenizer), "prompt_policy": whose}


def stream_chunks(whole: dict[str, Any], *, wants_usage: bool) -> Iterator[bytes]:
    """Yield the finished answer `whole` as server-sent events: two chunks per choice, the usage if it is wanted,
    [DONE].

    The first chunk of a choice has the text, the token ids and the log-probs, the second one the finish reason and the
    policy spans.
    """
    is_chat = whole["object"] == "chat.completion"
    head = {key: whole[key] for key in ("id", "created", "model")}
    head["object"] = "chat.completion.chunk" if is_chat else "text_completion"
    if wants_usage:
        head["usage"] = None
    for choice in whole["choices"]:
        # Clients read the text from one chunk and the end of the choice from the next, as in a real stream.
        end = {key: choice[key] for key in ("finish_reason", "stop_reason", "policy_spans")}
        first: dict[str, Any] = {key: value for key, value in choice.items() if key not in end}
        first["finish_reason"] = None
        last: dict[str, Any] = {"index": choice["index"], "logprobs": None, **end}
        if is_chat:
            delta = dict(first.pop("message"))
            if calls := delta.pop("tool_calls", None):
                # In a stream each piece of a call has the index of the call that it continues.
                delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls)]
            first["delta"], last["delta"] = delta, {}
        else:
            last["text"] = ""
        extra = {"prompt_token_ids": whole["prompt_token_ids"]} if "prompt_token_ids" in whole else {}
        yield _event({**head, **extra, "choices": [first]})
        yield _event({**head, "choices": [last]})
    if wants_usage:
        yield _event({**head, "choices": [], "usage": whole["usage"]})
    yield b"data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> bytes:
    """Return one server-sent event with the data as JSON."""
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


def _envelope(
    request_id: str, kind: str, model: str, choices: list[dict[str, Any]], usage: dict[str, int]
) -> dict[str, Any]:
    """Return an answer of OpenAI's form around these choices; `kind` is its `object`."""
    return {
        "id": request_id,
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": usage,
    }


def _usage(completed: list[Completed], num_choices: int) -> dict[str, int]:
    """Return the token counts of an answer; `completed` has `num_choices` for each prompt, which counts once."""
    prompts = sum(len(item.prompt_ids) for item in completed[::num_choices])
    tokens = sum(len(item.generation.token_ids) for item in completed)
    return {"prompt_tokens": prompts, "completion_tokens": tokens, "total_tokens": prompts + tokens}


def _extras(body: CompletionCommon, item: Completed) -> dict[str, Any]:
    """Return the fields that Millrace and vLLM add to a choice.

    They are stop reason and policy spans, token ids if asked for, and experts if the engine records them and the answer
    is no stream.
    """
    generation = item.generation
    extras: dict[str, Any] = {"stop_reason": generation.stop_reason, "policy_spans": _spans(generation)}
    if body.return_token_ids:
        extras["token_ids"] = generation.token_ids.tolist()
    return extras if body.stream else extras | _experts(body, item)


def _experts(sampling: SamplingBody, item: Completed) -> dict[str, str]:
    """Return the field of a choice with the experts of its tokens, in vLLM's form; none if they are not recorded.

    Those of the first tokens of the prompt are left out, as many as the request says. Raises InvalidSpecError if it has
    fewer.
    """
    experts, start = item.generation.routed_experts, sampling.routed_experts_prompt_start or 0
    if experts is None:
        return {}
    if start > len(item.prompt_ids):
        message = f"the prompt has {len(item.prompt_ids)} tokens"
        wrong = Violation(field=START_FIELD, value=str(start), message=message)
        raise InvalidSpecError([wrong], reason="REQUEST_INVALID", remedy="send at most as many")
    return {FIELD: to_answer(experts[start:])}


def _spans(generation: Generation) -> list[dict[str, int]]:
    """Return which policy generated which tokens of a completion, as JSON objects."""
    return [
        {"lineage": span.lineage, "version": span.version, "start": span.start, "end": span.end}
        for span in generation.policy_spans
    ]


def _token_names(body: CompletionCommon, tokenizer: PreTrainedTokenizerBase, generation: Generation) -> list[str]:
    """Return the name of each sampled token: its text, or `token_id:N` if the request asks for that."""
    ids = generation.token_ids.tolist()
    if body.return_tokens_as_token_ids:
        return [f"token_id:{token}" for token in ids]
    texts = {token: str(tokenizer.decode([token])) for token in set(ids)}  # a call of `decode` costs 10 µs
    return [texts[token] for token in ids]


def _chat_logprobs(body: ChatBody, tokenizer: PreTrainedTokenizerBase, generation: Generation) -> dict[str, Any]:
    """Return a choice's log-probs in OpenAI's form; with `stream_choices` as one list, without a name for every
    token.
    """
    if body.stream_choices:
        return {parameters.LOGPROBS: generation.logprobs.tolist()}
    return {"content": _token_logprobs(body, tokenizer, generation)}


def _token_logprobs(
    body: CompletionCommon, tokenizer: PreTrainedTokenizerBase, generation: Generation
) -> list[dict[str, Any]]:
    """Return the log-prob of each sampled token as OpenAI's table, without alternatives."""
    names = _token_names(body, tokenizer, generation)
    return [
        {"token": name, "logprob": logprob, "bytes": list(name.encode()), "top_logprobs": []}
        for name, logprob in zip(names, generation.logprobs.tolist(), strict=True)
    ]


# The choices of one request as lines, each as soon as it has ended (`rollouts.choices_wire`).
#
# Rollouts of a group make equal requests at the same time: one request costs less than many, and no rollout waits for a
# longer one.

logger = logging.getLogger(__name__)


class ChoiceLines(Response):
    """A response that generates its choices while it is sent, as a line each.

    A client that hangs up cancels every choice.
    """

    media_type = CONTENT_TYPE

    def __init__(
        self,
        choices: Sequence[GenerateRequest],
        generate: Callable[[GenerateRequest], Coroutine[Any, Any, Completed]],
        whole: Callable[[Completed], dict[str, Any]],
        *,
        is_open: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Make a response to a request with these choices.

        `generate` computes a choice, and `whole` makes the body of an answer with that one choice. `is_open` returns a
        context manager, which is entered while the response is sent.
        """
        super().__init__(headers={HEADER: LINES})
        self._choices = choices
        self._generate = generate
        self._whole = whole
        self._is_open = is_open

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Start all choices and send each as a line as soon as it has ended; a failed one is a line with its error.

        A client that closes the connection cancels those that are left.
        """
        ended: list[tuple[int, asyncio.Task[Completed]]] = []
        news = asyncio.Event()

        def begin(index: int, choice: GenerateRequest) -> asyncio.Task[Completed]:
            """Start the choice of that index, whose end wakes the sender, and return its task."""

            def end(task: asyncio.Task[Completed]) -> None:
                ended.append((index, task))
                news.set()

            task = asyncio.create_task(self._generate(choice))
            task.add_done_callback(end)
            return task

        with self._is_open():
            tasks = [begin(index, choice) for index, choice in enumerate(self._choices)]
            hung_up = asyncio.ensure_future(receive())  # after the whole body only a disconnect comes
            hung_up.add_done_callback(lambda _: news.set())
            try:
                # Without the length, which `Response` has set to that of an empty body.
                headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                left = len(tasks)
                # This waits for generations of this engine, which a client ends by hanging up.
                while left and not hung_up.done():
                    await news.wait()
                    news.clear()
                    taken, ended[:] = list(ended), []
                    left -= len(taken)
                    if lines := b"".join(self._line(index, task) for index, task in taken):
                        await send({"type": "http.response.body", "body": lines, "more_body": True})
                if not left:
                    await send({"type": "http.response.body", "body": b""})
            finally:
                over: list[asyncio.Task[Any]] = [*tasks, hung_up]
                for task in over:
                    task.cancel()
                await asyncio.gather(*over, return_exceptions=True)

    def _line(self, index: int, task: "asyncio.Task[Completed]") -> bytes:
        """Return the line of choice number `index`, whose task has ended, with its status and body."""
        try:
            status, body = 200, self._whole(task.result())
        except MillraceError as error:
            status, body = error_body(error)
        except Exception:  # the edge of the process, as in `server`
            logger.exception("a choice failed", extra={"index": index})
            status, body = error_body(InternalError("internal error; see the server's log"))
        return orjson.dumps({"index": index, "status": status, "body": body}) + b"\n"
