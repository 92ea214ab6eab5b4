"""What a commit and a takeover cost at step n, and what a commit of a large batch costs in memory and loop time.

`--steps` commits that many steps of `--samples` samples, with a policy and an archive of events after each, and gives
the CPU time of the commits and of a takeover at each number. `--tokens` plays one batch of so many tokens, in rollouts
of 16,000, through the loop of a run up to its commit. Redis and the store (a directory) are real.
"""

import argparse
import asyncio
import gc
import json
import resource
import tempfile
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from report import progress, table

from millrace.algorithms import make_algorithms
from millrace.config.load import validate_document
from millrace.internal.v1 import batch_pb2, worker_service_pb2
from millrace.local.redis import EmbeddedRedis
from millrace.orchestrator.drive.assembly import assemble, make_loop
from millrace.orchestrator.drive.loop import RolloutLoop
from millrace.orchestrator.events import RunContext, RunEvents
from millrace.orchestrator.play.env_servers import OpenedEnv
from millrace.orchestrator.workers import WorkerRegistry
from millrace.rollouts.batch_wire import pack_batch
from millrace.rollouts.types import PolicySpan, Purpose, Rollout, RolloutStatus, Sample, TrainSample
from millrace.rollouts.wire import encode_rollout
from millrace.runlog import EventWriter, Frontier, Lease, RunLog, chain_hash, commit_batch, new_uid, open_redis
from millrace.runlog.records.known import KnownObjects
from millrace.runlog.records.run_record import RunRecord, load_origin
from millrace.runlog.recover import Committed, load_history
from millrace.storage import open_store

WINDOW = 50
"""Commits before each number of steps whose mean is given."""
ROLLOUT_TOKENS, GROUP_SIZE = 16_000, 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    parser.add_argument("--steps", type=int, nargs="*", default=[100, 400, 1600])
    parser.add_argument("--samples", type=int, default=1024, help="samples of each of these steps, of 4 tokens")
    parser.add_argument("--tokens", type=int, nargs="*", default=[1_000_000, 4_000_000, 16_000_000])


def report(options: argparse.Namespace) -> str:
    """Measure every size; the tables as Markdown."""
    parts = [f"## Commits\n\nSteps of {options.samples} samples of 4 tokens; means of {WINDOW} commits."]
    if options.steps:
        heads = ["step", "commit, ms of CPU", "takeover, s of CPU", "takeover, s", "takeover, MB"]
        parts.append(table(heads, asyncio.run(_measure_steps(options.steps, options.samples))))
    if options.tokens:
        heads = [
            "tokens",
            "commit, s of CPU",
            "s",
            "loop blocked, ms (wall)",
            "(CPU)",
            "peak, B a token",
            "of a commit",
        ]
        parts.append(table(heads, [asyncio.run(_measure_tokens(each)) for each in options.tokens]))
    return "\n\n".join(parts)


@asynccontextmanager
async def _open_run(*, batch_size: int) -> AsyncIterator[tuple[RunLog, RunRecord]]:
    with tempfile.TemporaryDirectory() as directory, EmbeddedRedis(Path(directory), append_only="none") as server:
        redis, uid = open_redis(server.url), new_uid()
        document = {
            "model": {"name": "m"},
            "seq_len": ROLLOUT_TOKENS,
            "orchestrator": {
                "batch_size": batch_size,
                "rollouts_per_example": GROUP_SIZE,
                "async_level": 8,
                "max_off_policy_steps": 100,
                "env": [{"id": "reverse-text"}],
                "sampling": {"max_tokens": 8},
            },
        }
        record = RunRecord(
            uid=uid,
            name="scale",
            kind="RL",
            config=json.loads(validate_document(document).resolved_json()),
            run_hash="ab" * 32,
            create_time="2026-01-01T00:00:00Z",
        )
        log = await RunLog.create(redis, open_store(f"file://{directory}/store"), "scale", uid, record.encode())
        yield log, record
        await redis.aclose()


