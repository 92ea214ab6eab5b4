"""Updates the engine to the policy version that is asked for, and counts updates; errors do not end the replica.

Level-triggered: callers set the version to serve, as often as they like; one background task works on it.

    EMPTY ──▶ FETCHING ──▶ APPLYING ──▶ SERVING          FETCHING failed: UPDATE_FAILED, the old version serves on
                 ▲                        │              APPLYING failed: BROKEN, nothing serves; the next request
                 └────────────────────────┘                               for a version loads the model again

Everything that can be checked is checked while the old version serves: hashes of all objects, digests of all tensors
(`HostCopy`), names, shapes and dtypes against the model (`check`). Then generation pauses, the weights are written, and
the engine proves what it holds; an engine that has to generate for that keeps every answer back until it is proved. A
failure from the pause on makes the engine FAILED and the host copy forgotten: the next attempt begins at an anchor.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from prometheus_client import Counter, Histogram
from prometheus_client.registry import Collector

from millrace.errors import (
    CorruptObjectError,
    FencedError,
    InternalError,
    MillraceError,
    NotFoundError,
    UnavailableError,
)
from millrace.inference import model_files
from millrace.inference.engine import EngineState, EngineStatus, HeldDigest, InflightMode, PolicyEngine, PolicyIdentity
from millrace.inference.model_files import POLICY_NAME, ModelSlot, ServedModel
from millrace.internal.v1.policy_pb2 import PolicyEntry
from millrace.models.files import require_no_adapter
from millrace.policies.host_copy import pull_files
from millrace.policies.manifest import AdapterEntry, StagedPolicy, Stager
from millrace.policies.proof import mismatch
from millrace.storage.base import ObjectStore
from millrace.telemetry import progress, waits
from millrace.telemetry.metrics import SHORT_SECONDS, Family, MetricSheet, StateCollector
from millrace.telemetry.progress import Activity

logger = logging.getLogger(__name__)

PAUSE_HOLDER = "update"
_UNPROVED = HeldDigest(digest="", proof="")  # of a fixed model: there is no manifest
_MAX_RUNS = 1024  # runs whose fencing epoch is remembered
_FETCH_DEADLINE_S = 600.0  # when a fetch counts as overdue in `run why`; the store's own deadlines end it


class UpdateState(StrEnum):
    """The state of the replica's policy, with the names of the wire."""

    EMPTY = "EMPTY"
    FETCHING = "FETCHING"
    APPLYING = "APPLYING"
    SERVING = "SERVING"
    UPDATE_FAILED = "UPDATE_FAILED"
    BROKEN = "BROKEN"


@dataclass(frozen=True, slots=True, kw_only=True)
class DesiredPolicy:
    """The version that shall be served: the run, and its entry of the policy stream.

    A hash or digest that is empty there is not compared.
    """

    run_uid: str
    entry: PolicyEntry

    @property
    def identity(self) -> PolicyIdentity:
        """Return run, lineage and version of the desired policy, by which engines name it."""
        return PolicyIdentity(run_uid=self.run_uid, lineage=self.entry.lineage, version=self.entry.version)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateStatus:
    """The state of updates. `identity` and `digest` are those of the version that serves; None and empty if none does.

    While a version is applied they are those of the one before: the new one counts when its digest is proved.
    """

    state: UpdateState
    identity: PolicyIdentity | None
    digest: str
    proof: str
    error: str
    is_damaged: bool
    pause_s: float
    update_s: float
    fetched_bytes: int
    full_bytes: int


