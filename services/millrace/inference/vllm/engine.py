"""vLLM after the `PolicyEngine` protocol: pause, apply in the workers, resume, prove, and only then let answers out.

    check          while the old version serves: shapes; then the workers build what cannot be written in place, and
                   return the digests that they will have, from their present bits and those that are to change
    apply_policy   paused: write what is new and read that back, set vLLM's weight version (its spans come from that),
                   KV cache by mode; submit the probe, to be computed before all waiting requests
    prove          generation goes on, answers are kept back until the probe is computed; then the gate opens, and the
                   workers verify everything in the background. After a load they read it before the gate opens.

Everything runs in the event loop of vLLM's API server, over its documented `EngineClient`.
"""

import asyncio
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from millrace.errors import InternalError, InvalidStateError, UnavailableError
from millrace.inference.engine import (
    EngineState,
    EngineStatus,
    HeldDigest,
    InflightMode,
    PolicyIdentity,
    require_fit,
)
from millrace.inference.service import OPERATOR, SLEEP
from millrace.inference.updater import PAUSE_HOLDER
from millrace.inference.vllm import gate as gates
from millrace.inference.vllm.gate import Degree, GenerationGate, Rest
from millrace.inference.vllm.handover import ask_restart
from millrace.inference.vllm.lora import AdapterSlot
from millrace.inference.vllm.ranks import Ranks, misfits
from millrace.inference.vllm.staging import BackgroundVerifier, Ping, Prober, UpdateTimes, read_back, settled, stage
from millrace.policies.manifest import Probe, StagedPolicy
from millrace.policies.proof import MISMATCH, Readback
from millrace.storage.clean_up import TemporaryDirectory

# Comparison of a policy's config with that of the model that vLLM was started with.

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_NOISE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures")
_QUANTIZATION = "quantization_config"


def compare_configs(
    wanted_dir: Path, held_dir: Path, *, revision: str | None = None, download_dir: str | None = None
) -> tuple[str, bool]:
    """Compare the config.json in `wanted_dir`, the policy's, with that of vLLM's model in `held_dir`.

    Returns a sentence about differing keys ("" if none matters or vLLM's config is not found), and whether the policy
    is of the model's text part alone. `revision` and `download_dir` are those with which vLLM got a model of the Hub.
    (Names and shapes of tensors are compared elsewhere.)
    """
    held_path, wanted_path = _config_file(held_dir, revision, download_dir), wanted_dir / "config.json"
    held = _config(held_path)
    if held is None:
        logger.warning(
            "the config.json of vLLM's model is not found: it is not compared", extra={"model": str(held_dir)}
        )
        return "", False
    wanted, is_part = _config(wanted_path) or {}, False
    keys = wanted.keys() | held.keys()
    meant, has = _understood(wanted_path), _understood(held_path)
    # Compared as transformers reads them, because files differ in older keys and in defaults that they leave out.
    if meant is not None and has is not None:
        wanted, held = meant, has
        if wanted["model_type"] != held["model_type"]:  # a policy may be the text part of what vLLM holds
            part = next((part for part in _parts(held) if part["model_type"] == wanted["model_type"]), None)
            held, is_part = part or held, part is not None
        # What one of both has alone is nothing that this transformers knows, but for the format of quantised weights.
        keys = wanted.keys() & held.keys() | {_QUANTIZATION}
    differing = sorted(key for key in keys if wanted.get(key) != held.get(key))
    if not differing:
        return "", is_part
    return f"the policy's config.json is not that of vLLM's model (differing: {', '.join(differing[:8])})", is_part


def require_same_positions(model: Any, probe: Probe | None) -> None:
    """Raise InvalidStateError if vLLM computes other positions than the policy's trainer.

    `probe.contexts` are the least and the most tokens that the longest sequence of an engine with the same positions
    may have; without them nothing is compared. `model` is vLLM's `model_config`: its `max_model_len` has to be in that
    range, and of `dynamic` positions its `max_position_embeddings` must not be below the most.
    """
    if probe is None or not probe.contexts:
        return
    probe.require_context(model.max_model_len)
    rope, trained = getattr(model.hf_text_config, "rope_parameters", None) or {}, probe.contexts[-1]
    if rope.get("rope_type") == "dynamic" and (most := model.hf_text_config.max_position_embeddings) < trained:
        raise InvalidStateError(
            f"vLLM computes dynamic positions up to max_position_embeddings, {most}, only",
            reason="CONTEXT_DIFFERS",
            remedy=f"set seq_len and inference.model.max_model_len to at most {most}, or use the embedded engine",
        )


