"""The HTTP API of an engine: OpenAI's routes, and vLLM's tokens-in, tokens-out route.

| route | what |
|---|---|
| `GET /v1/models` | the model, with `max_model_len` |
| `POST /v1/chat/completions`, `POST /v1/completions` | OpenAI's; streams arrive in one piece at the end |
| `POST /inference/v1/generate` | token ids in, token ids and log-probs out |
| `POST /tokenize` | token ids of a prompt or of a chat |
| `GET /health`, `GET /metrics` | 200 or 503; Prometheus text |

A client that hangs up cancels its handler, which aborts its requests in the engine. Without a policy every model route
answers 503, which OpenAI clients retry.
"""

import asyncio
import json
import logging
import secrets
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from aiohttp import web
from prometheus_client.exposition import choose_encoder
from pydantic import BaseModel, ValidationError
from transformers import PreTrainedTokenizerBase

from millrace.errors import (
    InternalError,
    InvalidSpecError,
    InvalidStateError,
    MillraceError,
    NotFoundError,
    UnavailableError,
    Violation,
)
from millrace.inference import http_limits as limits
from millrace.inference import http_responses as responses
from millrace.inference import meters
from millrace.inference.chat import encode_chat
from millrace.inference.engine import STALL_S, Engine, EngineState, EngineStatus, FinishReason, GenerateRequest
from millrace.inference.http_gate import protect
from millrace.inference.http_schema import (
    ChatBody,
    CompletionBody,
    CompletionCommon,
    GenerateBody,
    Sampling,
    TokenizeBody,
)
from millrace.inference.model_files import ModelSlot, ServedModel
from millrace.telemetry.metrics import make_registry

log = logging.getLogger(__name__)

_SMALL = 8192
"""Bytes, characters or tokens that are worked on without leaving the event loop: about a millisecond."""
_WORKERS = 2
_MAX_VIOLATIONS = 20
_SHUTDOWN_S = 2.0  # for answers on their way after `drain`, which has ended every generation
_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions

