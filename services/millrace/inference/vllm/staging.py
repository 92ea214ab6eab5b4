"""Stages a version in the workers while the old one serves, verifies their weights, and probes the new version.

Reading back is cut into small calls, because nothing is decoded during a call.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from millrace.backoff import Backoff
from millrace.errors import InternalError, UnavailableError
from millrace.inference.engine import probe_problem
from millrace.inference.vllm.lora import AdapterSlot
from millrace.inference.vllm.ranks import Ranks, poll, units_of
from millrace.policies.manifest import PolicyManifest, Probe, StagedPolicy
from millrace.policies.proof import Readback, combine
from millrace.telemetry import waits

_UNIT_BYTES = 16 << 20  # built or looked up between two decode steps: some ten milliseconds
_DIGESTED_BYTES = 64 << 20  # read back between two decode steps: some tenth of a second
_POLLS = Backoff(0.005, 0.1)
_DIGEST_DEADLINE_S = 1800.0  # the digests of a whole model by one thread of each worker

Call = Callable[..., Awaitable[list[Any]]]
"""Calls a method of every worker by its name, and returns their results."""
# Background verification: while a version serves, the workers read all of their weights once more.
#
# Between two steps a worker only copies a share, in some tenth of a millisecond; a thread digests it
# (`policies/proof.py`). A call that fails is made again, less and less often; until it succeeds it is a wait of the
# replica.
_REST = 4.0  # pauses this many times as long as a call took, which waits for a step to end
_MIN_REST_S = 0.02  # longer than a share's digest takes: a fifth of one processor at most
BACKOFF = Backoff(1.0, 60.0)
_OVERDUE_S = 600.0  # so long unverified weights serve, then the wait counts as overdue


class BackgroundVerifier:
    """Verifies the workers' weights in the background.

    `call` verifies a share in every worker; it is not called while `is_free` returns False. `report` gets a description
    of damage.
    """

    def __init__(
        self,
        call: Callable[[], Awaitable[list[Any]]],
        *,
        is_free: Callable[[], bool],
        report: Callable[[str], Awaitable[None]],
    ) -> None:
        """Take the functions by which weights are verified; nothing is verified before `begin`.

        `call` verifies a share in every worker, and is not called while `is_free` returns False. `report` is called
        with a description of damage.
        """
        self._call = call
        self._is_free = is_free
        self._report = report
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Verify all weights in the background, or let a running verification go on; called after each new version."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="vLLM verification")

    def stop(self) -> None:
        """Cancel the verification, if it runs."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        """Verify share after share until all is verified or damaged; a call that fails is made again, less and less
        often.
        """
        began_all, num_failed, wait = time.monotonic(), 0, waits.LastingWait()
        try:
            while True:
                took = 0.0
                if self._is_free():
                    began = time.monotonic()
                    try:
                        answers = await self._call()
                    except Exception as error:  # whatever it is, what serves must be verified
                        num_failed += 1
                        retry_s = BACKOFF.after(num_failed)
                        what = f"weights to be verified in the background, which fails: {error}"
                        wait.on(what, waits_on="inference", key="verification", deadline_s=_OVERDUE_S)
                        logger.warning("the weights cannot be verified now", extra={"retry_s": retry_s}, exc_info=True)
                        await asyncio.sleep(retry_s)
                        continue
                    wait.over()
                    num_failed, took = 0, time.monotonic() - began
                    if await self._is_over(answers, began_all):
                        return
                await asyncio.sleep(max(_MIN_REST_S, _REST * took))
        finally:
            wait.over()

    async def _is_over(self, answers: list[Any], began: float) -> bool:
        """Return whether the verification has ended: all is verified, cannot be, or is damaged, which is reported.

        `answers` has of each rank the number of shares left, the problem, and whether all is proved; `began` is for the
        log.
        """
        if problem := next((problem for _, problem, _ in answers if problem), ""):
            logger.error("the engine's memory is damaged", extra={"error": problem})
            await self._report(problem)
            return True
        if any(left for left, _, _ in answers):
            return False
        if all(is_proved for *_, is_proved in answers):
            took = round(time.monotonic() - began, 1)
            logger.info("all weights are verified", extra={"seconds": took})
        else:
            logger.warning("the weights are not verified in the background: what they should be is not known")
        return True


# The probe of a policy on vLLM: submitted while the engine is paused, computed by the new version.
#
# It is a request like others, which goes before all waiting ones. If fewer requests run than `max_num_seqs`, it is
# computed in the first step of the new version; else when the first of them ends. Answers are kept back until then,
# therefore the wait is visible, and limited: it ends when the engine does not answer, when no request makes progress,
# or after `_LIMIT_S`.
_SILENT_S = 120.0
"""Seconds without an answer to a ping after which the engine counts as failed."""
_STALL_S = 300.0
"""Seconds without any new token after which the engine counts as failed; no prompt takes so long."""
_LIMIT_S = 1800.0
LOOK_S = 1.0
_SHOWN_S = 2.0  # a probe that gets a slot at once takes less


# Whether vLLM's engine still answers: it gets a small request all the time, because a step that hangs is not reported.

_PERIOD_S = 2.0


class Ping:
    """Sends vLLM's engine a small request every `period_s`, from its creation on.

    `error` describes an answer that is an error; else it is "".
    """

    def __init__(self, client: Any, ranks: Ranks, *, period_s: float = _PERIOD_S) -> None:
        """Begin to send vLLM's engine a request every `period_s` seconds; `ranks` are its workers.

        With several nodes or engine cores a ping is a call of every worker.
        """
        self._client = client
        self._ranks = ranks
        self._period_s = period_s
        self.asked_at: float | None = None
        self.error = ""
        self._task = asyncio.create_task(self._run(), name="vLLM ping")

    @property
    def age_s(self) -> float:
        """Return for how many seconds the present ping has no answer, 0 if it has; an error is no answer."""
        return 0.0 if self.asked_at is None else time.monotonic() - self.asked_at

    def stop(self) -> None:
        """Send no more pings to vLLM's engine."""
        self._task.cancel()

    async def _ask(self) -> None:
        """Send one ping and wait for the answer.

        With several nodes or cores every worker is called, because the engine would notice the end of one late.
        """
        if self._ranks.is_spread or self._ranks.num_cores > 1:
            await self._ranks.call("millrace_ping")
        else:
            await self._client.get_weight_version()

    async def _run(self) -> None:
        """Send pings until cancelled, or the engine is dead."""
        # unregistered wait: a periodic look; what it awaits is registered where it is awaited
        while True:
            if self.asked_at is None:
                self.asked_at = time.monotonic()
            try:
                await self._ask()
            except Exception as error:  # the edge of a task that nobody awaits: whatever it is, it must be seen
                if self._client.errored:
                    logger.error("vLLM's engine is dead", exc_info=True)
                    return
                if not self.error:
                    logger.error("vLLM's engine answers with an error", exc_info=True)
                self.error = f"vLLM's engine answers with an error: {type(error).__name__}: {error}"
            else:
                self.asked_at, self.error = None, ""
            await asyncio.sleep(self._period_s)