@asynccontextmanager
async def other_weights(directory: str | None, *, model: Path, scratch: Path) -> AsyncIterator[str | None]:
    """Yield the validated directory that vLLM is to load in place of the weights of `model`, deleted after the block.

    It is made in `scratch` from the safetensors files in `directory`. If `directory` is None, None is yielded, and vLLM
    loads `model` itself. Raises InvalidStateError (WEIGHTS_NOT_FOUND), and as `validate_other_weights`.
    """
    if directory is None:
        yield None
        return
    with TemporaryDirectory(prefix="weights-", directory=scratch) as place:
        yield str(await asyncio.to_thread(_look_at, Path(directory), model, Path(place) / "model"))


def _look_at(directory: Path, model: Path, place: Path) -> Path:
    """Validate the safetensors files in `directory` as weights of `model`; return the directory, made at `place`, for
    vLLM.

    Raises InvalidStateError (WEIGHTS_NOT_FOUND) without such files, and as `validate_other_weights`.
    """
    from millrace.models.served import validate_other_weights

    if not any(directory.glob("*.safetensors")):
        raise InvalidStateError(
            f"{directory} is no directory with safetensors files", reason="WEIGHTS_NOT_FOUND", remedy="name one"
        )
    return validate_other_weights(directory, model=model, place=place)


def _config_file(model: Path, revision: str | None, download_dir: str | None) -> Path:
    """Return the path of a model's config: in its directory, or in the cache of the Hub if `model` is an id of it.

    `revision` and `download_dir` are those with which vLLM got a model of the Hub, None for the defaults.
    """
    path = model / "config.json"
    if path.is_file() or not _HUB_ID.fullmatch(str(model)):
        return path
    found = try_to_load_from_cache(str(model), "config.json", cache_dir=download_dir, revision=revision)
    return Path(found) if isinstance(found, str) else path


def _config(path: Path) -> dict[str, Any] | None:
    """Return the content of a config.json without the keys that do not matter; None if there is no file."""
    if not path.is_file():
        return None
    return _plain(json.loads(path.read_bytes()))


def _understood(path: Path) -> dict[str, Any] | None:
    """Return a config.json as transformers reads it, with all defaults; None if transformers does not know the
    model.
    """
    from transformers import AutoConfig

    try:
        return _plain(AutoConfig.from_pretrained(path.parent, local_files_only=True).to_dict())
    # What transformers raises for a type that it does not know.
    except (OSError, ValueError, KeyError):
        return None


