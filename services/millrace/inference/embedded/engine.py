"""The embedded engine: a transformers model in this process, driven by one thread of its own, on CPU.

It is the engine for laptops and tests, built to be exact and fast enough: the thread owns model, KV cache and
scheduler, and runs commands of other threads between two steps. So an update can never happen during a forward pass,
and results need no locks.
"""

import asyncio
import contextlib
import functools
import logging
import random
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch

from millrace.errors import (
    CapacityError,
    InternalError,
    InvalidSpecError,
    InvalidStateError,
    UnavailableError,
    Violation,
)
from millrace.inference import model_files
from millrace.inference.embedded import loader
from millrace.inference.embedded.adapters import Adapter
from millrace.inference.embedded.deliveries import Deliveries
from millrace.inference.embedded.held import HeldWeights
from millrace.inference.embedded.rows import Running
from millrace.inference.embedded.scheduler import Scheduler
from millrace.inference.engine import (
    EngineState,
    EngineStatus,
    FinishReason,
    GenerateRequest,
    Generation,
    HeldDigest,
    InflightMode,
    PolicyIdentity,
    PromptScores,
)
from millrace.models.routing import Routers
from millrace.policies.manifest import StagedPolicy
from millrace.policies.stops import turn_stops
from millrace.telemetry import faults
from millrace.telemetry.faults import Point

logger = logging.getLogger(__name__)

DEFAULT_KV_BYTES = 4 << 30
MAX_WAITING = 100_000  # requests; beyond it a request is refused with QUEUE_FULL
_IDLE_WAIT_S = 1.0
_CLOSE_TIMEOUT_S = 30.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Command:
    """A function for the thread to run between two steps. `refuse` gets the error if it fails or is never begun."""

    run: Callable[[], None]
    refuse: Callable[[Exception], None]


