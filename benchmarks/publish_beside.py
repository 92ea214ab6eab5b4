"""What publishing beside the training takes from it: the training's thread, with a publisher in its process or not.

    python benchmarks/publish_beside.py [--quick] [--parameters N] [--repeats N] [--changed SHARE]

The publisher is the trainer's (`Committer`): it compares, digests, encodes, writes and commits versions of bfloat16
weights to a store on the disk, one after the other. Beside it the main thread does one of two things: it *launches*,
operations so small that they cost the interpreter alone, as a trainer on a GPU does all the time; or it takes *steps*
of a small dense model on the CPU. Four ways take turns: nobody publishes; a thread of the same process does, as the
trainer's where versions are small; a thread that has a process do it, as the trainer's where they are large
(`MILLRACE_TRAINER_PUBLISH`); a process that has nothing to do with this one, the least that it can cost.

A busy machine makes wall time useless, so Linux is asked what the main thread's time was: on a processor, runnable
without one, and neither, which is the interpreter's lock (and what else it slept for). Lock and processor time together
are what a machine with processors enough would show.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from report import machine, progress, table
from transformers import Qwen3Config, Qwen3ForCausalLM

from millrace.config.sections.trainer import PolicyConfig
from millrace.policies.publishing.upload import TensorPart
from millrace.processes.shared_memory import SharedMemory, SharedPlace
from millrace.runlog.names import Names
from millrace.storage.local import LocalStore
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.publish.commit import Committer, VersionInput
from millrace.trainer.publish.target import PublishTarget

TENSOR = 1 << 20
"""Elements of each tensor."""
WAYS = ("nobody", "a thread", "the trainer's process", "a stranger")


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of the main thread, and how often it did its work in them."""

    wall: float
    on_cpu: float
    runnable: float
    count: int

    @property
    def own(self) -> float:
        """Per unit of work, of a machine with processors enough."""
        return (self.wall - self.runnable) / self.count

    @property
    def slept(self) -> float:
        """Per unit of work, neither on a processor nor waiting for one."""
        return max(0.0, self.wall - self.on_cpu - self.runnable) / self.count


