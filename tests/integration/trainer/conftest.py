"""A tiny model and recorded logs: real Redis, a real store, batches made of tokens the model itself sampled."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import pytest
import torch

from millrace.config.sections.rl import RLConfig
from millrace.internal.v1 import batch_pb2, worker_service_pb2, worker_service_pb2_grpc
from millrace.local.redis import free_port
from millrace.rollouts.batch_wire import pack_batch
from millrace.rollouts.types import TrainSample
from millrace.runlog import EventReader, RunLog, Stream, chain_hash, commit_batch, new_uid, open_redis
from millrace.runlog.records.run_record import load_origin
from millrace.storage.local import LocalStore
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.job import JobContext, run_job
from millrace.trainer.log.background import BackgroundLoop, StopRequested
from millrace.trainer.publish.executor import Executor
from millrace.v1 import event_pb2
from millrace_testing.forked_services import ForkedService, ServiceHost
from millrace_testing.model_files import write_tokenizer
from millrace_testing.polling import until

PREFIX = "t"
VOCABULARY = 64
WAITS_S = 240.0
"""What happens within seconds is waited for so long: a busy machine is many times slower."""
TIMEOUT_S = 600


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a Qwen3 of a few thousand parameters and tied embeddings."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="session")
def dropout_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the same with dropout, which is active only where `trainer.model.dropout` asks for it."""
    return make_tiny_model(tmp_path_factory.mktemp("dropout-model"), attention_dropout=0.3)


def make_tiny_model(directory: Path, *, attention_dropout: float = 0.0) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        attention_dropout=attention_dropout,
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
        initializer_range=0.08,
        max_position_embeddings=64,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return write_tokenizer(directory, num_tokens=VOCABULARY)


def make_samples(step: int, *, count: int = 12, version: int | None = None) -> list[TrainSample]:
    """Return random samples of different lengths, a pure function of the step; without a `version` each is of two.

    Their log-probs are no policy's, so the trainer would rightly say of samples of its own version that they are wrong.
    """
    rng = np.random.default_rng(1000 + step)
    samples = []
    for index in range(count):
        length = int(rng.integers(6, 20))
        prompt = int(rng.integers(1, 4))
        mask = np.zeros(length, np.uint8)
        mask[prompt:] = 1
        logprobs = np.where(mask, rng.normal(-4.0, 0.3, length), 0.0).astype(np.float32)
        advantage = float(rng.normal())
        samples.append(
            TrainSample(
                token_ids=rng.integers(0, VOCABULARY, length).astype(np.int32),
                loss_mask=mask,
                inference_logprobs=logprobs,
                advantages=(mask * advantage).astype(np.float32),
                ordinal=step * count + index,
                member=0,
                attempt=0,
                env="a" if index % 2 else "b",
                reward=advantage,
                temperature=1.0,
                min_version=max(step - 1, 0) if version is None else version,
                max_version=max(step, 1) if version is None else version,
                lineage=0,
            )
        )
    return samples


