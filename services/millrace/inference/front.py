"""Answers for a replica while its vLLM is not up: health, PolicyService and registration, without an engine.

The orchestrator asks an empty replica for the run's policy. From that request the launcher learns with which model to
start vLLM; the server itself loads the weights later, at the orchestrator's next request.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import grpc.aio

from millrace.errors import InternalError, InvalidSpecError, InvalidStateError, MillraceError, Violation
from millrace.inference.model_files import POLICY_NAME, write_files
from millrace.inference.settings import inference_worker
from millrace.internal.v1 import policy_service_pb2 as pb
from millrace.internal.v1 import policy_service_pb2_grpc
from millrace.internal.v1.worker_service_pb2 import HeartbeatRequest
from millrace.policies.host_copy import pull_files, read_manifest
from millrace.rpc.health import HealthBoard
from millrace.rpc.serve import RegisteredWorker
from millrace.storage.base import ObjectStore
from millrace.storage.clean_up import TemporaryDirectory
from millrace.telemetry.settings import Settings

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["PolicyService"].full_name
MAX_WAIT_S = 10.0
FETCH_DEADLINE_S = 600.0
# Nothing generates before vLLM is up, so that there is nothing to let finish.
_GRACE_S = 0.5
_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyModel:
    """The files of a policy without its weights, in a directory of their own, and its number format for vLLM."""

    owner: TemporaryDirectory
    dtype: str
    name: str

    @property
    def directory(self) -> Path:
        """Return the directory that has the policy's files."""
        return Path(self.owner.name)


