"""Measures the peak of torch's own CPU allocator over real training steps, in a process of its own.

The profiler hears every allocation and release, also those inside an operation, which no dispatch mode sees; the
resident set would count libraries, threads and what the C allocator keeps.
"""

import json
import sys
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from millrace.config.sections.rl import RLConfig
from millrace.custom_code import CustomCode
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.learning.batch import MicroBatch, build_micro_batch, fake_sample
from millrace.trainer.learning.learner import Learner
from millrace.trainer.losses import Objective, divisor

STEPS = 2


def measure(config: RLConfig, directory: Path) -> int:
    """Return the bytes at the peak of two steps of two full micro-batches each, of a process that holds model and
    optimizer.
    """
    gang = Gang.join()
    learner = Learner.of_start_model(
        config, gang=gang, directory=directory, start_directory=directory, code=CustomCode()
    )
    held = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in _tensors(learner)}
    trainer = config.trainer
    rows = trainer.micro_batch_tokens // trainer.model.seq_len
    samples = [fake_sample(trainer.model.seq_len, vocabulary=256) for _ in range(rows)]
    micro_batch = build_micro_batch(samples, seq_len=trainer.model.seq_len, device=gang.device)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        for step in range(STEPS):
            _step(learner, micro_batch, step)
    return sum(held.values()) + _highest(recorded)


def _step(learner: Learner, micro_batch: MicroBatch, step: int) -> None:
    objective = Objective(
        loss_of=learner.loss_of,
        config=learner.config.loss,
        rl_divisor=divisor(learner.config.loss, num_tokens=micro_batch.num_rl_tokens, num_samples=1),
        num_ce_tokens=0,
    )
    with learner.learning():
        for _ in range(2):
            inputs, _, _ = learner.loss_inputs(micro_batch, objective)
            losses, loss = objective(inputs)
            loss.backward()
            del inputs, losses, loss
    learner.optimizer.step(step)


def _tensors(learner: Learner) -> list[torch.Tensor]:
    """Return what lives before the first step."""
    parts = [part for each in learner.optimizer.state_tensors().values() for part in each.values()]
    tensors = [*learner.model.parameters(), *learner.model.buffers(), *parts]
    return [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]


def _highest(recorded: profile) -> int:
    """Return the most that was allocated in the profile's time and not yet released."""
    assert recorded.profiler is not None and recorded.profiler.kineto_results is not None
    events = [each for each in recorded.profiler.kineto_results.events() if each.name() == "[memory]"]
    held = highest = 0
    for each in sorted(events, key=lambda event: event.start_ns()):
        held += each.nbytes()
        highest = max(highest, held)
    return highest


if __name__ == "__main__":
    torch.set_num_threads(1)
    asked = json.loads(sys.stdin.read())
    print(json.dumps({"peak": measure(RLConfig.model_validate(asked["config"]), Path(asked["directory"]))}))
