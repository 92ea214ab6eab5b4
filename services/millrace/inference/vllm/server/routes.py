"""The HTTP routes that the plugin puts in place of vLLM's own, and those of PRIME-RL.

| route | what |
|---|---|
| `POST /v1/chat/completions`, `/v1/completions`, `/inference/v1/generate` | vLLM's, plus `policy_spans` per choice |
| `POST /v1/responses`, `/v1/messages`, `/tokenize` | vLLM's |
| `GET /v1/models`, `GET /health` | vLLM's, but 503 while no proved policy serves |
| `POST /update_weights`, `POST /reload_weights` | PRIME-RL's: weights from a directory; not proved |

Spans are those of the engine (`weight_versions`), which labels every step's tokens with the version that it ran on.
What vLLM has no field for would be ignored: if an answer depends on it, it is refused by name (`rollouts.parameters`).
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from millrace.errors import (
    CapacityError,
    CorruptObjectError,
    InvalidSpecError,
    InvalidStateError,
    MillraceError,
    NotFoundError,
    UnavailableError,
)
from millrace.inference.engine import STALL_S, EngineState
from millrace.inference.http import access
from millrace.inference.http.schema import separated, special_texts
from millrace.inference.model_files import ModelSlot
from millrace.inference.updater import PolicyUpdater
from millrace.inference.vllm.engine import VllmEngine
from millrace.inference.vllm.gate import CALLS, Calls, GenerationGate, add_last_spans, add_spans, name_tokens, rewritten
from millrace.rollouts import parameters
from millrace.rollouts import parameters as choices_wire
from millrace.rollouts.parameters import Parameter, Treatment, check_parameters, check_tools

import msgspec  # isort: skip # pyright: ignore[reportMissingImports]
from fastapi import APIRouter, Request  # isort: skip # pyright: ignore[reportMissingImports]
from fastapi.responses import JSONResponse, Response, StreamingResponse  # isort: skip # pyright: ignore[reportMissingImports]
from vllm.entrypoints.anthropic.api_router import create_messages  # isort: skip # pyright: ignore[reportMissingImports]
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest  # isort: skip # pyright: ignore[reportMissingImports]
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest  # isort: skip # pyright: ignore[reportMissingImports]
from vllm.entrypoints.openai.completion.protocol import CompletionRequest  # isort: skip # pyright: ignore[reportMissingImports]
from vllm.entrypoints.openai.responses.api_router import create_responses  # isort: skip # pyright: ignore[reportMissingImports]
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest  # isort: skip # pyright: ignore[reportMissingImports]
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest  # isort: skip # pyright: ignore[reportMissingImports]
from vllm.entrypoints.serve.engine.protocol import ErrorResponse  # isort: skip # pyright: ignore[reportMissingImports]
from vllm.entrypoints.serve.tokenize.api_router import tokenize as vllm_tokenize  # isort: skip # pyright: ignore[reportMissingImports]
from vllm.entrypoints.serve.tokenize.protocol import TokenizeRequest  # isort: skip # pyright: ignore[reportMissingImports]
from vllm.entrypoints.serve.utils.api_utils import load_aware_call, with_cancellation  # isort: skip # pyright: ignore[reportMissingImports]

logger = logging.getLogger(__name__)

router = APIRouter()

_OTHERWISE = {
    f"guided_{kind}": Parameter(fate=Treatment.REFUSED, why="send `structured_outputs`")
    for kind in ("json", "regex", "choice", "grammar", "decoding_backend", "whitespace_pattern")
}
_ECHOED = frozenset({"max_tool_calls"})
"""Fields that vLLM repeats in its answers, and that have no effect."""


@dataclass(slots=True, kw_only=True)
class VllmReplica:
    """The replica's parts that the routes need, at `app.state.millrace`."""

    engine: VllmEngine
    gate: GenerationGate
    slot: ModelSlot
    updater: PolicyUpdater
    owner: object
    """Keeps the policy's directory as long as the server lives."""
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    is_draining: bool = False
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)

    def require(self) -> None:
        """Raise UnavailableError while the replica shuts down, or no proved policy serves."""
        status = self.engine.status()
        if self.is_draining:
            raise UnavailableError("this replica is shutting down", reason="DRAINING", remedy="retry on another one")
        if self.slot.current is None or status.state is not EngineState.READY:
            raise UnavailableError(
                status.error or "no policy is loaded yet", reason="NO_POLICY", remedy="retry in a few seconds"
            )

    async def load_directory(self, directory: str | None) -> None:
        """Serve the weights of a directory, or with None those that vLLM was started with.

        Raises InvalidStateError if the replica serves a run, UnavailableError without a model.
        """
        if (desired := self.updater.desired) is not None:
            raise InvalidStateError(
                f"this replica serves run {desired.run_uid}, whose policies come through PolicyService and are proved",
                reason="POLICY_DRIVEN",
                remedy="use a replica that serves no run",
            )
        if self.slot.current is None:
            raise UnavailableError("no model is loaded yet", reason="NO_POLICY", remedy="retry in a few seconds")
        async with self.loading:
            await self.engine.load_directory(directory)

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests, wait at most `grace_s` for those in progress, then abort the ones that are left."""
        self.is_draining = True
        try:
            async with asyncio.timeout(grace_s):
                await self.gate.drained()
        except TimeoutError:
            logger.warning("aborting requests at shutdown", extra={"requests": self.gate.num_open, "grace_s": grace_s})
            await self.engine.abort_all()


def attach(app: Any) -> None:
    """Add the routes to the application; vLLM drops its own of the same path and method."""
    app.include_router(router)
    app.add_exception_handler(MillraceError, lambda _, error: _error(error))


@router.post("/v1/chat/completions")
@with_cancellation
@load_aware_call
async def chat(request: ChatCompletionRequest, raw_request: Request) -> Response:
    """Answer `POST /v1/chat/completions`: checked here; vLLM renders, generates and parses, and spans are added."""
    await _require_read(raw_request, request, parameters.CHAT)
    check_tools((await raw_request.json()).get("tools") or [])
    access.check_completions(1, request.n or 1)
    access.check_stops(request.stop)
    access.check_chat(request.messages, request.tools, _room(raw_request))
    request.stop, request.stop_token_ids = _stops(request, raw_request)
    serving = raw_request.app.state.openai_serving_chat
    return await _serve(raw_request, lambda: serving.create_chat_completion(request, raw_request), _Spans.of(request))


@router.post("/v1/completions")
@with_cancellation
@load_aware_call
async def completions(request: CompletionRequest, raw_request: Request) -> Response:
    """Answer `POST /v1/completions`: checked here, generated by vLLM, and spans are added.

    `max_tokens` beyond the context is cut to it, where vLLM alone would refuse it.
    """
    await _require_read(raw_request, request, parameters.COMPLETIONS)
    room = _room(raw_request)
    access.check_stops(request.stop)
    access.check_prompt(request.prompt, request.n or 1, room)
    request.stop, request.stop_token_ids = _stops(request, raw_request)
    if request.max_tokens is not None:
        request.max_tokens = min(request.max_tokens, room)
    serving = raw_request.app.state.openai_serving_completion
    return await _serve(raw_request, lambda: serving.create_completion(request, raw_request), _Spans.of(request))


@router.post("/inference/v1/generate")
@with_cancellation
@load_aware_call
async def generate(request: GenerateRequest, raw_request: Request) -> Response:
    """Answer `POST /inference/v1/generate`, token ids in and out: checked here, generated by vLLM, and spans are added.

    Log-probs are always included, with tokens named `token_id:N`, as the route's clients require.
    """
    await _require_read(raw_request, request, parameters.GENERATE)
    sampling = request.sampling_params
    fields = (await raw_request.json()).get("sampling_params")
    _require_fields(fields, type(sampling).__struct_fields__, parameters.GENERATE_SAMPLING, where="sampling_params.")
    access.check_completions(1, sampling.n)
    access.check_stops(sampling.stop, field="sampling_params.stop")
    access.check_tokens([request.token_ids], _room(raw_request), field="token_ids")
    stop, ids = _stops(sampling, raw_request)
    if ids != sampling.stop_token_ids:  # made anew: it counts its stop tokens once
        sampling = request.sampling_params = msgspec.structs.replace(sampling, stop=stop, stop_token_ids=ids)
    if sampling.logprobs is None:
        sampling.logprobs = 0
    if sampling.prompt_logprobs is not None or sampling.prompt_logprob_token_ids is not None:
        # vLLM computes no log-probs of what it takes from the cache: their rows would be whatever was in that memory,
        # and it dies of them. By default it does not look there; a caller that asks for it must not end the engine.
        sampling.skip_reading_prefix_cache = True
    serving = raw_request.app.state.serving_tokens
    how = _Spans(per_call=sampling.n, is_raw=True)
    return await _serve(raw_request, lambda: serving.serve_tokens(request, raw_request), how)


@router.post("/v1/responses")
async def responses(request: ResponsesRequest, raw_request: Request) -> Response:
    """Answer `POST /v1/responses` of OpenAI: checked here, answered by vLLM."""
    await _require_read(raw_request, request, parameters.RESPONSES)
    return await create_responses(request, raw_request)


@router.post("/v1/messages")
async def messages(request: AnthropicMessagesRequest, raw_request: Request) -> Response:
    """Answer `POST /v1/messages` of Anthropic: checked here, answered by vLLM."""
    await _require_read(raw_request, request, parameters.MESSAGES)
    return await create_messages(request, raw_request)


@router.post("/tokenize")
async def tokenize(request: TokenizeRequest, raw_request: Request) -> Response:
    """Answer `POST /tokenize` with the token ids of a prompt or of a chat: checked here, answered by vLLM."""
    await _require_read(raw_request, request, parameters.TOKENIZE)
    return await vllm_tokenize(request, raw_request)


@router.get("/v1/models")
async def models(raw_request: Request) -> Response:
    """Answer `GET /v1/models`; raise UnavailableError while no proved policy serves."""
    _replica(raw_request).require()
    found = await raw_request.app.state.openai_serving_models.show_available_models()
    return JSONResponse(found.model_dump())


@router.get("/health")
async def health(raw_request: Request) -> Response:
    """Answer `GET /health` with 200; raise UnavailableError while no proved policy serves, or the engine does not
    answer.
    """
    replica = _replica(raw_request)
    replica.require()
    if (age_s := replica.engine.status().progress_age_s) > STALL_S:
        raise UnavailableError(f"the engine did nothing for {age_s:.0f} s", reason="ENGINE_STALLED")
    return JSONResponse({"status": "ok"})


@router.post("/update_weights")
async def update_weights(raw_request: Request) -> Response:
    """Answer PRIME-RL's `POST /update_weights`: load the safetensors files in the body's `weight_dir` and serve them.

    The workers must be able to read that directory.
    """
    body = await raw_request.json()
    directory = body.get("weight_dir") if isinstance(body, dict) else None
    if not isinstance(directory, str) or not directory:
        raise InvalidStateError("the body needs weight_dir, a directory", reason="REQUEST_INVALID")
    await _replica(raw_request).load_directory(directory)
    return JSONResponse({"status": "ok"})


@router.post("/reload_weights")
async def reload_weights(raw_request: Request) -> Response:
    """Answer PRIME-RL's `POST /reload_weights`: load the weights that the server was started with, and serve them."""
    await _replica(raw_request).load_directory(None)
    return JSONResponse({"status": "ok"})


