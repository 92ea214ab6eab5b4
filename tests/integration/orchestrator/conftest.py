import asyncio
import traceback
from contextlib import AsyncExitStack

import grpc
import pytest

from millrace.internal.v1 import (
    env_service_pb2_grpc,
    policy_service_pb2_grpc,
    worker_service_pb2,
)
from millrace.orchestrator import workers
from millrace.orchestrator.drive import housekeeping, policy_driver
from millrace.orchestrator.serve import serve_orchestrator
from millrace.rpc.channel import open_channel
from millrace.runlog import open_redis
from millrace.storage import open_store
from millrace.telemetry.settings import Settings
from millrace.v1 import run_service_pb2_grpc
from millrace_testing.orchestrator.fakes import FakeEnvServer, FakeReplica, FakeTrainer, worker
from millrace_testing.patience import patient


class Stack:
    """An orchestrator in this process, with fake workers that are started on demand."""

    def __init__(self, redis_url: str, store_url: str, prefix: str) -> None:
        self.redis_url, self.store_url, self.prefix = redis_url, store_url, prefix
        self.exit = AsyncExitStack()
        self.lives: dict[str, AsyncExitStack] = {}
        self.replica = FakeReplica()
        self.replicas: list[FakeReplica] = []
        self.orchestrator: asyncio.Task | None = None
        self.address = ""
        self.channels: list[grpc.aio.Channel] = []
        self.custom_code = ""
        self.queue_groups = ""
        self.dashboard_listen: str | None = None

    async def start(self) -> None:
        self.deps = {"redis": open_redis(self.redis_url), "store": open_store(self.store_url), "prefix": self.prefix}
        self.exit.push_async_callback(self.deps["redis"].aclose)
        await self.start_orchestrator()
        self.channel = await self.exit.enter_async_context(open_channel(self.address))
        self.channels.append(self.channel)
        self.runs = run_service_pb2_grpc.RunServiceStub(self.channel)

    async def start_orchestrator(self, port: int = 0) -> None:
        started: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        settings = Settings(
            redis_url=self.redis_url,
            store_url=self.store_url,
            prefix=self.prefix,
            listen=f"127.0.0.1:{port}",
            drain_s=0.0,
            grace_s=1.0,
            custom_code=self.custom_code,
            queue_groups=self.queue_groups,
            dashboard_listen=self.dashboard_listen,
        )
        self.orchestrator = asyncio.create_task(
            serve_orchestrator(settings, on_started=started.set_result, handle_signals=False)
        )
        done, _ = await asyncio.wait({started, self.orchestrator}, return_when=asyncio.FIRST_COMPLETED, timeout=20)
        if self.orchestrator in done:
            self.orchestrator.result()
        self.orchestrator.add_done_callback(_report)
        self.address = f"127.0.0.1:{started.result()}"
        for channel in self.channels:  # those that met nobody at its port fail calls until they have tried again
            await asyncio.wait_for(channel.channel_ready(), patient(20.0))

    async def kill_orchestrator(self) -> None:
        """End it at whatever await it is. It still gives its lease back: a real `kill -9` is tests/e2e's."""
        assert self.orchestrator is not None
        self.orchestrator.cancel()
        await asyncio.gather(self.orchestrator, return_exceptions=True)

    async def env_server(self, **options) -> FakeEnvServer:
        servicer = FakeEnvServer(self.deps, self.replica, replicas=self.replicas, **options)
        context = worker(
            self.address,
            worker_service_pb2.WORKER_KIND_ENV_SERVER,
            servicer.worker_id,
            servicer=servicer,
            adder=env_service_pb2_grpc.add_EnvServiceServicer_to_server,
            on_assignments=servicer.on_assignments,
            slot=servicer.slot,
            image=servicer.image,
        )
        life = self.lives[servicer.worker_id] = await self.exit.enter_async_context(AsyncExitStack())
        servicer.address = await life.enter_async_context(context)
        return servicer

    async def kill_worker(self, worker_id: str) -> None:
        """End a worker: it neither answers nor sends heartbeats any more."""
        await self.lives.pop(worker_id).aclose()

    async def inference(self, worker_id: str = "") -> FakeReplica:
        """Start `self.replica`, or another one under an id of its own."""
        replica = FakeReplica(worker_id=worker_id) if worker_id else self.replica
        life = self.lives[replica.worker_id] = await self.exit.enter_async_context(AsyncExitStack())
        replica.address = await life.enter_async_context(
            worker(
                self.address,
                worker_service_pb2.WORKER_KIND_INFERENCE,
                replica.worker_id,
                servicer=replica,
                adder=policy_service_pb2_grpc.add_PolicyServiceServicer_to_server,
                report=lambda: worker_service_pb2.HeartbeatRequest(policy=replica.status),
            )
        )
        self.replicas.append(replica)
        return replica

    async def trainer(self, **options) -> FakeTrainer:
        trainer = FakeTrainer(self.deps, **options)
        life = self.lives[trainer.worker_id] = await self.exit.enter_async_context(AsyncExitStack())
        await life.enter_async_context(
            worker(
                self.address,
                worker_service_pb2.WORKER_KIND_TRAINER,
                trainer.worker_id,
                report=trainer.report,
                on_assignments=trainer.on_assignments,
            )
        )
        return trainer

    async def stop(self) -> None:
        await self.exit.aclose()
        await self.kill_orchestrator()


def _report(task: asyncio.Task) -> None:
    """Show what ended the orchestrator: a test only sees its calls fail."""
    if not task.cancelled() and (error := task.exception()) is not None:
        traceback.print_exception(error)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorter intervals: the order of things stays, the tests take a third of the time."""
    monkeypatch.setattr(workers, "HEARTBEAT_S", 0.2)
    monkeypatch.setattr(policy_driver, "RESCAN_S", 0.1)
    monkeypatch.setattr(housekeeping, "LOG_LOOK_S", 0.5)


@pytest.fixture
def stack_urls(redis_url, tmp_path) -> tuple[str, str]:
    return redis_url, f"file://{tmp_path}/store"


@pytest.fixture
async def stack(redis_url, tmp_path):
    stack = Stack(redis_url, f"file://{tmp_path}/store", f"t{abs(hash(str(tmp_path))) % 10**9}")
    await stack.start()
    yield stack
    await stack.stop()
