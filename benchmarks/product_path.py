"""One step of the product's path at a product's size, on a CPU: load, step, publish, delta, fetch, prove, serve.

    python benchmarks/product_path.py [--quick] [--write] [--tokens 256]

The model has the shape of Qwen3-0.6B (596 M parameters, vocabulary 151,936, tied), random weights and no tokenizer. The
trainer holds float32 masters and an optimizer state in bfloat16, and publishes bfloat16: version 0 whole, and version
1, after one step of AdamW, as a delta. Then a replica with the embedded engine fetches, proves and serves both. All
parts are those that a run uses, on a store in a directory; each process is started when the one before has ended, so
that one at a time is in memory. CPU seconds tell more than wall time on a shared machine.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from report import machine, progress, table

RESULTS = Path(__file__).parent / "results"
SHAPE = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
QUICK = {**SHAPE, "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2}
LEARNING_RATE = 1e-6
UID, PREFIX = "product", "benchmark"
TIMEOUT_S = 3600


class Phases:
    """Wall and CPU seconds of this process, by phase, and its peak so far."""

    def __init__(self) -> None:
        import torch

        from millrace.trainer.bench import PeakMemory

        torch.set_num_threads(1)
        self._memory = PeakMemory(torch.device("cpu"))
        self.found: list[dict[str, Any]] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[dict[str, Any]]:
        wall, cpu, facts = time.perf_counter(), time.process_time(), dict[str, Any]()
        yield facts
        facts |= {"phase": name, "wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
        self.found.append(facts | {"peak_bytes": self._memory.peak})


def make(place: Path, asked: dict[str, Any]) -> list[dict[str, Any]]:
    """Write the model, in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    phases = Phases()
    with phases("make the model"):
        torch.manual_seed(0)
        config = Qwen3Config(**asked["shape"], tie_word_embeddings=True)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(place / "model")
    return phases.found


class Announced:
    """The run's log, as far as the publisher needs it."""

    epoch = 1

    def __init__(self) -> None:
        self.entries: list[Any] = []

    def append_policy(self, entry: Any, *, is_replay: bool) -> None:
        """Keep it."""
        self.entries.append(entry)

    def write_event(self, event: Any) -> None:
        """Drop it."""


def trained(place: Path, asked: dict[str, Any]) -> list[dict[str, Any]]:
    """The trainer: load, publish version 0, step, publish version 1."""
    from millrace.config.sections.rl import TrainerBench
    from millrace.custom_code import CustomCode
    from millrace.runlog import Names
    from millrace.storage.local import LocalStore
    from millrace.trainer.bench import fake_batch, fake_samples
    from millrace.trainer.gang.distributed import Gang
    from millrace.trainer.learning.batch import BatchLayout
    from millrace.trainer.learning.learner import Learner
    from millrace.trainer.loop import learn
    from millrace.trainer.publish.plan import PublishPlan, PublishTarget
    from millrace.trainer.publish.publisher import Publisher

    rows, seq_len = 2, asked["tokens"] // 2
    model = {"name": str(place / "model"), "seq_len": seq_len, "publish_dtype": "bfloat16", "ac": {"mode": "full"}}
    trainer = {
        "model": model,
        "micro_batch_tokens": asked["tokens"],
        "optim": {"lr": LEARNING_RATE, "state_dtype": "bfloat16"},
        "policy": {"skip_deltas": []},
    }
    data = {"type": "fixed", "batch_size": rows, "seq_len": seq_len}
    bench = TrainerBench.model_validate({"trainer": trainer, "data": data, "steps": 1})
    phases, gang, log = Phases(), Gang(), Announced()
    with phases("load"):
        directory = place / "model"
        learner = Learner.of_start_model(
            bench, gang=gang, directory=directory, start_directory=directory, code=CustomCode()
        )
    store = LocalStore(place / "store")
    target = PublishTarget(store=store, names=Names(PREFIX, UID), gang=gang, epoch=log.epoch)
    plan = PublishPlan(first_version=0, lineage=0, is_continued=False)
    vocabulary = asked["shape"]["vocab_size"]
    with Publisher(learner, target, log_client=log, files=(), vocabulary=vocabulary, plan=plan) as publisher:
        with phases("publish version 0 (whole)") as facts:
            publisher.publish(0)
            publisher.finish()
            facts["moved_bytes"] = before = size_of(place / "store")
        with phases(f"step of {asked['tokens']} tokens"):
            samples = fake_samples(bench.data, step=0, seed=0, vocabulary=vocabulary)
            layout = BatchLayout.of(learner.config, learner.packing)
            learned = learn(learner, fake_batch(samples, step=0, layout=layout, gang=gang))
            assert not learned.not_finite
        with phases("publish version 1 (delta)") as facts:
            publisher.publish(1, step=0)
            publisher.finish()
            facts["moved_bytes"] = size_of(place / "store") - before
    entries = [[entry.manifest_key, entry.manifest_sha256.hex()] for entry in log.entries]
    (place / "entries.json").write_text(json.dumps(entries))
    return phases.found