# At step n.


async def _measure_steps(sizes: list[int], num_samples: int) -> list[list[object]]:
    rows: list[list[object]] = []
    async with _open_run(batch_size=num_samples) as (log, _):
        epoch, known = await log.acquire_epoch("orchestrator", "scale"), KnownObjects()
        chain, step = load_origin(log.store, log.names).chain_hash, 0
        for size in sorted(sizes):
            cpu_s = 0.0
            while step < size:
                for key in (log.names.policy_manifest(0, step), log.names.archived_events(f"1-{step}", f"1-{step}")):
                    log.store.create(key, b"{}")
                    known.announce(key.removeprefix(log.names.root))
                header = _header(log, step, chain, num_samples)
                began = time.process_time()
                stored = await commit_batch(log, epoch, header[0], header[1], b"archive", known=known)
                cpu_s += (time.process_time() - began) * (step >= size - WINDOW)
                chain, step = chain_hash(chain, stored), step + 1
            progress(f"step {step}")
            rows.append([size, *_rounded(1e3 * cpu_s / WINDOW, *await _take_over(log))])
    return rows


async def _take_over(log: RunLog) -> tuple[float, float, float]:
    """Return CPU and wall seconds of a takeover, and by how many MB the process grew."""
    gc.collect()
    before, began, wall = _rss_mb(), time.process_time(), time.perf_counter()
    committed = await load_history(log)
    found = time.process_time() - began, time.perf_counter() - wall, max(0.0, _rss_mb() - before)
    assert committed.last is not None
    return found


def _header(log: RunLog, step: int, chain: bytes, num_samples: int) -> tuple[batch_pb2.BatchHeader, list[bytes]]:
    column = np.zeros(4, np.float32)
    sample = {
        "token_ids": np.arange(4, dtype=np.int32),
        "loss_mask": np.ones(4, np.uint8),
        "inference_logprobs": column,
        "advantages": column,
    }
    samples = [
        TrainSample(
            **sample, ordinal=step * num_samples + number, member=0, attempt=0, env="reverse-text", reward=0.5,
            temperature=1.0, min_version=step, max_version=step, lineage=0,
        )
        for number in range(num_samples)
    ]  # fmt: skip
    header = batch_pb2.BatchHeader(
        run_uid=log.uid, kind=batch_pb2.BATCH_KIND_TRAIN, step=step, previous_chain_hash=chain, run_hash="ab" * 32
    )
    Frontier((step + 1) * num_samples).fill(header)
    return header, pack_batch(header, samples)


# A large batch.