async def _require_read(raw_request: Request, request: Any, known: Mapping[str, Parameter]) -> None:
    """Raise InvalidSpecError for parameters in a body that vLLM has no field for, and that would change the answer.

    `request` is the body as vLLM has read it, and `known` has the API's parameters.
    """
    fields = type(request).model_fields
    names = {*fields, *(field.alias for field in fields.values() if field.alias)}
    _require_fields(await raw_request.json(), names - _ECHOED, known)
    if options := getattr(request, "stream_options", None):
        _require_fields(options.model_extra, (), parameters.STREAM_OPTIONS, where="stream_options.")


def _require_fields(given: Any, fields: Collection[str], known: Mapping[str, Parameter], *, where: str = "") -> None:
    """Raise InvalidSpecError for parameters in `given` that are not in `fields`, and would change the answer.

    `known` has the API's parameters; `where` is put before names in messages.
    """
    # The field for choices one by one is sent to engines that declare it, and to replicas beside such an engine.
    left = {name: value for name, value in (given or {}).items() if name not in fields and name != choices_wire.FIELD}
    check_parameters(left, {**known, **_OTHERWISE}, where=where, answered=False)


def _room(request: Request) -> int:
    """Return the most tokens of a sequence; raise UnavailableError while no proved policy serves."""
    replica = _replica(request)
    replica.require()
    return replica.engine.status().max_model_len


