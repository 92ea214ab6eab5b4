"""What an audit costs by rollout: one step after the other, and in ranges of steps by processes of their own.

For each number of steps: so many are committed with their archives, and the run is audited from the store alone, by
this process and with each number of `--jobs`. CPU seconds are those of this process, which walks over the headers, and
of the processes that it started; memory is the peak of each.
"""

import argparse
import asyncio
import json
import resource
import subprocess
import sys
import time

from report import progress, table
from scale_commits import GROUP_SIZE, make_rollout, open_run

from millrace.internal.v1 import batch_pb2
from millrace.readers.audit import AuditRanges, audit_run
from millrace.rollouts.batch_wire import pack_batch
from millrace.rollouts.types import TrainSample
from millrace.rollouts.wire import encode_archive
from millrace.runlog import Epoch, Frontier, RunLog, chain_hash, commit_batch
from millrace.runlog.records.known import KnownObjects
from millrace.runlog.records.run_record import load_origin
from millrace.storage import open_store


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    parser.add_argument("steps", type=int, nargs="*", default=[16, 32, 64])
    parser.add_argument("--samples", type=int, default=1024, help="rollouts of each step")
    parser.add_argument("--tokens", type=int, default=100, help="tokens of each rollout")
    parser.add_argument("--jobs", type=int, nargs="*", default=[0, 1, 2], help="0: one step after the other")
    parser.add_argument("--audit", metavar="JSON", help=argparse.SUPPRESS)


def report(options: argparse.Namespace) -> str:
    """Measure each length of run; the table as Markdown."""
    if options.audit:
        return _audit(**json.loads(options.audit))
    rows = [row for steps in options.steps for row in asyncio.run(_measure(options, steps))]
    heads = ["rollouts", "jobs", "CPU s", "of it the walk", "µs a rollout", "of it the walk", "s", "MB", "MB of a job"]
    return f"## Audit, {options.samples} rollouts of {options.tokens} tokens a step\n\n{table(heads, rows)}"


async def _measure(options: argparse.Namespace, steps: int) -> list[list[object]]:
    rows = list[list[object]]()
    async with open_run(batch_size=options.samples) as (log, _):
        epoch, known = await log.acquire_epoch("orchestrator", "scale"), KnownObjects()
        chain = load_origin(log.store, log.names).chain_hash
        for step in range(steps):
            chain = await _commit(log, epoch, known, step, chain, options)
        progress(f"{steps} steps are committed")
        for jobs in options.jobs:
            order = {"store_url": log.store.uri("x").removesuffix("/x"), "uid": log.uid, "jobs": jobs}
            command = [sys.executable, __file__.replace("_audit", ""), "audit", "--audit", json.dumps(order)]
            done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=True)
            found = json.loads(done.stdout.splitlines()[-1])
            count = steps * options.samples
            assert found["rollouts"] == count, found
            own, other = found["own_s"], found["other_s"]
            per = [1e6 * each / count for each in (own + other, own)]
            sizes = [found["own_mb"], found["other_mb"] if jobs > 1 else 0]
            figures = [own + other, own, *per, found["wall_s"], *sizes]
            rows.append([count, jobs or "serial", *(f"{each:.3g}" for each in figures)])
            progress(f"audited with {jobs} jobs")
    return rows


async def _commit(
    log: RunLog, epoch: Epoch, known: KnownObjects, step: int, chain: bytes, options: argparse.Namespace
) -> bytes:
    """Commit a step of groups with their archive, and return the chain hash after it."""
    header = batch_pb2.BatchHeader(
        run_uid=log.uid, kind=batch_pb2.BATCH_KIND_TRAIN, step=step, previous_chain_hash=chain, run_hash=log.run_hash
    )
    first, num_groups = step * options.samples // GROUP_SIZE, options.samples // GROUP_SIZE
    played = [
        make_rollout(log.uid, first + group, member, num_tokens=options.tokens)
        for group in range(num_groups)
        for member in range(GROUP_SIZE)
    ]
    for group in range(num_groups):
        header.resolutions.add(ordinal=first + group, outcome=batch_pb2.ORDINAL_OUTCOME_TRAINED)
    Frontier(first + num_groups).fill(header)
    samples = [
        TrainSample(
            token_ids=each.samples[0].token_ids, loss_mask=each.samples[0].loss_mask,
            inference_logprobs=each.samples[0].inference_logprobs, advantages=each.samples[0].inference_logprobs,
            ordinal=each.ordinal, member=each.member, attempt=0, env=each.env, reward=0.5, temperature=1.0,
            min_version=0, max_version=0, lineage=0,
        )
        for each in played
    ]  # fmt: skip
    chunks = pack_batch(header, samples)
    stored = await commit_batch(log, epoch, header, chunks, encode_archive(played), known=known)
    return chain_hash(chain, stored)


def _audit(*, store_url: str, uid: str, jobs: int) -> str:
    """Audit a run in this process and its jobs; return what it took as a line of JSON."""
    ranges = AuditRanges(store_url=store_url, jobs=jobs, least_steps=1) if jobs else None
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    done = asyncio.run(audit_run(None, open_store(store_url), prefix="scale", uid=uid, ranges=ranges))
    own, other = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    found = {
        "rollouts": done.num_rollouts,
        "violations": sorted({each.check for each in done.violations}),
        "own_s": time.process_time() - cpu_s,
        "other_s": other.ru_utime + other.ru_stime,
        "wall_s": time.perf_counter() - wall_s,
        "own_mb": own.ru_maxrss / 1024,
        "other_mb": other.ru_maxrss / 1024,
    }
    return json.dumps(found)
