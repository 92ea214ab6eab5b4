"""Many LoRA adapters of one base in one trainer process, beside one adapter, and one after the other.

    python benchmarks/adapters_trained.py [--quick]

Three contenders learn the same tokens in turns, in one process with one thread. `together`: T adapters of rank 16, each
with its own tokens, share forwards. `single`: one adapter has all tokens, in micro-batches of the same size. `in turn`:
the T adapters of `together` are called one after the other. Figures are medians of tokens per CPU second over the
rounds, of forward and backward alone and with the optimizers' steps, and ratios of the same round. Memory is the
highest resident size of a process of its own for each contender, after its model was made and while it takes two steps.
"""

import argparse
import gc
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from report import machine, progress, table
from transformers import AutoModelForCausalLM, Qwen3Config

from millrace.config.sections.trainer import LoraConfig
from millrace.trainer.learning.adapters import AdapterPool, Work
from millrace.trainer.learning.batch import MicroBatch, build_micro_batch, fake_sample
from millrace.trainer.learning.optimizer import AdamParams

SHAPES = {"tiny": (64, 192, 2), "30M": (512, 1536, 9)}
"""Hidden size, width of the feed-forward layers, and layers."""
VOCABULARY, SAMPLE_TOKENS, MAX_TOKENS, RANK = 1000, 64, 2048, 16
ADAM = AdamParams(lr=1e-4, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0, max_norm=1.0)
CONTENDERS = ("together", "single", "in turn")


def pool_of(shape: str, names: Sequence[str]) -> AdapterPool:
    """Make a base with random weights, and adapters of these names."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    hidden, width, layers = SHAPES[shape]
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=width,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=1,
        head_dim=64,
        tie_word_embeddings=True,
    )
    base: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    pool = AdapterPool(base, max_tokens=MAX_TOKENS)
    if pool.why_alone is not None:
        raise SystemExit(f"nothing to compare on this machine: {pool.why_alone}")
    for seed, name in enumerate(names):
        pool.add(name, LoraConfig(rank=RANK), seed=seed)
    return pool


def likelihood(batch: MicroBatch, logprobs_BT: torch.Tensor, entropy_BT: torch.Tensor) -> torch.Tensor:
    """The negative log-likelihood, a sum over tokens."""
    return -(logprobs_BT * batch.loss_mask_BT).sum()


def work_of(name: str, num_tokens: int) -> Work:
    """Samples of `SAMPLE_TOKENS` tokens, in micro-batches of at most `MAX_TOKENS`."""
    samples = [fake_sample(SAMPLE_TOKENS, vocabulary=VOCABULARY) for _ in range(num_tokens // SAMPLE_TOKENS)]
    per_batch = MAX_TOKENS // SAMPLE_TOKENS
    batches = [
        build_micro_batch(samples[at : at + per_batch], seq_len=SAMPLE_TOKENS, device=torch.device("cpu"))
        for at in range(0, len(samples), per_batch)
    ]
    return Work(adapter=name, micro_batches=batches, loss=likelihood, is_by_token=True)


def calls_of(contender: str, num_adapters: int, tokens: int) -> list[list[Work]]:
    """The calls of `forward_backward` of one step."""
    if contender == "single":
        return [[work_of("0", num_adapters * tokens)]]
    work = [work_of(str(at), tokens) for at in range(num_adapters)]
    return [work] if contender == "together" else [[each] for each in work]


def turn(pool: AdapterPool, calls: Sequence[Sequence[Work]]) -> tuple[float, float]:
    """Take a step; return the CPU seconds of forward and backward, and of all of it."""
    began = time.process_time()
    for call in calls:
        pool.forward_backward(call)
    learned = time.process_time()
    for name in {each.adapter for call in calls for each in call}:
        pool.step(name, ADAM)
    return learned - began, time.process_time() - began


def speeds(shape: str, num_adapters: int, tokens: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return the CPU seconds of every contender's turns, in one process."""
    pool = pool_of(shape, [str(at) for at in range(num_adapters)])
    calls = {each: calls_of(each, num_adapters, tokens) for each in CONTENDERS}
    found: dict[str, list[tuple[float, float]]] = {each: [] for each in CONTENDERS}
    for at in range(rounds + 1):
        for place in range(len(CONTENDERS)):  # in another order in each round
            contender = CONTENDERS[(at + place) % len(CONTENDERS)]
            gc.collect()
            seconds = turn(pool, calls[contender])
            if at:  # the first round warms up
                found[contender].append(seconds)
        progress(f"{tokens} tokens each, round {at} of {rounds}")
    return found


def peak_mib(contender: str, shape: str, num_adapters: int, tokens: int) -> float:
    """Return the highest resident size of this process while a contender takes two steps, in MiB."""
    names = ["0"] if contender == "single" else [str(at) for at in range(num_adapters)]
    pool, calls = pool_of(shape, names), calls_of(contender, num_adapters, tokens)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the highest size counts from here on
    for _ in range(2):
        turn(pool, calls)
    match = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) / 1024


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two rounds of a tiny model")
    parser.add_argument("--adapters", type=int, default=16)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 512], help="tokens of each adapter in a step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peak", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    shape, rounds = ("tiny", 2) if options.quick else ("30M", options.rounds)
    if options.peak:
        print(json.dumps(peak_mib(options.peak, shape, options.adapters, options.tokens[0])))
        return
    print(f"{options.adapters} adapters of rank {RANK} on a base of {shape}, samples of {SAMPLE_TOKENS} tokens,")
    print(f"at most {MAX_TOKENS} tokens in a forward, one thread.\n")
    rows = []
    for tokens in options.tokens:
        found = speeds(shape, options.adapters, tokens, rounds)
        peaks = {}
        for each in CONTENDERS:
            argv = [sys.executable, __file__, "--peak", each, "--adapters", str(options.adapters)]
            argv += ["--tokens", str(tokens), *(["--quick"] if options.quick else [])]
            peaks[each] = json.loads(subprocess.run(argv, capture_output=True, text=True, check=True).stdout)
        for each in CONTENDERS:
            speed = [options.adapters * tokens / median(column) for column in zip(*found[each], strict=True)]
            ratios = [
                median(other[part] / own[part] for own, other in zip(found[each], found[beside], strict=True))
                for beside in ("single", "in turn")
                for part in range(2)
            ]
            peak = [f"{peaks[each]:.0f}", f"{peaks[each] / peaks['single']:.2f}"]
            cells = [*(f"{value:.0f}" for value in speed), *(f"{value:.3f}" for value in ratios), *peak]
            rows.append([str(tokens), each, *cells])
    faster = ["x single", "with steps", "x in turn", "with steps"]
    columns = ["tokens each", "contender", "tokens per CPU s", "with steps", *faster, "peak MiB", "x single"]
    print(table(columns, rows))
    print(f"\n{machine()}")


if __name__ == "__main__":
    main()
