"""The probe of a policy on vLLM: handed in while the engine is paused, computed by the new version.

It is a request like others, which goes before all that waits (`prober.py`). Where fewer requests run than
`max_num_seqs`, it is computed in the first step of the new version; else when the first of them ends. Answers are kept
back so long, therefore the wait shows itself, and ends with the engine: when that answers nothing, when nothing that
runs gets on, or after `_LIMIT_S`.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Sequence
from typing import Any

from millrace.errors import InternalError, UnavailableError
from millrace.inference.engine import probe_problem
from millrace.inference.vllm.lora import AdapterSlot
from millrace.inference.vllm.ranks import Ranks
from millrace.policies.manifest import Probe, StagedPolicy
from millrace.telemetry import waits

_SILENT_S = 120.0
"""No engine owes the answer to a ping for so long."""
_STALL_S = 300.0
"""Nor does one that works give no token for so long, whatever prompt it computes."""
_LIMIT_S = 1800.0
LOOK_S = 1.0
_SHOWN_S = 2.0  # a probe that gets a slot at once takes less


# Whether vLLM's engine still answers: it is asked something small all the time, as a step that hangs tells nobody.

logger = logging.getLogger(__name__)

_PERIOD_S = 2.0


class Ping:
    """Asks as long as the engine lives. `error` is the answer if it is an error, empty otherwise."""

    def __init__(self, client: Any, ranks: Ranks, *, period_s: float = _PERIOD_S) -> None:
        self._client = client
        self._ranks = ranks
        self._period_s = period_s
        self.asked_at: float | None = None
        self.error = ""
        self._task = asyncio.create_task(self._run(), name="vLLM ping")

    @property
    def age_s(self) -> float:
        """Seconds that the engine owes an answer for; an error is none."""
        return 0.0 if self.asked_at is None else time.monotonic() - self.asked_at

    def stop(self) -> None:
        """Ask no more."""
        self._task.cancel()

    async def _ask(self) -> None:
        """Ask the engine. Where it has several nodes or cores each worker is asked: the engine would notice their end
        late."""
        if self._ranks.is_spread or self._ranks.num_cores > 1:
            await self._ranks.call("millrace_ping")
        else:
            await self._client.get_weight_version()

    async def _run(self) -> None:
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
    """One probe at a time. `ping` tells whether the engine answers."""

    def __init__(self, client: Any, ranks: Ranks, adapters: AdapterSlot, *, ping: Ping) -> None:
        self._client = client
        self._ranks = ranks
        self._adapters = adapters
        self._ping = ping
        self._running: tuple[StagedPolicy, asyncio.Task[None]] | None = None

    def begin(self, staged: StagedPolicy) -> asyncio.Task[None] | None:
        """Hand the policy's probe to vLLM, if that was not done; None if it has none.

        The task raises InternalError if the engine's log-probs are not the manifest's.
        """
        probe = staged.manifest.probe
        if probe is None:
            return None
        if self._running is None or self._running[0] is not staged:
            self.end()
            self._running = staged, asyncio.create_task(self._compute(staged, probe), name="policy probe")
        return self._running[1]

    def end(self) -> None:
        """Have the probe computed no further."""
        running, self._running = self._running, None
        if running is not None and not running[1].cancel() and not running[1].cancelled():
            running[1].exception()  # its caller has raised it, or something else has failed before

    async def _compute(self, staged: StagedPolicy, probe: Probe) -> None:
        computed = str(self._client.model_config.dtype).removeprefix("torch.")
        dtypes = [*{tensor.dtype for tensor in staged.tensors.values()}, computed]
        for core in self._ranks.cores:
            asking = prompt_logprobs(self._client, probe.token_ids, lora_request=self._adapters.request, core=core)
            if (problem := probe_problem(probe.logprobs, await self._in_turn(asking), dtypes=dtypes)) is not None:
                raise InternalError(problem, reason="POLICY_PROBE_MISMATCH", remedy="the policy is loaded anew")

    async def _in_turn(self, asking: Awaitable[list[float]]) -> list[float]:
        """Wait for the probe for as long as vLLM gets on; UnavailableError says how it does not."""
        waiting = waits.waiting("the probe to get a slot", waits_on="inference", deadline_s=_LIMIT_S, quiet_s=_SHOWN_S)
        patience = _Patience(self._client, self._ping)
        try:
            with waiting:
                async with asyncio.timeout(None) as bound:
                    watching = asyncio.create_task(patience.watch(bound), name="patience with the probe")
                    try:
                        return await asking
                    finally:
                        watching.cancel()
        except TimeoutError:
            raise UnavailableError(patience.why, reason="PROBE_NOT_COMPUTED", remedy="see vLLM's log") from None


async def settled(probing: asyncio.Task[None]) -> None:
    """Wait for a probe and raise what it raises; a cancelled probe is an UnavailableError, not our own cancellation."""
    await asyncio.wait({probing})
    if probing.cancelled():
        raise UnavailableError(
            "the probe of the policy was taken back, as the engine failed meanwhile",
            reason="PROBE_NOT_COMPUTED",
            remedy="the policy is loaded anew",
        )
    probing.result()


class _Patience:
    """Ends a wait when there is no hope left for it; `why` says that then."""

    def __init__(self, client: Any, ping: Ping) -> None:
        self._client = client
        self._ping = ping
        self.why = ""

    async def watch(self, bound: asyncio.Timeout) -> None:
        """Look until what it finds ends the bounded block."""
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
        """(requests in vLLM, tokens that they got): it stays the same only if nothing gets on."""
        states = self._client.output_processor.request_states.values()
        return len(states), sum(state.detokenizer.num_output_tokens() for state in states if state.detokenizer)


# Log-probs of a fixed prompt through vLLM's engine itself: what the probe of a policy is compared with.

_FIRST = -(1 << 31)  # vLLM's smallest number goes first; requests have 0 unless their callers ask for less


async def prompt_logprobs(
    client: Any, token_ids: Sequence[int], *, lora_request: Any = None, core: int | None = None
) -> list[float]:
    """Log-prob of each token of the prompt but the first, [T - 1]. A salt keeps it out of every prefix cache.

    It goes before all that waits in vLLM, if that schedules by priority; what runs keeps its slot.

    `core` is the engine core that computes it, in a replica with several.
    """
    # vllm is in its own environment, which the type checker does not see.
    from vllm.inputs.engine import tokens_input  # pyright: ignore[reportMissingImports]
    from vllm.sampling_params import RequestOutputKind, SamplingParams  # pyright: ignore[reportMissingImports]

    params = SamplingParams(
        max_tokens=1,
        temperature=1.0,
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
