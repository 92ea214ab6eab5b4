"""What a run leaves in the store with and without retention, and what a pass of retention costs.

For each length of run: synthetic objects of every step (six chunks, an archive, log-probs of the trainer, a header), a
checkpoint at every tenth step of which two are kept, and a pass of retention whenever the run has grown by its stride,
as the orchestrator does them. The store is a directory, or the one of `--store s3://…`. Requests are counted at the
store's interface.
"""

import argparse
import secrets
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from report import progress, table

from millrace.runlog.catalogue import KeptAs
from millrace.runlog.deletion import delete_run, plan_deletion
from millrace.runlog.names import Names
from millrace.runlog.records.retirement import Retired, newest_retirement
from millrace.runlog.retention import Retention, RetentionRule, RunNeeds, record_retirement
from millrace.storage import ObjectStore, open_store

CHUNKS = 6
COUNTED = ("list", "head", "get", "create", "delete_many")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    parser.add_argument("steps", type=int, nargs="*", default=[250, 500, 1000])
    parser.add_argument("--retain-batches", type=int, default=40)
    parser.add_argument("--object-bytes", type=int, default=4096, help="of each chunk, archive and log")
    parser.add_argument("--store", default="", help="s3://bucket/prefix?endpoint=…; a temporary directory if left out")


def report(options: argparse.Namespace) -> str:
    """Measure each length of run; the table as Markdown."""
    rows = [_measure(options, steps) for steps in options.steps]
    header = [
        "steps", "objects without", "MB without", "objects with", "MB with", "of them not headers", "passes",
        "requests per retired step", "requests a pass, early", "late", "CPU ms per retired step", "delete CPU s",
    ]  # fmt: skip
    return f"## Store, retain_batches = {options.retain_batches}\n\n" + table(header, rows)


def _measure(options: argparse.Namespace, steps: int) -> list[object]:
    with tempfile.TemporaryDirectory(prefix="scale-store-") as directory:
        base, _, query = (options.store or Path(directory).as_uri()).partition("?")
        store: Any = open_store(f"{base.rstrip('/')}/t{secrets.token_hex(4)}?{query}" if query else base)
        names, rule = Names("scale", f"r{secrets.token_hex(4)}"), RetentionRule(batches=options.retain_batches)
        retention, counts = Retention(store, names, first=0, by="benchmark"), _count(store)
        costs, cpu_s, data = list[int](), 0.0, secrets.token_bytes(options.object_bytes)
        written = sizes = 0
        for step in range(steps):
            for key, content in _objects(names, step, data):
                store.put(key, content)
                written, sizes = written + 1, sizes + len(content)
            if (step + 1) % rule.stride == 0:
                counts.clear()
                began = time.process_time()
                newest = (step + 1) // 10 * 10
                kept = [each for each in (newest - 10, newest) if each > 0]
                if len(kept) > 1:  # what the trainer does with `ckpt.keep_last = 2`
                    gone = {KeptAs.CHECKPOINTS: Retired(below=kept[0], why="ckpt.keep_last = 2")}
                    record_retirement(store, names, gone, by="trainer")
                    counts.clear()
                if left := retention.run(rule, RunNeeds(next_step=step + 1, checkpoints=kept)):
                    raise RuntimeError(f"not removed: {left[0]}")
                cpu_s += time.process_time() - began
                costs.append(counts.total())
        progress(f"{steps} steps written")
        found = list(store.list(names.root))
        record = newest_retirement(store, names)
        retired = record.of(KeptAs.BATCHES).below if record else 0
        began = time.process_time()
        delete_run(store, plan_deletion(store, names), by="benchmark")
        deletion_s = time.process_time() - began
        window = sum(not info.key.startswith(f"{names.batches}0") or "/e" in info.key for info in found)
        return [
            steps, written, sizes / 1e6, len(found), sum(info.size_bytes for info in found) / 1e6, window, len(costs),
            sum(costs) / max(retired, 1), sum(costs[10:20]) / 10, sum(costs[-10:]) / 10,
            1000 * cpu_s / max(retired, 1), deletion_s,
        ]  # fmt: skip


def _objects(names: Names, step: int, data: bytes) -> Iterator[tuple[str, bytes]]:
    batch = names.batch_data(step, 1, "ab")
    yield from ((f"{batch}chunk-{index:05d}.pb", data) for index in range(CHUNKS))
    yield f"{names.rollout_data(step, 1, 'ab')}rollouts.pb.zst", data
    yield names.token_log(step, 0), data
    yield names.batch_header(step), data[:512]


def _count(store: ObjectStore) -> Counter[str]:
    """Count the calls of a store from now on, by name."""
    counts = Counter[str]()

    def counted(name: str, method: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            counts[name] += 1
            return method(*args, **options)

        return call

    for name in COUNTED:
        setattr(store, name, counted(name, getattr(store, name)))
    return counts
