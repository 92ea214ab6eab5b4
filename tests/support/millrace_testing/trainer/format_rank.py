"""One rank of a gang, forked in test_numerics.py: five steps, a checkpoint among them, the steps behind it again."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from millrace.config.sections.rl import FakeDataConfig, RLConfig
from millrace.custom_code import CustomCode
from millrace.runlog import Names
from millrace.storage.local import LocalStore
from millrace.trainer.bench import fake_batch, fake_samples
from millrace.trainer.checkpoint.manifest import Author
from millrace.trainer.checkpoint.resume import resume
from millrace.trainer.checkpoint.store import CheckpointStore
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.learning.batch import BatchLayout
from millrace.trainer.learning.learner import Learner, digest_of, state_tensors
from millrace.trainer.loop import learn
from millrace.trainer.model.pretrained import probe
from millrace.trainer.model.published import policy_tensors

STEPS, SAVED = 5, 3
VOCABULARY = 32


def main(config_file: Path, directory: Path) -> None:
    """Write what this rank saw as JSON."""
    gang = Gang.join()
    config = RLConfig.model_validate_json(config_file.read_bytes())
    checkpoints = CheckpointStore(LocalStore(directory / "store"), Names("p", "u"), gang=gang)
    learner = _learner(config, gang)
    facts: dict[str, Any] = {"digests": _steps(learner, range(SAVED))}
    state = state_tensors(learner.model, learner.optimizer, gang=gang)
    facts["formats"] = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in state.items()}
    # What is saved of a float32 master has to have more bits than bfloat16, the root's after a probe, too.
    facts["rounded"] = [name for name, tensor in state.items() if name.startswith("model.") and _is_rounded(tensor)]
    facts["whole"] = [
        name
        for name, tensor in state.items()
        if not name.startswith("rng.") and not isinstance(tensor, DTensor) and tensor.numel() > 1
    ]
    author = Author(run_hash="r", epoch=1, determinism="strict", base_digest=learner.base_digest)
    written = checkpoints.write(state, step=SAVED, lineage=0, chain_hash=b"c" * 32, author=author)
    manifest = checkpoints.commit(written, gang=gang)
    facts["bytes"] = manifest.size_bytes
    facts["state_bytes"] = sum(
        tensor.numel() * tensor.element_size()  # of a DTensor the numbers of all its shares
        for name, tensor in state.items()
        if name.startswith("model.") or ".exp_avg" in name
    )
    facts["digests"] += _steps(learner, range(SAVED, STEPS))
    again = _learner(config, gang)
    author = replace(author, base_digest=again.base_digest)
    found = resume(checkpoints, again.model, again.optimizer, gang=gang, author=author)
    assert found.manifest is not None
    facts["again"] = _steps(again, range(found.manifest.step, STEPS))
    (directory / f"rank-{gang.rank}.json").write_text(json.dumps(facts))
    gang.leave()


def _learner(config: RLConfig, gang: Gang) -> Learner:
    at = Path(config.trainer.model.name)
    return Learner.of_start_model(config, gang=gang, directory=at, start_directory=at, code=CustomCode())


def _steps(learner: Learner, steps: range) -> list[str]:
    """Return the digest of the policy behind each, and what the publisher does before a checkpoint is saved: a
    probe.
    """
    layout, digests = BatchLayout.of(learner.config, learner.packing), list[str]()
    for step in steps:
        data = FakeDataConfig(type="variable", batch_size=4, seq_len=16)
        samples = fake_samples(data, step=step, seed=0, vocabulary=VOCABULARY)
        learn(learner, fake_batch(samples, step=step, layout=layout, gang=learner.gang))
        digests.append(digest_of(policy_tensors(learner.model, dtype=learner.publish_dtype)))
        probe(learner.model, vocabulary=VOCABULARY, device=learner.gang.device)
    return digests


def _is_rounded(tensor: torch.Tensor) -> bool:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return bool(local.bfloat16().to(local.dtype).equal(local))
