"""The table of a bench: medians over steps of tokens/s, MFU, peak memory, and time by phase."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from millrace.config.sections.bench import TrainerBench
from millrace.trainer.bench.measure import BenchStep

_PHASES = ("data", "forward", "backward", "optimizer")


def summary(steps: Sequence[BenchStep], *, num_ranks: int, peak_bytes: int) -> dict[str, Any]:
    """Medians over the steps as plain data; `peak_bytes` is that of the rank that holds most."""
    used = [step.mfu for step in steps if step.mfu is not None]
    tokens_per_s = median(step.tokens_per_s for step in steps)
    return {
        "steps": len(steps),
        "ranks": num_ranks,
        "tokens_per_step": round(median(step.num_tokens for step in steps)),
        "step_s": median(step.seconds for step in steps),
        "cpu_s": median(step.cpu_s for step in steps),
        "tokens_per_s": tokens_per_s,
        "tokens_per_s_per_rank": tokens_per_s / num_ranks,
        "mfu": median(used) if used else None,
        "peak_bytes": peak_bytes,
        **{f"{name}_s": median(getattr(step, f"{name}_s") for step in steps) for name in _PHASES},
    }


def lines(bench: TrainerBench, found: Mapping[str, Any]) -> list[str]:
    """The summary as people read it."""
    data, ranks = bench.data, found["ranks"]
    mfu = "unknown (set peak_tflops)" if found["mfu"] is None else f"{found['mfu']:.1%}"
    rows = [
        ("tokens/s", f"{found['tokens_per_s']:,.0f}"),
        *([("tokens/s per rank", f"{found['tokens_per_s_per_rank']:,.0f}")] if ranks > 1 else []),
        ("MFU", mfu),
        ("peak memory", f"{found['peak_bytes'] / 2**30:.2f} GiB{' of the fullest rank' if ranks > 1 else ''}"),
        ("step", f"{found['step_s']:.3f} s ({found['cpu_s']:.3f} CPU s of one rank)"),
        *(
            (f"  {name}", f"{found[f'{name}_s']:.3f} s  {found[f'{name}_s'] / found['step_s']:4.0%}")
            for name in _PHASES
        ),
    ]
    lengths = "" if data.type == "fixed" else "10 to 100 % of "
    return [
        f"{bench.trainer.model.name}: {data.batch_size} samples of {lengths}{data.seq_len} tokens, micro-batches of "
        f"{bench.trainer.micro_batch_tokens} tokens, {ranks} rank{'s' if ranks > 1 else ''}; medians of "
        f"{found['steps']} steps after one that warms up",
        *(f"{name:<18} {value}" for name, value in rows),
    ]