class Recorder:
    """Writes and reads one run's log from synchronous tests, on a loop of its own."""

    def __init__(self, background: BackgroundLoop, store: LocalStore, redis_url: str) -> None:
        self.background = background
        self.store = store
        self.redis_url = redis_url
        self.uid = new_uid()
        self.chain = b""
        self.log: RunLog
        self.epoch: Any = None

    make_samples = staticmethod(make_samples)

    prefix = PREFIX

    @property
    def store_url(self) -> str:
        return self.store.uri("x").removesuffix("/x")

    @property
    def root(self) -> str:
        return f"{PREFIX}/runs/{self.uid}/"

    def call(self, coroutine: Any) -> Any:
        return self.background.call(coroutine, what="test", timeout_s=WAITS_S)

    def create(self, config: RLConfig) -> None:
        async def create() -> None:
            redis = open_redis(self.redis_url)
            record = {"name": "tiny-run", "config": json.loads(config.resolved_json()), "run_hash": "ab" * 32}
            self.log = await RunLog.create(redis, self.store, PREFIX, self.uid, json.dumps(record).encode())
            self.epoch = await self.log.acquire_epoch("orchestrator", "test")

        self.call(create())
        self.chain = load_origin(self.store, self.log.names).chain_hash

    def commit(self, step: int, samples: list[TrainSample], *, closing: bool = False) -> None:
        header = batch_pb2.BatchHeader(
            run_uid=self.uid,
            kind=batch_pb2.BATCH_KIND_CLOSE if closing else batch_pb2.BATCH_KIND_TRAIN,
            step=step,
            previous_chain_hash=self.chain,
            run_hash="ab" * 32,
            reward_mean=float(np.mean([s.reward for s in samples])) if samples else 0.0,
            num_rollouts=len(samples),
            outcome=batch_pb2.RUN_OUTCOME_SUCCEEDED if closing else batch_pb2.RUN_OUTCOME_UNSPECIFIED,
            final_version=step if closing else 0,
        )
        chunks = pack_batch(header, samples)
        data = self.call(commit_batch(self.log, self.epoch, header, chunks, b""))
        self.chain = chain_hash(self.chain, data)

    def record(self, config: RLConfig, *, steps: int, close: bool = True) -> None:
        self.create(config)
        for step in range(steps):
            self.commit(step, make_samples(step))
        if close:
            self.commit(steps, make_samples(steps, count=4, version=steps), closing=True)

    def events(self) -> list[event_pb2.Event]:
        return list(self.call(EventReader(self.log).read()))

    def digests(self) -> dict[int, str]:
        """Return digest by version of every published policy."""
        found = {}
        for prefix in self.store.list_prefixes(f"{PREFIX}/runs/{self.uid}/policies/"):
            if self.store.head(prefix + "manifest.json") is None:
                continue  # being uploaded
            manifest = json.loads(self.store.get(prefix + "manifest.json"))
            found[manifest["version"]] = manifest["digest"]
        return found

    def forget_training(self) -> None:
        """Leaves of the run what was recorded: its batches. Everything that a trainer made of them goes."""
        for part in ("policies/", "checkpoints/"):
            for info in list(self.store.list(self.root + part)):
                self.store.delete(info.key)
        self.call(self.log.command("forgetting", "DEL", self.log.names.stream(Stream.POLICIES)))

    def checkpoints(self) -> list[int]:
        root = f"{PREFIX}/runs/{self.uid}/checkpoints/"
        return [
            int(prefix.removeprefix(root).rstrip("/"))
            for prefix in self.store.list_prefixes(root)
            if self.store.head(prefix + "manifest.json")
        ]

    def train(
        self,
        *,
        stop_at: int | None = None,
        stop: Callable[[], bool] | None = None,
        damage: Callable[[], Any] = lambda: None,
        executor: Executor = Executor.THREAD,
    ) -> int:
        """Return trains in this process until the end, or until version `stop_at` is reached; returns the version."""
        reached = [0]
        context = JobContext(
            background=self.background,
            store=self.store,
            redis_url=self.redis_url,
            prefix=PREFIX,
            gang=Gang(),
            owner="trainer-test",
            slot="test/trainer",
            should_stop=stop or (lambda: stop_at is not None and reached[0] >= stop_at),
            on_epoch=lambda epoch: None,
            on_progress=lambda version: reached.__setitem__(0, version),
            damage=damage,
            store_url=self.store_url,
            executor=executor,
        )
        try:
            run_job(context, self.uid)
        except StopRequested:
            assert stop_at is not None or stop is not None
        finally:
            context.gang.leave()
        return reached[0]


class FakeOrchestrator(worker_service_pb2_grpc.WorkerServiceServicer):
    """Assigns one run and remembers what the trainer says."""

    def __init__(self) -> None:
        self.address = ""
        self.worker: worker_service_pb2.Worker | None = None
        self.run_uid = ""
        self.let_go: list[str] = []
        self.status = worker_service_pb2.TrainerStatus()
        self.is_leaving = False
        self.waits: list[str] = []

    async def RegisterWorker(self, request: Any, context: Any) -> worker_service_pb2.RegisterWorkerResponse:
        self.worker = request.worker
        return worker_service_pb2.RegisterWorkerResponse(heartbeat_seconds=0.1, lease_seconds=10)

    async def Heartbeat(self, request: Any, context: Any) -> worker_service_pb2.HeartbeatResponse:
        self.status, self.is_leaving = request.trainer, request.is_leaving
        self.waits = [wait.reason for wait in request.waits]
        assignments = [worker_service_pb2.Assignment(run_uid=self.run_uid)] if self.run_uid else []
        return worker_service_pb2.HeartbeatResponse(assignments=assignments, let_go=self.let_go)

    async def until(self, condition: Callable[[worker_service_pb2.TrainerStatus], bool]) -> None:
        await until(lambda: self.worker is not None and condition(self.status), timeout_s=WAITS_S)


@pytest.fixture
async def orchestrator() -> AsyncIterator[FakeOrchestrator]:
    server = grpc.aio.server()
    servicer = FakeOrchestrator()
    worker_service_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server)
    servicer.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield servicer
    await server.stop(0)


