"""Samples and log-probs for sampling sessions, by the embedded engine.

The engine holds one adapter at a time: the sessions with waiting requests take turns, each with all that wait for it.
What a request gives follows from the session's weights and the request alone, whatever is sampled beside it: where a
request has no seed, its id is one.
"""

import asyncio
import hashlib
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load as load_tensors

from millrace.backoff import Backoff
from millrace.decoding import Fields, decode_object
from millrace.errors import InternalError, MillraceError, UnavailableError
from millrace.inference.embedded import loader
from millrace.inference.embedded.engine import EmbeddedEngine
from millrace.inference.engine import (
    EngineState,
    FinishReason,
    GenerateRequest,
    Generation,
    InflightMode,
    PolicyIdentity,
    SamplingParams,
)
from millrace.internal.v1 import tinker_pb2 as pb
from millrace.policies.manifest import StagedPolicy
from millrace.policies.peft.config import HIGH, LOW, published_name
from millrace.policies.proof import held_digest
from millrace.policies.tensors import TensorBytes
from millrace.storage.base import ObjectStore
from millrace.tinker.examples import refused
from millrace.tinker.log import ADAPTER, FULL, SERVER, USER, ModelLog, error_of, read_record
from millrace.tinker.names import ModelName, SamplerName
from millrace.tinker.states import ALPHA, OWN

logger = logging.getLogger(__name__)

MAX_SAMPLES = 256
_FIXED = PolicyIdentity(run_uid="", lineage=0, version=0)
_RETRY = Backoff(0.5, 30.0)

Done = Callable[[SamplerName, int], None]


