"""A fresh run in a real Redis and a real directory store for every test."""

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest
import redis.asyncio as redis_asyncio

from millrace.cli.main import main
from millrace.internal.v1 import batch_pb2
from millrace.local.redis import EmbeddedRedis
from millrace.rollouts.batch_wire import pack_batch
from millrace.rollouts.types import TrainSample
from millrace.runlog import Frontier, RunLog, new_uid, open_redis
from millrace.runlog.records.run_record import load_origin
from millrace.storage.local import LocalStore

RunJson = Callable[..., bytes]
MakeBatch = Callable[..., tuple[batch_pb2.BatchHeader, list[bytes]]]
RunCommand = Callable[..., tuple[int, str, str]]


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[redis_asyncio.Redis]:
    client = open_redis(redis_url)
    yield client
    await client.aclose()


class DurableRedis:
    """A Redis of one test, with an append-only file, that can be killed, wiped, and made to forget its tail."""

    def __init__(self, directory: Path) -> None:
        self.server = EmbeddedRedis(directory, append_only="always")
        self.client = open_redis(self.server.url)

    @property
    def _file(self) -> Path:
        return self.server.directory / "appendonlydir"

    async def restart(self) -> None:
        """`kill -9`, then start again on the same file."""
        await asyncio.to_thread(self.server.kill)
        await asyncio.to_thread(self.server.start)

    async def mark(self) -> None:
        """Remember what the file holds now."""
        shutil.rmtree(self.server.directory / "marked", ignore_errors=True)
        await asyncio.to_thread(shutil.copytree, self._file, self.server.directory / "marked")

    async def lose_tail(self) -> None:
        """`kill -9`, and start again on what the file held at the mark: the rest was never synced."""
        await asyncio.to_thread(self.server.kill)
        shutil.rmtree(self._file)
        await asyncio.to_thread(shutil.copytree, self.server.directory / "marked", self._file)
        await asyncio.to_thread(self.server.start)


@pytest.fixture
async def durable(tmp_path: Path) -> AsyncIterator[DurableRedis]:
    durable = DurableRedis(tmp_path / "durable")
    await asyncio.to_thread(durable.server.start)
    yield durable
    await durable.client.aclose()
    await asyncio.to_thread(durable.server.kill)


@pytest.fixture
async def durable_log(durable: DurableRedis, local_store: LocalStore, prefix: str, run_json: RunJson) -> RunLog:
    return await RunLog.create(durable.client, local_store, prefix, new_uid(), run_json())


@pytest.fixture
def prefix(tmp_path) -> str:
    return f"t{new_uid()}"


@pytest.fixture
def run_json() -> RunJson:
    def make(**fields: object) -> bytes:
        return json.dumps({"name": "demo", "run_hash": "ab" * 32, **fields}, sort_keys=True).encode()

    return make


@pytest.fixture
async def log(redis: redis_asyncio.Redis, local_store: LocalStore, prefix: str, run_json: RunJson) -> RunLog:
    return await RunLog.create(redis, local_store, prefix, new_uid(), run_json())


@pytest.fixture
def make_batch(log: RunLog) -> MakeBatch:
    """Build the header and chunks of a step; ordinals `2 * step` and `2 * step + 1` are trained."""

    def make(
        step: int,
        *,
        chain: bytes | None = None,
        num_tokens: int = 50,
        target_chunk_bytes: int = 700,
        seed: int = 0,
    ) -> tuple[batch_pb2.BatchHeader, list[bytes]]:
        rng = np.random.default_rng([seed, step])
        samples = []
        for member in range(4):
            mask = rng.integers(0, 2, num_tokens).astype(np.uint8)
            samples.append(
                TrainSample(
                    token_ids=rng.integers(0, 1000, num_tokens).astype(np.int32),
                    loss_mask=mask,
                    inference_logprobs=(-rng.random(num_tokens) * mask).astype(np.float32),
                    advantages=rng.standard_normal(num_tokens).astype(np.float32),
                    ordinal=2 * step + member // 2,
                    member=member % 2,
                    attempt=0,
                    env="e",
                    reward=0.5,
                    temperature=1.0,
                    min_version=step,
                    max_version=step,
                    lineage=0,
                )
            )
        header = batch_pb2.BatchHeader(
            run_uid=log.uid,
            kind=batch_pb2.BATCH_KIND_TRAIN,
            step=step,
            previous_chain_hash=chain or load_origin(log.store, log.names).chain_hash,
        )
        Frontier(2 * step).resolve([2 * step, 2 * step + 1]).fill(header)
        return header, pack_batch(header, samples, target_chunk_bytes=target_chunk_bytes)

    return make


@pytest.fixture
def run_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunCommand:
    """`millrace run VERB demo` on the store of a recorded run, in this process; returns exit code, output and errors.

    A command makes its own event loop, so what calls it is no coroutine.
    """
    for name in [name for name in os.environ if name.startswith("MILLRACE_")]:
        monkeypatch.delenv(name)

    def command(verb: str, run, *options: str) -> tuple[int, str, str]:
        store = run.store.uri("x").removesuffix("/x")
        code = main(["run", verb, "demo", "--store", store, "--prefix", run.names.prefix, *options])
        out, err = capsys.readouterr()
        return code, out, err

    return command
