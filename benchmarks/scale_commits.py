"""What a commit and a takeover cost at step n, and what a commit of a large batch costs in memory and loop time.

`--steps` commits that many steps of `--samples` samples, with a policy and an archive of events after each, and gives
the CPU time of the commits and of a takeover at each number; `--chart` draws the CPU time of every commit. `--tokens`
plays one batch of so many tokens, in rollouts of 16,000, through the loop of a run up to its commit. Redis and the
store (a directory) are real.
"""

import argparse
import asyncio
import gc
import json
import resource
import statistics
import sys
import tempfile
import threading
import time
import traceback
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
    parser.add_argument("--chart", type=Path, help="also draw the CPU time of all commits, as SVG, into this file")
    parser.add_argument("--tokens", type=int, nargs="*", default=[1_000_000, 4_000_000, 16_000_000])


def report(options: argparse.Namespace) -> str:
    """Measure every size; the tables as Markdown."""
    parts = [f"## Commits\n\nSteps of {options.samples} samples of 4 tokens; means of {WINDOW} commits."]
    if options.steps:
        heads = ["step", "commit, ms of CPU", "takeover, s of CPU", "takeover, s", "takeover, MB"]
        each_ms: list[float] = []
        parts.append(table(heads, asyncio.run(_measure_steps(options.steps, options.samples, each_ms))))
        parts.append(_law(each_ms))
        if options.chart is not None:
            options.chart.write_text(draw(each_ms, num_samples=options.samples))
    if options.tokens:
        heads = [
            "tokens",
            "commit, s of CPU",
            "s",
            "loop blocked, ms (wall)",
            "(CPU)",
            "lock held ≤, ms (CPU)",
            "peak, B a token",
            "of a commit",
        ]
        parts.append(table(heads, [asyncio.run(_measure_tokens(each)) for each in options.tokens]))
    return "\n\n".join(parts)


@asynccontextmanager
async def open_run(*, batch_size: int) -> AsyncIterator[tuple[RunLog, RunRecord]]:
    """Provide a new run in a temporary directory, with a Redis of its own; `batch_size` is that of its config."""
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


async def _measure_steps(sizes: list[int], num_samples: int, each_ms: list[float]) -> list[list[object]]:
    """Commit up to the largest size, adding the CPU of each commit to `each_ms`; return a row of the table per size."""
    rows: list[list[object]] = []
    async with open_run(batch_size=num_samples) as (log, _):
        epoch, known = await log.acquire_epoch("orchestrator", "scale"), KnownObjects()
        chain, step = load_origin(log.store, log.names).chain_hash, 0
        for size in sorted(sizes):
            while step < size:
                for key in (log.names.policy_manifest(0, step), log.names.archived_events(f"1-{step}", f"1-{step}")):
                    log.store.create(key, b"{}")
                    known.announce(key.removeprefix(log.names.root))
                header = make_header(log, step, chain, num_samples)
                began = time.process_time()
                stored = await commit_batch(log, epoch, header[0], header[1], b"archive", known=known)
                each_ms.append(1e3 * (time.process_time() - began))
                chain, step = chain_hash(chain, stored), step + 1
            progress(f"step {step}")
            rows.append([size, *_rounded(statistics.fmean(each_ms[-WINDOW:]), *await _take_over(log))])
    return rows


def _law(each_ms: list[float]) -> str:
    """Return in words how the CPU of a commit depends on its step: the line through all, by least squares."""
    slope, start = np.polyfit(np.arange(len(each_ms)), each_ms, 1)
    return f"All {len(each_ms)} commits: {start:.2f} ms {'+' if slope >= 0 else '−'} {abs(1e3 * slope):.3f} µs · step."