def _parts(config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the configs of sub-models, such as the text part, within a config."""
    for value in config.values():
        if isinstance(value, dict) and "model_type" in value:
            yield value


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config without keys that do not matter, at every level; with `rope_type` the older key `type` is one."""
    noise = (*_NOISE, "type") if "rope_type" in config else _NOISE
    return {
        key: _plain(value) if isinstance(value, dict) else value for key, value in config.items() if key not in noise
    }


logger = logging.getLogger(__name__)

_RPC_DEADLINE_S = 120.0
_RELOAD_DEADLINE_S = 1800.0


class VllmEngine:
    """Implements `PolicyEngine` over vLLM's engine client. `directory` is where files for the workers are written.

    `is_fixed` is for a model that was chosen when the replica was started: a restart would load it again, so a policy
    of another architecture is refused without one.
    """

    def __init__(self, client: Any, gate: GenerationGate, *, directory: Path, is_fixed: bool = False) -> None:
        """Take vLLM's engine client and the gate before it; pings begin at once, and requests are refused before a
        load.

        `directory` is for files that workers read. `is_fixed` is whether the model was chosen when the replica was
        started.
        """
        self._is_fixed = is_fixed
        self._client = client
        self.gate = gate
        self._directory = directory
        self._ranks = Ranks(client)
        self._adapters = AdapterSlot(client, directory=directory)
        self._state = EngineState.EMPTY
        self._identity: PolicyIdentity | None = None
        self._error = ""
        self._pauses: set[str] = set()
        self._is_proving = False
        self._rest = Rest(client, self._bounded)
        self._lock = asyncio.Lock()
        self._loading = asyncio.Lock()
        self._num_loads = 0
        self._times = UpdateTimes()
        self._foreseen: tuple[StagedPolicy, Readback] | None = None
        self.ping = Ping(client, self._ranks)
        self._prober = Prober(client, self._ranks, self._adapters, ping=self.ping)
        self._num_applied = 0
        self._is_busy = False
        self._verifier = BackgroundVerifier(
            lambda: self._bounded(self._ranks.call("millrace_verify_next")),
            is_free=lambda: not (self._pauses or self._is_busy or self._is_proving) and self._rest.has_memory,
            report=self.fail,
        )

    @property
    def kind(self) -> str:
        """Return the engine's name in statuses, "vllm"."""
        return "vllm"

    @property
    def client(self) -> Any:
        """Return vLLM's engine client."""
        return self._client

    async def load(self, model_dir: Path, staged: StagedPolicy | None, *, identity: PolicyIdentity) -> None:
        """Load the staged policy's weights into vLLM's model; None is the model that vLLM was started with.

        vLLM keeps its architecture: for a policy of another one InvalidStateError is raised, and a restart of vLLM for
        that policy is asked for, unless the model is fixed. Requests in flight are aborted; `prove` must follow.
        """
        if staged is None:  # the model that vLLM was started with
            await self._set_version(identity)
            self._state, self._error, self._identity = EngineState.READY, "", identity
            self.gate.open(self._salt(identity))
            return
        is_part = self._require_same_config(model_dir)
        require_same_positions(self._client.model_config, staged.manifest.probe)
        self._require_awake()
        # Written here, and fetched by other nodes, while the old policy serves.
        order = await self._ranks.order(staged, self._directory)
        order |= {"changed": None, "is_text_part": is_part}
        self._num_loads += 1  # whatever `load_directory` does meanwhile, the gate stays shut from here on
        self.gate.refuse(f"policy {identity} is being loaded")
        async with self._loading:
            await self._load(staged, order, identity)

    async def _load(self, staged: StagedPolicy, order: dict[str, Any], identity: PolicyIdentity) -> None:
        """Load a staged policy into the workers while everything is paused; a failure leaves the engine FAILED and is
        raised.

        `order` is what `Ranks.order` returned for the policy: where the workers find its tensors.
        """
        await self._abort_all(f"policy {identity} replaced the model")
        # After the abort, which lets held callers go, with an error in place of their answers.
        self.gate.hold()
        await self.pause("load")
        try:
            # No request is in flight, which would load the adapter again.
            await self._bounded(self._adapters.remove())
            await self._rpc("millrace_reload", order, deadline_s=_RELOAD_DEADLINE_S)
            self._adapters.set_base(staged)
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
        """Load the safetensors files of a directory and serve them, for PRIME-RL's HTTP calls; they are not proved.

        The workers must be able to read it. None loads the model that vLLM was started with. Raises InvalidStateError
        if the replica serves a run.
        """
        # Before the first wait: a `load` that begins later is noticed.
        num_loads = self._num_loads
        self._require_awake()
        self._ranks.require_readable(directory)
        looked_at = other_weights(directory, model=Path(self._client.model_config.model), scratch=self._directory)
        async with self._loading, looked_at as place:
            self._require_no_run(num_loads)
            identity = PolicyIdentity(run_uid="", lineage=0, version=self._num_applied + 1)
            began = time.monotonic()
            await self.pause("directory")
            try:
                await self._rpc("millrace_reload_directory", place, deadline_s=_RELOAD_DEADLINE_S)
                await self._set_version(identity)
                await self._requeue_unbegun()
            except BaseException as error:  # marks the engine as failed, then raises
                await self.fail(f"loading {directory or 'the first weights'} failed half-way: {error}")
                raise
            finally:
                await self.resume("directory")
            logger.info("weights of a directory loaded", extra={"standstill_s": round(time.monotonic() - began, 4)})
            self._state, self._error, self._identity = EngineState.READY, "", identity
            # A run's policy may have come meanwhile, whose load opens the gate once it is proved.
            self._require_no_run(num_loads)
            self.gate.open(self._salt(identity))

    async def check(self, staged: StagedPolicy) -> None:
        """Raise InvalidStateError if the staged policy does not fit the model; then stage it in the workers, while vLLM
        serves.

        An adapter is only checked. Raises InternalError, and makes the engine FAILED, if the workers' present weights
        are not the proved ones.
        """
        self._require_ready()
        self._foreseen, began = None, time.monotonic()
        if staged.manifest.adapter is not None:
            self._adapters.check(staged)
            return
        places = [[name, tensor.dtype, list(tensor.shape)] for name, tensor in staged.tensors.items()]
        require_fit(
            misfits(await self._rpc("millrace_check", places)),
            what="policy",
            reason="POLICY_MODEL_MISMATCH",
            remedy="publish the policy with the tensors of its config.json, in the model's dtype",
        )
        try:
            found = await stage(self._rpc, self._ranks, staged, directory=self._directory, times=self._times)
        except InternalError as error:  # then raises: the new version is refused
            if error.reason == MISMATCH:  # what serves is not what was proved
                await self.fail(f"the engine's memory is damaged: {error}")
            raise
        self._foreseen = None if found is None else (staged, found)
        self._times.prepare_s = time.monotonic() - began

    async def apply_policy(
        self, staged: StagedPolicy, *, identity: PolicyIdentity, inflight_mode: InflightMode
    ) -> None:
        """Write what `check` has staged into the workers, paused; a failure leaves the engine FAILED and is raised.

        From then on no answer leaves until `prove`. With RECOMPUTE requests in flight compute their KV cache again;
        with KEEP only those without a token begin again.
        """
        self._require_ready()
        self._require_awake()
        await self.pause("apply")
        try:
            self.gate.hold()
            if staged.manifest.adapter is None:
                # Without a readback that `check` foresaw, the workers may have to load the model again as a whole.
                deadline_s = _RELOAD_DEADLINE_S if self._foreseen is None else _RPC_DEADLINE_S
                await self._rpc("millrace_activate", identity.version, deadline_s=deadline_s)
            self._times.mark("write")
            await self._put_adapter(staged if staged.manifest.adapter is not None else None)
            self._prober.begin(staged)  # vLLM accepts it while it is paused: it is the first of all waiting requests
            await self._set_version(identity)
            if inflight_mode is InflightMode.RECOMPUTE:
                await self._bounded(self._client.reset_prefix_cache(reset_running_requests=True))
            else:
                await self._requeue_unbegun()
            self._times.mark("switch")
        except BaseException as error:  # marks the engine as failed, then raises
            await self.fail(f"applying policy {identity} failed half-way: {error}")
            raise
        finally:
            await self.resume("apply")
        self._identity = identity

    async def prove(self, staged: StagedPolicy, *, opens: bool = True) -> HeldDigest:
        """Prove that vLLM has the staged policy and return its digest; then, with `opens`, let requests begin and
        answers leave.

        Generation goes on meanwhile, and its answers are kept back. The workers then verify the weights in the
        background. Raises InternalError.
        """
        self._require_ready()
        self._is_proving = True  # pauses that come meanwhile begin afterwards
        try:
            # `apply_policy` has submitted the probe already; after a load it begins here.
            probing = self._prober.begin(staged)
            await self._follow_pauses()  # the probe runs through the scheduler
            self._times.mark("resume")
            self._times.go_on()
            found = await self._held(staged)
            self._times.mark("readback")
            if not found.is_whole and probing is None:
                raise InternalError(
                    "the policy cannot be proved: vLLM holds it in a layout of its own, and its manifest has no probe",
                    reason="POLICY_NOT_PROVABLE",
                    remedy="publish it with the probe's log-probs",
                )
            if probing is not None:
                await settled(probing)
                self._require_ready()  # what cancels a probe may have failed the engine
            self._times.mark("probe")
        finally:
            self._prober.end()
            self._is_proving = False
            if self._pauses - {PAUSE_HOLDER}:  # an update's own pause ends now, so that there is no use to stop for it
                await self._follow_pauses()
        assert self._identity is not None
        if opens:
            self.gate.open(self._salt(self._identity))
            self._times.report(self._identity.version)
        self._verifier.begin()
        proof = "+".join(name for name, is_given in (("readback", found.is_whole), ("probe", probing)) if is_given)
        return HeldDigest(digest=staged.manifest.digest, proof=proof)

    async def _held(self, staged: StagedPolicy) -> Readback:
        """Return which tensors of the staged policy the workers' digests prove.

        The digests are those that `check` foresaw, of what was then written and read back; without these they are read
        now, and InternalError is raised if one is not the manifest's.
        """
        foreseen, self._foreseen = self._foreseen, None
        if foreseen is not None and foreseen[0] is staged:
            return foreseen[1]
        return await read_back(self._rpc, staged.manifest)

    async def fail(self, error: str) -> None:
        """Make the model unusable: the engine is FAILED with this error, requests are refused and those in flight
        aborted.
        """
        self._state, self._error, self._identity = EngineState.FAILED, error, None
        self._prober.end()
        self.gate.refuse(error)
        await self._abort_all(error)

    async def abort_all(self) -> None:
        """Abort every request in flight, because the replica shuts down."""
        await self._abort_all("the replica is shutting down")

    async def pause(self, holder: str) -> None:
        """Stop vLLM's generation until every holder has resumed; the holder SLEEP also frees its memory on the device.

        A pause of any holder but SLEEP and OPERATOR shuts the gate first, so that requests that come meanwhile get the
        new salt. A failure makes the engine FAILED and is raised; InvalidStateError if vLLM cannot sleep.
        """
        if holder == SLEEP:
            self._rest.require_sleep()
        elif holder != OPERATOR:
            self.gate.wait()
        if holder == PAUSE_HOLDER:
            self._times.begin()
        self._pauses.add(holder)
        try:
            await self._follow_pauses()
        except BaseException as error:  # nobody could tell what generates now, then raises
            self._pauses.discard(holder)  # a holder that could not pause does not resume
            await self.fail(f"vLLM cannot be paused: {error}")
            raise
        if holder == PAUSE_HOLDER:
            self._times.mark("pause")

    async def resume(self, holder: str) -> None:
        """End this holder's pause; vLLM generates if no other holder pauses it. A failure makes the engine FAILED
        and is raised.
        """
        self._pauses.discard(holder)
        try:
            await self._follow_pauses()
        except Exception as error:  # nobody could tell what generates now, then raises
            await self.fail(f"vLLM cannot go on: {error}")
            raise
        if holder == PAUSE_HOLDER:
            self._times.end()

    def status(self) -> EngineStatus:
        """Return the engine's present status, without a call of vLLM."""
        config = self._client.vllm_config
        is_dead = bool(self._client.errored)
        return EngineStatus(
            state=EngineState.FAILED if is_dead else self._state,
            identity=self._identity if self._state is EngineState.READY and not is_dead else None,
            is_paused=bool(self._pauses),
            has_memory=self._rest.has_memory,
            num_running=self.gate.num_open,
            num_waiting=self.gate.num_waiting,
            max_num_seqs=config.scheduler_config.max_num_seqs,
            max_model_len=config.model_config.max_model_len,
            # A call of the workers, and a move of the weights, keep the engine from answering pings.
            progress_age_s=0.0 if self._is_busy or self._rest.is_moving else self.ping.age_s,
            num_generated_tokens=0,
            num_finished=self.gate.num_finished,
            error="vLLM's engine is dead" if is_dead else self._error or self.ping.error,
            is_dead=is_dead,
            pause_s=self._times.standstill_s,
        )

    async def close(self) -> None:
        """Stop all background work, refuse new requests and abort those in flight; vLLM ends itself."""
        self.ping.stop()
        self._verifier.stop()
        self.gate.refuse("this replica is shutting down")
        await self.abort_all()

    async def _requeue_unbegun(self) -> None:
        """Abort the requests that have no token yet, and have them begin again with the new version.

        Must be called while paused.
        """
        await gates.abort(self._client, self.gate.requeue(gates.unbegun(self._client)))

    async def _abort_all(self, reason: str) -> None:
        """Abort every request in flight; their callers get this reason."""
        await gates.abort(self._client, self.gate.abort_all(reason))

    async def _follow_pauses(self) -> None:
        """Pause vLLM, put it to sleep or let it generate, as the present holders of pauses ask."""
        async with self._lock:
            # The probe needs the scheduler, so pauses that come during a proof begin after it.
            stops = bool(self._pauses) and not self._is_proving
            await self._rest.become(Degree.ASLEEP if SLEEP in self._pauses else Degree.PAUSED if stops else Degree.NONE)

    async def _put_adapter(self, staged: StagedPolicy | None) -> None:
        """Set the staged adapter for every request that begins or goes on; None is a whole policy, which gets a
        blank one.
        """
        await self._bounded(self._adapters.unload() if staged is None else self._adapters.load(staged))
        self.gate.lora_request = self._adapters.request

    async def _set_version(self, identity: PolicyIdentity) -> None:
        """Set the text with which vLLM labels tokens from now on, `LINEAGE-VERSION`."""
        self._num_applied += 1
        await self._bounded(self._client.update_weight_version(f"{identity.lineage}-{identity.version}"))

    def _salt(self, identity: PolicyIdentity) -> str:
        """Return the salt for the prefix cache of requests under this policy, another one for each application."""
        return f"{identity}#{self._num_applied}"

    async def _rpc(self, method: str, *args: Any, deadline_s: float = _RPC_DEADLINE_S) -> list[Any]:
        """Call a method of the extension in every worker and return their results, by rank.

        Raises UnavailableError while asleep or after `deadline_s`, and InternalError if a worker fails.
        """
        self._require_awake()
        self._is_busy = True
        try:
            return await self._bounded(self._ranks.call(method, *args), deadline_s=deadline_s)
        finally:
            self._is_busy = False

    async def _bounded(self, call: Any, *, deadline_s: float = _RPC_DEADLINE_S) -> Any:
        """Await a call of vLLM and return its result; raise UnavailableError after `deadline_s`."""
        try:
            async with asyncio.timeout(deadline_s):
                return await call
        except TimeoutError:
            raise UnavailableError(
                f"vLLM's engine did not answer within {deadline_s:.0f} s", reason="ENGINE_SILENT", remedy="restart it"
            ) from None

    def _require_no_run(self, num_loads: int) -> None:
        """Raise InvalidStateError if the engine has a run's policy, or is loading one.

        `num_loads` is how often `load` had been called when the caller began.
        """
        if self._num_loads != num_loads or (self._identity is not None and self._identity.run_uid):
            raise InvalidStateError(
                "a run's policy has come, which takes the place of the weights of a directory",
                reason="POLICY_DRIVEN",
                remedy="use a replica that serves no run",
            )

    def _require_awake(self) -> None:
        """Raise UnavailableError while vLLM sleeps, or may sleep, because its memory cannot be read or written."""
        if SLEEP in self._pauses or not self._rest.has_memory:
            raise UnavailableError("the engine sleeps", reason="ENGINE_ASLEEP", remedy="retry once it is woken")

    def _require_ready(self) -> None:
        """Raise UnavailableError unless the engine has a model that is usable."""
        if self._state is not EngineState.READY:
            raise UnavailableError(
                self._error or "the engine holds no policy yet", reason="ENGINE_FAILED", remedy="load a policy anew"
            )

    def _require_same_config(self, model_dir: Path) -> bool:
        """Return whether the policy whose config is in `model_dir` is of the model's text part alone.

        Raises InvalidStateError for another architecture, after asking for a restart unless the model is fixed.
        """
        model, load = self._client.model_config, self._client.vllm_config.load_config
        held = Path(model.model)
        problem, is_part = compare_configs(model_dir, held, revision=model.revision, download_dir=load.download_dir)
        if not problem:
            return is_part
        is_asked = not self._is_fixed and ask_restart(problem)
        raise InvalidStateError(
            problem,
            reason="MODEL_CONFIG_MISMATCH",
            remedy="wait for the restart" if is_asked else "start the replica without MILLRACE_MODEL",
        )
