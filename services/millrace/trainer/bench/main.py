"""`millrace-trainer bench --config FILE`: progress on stderr, the table on stdout, everything in files beside FILE.

`bench.json` has the summary and each step, `metrics.jsonl` the steps under prime-rl's names.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from transformers.utils.logging import disable_progress_bar

from millrace.config.sections.rl import TrainerBench
from millrace.errors import NotFoundError
from millrace.models.torch_support import shortage_named
from millrace.telemetry.logging import setup
from millrace.trainer.bench.measure import BenchStep, measure
from millrace.trainer.gang.distributed import Gang


def run(path: Path) -> int:
    """Run the benchmark that the JSON document in `path` describes, and return 0.

    Writes each rank's metrics beside the document; rank 0 also writes `bench.json` and prints the table.
    """
    bench = _load(path)
    setup("trainer", level="warning", json_lines=False)
    disable_progress_bar()
    gang = Gang.join()
    try:
        name = f"metrics-{gang.rank}.jsonl" if gang.rank else "metrics.jsonl"
        with shortage_named("train on batches of this size"), (path.parent / name).open("w") as metrics:

            def on_step(step: BenchStep) -> None:
                metrics.write(json.dumps(_metrics(step)) + "\n")
                metrics.flush()
                if gang.is_leader:
                    _say(step, bench.steps)

            steps = measure(bench, gang=gang, on_step=on_step)
        (peak,) = gang.max([float(steps[-1].peak_bytes)])
    finally:
        gang.leave()
    if gang.is_leader:
        found = summary(steps, num_ranks=gang.world_size, peak_bytes=int(peak))
        document = {"summary": found, "steps": [step.to_json() for step in steps], "config": bench.model_dump()}
        (path.parent / "bench.json").write_text(json.dumps(document, indent=2) + "\n")
        print("\n".join(lines(bench, found)))
    return 0


def _load(path: Path) -> TrainerBench:
    try:
        return TrainerBench.model_validate_json(path.read_bytes())
    except OSError as error:
        raise NotFoundError(
            f"config {path} cannot be read: {error.strerror}",
            reason="CONFIG_NOT_FOUND",
            remedy="pass the file that `millrace trainer --bench` writes",
        ) from error


def _metrics(step: BenchStep) -> dict[str, float | int]:
    return {
        "step": step.step,
        "perf/throughput": step.tokens_per_s,
        **({} if step.mfu is None else {"perf/mfu": step.mfu}),
        "perf/peak_memory": step.peak_bytes / 2**30,
        "progress/tokens": step.num_tokens,
        "time/step": step.seconds,
        "time/load_data": step.data_s,
        "time/forward": step.forward_s,
        "time/backward": step.backward_s,
        "time/optimizer": step.optimizer_s,
    }


def _say(step: BenchStep, num_steps: int) -> None:
    which = f"step {step.step}/{num_steps}" if step.step else "warm-up"
    print(f"{which}  {step.seconds:.3f} s  {step.tokens_per_s:,.0f} tokens/s", file=sys.stderr, flush=True)
    for problem in step.problems:
        print(f"warning: {problem}", file=sys.stderr, flush=True)


# The table of a bench: medians over steps of tokens/s, MFU, peak memory, and time by phase.

_PHASES = ("data", "forward", "backward", "optimizer")


def summary(steps: Sequence[BenchStep], *, num_ranks: int, peak_bytes: int) -> dict[str, Any]:
    """Return medians over `steps`, which are those after the warm-up; `peak_bytes` is the largest of all ranks."""
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
    """Return the lines of the table for people; `found` is what `summary` returned."""
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