def _stops(asked: Any, request: Request) -> tuple[Any, Any]:
    """Return (stop strings, stop tokens) of a request, with strings that are special tokens moved to their ids.

    Strings are moved only where the text leaves special tokens out. A `skip_special_tokens` of None, which vLLM 0.33
    has if the request does not set it, is set to True in `asked`: vLLM would apply the model's generation config.
    """
    if asked.skip_special_tokens is None:
        asked.skip_special_tokens = True
    model = _replica(request).slot.current
    if not asked.stop or not asked.skip_special_tokens or model is None or model.tokenizer is None:
        return asked.stop, asked.stop_token_ids
    texts, ids = separated(asked.stop, special_texts(model.tokenizer))
    return (texts, [*(asked.stop_token_ids or ()), *ids]) if ids else (asked.stop, asked.stop_token_ids)


def _replica(request: Request) -> VllmReplica:
    """Return the replica's parts, which the plugin has put into the application's state."""
    return request.app.state.millrace


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spans:
    """How spans are added to an answer. `is_raw` also names its tokens, for `/inference/v1/generate`."""

    per_call: int
    """Choices of one call of the engine; 0 for beam search, whose calls do not correspond to choices."""
    is_raw: bool = False

    @classmethod
    def of(cls, request: Any) -> "_Spans":
        """Return how spans are added to answers to a request of OpenAI's routes."""
        return cls(per_call=0 if request.use_beam_search else request.n or 1)

    def whole(self, body: dict[str, Any], calls: Calls) -> None:
        """Add policy spans, and names of tokens if `is_raw`, to a whole answer, in place."""
        add_spans(body, calls)
        if self.is_raw:
            name_tokens(body)

    def chunk(self, body: dict[str, Any], calls: Calls) -> None:
        """Add policy spans to the choices that end in a chunk of a stream, and names of tokens if `is_raw`, in
        place.
        """
        if self.per_call:
            add_last_spans(body, calls, per_call=self.per_call)
        if self.is_raw:
            name_tokens(body)