class Sampling:
    """Answers requests for samples that are stored, and stores their results."""

    def __init__(
        self, store: ObjectStore, engine: EmbeddedEngine, *, done: Done, turn: Callable[[SamplerName, bool], None]
    ) -> None:
        """Make it; `load` and `run` must follow.

        `done` is called once a result is stored, `turn` where requests of a session are begun (True) and have ended.
        """
        self._store = store
        self._engine = engine
        self._done = done
        self._turns = turn
        self._waiting: OrderedDict[SamplerName, set[int]] = OrderedDict()
        self._has_work = asyncio.Event()
        self._held: str | None = None
        """Which weights the engine has."""
        self._layer: tuple[str, int, int] = ("", 0, 0)
        self._dtype = torch.float32
        self.vocab_size = 0

    async def load(self, directory: Path) -> None:
        """Load the base model in `directory`."""
        await self._engine.load(directory, None, identity=_FIXED)
        from millrace.models import loading

        config = loading.load_config(directory)
        self._dtype = loading.stored_dtype(directory, config)
        self.vocab_size = int(config.get_text_config(decoder=True).vocab_size)
        model = loading.empty_model(directory, dtype=self._dtype)
        name, layer = next((n, each) for n, each in model.named_modules() if type(each) is torch.nn.Linear)
        self._layer = name, layer.in_features, layer.out_features

    def look(self, sampler: SamplerName, seq_id: int) -> None:
        """Note that a request is stored. Call it in the event loop of `run`."""
        self._waiting.setdefault(sampler, set()).add(seq_id)
        self._has_work.set()

    async def run(self) -> None:
        """Answer requests for ever, session by session; InternalError (ENGINE_FAILED) if the engine cannot go on."""
        failures = 0
        # unregistered wait: for requests, of which there may be none for days
        while True:
            await self._has_work.wait()
            sampler, seq_ids = self._waiting.popitem(last=False)
            if not self._waiting:
                self._has_work.clear()
            self._turns(sampler, True)
            try:
                await self._turn(sampler, seq_ids)
                failures = 0
                self._turns(sampler, False)
            except UnavailableError as error:
                status = self._engine.status()
                if status.state is EngineState.FAILED or status.is_dead:
                    # It has no model any more, and a new process has.
                    raise InternalError(f"the engine failed: {status.error}", reason="ENGINE_FAILED") from error
                self._turns(sampler, False)
                failures += 1
                delay_s = _RETRY.after(failures)
                logger.warning("samples wait", extra={"sampler": sampler.id, "error": str(error), "retry_s": delay_s})
                await asyncio.sleep(delay_s)
                for seq_id in seq_ids:
                    self.look(sampler, seq_id)

    async def _turn(self, sampler: SamplerName, seq_ids: set[int]) -> None:
        """Answer requests of one session, all at once."""
        try:
            await self._put_in(sampler)
        except UnavailableError:
            raise
        except MillraceError as error:
            logger.error("a sampling session cannot be served", extra={"sampler": sampler.id, "error": str(error)})
            for seq_id in seq_ids:
                await self._store_result(sampler, seq_id, pb.VerbResult(error=error_of(error)))
            return
        answers = await asyncio.gather(
            *(self._answer(sampler, seq_id) for seq_id in sorted(seq_ids)), return_exceptions=True
        )
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer

    async def _answer(self, sampler: SamplerName, seq_id: int) -> None:
        """Answer one request, unless it has a result."""
        if await asyncio.to_thread(self._store.head, sampler.result(seq_id)) is not None:
            self._done(sampler, seq_id)
            return
        raw = await asyncio.to_thread(self._store.get, sampler.request(seq_id))
        try:
            body = Fields(decode_object(raw, what="a request for samples", reason="TINKER_OBJECT_DAMAGED"))
            result = pb.VerbResult(protobuf=await self._sample(sampler, seq_id, body))
        except UnavailableError:
            raise
        except ValueError as error:  # of a field of the body
            result = pb.VerbResult(error=pb.VerbError(message=f"asample: {error}", category=USER))
        except MillraceError as error:
            if self._engine.status().state is EngineState.FAILED:
                raise UnavailableError(error.message, reason="ENGINE_FAILED") from error
            result = pb.VerbResult(error=error_of(error))
        except Exception as error:  # the edge of torch: one request may not end all others
            logger.exception("a request for samples failed", extra={"sampler": sampler.id, "seq_id": seq_id})
            result = pb.VerbResult(error=pb.VerbError(message=f"{type(error).__name__}: {error}", category=SERVER))
        await self._store_result(sampler, seq_id, result)

    async def _store_result(self, sampler: SamplerName, seq_id: int, result: pb.VerbResult) -> None:
        """Store a result; the first of two counts."""
        data = result.SerializeToString(deterministic=True)
        await asyncio.to_thread(self._store.create, sampler.result(seq_id), data)
        self._done(sampler, seq_id)

    async def _sample(self, sampler: SamplerName, seq_id: int, body: Fields) -> bytes:
        """Return the SDK's message with the samples of one request."""
        prompt = read_prompt(body, vocab_size=self.vocab_size)
        _refuse_unknown(body)
        count = body.integer("num_samples", least=1, most=MAX_SAMPLES)
        room = self._engine.status().max_model_len - len(prompt)
        if room < 1 or not prompt:
            most = self._engine.status().max_model_len - 1
            raise refused("prompt", f"must have 1 to {most} tokens", len(prompt))
        sampling = body.inner("sampling_params")
        answer = pb.SampleResponse()
        # Before the samples: both are of the same weights, which stay for the whole turn.
        if body.has("prompt_logprobs") and body.flag("prompt_logprobs"):
            answer.prompt_logprobs = (await self._prompt_logprobs(prompt)).tobytes()
        requests = [
            GenerateRequest(
                request_id=f"{sampler.id}/{seq_id}/{number}",
                prompt_token_ids=tuple(prompt),
                sampling=read_sampling(sampling, room=room, seed_of=f"{sampler.id}/{seq_id}", number=number),
            )
            for number in range(count)
        ]
        for made in await asyncio.gather(*map(self._engine.generate, requests)):
            answer.sequences.append(_sequence(made))
        return answer.SerializeToString(deterministic=True)

    async def _prompt_logprobs(self, prompt: list[int]) -> NDArray[np.float32]:
        """Return the log-prob of each token of the prompt, NaN for the first, float32 [T]."""
        found = np.full(len(prompt), math.nan, "<f4")
        if len(prompt) > 1:
            found[1:] = (await self._engine.score(tuple(prompt))).logprobs
        return found

    async def _put_in(self, sampler: SamplerName) -> None:
        """Bring the session's weights into the engine, and prove that it has them."""
        record = await asyncio.to_thread(read_record, self._store, sampler.record, what="a sampling session")
        if not record.has("model"):
            weights, wanted = self._no_adapter(), "base"
        else:
            name = ModelName.parse(sampler.home.prefix, sampler.home.tenant, record.text("model"))
            seq_id, kind = record.integer("seq_id"), record.text("kind")
            wanted = f"{name.id}/{seq_id}/{kind}"
            if wanted == self._held:
                return
            data = await asyncio.to_thread(ModelLog(self._store, name).state, seq_id, kind)
            weights = adapter_weights(data, kind)
        if wanted == self._held:
            return
        staged = _staged({name: each.to(self._dtype) for name, each in weights.items()})
        await self._engine.check(staged)
        self._held = None
        await self._engine.apply_policy(staged, identity=_FIXED, inflight_mode=InflightMode.KEEP)
        await self._engine.prove(staged)
        self._held = wanted

    def _no_adapter(self) -> dict[str, torch.Tensor]:
        """Return an adapter that adds exactly 0: the base."""
        name, num_in, num_out = self._layer
        return {
            published_name(f"{name}{LOW}"): torch.zeros(1, num_in),
            published_name(f"{name}{HIGH}"): torch.zeros(num_out, 1),
        }