class Prober:
    """Computes the probe of a policy, one at a time. `ping` shows whether the engine answers."""

    def __init__(self, client: Any, ranks: Ranks, adapters: AdapterSlot, *, ping: Ping) -> None:
        """Take vLLM's client and its cores (`ranks`), the present adapter, and `ping`, which shows whether vLLM
        answers.
        """
        self._client = client
        self._ranks = ranks
        self._adapters = adapters
        self._ping = ping
        self._running: tuple[StagedPolicy, asyncio.Task[None]] | None = None

    def begin(self, staged: StagedPolicy) -> asyncio.Task[None] | None:
        """Submit the staged policy's probe to vLLM, if that is not done yet, and return the task that computes it.

        None if its manifest has no probe. The task raises InternalError if the engine's log-probs are not the
        manifest's.
        """
        probe = staged.manifest.probe
        if probe is None:
            return None
        if self._running is None or self._running[0] is not staged:
            self.end()
            self._running = staged, asyncio.create_task(self._compute(staged, probe), name="policy probe")
        return self._running[1]

    def end(self) -> None:
        """Cancel the probe that is being computed, if there is one, and ignore its error."""
        running, self._running = self._running, None
        if running is not None and not running[1].cancel() and not running[1].cancelled():
            running[1].exception()  # its caller has raised it, or something else has failed before

    async def _compute(self, staged: StagedPolicy, probe: Probe) -> None:
        """Compute the probe on every engine core; raise InternalError if the log-probs are not the manifest's."""
        computed = str(self._client.model_config.dtype).removeprefix("torch.")
        dtypes = [*{tensor.dtype for tensor in staged.tensors.values()}, computed]
        # Each core has the whole model in memory of its own.
        for core in self._ranks.cores:
            asking = prompt_logprobs(self._client, probe.token_ids, lora_request=self._adapters.request, core=core)
            if (problem := probe_problem(probe.logprobs, await self._in_turn(asking), dtypes=dtypes)) is not None:
                raise InternalError(problem, reason="POLICY_PROBE_MISMATCH", remedy="the policy is loaded anew")

    async def _in_turn(self, asking: Awaitable[list[float]]) -> list[float]:
        """Await `asking`, the probe's log-probs, as long as vLLM makes progress, and return them.

        Raises UnavailableError with the reason once it makes none.
        """
        waiting = waits.waiting("the probe to get a slot", waits_on="inference", deadline_s=_LIMIT_S, quiet_s=_SHOWN_S)
        patience = _Patience(self._client, self._ping)
        try:
            with waiting:
                # Without a limit at first; `watch` lets it expire once it knows why.
                async with asyncio.timeout(None) as bound:
                    watching = asyncio.create_task(patience.watch(bound), name="patience with the probe")
                    try:
                        return await asking
                    finally:
                        watching.cancel()
        except TimeoutError:
            raise UnavailableError(patience.why, reason="PROBE_NOT_COMPUTED", remedy="see vLLM's log") from None


