"""What it costs to store the trainer's log-probs: CPU seconds of a step with a share of 1 and of 0, in turn.

    python benchmarks/token_log.py [--quick] [--tokens N] [--steps N]

The step is a small one, whose model computes little for each token, so that the ratio is an upper bound: 2 layers of 64
hidden units, a vocabulary of 512. The store is a directory. The process' CPU includes the thread that writes. A ratio
is the median over pairs of steps.
"""

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from report import table
from transformers import Qwen3Config, Qwen3ForCausalLM

from millrace.config.sections.rl import RLConfig
from millrace.custom_code import CustomCode
from millrace.internal.v1 import batch_pb2
from millrace.runlog.names import Names
from millrace.runlog.records.token_logs import find_token_log
from millrace.storage.local import LocalStore
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.learning.batch import Minibatch, build_micro_batch, fake_sample
from millrace.trainer.learning.learner import Learner
from millrace.trainer.learning.plan import in_order, plan_micro_batches
from millrace.trainer.log.batches import Batch
from millrace.trainer.log.token_log import TokenLogWriter
from millrace.trainer.loop import learn

VOCABULARY, SEQ_LEN = 512, 256
NAMES = Names("bench", "run-a")


def make_learner(directory: Path) -> Learner:
    """A small model from scratch."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCABULARY, **sizes, **heads)).save_pretrained(directory)
    config = RLConfig.model_validate(
        {
            "seq_len": SEQ_LEN,
            "model": {"name": str(directory)},
            "orchestrator": {"env": [{"id": "reverse-text"}], "batch_size": 8, "rollouts_per_example": 4},
        }
    )
    return Learner.of_start_model(
        config, gang=Gang(), directory=directory, start_directory=directory, code=CustomCode()
    )


def make_batch(learner: Learner, *, step: int, num_tokens: int) -> Batch:
    """Samples of the longest length, in micro-batches as the trainer makes them."""
    lengths = [SEQ_LEN] * (num_tokens // SEQ_LEN)
    header = batch_pb2.BatchHeader(run_uid=NAMES.uid, step=step, envs=["e"])
    samples = []
    for at, length in enumerate(lengths):
        samples.append(replace(fake_sample(length, vocabulary=VOCABULARY), env="e"))
        header.samples.add(length=length, ordinal=at)
    (plan,) = plan_micro_batches(lengths, max_tokens=learner.config.micro_batch_tokens, packing=learner.packing)
    places = [[place for row in rows for place in row] for rows in plan]
    micro_batches = [
        build_micro_batch(
            [samples[at] for at in flat], rows=in_order(rows), seq_len=SEQ_LEN, device=torch.device("cpu")
        )
        for flat, rows in zip(places, plan, strict=True)
    ]
    part = Minibatch(micro_batches=micro_batches, samples=places)
    return Batch(header=header, chain_hash=bytes(32), minibatches=[part], wait_s=0.0, load_s=0.0)


def measure(learner: Learner, writer: TokenLogWriter, batch: Batch) -> tuple[float, float, float]:
    """CPU seconds of the process and of the training thread, and the training thread's seconds on the clock."""
    clocks = (time.process_time, time.thread_time, time.perf_counter)
    before = [clock() for clock in clocks]
    with writer:
        rows = writer.collect(batch)
        learn(learner, batch, rows=rows)
        writer.write(batch, rows)
        training = [clock() for clock in clocks[1:]]
    whole = time.process_time()
    return whole - before[0], training[0] - before[1], training[1] - before[2]


def take(learner: Learner, store: LocalStore, *, num_tokens: int, steps: int) -> dict[float, list[tuple[float, ...]]]:
    """What `measure` gives by share; two steps of each before are not counted."""
    found: dict[float, list[tuple[float, ...]]] = {0.0: [], 1.0: []}
    for step in range(steps + 2):
        for share in sorted(found, reverse=bool(step % 2)):
            batch = make_batch(learner, step=step, num_tokens=num_tokens)
            writer = TokenLogWriter(store, NAMES, share=share, lineage=0, gang=Gang(), on_problem=sys.exit)
            taken = measure(learner, writer, batch)
            if step >= 2:
                found[share].append(taken)
    return found


def main() -> None:
    """Print medians, and the ratios of neighbours."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few small steps")
    parser.add_argument("--tokens", type=int, help="of a step")
    parser.add_argument("--steps", type=int, help="of each share")
    asked = parser.parse_args()
    num_tokens, steps = asked.tokens or (2048 if asked.quick else 16384), asked.steps or (4 if asked.quick else 60)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        learner = make_learner(Path(place) / "model")
        store = LocalStore(Path(place) / "store")
        found = take(learner, store, num_tokens=num_tokens, steps=steps)
        info = store.head(find_token_log(store, NAMES, 0) or "")
        assert info is not None
    rows = []
    for at, what in enumerate(("CPU of the process", "CPU of the training thread", "clock of the training thread")):
        without, stored = ([each[at] for each in found[share]] for share in (0.0, 1.0))
        ratio = statistics.median(a / b for a, b in zip(stored, without, strict=True))
        rows.append([what, *(f"{statistics.median(each) * 1e3:.1f}" for each in (without, stored)), f"{ratio:.3f}"])
    print(table(["a step", "share 0, ms", "share 1, ms", "ratio"], rows))
    print(f"\n{num_tokens} sampled tokens a step; its object has {info.size_bytes} bytes. {steps} steps of each share.")


if __name__ == "__main__":
    main()
