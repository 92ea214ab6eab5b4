"""`millrace-trainer bench --config FILE`: progress on stderr, the table on stdout, everything in files beside FILE.

`bench.json` has the summary and each step, `metrics.jsonl` the steps under prime-rl's names.
"""

import json
import sys
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from millrace.config.sections.bench import TrainerBench
from millrace.errors import NotFoundError
from millrace.telemetry.logging import setup
from millrace.trainer.bench.measure import BenchStep, measure
from millrace.trainer.bench.report import lines, summary
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.model.shortage import shortage_named


def run(path: Path) -> int:
    """Measure as the document in `path` says; return the exit code."""
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
