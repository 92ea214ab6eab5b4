"""The HTTP API of an engine: OpenAI's routes, and vLLM's tokens-in, tokens-out route.

| route | what |
|---|---|
| `GET /v1/models` | the model, with `max_model_len` |
| `POST /v1/chat/completions`, `POST /v1/completions` | OpenAI's; streams arrive in one piece at the end |
| `POST /inference/v1/generate` | token ids in, token ids and log-probs out |
| `POST /tokenize` | token ids of a prompt or of a chat |
| `GET /health`, `GET /metrics` | 200 or 503; Prometheus text |

A client that hangs up cancels its handler, which aborts its requests in the engine. Choices come one by one
where that is asked for (`choices`). Without a policy every model route answers 503, which OpenAI clients retry.

FastAPI routes, and pydantic reads the bodies, but not by FastAPI's parameters: they would parse 16 MiB on the event
loop, through Python objects, and validate every answer that was just made.
"""

import asyncio
import contextlib
import itertools
import logging
import resource
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import orjson
from fastapi import FastAPI, HTTPException, Request, Response
from prometheus_client.exposition import choose_encoder
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException as RoutingError
from starlette.requests import ClientDisconnect
from transformers import PreTrainedTokenizerBase

from millrace.errors import (
    InternalError,
    InvalidSpecError,
    InvalidStateError,
    MillraceError,
    NotFoundError,
    UnavailableError,
    Violation,
    first_error,
)
from millrace.inference import updater
from millrace.inference.engine import STALL_S, Engine, EngineState, EngineStatus, FinishReason, GenerateRequest
from millrace.inference.http import access as limits
from millrace.inference.http import responses
from millrace.inference.http.access import BODY_TOO_LARGE, TokenGate, http_access
from millrace.inference.http.chat import PieceCache, PromptCache, encode_chat
from millrace.inference.http.parsers import ChatParsers
from millrace.inference.http.responses import ChoiceLines
from millrace.inference.http.schema import (
    ChatBody,
    CompletionBody,
    CompletionCommon,
    GenerateBody,
    SamplingBody,
    TokenizeBody,
    with_stop_tokens,
)
from millrace.inference.model_files import ModelSlot, ServedModel
from millrace.race import first_of
from millrace.rollouts import parameters
from millrace.rpc.http_server import HttpBounds, HttpServer
from millrace.telemetry.metrics import make_registry

logger = logging.getLogger(__name__)

_SMALL = 8192
"""Bytes, characters or tokens that are processed in the event loop, in about a millisecond; more go to a thread."""
_WORKERS = 2
_MAX_VIOLATIONS = 20
_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions
_JSON = "application/json"

MAX_CONNECTIONS = 4096
"""The most connections at once; they are also at least `_OTHER_FILES` fewer than files that this process may open."""
REQUEST_S = 10.0
"""How long a client has for its TLS handshake and for each header, and to go on reading an answer."""
IDLE_S = 75.0
"""The most between two requests: longer than clients keep connections, so that none is closed during a request."""
_SHUTDOWN_S = 2.0  # for answers that are being sent after `drain`, which has ended every generation
_OTHER_FILES = 256
_CLIENT_GONE = 499  # no client receives it

B = TypeVar("B", bound=BaseModel)
T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]