class PolicyUpdater:
    """Decides which policy the engine has. Works only while `run` runs.

    `store` and `stager` are None for a replica of a fixed model.
    """

    def __init__(
        self,
        engine: PolicyEngine,
        slot: ModelSlot,
        store: ObjectStore | None,
        stager: Stager | None,
        *,
        extra_names: tuple[str, ...] = (),
    ) -> None:
        """Take the engine and the slot in which the served model is put; nothing is updated before `run`.

        `stager` fetches policies from `store` into host memory; both are None for a replica of a fixed model.
        `extra_names` are further names of the served model.
        """
        self._engine = engine
        self._slot = slot
        self._store = store
        self._stager = stager
        self._names = tuple(dict.fromkeys((POLICY_NAME, *extra_names)))
        self._epochs: OrderedDict[str, int] = OrderedDict()
        self._state = UpdateState.EMPTY
        self._desired: DesiredPolicy | None = None
        self._mode = InflightMode.KEEP
        self._served: DesiredPolicy | None = None
        self._settled: DesiredPolicy | None = None
        self._held_files: tuple[tuple[str, str], ...] | None = None
        self._proved: tuple[PolicyIdentity, HeldDigest] | None = None
        """A version and the digest that was found in the engine for it: one value, so nobody sees halves of two."""
        self._error, self._is_damaged, self._is_leaving, self._is_fixed = "", False, False, False
        self._pause_s = self._update_s = 0.0
        self._fetched_bytes = self._full_bytes = self._base_bytes = 0
        self._wake, self._change = asyncio.Event(), asyncio.Event()

    def status(self) -> UpdateStatus:
        """Return which policy serves and how the last update went; the engine's own failure if it failed between
        two updates.
        """
        engine = self._engine.status()
        serves = engine.state is EngineState.READY and self._slot.current is not None
        proved = self._proved if serves else None
        if proved is not None and engine.identity is not None and not engine.identity.run_uid:  # a fixed model
            proved = (engine.identity, _UNPROVED)
        state, error = self._state, self._error
        if engine.state is EngineState.FAILED and state is UpdateState.SERVING:
            state, error = UpdateState.BROKEN, engine.error  # it failed by itself, between two updates
        identity, held = proved or (None, _UNPROVED)
        return UpdateStatus(
            state=state,
            identity=identity,
            digest=held.digest,
            proof=held.proof,
            error=error,
            is_damaged=self._is_damaged,
            pause_s=self._pause_s,
            update_s=self._update_s,
            fetched_bytes=self._fetched_bytes,
            full_bytes=self._full_bytes,
        )

    @property
    def desired(self) -> DesiredPolicy | None:
        """Return the policy version that was set to be served; None if none was."""
        return self._desired

    @property
    def is_lost(self) -> bool:
        """Return whether the engine failed with a fixed model, which, unlike a run's policy, nobody requests again."""
        return self._is_fixed and self._desired is None and self._engine.status().state is EngineState.FAILED

    def desire(self, policy: DesiredPolicy, *, mode: InflightMode, epoch: int) -> None:
        """Set the policy version to serve, which `run` then works on; one that failed before is tried again.

        `mode` is for requests in flight, `epoch` that of the calling orchestrator. Raises FencedError if a newer
        orchestrator has called for the run, and UnavailableError while the replica shuts down.
        """
        if self._is_leaving:
            raise UnavailableError("this replica is shutting down", reason="DRAINING", remedy="use another one")
        self.fence(policy.run_uid, epoch)
        self._mode = mode
        if policy != self._desired or (policy == self._settled and not self.serves(policy)):
            self._desired, self._settled = policy, None  # new, or asked for again after a failure
            self._wake.set()

    def fence(self, run_uid: str, epoch: int) -> None:
        """Raise FencedError if an earlier call for the run had a newer epoch; else remember this epoch as the
        newest.
        """
        seen = self._epochs.get(run_uid, 0)
        if epoch < seen:
            raise FencedError(
                f"epoch {epoch} of run {run_uid} is stale: this replica has seen epoch {seen}",
                reason="STALE_EPOCH",
                remedy="stop driving this run; its newer holder goes on",
            )
        self._epochs[run_uid] = epoch
        self._epochs.move_to_end(run_uid)
        while len(self._epochs) > _MAX_RUNS:
            self._epochs.popitem(last=False)

    @property
    def is_idle(self) -> bool:
        """Return whether no version is being fetched or applied, nor about to be: the desired one serves, or has
        failed.
        """
        return self._settled == self._desired

    def serves(self, policy: DesiredPolicy) -> bool:
        """Return whether exactly this policy version is being served."""
        status = self.status()
        return self._served == policy and status.identity == policy.identity

    async def wait(self, policy: DesiredPolicy, *, timeout_s: float) -> None:
        """Wait until this version serves, has failed, or is not the desired one any more; at most `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._desired == policy and self._settled != policy and not self._is_leaving:
                    await self._change.wait()
        except TimeoutError:
            return

    def leave(self) -> None:
        """Refuse further versions, and end all calls of `wait`, because the replica shuts down."""
        self._is_leaving = True
        self._notify()

    async def serve_fixed(self, model_dir: Path) -> None:
        """Load the model in a directory and serve it as version 0 of no run.

        Raises InvalidStateError (MODEL_IS_ADAPTER) if the directory has an adapter, and the engine's errors.
        """
        await asyncio.to_thread(require_no_adapter, model_dir)
        tokenizer = await asyncio.to_thread(model_files.load_tokenizer, model_dir)
        identity = PolicyIdentity(run_uid="", lineage=0, version=0)
        await self._engine.load(model_dir, None, identity=identity)
        self._proved = (identity, _UNPROVED)
        self._slot.current = ServedModel(names=self._names, directory=model_dir, tokenizer=tokenizer)
        self._is_fixed = True
        self._set(UpdateState.SERVING)

    async def run(self) -> None:
        """Update the engine to each version that is desired, until cancelled; a failed update is reported in the
        status.
        """
        while True:
            await self._wake.wait()
            # Cleared before `_desired` is read: a version that is set during the attempt wakes this again.
            self._wake.clear()
            if (desired := self._desired) is not None:
                if not self.serves(desired):
                    await self._attempt(desired)
                # The attempted version, not `_desired`: a newer one may have been set meanwhile.
                self._settled = desired
                self._notify()

    async def _attempt(self, desired: DesiredPolicy) -> None:
        """Update the engine to this version once; raise nothing. Another try needs another call of `desire`.

        Set the state, with the error after a failure; after a success also the served version and the seconds that the
        update took. Either outcome is logged and counted in metrics.
        """
        began = time.monotonic()
        self._set(UpdateState.FETCHING)
        fields = {"run": desired.run_uid, "lineage": desired.entry.lineage, "version": desired.entry.version}
        what = f"policy {desired.entry.version}"
        downloading = progress.work(Activity.DOWNLOAD, what, waits_on="object store", deadline_s=_FETCH_DEADLINE_S)
        try:
            with waits.of_run(desired.run_uid), downloading as work:
                await self._update(desired, work)
        except Exception as error:  # whatever a bad policy causes must leave the replica alive and say why
            is_broken = self._engine.status().state is EngineState.FAILED
            state = UpdateState.BROKEN if is_broken else UpdateState.UPDATE_FAILED
            self._set(state, error=_describe(error), is_damaged=isinstance(error, CorruptObjectError | NotFoundError))
            update_failed()
            fields["error"] = str(error)
            logger.error("policy update failed", extra=fields, exc_info=not isinstance(error, MillraceError))
        else:
            self._served = desired
            self._update_s = time.monotonic() - began
            self._set(UpdateState.SERVING)
            seconds = {"update_s": round(self._update_s, 4), "pause_s": round(self._pause_s, 4)}
            fields |= seconds | {"fetched_bytes": self._fetched_bytes, "full_bytes": self._full_bytes}
            policy_updated(**seconds, fetched_bytes=self._fetched_bytes)
            logger.info("policy updated", extra=fields)

    async def _update(self, desired: DesiredPolicy, work: progress.LongWork) -> None:
        """Fetch this version, then apply it to the engine's model, or load it in place of the model if its files
        differ.

        `work` shows how far it is. Raises what fetching, applying or the proof raises.
        """
        if self._engine.status().state is EngineState.FAILED:
            self._forget()  # it failed between two updates, perhaps for damaged memory: nothing here is trusted
        staged = await self._stage(desired)
        self._base_bytes = 0
        files = tuple((entry.name, entry.sha256) for entry in staged.manifest.files)
        is_same_run = self._served is not None and self._served.run_uid == desired.run_uid
        is_same_model = is_same_run and self._slot.current is not None  # a base whose adapter failed is not announced
        if is_same_model and files == self._held_files and self._engine.status().state is EngineState.READY:
            work.turn_to(Activity.APPLY, f"policy {desired.entry.version}", waits_on="")
            staged = self._against_held(staged)
            await self._engine.check(staged)
            await self._apply(desired, staged)
        else:
            work.turn_to(Activity.LOAD, f"policy {desired.entry.version}")
            await self._load(desired, staged)
            self._held_files = files
        self._fetched_bytes, self._full_bytes = self._base_bytes + staged.fetched_bytes, staged.full_bytes
        if self._stager is not None and not staged.manifest.is_delta_base:
            del staged  # so that what is dropped is freed in that thread: as much as a policy
            await asyncio.to_thread(self._stager.drop)

    async def _stage(self, desired: DesiredPolicy) -> StagedPolicy:
        """Fetch this version into host memory and return it.

        Raises CorruptObjectError if its manifest is not the announced one, and the store's errors.
        """
        if self._stager is None:
            raise _no_store()
        entry = desired.entry
        staged = await asyncio.to_thread(self._stager.stage, entry.manifest_key, entry.manifest_sha256)
        manifest = staged.manifest
        found = PolicyIdentity(run_uid=manifest.run_uid, lineage=manifest.lineage, version=manifest.version)
        if found != desired.identity or (entry.digest and manifest.digest != entry.digest):
            raise CorruptObjectError(
                f"manifest {entry.manifest_key} is of policy {found} with digest {manifest.digest}; announced was "
                f"{desired.identity} with digest {entry.digest}",
                reason="POLICY_MANIFEST_MISMATCH",
                remedy="publish the policy again",
            )
        return staged

    async def _stage_base(self, adapter: AdapterEntry) -> StagedPolicy:
        """Fetch the base of an adapter into host memory, in place of the adapter, and return it.

        Raises CorruptObjectError if it is not the base that the adapter names.
        """
        if self._stager is None:
            raise _no_store()
        base = await asyncio.to_thread(self._stager.stage, adapter.base_key)
        if base.manifest.digest != adapter.base_digest or base.manifest.adapter is not None:
            raise CorruptObjectError(
                f"manifest {adapter.base_key} has digest {base.manifest.digest}; the adapter is on a base of digest "
                f"{adapter.base_digest}",
                reason="POLICY_BASE_MISMATCH",
                remedy="publish the policy again",
            )
        self._base_bytes = base.fetched_bytes
        return base

    def _against_held(self, staged: StagedPolicy) -> StagedPolicy:
        """Return the staged policy, without its changes unless they are against the version that the engine has.

        Not every staged version was applied.
        """
        held = self._engine.status().identity
        # The changes are relative to what was staged before, which may not be what the engine has.
        if held is not None and staged.base == (held.lineage, held.version):
            return staged
        return replace(staged, changes=None, base=None)

    async def _apply(self, desired: DesiredPolicy, staged: StagedPolicy) -> None:
        """Pause the engine, write the checked policy into its model, have it proved, and resume the engine.

        Also after a failure the engine is resumed; it then refuses to generate by itself. The host copy is dropped
        then, so that the next attempt begins at an anchor.
        """
        self._set(UpdateState.APPLYING)
        began = time.monotonic()
        try:
            await self._engine.pause(PAUSE_HOLDER)
            try:
                await self._engine.apply_policy(staged, identity=desired.identity, inflight_mode=self._mode)
                await self._prove(desired.identity, staged)
            finally:
                await self._engine.resume(PAUSE_HOLDER)  # after a failure the engine refuses to generate by itself
                measured = self._engine.status().pause_s
                self._pause_s = time.monotonic() - began if measured is None else measured
        except BaseException:  # the next attempt begins at an anchor, then raises
            self._forget()
            raise

    async def _load(self, desired: DesiredPolicy, staged: StagedPolicy) -> None:
        """Load the policy with its own files in place of the engine's model, and prove it; new requests are refused
        meanwhile.

        Of an adapter the base is loaded and proved first; nothing is served before the adapter is on it.
        """
        adapter, whole, identity = staged.manifest.adapter, staged, desired.identity
        if adapter is not None:
            whole = await self._stage_base(adapter)
            identity = replace(identity, lineage=whole.manifest.lineage, version=whole.manifest.version)
        # Files and tokenizer first: what fails here leaves the old model in service.
        owner = model_files.write_files(await asyncio.to_thread(pull_files, self._require_store(), staged.manifest))
        tokenizer = await asyncio.to_thread(model_files.load_tokenizer, directory := Path(owner.name))
        served = ServedModel(names=self._names, directory=directory, tokenizer=tokenizer, owner=owner)
        self._set(UpdateState.APPLYING)
        began = time.monotonic()
        # New requests are refused from here on, because the model that they would be rendered for is going away.
        old, self._slot.current = self._slot.current, None
        try:
            await self._engine.load(directory, whole, identity=identity)
        except BaseException:  # restores what was held, then raises
            if self._engine.status().state is EngineState.READY:
                self._slot.current = old  # the engine still holds what it held
            else:
                self._forget()
            owner.cleanup()
            raise
        if old is not None and old.owner is not None:
            old.owner.cleanup()  # config and tokenizer are in memory
        try:
            await self._prove(identity, whole, opens=adapter is None)
            if adapter is not None:
                staged = await self._stage(desired)
                await self._engine.check(staged)
                await self._apply(desired, staged)
        except BaseException:  # the next attempt begins at an anchor, then raises
            self._forget()
            raise
        # Last, because requests are rendered for this model from here on.
        self._slot.current = served
        self._pause_s = time.monotonic() - began

    async def _prove(self, identity: PolicyIdentity, staged: StagedPolicy, *, opens: bool = True) -> None:
        """Have the engine prove that it has this policy; `opens` False if it is not to be served, as an adapter on it
        follows.

        If the digest differs (InternalError) or the proof fails, the engine is made FAILED, and the error raised.
        """
        try:
            held = await self._engine.prove(staged, opens=opens)
            if held.digest != staged.manifest.digest:
                raise mismatch(f"the engine holds digest {held.digest}, not {staged.manifest.digest}")
        except Exception as error:  # whatever it was, the engine is unproved; raised again
            await self._engine.fail(f"the update to {identity} is not proved: {_describe(error)}")
            raise
        self._proved = (identity, held)

    def _forget(self) -> None:
        """Drop the host copy, so that the next attempt begins at an anchor."""
        if self._stager is not None:
            self._stager.forget()

    def _require_store(self) -> ObjectStore:
        """Return the object store; raise InternalError if the replica has none."""
        if self._store is None:
            raise _no_store()
        return self._store

    def _set(self, state: UpdateState, *, error: str = "", is_damaged: bool = False) -> None:
        """Set the state of updates, with its error and whether an object was damaged, and wake all that wait for a
        change.
        """
        self._state, self._error, self._is_damaged = state, error, is_damaged
        self._notify()

    def _notify(self) -> None:
        """Wake all that wait for a change of the state."""
        # A new event for the next change, so that each waiter wakes once and none misses a change.
        change, self._change = self._change, asyncio.Event()
        change.set()


def _no_store() -> InternalError:
    """Make the error of a replica that has no object store."""
    remedy = "set MILLRACE_STORE_URL and restart"
    return InternalError("this replica has no object store", reason="NO_STORE", remedy=remedy)


def _describe(error: Exception) -> str:
    """Return an error's text for the status, with its class if it is not Millrace's own."""
    return str(error) if isinstance(error, MillraceError) else f"{type(error).__name__}: {error}"


# A replica's metrics beside its engine's own, whichever engine it is.

RUNNING = Family("millrace_inference_requests_running", "Requests that generate.")
WAITING = Family("millrace_inference_requests_waiting", "Requests that have not begun: no room, or an update.")
HELD = Family("millrace_inference_requests_held", "Requests that stand still because the engine is paused.")
GENERATED = Family("millrace_inference_generated_tokens_total", "Tokens generated; vLLM has its own counter.")
FINISHED = Family("millrace_inference_finished_requests_total", "Requests that ended.")
VERSION = Family("millrace_inference_policy_version", "Policy version that is served; -1 without one.")
LINEAGE = Family("millrace_inference_policy_lineage", "Lineage of that version; -1 without one.")
CAPACITY = Family("millrace_inference_capacity_requests", "Requests that generate at once, at most.")
PROGRESS_AGE = Family(
    "millrace_inference_progress_age_seconds", "Seconds since the engine last did something that it had to do."
)
FAMILIES = (RUNNING, WAITING, HELD, GENERATED, FINISHED, VERSION, LINEAGE, CAPACITY, PROGRESS_AGE)

UPDATES = Counter(
    "millrace_inference_policy_updates_total",
    "Attempts to serve another policy version: ok or failed.",
    ["result"],
    registry=None,
)
UPDATE_SECONDS = Histogram(
    "millrace_inference_policy_update_duration_seconds",
    "Seconds of a successful update, from the request until the version is proved and serves.",
    buckets=SHORT_SECONDS,
    registry=None,
)
PAUSE_SECONDS = Histogram(
    "millrace_inference_pause_duration_seconds",
    "Seconds for which a successful update stopped generation.",
    buckets=SHORT_SECONDS,
    registry=None,
)
FETCHED_BYTES = Counter(
    "millrace_inference_policy_fetched_bytes_total", "Bytes fetched for successful updates.", registry=None
)
COUNTED = (UPDATES, UPDATE_SECONDS, PAUSE_SECONDS, FETCHED_BYTES)
for _result in ("ok", "failed"):
    UPDATES.labels(_result)  # 0 from the beginning: `rate` sees the first one


def policy_updated(*, update_s: float, pause_s: float, fetched_bytes: int) -> None:
    """Count a successful update of the policy: how long it took, for how long it paused generation, and the fetched
    bytes.
    """
    UPDATES.labels("ok").inc()
    UPDATE_SECONDS.observe(update_s)
    PAUSE_SECONDS.observe(pause_s)
    FETCHED_BYTES.inc(fetched_bytes)


def update_failed() -> None:
    """Count a failed update of the policy."""
    UPDATES.labels("failed").inc()


def collectors(status_of: Callable[[], EngineStatus]) -> list[Collector]:
    """Return the collectors of a replica's metrics for a registry; `status_of` returns the engine's present status."""

    def read(sheet: MetricSheet) -> None:
        """Write the engine's present state into the sheet."""
        status = status_of()
        held = status.identity
        sheet.put(RUNNING, status.num_running)
        sheet.put(WAITING, status.num_waiting)
        sheet.put(HELD, status.num_requests if status.is_paused else 0)
        sheet.put(GENERATED, status.num_generated_tokens)
        sheet.put(FINISHED, status.num_finished)
        sheet.put(VERSION, held.version if held is not None else -1)
        sheet.put(LINEAGE, held.lineage if held is not None else -1)
        sheet.put(CAPACITY, status.max_num_seqs)
        sheet.put(PROGRESS_AGE, status.progress_age_s)

    return [StateCollector(FAMILIES, read), *COUNTED]
