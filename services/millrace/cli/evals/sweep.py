"""Several policies evaluated one after the other: each in a run of its own, all in one table and one plot."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from millrace.cli import interrupts
from millrace.cli.errors import Interrupted
from millrace.cli.evals.policies import EvalPolicy
from millrace.cli.evals.prepare import PreparedEval
from millrace.cli.evals.session import RESULTS_NAME, claim, evaluate_here, finished, go_on
from millrace.cli.view.plot import write_eval_plot
from millrace.runlog import run_name
from millrace.storage.clean_up import TEMPORARY, remove

PLOT_NAME = "eval.png"
_WEIGHTS = "policies"
"""Downloaded and merged weights lie here, in the directory of the results, while they are evaluated."""


def evaluate_policies(prepared: PreparedEval) -> tuple[dict[str, Any], Path]:
    """Evaluate every policy; return the results, which are written after each, and their path.

    AlreadyExistsError if the name is taken, of the whole or of one policy's part, and they are not to be resumed.
    """
    parts = [_part(prepared, policy) for policy in prepared.policies]
    directory, *_ = [claim(each) for each in (prepared, *parts)]
    path = directory / RESULTS_NAME
    directory.mkdir(parents=True, exist_ok=True)
    data: dict[str, Any] = {"name": prepared.name, "policies": []}
    path.write_text(json.dumps(data, indent=2) + "\n")  # what `--resume` goes on with, from the first policy on
    try:
        for policy, part in zip(prepared.policies, parts, strict=True):
            found = _evaluate(part, policy, directory)
            data["policies"].append({"policy": policy.label, "step": policy.step, **found})
            path.write_text(json.dumps(data, indent=2) + "\n")
    except (Interrupted, KeyboardInterrupt):
        print(go_on(prepared), file=sys.stderr)
        raise
    write_eval_plot(data, directory / PLOT_NAME)
    return data, path


def _part(prepared: PreparedEval, policy: EvalPolicy) -> PreparedEval:
    """The evaluation of one of the policies."""
    name = run_name.make(prepared.name, policy.label)
    return replace(prepared, name=name, policies=(), part_of=prepared.name)


def _evaluate(one: PreparedEval, policy: EvalPolicy, directory: Path) -> dict[str, Any]:
    """The results of one policy, from an earlier attempt where that has finished it."""
    place = directory / _WEIGHTS / policy.label
    one = replace(one, weights=policy.digest())
    if one.is_resumed and (data := finished(one)) is not None:
        print(f"{policy.label}: evaluated before", file=sys.stderr)
        return data
    remove(place, what=TEMPORARY)  # a download that was interrupted
    print(f"{policy.label}: runs/{one.name}", file=sys.stderr)
    one = replace(one, config=one.config.with_model(str(policy.fetch(place))))
    data, _ = interrupts.run(lambda signals: evaluate_here(one, signals))
    remove(place, what=TEMPORARY)
    return data