async def _measure_tokens(num_tokens: int) -> list[object]:
    batch_size = max(GROUP_SIZE, num_tokens // ROLLOUT_TOKENS // GROUP_SIZE * GROUP_SIZE)
    async with _open_run(batch_size=batch_size) as (log, record):
        loop, parts = await _make_loop(log, record)
        idle = _rss_mb()
        for number in range(batch_size):
            data = encode_rollout(_rollout(log.uid, number // GROUP_SIZE, number % GROUP_SIZE))
            (await log.append_rollouts([data])).require("a rollout")
            if number % GROUP_SIZE == 0:
                await parts.stream.catch_up()
        await parts.stream.catch_up()
        await log.trim_rollouts(parts.stream.position)
        gc.collect()
        groups = loop.take()
        assert len(groups) == batch_size // GROUP_SIZE
        progress(f"{batch_size * ROLLOUT_TOKENS} tokens are read")
        held, lags = _rss_mb(), _Lags()
        watching, peak = asyncio.create_task(lags.watch()), _Peak()
        began, wall = time.process_time(), time.perf_counter()
        await loop.commit(groups)
        cpu_s, wall_s = time.process_time() - began, time.perf_counter() - wall
        watching.cancel()
        most = peak.end()
        size = batch_size * ROLLOUT_TOKENS
        await parts.context.events.close()
    per_token = [(most - base) * 2**20 / size for base in (idle, held)]
    return [size, *_rounded(cpu_s, wall_s, 1e3 * lags.wall_s, 1e3 * lags.cpu_s, *per_token)]


async def _make_loop(log: RunLog, record: RunRecord) -> tuple[RolloutLoop, Any]:
    lease = await Lease.acquire(log, "orchestrator", "scale", 600.0)
    epoch = await log.acquire_epoch("orchestrator", "scale")
    registry = WorkerRegistry()
    worker = worker_service_pb2.Worker(
        worker_id="i0", kind=worker_service_pb2.WORKER_KIND_INFERENCE, http_url="http://127.0.0.1:9"
    )
    registry.register(worker)
    events = RunEvents(EventWriter(log, "scale"), run="scale")
    context = RunContext(record=record, log=log, epoch=epoch, lease=lease, registry=registry, events=events)
    parts, config = assemble(context, record.training), record.training
    spec, name = parts.specs[0], config.orchestrator.env[0].name
    parts.envs.envs[name] = OpenedEnv(
        spec=spec, num_train=100_000, train_digest="d" * 64, num_eval=0, requires_group=False
    )
    origin = load_origin(log.store, log.names)
    parts.writer.restore(Committed(last=None, chain=origin.chain_hash, is_reopened=False), origin=origin)
    loop = make_loop(
        parts,
        config,
        algorithms=make_algorithms(config.orchestrator, context.custom_code),
        sampler=None,
        is_stopping=lambda: False,
    )
    loop.policies.served_version = lambda: 0  # type: ignore[method-assign] - no replica serves here
    parts.intake.begin(loop.make_play, has_predecessor=False)
    return loop, parts


def _rollout(uid: str, ordinal: int, member: int) -> Rollout:
    rng = np.random.default_rng([ordinal, member])
    prompt = ROLLOUT_TOKENS // 8
    mask = np.ones(ROLLOUT_TOKENS, np.uint8)
    mask[:prompt] = 0
    logprobs = -rng.random(ROLLOUT_TOKENS, dtype=np.float32) * mask
    spans = (PolicySpan(lineage=0, version=0, start=prompt, end=ROLLOUT_TOKENS),)
    ids = rng.integers(0, 150_000, ROLLOUT_TOKENS, dtype=np.int32)
    sample = Sample(token_ids=ids, loss_mask=mask, inference_logprobs=logprobs, policy_spans=spans)
    return Rollout(
        run_uid=uid, purpose=Purpose.TRAIN, eval_id="", ordinal=ordinal, member=member, attempt=0,
        group_size=GROUP_SIZE, env="reverse-text", task_index=ordinal, task_id=f"train/{ordinal}",
        status=RolloutStatus.OK, error=None, samples=(sample,), reward=float(member % 2), planned_step=0,
        dispatched_after="", env_server="e0", seconds=1.0,
    )  # fmt: skip


class _Lags:
    """The longest times for which nothing else ran on the event loop."""

    wall_s = cpu_s = 0.0

    async def watch(self) -> None:
        while True:
            at, cpu = time.perf_counter(), time.thread_time()
            await asyncio.sleep(0.005)
            self.wall_s = max(self.wall_s, time.perf_counter() - at - 0.005)
            self.cpu_s = max(self.cpu_s, time.thread_time() - cpu)


class _Peak:
    """The largest size of the process, MB, seen a hundred times a second."""

    def __init__(self) -> None:
        self._most, self._ends = _rss_mb(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def end(self) -> float:
        self._ends.set()
        self._thread.join()
        return self._most

    def _watch(self) -> None:
        while not self._ends.wait(0.01):
            self._most = max(self._most, _rss_mb())


def _rounded(*values: float) -> list[object]:
    return [f"{value:.3g}" for value in values]


def _rss_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20
