"""`millrace sft` with `[eval]`, as a user runs it: figures of the weights after a due step, and nothing left over."""

import json
from collections.abc import Callable

import pytest

from millrace_testing.workplaces import EXAMPLES, Workplace

pytestmark = [pytest.mark.long, pytest.mark.timeout(280)]

REWARD = "eval/reverse-text/reward/mean"
CONFIG = """
max_steps = 2
[run]
name = "tuned"
[model]
name = "outputs/reverse-text/base"
[data]
name = "outputs/reverse-text/sft.jsonl"
batch_size = 8
seq_len = 64
[optim]
lr = 4e-3
[eval]
skip_first_step = true
num_examples = 4
[eval.sampling]
temperature = 0.0
max_tokens = 8
[[eval.env]]
id = "reverse-text"
args = { num_train = 8, num_eval = 4 }
"""


def test_the_model_of_a_fine_tuning_is_evaluated_beside_it(
    make_workplace: Callable[[str], Workplace],
) -> None:
    place = make_workplace("sft-evaluations")
    place.run(str(EXAMPLES / "make_model.py"))
    (place.path / "sft.toml").write_text(CONFIG)
    output = place.millrace("sft", "@", "sft.toml")
    assert "eval reverse-text  step 2" in output, output
    run = place.path / "outputs" / "tuned"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rewards = [(line["step"], line[REWARD]) for line in lines if REWARD in line]
    policies = json.loads((run / "eval.json").read_text())["policies"]
    assert rewards == [(each["step"], each["envs"]["reverse-text"]["reward_mean"]) for each in policies]
    assert [step for step, _ in rewards] == [2]
    assert all(each["envs"]["reverse-text"]["num_rollouts"] == 4 for each in policies)
    assert list((run / "evals" / "due").iterdir()) == [], "weights that were evaluated are removed"
