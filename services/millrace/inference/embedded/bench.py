"""`python -m millrace.inference.embedded.bench --config FILE`: the embedded engine alone, on random prompts.

A step runs one prompt for each sequence that fits at once, first for one token (the cost of prompts), then for all.
"""

import argparse
import asyncio
import itertools
import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NoReturn

import numpy as np

from millrace.config.sections.rl import InferenceBench
from millrace.inference.embedded.engine import EmbeddedEngine
from millrace.inference.engine import GenerateRequest, PolicyIdentity, SamplingParams
from millrace.inference.model_files import load_config
from millrace.processes.lifeline import run_service


async def measure(bench: InferenceBench, *, on_step: Callable[[float, float], None]) -> dict[str, float]:
    """Run the embedded engine on random prompts and return medians over the steps, and the peak memory in bytes.

    The medians are the seconds of the prompts alone and of a whole step, and tokens/s of both. `on_step` is called
    after each step with these two numbers of seconds.
    """
    directory = Path(bench.model)
    vocabulary = (await asyncio.to_thread(load_config, directory)).get_text_config().vocab_size
    engine = EmbeddedEngine(max_num_seqs=bench.max_num_seqs)
    await engine.load(directory, None, identity=PolicyIdentity(run_uid="", lineage=0, version=0))
    random = np.random.default_rng(0)

    async def play(num_tokens: int) -> float:
        """Generate `num_tokens` for as many random prompts as run at once, and return the seconds that it took."""
        prompts = random.integers(0, vocabulary, (bench.max_num_seqs, bench.prompt_tokens)).tolist()
        sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        began = time.perf_counter()
        requests = [
            GenerateRequest(request_id=f"{began}-{number}", prompt_token_ids=tuple(prompt), sampling=sampling)
            for number, prompt in enumerate(prompts)
        ]
        await asyncio.gather(*(engine.generate(request) for request in requests))
        return time.perf_counter() - began

    try:
        await play(2)  # warms up
        pairs = list[tuple[float, float]]()
        for _ in range(bench.steps):
            pairs.append((await play(1), await play(bench.completion_tokens)))
            on_step(*pairs[-1])
    finally:
        await engine.close()
    first_s, whole_s = median(first for first, _ in pairs), median(whole for _, whole in pairs)
    sequences = bench.max_num_seqs
    return {
        "prompt_s": first_s,
        "step_s": whole_s,
        "prompt_tokens_per_s": sequences * bench.prompt_tokens / first_s,
        "completion_tokens_per_s": sequences * bench.completion_tokens / whole_s,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0,
    }


def main() -> NoReturn:
    """Run the bench that the `--config` file describes, write the results beside that file, and print a table; exit."""
    parser = argparse.ArgumentParser(description="Steps of the embedded engine on random prompts.")
    parser.add_argument("--config", type=Path, required=True, help="what `millrace inference --bench` writes")
    path = parser.parse_args().config
    run_service(lambda: _run(path))


def _run(path: Path) -> int:
    """Run the bench that the file describes, write `metrics.jsonl` and `bench.json` beside it, print a table and
    return 0.
    """
    bench = InferenceBench.model_validate_json(path.read_bytes())
    sequences, steps = bench.max_num_seqs, itertools.count(1)
    with (path.parent / "metrics.jsonl").open("w") as metrics:

        def on_step(first_s: float, whole_s: float) -> None:
            """Write the row of one step into `metrics.jsonl`."""
            row = {
                "step": next(steps),
                "perf/prompt_throughput": sequences * bench.prompt_tokens / first_s,
                "perf/throughput": sequences * bench.completion_tokens / whole_s,
                "time/prompts": first_s,
                "time/step": whole_s,
            }
            metrics.write(json.dumps(row) + "\n")
            metrics.flush()

        found = asyncio.run(measure(bench, on_step=on_step))
    (path.parent / "bench.json").write_text(json.dumps({"summary": found, "config": bench.model_dump()}, indent=2))
    print(
        f"{bench.model}: {bench.max_num_seqs} sequences at once, {bench.prompt_tokens} tokens of prompt and "
        f"{bench.completion_tokens} sampled; medians of {bench.steps} steps\n"
        f"{'prompt tokens/s':<20} {found['prompt_tokens_per_s']:,.0f}\n"
        f"{'sampled tokens/s':<20} {found['completion_tokens_per_s']:,.0f} (with their prompts)\n"
        f"{'peak memory':<20} {found['peak_bytes'] / 2**30:.2f} GiB\n"
        f"{'step':<20} {found['step_s']:.3f} s\n"
        f"{'  prompts':<20} {found['prompt_s']:.3f} s\n"
        f"{'  completions':<20} {found['step_s'] - found['prompt_s']:.3f} s"
    )
    return 0


if __name__ == "__main__":
    main()
