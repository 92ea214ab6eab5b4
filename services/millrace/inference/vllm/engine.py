"""vLLM behind the `PolicyEngine` protocol: pause, apply in the workers, resume, prove, and only then let answers out.

    check          while the old version serves: shapes, then the workers build what cannot be written in place
    apply_policy   paused: write what is new, set vLLM's weight version (its spans come from that), KV cache by mode
    prove          generation goes on, answers are kept back: read back every tensor that lies in the checkpoint's bits,
                   compute the probe through the engine; then the gate opens

Everything runs in the event loop of vLLM's API server, over its documented `EngineClient`.
"""

import asyncio
import json
import logging
import time
from math import prod
from pathlib import Path
from typing import Any

from millrace.errors import InternalError, InvalidStateError, UnavailableError
from millrace.inference.engine import EngineState, EngineStatus, HeldDigest, InflightMode, PolicyIdentity
from millrace.inference.pauses import OPERATOR
from millrace.inference.probing import probe_problem
from millrace.inference.updater import PAUSE_HOLDER
from millrace.inference.vllm import gate as gates
from millrace.inference.vllm.gate import Gate
from millrace.inference.vllm.handover import ask_restart
from millrace.inference.vllm.lora import AdapterSlot
from millrace.inference.vllm.ping import Ping
from millrace.inference.vllm.prompts import prompt_logprobs
from millrace.inference.vllm.proofs import Readback, combine
from millrace.inference.vllm.ranks import Ranks, misfits, units_of
from millrace.policies.manifest import Probe
from millrace.policies.staged import StagedPolicy
from millrace.policies.tensors import element_bytes

log = logging.getLogger(__name__)

_RPC_DEADLINE_S = 120.0
_RELOAD_DEADLINE_S = 1800.0
_UNIT_BYTES = 16 << 20  # built between two decode steps: some ten milliseconds
_DIGESTED_BYTES = 64 << 20  # read back between two decode steps: some tenth of a second
_CONFIG_NOISE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")