class EmbeddedEngine:
    """Implements `Engine` with a transformers model in this process.

    `max_num_seqs` is how many requests generate at once, `max_model_len` bounds the context in tokens (None: the
    model's), `kv_bytes` the KV cache. `num_threads` is for torch's operators; more than one rarely helps small models.
    With `returns_experts` results have the experts of their tokens, where the model has any. Of the adapters that
    requests name at most `max_loras` generate at once.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int = 256,
        max_model_len: int | None = None,
        kv_bytes: int = DEFAULT_KV_BYTES,
        num_threads: int = 1,
        returns_experts: bool = False,
        max_loras: int = 8,
    ) -> None:
        """Start the engine's thread, without a model: `load` must follow.

        At most `max_num_seqs` requests generate at once, `max_model_len` bounds the context in tokens (None: the
        model's), and `kv_bytes` the KV cache. `num_threads` is the number of threads for torch's operators. With
        `returns_experts` results have the experts of their tokens, where the model has any. Of the adapters that
        requests name at most `max_loras` generate at once.
        """
        self._max_loras = max_loras
        self._max_num_seqs = max_num_seqs
        self._max_model_len_limit = max_model_len
        self._kv_bytes = kv_bytes
        self._num_threads = num_threads
        self._returns_experts = returns_experts
        self._model_len = 0
        self._vocab_size = 0
        self._state = EngineState.EMPTY
        self._error = ""
        self._scheduler: Scheduler | None = None
        self._weights: HeldWeights | None = None
        self._pauses: set[str] = set()
        self._commands: deque[_Command] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._death = ""
        self._progress = time.monotonic()
        self._seeds = random.Random(secrets.randbits(256))  # a call of the system once, not per request
        self._deliveries = Deliveries()
        # A daemon, so that a process can end although a forward pass does not.
        self._thread = threading.Thread(target=self._run, name="millrace-engine", daemon=True)
        self._thread.start()

    @property
    def kind(self) -> str:
        """Return the engine's name in statuses, "embedded"."""
        return "embedded"

    async def load(self, model_dir: Path, staged: StagedPolicy | None, *, identity: PolicyIdentity) -> None:
        """Build the model of `model_dir`, with the weights of `staged` or else of that directory, and put it in place
        of the present one.

        Its tokens are attributed to `identity`. The present model generates while the new one is built, so both are in
        memory; its requests are then aborted.
        """
        self._require_thread()  # before the work, not after it
        scheduler, held, model_len, vocab_size = await asyncio.to_thread(self._build, model_dir, staged, identity)

        def swap() -> None:
            """Replace scheduler and weights by the new model's, and abort the old one's requests."""
            old, self._scheduler = self._scheduler, scheduler
            self._weights = held
            self._state, self._error = EngineState.READY, ""
            self._model_len, self._vocab_size = model_len, vocab_size
            if old is not None:
                old.abort_all()

        await self._in_thread(swap)

    async def check(self, staged: StagedPolicy) -> None:
        """Raise InvalidStateError if the staged policy does not fit the model; changes nothing, and generation goes
        on.
        """
        held = self._held_weights()
        await asyncio.to_thread(held.check, staged)  # beside the thread, which it does not disturb

    async def apply_policy(
        self, staged: StagedPolicy, *, identity: PolicyIdentity, inflight_mode: InflightMode
    ) -> None:
        """Write the staged policy's weights into the model, between two steps; a failure leaves the engine FAILED and
        is raised.

        Tokens count as `identity`'s from then on. `inflight_mode` decides whether requests in flight keep their KV
        cache.
        """

        def apply() -> None:
            """Check and write the weights, in the engine's thread; mark the engine as FAILED if the write fails."""
            scheduler, held = self._held(), self._held_weights()
            # Once more, because another model may have been loaded since `check`.
            held.check(staged)
            for adapter in held.shared:  # they are on weights that go away
                scheduler.end_adapter(adapter)
            try:
                held.apply(staged)
                faults.reach(Point.INFERENCE_MID_APPLY, version=identity.version)
                scheduler.set_identity(identity, inflight_mode)
            except BaseException as error:  # marks the engine as failed, then raises
                self._fail(f"applying policy {identity} failed half-way: {error}")
                raise

        await self._in_thread(apply)

    async def prove(self, staged: StagedPolicy, *, opens: bool = True) -> HeldDigest:
        """Prove that the model has the staged policy's weights, and return their digest; raise InternalError otherwise.

        The weights are read back, and the probe is computed if the manifest has one. `opens` is ignored: the server
        decides what is served, and names no model before the updater has one.
        """
        return await self._in_thread(lambda: self._held_weights().prove(staged))

    async def add_adapter(self, staged: StagedPolicy, *, identity: PolicyIdentity) -> HeldDigest:
        """Put an adapter beside the others on the base, prove it, and return its digest; requests may then name it.

        Generation pauses for the proof only: a readback of the adapter, and a pass over the manifest's probe. Raises
        InvalidStateError for an adapter that does not fit, is on another base or replaces whole weights, and
        InternalError for one that cannot be proved; everything else is then as before.
        """
        held = self._held_weights()

        def copied() -> Adapter:
            """Check the adapter and copy its tensors, beside the engine's thread."""
            held.check_shared(staged)
            return Adapter.of(staged)

        adapter = await asyncio.to_thread(copied)
        return await self._in_thread(lambda: self._held_weights().add(identity, adapter, staged))

    async def remove_adapter(self, identity: PolicyIdentity) -> None:
        """Take away an adapter and free its memory; its requests end with ABORT. One that is not there is ignored."""

        def remove() -> None:
            """End the adapter's requests, and take it out of the model."""
            self._held().end_adapter(identity)
            self._held_weights().adapters.remove(identity)

        await self._in_thread(remove)

    async def move_adapter(self, old: PolicyIdentity, new: PolicyIdentity, *, inflight_mode: InflightMode) -> None:
        """Have the requests that `old` generates go on with `new`, a newer version, between two steps.

        `inflight_mode` decides whether they keep their KV cache. Requests of other adapters go on meanwhile. Raises
        UnavailableError if the engine does not have `new`.
        """

        def move() -> None:
            """Have the scheduler move the requests, in the engine's thread; mark the engine as FAILED if it fails."""
            self._held_weights().require(new)
            try:
                self._held().move_adapter(old, new, inflight_mode)
            except BaseException as error:  # some of the requests have a cache of another version, then raises
                self._fail(f"the move from adapter {old} to {new} failed half-way: {error}")
                raise

        await self._in_thread(move)

    async def generate(self, request: GenerateRequest) -> Generation:
        """Generate one completion and return it; a cancelled call aborts the request.

        Raises CapacityError if MAX_WAITING requests wait, UnavailableError without a model or the request's adapter,
        and an error for a prompt that does not fit.
        """
        scheduler = self._held()
        if scheduler.num_waiting >= MAX_WAITING:
            raise CapacityError(f"{MAX_WAITING} requests wait already", reason="QUEUE_FULL", remedy="retry later")
        self._check_prompt(request.prompt_token_ids)
        prompt_length = len(request.prompt_token_ids)
        done: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        seed = request.sampling.seed
        entry = Running(
            request=request,
            # The table has seeds as unsigned numbers of 64 bits, and callers may send negative ones.
            seed=self._seeds.getrandbits(64) if seed is None else seed & (1 << 64) - 1,
            limit=min(prompt_length + max(1, request.sampling.max_tokens), self._model_len),
            adapter=request.adapter,
            deliver=functools.partial(self._deliveries.add, done),
            refuse=functools.partial(self._deliveries.add, done),
        )
        self._post(_Command(lambda: self._submit(entry), entry.fail))
        try:
            return await done
        except asyncio.CancelledError:
            with contextlib.suppress(UnavailableError):  # a thread that ends ends its requests as well
                self._post(_Command(lambda: self._abort(request.request_id), lambda _: None))
            raise

    async def score(self, token_ids: tuple[int, ...], adapter: PolicyIdentity | None = None) -> PromptScores:
        """Return the log-prob of each given token but the first under the present policy, or under one of the adapters
        that requests name; generation pauses meanwhile.

        Raises UnavailableError without a model or that adapter, and an error for tokens that do not fit.
        """
        self._held()
        self._check_prompt(token_ids)

        def scored() -> PromptScores:
            """Score the tokens in the engine's thread, and name the present policy in the result."""
            scores = self._held_weights().score(token_ids, adapter)
            return replace(scores, policy=adapter or self._held().identity)

        return await self._in_thread(scored)

    async def abort(self, request_id: str) -> None:
        """End the request with that id with ABORT; an unknown id is ignored."""
        await self._in_thread(lambda: self._abort(request_id))

    async def abort_all(self) -> None:
        """End every request with ABORT."""
        await self._in_thread(lambda: self._scheduler.abort_all() if self._scheduler else None)

    async def fail(self, error: str) -> None:
        """Drop the model: the engine is FAILED with this error, and requests in flight end with ABORT."""
        await self._in_thread(lambda: self._fail(error))

    async def pause(self, holder: str) -> None:
        """Stop generation between two tokens until each holder that has paused it resumes; the same holder counts
        once.
        """
        await self._in_thread(lambda: self._pauses.add(holder))

    async def resume(self, holder: str) -> None:
        """End this holder's pause; generation goes on if no other holder pauses it."""
        await self._in_thread(lambda: self._pauses.discard(holder))

    def status(self) -> EngineStatus:
        """Return the engine's present status, without waiting for its thread; may be called by any thread."""
        scheduler = self._scheduler
        is_busy = scheduler is not None and not self._pauses and scheduler.num_running + scheduler.num_waiting > 0
        return EngineStatus(
            state=self._state,
            identity=scheduler.identity if scheduler is not None and self._state is EngineState.READY else None,
            is_paused=bool(self._pauses),
            num_running=scheduler.num_running if scheduler else 0,
            num_waiting=scheduler.num_waiting if scheduler else 0,
            max_num_seqs=self._max_num_seqs,
            max_model_len=self._model_len,
            is_dead=bool(self._death),
            # An engine without work makes no progress, and is not stuck.
            progress_age_s=time.monotonic() - self._progress if is_busy or self._commands else 0.0,
            num_generated_tokens=scheduler.num_generated_tokens if scheduler else 0,
            num_finished=scheduler.num_finished if scheduler else 0,
            error=self._error,
            routed=scheduler.routed if scheduler else None,
        )

    async def close(self) -> None:
        """End the engine's thread, which aborts all requests; wait for it at most `_CLOSE_TIMEOUT_S`."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join, _CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            logger.error("the engine's thread did not end", extra={"timeout_s": _CLOSE_TIMEOUT_S})

    def _build(
        self, model_dir: Path, staged: StagedPolicy | None, identity: PolicyIdentity
    ) -> tuple[Scheduler, HeldWeights, int, int]:
        """Build the model (blocking) and return its scheduler, its weights, its longest context in tokens, and its
        number of token ids.

        Weights are those of `staged`, or of `model_dir` if that is None. Raises InvalidStateError for a model that
        cannot run here.
        """
        config = model_files.load_config(model_dir)
        tensors, probe = (None, None) if staged is None else (staged.tensors, staged.manifest.probe)
        model_len = loader.context_length(config, most=self._max_model_len_limit, probe=probe)
        model = loader.load_model(model_dir, tensors, context_length=model_len)
        tokenizer = model_files.load_tokenizer(model_dir)
        routers = Routers.of(model) if self._returns_experts else None
        if self._returns_experts and routers is None:
            logger.warning("the model has no experts that can be recorded", extra={"model": type(model).__name__})
        held = HeldWeights(model, max_loras=self._max_loras)
        scheduler = Scheduler(
            model,
            identity=identity,
            eos_token_ids=tuple(sorted(turn_stops(tokenizer, model_dir).token_ids)),
            decoder=tokenizer,
            max_num_seqs=self._max_num_seqs,
            kv_tokens=self._kv_bytes // loader.cache_token_bytes(config, next(model.parameters()).dtype),
            routers=routers,
            adapters=held.adapters,
        )
        return scheduler, held, model_len, int(config.vocab_size)

    def _held(self) -> Scheduler:
        """Return the scheduler of the loaded model.

        Raises UnavailableError if there is none, or the engine has failed or closes.
        """
        scheduler = self._scheduler  # once: the thread may drop it meanwhile
        match self._state:
            case EngineState.READY if scheduler is not None and not self._closing:
                return scheduler
            case EngineState.FAILED:
                raise UnavailableError(self._error, reason="ENGINE_FAILED", remedy="retry on another replica")
            case _:
                raise UnavailableError("the engine holds no model", reason="NO_POLICY", remedy="retry later")

    def _held_weights(self) -> HeldWeights:
        """Return the weights of the loaded model; raise UnavailableError if there is none, or the engine has failed
        or closes.
        """
        self._held()
        assert self._weights is not None, "they come with the model"
        return self._weights

    def _check_prompt(self, prompt: tuple[int, ...]) -> None:
        """Raise InvalidStateError for an empty or too long prompt, InvalidSpecError for token ids beyond the
        vocabulary.

        Such a prompt would fail the forward pass of all other requests.
        """
        if not 0 < len(prompt) < self._model_len:
            raise InvalidStateError(
                f"the prompt has {len(prompt)} tokens; this model's maximum context length is {self._model_len} tokens",
                reason="PROMPT_TOO_LONG" if prompt else "PROMPT_EMPTY",
                remedy=f"send 1 to {self._model_len - 1} tokens",
            )
        if min(prompt) < 0 or max(prompt) >= self._vocab_size:
            unknown = next(token for token in prompt if not 0 <= token < self._vocab_size)
            wrong = Violation(
                field="token_ids", value=str(unknown), message=f"token ids are 0 to {self._vocab_size - 1}"
            )
            raise InvalidSpecError([wrong], reason="TOKEN_UNKNOWN", remedy="use this model's tokenizer")

    # ---- what follows runs in the engine's thread, except _require_thread, _post and _in_thread ----

    def _require_thread(self) -> None:
        """Raise UnavailableError if the engine's thread has died or the engine is closed."""
        if self._death:
            raise UnavailableError(self._death, reason="ENGINE_DEAD", remedy="restart the replica")
        if self._closing:
            raise UnavailableError("the engine is closed", reason="ENGINE_CLOSED", remedy="retry on another replica")

    def _post(self, command: _Command) -> None:
        """Queue a command for the engine's thread and wake it; raise UnavailableError if the thread has ended.

        The thread's end is checked under the lock that ending takes as well, so each queued command is run or refused.
        """
        with self._wake:
            self._require_thread()
            if not self._commands:
                # An idle engine has made no progress for long, which must not count as a stall of the first command.
                self._progress = time.monotonic() if self._is_idle() else self._progress
            self._commands.append(command)
            self._wake.notify()

    async def _in_thread(self, function: Callable[[], T]) -> T:
        """Call a function in the engine's thread, between two steps; return its result or raise its error.

        Raises UnavailableError if the thread has ended.
        """
        done: Future[T] = Future()

        def run() -> None:
            """Call the function in the engine's thread, and set its result or error for the caller."""
            # False if the caller was cancelled while the function waited: then it must not run.
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(function())
                except BaseException as error:  # noqa: BLE001 - crosses the thread border as the caller's error
                    done.set_exception(error)

        def refuse(error: Exception) -> None:
            """Set the error for the caller, unless the function has run or the caller has gone."""
            if not done.done() and done.set_running_or_notify_cancel():
                done.set_exception(error)

        self._post(_Command(run, refuse))
        return await asyncio.wrap_future(done)

    def _is_idle(self) -> bool:
        """Return whether there is no step to do: no model, no requests, or a pause."""
        scheduler = self._scheduler
        return bool(self._pauses) or scheduler is None or not (scheduler.num_running or scheduler.num_waiting)

    def _run(self) -> None:
        """Run the engine's thread to its end.

        An unexpected error ends all requests and commands, which would otherwise wait for ever.
        """
        try:
            self._loop()
        except BaseException as error:  # nothing is expected here: `_drain` and `_step` catch
            logger.critical("the engine's thread died", exc_info=True)
            self._die(f"the engine's thread died: {type(error).__name__}: {error}")

    def _loop(self) -> None:
        """Run commands and steps by turns until the engine closes; then abort all requests."""
        torch.set_num_threads(self._num_threads)  # counts per calling thread
        with torch.inference_mode():
            while not self._closing:
                # Under the lock of `_post`, so that no command comes between the look and the wait.
                with self._wake:
                    if not self._commands and self._is_idle():
                        self._wake.wait(_IDLE_WAIT_S)
                # Commands come before the next step, so that an update waits for one step at most.
                self._drain()
                self._step()
                self._deliveries.flush()
        self._drain()  # commands that were posted before closing; none can be posted since
        if self._scheduler is not None:
            self._scheduler.abort_all()
        self._deliveries.flush()

    def _die(self, reason: str) -> None:
        """Refuse all queued commands, end all requests, and have later calls raise UnavailableError."""
        with self._wake:
            self._death = reason
            commands, self._commands = self._commands, deque()
        self._fail(reason)
        for command in commands:
            command.refuse(UnavailableError(reason, reason="ENGINE_DEAD", remedy="restart the replica"))
        self._deliveries.flush()

    def _drain(self) -> None:
        """Run all queued commands; one that fails marks the engine as FAILED and is refused."""
        while self._commands:
            command = self._commands.popleft()
            try:
                command.run()
            except BaseException as error:  # without the thread every caller would wait for ever
                logger.exception("a command of the engine failed")
                self._fail(f"a command of the engine failed: {error}")
                command.refuse(InternalError(f"a command of the engine failed: {error}", reason="ENGINE_FAILED"))
            self._progress = time.monotonic()

    def _step(self) -> None:
        """Run one step of the scheduler, if there is work; an error marks the engine as FAILED and ends its
        requests.
        """
        if self._is_idle() or self._scheduler is None:
            return
        try:
            self._scheduler.step()
        except BaseException as error:  # a failed pass, or a Rust panic, which is no Exception: ends its requests only
            logger.exception("a forward pass failed")
            self._fail(f"a forward pass failed: {error}")
        self._progress = time.monotonic()

    def _submit(self, entry: Running) -> None:
        """Give the request to the scheduler; without a model it ends with ABORT."""
        try:
            scheduler = self._held()
        except UnavailableError:
            entry.finish(FinishReason.ABORT)  # the model went away since the caller looked
            return
        try:
            self._held_weights().require(entry.adapter)
        except UnavailableError as error:
            entry.fail(error)
        else:
            scheduler.submit(entry)

    def _abort(self, request_id: str) -> None:
        """End the request with that id with ABORT, if there is a model."""
        if self._scheduler is not None:
            self._scheduler.abort(request_id)

    def _fail(self, error: str) -> None:
        """Drop the model, mark the engine as FAILED with `error`, and end its requests with ABORT.

        Raises nothing, as no caller catches.
        """
        self._state, self._error = EngineState.FAILED, error
        scheduler, self._scheduler = self._scheduler, None
        if scheduler is not None:
            scheduler.abort_all()
