"""The probe of a policy on vLLM: handed in while the engine is paused, computed in the new version's first step."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from millrace.errors import InternalError
from millrace.inference.probing import probe_problem
from millrace.inference.vllm.lora import AdapterSlot
from millrace.inference.vllm.prompts import prompt_logprobs
from millrace.inference.vllm.ranks import Ranks
from millrace.policies.manifest import Probe
from millrace.policies.staged import StagedPolicy


class Prober:
    """One probe at a time. `bounded` gives a call of vLLM its deadline."""

    def __init__(
        self, client: Any, ranks: Ranks, adapters: AdapterSlot, *, bounded: Callable[[Any], Awaitable[Any]]
    ) -> None:
        self._client = client
        self._ranks = ranks
        self._adapters = adapters
        self._bounded = bounded
        self._running: tuple[StagedPolicy, asyncio.Task[None]] | None = None

    def begin(self, staged: StagedPolicy) -> asyncio.Task[None] | None:
        """Hands the policy's probe to vLLM, if that was not done; None if it has none.

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
        """Has the probe computed no further."""
        running, self._running = self._running, None
        if running is not None and not running[1].cancel() and not running[1].cancelled():
            running[1].exception()  # told by who awaited it, or something else has failed before

    async def _compute(self, staged: StagedPolicy, probe: Probe) -> None:
        computed = str(self._client.model_config.dtype).removeprefix("torch.")
        dtypes = [*{tensor.dtype for tensor in staged.tensors.values()}, computed]
        for core in self._ranks.cores:
            salt = f"probe-{time.time_ns()}"
            asking = prompt_logprobs(
                self._client, probe.token_ids, salt=salt, lora_request=self._adapters.request, core=core
            )
            if (problem := probe_problem(probe.logprobs, await self._bounded(asking), dtypes=dtypes)) is not None:
                raise InternalError(problem, reason="POLICY_PROBE_MISMATCH", remedy="the policy is loaded anew")
