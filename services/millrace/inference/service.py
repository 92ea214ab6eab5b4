"""The parts that every replica has: the gRPC PolicyService, health, registration and updates."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path

import grpc.aio

from millrace.errors import InternalError, InvalidSpecError, InvalidStateError, UnavailableError, Violation
from millrace.inference.engine import STALL_S, InflightMode, PolicyEngine
from millrace.inference.model_files import POLICY_NAME, ModelSlot
from millrace.inference.settings import inference_worker
from millrace.inference.updater import DesiredPolicy, PolicyUpdater
from millrace.internal.v1 import policy_service_pb2 as pb
from millrace.internal.v1 import policy_service_pb2_grpc
from millrace.internal.v1.worker_service_pb2 import HeartbeatRequest
from millrace.policies.host_copy import HostCopy
from millrace.rpc.health import PROCESS, HealthBoard
from millrace.rpc.serve import RegisteredWorker
from millrace.rpc.worker import new_worker_id
from millrace.storage import open_store
from millrace.telemetry import waits
from millrace.telemetry.settings import Settings

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["PolicyService"].full_name
MAX_WAIT_S = 10.0


class PolicyServicer(policy_service_pb2_grpc.PolicyServiceServicer):
    """The gRPC PolicyService of one replica's updater and engine."""

    def __init__(self, engine: PolicyEngine, updater: PolicyUpdater) -> None:
        """Serve requests for the engine's policy by `updater`, and requests to pause the engine."""
        self._engine = engine
        self._updater = updater
        self._pause = CallerPause(engine)
        self._sleep = CallerPause(engine, holder=SLEEP)

    async def UpdatePolicy(
        self, request: pb.UpdatePolicyRequest, context: grpc.aio.ServicerContext
    ) -> pb.UpdatePolicyResponse:
        """Set the version to serve, wait at most the request's seconds for it, and answer the status then.

        A replica that sleeps has no memory for a version: this waits as long for it to be woken, and then changes
        nothing if it was not. Raises InvalidSpecError for a malformed request, FencedError for an old epoch, and
        UnavailableError while the replica shuts down or cannot be woken.
        """
        policy = _desired(request)
        wait_s = min(max(0.0, request.wait_seconds), MAX_WAIT_S)
        if not await self._sleep.over(timeout_s=wait_s):
            return pb.UpdatePolicyResponse(status=self.status())
        if not self._engine.status().has_memory:  # falling asleep or waking failed, and nobody else asks for it
            await self._sleep.resume()
        mode = (
            InflightMode.RECOMPUTE
            if request.inflight_mode == pb.INFLIGHT_MODE_RECOMPUTE
            else InflightMode.KEEP  # also where none is given
        )
        self._updater.desire(policy, mode=mode, epoch=request.epoch)
        await self._updater.wait(policy, timeout_s=wait_s)
        return pb.UpdatePolicyResponse(status=self.status())

    async def GetPolicyStatus(
        self, request: pb.GetPolicyStatusRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetPolicyStatusResponse:
        """Answer the replica's present status."""
        return pb.GetPolicyStatusResponse(status=self.status())

    async def PauseGeneration(
        self, request: pb.PauseGenerationRequest, context: grpc.aio.ServicerContext
    ) -> pb.PauseGenerationResponse:
        """Stop generation between two tokens, for `PAUSE_LIMIT_S` at most, and answer the status; a further call
        extends that.

        With `frees_memory` the engine sleeps; UnavailableError is raised while a policy is updated, and FencedError for
        an old epoch. Without it InvalidStateError is raised if the replica serves another run.
        """
        if request.frees_memory:
            self._updater.fence(request.run_uid, request.epoch)
            self._require_rest()
            await self._sleep.pause(request.run_uid)
        else:
            self._require_run(request.run_uid)
            await self._pause.pause(request.run_uid)
        return pb.PauseGenerationResponse(status=self.status())

    async def ResumeGeneration(
        self, request: pb.ResumeGenerationRequest, context: grpc.aio.ServicerContext
    ) -> pb.ResumeGenerationResponse:
        """End the pause, or with `takes_memory` the sleep, for all callers, and answer the status.

        With `takes_memory` FencedError is raised for an old epoch. Without it InvalidStateError is raised for a run
        that neither is served nor has paused the replica.
        """
        if request.takes_memory:
            self._updater.fence(request.run_uid, request.epoch)
            await self._sleep.resume()
            return pb.ResumeGenerationResponse(status=self.status())
        if not self._pause.is_by(request.run_uid):  # a run may end its own pause even if another run is served by now
            self._require_run(request.run_uid)
        await self._pause.resume()
        return pb.ResumeGenerationResponse(status=self.status())

    def status(self) -> pb.PolicyStatus:
        """Return the replica's status: policy, requests and engine, as answers and heartbeats have it."""
        status, engine = self._updater.status(), self._engine.status()
        message = pb.PolicyStatus(
            state=f"POLICY_STATE_{status.state}",
            error=status.error,
            is_damaged=status.is_damaged,
            pause_seconds=status.pause_s,
            update_seconds=status.update_s,
            num_requests=engine.num_requests,
            model_name=POLICY_NAME,
            max_num_seqs=engine.max_num_seqs,
            max_model_len=engine.max_model_len,
            fetched_bytes=status.fetched_bytes,
            full_bytes=status.full_bytes,
            engine=self._engine.kind,
            is_asleep=self._sleep.is_on or not engine.has_memory,
        )
        if (routed := engine.routed) is not None:
            form = pb.RoutedForm(num_layers=routed.num_layers, num_experts=routed.num_experts, top_k=routed.top_k)
            message.routed.CopyFrom(form)
        if status.identity is not None:
            message.has_version = True
            message.run_uid = status.identity.run_uid
            message.lineage, message.version = status.identity.lineage, status.identity.version
            message.digest, message.proof = status.digest, status.proof
        elif self._updater.desired is not None:
            message.run_uid = self._updater.desired.run_uid
        return message

    def _require_rest(self) -> None:
        """Raise UnavailableError while a policy version is fetched or applied, which needs the engine's memory."""
        if not self._updater.is_idle:
            raise UnavailableError(
                f"this replica cannot sleep now: it takes another policy (it is {self._updater.status().state})",
                reason="UPDATING",
                remedy="ask again in a second",
            )

    def _require_run(self, run_uid: str) -> None:
        """Raise InvalidStateError if the replica serves another run than `run_uid`; "" is any."""
        identity = self._updater.status().identity
        held = identity.run_uid if identity is not None else ""
        if run_uid and run_uid != held:
            raise InvalidStateError(
                f"this replica serves run {held or '(none)'}, not {run_uid}",
                reason="RUN_NOT_SERVED",
                remedy="ask a replica that serves the run",
            )


def _desired(request: pb.UpdatePolicyRequest) -> DesiredPolicy:
    """Return the policy version that the request names; raise one InvalidSpecError with all that is missing."""
    entry = request.policy
    violations = [
        Violation(field=field, message=message)
        for field, is_wrong, message in (
            ("run_uid", not request.run_uid, "must not be empty"),
            ("policy.manifest_key", not entry.manifest_key, "must not be empty"),
            ("policy.manifest_sha256", len(entry.manifest_sha256) != 32, "must be 32 bytes"),
        )
        if is_wrong
    ]
    if violations:
        raise InvalidSpecError(violations, reason="REQUEST_INVALID")
    return DesiredPolicy(run_uid=request.run_uid, entry=entry)


# Pauses that callers of PolicyService ask for, with or without sleep: visible while they last, and limited in time.
#
# A paused engine has nothing to do, so neither its health nor its progress shows that rollouts make no progress.
# Therefore a pause is a wait of this process, which heartbeats report, and it ends by itself when its caller does not.
#
# If a caller goes away while the engine answers, the call goes on: after half a call it would be unknown whether the
# engine generates.

logger = logging.getLogger(__name__)

# Longer than an update or a look at one replica takes, shorter than the deadlines of rollouts (600 s by default), so a
# forgotten pause costs time but no rollouts. A caller that needs longer asks again.
PAUSE_LIMIT_S = 300.0
OPERATOR = "operator"
"""Holder of the pauses that callers ask for."""
SLEEP = "sleep"
"""Holder of the pauses in which the trainer has the memory on the device."""


class CallerPause:
    """The one pause of its kind, which callers share: the last call of `pause` sets its end, `resume` ends it for
    all.
    """

    def __init__(self, engine: PolicyEngine, *, holder: str = OPERATOR) -> None:
        """Take the engine to pause; `holder` is the name of this kind of pause there."""
        self._engine = engine
        self._holder = holder
        self._run_uid = ""
        self._ending: asyncio.Task[None] | None = None
        self._calls: set[asyncio.Task[None]] = set()
        self._over = asyncio.Event()
        self._over.set()

    @property
    def is_on(self) -> bool:
        """Return whether the callers' pause lasts, or is about to begin or to end."""
        return not self._over.is_set()

    def is_by(self, run_uid: str) -> bool:
        """Return whether the pause lasts and the run with this uid asked for it last."""
        return self._ending is not None and bool(run_uid) and self._run_uid == run_uid

    async def pause(self, run_uid: str) -> None:
        """Stop the engine's generation for at most `PAUSE_LIMIT_S` from now, also if it is paused already.

        `run_uid` is the run that asks; "" is an operator. If the caller goes away, the pause still begins.
        """
        # The end comes first: the engine must not be paused without one if its caller goes away meanwhile.
        self._cancel()
        self._over.clear()
        self._run_uid = run_uid
        self._ending = asyncio.create_task(self._end_later(run_uid or "an operator", PAUSE_LIMIT_S))
        await self._whole(self._pause(self._ending))
        logger.info("generation is paused", extra={"holder": self._holder, "run": run_uid})

    async def resume(self) -> None:
        """End the pause for all who asked for it; do nothing if there is none."""
        self._cancel()
        await self._whole(self._resume())

    async def over(self, *, timeout_s: float) -> bool:
        """Wait at most `timeout_s` for the end of the pause, and return whether it has ended."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._over.wait()
        return not self.is_on

    async def _pause(self, ending: asyncio.Task[None]) -> None:
        """Pause the engine; if that fails, cancel the task `ending`, so that no wait is shown, and raise the error."""
        try:
            await self._engine.pause(self._holder)
        except BaseException:  # then raises
            ending.cancel()
            # Unless another call has replaced it meanwhile.
            if self._ending is ending:
                self._ending = None
                self._over.set()
            raise

    async def _resume(self) -> None:
        """Have the engine go on, and wake those that wait for the pause's end."""
        try:
            await self._engine.resume(self._holder)
        finally:
            if self._ending is None:  # else it was asked for again meanwhile
                self._over.set()
        logger.info("generation goes on", extra={"holder": self._holder})

    async def _whole(self, call: Coroutine[None, None, None]) -> None:
        """Wait for a call of the engine, which goes on to its end if the waiting is cancelled."""
        task = asyncio.create_task(call, name="operator's pause")
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        await asyncio.shield(task)

    def _cancel(self) -> None:
        """Cancel the task that would end the pause after its limit."""
        ending, self._ending = self._ending, None
        if ending is not None:
            ending.cancel()

    async def _end_later(self, caller: str, limit_s: float) -> None:
        """End the pause after `limit_s`, unless cancelled before; until then it is a wait of this process.

        `caller` names who asked for it.
        """
        reason, whom = f"paused by {caller}", "operator"
        if self._holder == SLEEP:
            reason, whom = f"asleep while the trainer of {caller} has the device", "trainer"
        with waits.waiting(reason, waits_on=whom, deadline_s=limit_s):
            await asyncio.sleep(limit_s)
        logger.warning("a pause was not resumed; generation goes on", extra={"caller": caller, "limit_s": limit_s})
        self._ending = None  # from here on a new pause has nothing to cancel, so it must come after this one's end
        try:
            await self._resume()
        except UnavailableError:
            return  # a closed engine has no pauses
        except Exception:  # the edge of a task that nobody awaits: the status shows whatever vLLM raised
            logger.exception("generation does not go on", extra={"holder": self._holder})


# The parts of every inference replica, whichever engine it drives: PolicyService, health, registration, the updater.
#
# Readiness is reported for the PolicyService's name: SERVING while a policy is served. Liveness is reported for the
# process: not while the engine has work and makes no progress, or if it is dead or has failed with a fixed model.

_HEALTH_PERIOD_S = 0.5
_STALL_SHOWN_S = 10.0  # one forward pass takes less: from here on a stall is a visible wait, overdue twice as late


class ReplicaParts:
    """Makes the parts of a replica around one engine: PolicyService, health, registration, updates.

    `policy_dir` is the directory of the host copy's file, for engines in other processes; None keeps it in memory.
    `run` ends when `stopping` is set, or by a signal if it handles them.
    """

    def __init__(
        self,
        settings: Settings,
        engine: PolicyEngine,
        slot: ModelSlot,
        *,
        stopping: asyncio.Event,
        extra_names: tuple[str, ...] = (),
        policy_dir: Path | None = None,
        worker_id: str | None = None,
    ) -> None:
        """Make PolicyService, updater and health board around the engine; nothing is served before `run`.

        `slot` has the served model. `stopping` ends `run`. `extra_names` are further names of the model. `policy_dir`
        is the directory of the host copy's file, for engines in other processes; None keeps it in memory. `worker_id`
        is the id that is registered, a new one by default.
        """
        self._settings = settings
        self._engine = engine
        self._stopping = stopping
        self._worker_id = worker_id or new_worker_id("inference")
        self.board = HealthBoard()
        self.board.add(SERVICE_NAME, reason="no policy")
        store = open_store(settings.store_url) if settings.store_url else None
        stager = HostCopy(store, directory=policy_dir) if store is not None else None
        self.updater = PolicyUpdater(engine, slot, store, stager, extra_names=extra_names)
        self.servicer = PolicyServicer(engine, self.updater)

    async def run(
        self,
        http_url: Callable[[str], str],
        *,
        drain: Callable[[float], Awaitable[None]],
        warm_up: Callable[[], object] | None = None,
        handle_signals: bool = True,
    ) -> None:
        """Register the replica and serve its gRPC services until it is to stop; then let requests finish.

        `http_url` makes the registered URL from the host under which others reach this process. `drain` is called with
        the grace period in seconds. `warm_up` runs in a thread once the orchestrator knows this replica. With
        `handle_signals` False only `stopping` ends it, and signals are left to the caller.
        """

        async def leave() -> None:
            """Drain once load balancers stop sending: open requests get the grace period, new ones are refused."""
            self.updater.leave()
            await drain(self._settings.grace_s)

        registered = RegisteredWorker(
            self._settings,
            inference_worker(self._worker_id),
            self._heartbeat,
            stopping=self._stopping,
            http_url=http_url,
        )

        async def import_meanwhile() -> None:
            """Import what the first policy will need, once the orchestrator knows this replica."""
            await registered.wait_started()
            if warm_up is not None:
                await asyncio.to_thread(warm_up)

        await registered.serve(
            self._add_services,
            health_board=self.board,
            handle_signals=handle_signals,
            drain=leave,
            beside=[self._update, self.watch_health, import_meanwhile],
        )

    async def _update(self) -> None:
        """Run the updater until cancelled.

        Raises InternalError if it ends by itself, because the replica would serve an old version for ever.
        """
        task = asyncio.current_task()
        assert task is not None
        try:
            await self.updater.run()
        except asyncio.CancelledError:
            # A cancellation that nobody asked for came from within the updater, and counts as its end.
            if task.cancelling():  # by those who end the replica
                raise
        raise InternalError(
            "the replica's updater has ended, though nobody ended it",
            reason="UPDATER_ENDED",
            remedy="the replica is started again; report this with its log",
        )

    def _add_services(self, server: grpc.aio.Server, _: asyncio.Event) -> list[str]:
        """Add PolicyService to the gRPC server, and return the names of the services."""
        policy_service_pb2_grpc.add_PolicyServiceServicer_to_server(self.servicer, server)
        return [SERVICE_NAME]

    def _heartbeat(self) -> HeartbeatRequest:
        """Return a heartbeat with the replica's status, and whether it is leaving."""
        return HeartbeatRequest(policy=self.servicer.status(), is_leaving=self._stopping.is_set())

    async def watch_health(self) -> None:
        """Report on the health board whether a policy is served and the engine makes progress, twice a second until
        cancelled.

        An engine that makes none is also a visible wait.
        """
        wait = waits.LastingWait()
        while True:
            status = self.servicer.status()
            if status.has_version:
                self.board.set_ready(SERVICE_NAME)
            else:
                self.board.set_unready(SERVICE_NAME, status.error or "no policy")
            engine = self._engine.status()
            idle_s = engine.progress_age_s
            if idle_s > _STALL_SHOWN_S:
                open_now = engine.num_running + engine.num_waiting
                reason = f"its engine, which has {open_now} requests and did nothing for {idle_s:.0f} s"
                wait.on(reason, key="stall", deadline_s=_STALL_SHOWN_S)
            else:
                wait.over()
            if engine.is_dead or self.updater.is_lost:
                self.board.set_unready(PROCESS, engine.error)
            elif idle_s > STALL_S:
                self.board.set_unready(PROCESS, f"the engine has work and made no progress for {idle_s:.0f} s")
            else:
                self.board.set_ready(PROCESS)
            await asyncio.sleep(_HEALTH_PERIOD_S)