class HttpApi:
    """Handlers of the routes, over one engine and the slot with the model that it serves."""

    def __init__(self, engine: Engine, slot: ModelSlot, *, parsers: ChatParsers | None = None) -> None:
        self._engine = engine
        self._slot = slot
        self._parsers = parsers or ChatParsers()
        self._metrics = make_registry("inference", updater.collectors(engine.status))
        self.is_draining = False
        """Whether new requests are refused."""
        self._workers = ThreadPoolExecutor(_WORKERS, "http")
        self._prompt_cache = PromptCache()
        self._pieces = PieceCache()
        self._ids = _Ids()
        self._num_open = 0
        self._has_none_open = asyncio.Event()
        self._has_none_open.set()

    def make_app(self) -> FastAPI:
        """Return the application with all routes, without the check of tokens."""
        app = FastAPI(openapi_url=None, redirect_slashes=False, lifespan=self._lifespan)
        app.add_exception_handler(RoutingError, _routing_error)
        for path, handler in (("/v1/models", self.models), ("/health", self.health), ("/metrics", self.metrics)):
            app.add_route(path, _safely(handler), methods=["GET", "HEAD"])
        for path, endpoint in (
            ("/v1/chat/completions", self._endpoint(ChatBody, self.chat)),
            ("/v1/completions", self._endpoint(CompletionBody, self.completions)),
            ("/inference/v1/generate", self._endpoint(GenerateBody, self.generate)),
            ("/tokenize", self._endpoint(TokenizeBody, self.tokenize)),
        ):
            app.add_route(path, _safely(endpoint), methods=["POST"])
        return app

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        yield
        self._workers.shutdown(wait=False, cancel_futures=True)

    def _endpoint(self, model: type[B], handler: Callable[[B], Coroutine[Any, Any, Response]]) -> Handler:
        """Return a route's handler, which reads the body as `model` for `handler`, and is cancelled when the client
        hangs up.
        """

        async def endpoint(request: Request) -> Response:
            return await _while_connected(request, handler(await self._read(request, model)))

        return endpoint

    async def models(self, _: Request) -> Response:
        """Answer `GET /v1/models`: a card for each name of the served model."""
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
        return _json({"object": "list", "data": cards})

    async def chat(self, body: ChatBody) -> Response:
        """Answer `POST /v1/chat/completions` with `n` completions: in one body, as events, or as a line for each."""
        model, status = self._require(body.model)
        tokenizer = _tokenizer(model)
        self._parsers.check(tools=body.offered_tools)
        prompt = await self._encode_chat(tokenizer, body, body.offered_tools or None, status.max_model_len)
        max_tokens = body.max_completion_tokens or body.max_tokens
        name = body.model or model.names[0]

        def whole(completed: list[responses.Completed]) -> dict[str, Any]:
            """Return the body of an answer with these completions."""
            identity = self._ids.next("chatcmpl")
            return responses.chat_body(identity, name, body, tokenizer, completed, parsers=self._parsers)

        if body.stream_choices:
            return self._lines(model, [prompt], body, whole, max_tokens=max_tokens, status=status)
        completed = await self._complete(model, [prompt], body, n=body.n, max_tokens=max_tokens, status=status)
        answer = await self._respond(completed, lambda: whole(completed), stream=body if body.stream else None)
        answer.headers[parameters.HEADER] = parameters.LINES
        return answer

    async def completions(self, body: CompletionBody) -> Response:
        """Answer `POST /v1/completions` with `n` completions of each prompt: in one body, as events, or as a line for
        each. A body or events also have the prompts' scores if these are asked for.
        """
        model, status = self._require(body.model)
        tokenizer = _tokenizer(model)
        prompts = await self._prompts(tokenizer, body, status.max_model_len)
        max_tokens = body.max_tokens or _DEFAULT_COMPLETION_TOKENS
        name = body.model or model.names[0]

        def text_of(completed: list[responses.Completed]) -> dict[str, Any]:
            return responses.text_body(self._ids.next("cmpl"), name, body, tokenizer, completed)

        if body.stream_choices:
            return self._lines(model, prompts, body, text_of, max_tokens=max_tokens, status=status)
        completed = await self._complete(model, prompts, body, n=body.n, max_tokens=max_tokens, status=status)
        scored: list[dict[str, Any]] = []
        if body.prompt_logprobs is not None:
            scored = [row for prompt in prompts for row in [await self._score(model, prompt)] * body.n]

        def whole() -> dict[str, Any]:
            """Return the body of the answer, with the prompt's scores in each choice if they were asked for."""
            made = text_of(completed)
            for choice, scores in zip(made["choices"], scored, strict=False):  # none where they were not asked for
                choice.update(scores)
            return made

        answer = await self._respond(completed, whole, stream=body if body.stream else None)
        answer.headers[parameters.HEADER] = parameters.LINES
        return answer

    async def generate(self, body: GenerateBody) -> Response:
        """Answer `POST /inference/v1/generate` with tokens and log-probs of `n` completions of the given tokens."""
        model, status = self._require(body.model)
        sampling = body.sampling_params
        completed = await self._complete(
            model, [body.token_ids], sampling, n=sampling.n, max_tokens=sampling.max_tokens, status=status
        )
        scored: dict[str, Any] = {}
        if sampling.prompt_logprobs is not None:
            scored = await self._score(model, body.token_ids)

        def whole() -> dict[str, Any]:
            request_id = body.request_id or self._ids.next("gen")
            return responses.generate_body(request_id, body, completed) | scored

        return await self._respond(completed, whole, stream=None)

    async def tokenize(self, body: TokenizeBody) -> Response:
        """Answer `POST /tokenize` with the token ids of a prompt or of a chat, and the length of the context."""
        model, status = self._require(body.model)
        tokenizer = _tokenizer(model)
        if body.messages is not None:
            tokens = await self._encode_chat(tokenizer, body, body.tools, status.max_model_len)
        else:
            text, is_special = body.prompt or "", body.add_special_tokens is not False
            [tokens] = await self._encode(tokenizer, [text], status.max_model_len, add_special_tokens=is_special)
        names = tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None
        return _json(
            {"count": len(tokens), "max_model_len": status.max_model_len, "tokens": tokens, "token_strs": names}
        )

    async def health(self, _: Request) -> Response:
        """Answer `GET /health` with 200 if a model is served and the engine makes progress; else raise
        UnavailableError.
        """
        self._require()
        status = self._engine.status()
        if status.progress_age_s > STALL_S:
            raise UnavailableError(f"the engine did nothing for {status.progress_age_s:.0f} s", reason="ENGINE_STALLED")
        return _json({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        """Answer `GET /metrics` with the engine's metrics for Prometheus."""
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(self._metrics), headers={"content-type": content_type})

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests, wait at most `grace_s` for those in progress, then abort the ones that are left."""
        self.is_draining = True
        try:
            async with asyncio.timeout(grace_s):
                await self._has_none_open.wait()
        except TimeoutError:
            logger.warning("aborting requests at shutdown", extra={"requests": self._num_open, "grace_s": grace_s})
            await self._engine.abort_all()

    def _require(self, name: str | None = None) -> tuple[ServedModel, EngineStatus]:
        """Return the served model and the engine's status.

        Raises UnavailableError while draining or without a model, and NotFoundError if `name` (None: any) is not its
        name.
        """
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

    def _requests(
        self,
        model: ServedModel,
        prompts: list[list[int]],
        sampling: SamplingBody,
        *,
        n: int,
        max_tokens: int | None,
        status: EngineStatus,
        are_one_call: bool = True,
    ) -> list[GenerateRequest]:
        """Return the engine's requests for `n` completions of each prompt, in order; raise InvalidSpecError beyond a
        limit.

        With `are_one_call` the requests share the scheduling turns of one call, else each has its own. Without
        `max_tokens` they may fill the context.
        """
        room = status.max_model_len
        limits.check_completions(len(prompts), n)
        limits.check_tokens(prompts, room)
        sampling = with_stop_tokens(sampling, model.tokenizer)
        batch = self._ids.next("req")
        return [
            GenerateRequest(
                request_id=f"{batch}-{index}-{choice}",
                call_id=batch if are_one_call else "",
                prompt_token_ids=tuple(prompt),
                sampling=sampling.params(max_tokens or room, choice=choice),  # the engine cuts it to the context
            )
            for index, prompt in enumerate(prompts)
            for choice in range(n)
        ]

    @contextlib.contextmanager
    def _is_open(self) -> Iterator[None]:
        """Count a request as open during the block; `drain` waits until none is."""
        self._num_open += 1
        self._has_none_open.clear()
        try:
            yield
        finally:
            self._num_open -= 1
            if not self._num_open:
                self._has_none_open.set()

    async def _complete(
        self,
        model: ServedModel,
        prompts: list[list[int]],
        sampling: SamplingBody,
        *,
        n: int,
        max_tokens: int | None,
        status: EngineStatus,
    ) -> list[responses.Completed]:
        """Generate and return `n` completions of each prompt, in order; raise the error of one that fails, and
        abort the others.
        """
        requests = self._requests(model, prompts, sampling, n=n, max_tokens=max_tokens, status=status)
        with self._is_open():
            if len(requests) == 1:
                return [await self._generate_one(model, requests[0])]
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(self._generate_one(model, request)) for request in requests]
            except BaseExceptionGroup as errors:
                raise first_error(errors) from None
            return [task.result() for task in tasks]

    def _lines(
        self,
        model: ServedModel,
        prompts: list[list[int]],
        body: CompletionCommon,
        whole: Callable[[list[responses.Completed]], dict[str, Any]],
        *,
        max_tokens: int | None,
        status: EngineStatus,
    ) -> ChoiceLines:
        """Return a response that sends each completion as a line, the answer that `whole` makes of it, when it has
        ended.
        """
        alone = self._requests(model, prompts, body, n=body.n, max_tokens=max_tokens, status=status, are_one_call=False)
        return ChoiceLines(alone, partial(self._generate_one, model), lambda one: whole([one]), is_open=self._is_open)

    async def _encode_chat(
        self,
        tokenizer: PreTrainedTokenizerBase,
        body: ChatBody | TokenizeBody,
        tools: list[dict[str, Any]] | None,
        room: int,
    ) -> list[int]:
        """Return a chat's token ids, from the cache if it has them; raise InvalidSpecError beyond `room` tokens."""
        messages = body.messages or []
        limits.check_chat(messages, tools, room)
        options = [body.add_generation_prompt, body.continue_final_message, body.chat_template_kwargs]
        key, known = self._prompt_cache.get(tokenizer, [messages, tools, *options])
        if known is not None:
            return known
        tokens = await self._beside(
            lambda: encode_chat(
                tokenizer,
                messages,
                tools=tools,
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
                template_kwargs=body.chat_template_kwargs,
                pieces=self._pieces,
            ),
            size=limits.count_chars(messages) + limits.count_chars(tools or ()),
        )
        self._prompt_cache.put(tokenizer, key, tokens)
        return tokens

    async def _encode(
        self, tokenizer: PreTrainedTokenizerBase, texts: list[str], room: int, *, add_special_tokens: bool
    ) -> list[list[int]]:
        """Return the token ids of each text; raise InvalidSpecError if one could not fit into `room` tokens."""
        limits.check_texts(texts, room)
        return await self._beside(
            lambda: [tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts],
            size=sum(map(len, texts)),
        )

    async def _prompts(self, tokenizer: PreTrainedTokenizerBase, body: CompletionBody, room: int) -> list[list[int]]:
        """Return the prompts, texts or tokens, one or many, as token ids; raise InvalidSpecError if they exceed a
        limit.
        """
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
        """Call `work` in one of `_WORKERS` threads, or here if its `size` in bytes, characters or tokens is small."""
        if size < _SMALL:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._workers, work)

    async def _respond(
        self,
        completed: list[responses.Completed],
        whole: Callable[[], dict[str, Any]],
        *,
        stream: CompletionCommon | None,
    ) -> Response:
        """Return a response with the body that `whole` makes: as JSON, or as events if `stream` is the request of a
        stream.

        It is made in a thread if `completed` has many tokens.
        """

        def encode() -> bytes:
            if stream is None:
                return orjson.dumps(whole())
            return b"".join(responses.stream_chunks(whole(), wants_usage=stream.wants_usage_chunk))

        content = await self._beside(encode, size=sum(len(item.generation.token_ids) for item in completed))
        if stream is None:
            return Response(content, media_type=_JSON)
        return Response(content, headers={"content-type": "text/event-stream", "cache-control": "no-cache"})

    async def _read(self, request: Request, body: type[B]) -> B:
        """Read the body and validate it; raise InvalidSpecError for wrong fields, HTTPException if it comes too
        slowly.
        """
        try:
            async with asyncio.timeout(limits.BODY_S):
                data = await request.body()
        except TimeoutError:
            raise HTTPException(408, f"the body did not arrive within {limits.BODY_S:.0f} s") from None
        return await self._beside(lambda: _validated(body, data), size=len(data))

    async def _score(self, model: ServedModel, prompt: list[int]) -> dict[str, Any]:
        """Return a prompt's `prompt_logprobs` and `prompt_policy`; raise UnavailableError if `model` was replaced
        meanwhile.
        """
        self._require_still(model)
        return responses.scored(prompt, await self._engine.score(tuple(prompt)), model.tokenizer)

    def _require_still(self, model: ServedModel) -> None:
        """Raise UnavailableError if `model`, for which a request was prepared, is not the served one any more."""
        if self._slot.current is not model:
            raise UnavailableError(
                "the model was replaced while the request was read", reason="GENERATION_ABORTED", remedy="retry"
            )

    async def _generate_one(self, model: ServedModel, request: GenerateRequest) -> responses.Completed:
        """Generate one completion and return it with its prompt; raise UnavailableError if it was aborted, or
        InternalError.
        """
        self._require_still(model)  # what is handed to the engine from here on is aborted with the model
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


