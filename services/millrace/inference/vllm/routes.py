"""The HTTP routes that the plugin puts in place of vLLM's own, and those of PRIME-RL.

| route | what |
|---|---|
| `POST /v1/chat/completions`, `/v1/completions`, `/inference/v1/generate` | vLLM's, plus `policy_spans` per choice |
| `GET /v1/models`, `GET /health` | vLLM's, but 503 while no proved policy serves |
| `POST /update_weights`, `POST /reload_weights` | PRIME-RL's: weights from a directory; not proved |

Spans are those of the engine (`weight_versions`), which labels every step's tokens with the version that it ran on.
"""

import asyncio
import json
import logging
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from millrace.errors import CapacityError, InvalidSpecError, InvalidStateError, MillraceError, UnavailableError
from millrace.inference.engine import STALL_S, EngineState
from millrace.inference.model_files import ModelSlot
from millrace.inference.updater import PolicyUpdater
from millrace.inference.vllm.engine import VllmEngine
from millrace.inference.vllm.gate import CALLS, Calls, Gate

# vllm and what comes with it are in their own environment, which the type checker does not see.
from fastapi import APIRouter, Request  # isort: skip # pyright: ignore[reportMissingImports]
from fastapi.responses import JSONResponse, Response, StreamingResponse  # isort: skip # pyright: ignore[reportMissingImports]
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest  # isort: skip # pyright: ignore[reportMissingImports]
from vllm.entrypoints.openai.completion.protocol import CompletionRequest  # isort: skip # pyright: ignore[reportMissingImports]
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest  # isort: skip # pyright: ignore[reportMissingImports]
from vllm.entrypoints.serve.engine.protocol import ErrorResponse  # isort: skip # pyright: ignore[reportMissingImports]
from vllm.entrypoints.serve.utils.api_utils import load_aware_call, with_cancellation  # isort: skip # pyright: ignore[reportMissingImports]

log = logging.getLogger(__name__)

router = APIRouter()


@dataclass(slots=True, kw_only=True)
class Replica:
    """What the routes need, at `app.state.millrace`."""

    engine: VllmEngine
    gate: Gate
    slot: ModelSlot
    updater: PolicyUpdater
    owner: tempfile.TemporaryDirectory[str]
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    is_draining: bool = False
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)

    def require(self) -> None:
        """UnavailableError while nothing that is proved serves."""
        status = self.engine.status()
        if self.is_draining:
            raise UnavailableError("this replica is shutting down", reason="DRAINING", remedy="retry on another one")
        if self.slot.current is None or status.state is not EngineState.READY:
            raise UnavailableError(
                status.error or "no policy is loaded yet", reason="NO_POLICY", remedy="retry in a few seconds"
            )

    async def load_directory(self, directory: str | None) -> None:
        """Serves weights of a directory, or the first ones again. InvalidStateError while it serves a run."""
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
        """Refuses new requests, waits for the open ones at most `grace_s`, then aborts them."""
        self.is_draining = True
        try:
            async with asyncio.timeout(grace_s):
                await self.gate.drained()
        except TimeoutError:
            log.warning("aborting requests at shutdown", extra={"requests": self.gate.num_open, "grace_s": grace_s})
            await self.engine.abort_all()


def attach(app: Any) -> None:
    """Adds the routes; vLLM drops its own of the same path and method."""
    app.include_router(router)
    app.add_exception_handler(MillraceError, lambda _, error: _error(error))


@router.post("/v1/chat/completions")
@with_cancellation
@load_aware_call
async def chat(request: ChatCompletionRequest, raw_request: Request) -> Response:
    """OpenAI's chat; vLLM renders, generates and parses."""
    serving = raw_request.app.state.openai_serving_chat
    return await _serve(raw_request, lambda: serving.create_chat_completion(request, raw_request), _add_spans)


@router.post("/v1/completions")
@with_cancellation
@load_aware_call
async def completions(request: CompletionRequest, raw_request: Request) -> Response:
    """OpenAI's completions."""
    serving = raw_request.app.state.openai_serving_completion
    return await _serve(raw_request, lambda: serving.create_completion(request, raw_request), _add_spans)


