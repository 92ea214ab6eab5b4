"""Training steps on one GPU, by `millrace trainer --bench`'s own measurement: tokens/s, MFU, peak memory, phases.

    python benchmarks/trainer_gpu.py [--cases NAME ...] [--steps 5] [--profile]

Models have the shapes of Qwen3 and random weights. Each case is a process of its own; the first step warms up. Samples
are of a tenth of `seq_len` to all of it where lengths are variable. `--profile` adds the kernels of one step of each
case that took longest, by torch's profiler. Results go to `results/trainer_gpu.md`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from report import progress, table

RESULTS = Path(__file__).parent / "results"
CASE_TIMEOUT_S = 420
SHAPES: dict[str, tuple[int, int, int, int, bool]] = {
    "0.6B": (1024, 3072, 28, 16, True),
    "1.7B": (2048, 6144, 28, 16, True),
    "4B": (2560, 9728, 36, 32, True),
    "8B": (4096, 12288, 36, 32, False),
}
"""Hidden size, intermediate size, layers, heads, whether the head is tied."""

Case = dict[str, Any]


def case(size: str, *, seq_len: int = 4096, batch: int = 16, lengths: str = "variable", **trainer: Any) -> Case:
    """What is measured: `trainer` are keys of `[trainer]`, those of `model` in a table of their own."""
    return {"size": size, "seq_len": seq_len, "batch": batch, "lengths": lengths, "trainer": trainer}


CASES: dict[str, Case] = {
    "0.6B padded": case("0.6B", pack={"mode": "never"}),
    "0.6B packed": case("0.6B"),
    "0.6B packed, strict": case("0.6B", determinism="strict"),
    "0.6B packed, compiled": case("0.6B", model={"compile": {}}),
    "0.6B packed, activations computed again": case("0.6B", model={"ac": {}}),
    "0.6B packed, 16k to a micro-batch": case("0.6B", micro_batch_tokens=16_384),
    "0.6B one length": case("0.6B", lengths="fixed", batch=8),
    "1.7B packed": case("1.7B"),
    "1.7B packed, compiled": case("1.7B", model={"compile": {}}),
    "4B packed, activations computed again": case("4B", model={"ac": {}}),
    "8B LoRA, rows of 16k": case(
        "8B", seq_len=16_384, batch=4, micro_batch_tokens=16_384, model={"lora": {"rank": 16}}
    ),
    "8B LoRA, rows of 16k, activations computed again": case(
        "8B", seq_len=16_384, batch=4, micro_batch_tokens=16_384, model={"lora": {"rank": 16}, "ac": {}}
    ),
}


def make_model(size: str, directory: Path) -> Path:
    """A model without knowledge, in `directory`; once."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    hidden, intermediate, layers, heads, is_tied = SHAPES[size]
    if not (directory / "config.json").exists():
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=151_936,
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=8,
            head_dim=128,
            tie_word_embeddings=is_tied,
        )
        with torch.device("cuda"):
            AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
    return directory


def work(asked: Case) -> None:
    """In a process of its own: measure one case, and print what was found."""
    from millrace.config.sections.rl import TrainerBench
    from millrace.trainer.bench import measure
    from millrace.trainer.gang.distributed import Gang, choose_device

    trainer = asked["trainer"]
    model = {"name": asked["directory"], "seq_len": asked["seq_len"]} | trainer.get("model", {})
    bench = TrainerBench.model_validate(
        {
            "trainer": {"micro_batch_tokens": 8192, "optim": {"lr": 1e-6}, **trainer, "model": model},
            "data": {"type": asked["lengths"], "batch_size": asked["batch"], "seq_len": asked["seq_len"]},
            "steps": asked["steps"],
        }
    )
    gang = Gang(device=choose_device({"MILLRACE_TRAINER_DEVICE": "cuda"}))
    kernels = _Kernels() if asked["profiled"] else None
    steps = measure(bench, gang=gang, on_step=lambda step: kernels.follow(step.step) if kernels else None)
    gang.leave()
    phases = ("data_s", "forward_s", "backward_s", "optimizer_s")
    found = {name: median(getattr(step, name) for step in steps) for name in ("tokens_per_s", "cpu_s", *phases)}
    found |= {"mfu": steps[-1].mfu, "peak_bytes": max(step.peak_bytes for step in steps)}
    found |= {"num_tokens": median(step.num_tokens for step in steps), "kernels": kernels.longest if kernels else ""}
    found |= {"problems": [problem for step in steps for problem in step.problems]}
    print(json.dumps(found))


class _Kernels:
    """What the GPU spends the second step on, which is behind the one that warms up."""

    def __init__(self) -> None:
        import torch

        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self.longest = ""

    def follow(self, step: int) -> None:
        if step == 0:
            self._profile.start()
        if step == 1:
            self._profile.stop()
            events = [each for each in self._profile.key_averages() if each.self_device_time_total > 0]
            total = sum(each.self_device_time_total for each in events)
            events.sort(key=lambda each: -each.self_device_time_total)
            shares = [
                f"{each.self_device_time_total / total:.1%} {each.key[:90]} ({each.count})" for each in events[:25]
            ]
            self.longest = "\n".join([f"{total / 1e6:.3f} s of kernels", *shares])


def measured(name: str, directory: Path, *, steps: int, profiled: bool) -> Case:
    """What a process of its own finds; its error instead if it fails."""
    asked = CASES[name] | {"steps": steps, "profiled": profiled}
    asked["directory"] = str(make_model(asked["size"], directory / asked["size"]))
    command = [sys.executable, __file__, "--work", json.dumps(asked)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CASE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return {"error": f"not done within {CASE_TIMEOUT_S} s"}
    if done.returncode != 0:
        return {"error": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:300]}
    return json.loads(done.stdout.splitlines()[-1])


def report(found: dict[str, Case]) -> str:
    """The table, and the profiles behind it."""
    import torch

    rows = []
    for name, each in found.items():
        if "error" in each:
            rows.append([name, each["error"], *[""] * 6])
            continue
        step_s = each["num_tokens"] / each["tokens_per_s"]
        phases = ", ".join(f"{each[f'{phase}_s']:.3f}" for phase in ("data", "forward", "backward", "optimizer"))
        mfu = "" if each["mfu"] is None else f"{each['mfu']:.1%}"
        peak = f"{each['peak_bytes'] / 2**30:.1f}"
        rows.append(
            [name, f"{each['tokens_per_s']:,.0f}", mfu, peak, f"{step_s:.3f}", phases, "; ".join(each["problems"])]
        )
    head = ["case", "tokens/s", "MFU", "peak GiB", "step s", "data, forward, backward, optimizer s", "problems"]
    about = f"{torch.cuda.get_device_name()}, torch {torch.__version__}. {(__doc__ or '').split(chr(10) * 2)[2]}"
    profiles = [f"## {name}\n\n```\n{each['kernels']}\n```" for name, each in found.items() if each.get("kernels")]
    text = [f"Made by `benchmarks/trainer_gpu.py`. {about}", table(head, rows), *profiles]
    return "\n\n".join(["# Training steps on a GPU", *text])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(json.loads(options.work))
        return
    found: dict[str, Case] = {}
    with tempfile.TemporaryDirectory() as directory:
        for name in options.cases:
            progress(name)
            found[name] = measured(name, Path(directory), steps=options.steps, profiled=options.profile)
            (RESULTS / "trainer_gpu.md").write_text(report(found) + "\n")
    print((RESULTS / "trainer_gpu.md").read_text())


if __name__ == "__main__":
    main()
