"""A RunService in another thread, for commands that bring their own event loop."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator

import grpc.aio

from millrace.errors import InvalidStateError, NotFoundError, PermissionDeniedError
from millrace.rpc.status import abort
from millrace.v1 import checkpoint_pb2, event_pb2, lineage_pb2, metric_pb2, rollout_pb2, run_pb2
from millrace.v1 import run_service_pb2 as rs
from millrace.v1.run_service_pb2_grpc import RunServiceServicer, add_RunServiceServicer_to_server
from millrace_testing.runlog.recorded_run import START, recorded


class FakeRuns(RunServiceServicer):
    """Keeps runs in a dict, newest last; all have the same events."""

    def __init__(self) -> None:
        self.runs: dict[str, run_pb2.Run] = {}
        self.events = recorded()
        self.requests: list[rs.CreateRunRequest] = []
        self.deletions: list[rs.DeleteRunRequest] = []
        self.is_denied = False
        self.reasons: list[str] = []

    def add(self, name: str, state: run_pb2.RunState = run_pb2.RUN_STATE_RUNNING) -> run_pb2.Run:
        run = run_pb2.Run(name=f"runs/{name}", uid=f"uid-{name}", kind=run_pb2.RUN_KIND_RL, state=state)
        run.progress.CopyFrom(run_pb2.RunProgress(step=2, max_steps=3, policy_version=2, reward=0.55, num_tokens=28400))
        run.progress.num_rollouts = 16
        run.create_time.FromSeconds(START)
        self.runs[run.name] = run
        return run

    async def CreateRun(self, request, context):
        self.requests.append(request)
        return rs.CreateRunResponse(run=self.add(request.run_id or "made-up", run_pb2.RUN_STATE_QUEUED))

    async def GetRun(self, request, context):
        if self.is_denied:
            await abort(context, PermissionDeniedError("you may not see runs", remedy="ask for a token"))
        if request.name not in self.runs:
            await abort(context, NotFoundError(f"no run {request.name}", reason="RUN_NOT_FOUND"))
        return rs.GetRunResponse(run=self.runs[request.name])

    async def ListRuns(self, request, context):
        runs = [run for run in reversed(self.runs.values()) if not request.states or run.state in request.states]
        runs = [run for run in runs if request.tenant in ("", run.tenant)]
        return rs.ListRunsResponse(runs=runs[: request.page_size])

    async def ListUsage(self, request, context):
        used = [
            rs.TenantUsage(num_runs=1, prompt_tokens=5),
            rs.TenantUsage(
                tenant="acme", num_runs=2, accelerator_seconds=5400, sampled_tokens=70, stored_bytes=1 << 40
            ),
        ]
        return rs.ListUsageResponse(tenants=[each for each in used if request.tenant in ("", each.tenant)])

    async def CancelRun(self, request, context):
        if self.runs[request.name].state == run_pb2.RUN_STATE_SUCCEEDED:
            await abort(context, InvalidStateError("the run has ended", reason="RUN_ENDED"))
        return rs.CancelRunResponse(run=self.runs[request.name])

    async def PauseRun(self, request, context):
        run = self.runs[request.name]
        if run.state == run_pb2.RUN_STATE_SUCCEEDED:
            await abort(context, InvalidStateError("the run has ended", reason="RUN_ENDED"))
        run.state = run_pb2.RUN_STATE_PAUSED
        self.reasons.append(request.reason)
        return rs.PauseRunResponse(run=run)

    async def ResumeRun(self, request, context):
        run = self.runs[request.name]
        if run.state in (run_pb2.RUN_STATE_PAUSED, run_pb2.RUN_STATE_FAILED):
            run.state = run_pb2.RUN_STATE_QUEUED
        return rs.ResumeRunResponse(run=run)

    async def DeleteRun(self, request, context):
        self.deletions.append(request)
        run = self.runs.get(request.name) or next(run for run in self.runs.values() if run.uid == request.name)
        return rs.DeleteRunResponse(uid=run.uid, objects=[rs.DeletedObjects(kind="batch header", count=2)])

    async def WatchRun(self, request, context):
        for number, event in enumerate(self.events, 1):
            if number > int(request.after or 0):
                event.cursor = str(number)
                yield rs.WatchRunResponse(event=event)

    async def ListCheckpoints(self, request, context):
        saved = checkpoint_pb2.Checkpoint(name=f"{request.parent}/checkpoints/2", step=2, uri="file:///c/2")
        return rs.ListCheckpointsResponse(checkpoints=[saved])

    async def GetLineage(self, request, context):
        if request.WhichOneof("subject") == "version":
            await abort(context, NotFoundError("the run has no policy version 9", reason="VERSION_NOT_FOUND"))
        rollout = rollout_pb2.Rollout(name=f"{request.name}/rollouts/{request.rollout}", env="letters", status="ok")
        made_by = [lineage_pb2.TracedVersion(version=1, num_tokens=3, is_known=True)]
        return rs.GetLineageResponse(rollout=lineage_pb2.RolloutLineage(rollout=rollout, made_by=made_by))

    async def ListMetrics(self, request, context):
        first = int(request.page_token or 0)
        values = {"reward/mean": 0.25 * first, "loss/mean": 1.0 - 0.25 * first, "time/step": 2.0}
        for name in request.names:
            if name.startswith("eval/") and first % 2 == 0:  # every second step
                values[name] = 0.125 * first
        token = "" if first == 3 else str(first + 1)
        step = metric_pb2.StepMetrics(step=first, values=values)
        return rs.ListMetricsResponse(steps=[step], next_page_token=token)

    async def ExplainRun(self, request, context):
        wait = event_pb2.Wait(owner="trainer-0", reason="batch 3", waits_on="orchestrator", age_seconds=3.25)
        return rs.ExplainRunResponse(waits=[wait], summary="trainer <- orchestrator <- env-server")


@contextlib.asynccontextmanager
async def served(servicer: RunServiceServicer) -> AsyncIterator[str]:
    """Serve it in this event loop, and yield host:port."""
    server = grpc.aio.server()
    add_RunServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@contextlib.contextmanager
def serving(servicer: RunServiceServicer) -> Iterator[str]:
    """Serve it in a thread, and yield host:port."""
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()
    started = threading.Event()
    address: list[str] = []

    async def serve() -> None:
        async with served(servicer) as place:
            address.append(place)
            started.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert started.wait(10)
        yield address[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()
