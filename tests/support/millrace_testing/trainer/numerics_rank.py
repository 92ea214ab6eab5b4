"""One process, or one rank of a gang for test_numerics.py: what it computes of one batch."""

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from millrace.config.sections.rl import RLConfig
from millrace.custom_code import CustomCode
from millrace.internal.v1 import batch_pb2
from millrace.rollouts.types import TrainSample
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.learning.batch import Minibatch, build_micro_batch
from millrace.trainer.learning.learner import Learner, state_tensors
from millrace.trainer.log.batches import Batch
from millrace.trainer.loop import forward_backward

_LENGTHS = (13, 7)  # a sum of two has one order only


def main(configs: Path, facts: Path) -> None:
    """Learn from one batch as each config says, one after the other, and write what came of it as tensors."""
    gang = Gang.join()
    for path in sorted(configs.iterdir()):
        computed = compute(RLConfig.model_validate_json(path.read_bytes()), gang)
        save_file(computed, facts / f"{path.stem}-{gang.rank}.safetensors")
    gang.leave()


def compute(config: RLConfig, gang: Gang) -> dict[str, torch.Tensor]:
    """Return the log-probs and entropies by sample, of this rank's; gradients and the state after a step, whole,
    and the loss.
    """
    directory = Path(config.trainer.model.name)
    learner = Learner.of_start_model(
        config, gang=gang, directory=directory, start_directory=directory, code=CustomCode()
    )
    mine = range(gang.rank, len(_LENGTHS), gang.world_size)
    micro_batches = [build_micro_batch([_sample(index)], seq_len=32, device=gang.device) for index in mine]
    facts: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for index, micro_batch in zip(mine, micro_batches, strict=True):
            facts[f"logprobs.{index}"], facts[f"entropy.{index}"] = learner.logprobs(micro_batch)
    header = batch_pb2.BatchHeader(envs=["a"])
    rows = [[index] for index in mine]
    minibatch = Minibatch(micro_batches=micro_batches, samples=rows)
    batch = Batch(header=header, chain_hash=b"", minibatches=[minibatch], wait_s=0.0, load_s=0.0)
    metrics, _ = forward_backward(learner, batch, minibatch)
    facts["loss"] = torch.tensor(metrics.values()["loss/mean"], dtype=torch.float64)
    for name, parameter in learner.model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None
            facts[f"grad.{name}"] = _whole(parameter.grad)
    report = learner.optimizer.step(0)
    facts["grad_norm"] = torch.tensor(report.grad_norm, dtype=torch.float64)
    state = state_tensors(learner.model, learner.optimizer, gang=gang)
    return facts | {name: _whole(tensor).clone() for name, tensor in state.items() if not name.startswith("rng.")}


def _sample(index: int) -> TrainSample:
    rng = np.random.default_rng(index)
    length = _LENGTHS[index]
    mask = np.ones(length, np.uint8)
    mask[:3] = 0
    return TrainSample(
        token_ids=rng.integers(0, 32, length).astype(np.int32),
        loss_mask=mask,
        inference_logprobs=np.where(mask, -3.5, 0.0).astype(np.float32),
        advantages=(mask * rng.normal()).astype(np.float32),
        ordinal=index,
        member=0,
        attempt=0,
        env="a",
        reward=0.0,
        temperature=1.0,
        min_version=0,
        max_version=0,
        lineage=0,
    )


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[operator]