class Front(policy_service_pb2_grpc.PolicyServiceServicer):
    """Serves the replica's gRPC address until `close`."""

    def __init__(self) -> None:
        """Make a front whose status is EMPTY, and which serves from `run` on."""
        self._wanted: asyncio.Queue[pb.UpdatePolicyRequest] = asyncio.Queue(maxsize=1)
        self._state = pb.POLICY_STATE_EMPTY
        self._error = ""
        self._run_uid = ""
        self._closing = asyncio.Event()
        self._gone = asyncio.Event()
        self._board = HealthBoard()
        self._board.add(SERVICE_NAME, reason="vLLM is not up")

    def set_status(self, state: pb.PolicyState, *, error: str = "") -> None:
        """Set the state and error that the replica's status shows from now on."""
        self._state, self._error = state, error

    async def wanted(self) -> pb.UpdatePolicyRequest:
        """Wait for the next UpdatePolicy request and return it; of several that were not taken only the newest is
        returned.
        """
        return await self._wanted.get()

    async def run(self, settings: Settings, worker_id: str, http_url: Callable[[str], str]) -> None:
        """Serve the replica's gRPC address and keep the replica registered as `worker_id`, until `close`.

        `http_url` makes the URL to register from a host.
        """
        registered = RegisteredWorker(
            replace(settings, drain_s=0.0, grace_s=_GRACE_S),
            inference_worker(worker_id),
            self._heartbeat,
            stopping=self._closing,
            http_url=http_url,
        )
        try:
            await registered.serve(self._add_services, health_board=self._board, handle_signals=False)
        finally:
            self._gone.set()

    async def close(self) -> None:
        """Stop serving and registering, and return when the gRPC address is free."""
        self._closing.set()
        await self._gone.wait()

    async def UpdatePolicy(
        self, request: pb.UpdatePolicyRequest, context: grpc.aio.ServicerContext
    ) -> pb.UpdatePolicyResponse:
        """Keep the requested policy for `wanted`, and answer after at most `wait_seconds` that nothing is served yet.

        Raises InvalidSpecError for an empty manifest key.
        """
        if not request.policy.manifest_key:
            wrong = Violation(field="policy.manifest_key", message="must not be empty")
            raise InvalidSpecError([wrong], reason="REQUEST_INVALID")
        if self._wanted.full():
            # Only the newest request counts: what was asked for before is not wanted any more.
            self._wanted.get_nowait()
        self._wanted.put_nowait(request)
        self._run_uid = request.run_uid
        try:
            async with asyncio.timeout(min(max(0.0, request.wait_seconds), MAX_WAIT_S)):
                await self._closing.wait()  # nothing is served before the server takes over
        except TimeoutError:
            pass
        return pb.UpdatePolicyResponse(status=self.status())

    async def GetPolicyStatus(
        self, request: pb.GetPolicyStatusRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetPolicyStatusResponse:
        """Answer the status of a replica whose vLLM is not up."""
        return pb.GetPolicyStatusResponse(status=self.status())

    async def PauseGeneration(
        self, request: pb.PauseGenerationRequest, context: grpc.aio.ServicerContext
    ) -> pb.PauseGenerationResponse:
        """Raise InvalidStateError, because nothing generates."""
        raise _nothing_generates()

    async def ResumeGeneration(
        self, request: pb.ResumeGenerationRequest, context: grpc.aio.ServicerContext
    ) -> pb.ResumeGenerationResponse:
        """Raise InvalidStateError, because nothing generates."""
        raise _nothing_generates()

    def status(self) -> pb.PolicyStatus:
        """Return the status of a replica whose vLLM is not up, with the state and error that were set last."""
        return pb.PolicyStatus(
            run_uid=self._run_uid, state=self._state, error=self._error, model_name=POLICY_NAME, engine="vllm"
        )

    def _heartbeat(self) -> HeartbeatRequest:
        """Return a heartbeat with the status of a replica whose vLLM is not up."""
        return HeartbeatRequest(policy=self.status())

    def _add_services(self, server: grpc.aio.Server, _: asyncio.Event) -> list[str]:
        """Add PolicyService to the gRPC server, and return the names of the services."""
        policy_service_pb2_grpc.add_PolicyServiceServicer_to_server(self, server)
        return [SERVICE_NAME]


async def fetch_model(store: ObjectStore, request: pb.UpdatePolicyRequest) -> PolicyModel:
    """Download and verify the files, without weights, of the policy that the request names, or of its base if it is an
    adapter.

    The files are in a temporary directory, which is deleted with the returned object. Raises the store's errors,
    TimeoutError after FETCH_DEADLINE_S, and InvalidStateError for a policy without a config.json or with a number
    format that vLLM does not take.
    """
    async with asyncio.timeout(FETCH_DEADLINE_S):
        return await asyncio.to_thread(_fetch_model, store, request)


def _fetch_model(store: ObjectStore, request: pb.UpdatePolicyRequest) -> PolicyModel:
    """Download the files of the request's policy into a temporary directory (blocking), and find out its number
    format.
    """
    manifest = read_manifest(store, request.policy.manifest_key, request.policy.manifest_sha256)
    if manifest.adapter is not None:  # an adapter is loaded onto its base, which is the model
        manifest = read_manifest(store, manifest.adapter.base_key)
    files = pull_files(store, manifest)
    if "config.json" not in files:
        raise InvalidStateError(
            f"policy {request.policy.version} has no config.json (its files: {', '.join(sorted(files)) or 'none'})",
            reason="MODEL_CONFIG_MISSING",
            remedy="publish the policy with its config.json and tokenizer files",
        )
    dtypes = {entry.dtype for entry in manifest.tensors}
    known = [name for name in _DTYPES if name in dtypes]
    known = [name for name in known if name != "float32" or len(known) == 1]  # beside another one it is what is kept
    if len(known) != 1:
        raise InvalidStateError(
            f"policy {request.policy.version} has tensors of {', '.join(sorted(dtypes))}; vLLM takes one of "
            f"{', '.join(_DTYPES)}",
            reason="POLICY_DTYPE_MIXED",
            remedy="publish the weights in one floating-point format (trainer.model.publish_dtype)",
        )
    return PolicyModel(owner=write_files(files), dtype=known[0], name=f"policy {request.policy.version}")


def describe(error: BaseException) -> str:
    """Return the text of an error for a status: the message of Millrace's own errors, else the class and text."""
    return str(error) if isinstance(error, MillraceError) else f"{type(error).__name__}: {error}"


def _nothing_generates() -> InternalError | InvalidStateError:
    """Make the error for a request to pause or resume a replica whose vLLM is not up."""
    return InvalidStateError(
        "this replica generates nothing: its vLLM is not up yet", reason="ENGINE_NOT_READY", remedy="try again later"
    )