@router.post("/inference/v1/generate")
@with_cancellation
@load_aware_call
async def generate(request: GenerateRequest, raw_request: Request) -> Response:
    """Tokens in, tokens out. Log-probs are always there, named `token_id:N` as clients want them."""
    if request.sampling_params.logprobs is None:
        request.sampling_params.logprobs = 0
    serving = raw_request.app.state.serving_tokens

    def finish(body: dict[str, Any], calls: Calls) -> None:
        _add_spans(body, calls)
        for choice in body["choices"]:
            for entry in (choice.get("logprobs") or {}).get("content") or []:
                entry["token"] = f"token_id:{entry['token_id']}"

    return await _serve(raw_request, lambda: serving.serve_tokens(request, raw_request), finish)


@router.get("/v1/models")
async def models(raw_request: Request) -> Response:
    """The models."""
    _replica(raw_request).require()
    found = await raw_request.app.state.openai_serving_models.show_available_models()
    return JSONResponse(found.model_dump())


@router.get("/health")
async def health(raw_request: Request) -> Response:
    """200 while a proved policy serves and the engine answers."""
    replica = _replica(raw_request)
    replica.require()
    if (age_s := replica.engine.status().progress_age_s) > STALL_S:
        raise UnavailableError(f"the engine did nothing for {age_s:.0f} s", reason="ENGINE_STALLED")
    return JSONResponse({"status": "ok"})


@router.post("/update_weights")
async def update_weights(raw_request: Request) -> Response:
    """PRIME-RL's: `{"weight_dir": …}`, a directory of safetensors files that the workers can read."""
    body = await raw_request.json()
    directory = body.get("weight_dir") if isinstance(body, dict) else None
    if not isinstance(directory, str) or not directory:
        raise InvalidStateError("the body needs weight_dir, a directory", reason="REQUEST_INVALID")
    await _replica(raw_request).load_directory(directory)
    return JSONResponse({"status": "ok"})


@router.post("/reload_weights")
async def reload_weights(raw_request: Request) -> Response:
    """PRIME-RL's: back to the weights that the server was started with."""
    await _replica(raw_request).load_directory(None)
    return JSONResponse({"status": "ok"})


def _replica(request: Request) -> Replica:
    return request.app.state.millrace


async def _serve(
    request: Request, call: Callable[[], Awaitable[Any]], finish: Callable[[dict[str, Any], Calls], None]
) -> Response:
    """One call of a serving object behind the gate; `finish` adds to the body what the engine said."""
    calls = Calls()
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
        return StreamingResponse(answer, media_type="text/event-stream")
    body = answer.model_dump()
    finish(body, calls)
    return Response(json.dumps(body, separators=(",", ":"), ensure_ascii=False), media_type="application/json")


def _add_spans(body: dict[str, Any], calls: Calls) -> None:
    """`policy_spans` of every choice; the choices are those of the calls, in order."""
    outputs = [found[index] for found in calls.outputs for index in sorted(found)]
    if len(outputs) != len(body["choices"]):
        raise UnavailableError("a choice has no end", reason="GENERATION_ABORTED", remedy="retry")
    for choice, output in zip(body["choices"], outputs, strict=True):
        choice["policy_spans"] = [_span(span) for span in output.weight_versions or ()]
        if choice.get("token_ids") is not None and len(choice["token_ids"]) != len(output.token_ids):
            raise UnavailableError("a choice is not that of its spans", reason="GENERATION_ABORTED", remedy="retry")


def _span(span: Any) -> dict[str, int]:
    fields: Mapping[str, Any] = span if isinstance(span, Mapping) else vars_of(span)
    lineage, _, version = str(fields["version"]).partition("-")
    return {"lineage": int(lineage), "version": int(version), "start": fields["start"], "end": fields["end"]}


def vars_of(span: Any) -> Mapping[str, Any]:
    """vLLM's span (version, start, end) as a mapping."""
    return (
        dict(zip(("version", "start", "end"), span, strict=True))
        if isinstance(span, tuple)
        else {name: getattr(span, name) for name in ("version", "start", "end")}
    )


_STATUS = ((CapacityError, 429), (UnavailableError, 503), (InvalidSpecError, 400), (InvalidStateError, 400))


def _error(error: Exception) -> Response:
    """OpenAI's error object; 503 carries Retry-After."""
    status = next((code for kind, code in _STATUS if isinstance(error, kind)), 500)
    body = {"error": {"message": str(error), "type": type(error).__name__, "param": None, "code": status}}
    wait_s = getattr(error, "retry_after_s", None)
    headers = {"Retry-After": str(int(wait_s or 1))} if status in (429, 503) else {}
    return JSONResponse(body, status_code=status, headers=headers)
