"""A step changes every weight that is trained, in every format: of what an optimizer is not given nothing is said."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from millrace.config.sections.rl import TrainerBench
from millrace.custom_code import CustomCode
from millrace.trainer.bench import fake_batch, fake_samples
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.learning.batch import BatchLayout
from millrace.trainer.learning.learner import Learner
from millrace.trainer.loop import learn
from millrace_testing.trainer.equality import make_model


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    """Return all of them, whole."""
    found = learner.model.state_dict()
    return {name: (each.full_tensor() if isinstance(each, DTensor) else each).clone() for name, each in found.items()}


@pytest.mark.parametrize(
    "keys",
    [
        {"dtype": "float32"},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "reshard_after_forward": False},
        {"dtype": "bfloat16", "optimization_dtype": "bfloat16"},
    ],
    ids=lambda keys: "-".join(map(str, keys.values())),
)
def test_two_steps_of_several_micro_batches_change_every_weight(tmp_path: Path, keys: dict[str, Any]) -> None:
    directory = make_model("dense", tmp_path)
    model = {"name": str(directory), "seq_len": 32, **keys}
    trainer = {"model": model, "micro_batch_tokens": 64, "optim": {"lr": 1e-2}, "scheduler": {"warmup_steps": 0}}
    data = {"type": "variable", "batch_size": 8, "seq_len": 32}
    bench, gang = TrainerBench.model_validate({"trainer": trainer, "data": data}), Gang()
    try:
        learner = Learner.of_start_model(
            bench, gang=gang, directory=directory, start_directory=directory, code=CustomCode()
        )
        before, layout = weights(learner), BatchLayout.of(learner.config, learner.packing)
        for step in range(2):
            samples = fake_samples(bench.data, step=step, seed=0, vocabulary=64)
            batch = fake_batch(samples, step=step, layout=layout, gang=gang)
            assert len(batch.minibatches[0].micro_batches) > 1
            learn(learner, batch)
        after = weights(learner)
    finally:
        gang.leave()
    assert not [name for name in before if torch.equal(before[name], after[name])], "these stay as they are"
