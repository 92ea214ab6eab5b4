"""Learning curves of whole runs with `credit = "turn"` on an environment of two turns, of one or more source trees.

    python benchmarks/turn_credit_runs.py --model DIR --tree before=../old/services --tree after=services [--seeds 3]

Each run is a whole stack on this machine that trains the tiny model of `examples/reverse_text/make_model.py` on
`benchmarks/environments/two_turns.py`: a turn earns 1 or nothing, and the rubric scores groups. Prints the mean reward
(best 2) of the steps around those that are named. Half a minute to a minute a run on two cores.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from report import table

ROOT = Path(__file__).parents[1]
ENVIRONMENTS = Path(__file__).parent / "environments"
SPREAD = 2
"""Steps on either side that are averaged."""
RUN_S = 600.0


def curve(tree: str, *, model: str, steps: int, seed: int, credit: str) -> np.ndarray:
    """The mean reward of every step of a run, float64 [steps]."""
    with tempfile.TemporaryDirectory() as directory:
        config = {
            "max-steps": steps,
            "seq-len": 64,
            "seed": seed,
            "output-dir": directory,
            "run.name": "curve",
            "model.name": str(Path(model).resolve()),
            "trainer.optim.lr": 3e-3,
            "orchestrator.batch-size": 64,
            "orchestrator.rollouts-per-example": 8,
            "orchestrator.sampling.max-tokens": 2,
            "orchestrator.env": '[{"id": "two-turns"}]',
            "orchestrator.algo": json.dumps({"type": "grpo", "credit": credit}),
        }
        flags = [word for key, value in config.items() for word in (f"--{key}", str(value))]
        paths = os.pathsep.join([str(ENVIRONMENTS), str(Path(tree).resolve())])
        env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "millrace.cli", "rl", *flags],
            env=env, capture_output=True, text=True, check=False, timeout=RUN_S,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"a run of {tree} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        lines = [json.loads(line) for line in (Path(directory) / "curve/metrics.jsonl").read_text().splitlines()]
    return np.asarray([line["reward_mean"] for line in lines if line["kind"] == "step"], np.float64)


def main() -> None:
    """Print the curves as a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tree", action="append", required=True, help="LABEL=DIRECTORY of `services`")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--credit", default="turn")
    args = parser.parse_args()
    shown = sorted({*range(SPREAD, args.steps - SPREAD, 10), args.steps - SPREAD - 1})
    rows = []
    for label, _, tree in (each.partition("=") for each in args.tree):
        curves = np.asarray(
            [
                curve(tree, model=args.model, steps=args.steps, seed=seed, credit=args.credit)
                for seed in range(args.seeds)
            ]
        )
        near = np.stack([curves[:, at - SPREAD : at + SPREAD + 1].mean(axis=1) for at in shown])
        spread = near.std(axis=1, ddof=1) / np.sqrt(args.seeds) if args.seeds > 1 else np.zeros(len(near))
        means = zip(near.mean(axis=1), spread, strict=True)
        rows.append([label, *(f"{mean:.2f} ± {error:.2f}" for mean, error in means)])
        print(rows[-1], file=sys.stderr, flush=True)
    print(table(["mean reward (best 2) around step", *map(str, shown)], rows))


if __name__ == "__main__":
    main()
