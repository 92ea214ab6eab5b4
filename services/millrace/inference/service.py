"""The gRPC PolicyService: what the orchestrator uses to move policy versions into this replica."""

import grpc.aio

from millrace.errors import InvalidSpecError, InvalidStateError, UnavailableError, Violation
from millrace.inference.engine import InflightMode, PolicyEngine
from millrace.inference.model_files import POLICY_NAME
from millrace.inference.pauses import SLEEP, CallerPause
from millrace.inference.updater import DesiredPolicy, PolicyUpdater
from millrace.internal.v1 import policy_service_pb2 as pb
from millrace.internal.v1 import policy_service_pb2_grpc

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["PolicyService"].full_name
MAX_WAIT_S = 10.0


class PolicyServicer(policy_service_pb2_grpc.PolicyServiceServicer):
    """Serves one replica's updater and engine."""

    def __init__(self, engine: PolicyEngine, updater: PolicyUpdater) -> None:
        self._engine = engine
        self._updater = updater
        self._pause = CallerPause(engine)
        self._sleep = CallerPause(engine, holder=SLEEP)

    async def UpdatePolicy(
        self, request: pb.UpdatePolicyRequest, context: grpc.aio.ServicerContext
    ) -> pb.UpdatePolicyResponse:
        """Set the version to serve, wait a bounded time for it, and answer what is served then.

        A replica that sleeps takes none, as it has no memory for it: it waits to be woken as long.
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
        """What the replica serves."""
        return pb.GetPolicyStatusResponse(status=self.status())

    async def PauseGeneration(
        self, request: pb.PauseGenerationRequest, context: grpc.aio.ServicerContext
    ) -> pb.PauseGenerationResponse:
        """Stop generation between two tokens, for `pauses.PAUSE_LIMIT_S` at most; asking again prolongs it."""
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
        """Go on with generation; also take the memory again, if that is the pause that shall end."""
        if request.takes_memory:
            self._updater.fence(request.run_uid, request.epoch)
            await self._sleep.resume()
            return pb.ResumeGenerationResponse(status=self.status())
        if not self._pause.is_by(request.run_uid):  # its own pause a run ends also when another one is served by now
            self._require_run(request.run_uid)
        await self._pause.resume()
        return pb.ResumeGenerationResponse(status=self.status())

    def status(self) -> pb.PolicyStatus:
        """What the replica serves, also for heartbeats."""
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
        if status.identity is not None:
            message.has_version = True
            message.run_uid = status.identity.run_uid
            message.lineage, message.version = status.identity.lineage, status.identity.version
            message.digest, message.proof = status.digest, status.proof
        elif self._updater.desired is not None:
            message.run_uid = self._updater.desired.run_uid
        return message

    def _require_rest(self) -> None:
        """UnavailableError while a version is fetched or applied, for which the engine reads and writes its memory."""
        if not self._updater.is_idle:
            raise UnavailableError(
                f"this replica cannot sleep now: it takes another policy (it is {self._updater.status().state})",
                reason="UPDATING",
                remedy="ask again in a second",
            )

    def _require_run(self, run_uid: str) -> None:
        identity = self._updater.status().identity
        held = identity.run_uid if identity is not None else ""
        if run_uid and run_uid != held:
            raise InvalidStateError(
                f"this replica serves run {held or '(none)'}, not {run_uid}",
                reason="RUN_NOT_SERVED",
                remedy="ask a replica that serves the run",
            )


def _desired(request: pb.UpdatePolicyRequest) -> DesiredPolicy:
    """The version that the request names; InvalidSpecError lists what is missing."""
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
    return DesiredPolicy(
        run_uid=request.run_uid,
        lineage=entry.lineage,
        version=entry.version,
        manifest_key=entry.manifest_key,
        manifest_sha256=entry.manifest_sha256,
        digest=entry.digest,
    )