def adapter_weights(data: bytes, kind: str) -> dict[str, torch.Tensor]:
    """Return the adapter's weights, by the names that PEFT gives them, of a stored state of a kind."""
    tensors = load_tensors(data)
    if kind == ADAPTER:
        return tensors
    assert kind == FULL
    return {published_name(n.removeprefix(OWN)): t for n, t in tensors.items() if n.startswith(OWN)}


def _staged(weights: Mapping[str, torch.Tensor]) -> StagedPolicy:
    """Return weights of an adapter as an engine takes them; it reads nothing else of a manifest."""
    tensors: dict[str, TensorBytes] = {name: loader.as_tensor_bytes(each) for name, each in weights.items()}
    rank = next(each.shape[0] for name, each in weights.items() if name.endswith(LOW))
    adapter = SimpleNamespace(rank=rank, alpha=ALPHA, target_modules=(), modules_to_save=())
    manifest: Any = SimpleNamespace(digest=held_digest(tensors), probe=None, adapter=adapter)
    return StagedPolicy(manifest=manifest, tensors=tensors)


def read_prompt(body: Fields, *, vocab_size: int) -> list[int]:
    """Return the tokens of a request's prompt; InvalidSpecError for what is no text, or no token."""
    prompt = body.inner("prompt")
    tokens: list[int] = []
    for chunk in [] if prompt is None else prompt.objects("chunks"):
        if chunk.text("type") != "encoded_text":
            raise refused("prompt", "must be tokens of text", chunk.text("type"))
        tokens += chunk.integers("tokens", largest=(1 << 31) - 1)
    if any(token >= vocab_size for token in tokens):
        raise refused("prompt", f"must be token ids from 0 to {vocab_size - 1}")
    return tokens


def _refuse_unknown(body: Fields) -> None:
    """Raise InvalidSpecError for what the SDK may ask and is not answered here."""
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k"):
        if body.has(name) and body.integer(name):
            raise refused(name, "must be 0: it is not served here")
    if body.has("target_prompt_logprobs"):
        raise refused("target_prompt_logprobs", "must be left out: it is not served here")
    if body.has("prompt_logprobs_last_n"):
        raise refused("prompt_logprobs_last_n", "must be left out: the whole prompt is scored")
    if body.has("record_stability_info") and body.flag("record_stability_info"):
        raise refused("record_stability_info", "must be false: the loss stable_reinforce is not served here")


def read_sampling(params: Fields | None, *, room: int, seed_of: str, number: int) -> SamplingParams:
    """Return how sample `number` of a request is sampled, with at most `room` tokens.

    Each sample has a seed of its own, of the request's seed, or else of `seed_of`.
    """
    if params is None:
        raise refused("sampling_params", "must be given")
    seed = params.integer("seed") if params.has("seed") else seed_of
    digest = hashlib.sha256(f"{seed}/{number}".encode()).digest()
    stops, tokens = _stops(params)
    most = params.integer("max_tokens", least=1) if params.has("max_tokens") else room
    temperature = params.number("temperature") if params.has("temperature") else 1.0
    top_p = params.number("top_p") if params.has("top_p") else 1.0
    top_k = max(0, int(params.number("top_k"))) if params.has("top_k") else 0
    if temperature < 0 or not 0 < top_p <= 1:
        raise refused("sampling_params", "must have temperature >= 0 and 0 < top_p <= 1", (temperature, top_p))
    return SamplingParams(
        max_tokens=min(most, room),
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=int.from_bytes(digest[:8], "big"),
        stop=stops,
        stop_token_ids=tokens,
        skip_special_tokens=False,
    )


def _stops(params: Fields) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the stop strings and the stop tokens of a request, which has one text, texts, or token ids."""
    if not params.has("stop"):
        return (), ()
    try:
        return (params.text("stop"),), ()
    except ValueError:  # it is a list
        given = params.items("stop", most=64)
    if all(isinstance(each, str) for each in given):
        return params.texts("stop"), ()
    return (), params.integers("stop")


def _sequence(made: Generation) -> pb.SampledSequence:
    """Return a completion as the SDK reads it; InternalError for one that was not completed."""
    if made.finish_reason is FinishReason.ABORT:
        raise UnavailableError("the engine aborted a request", reason="ABORTED", remedy="it is tried again")
    if made.finish_reason is FinishReason.ERROR:
        raise InternalError("the model gave values that are not finite", reason="NOT_FINITE")
    is_stop = made.finish_reason is FinishReason.STOP
    return pb.SampledSequence(
        stop_reason=pb.STOP_REASON_STOP if is_stop else pb.STOP_REASON_LENGTH,
        tokens=np.asarray(made.token_ids, "<i4").tobytes(),
        logprobs=np.asarray(made.logprobs, "<f4").tobytes(),
    )