async def settled(probing: asyncio.Task[None]) -> None:
    """Wait for the end of a probe's task and raise its error; raise UnavailableError if the task was cancelled."""
    await asyncio.wait({probing})
    if probing.cancelled():
        raise UnavailableError(
            "the probe of the policy was taken back, as the engine failed meanwhile",
            reason="PROBE_NOT_COMPUTED",
            remedy="the policy is loaded anew",
        )
    probing.result()


class _Patience:
    """Ends the wait for a probe when vLLM makes no progress, and then has the reason in `why`."""

    def __init__(self, client: Any, ping: Ping) -> None:
        """Take vLLM's client, whose tokens show progress, and `ping`, which shows whether vLLM answers."""
        self._client = client
        self._ping = ping
        self.why = ""

    async def watch(self, bound: asyncio.Timeout) -> None:
        """Check vLLM every second; once it makes no progress, set `why` and let the time-out `bound` expire."""
        began = moved = time.monotonic()
        seen = self._given()
        # unregistered wait: bounds the wait for the probe, which is registered around it
        while True:
            await asyncio.sleep(LOOK_S)
            now = time.monotonic()
            if (given := self._given()) != seen:
                seen, moved = given, now
            if self._ping.age_s > _SILENT_S:
                self.why = f"vLLM's engine answers nothing for {_SILENT_S:.0f} s, while the probe of a policy waits"
            elif now - moved > _STALL_S:
                self.why = f"vLLM answers, but gives no token for {_STALL_S:.0f} s, and the probe of a policy waits"
            elif now - began > _LIMIT_S:
                self.why = (
                    f"the probe of a policy got no slot in vLLM within {_LIMIT_S:.0f} s: requests that ran before it "
                    "have not ended"
                )
            if self.why:
                bound.reschedule(asyncio.get_running_loop().time())
                return

    def _given(self) -> tuple[int, int]:
        """Return (number of requests in vLLM, number of their tokens), which changes with any progress."""
        states = self._client.output_processor.request_states.values()
        return len(states), sum(state.detokenizer.num_output_tokens() for state in states if state.detokenizer)