def publish(
    directory: Path, parameters: int, share: float, *, is_over: Callable[[], bool], is_process: bool = False
) -> int:
    """Commit versions until it is over; how many. Two sets of weights take turns, `share` of them differ."""
    random = np.random.default_rng(0)
    names = [f"model.layers.{number}.weight" for number in range(max(1, parameters // TENSOR))]
    sets = [{name: random.integers(0, 1 << 16, TENSOR, dtype=np.uint16) for name in names} for _ in range(1)]
    other = {name: bits.copy() for name, bits in sets[0].items()}
    for bits in other.values():
        bits[random.random(TENSOR) < share] ^= 1
    sets.append(other)
    names, url = Names("bench", "run-a"), directory.as_uri()
    target = PublishTarget(store=LocalStore(directory), names=names, gang=Gang(), epoch=0, store_url=url)
    config = PolicyConfig(skip_deltas=[])
    writer = target.share_writer(config, is_process=is_process)
    committer = Committer(target, config=config, lineage=0, files=(), share=writer)
    snapshots = [snapshot(each) for each in sets]
    version = 0
    while not is_over():
        committer.commit(VersionInput(version=version, parts=list(snapshots[version % 2]), probe=None))
        version += 1
    writer.close()
    return version


def snapshot(tensors: dict[str, np.ndarray]) -> list[TensorPart]:
    """Weights as the trainer's snapshots have them for a process."""
    memory, parts = SharedMemory(), []
    for name, bits in tensors.items():
        offset, view = memory.allocate(bits.nbytes)
        held = np.frombuffer(view, bits.dtype)
        held[:] = bits
        place = SharedPlace(memory, offset)
        parts.append(TensorPart(name=name, dtype="bfloat16", shape=(TENSOR,), start=0, bits=held, place=place))
    return parts


def launches() -> Callable[[], None]:
    """A thousand operations on sixteen numbers."""
    left, right, out = torch.ones(16), torch.ones(16), torch.empty(16)

    def work() -> None:
        for _ in range(1000):
            torch.add(left, right, out=out)

    return work


def steps() -> Callable[[], None]:
    """A step of a model of 6 M parameters on 1,024 tokens."""
    torch.manual_seed(0)
    shape = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "head_dim": 64}
    config = Qwen3Config(vocab_size=2048, num_attention_heads=4, num_key_value_heads=2, **shape)
    model = Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=True)
    tokens = torch.randint(0, 2048, (2, 512))

    def work() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return work


def measure(work: Callable[[], None], seconds: float) -> Spent:
    """Work for a while."""
    count, began, before = 0, time.perf_counter(), _sched()
    while (now := time.perf_counter()) - began < seconds:
        work()
        count += 1
    on_cpu, runnable = (after - earlier for after, earlier in zip(_sched(), before, strict=True))
    return Spent(wall=now - began, on_cpu=on_cpu, runnable=runnable, count=count)


def _sched() -> tuple[float, float]:
    """Seconds of this thread on a processor, and runnable without one."""
    on_cpu, runnable, _ = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text().split()
    return int(on_cpu) / 1e9, int(runnable) / 1e9


def measure_way(way: str, work: Callable[[], None], seconds: float, arguments: argparse.Namespace) -> Spent:
    """The main thread's time while somebody publishes this way."""
    with tempfile.TemporaryDirectory(prefix="millrace-publish-beside-") as directory:
        if way == "nobody":
            return measure(work, seconds)
        if way != "a stranger":
            over = threading.Event()
            given = (Path(directory), arguments.parameters, arguments.changed)
            how = {"is_over": over.is_set, "is_process": way == "the trainer's process"}
            thread = threading.Thread(target=publish, args=given, kwargs=how)
            thread.start()
            _wait_begun(Path(directory))
            spent = measure(work, seconds)
            over.set()
            thread.join()
            return spent
        command = [sys.executable, __file__, "--publish", directory]
        command += ["--parameters", str(arguments.parameters), "--changed", str(arguments.changed)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE)
        try:
            _wait_begun(Path(directory))
            return measure(work, seconds)
        finally:
            process.kill()
            process.wait()


def _wait_begun(directory: Path) -> None:
    """Until the first version, a full copy, is committed: from then on there are differences."""
    while not list(directory.glob("bench/runs/run-a/policies/*/manifest*")):
        time.sleep(0.02)


def report(arguments: argparse.Namespace) -> str:
    """The report as Markdown."""
    loads = {"a thousand launches, ms": (launches(), 1e3), "a step on the CPU, ms": (steps(), 1e3)}
    rows = []
    for name, (work, scale) in loads.items():
        work()
        found: dict[str, list[Spent]] = {way: [] for way in WAYS}
        for repeat in range(arguments.repeats):
            for way in WAYS:
                progress(f"{name}: {way}, {repeat + 1} of {arguments.repeats}")
                found[way].append(measure_way(way, work, arguments.seconds, arguments))
        for way in WAYS:
            own, slept = (statistics.median(getattr(each, part) for each in found[way]) for part in ("own", "slept"))
            ratios = [each.own / alone.own for each, alone in zip(found[way], found["nobody"], strict=True)]
            rows.append([name, way, f"{own * scale:.2f}", f"{slept * scale:.2f}", f"{statistics.median(ratios):.2f}"])
    head = ["main thread", "who publishes", "own time", "of it waiting for the lock", "to nobody"]
    what = f"{arguments.parameters / 1e6:.0f} M parameters in bfloat16, {arguments.changed:.0%} changed per version"
    return (
        f"## Publishing beside the training, {what}, {arguments.repeats} turns\n\n{machine()}\n\n{table(head, rows)}\n"
    )


def main() -> None:
    """Measure, or be the publisher of a measurement."""
    parser = argparse.ArgumentParser(description="What publishing beside the training takes from it.")
    parser.add_argument("--quick", action="store_true", help="one short turn")
    parser.add_argument("--parameters", type=int, default=64 << 20)
    parser.add_argument("--changed", type=float, default=0.03, help="share of the elements that differ")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each turn")
    parser.add_argument("--publish", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.publish is not None:
        publish(arguments.publish, arguments.parameters, arguments.changed, is_over=lambda: False)
        return
    if arguments.quick:
        arguments.parameters, arguments.repeats, arguments.seconds = 8 << 20, 1, 2.0
    print(report(arguments))


if __name__ == "__main__":
    main()