B = TypeVar("B", bound=BaseModel)
T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HttpApi:
    """Handlers over one engine and the model slot that tells what it holds."""

    def __init__(self, engine: Engine, slot: ModelSlot) -> None:
        self._engine = engine
        self._slot = slot
        self._metrics = make_registry("inference", meters.collectors(engine.status))
        self.is_draining = False
        """New requests are refused."""
        self._workers = ThreadPoolExecutor(_WORKERS, "http")
        self._num_open = 0
        self._has_none_open = asyncio.Event()
        self._has_none_open.set()

    def make_app(self) -> web.Application:
        """The application; run it with `handler_cancellation=True`."""
        app = web.Application(client_max_size=limits.MAX_BODY_BYTES, middlewares=[self._errors])
        app.add_routes(
            [
                web.get("/v1/models", self.models),
                web.post("/v1/chat/completions", self.chat),
                web.post("/v1/completions", self.completions),
                web.post("/inference/v1/generate", self.generate),
                web.post("/tokenize", self.tokenize),
                web.get("/health", self.health),
                web.get("/metrics", self.metrics),
            ]
        )
        app.on_cleanup.append(self._close)
        return app

    async def _close(self, _: web.Application) -> None:
        self._workers.shutdown(wait=False, cancel_futures=True)

    async def models(self, _: web.Request) -> web.Response:
        """`GET /v1/models`."""
        model, status = self._require()
        cards = [
            {
                "id": name,
                "object": "model",
                "created": 0,
                "owned_by": "millrace",
                "root": name,
                "parent": None,
                "max_model_len": status.max_model_len,
            }
            for name in model.names
        ]
        return web.json_response({"object": "list", "data": cards})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/chat/completions`."""
        body = await self._read(request, ChatBody)
        model, status = self._require(body.model)
        tokenizer = _tokenizer(model)
        tools = body.tools if body.tool_choice != "none" else None
        prompt = await self._encode_chat(tokenizer, body, tools, status.max_model_len)
        wanted = body.max_completion_tokens or body.max_tokens
        completed = await self._complete([prompt], body, n=body.n, max_tokens=wanted, status=status)
        name = body.model or model.names[0]
        return await self._respond(
            request,
            completed,
            lambda: responses.chat_body(_id("chatcmpl"), name, body, tokenizer, completed),
            stream=body if body.stream else None,
        )

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/completions`."""
        body = await self._read(request, CompletionBody)
        model, status = self._require(body.model)
        tokenizer = _tokenizer(model)
        prompts = await self._prompts(tokenizer, body, status.max_model_len)
        wanted = body.max_tokens or _DEFAULT_COMPLETION_TOKENS
        completed = await self._complete(prompts, body, n=body.n, max_tokens=wanted, status=status)
        scored: list[Any] = []
        if body.prompt_logprobs is not None:
            scored = [row for prompt in prompts for row in [await self._score(prompt, tokenizer)] * body.n]
        name = body.model or model.names[0]

        def whole() -> dict[str, Any]:
            made = responses.text_body(_id("cmpl"), name, body, tokenizer, completed)
            for choice, rows in zip(made["choices"], scored, strict=False):  # none where they were not asked for
                choice["prompt_logprobs"] = rows
            return made

        return await self._respond(request, completed, whole, stream=body if body.stream else None)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """`POST /inference/v1/generate`."""
        body = await self._read(request, GenerateBody)
        model, status = self._require(body.model)
        sampling = body.sampling_params
        completed = await self._complete(
            [body.token_ids], sampling, n=sampling.n, max_tokens=sampling.max_tokens, status=status
        )
        scored = None
        if sampling.prompt_logprobs is not None:
            scored = await self._score(body.token_ids, model.tokenizer)

        def whole() -> dict[str, Any]:
            return responses.generate_body(body.request_id or _id("gen"), body, completed) | {"prompt_logprobs": scored}

        return await self._respond(request, completed, whole, stream=None)

    async def tokenize(self, request: web.Request) -> web.Response:
        """`POST /tokenize`."""
        body = await self._read(request, TokenizeBody)
        model, status = self._require(body.model)
        tokenizer = _tokenizer(model)
        if body.messages is not None:
            tokens = await self._encode_chat(tokenizer, body, body.tools, status.max_model_len)
        else:
            text, is_special = body.prompt or "", body.add_special_tokens is not False
            [tokens] = await self._encode(tokenizer, [text], status.max_model_len, add_special_tokens=is_special)
        names = tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None
        return web.json_response(
            {"count": len(tokens), "max_model_len": status.max_model_len, "tokens": tokens, "token_strs": names}
        )

    async def health(self, _: web.Request) -> web.Response:
        """`GET /health`."""
        self._require()
        status = self._engine.status()
        if status.progress_age_s > STALL_S:
            raise UnavailableError(f"the engine did nothing for {status.progress_age_s:.0f} s", reason="ENGINE_STALLED")
        return web.json_response({"status": "ok"})

    async def metrics(self, request: web.Request) -> web.Response:
        """`GET /metrics`."""
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(self._metrics), headers={"Content-Type": content_type})

    async def drain(self, grace_s: float) -> None:
        """Refuses new requests, waits for the open ones at most `grace_s`, then aborts them."""
        self.is_draining = True
        try:
            async with asyncio.timeout(grace_s):
                await self._has_none_open.wait()
        except TimeoutError:
            log.warning("aborting requests at shutdown", extra={"requests": self._num_open, "grace_s": grace_s})
            await self._engine.abort_all()

    def _require(self, name: str | None = None) -> tuple[ServedModel, EngineStatus]:
        """The served model, if it answers to `name`."""
        model, status = self._slot.current, self._engine.status()
        if self.is_draining:
            raise UnavailableError("this replica is shutting down", reason="DRAINING", remedy="retry on another one")
        if model is None or status.state is not EngineState.READY:
            raise UnavailableError(
                status.error or "no policy is loaded yet", reason="NO_POLICY", remedy="retry in a few seconds"
            )
        if name is not None and name not in model.names:
            raise NotFoundError(
                f"The model `{name[:200]}` does not exist; this server serves {', '.join(model.names)}.",
                reason="MODEL_NOT_FOUND",
            )
        return model, status

    async def _complete(
        self, prompts: list[list[int]], sampling: Sampling, *, n: int, max_tokens: int | None, status: EngineStatus
    ) -> list[responses.Completed]:
        """`n` completions of each prompt, in order. When one fails the others are aborted."""
        room = status.max_model_len
        limits.check_completions(len(prompts), n)
        limits.check_tokens(prompts, room)
        batch = _id("req")
        calls = [
            self._generate_one(
                GenerateRequest(
                    request_id=f"{batch}-{index}-{choice}",
                    call_id=batch,
                    prompt_token_ids=tuple(prompt),
                    sampling=sampling.params(max_tokens or room, choice=choice),  # the engine cuts it to the context
                )
            )
            for index, prompt in enumerate(prompts)
            for choice in range(n)
        ]
        self._num_open += 1
        self._has_none_open.clear()
        try:
            if len(calls) == 1:
                return [await calls[0]]
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(call) for call in calls]
            return [task.result() for task in tasks]
        except BaseExceptionGroup as errors:
            raise _first(errors) from None
        finally:
            self._num_open -= 1
            if not self._num_open:
                self._has_none_open.set()

    async def _encode_chat(
        self,
        tokenizer: PreTrainedTokenizerBase,
        body: ChatBody | TokenizeBody,
        tools: list[dict[str, Any]] | None,
        room: int,
    ) -> list[int]:
        """The tokens of a chat; InvalidSpecError if it is more than could fit."""
        messages = body.messages or []
        limits.check_chat(messages, tools, room)
        return await self._beside(
            lambda: encode_chat(
                tokenizer,
                messages,
                tools=tools,
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
                template_kwargs=body.chat_template_kwargs,
            ),
            size=limits.count_chars(messages) + limits.count_chars(tools or ()),
        )

    async def _encode(
        self, tokenizer: PreTrainedTokenizerBase, texts: list[str], room: int, *, add_special_tokens: bool
    ) -> list[list[int]]:
        """The tokens of texts; InvalidSpecError if one is more than could fit."""
        limits.check_texts(texts, room)
        return await self._beside(
            lambda: [tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts],
            size=sum(map(len, texts)),
        )

    async def _prompts(self, tokenizer: PreTrainedTokenizerBase, body: CompletionBody, room: int) -> list[list[int]]:
        """The prompts of `/v1/completions`, which come as text or tokens, one or many."""
        match body.prompt:
            case str() as text:
                texts = [text]
            case [str(), *_] as many:
                texts = [text for text in many if isinstance(text, str)]  # validated: all are
            case [int(), *_] as tokens:
                return [tokens]  # pyright: ignore[reportReturnType] - validated: all are ints then
            case many:
                return many  # pyright: ignore[reportReturnType] - validated: lists of ints
        limits.check_completions(len(texts), body.n)  # before they are tokenized
        return await self._encode(tokenizer, texts, room, add_special_tokens=body.add_special_tokens)

    async def _beside(self, work: Callable[[], T], *, size: int) -> T:
        """Runs what takes long beside the event loop, at most `_WORKERS` at a time; what is small runs at once."""
        if size < _SMALL:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._workers, work)

    async def _respond(
        self,
        request: web.Request,
        completed: list[responses.Completed],
        whole: Callable[[], dict[str, Any]],
        *,
        stream: CompletionCommon | None,
    ) -> web.StreamResponse:
        """The body that `whole` makes as JSON or, with the body that asked for it, as server-sent events."""

        def encode() -> list[bytes]:
            if stream is None:
                return [json.dumps(whole()).encode()]
            return list(responses.stream_chunks(whole(), wants_usage=stream.wants_usage_chunk))

        chunks = await self._beside(encode, size=sum(len(item.generation.token_ids) for item in completed))
        if stream is None:
            return web.Response(body=chunks[0], content_type="application/json", charset="utf-8")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
        await response.write_eof()
        return response

    async def _read(self, request: web.Request, body: type[B]) -> B:
        """The body, validated; InvalidSpecError names the fields that are wrong."""
        try:
            async with asyncio.timeout(limits.BODY_S):
                data = await request.read()
        except TimeoutError:
            raise web.HTTPRequestTimeout(reason=f"the body did not arrive within {limits.BODY_S:.0f} s") from None
        return await self._beside(lambda: _validated(body, data), size=len(data))

    async def _score(self, prompt: list[int], tokenizer: PreTrainedTokenizerBase | None) -> list[dict[str, Any] | None]:
        """`prompt_logprobs` of a prompt."""
        return responses.prompt_logprobs(prompt, await self._engine.score(tuple(prompt)), tokenizer)

    async def _generate_one(self, request: GenerateRequest) -> responses.Completed:
        generation = await self._engine.generate(request)
        match generation.finish_reason:
            case FinishReason.ABORT:
                raise UnavailableError(
                    "the generation was aborted: the model was replaced or failed, or the replica is shutting down",
                    reason="GENERATION_ABORTED",
                    remedy="retry",
                )
            case FinishReason.ERROR:
                raise InternalError(
                    "the model gave values that are not finite", reason="LOGITS_NOT_FINITE", remedy="check the policy"
                )
            case _:
                return responses.Completed(prompt_ids=request.prompt_token_ids, generation=generation)

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Errors in OpenAI's shape."""
        try:
            return await handler(request)
        except MillraceError as error:
            status, body = responses.error_body(error)
            headers = {"Retry-After": str(int(error.retry_after_s or 1))} if status in (429, 503) else {}
            return web.json_response(body, status=status, headers=headers)
        except web.HTTPRequestEntityTooLarge:
            status, body = limits.body_too_large(request.content_length)
            return web.json_response(body, status=status, headers={"Connection": "close"})
        except web.HTTPException as error:
            body = {"error": {"message": error.reason, "type": "HTTPError", "param": None, "code": error.status}}
            return web.json_response(body, status=error.status)
        except Exception:  # the edge of the process: a defect must reach client and log
            log.exception("a request failed", extra={"path": request.path})
            status, body = responses.error_body(InternalError("internal error; see the server's log"))
            return web.json_response(body, status=status)