class VllmEngine:
    """Implements `PolicyEngine`. `directory` is where files for the workers are written.

    `is_fixed` is for a model that was chosen where the replica was started: a restart would bring it again, so a policy
    of another architecture is refused.
    """

    def __init__(self, client: Any, gate: Gate, *, directory: Path, is_fixed: bool = False) -> None:
        self._is_fixed = is_fixed
        self._client = client
        self._gate = gate
        self._directory = directory
        self._ranks = Ranks(client)
        self._adapters = AdapterSlot(client, directory=directory)
        self._state = EngineState.EMPTY
        self._identity: PolicyIdentity | None = None
        self._error = ""
        self._pauses: set[str] = set()
        self._is_proving = False
        self._is_stopped: bool | None = False  # None: nobody knows, as a call of vLLM failed
        self._lock = asyncio.Lock()
        self._loading = asyncio.Lock()
        self._num_loads = 0
        self._paused_at: float | None = None
        self._pause_s: float | None = None
        self._num_applied = 0
        self._is_busy = False
        self._ping = Ping(client, self._ranks)

    @property
    def kind(self) -> str:
        """See `PolicyEngine.kind`."""
        return "vllm"

    @property
    def client(self) -> Any:
        """vLLM's engine client."""
        return self._client

    async def load(self, model_dir: Path, staged: StagedPolicy | None, *, identity: PolicyIdentity) -> None:
        """See `PolicyEngine.load`. vLLM keeps its architecture: a policy of another one needs a restart."""
        if staged is None:  # the model that vLLM was started with
            await self._set_version(identity)
            self._state, self._error, self._identity = EngineState.READY, "", identity
            self._gate.open(self._salt(identity))
            return
        self._require_same_config(model_dir)
        order = await self._ranks.order(staged, self._directory)
        order |= {"changed": None}
        self._num_loads += 1  # whatever `load_directory` does meanwhile, the gate stays shut from here on
        self._gate.refuse(f"policy {identity} is being loaded")
        async with self._loading:
            await self._load(staged, order, identity)

    async def _load(self, staged: StagedPolicy, order: dict[str, Any], identity: PolicyIdentity) -> None:
        await self._doom(f"policy {identity} replaced the model")
        self._gate.hold()
        await self.pause("load")
        try:
            await self._bounded(self._adapters.remove())
            await self._rpc("millrace_reload", order, deadline_s=_RELOAD_DEADLINE_S)
            self._adapters.know_base(staged)
            await self._put_adapter(None)
            await self._bounded(self._client.reset_prefix_cache(reset_running_requests=True))
            await self._set_version(identity)
        except BaseException as error:  # marks the engine as failed, then raises
            await self.fail(f"loading policy {identity} failed half-way: {error}")
            raise
        finally:
            await self.resume("load")
        self._state, self._error, self._identity = EngineState.READY, "", identity

    async def load_directory(self, directory: str | None) -> None:
        """Loads safetensors files that the workers can read, as PRIME-RL's HTTP calls want it; nothing proves them.

        None is the model that vLLM was started with.
        """
        num_loads = self._num_loads
        self._ranks.require_readable(directory)
        if directory is not None and not await asyncio.to_thread(_has_weights, Path(directory)):
            raise InvalidStateError(
                f"{directory} is no directory with safetensors files", reason="WEIGHTS_NOT_FOUND", remedy="name one"
            )
        async with self._loading:
            self._require_no_run(num_loads)
            identity = PolicyIdentity(run_uid="", lineage=0, version=self._num_applied + 1)
            await self.pause("directory")
            try:
                await self._rpc("millrace_reload_directory", directory, deadline_s=_RELOAD_DEADLINE_S)
                await self._set_version(identity)
                await self._recall()
            except BaseException as error:  # marks the engine as failed, then raises
                await self.fail(f"loading {directory or 'the first weights'} failed half-way: {error}")
                raise
            finally:
                await self.resume("directory")
            self._state, self._error, self._identity = EngineState.READY, "", identity
            self._require_no_run(num_loads)
            self._gate.open(self._salt(identity))

    async def check(self, staged: StagedPolicy) -> None:
        """See `PolicyEngine.check`; ends with the version staged in the workers."""
        self._require_ready()
        if staged.manifest.adapter is not None:
            self._adapters.check(staged)
            return
        places = [[name, tensor.dtype, list(tensor.shape)] for name, tensor in staged.tensors.items()]
        problems = misfits(await self._rpc("millrace_check", places))
        if problems:
            raise InvalidStateError(
                f"the policy does not fit the model: {'; '.join(problems[:5])}"
                + (f"; and {len(problems) - 5} more" if len(problems) > 5 else ""),
                reason="POLICY_MODEL_MISMATCH",
                remedy="publish the policy with the tensors of its config.json, in the model's dtype",
            )
        order = await self._ranks.order(staged, self._directory)
        sizes = units_of(await self._rpc("millrace_stage", order))
        for first, last in chunks(sizes, _UNIT_BYTES):
            await self._rpc("millrace_prepare", first, last)

    async def apply_policy(
        self, staged: StagedPolicy, *, identity: PolicyIdentity, inflight_mode: InflightMode
    ) -> None:
        """See `PolicyEngine.apply_policy`; takes what `check` has staged."""
        self._require_ready()
        await self.pause("apply")
        try:
            self._gate.hold()
            if staged.manifest.adapter is None:
                await self._rpc("millrace_activate", identity.version)
            await self._put_adapter(staged if staged.manifest.adapter is not None else None)
            await self._set_version(identity)
            if inflight_mode is InflightMode.RECOMPUTE:
                await self._bounded(self._client.reset_prefix_cache(reset_running_requests=True))
            else:
                await self._recall()
        except BaseException as error:  # marks the engine as failed, then raises
            await self.fail(f"applying policy {identity} failed half-way: {error}")
            raise
        finally:
            await self.resume("apply")
        self._identity = identity

    async def prove(self, staged: StagedPolicy) -> HeldDigest:
        """See `PolicyEngine.prove`. Generation goes on meanwhile; answers stay here."""
        self._require_ready()
        self._is_proving = True  # pauses that come meanwhile begin afterwards
        try:
            await self._follow_pauses()  # the probe runs through the scheduler
            self._count_pause()
            found = await self._read_back(staged)
            probe = staged.manifest.probe
            if not found.is_whole and probe is None:
                raise InternalError(
                    "the policy cannot be proved: vLLM holds it in a layout of its own, and its manifest has no probe",
                    reason="POLICY_NOT_PROVABLE",
                    remedy="publish it with the probe's log-probs",
                )
            if probe is not None:
                await self._compute_probe(staged, probe)
        finally:
            self._is_proving = False
            if self._pauses - {PAUSE_HOLDER}:  # an update's own ends now: to stop for that would be of no use
                await self._follow_pauses()
        assert self._identity is not None
        self._gate.open(self._salt(self._identity))
        proof = "+".join(name for name, is_given in (("readback", found.is_whole), ("probe", probe)) if is_given)
        return HeldDigest(digest=staged.manifest.digest, proof=proof)

    async def _read_back(self, staged: StagedPolicy) -> Readback:
        """What the workers hold in the checkpoint's bits, some of it between any two decode steps.

        Of an adapter nothing: its tensors have no place in the model, and the base was proved when it was loaded.
        """
        if staged.manifest.adapter is not None:
            return Readback(names=(), is_whole=False)
        tensors = staged.manifest.tensors
        sizes = [prod(tensor.shape) * element_bytes(tensor.dtype) for tensor in tensors]
        found: list[Any] = []
        for first, last in chunks(sizes, _DIGESTED_BYTES):
            found += await self._rpc("millrace_digests", [tensor.name for tensor in tensors[first:last]])
        return combine(found, staged.manifest)

    async def _compute_probe(self, staged: StagedPolicy, probe: Probe) -> None:
        """InternalError if the engine's log-probs of the probe are not the manifest's."""
        computed = str(self._client.model_config.dtype).removeprefix("torch.")
        dtypes = [*{tensor.dtype for tensor in staged.tensors.values()}, computed]
        for core in self._ranks.cores:
            salt = f"probe-{time.time_ns()}"
            asking = prompt_logprobs(
                self._client, probe.token_ids, salt=salt, lora_request=self._adapters.request, core=core
            )
            if (problem := probe_problem(probe.logprobs, await self._bounded(asking), dtypes=dtypes)) is not None:
                raise InternalError(problem, reason="POLICY_PROBE_MISMATCH", remedy="the policy is loaded anew")

    async def fail(self, error: str) -> None:
        """See `PolicyEngine.fail`."""
        self._state, self._error, self._identity = EngineState.FAILED, error, None
        self._gate.refuse(error)
        await self._doom(error)

    async def abort_all(self) -> None:
        """See `PolicyEngine.abort_all`."""
        await self._doom("the replica is shutting down")

    async def pause(self, holder: str) -> None:
        """See `PolicyEngine.pause`. An update's pause shuts the gate first: what comes meanwhile gets the new salt."""
        if holder != OPERATOR:
            self._gate.wait()
        if holder == PAUSE_HOLDER:
            self._paused_at, self._pause_s = time.monotonic(), 0.0
        self._pauses.add(holder)
        try:
            await self._follow_pauses()
        except BaseException as error:  # nobody could tell what generates now, then raises
            self._pauses.discard(holder)  # who could not pause does not resume
            await self.fail(f"vLLM cannot be paused: {error}")
            raise

    async def resume(self, holder: str) -> None:
        """See `PolicyEngine.resume`."""
        self._pauses.discard(holder)
        try:
            await self._follow_pauses()
        except Exception as error:  # nobody could tell what generates now, then raises
            await self.fail(f"vLLM cannot go on: {error}")
            raise
        if holder == PAUSE_HOLDER:
            self._count_pause()

    def status(self) -> EngineStatus:
        """See `PolicyEngine.status`."""
        config = self._client.vllm_config
        is_dead = bool(self._client.errored)
        return EngineStatus(
            state=EngineState.FAILED if is_dead else self._state,
            identity=self._identity if self._state is EngineState.READY and not is_dead else None,
            is_paused=bool(self._pauses),
            num_running=self._gate.num_open,
            num_waiting=self._gate.num_waiting,
            max_num_seqs=config.scheduler_config.max_num_seqs,
            max_model_len=config.model_config.max_model_len,
            progress_age_s=0.0 if self._is_busy else self._ping.age_s,
            num_generated_tokens=0,
            num_finished=self._gate.num_finished,
            error="vLLM's engine is dead" if is_dead else self._error or self._ping.error,
            is_dead=is_dead,
            pause_s=self._pause_s,
        )

    async def close(self) -> None:
        """See `PolicyEngine.close`; vLLM ends itself."""
        self._ping.stop()
        self._gate.refuse("this replica is shutting down")
        await self.abort_all()

    async def _recall(self) -> None:
        """Has requests without a token begin again, with the new version from their prompt on. Only while paused."""
        await gates.abort(self._client, self._gate.recall(gates.unbegun(self._client)))

    async def _doom(self, reason: str) -> None:
        await gates.abort(self._client, self._gate.doom(reason))

    async def _follow_pauses(self) -> None:
        """Has vLLM pause or go on, as the holders want it; `keep` leaves requests and their KV cache alone."""
        async with self._lock:
            should_stop = bool(self._pauses) and not self._is_proving
            if should_stop == self._is_stopped:
                return
            self._is_stopped = None
            if should_stop:
                await self._bounded(self._client.pause_generation(mode="keep", clear_cache=False))
            else:
                await self._bounded(self._client.resume_generation())
            self._is_stopped = should_stop

    def _count_pause(self) -> None:
        """The update's standstill has ended, if it had not before."""
        if self._paused_at is not None:
            self._pause_s = (self._pause_s or 0.0) + time.monotonic() - self._paused_at
            self._paused_at = None

    async def _put_adapter(self, staged: StagedPolicy | None) -> None:
        """The adapter of all that begins or goes on from now on; None is a whole policy's, which adds nothing."""
        await self._bounded(self._adapters.unload() if staged is None else self._adapters.load(staged))
        self._gate.lora_request = self._adapters.request

    async def _set_version(self, identity: PolicyIdentity) -> None:
        self._num_applied += 1
        await self._bounded(self._client.update_weight_version(f"{identity.lineage}-{identity.version}"))

    def _salt(self, identity: PolicyIdentity) -> str:
        return f"{identity}#{self._num_applied}"

    async def _rpc(self, method: str, *args: Any, deadline_s: float = _RPC_DEADLINE_S) -> list[Any]:
        """One call of every worker."""
        self._is_busy = True
        try:
            return await self._bounded(self._ranks.call(method, *args), deadline_s=deadline_s)
        finally:
            self._is_busy = False

    async def _bounded(self, call: Any, *, deadline_s: float = _RPC_DEADLINE_S) -> Any:
        try:
            async with asyncio.timeout(deadline_s):
                return await call
        except TimeoutError:
            raise UnavailableError(
                f"vLLM's engine did not answer within {deadline_s:.0f} s", reason="ENGINE_SILENT", remedy="restart it"
            ) from None

    def _require_no_run(self, num_loads: int) -> None:
        """InvalidStateError if the engine holds a run's policy, or one came after that many loads."""
        if self._num_loads != num_loads or (self._identity is not None and self._identity.run_uid):
            raise InvalidStateError(
                "a run's policy has come, which takes the place of the weights of a directory",
                reason="POLICY_DRIVEN",
                remedy="use a replica that serves no run",
            )

    def _require_ready(self) -> None:
        if self._state is not EngineState.READY:
            raise UnavailableError(
                self._error or "the engine holds no policy yet", reason="ENGINE_FAILED", remedy="load a policy anew"
            )

    def _require_same_config(self, model_dir: Path) -> None:
        """InvalidStateError, and a request for a restart, if the policy is of another architecture than the model."""
        wanted, held = (_config(directory) for directory in (model_dir, Path(self._client.model_config.model)))
        differing = sorted(key for key in wanted.keys() | held.keys() if wanted.get(key) != held.get(key))
        if not differing:
            return
        problem = f"the policy's config.json is not that of vLLM's model (differing: {', '.join(differing[:8])})"
        is_asked = not self._is_fixed and ask_restart(problem)
        raise InvalidStateError(
            problem,
            reason="MODEL_CONFIG_MISMATCH",
            remedy="wait for the restart" if is_asked else "start the replica without MILLRACE_MODEL",
        )


def _has_weights(directory: Path) -> bool:
    return any(directory.glob("*.safetensors"))


def chunks(sizes: list[int], limit: int) -> list[tuple[int, int]]:
    """Consecutive [first, last) of items, each of about `limit` and at least one item."""
    found: list[tuple[int, int]] = []
    first = total = 0
    for index, size in enumerate(sizes):
        if index > first and total + size > limit:
            found.append((first, index))
            first, total = index, 0
        total += size
    return [*found, (first, len(sizes))] if sizes else []


def _config(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    config: dict[str, Any] = json.loads(path.read_bytes()) if path.is_file() else {}
    return {key: value for key, value in config.items() if key not in _CONFIG_NOISE}