def draw(each_ms: list[float], *, num_samples: int) -> str:
    """Return the chart as SVG, for light and dark pages: mean and range of the middle half, in windows of commits."""
    size = max(1, len(each_ms) // 100)
    windows = [sorted(each_ms[at : at + size]) for at in range(0, len(each_ms) - size + 1, size)]
    top = 5 * (1 + int(max(window[3 * len(window) // 4] for window in windows) * 1.4 / 5))
    width, height, left, base = 760, 260, 44, 224

    def at(number: float, value: float) -> str:
        return f"{left + number / len(windows) * (width - left - 12):.1f},{base - value / top * (base - 20):.1f}"

    middles = list(enumerate(windows))
    band = [at(number + 0.5, window[3 * len(window) // 4]) for number, window in middles]
    band += [at(number + 0.5, window[len(window) // 4]) for number, window in reversed(middles)]
    line = " ".join(at(number + 0.5, statistics.fmean(window)) for number, window in middles)
    marks = [
        f'<line class="g" x1="{left}" x2="{width - 12}" y1="{y}" y2="{y}"/><text x="{left - 6}" y="{y + 4}" '
        f'text-anchor="end">{value:g}</text>'
        for value in (top * part / 5 for part in range(6))
        for y in [round(base - value / top * (base - 20), 1)]
    ]
    marks += [
        f'<text x="{at(share * len(windows), 0).split(",")[0]}" y="{base + 17}" text-anchor="middle">'
        f"{round(share * len(each_ms)):,}</text>"
        for share in (0, 0.25, 0.5, 0.75, 1)
    ]
    title = (
        f"CPU of a commit of {num_samples:,} short samples, ms, by step: mean and middle half of {size} commits each"
    )
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">
<title>{title}</title>
<style>
text {{ font-size: 12px; fill: #444 }} .g {{ stroke: #ccc; stroke-width: 1 }}
.b {{ fill: #2a6fbb; fill-opacity: 0.25 }} .l {{ fill: none; stroke: #2a6fbb; stroke-width: 2 }}
@media (prefers-color-scheme: dark) {{
text {{ fill: #bbb }} .g {{ stroke: #444 }} .b {{ fill: #6cb0f5 }} .l {{ stroke: #6cb0f5 }}
}}
</style>
<text x="{left}" y="13">{title}</text>
{"".join(marks)}
<polygon class="b" points="{" ".join(band)}"/>
<polyline class="l" points="{line}"/>
</svg>
"""


async def _take_over(log: RunLog) -> tuple[float, float, float]:
    """Return CPU and wall seconds of a takeover, and by how many MB the process grew."""
    gc.collect()
    before, began, wall = _rss_mb(), time.process_time(), time.perf_counter()
    committed = await load_history(log)
    found = time.process_time() - began, time.perf_counter() - wall, max(0.0, _rss_mb() - before)
    assert committed.last is not None
    return found


def make_header(log: RunLog, step: int, chain: bytes, num_samples: int) -> tuple[batch_pb2.BatchHeader, list[bytes]]:
    """Return the header of a step of so many samples of 4 tokens, which follows `chain`, and its chunks."""
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
    async with open_run(batch_size=batch_size) as (log, record):
        loop, parts = await _make_loop(log, record)
        idle = _rss_mb()
        for number in range(batch_size):
            data = encode_rollout(make_rollout(log.uid, number // GROUP_SIZE, number % GROUP_SIZE))
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
        watching, peak, holds = asyncio.create_task(lags.watch()), _Peak(), _Holds()
        began, wall = time.process_time(), time.perf_counter()
        await loop.commit(groups)
        cpu_s, wall_s = time.process_time() - began, time.perf_counter() - wall
        watching.cancel()
        most = peak.end()
        holds.end()
        progress(f"{holds.num_left_out} of {holds.num_turns} turns had no core; the longest hold was in\n{holds.where}")
        size = batch_size * ROLLOUT_TOKENS
        await parts.context.events.close()
    per_token = [(most - base) * 2**20 / size for base in (idle, held)]
    return [size, *_rounded(cpu_s, wall_s, 1e3 * lags.wall_s, 1e3 * lags.cpu_s, 1e3 * holds.longest_s, *per_token)]


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


def make_rollout(uid: str, ordinal: int, member: int, *, num_tokens: int = ROLLOUT_TOKENS) -> Rollout:
    """Return a finished rollout with so many tokens of noise, an eighth of them the prompt."""
    rng = np.random.default_rng([ordinal, member])
    prompt = num_tokens // 8
    mask = np.ones(num_tokens, np.uint8)
    mask[:prompt] = 0
    logprobs = -rng.random(num_tokens, dtype=np.float32) * mask
    spans = (PolicySpan(lineage=0, version=0, start=prompt, end=num_tokens),)
    ids = rng.integers(0, 150_000, num_tokens, dtype=np.int32)
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


class _Holds:
    """How long other threads kept the interpreter's lock from one that asked for it each millisecond, CPU seconds.

    Counted is the CPU time of all other threads from one turn to the next: an upper bound, since code that has released
    the lock counts, too. Turns in which this thread itself was ready and had no core are left out.
    """

    def __init__(self) -> None:
        self.longest_s, self.where, self.num_turns, self.num_left_out = 0.0, "", 0, 0
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._ends.set()
        self._thread.join()

    def _watch(self) -> None:
        with Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").open("rb", buffering=0) as schedstat:

            def look() -> tuple[float, float]:
                schedstat.seek(0)
                return time.process_time() - time.thread_time(), int(schedstat.read().split()[1]) / 1e9

            before, delayed_s = look()
            while not self._ends.is_set():
                time.sleep(0.001)
                others, delay_s = look()
                held_s, self.num_turns = others - before, self.num_turns + 1
                if delay_s - delayed_s > 0.002:
                    self.num_left_out += 1
                elif held_s > self.longest_s:
                    self.longest_s, self.where = held_s, self._stacks()
                before, delayed_s = look()

    def _stacks(self) -> str:
        """Return what each other thread does, innermost call last."""
        own, frames = threading.get_ident(), sys._current_frames()
        lines = [
            " > ".join(f"{each.name}:{each.lineno}" for each in traceback.extract_stack(frame)[-4:])
            for ident, frame in frames.items()
            if ident != own
        ]
        return "\n".join(lines)


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