async def _serve(request: Request, call: Callable[[], Awaitable[Any]], spans: _Spans) -> Response:
    """Await `call`, which asks one of vLLM's serving objects, and return its answer with spans added.

    Errors, also of the gate, become answers.
    """
    calls = Calls()
    # A context variable, because vLLM's handlers pass nothing of ours on to the engine client.
    token = CALLS.set(calls)
    try:
        _replica(request).require()
        answer = await call()
    except MillraceError as error:
        return _error(error)
    finally:
        CALLS.reset(token)
    if isinstance(answer, ErrorResponse):
        return JSONResponse(answer.model_dump(), status_code=answer.error.code)
    if not hasattr(answer, "model_dump"):
        events = rewritten(answer, lambda chunk: spans.chunk(chunk, calls))
        return StreamingResponse(events, media_type="text/event-stream")
    body = answer.model_dump()
    spans.whole(body, calls)
    return Response(json.dumps(body, separators=(",", ":"), ensure_ascii=False), media_type="application/json")


_REFUSED = (InvalidSpecError, InvalidStateError, NotFoundError, CorruptObjectError)
_STATUS = ((CapacityError, 429), (UnavailableError, 503), (_REFUSED, 400))


def _error(error: Exception) -> Response:
    """Return the response for an error, in OpenAI's form; 429 and 503 have Retry-After."""
    status = next((code for kind, code in _STATUS if isinstance(error, kind)), 500)
    param = error.violations[0].field if isinstance(error, InvalidSpecError) and error.violations else None
    body = {"error": {"message": str(error), "type": type(error).__name__, "param": param, "code": status}}
    wait_s = getattr(error, "retry_after_s", None)
    headers = {"Retry-After": str(int(wait_s or 1))} if status in (429, 503) else {}
    return JSONResponse(body, status_code=status, headers=headers)