def _validated(body: type[B], data: bytes) -> B:
    try:
        return body.model_validate_json(data)
    except ValidationError as error:
        violations = [
            Violation(field=".".join(map(str, item["loc"])) or "body", message=item["msg"])
            for item in error.errors(include_url=False, include_context=False, include_input=False)[:_MAX_VIOLATIONS]
        ]
        raise InvalidSpecError(violations, reason="REQUEST_INVALID") from None


def _tokenizer(model: ServedModel) -> PreTrainedTokenizerBase:
    if model.tokenizer is None:
        raise InvalidStateError(
            "the policy has no tokenizer files, so only /inference/v1/generate works",
            reason="NO_TOKENIZER",
            remedy="publish the policy with its tokenizer",
        )
    return model.tokenizer


def _first(group: BaseExceptionGroup) -> BaseException:
    """The error that made the group fail: the rest are its consequences."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _id(kind: str) -> str:
    return f"{kind}-{secrets.token_hex(12)}"


async def start_http(api: HttpApi, host: str, port: int) -> tuple[web.AppRunner, int]:
    """Serves the API; returns the runner to clean up and the port. UnavailableError if the address cannot be bound."""
    app = api.make_app()
    context = protect(app, host, port)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=_SHUTDOWN_S)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port, backlog=4096, ssl_context=context).start()
    except OSError as error:
        await runner.cleanup()
        raise UnavailableError(
            f"cannot listen on {host}:{port}: {error.strerror or error}",
            reason="ADDRESS_UNAVAILABLE",
            remedy="stop what listens there, or choose another address (MILLRACE_HTTP_LISTEN; port 0 takes a free one)",
        ) from error
    return runner, runner.addresses[0][1]
