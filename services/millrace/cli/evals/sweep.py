"""Several policies evaluated one after the other: each in a run of its own, all in one table and one plot."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from millrace.cli import interrupts
from millrace.cli.evals.policies import EvalPolicy
from millrace.cli.evals.prepare import PreparedEval
from millrace.cli.evals.session import RESULTS_NAME, evaluate_here, finished
from millrace.cli.view.plot import write_eval_plot
from millrace.errors import AlreadyExistsError
from millrace.runlog import run_name

PLOT_NAME = "eval.png"
_WEIGHTS = "policies"
"""Downloaded and merged weights lie here, in the directory of the results, while they are evaluated."""


def evaluate_policies(prepared: PreparedEval) -> tuple[dict[str, Any], Path]:
    """Evaluate every policy; return the results, which are written after each, and their path.

    AlreadyExistsError if there are results of this name already and they are not to be resumed.
    """
    directory = Path(prepared.config.output_dir) / prepared.name
    path = directory / RESULTS_NAME
    if directory.exists() and not prepared.is_resumed:
        raise AlreadyExistsError(
            f"{directory} exists already", reason="EVAL_EXISTS", remedy="go on with --resume, or choose another --name"
        )
    directory.mkdir(parents=True, exist_ok=True)
    data: dict[str, Any] = {"name": prepared.name, "policies": []}
    for policy in prepared.policies:
        data["policies"].append({"policy": policy.label, "step": policy.step, **_evaluate(prepared, policy, directory)})
        path.write_text(json.dumps(data, indent=2) + "\n")
    write_eval_plot(data, directory / PLOT_NAME)
    return data, path


def _evaluate(prepared: PreparedEval, policy: EvalPolicy, directory: Path) -> dict[str, Any]:
    """The results of one policy, from an earlier attempt where that has finished it."""
    place = directory / _WEIGHTS / policy.label
    one = replace(prepared, name=run_name.make(prepared.name, policy.label), policies=(), is_of_policy=True)
    if prepared.is_resumed and (data := finished(one)) is not None:
        print(f"{policy.label}: evaluated before", file=sys.stderr)
        return data
    shutil.rmtree(place, ignore_errors=True)  # a download that was interrupted
    print(f"{policy.label}: runs/{one.name}", file=sys.stderr)
    one = replace(one, config=one.config.with_model(str(policy.fetch(place))))
    data, _ = interrupts.run(lambda signals: evaluate_here(one, signals))
    shutil.rmtree(place, ignore_errors=True)
    return data