# Log-probs of a fixed prompt from vLLM's engine itself, with which the probe of a policy is compared.

_FIRST = -(1 << 31)  # vLLM's smallest number goes first; requests have 0 unless their callers ask for less


async def prompt_logprobs(
    client: Any, token_ids: Sequence[int], *, lora_request: Any = None, core: int | None = None
) -> list[float]:
    """Have vLLM compute the log-prob of each token of a prompt but the first, and return them, [T - 1].

    A salt keeps the prompt out of every prefix cache. The prompt is computed before all waiting requests, if vLLM
    schedules by priority; running requests keep their slots. `lora_request` is the adapter, None for none, and `core`
    the engine core that computes the prompt, in a replica with several.
    """
    # vllm is in its own environment, which the type checker does not see.
    from vllm.inputs.engine import tokens_input  # pyright: ignore[reportMissingImports]
    from vllm.sampling_params import RequestOutputKind, SamplingParams  # pyright: ignore[reportMissingImports]

    params = SamplingParams(
        # The least that vLLM takes; only the prompt's log-probs are used.
        max_tokens=1,
        temperature=1.0,
        # Of the prompt's own tokens, and of no others.
        prompt_logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    name = f"probe-{secrets.token_hex(8)}"
    prompt = tokens_input(list(token_ids), cache_salt=name)
    found: Any = None
    number = f"probe-{secrets.token_hex(8)}"
    options = {"lora_request": lora_request, "data_parallel_rank": core, "priority": _FIRST}
    async for output in client.generate(prompt, params, number, **options):
        found = output.prompt_logprobs
    return [entry[token].logprob for entry, token in zip(found[1:], token_ids[1:], strict=True)]


logger = logging.getLogger(__name__)


class UpdateTimes:
    """Measures the parts of an update, and logs them together.

    `standstill_s` is from the order to pause, which waits for the running step, until vLLM generates again. `held_s` is
    from the same moment until the version is proved and the gate opens: in that time no request begins and no answer
    leaves. `busy_s` is the time in which decoding paused while the version was staged, in many parts of at most
    `longest_busy_s`.
    """

    def __init__(self) -> None:
        """Begin with all times at 0 and no update in progress."""
        self.prepare_s = self.busy_s = self.longest_busy_s = 0.0
        self.standstill_s: float | None = None
        self._began: float | None = None
        self._last = 0.0
        self._parts: dict[str, float] = {}

    def begin_staging(self) -> None:
        """Begin to measure how long the staging of a version keeps workers from decoding, from 0."""
        self.busy_s = self.longest_busy_s = 0.0

    def count_busy(self, seconds: Iterable[float]) -> None:
        """Count a call of the workers, in which they did not decode; `seconds` has how long of each, all at the
        same time.
        """
        longest = max(seconds, default=0.0)
        self.busy_s += longest
        self.longest_busy_s = max(self.longest_busy_s, longest)

    def begin(self) -> None:
        """Begin to measure an update of the policy; called before the engine is paused."""
        self._began = self._last = time.monotonic()
        self.standstill_s, self._parts = None, {}

    def mark(self, part: str) -> None:
        """Add the time since the last mark to the part of the update with this name."""
        now = time.monotonic()
        self._parts[f"{part}_s"] = self._parts.get(f"{part}_s", 0.0) + now - self._last
        self._last = now

    def go_on(self) -> None:
        """Note that vLLM generates again, which ends the standstill; only the first call counts."""
        if self._began is not None and self.standstill_s is None:
            self.standstill_s = time.monotonic() - self._began

    def end(self) -> None:
        """End the measurement of an update of the policy, successful or not."""
        self.go_on()
        self._began = None

    def report(self, version: int) -> None:
        """Log the measured times of the update to this version, once the gate is open; nothing for a load."""
        if self._began is None:  # a load, during which nothing was served
            return
        held_s = time.monotonic() - self._began
        parts = {name: round(seconds, 4) for name, seconds in self._parts.items()}
        whole = {"held_s": round(held_s, 4), "standstill_s": round(self.standstill_s or 0.0, 4)}
        extra = {"version": version, **whole, "prepare_s": round(self.prepare_s, 4), **parts}
        extra |= {"busy_s": round(self.busy_s, 4), "longest_busy_s": round(self.longest_busy_s, 4)}
        logger.info("policy applied and proved", extra=extra)


async def stage(
    call: Call, ranks: Ranks, staged: StagedPolicy, *, directory: Path, times: UpdateTimes
) -> Readback | None:
    """Stage a policy in the workers while the old one serves, and return which tensors their digests prove already.

    The digests that the workers will have are compared with the manifest's. None if they must be read back later.
    `call` calls the workers, `ranks` writes their order into files in `directory`, `times` measures. Raises
    InternalError if digests differ or a worker fails; the workers then drop what is staged. UnavailableError if the
    digests take too long.
    """
    order = await ranks.order(staged, directory)
    times.begin_staging()
    try:
        answers = await call("millrace_stage", order)
        times.count_busy(answer["seconds"] for answer in answers)
        for method, part in (("millrace_gather", "slices"), ("millrace_prepare", "units")):
            for first, last in _chunks(units_of([answer[part] for answer in answers]), _UNIT_BYTES):
                times.count_busy(await call(method, first, last))
        return await _foresee(call, staged.manifest)
    # Else the staged version would stay in the workers' memory beside the served one.
    except InternalError:
        await call("millrace_discard")
        raise


async def read_back(call: Call, manifest: PolicyManifest) -> Readback:
    """Read the workers' weights whole, a part between any two decode steps, and return which tensors are proved so.

    Their digests are compared with the manifest's: InternalError if one differs. For an adapter nothing is read: its
    tensors have no place in the model, and the base was proved when it was loaded.
    """
    if manifest.adapter is not None:
        return Readback(names=(), is_whole=False)
    found: list[Any] = []
    for first, last in _chunks([tensor.size_bytes for tensor in manifest.tensors], _DIGESTED_BYTES):
        found += await call("millrace_digests", [tensor.name for tensor in manifest.tensors[first:last]])
    return combine(found, manifest)


async def _foresee(call: Call, manifest: PolicyManifest) -> Readback | None:
    """Wait until the workers have digested the staged version, and return which of its tensors the digests prove.

    The digests are compared with the manifest's: InternalError if one differs. None if the weights must be read back
    later. Raises UnavailableError after `_DIGEST_DEADLINE_S`.
    """
    answers = await poll(
        lambda: call("millrace_foreseen"),
        lambda answers: not any(answer["is_pending"] for answer in answers),
        what="vLLM's workers to digest the policy",
        deadline_s=_DIGEST_DEADLINE_S,
        rests=_POLLS,
        late=UnavailableError(
            f"vLLM's workers did not digest the policy within {_DIGEST_DEADLINE_S:.0f} s",
            reason="ENGINE_SILENT",
            remedy="restart it",
        ),
    )
    if any(answer["rows"] is None for answer in answers):
        return None
    return combine([answer["rows"] for answer in answers], manifest)


def _chunks(sizes: list[int], limit: int) -> list[tuple[int, int]]:
    """Return consecutive [first, last) ranges of items, each of about `limit` in size and of at least one item."""
    found: list[tuple[int, int]] = []
    first = total = 0
    for index, size in enumerate(sizes):
        if index > first and total + size > limit:
            found.append((first, index))
            first, total = index, 0
        total += size
    return [*found, (first, len(sizes))] if sizes else []
