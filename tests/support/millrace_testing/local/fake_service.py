"""A service process for tests of the stack; `fake_<service>.py` call `main` with the service's name.

It serves health on MILLRACE_LISTEN. As the orchestrator it serves a RunService whose runs end by themselves after three
steps, with a real policy in the store. What goes wrong is chosen by variables: FAKE_DIE (names that exit at once),
FAKE_DIE_LATER (names that exit 7 when a run is created), FAKE_DEAF (names that never get healthy), FAKE_FAIL (the run
fails), FAKE_SLOW (the run does not end).
"""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import grpc.aio
import redis

from millrace.errors import AlreadyExistsError
from millrace.policies.manifest import PolicyPlace, Probe
from millrace.policies.publish import PolicyContents, publish_policy
from millrace.policies.tensors import TensorBytes
from millrace.processes import lifeline
from millrace.rpc.serve import Shutdown, serve
from millrace.storage import open_store
from millrace.telemetry.settings import Settings
from millrace.v1 import run_pb2
from millrace.v1 import run_service_pb2 as rs
from millrace.v1.run_service_pb2_grpc import RunServiceServicer, add_RunServiceServicer_to_server
from millrace_testing.runlog.recorded_run import recorded, state


def chosen(variable: str, name: str) -> bool:
    return name in os.environ.get(variable, "").split(",")


class FakeRuns(RunServiceServicer):
    """One run at a time; its events are those of `recorded_run`."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.runs: dict[str, run_pb2.Run] = {}
        self.events: list = []
        # Both are reachable, as the environment says.
        redis.Redis.from_url(settings.require("redis_url")).set("fake", "1")

    async def CreateRun(self, request, context):
        name = f"runs/{request.run_id or 'made-up'}"
        if name in self.runs:
            raise AlreadyExistsError(f"{name} exists")
        run = run_pb2.Run(name=name, uid="u1", config_json=request.config_json, state=run_pb2.RUN_STATE_QUEUED)
        run.progress.max_steps = 3
        self.runs[name] = run
        self.events = await asyncio.to_thread(self._play)
        Path(os.environ["FAKE_FLAG"]).write_text("created")
        return rs.CreateRunResponse(run=run)

    def _play(self) -> list:
        store = open_store(self.settings.require("store_url"))
        policy = publish_policy(
            store,
            PolicyPlace(prefix=self.settings.prefix, uid="u1", lineage=0, version=3),
            PolicyContents(
                tensors=[("w", TensorBytes(dtype="float32", shape=(2,), data=memoryview(bytes(8))))],
                files={"config.json": b"{}"},
                probe=Probe(token_ids=(1,), logprobs=()),
            ),
            epoch=1,
        )
        key = f"{self.settings.prefix}/runs/u1/checkpoints/00000003/manifest.json"
        store.create(key, b"{}")
        events = recorded(policy_uri=store.uri(policy.manifest_key), checkpoint_uri=store.uri(key))
        if os.environ.get("FAKE_FAIL"):
            error = run_pb2.RunError(
                reason="ENV_LOAD_FAILED", message="load_environment raised", component="env-server"
            )
            return [*events[:2], state(3, "STARTING", "FAILED", "", error=error)]
        return events

    async def GetRun(self, request, context):
        from millrace.errors import NotFoundError

        if request.name not in self.runs:
            raise NotFoundError(f"no run {request.name}", reason="RUN_NOT_FOUND")
        run = run_pb2.Run()
        run.CopyFrom(self.runs[request.name])
        run.state = next(e.state_changed.new_state for e in reversed(self.events) if e.HasField("state_changed"))
        return rs.GetRunResponse(run=run)

    async def ListRuns(self, request, context):
        return rs.ListRunsResponse(runs=reversed(self.runs.values()))

    async def WatchRun(self, request, context):
        for number, event in enumerate(self.events, 1):
            if number <= int(request.after or 0):
                continue
            if os.environ.get("FAKE_SLOW") and number == 8:
                await asyncio.sleep(600)
            event.cursor = str(number)
            yield rs.WatchRunResponse(event=event)
            await asyncio.sleep(0.01)


async def serve_fake(name: str) -> None:
    settings = Settings.from_env(os.environ, required=["redis_url", "store_url", "listen"])

    def register(server: grpc.aio.Server, draining: asyncio.Event) -> list[str]:
        if name == "orchestrator":
            add_RunServiceServicer_to_server(FakeRuns(settings), server)
            return ["millrace.v1.RunService"]
        return []

    shutdown = Shutdown(drain_s=settings.drain_s, grace_s=settings.grace_s)
    await serve(settings.require("listen"), register, shutdown=shutdown)


def main(name: str) -> int:
    """Run as the service `name`, and return the exit code."""
    lifeline.hold()
    print(f"{name} starts", flush=True)
    if chosen("FAKE_DIE", name):
        raise SystemExit(f"{name} cannot start: no such model")
    if chosen("FAKE_DEAF", name):
        time.sleep(600)
    if name == "env-server":  # a worker in a session of its own, as the real one has
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    if chosen("FAKE_DIE_LATER", name):
        asyncio.run(_until_created())
        print("out of memory", flush=True)
        os._exit(7)
    asyncio.run(serve_fake(name))
    return 0


async def _until_created() -> None:
    settings = Settings.from_env(os.environ)
    stop = asyncio.Event()
    shutdown = Shutdown(drain_s=0, grace_s=0)
    serving = asyncio.create_task(serve(settings.require("listen"), lambda *_: [], shutdown=shutdown, stopping=stop))
    while not Path(os.environ["FAKE_FLAG"]).exists():
        await asyncio.sleep(0.05)
    serving.cancel()