def _safely(handler: Handler) -> Handler:
    """Return a handler that calls this one and answers its errors in OpenAI's form; unexpected ones are logged, too."""

    async def endpoint(request: Request) -> Response:
        try:
            return await handler(request)
        except MillraceError as error:
            status, body = responses.error_body(error)
            headers = {"Retry-After": str(int(error.retry_after_s or 1))} if status in (429, 503) else {}
            return _json(body, status=status, headers=headers)
        except RoutingError as error:
            return await _routing_error(request, error)
        except ClientDisconnect:
            if BODY_TOO_LARGE not in request.scope:
                return Response(status_code=_CLIENT_GONE)
            status, body = limits.body_too_large(None)
            return _json(body, status=status)
        except Exception:  # the edge of the process: a defect must reach client and log
            logger.exception("a request failed", extra={"path": request.url.path})
            status, body = responses.error_body(InternalError("internal error; see the server's log"))
            return _json(body, status=status)

    return endpoint


async def _while_connected(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """Await `work` and return its response; cancel it and return status 499 when the client closes the connection."""
    answered, _ = await first_of(work, request.receive())  # after the whole body only a disconnect comes
    return Response(status_code=_CLIENT_GONE) if answered is None else answered.result()


async def _routing_error(_: Request, error: Exception) -> Response:
    """Return the response for an unknown path or method, or another HTTPException."""
    assert isinstance(error, RoutingError)
    body = {"error": {"message": error.detail, "type": "HTTPError", "param": None, "code": error.status_code}}
    return _json(body, status=error.status_code, headers=error.headers)


def _json(body: dict[str, Any], *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response with the body as JSON."""
    return Response(orjson.dumps(body), status, headers=headers, media_type=_JSON)


def _validated(body: type[B], data: bytes) -> B:
    """Parse JSON bytes as `body`; raise InvalidSpecError that names the wrong fields."""
    try:
        return body.model_validate_json(data)
    except ValidationError as error:
        violations = [
            Violation(field=".".join(map(str, item["loc"])) or "body", message=item["msg"])
            for item in error.errors(include_url=False, include_context=False, include_input=False)[:_MAX_VIOLATIONS]
        ]
        raise InvalidSpecError(violations, reason="REQUEST_INVALID") from None


def _tokenizer(model: ServedModel) -> PreTrainedTokenizerBase:
    """Return the model's tokenizer; raise InvalidStateError if it has none."""
    if model.tokenizer is None:
        raise InvalidStateError(
            "the policy has no tokenizer files, so only /inference/v1/generate works",
            reason="NO_TOKENIZER",
            remedy="publish the policy with its tokenizer",
        )
    return model.tokenizer


class _Ids:
    """Ids of requests, unique across processes, made without a system call for each. They are no secrets."""

    def __init__(self) -> None:
        self._own = secrets.token_hex(8)
        self._numbers = itertools.count()

    def next(self, kind: str) -> str:
        """Return a new id that begins with `kind`."""
        return f"{kind}-{self._own}{next(self._numbers):08x}"


async def start_http(api: HttpApi, host: str, port: int) -> HttpServer:
    """Serve the API, with its check of tokens, and return the server, which the caller stops; raise UnavailableError
    for an address that is taken, or InvalidSpecError.
    """
    access = http_access(host, port)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    bounds = HttpBounds(
        connections=MAX_CONNECTIONS if files < 0 else max(16, min(MAX_CONNECTIONS, files - _OTHER_FILES)),
        request_s=REQUEST_S,
        idle_s=IDLE_S,
        message_bytes=2 * limits.MAX_BODY_BYTES,
        shutdown_s=_SHUTDOWN_S,
    )
    app = TokenGate(api.make_app(), access=access)
    return await HttpServer.start(app, host, port, tls=access.tls, bounds=bounds, field="MILLRACE_HTTP_LISTEN")