def served(place: Path, asked: dict[str, Any]) -> list[dict[str, Any]]:
    """A replica: fetch and serve version 0, then version 1, and generate."""
    from millrace.inference.embedded.engine import EmbeddedEngine
    from millrace.inference.engine import GenerateRequest, InflightMode, PolicyIdentity, SamplingParams
    from millrace.policies.host_copy import HostCopy
    from millrace.policies.manifest import StagedPolicy
    from millrace.storage.local import LocalStore

    entries = json.loads((place / "entries.json").read_text())
    phases, copy = Phases(), HostCopy(LocalStore(place / "store"), directory=place / "copy")

    def stage(version: int) -> StagedPolicy:
        with phases(f"fetch version {version}") as facts:
            staged = copy.stage(entries[version][0], bytes.fromhex(entries[version][1]))
            facts["moved_bytes"] = staged.fetched_bytes
        assert (staged.changes is None) == (version == 0)
        return staged

    async def serve() -> None:
        engine = EmbeddedEngine(kv_bytes=1 << 28)
        try:
            staged = stage(0)
            with phases("load version 0 into the engine"):
                await engine.load(place / "model", staged, identity=identity(0))
            with phases("prove version 0: read back, probe"):
                await engine.prove(staged)
            staged = stage(1)
            await engine.check(staged)
            with phases("apply version 1 (in the pause)"):
                await engine.apply_policy(staged, identity=identity(1), inflight_mode=InflightMode.KEEP)
            with phases("prove version 1: read back, probe"):
                await engine.prove(staged)
            with phases("generate 8 tokens"):
                sampling = SamplingParams(max_tokens=8, ignore_eos=True)
                made = await engine.generate(
                    GenerateRequest(request_id="a", prompt_token_ids=(1, 2, 3), sampling=sampling)
                )
                assert len(made.token_ids) == 8
        finally:
            await engine.close()

    def identity(version: int) -> PolicyIdentity:
        return PolicyIdentity(run_uid=UID, lineage=0, version=version)

    asyncio.run(serve())
    return phases.found


PROCESSES = {"model": make, "trainer": trained, "replica": served}


def size_of(directory: Path) -> int:
    """Bytes of all files."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def in_process(name: str, place: Path, asked: dict[str, Any]) -> list[dict[str, Any]]:
    """What a process of its own finds."""
    command = [sys.executable, __file__, "--work", json.dumps([name, str(place), asked])]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, env=environ, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def report_of(found: dict[str, list[dict[str, Any]]]) -> str:
    """The table as Markdown."""
    rows = [
        [
            process,
            phase["phase"],
            f"{phase['cpu_s']:.1f}",
            f"{phase['wall_s']:.1f}",
            f"{phase['moved_bytes'] / 2**20:,.1f}" if "moved_bytes" in phase else "",
            f"{phase['peak_bytes'] / 2**30:.2f}",
        ]
        for process, phases in found.items()
        for phase in phases
    ]
    head = ["process", "phase", "CPU s", "wall s", "MiB moved", "peak so far, GiB"]
    about = " ".join((__doc__ or "").split("\n\n")[2].split())
    return (
        f"# The product's path\n\nMade by `benchmarks/product_path.py`. {about}\n\n{machine()}\n\n{table(head, rows)}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model: shows that it works")
    parser.add_argument("--write", action="store_true", help="keep the report among the results")
    parser.add_argument("--tokens", type=int, default=256, help="of the step")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        name, place, asked = json.loads(options.work)
        print(json.dumps(PROCESSES[name](Path(place), asked)))
        return
    found: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(prefix="product-path-") as directory:
        asked = {"shape": QUICK if options.quick else SHAPE, "tokens": options.tokens}
        for name in PROCESSES:
            progress(name)
            found[name] = in_process(name, Path(directory), asked)
    text = report_of(found)
    print(text)
    if options.write:
        (RESULTS / "product_path.md").write_text(text)


if __name__ == "__main__":
    main()
