"""One process, or one rank of a gang that torchrun starts for equality.py: five steps of a tiny model.

Each job is a JSON file: the config of a run, the steps to make, and from which checkpoint to go on. Batches are those
of a plan with several micro-batches per rank, in which rows hold several samples unless they are padded.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch._dynamo.utils import counters

from millrace.config.sections.rl import RLConfig
from millrace.custom_code import CustomCode
from millrace.errors import MillraceError
from millrace.internal.v1 import batch_pb2
from millrace.models.routing import RoutingShape
from millrace.policies.publish import TensorPart
from millrace.rollouts.types import TrainSample
from millrace.runlog import Names
from millrace.storage.local import LocalStore
from millrace.trainer.checkpoint.manifest import Author
from millrace.trainer.checkpoint.resume import restore
from millrace.trainer.checkpoint.store import CheckpointStore
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.learning.batch import Minibatch, build_micro_batch
from millrace.trainer.learning.learner import Learner, state_tensors
from millrace.trainer.learning.plan import Rows, in_order, plan_micro_batches
from millrace.trainer.log.batches import Batch
from millrace.trainer.loop import forward_backward
from millrace.trainer.model.compiled import take_failures
from millrace.trainer.model.published import Snapshots

_LENGTHS = (16, 4, 9, 2, 7, 3, 5, 11, 16, 6, 8, 10, 2, 4, 3, 16, 7, 5, 9, 6)
_MAX_TOKENS = 32


def main(jobs: Path) -> None:
    """Do the jobs of a directory, one after the other."""
    gang = Gang.join()
    for path in sorted(jobs.glob("*.json")):
        job = json.loads(path.read_bytes())
        try:
            _work(job, path.with_suffix(""), gang)
        except MillraceError as error:
            path.with_suffix(f".error-{gang.rank}").write_text(f"{error.reason}: {error.message}")
    gang.leave()


def _work(job: dict[str, Any], output: Path, gang: Gang) -> None:
    config, before = RLConfig.model_validate(job["config"]), counters["stats"]["unique_graphs"]
    directory = Path(config.trainer.model.name)
    learner = Learner.of_start_model(
        config, gang=gang, directory=directory, start_directory=directory, code=CustomCode()
    )
    checkpoints = CheckpointStore(LocalStore(output.parent / "store"), Names("p", job["run"]), gang=gang)
    if job["first"]:
        manifest = checkpoints.read(job["first"])
        restore(checkpoints, manifest, learner.model, learner.optimizer, gang=gang)
    facts: dict[str, list[Any]] = {"loss": [], "grad_norm": [], "uncompiled": []}
    for step in range(job["first"], job["last"]):
        minibatch = _minibatch(step, learner, gang)
        header = batch_pb2.BatchHeader(envs=["a"], step=step)
        batch = Batch(header=header, chain_hash=b"", minibatches=[minibatch], wait_s=0.0, load_s=0.0)
        metrics, _ = forward_backward(learner, batch, minibatch)
        facts["loss"].append(metrics.values()["loss/mean"])
        facts["grad_norm"].append(learner.optimizer.step(step).grad_norm)
        facts["uncompiled"] += take_failures(learner.model)
    save_file(_logprobs(_minibatch(0, learner, gang), learner, gang), f"{output}.{gang.rank}.tokens")
    state = state_tensors(learner.model, learner.optimizer, gang=gang)
    if job["saves"]:
        author = Author(run_hash="r", epoch=1, determinism="strict")
        written = checkpoints.write(state, step=job["last"], lineage=0, chain_hash=b"c" * 32, author=author)
        checkpoints.commit(written, gang=gang)
    snapshots = Snapshots(learner.model, dtype=torch.float32, rank=gang.rank, device=gang.device, layout=gang.layout)
    parts = snapshots.take(1)
    tensors = {f"{part.name}@{part.start}": _tensor(part) for part in parts}
    save_file(tensors, f"{output}.{gang.rank}.safetensors")
    if gang.is_leader:
        shapes = {part.name: part.shape for part in parts}
        rows = [row for rank in _plan(learner, gang) for micro_batch in rank for row in micro_batch]
        packed = sum(len(row) > 1 for row in rows)
        graphs = counters["stats"]["unique_graphs"] - before
        counted = {"packed_rows": packed, "graphs": graphs}
        Path(f"{output}.facts").write_text(json.dumps({**facts, "shapes": shapes, **counted}))


def _plan(learner: Learner, gang: Gang) -> list[list[Rows]]:
    ranks = gang.layout.data_size
    return plan_micro_batches([*_LENGTHS], max_tokens=_MAX_TOKENS, world_size=ranks, packing=learner.packing)


def _minibatch(step: int, learner: Learner, gang: Gang) -> Minibatch:
    routing = learner.routing
    samples = [_sample(length, step * 100 + index, routing) for index, length in enumerate(_LENGTHS)]
    plan = _plan(learner, gang)[gang.data_rank]
    flat = [[index for row in rows for index in row] for rows in plan]
    made: dict[str, Any] = {"seq_len": 32, "device": gang.device, "routing": routing}
    micro_batches = [
        build_micro_batch([samples[i] for i in places], rows=in_order(rows), **made)
        for places, rows in zip(flat, plan, strict=True)
    ]
    return Minibatch(micro_batches=micro_batches, samples=flat)


@torch.no_grad()
def _logprobs(minibatch: Minibatch, learner: Learner, gang: Gang) -> dict[str, torch.Tensor]:
    """Return the log-probs by sample, of those that this rank speaks for."""
    found: dict[str, torch.Tensor] = {}
    for micro_batch, samples in zip(minibatch.micro_batches, minibatch.samples, strict=True):
        logprobs_BT, _ = learner.logprobs(micro_batch)
        if gang.layout.is_first_of_samples(gang.rank):
            found |= {f"{place}": logprobs_BT[row, : _LENGTHS[place]].clone() for row, place in enumerate(samples)}
    return found


def _tensor(part: TensorPart) -> torch.Tensor:
    return torch.from_numpy(part.bits.view(np.float32).copy())


def _sample(length: int, seed: int, routing: RoutingShape | None) -> TrainSample:
    rng = np.random.default_rng(seed)
    experts = None
    if routing is not None:  # any others than the routers would choose
        order = np.random.default_rng(seed).random((length - 1, len(routing.layers), routing.num_experts))
        experts = order.argsort(axis=-1)[..., : routing.top_k].astype(np.uint8)
    mask = np.ones(length, np.uint8)
    mask[0] = 0
    return TrainSample(
        token_ids=rng.integers(0, 64, length).astype(np.int32),
        loss_mask=mask,
        inference_logprobs=np.where(mask, -4.0, 0.0).astype(np.float32),
        advantages=(mask * rng.normal()).astype(np.float32),
        ordinal=seed,
        member=0,
        attempt=0,
        env="a",
        reward=0.0,
        temperature=1.0,
        min_version=0,
        max_version=0,
        lineage=0,
        routed_experts=experts,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