class TrainerProcesses:
    """Starts `python -m millrace.trainer.main`, each time in the same place, as a supervisor would."""

    def __init__(self, orchestrator: FakeOrchestrator, log_path: Path, host: ServiceHost) -> None:
        self.listen = f"127.0.0.1:{free_port()}"
        self.log_path = log_path
        self._orchestrator = orchestrator
        self._host = host
        self._started: list[subprocess.Popen[bytes] | ForkedService] = []

    def start(self, recorder: Recorder, *arguments: str, **environ: str) -> subprocess.Popen[bytes]:
        """`arguments` replace `-m millrace.trainer.main`."""
        command = [sys.executable, *(arguments or ("-m", "millrace.trainer.main"))]
        with self.log_path.open("ab") as log:
            process = subprocess.Popen(
                command, env=self._variables(recorder, environ), stdout=log, stderr=subprocess.STDOUT
            )
        self._started.append(process)
        return process

    def fork(self, recorder: Recorder, **environ: str) -> ForkedService:
        """Return the same from a process that has torch imported: for what is started again and again."""
        process = self._host.start(self._variables(recorder, environ), self.log_path)
        self._started.append(process)
        return process

    def _variables(self, recorder: Recorder, environ: dict[str, str]) -> dict[str, str]:
        return {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "MILLRACE_REDIS_URL": recorder.redis_url,
            "MILLRACE_STORE_URL": recorder.store_url,
            "MILLRACE_PREFIX": recorder.prefix,
            "MILLRACE_ORCHESTRATOR": self._orchestrator.address,
            "MILLRACE_LISTEN": self.listen,
            "MILLRACE_DRAIN_S": "0",
            **environ,
        }

    def kill_all(self) -> None:
        for process in self._started:
            process.kill()
            process.wait(10)


@pytest.fixture(scope="session")
def trainer_host() -> Iterator[ServiceHost]:
    host = ServiceHost("millrace.trainer.main")
    yield host
    host.close()


@pytest.fixture
def trainers(orchestrator: FakeOrchestrator, trainer_host: ServiceHost, tmp_path: Path) -> Iterator[TrainerProcesses]:
    processes = TrainerProcesses(orchestrator, tmp_path / "trainer.log", trainer_host)
    yield processes
    processes.kill_all()


@pytest.fixture
def background() -> Iterator[BackgroundLoop]:
    with BackgroundLoop("test-background") as loop:
        yield loop


@pytest.fixture
def recorder(background: BackgroundLoop, local_store: LocalStore, redis_url: str) -> Recorder:
    return Recorder(background, local_store, redis_url)


@pytest.fixture
def new_recorder(background: BackgroundLoop, local_store: LocalStore, redis_url: str) -> Callable[[], Recorder]:
    """Return makes recorders: several runs in one store."""
    return lambda: Recorder(background, local_store, redis_url)


@pytest.fixture(scope="module")
def recorder_of_module(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> Iterator[Recorder]:
    """Yield a recorder whose run several tests read."""
    with BackgroundLoop("test-module") as loop:
        yield Recorder(loop, LocalStore(tmp_path_factory.mktemp("module") / "store"), redis_url)


@pytest.fixture(scope="session")
def make_config(tiny_model: Path) -> Callable[..., RLConfig]:
    """Return a config of the tiny model; keyword arguments are merged into `trainer`."""

    def make(*, name: str = str(tiny_model), max_steps: int = 6, seed: int = 0, **trainer: Any) -> RLConfig:
        defaults: dict[str, Any] = {
            "optim": {"lr": 0.01},
            "model": {"seq_len": 32},
            "micro_batch_tokens": 64,
        }
        return RLConfig.model_validate(
            {
                "max_steps": max_steps,
                "seed": seed,
                "seq_len": 32,
                "model": {"name": name},
                "trainer": {**defaults, **trainer},
                "orchestrator": {"env": [{"id": "reverse-text"}], "batch_size": 8, "rollouts_per_example": 4},
            }
        )

    return make


@pytest.fixture(autouse=True)
def _no_pending(background: BackgroundLoop) -> Iterator[None]:
    """Yield gives the loop a turn at the end, so that failures of its tasks are seen in the test that made them."""
    yield
    background.call(asyncio.sleep(0), what="settle", timeout_s=WAITS_S)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """These tests start processes and train; on a busy machine that takes long, and is no finding."""
    for item in items:
        if item.path.parent == Path(__file__).parent and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))
