"""Rows of a dataset beside the rollouts of an RL step: which ones, their gradient, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from millrace.config.load import validate_document
from millrace.config.sections.data import DatasetConfig
from millrace.config.sections.loss import LossConfig
from millrace.config.sections.rl import RLConfig
from millrace.errors import InvalidSpecError, InvalidStateError, NotFoundError
from millrace.internal.v1 import batch_pb2
from millrace.models.vocabulary import load_tokenizer
from millrace.policies.stops import turn_stops
from millrace.rollouts.batch_wire import pack_batch
from millrace.rollouts.types import TrainSample
from millrace.runlog.names import Names
from millrace.storage.local import LocalStore
from millrace.trainer.checkpoint.manifest import Author, require_same_dataset
from millrace.trainer.checkpoint.store import CheckpointStore
from millrace.trainer.gang.agreement import encode_result
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.learning.batch import BatchLayout, build_micro_batch
from millrace.trainer.learning.metrics import NotFinite, StepMetrics, describe_not_finite
from millrace.trainer.log.batches import Batches
from millrace.trainer.losses import token_losses, total_loss
from millrace.trainer.sft.data import DatasetRows, require_one_dataset

WORDS = ("ab", "abc", "abcd", "abcde", "bcdef", "cdefg", "defgh")
SEQ_LEN = 64


@pytest.fixture(scope="module")
def tokenizer(example: Path) -> Any:
    return load_tokenizer(example / "base")


@pytest.fixture
def opened(tokenizer: Any, tmp_path: Path) -> Any:
    """Opens the rows of WORDS, or of other lines, as a run does."""

    def opens(lines: str = "", *, seq_len: int = SEQ_LEN, **keys: Any) -> DatasetRows:
        path = tmp_path / "rows.jsonl"
        rows = [json.dumps({"prompt": word, "completion": word[::-1]}) for word in WORDS]
        path.write_text(lines or "\n".join(rows))
        config = DatasetConfig(name=str(path), **{"rows_per_step": 3, **keys})
        return DatasetRows(config, tokenizer, seq_len=seq_len, stops=turn_stops(tokenizer))

    return opens


def learned(tokenizer: Any, samples: list[TrainSample]) -> list[str]:
    """The text that each sample has a weight on."""
    return [tokenizer.decode(each.token_ids[each.ce_weights != 0]) for each in samples]


def test_the_rows_of_a_step_follow_from_the_step_and_a_pass_takes_each_once(tokenizer: Any, opened: Any) -> None:
    rows, again = opened(), opened()
    steps = [learned(tokenizer, rows.samples(step)) for step in range(7)]
    whole = sorted(word[::-1] + "<|im_end|>" for word in WORDS)
    taken = [text for texts in steps for text in texts]
    assert [sorted(taken[at : at + 7]) for at in (0, 7, 14)] == [whole] * 3, "three rows a step, three passes"
    assert [learned(tokenizer, again.samples(step)) for step in (5, 2)] == [steps[5], steps[2]], (
        "a process that resumes"
    )
    assert opened(shuffle=False).samples(0)[1].token_ids.tolist() != opened(seed=3).samples(0)[1].token_ids.tolist()


def test_the_weight_is_that_of_every_trained_token(opened: Any) -> None:
    for sample in opened(weight=0.25).samples(0):
        assert set(sample.ce_weights.tolist()) == {0.0, 0.25} and not sample.loss_mask.any()


def rollout(ordinal: int, length: int) -> TrainSample:
    mask = np.array([0] + [1] * (length - 1), np.uint8)
    return TrainSample(
        token_ids=np.arange(1, length + 1, dtype=np.int32),
        loss_mask=mask,
        inference_logprobs=(mask * -1.5).astype(np.float32),
        advantages=(mask * 0.5).astype(np.float32),
        ordinal=ordinal,
        member=0,
        attempt=0,
        env="e",
        reward=0.0,
        temperature=1.0,
        min_version=0,
        max_version=0,
        lineage=0,
    )


def test_the_gradient_is_that_of_both_means_in_float64(opened: Any) -> None:
    samples = [rollout(5, 4), *opened(weight=0.5).samples(0), rollout(6, 7)]
    micro_batch = build_micro_batch(samples, seq_len=SEQ_LEN, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    shape = micro_batch.token_ids_BT.shape
    logprobs_BT = (-3 * torch.rand(shape, generator=generator, dtype=torch.float64) - 0.1).requires_grad_()
    config = LossConfig(type="importance_sampling", kl_tau=0.0)
    inputs = replace(
        micro_batch.loss_inputs(logprobs_BT),
        inference_logprobs=micro_batch.inference_logprobs_BT.double(),
        advantages=micro_batch.advantages_BT.double(),
        rl_weights=micro_batch.rl_weights_BT.double(),
        ce_weights=micro_batch.ce_weights_BT.double(),
    )
    counts = {"rl_divisor": micro_batch.num_rl_tokens, "num_ce_tokens": micro_batch.num_ce_tokens}
    assert micro_batch.num_rl_samples == 2 and micro_batch.tokens_by_group() == {5: 3, 6: 6}
    total_loss(token_losses(inputs, config), **counts).backward()

    same_BT = logprobs_BT.detach().clone().requires_grad_()
    sampled, copied = micro_batch.loss_mask_BT, micro_batch.ce_weights_BT != 0
    policy = -(0.5 * torch.exp(same_BT[sampled] + 1.5)).mean()
    (policy + 0.5 * -same_BT[copied].mean()).backward()
    assert logprobs_BT.grad is not None and same_BT.grad is not None
    assert float((logprobs_BT.grad - same_BT.grad).abs().max()) < 1e-15
    assert int((same_BT.grad != 0).sum()) == int(sampled.sum() + copied.sum())


def test_its_cross_entropy_is_measured_apart(opened: Any) -> None:
    spoken = replace(rollout(5, 4), ce_weights=np.array([0, 1, 0, 0], np.float32), loss_mask=np.array([0, 0, 1, 1]))
    micro_batch = build_micro_batch([spoken, *opened().samples(0)], seq_len=SEQ_LEN, device=torch.device("cpu"))
    logprobs_BT = torch.full(micro_batch.token_ids_BT.shape, -2.0)
    logprobs_BT[0] = -7.0
    losses = token_losses(micro_batch.loss_inputs(logprobs_BT), LossConfig())
    metrics = StepMetrics(["e"])
    zeros = torch.zeros_like(logprobs_BT)
    metrics.add(micro_batch, losses=losses, loss=losses.ce.sum(), trainer_logprobs_BT=logprobs_BT, entropy_BT=zeros)
    values = metrics.values()
    assert values["dataset_nll/mean"] == 2.0 < values["nll/mean"], "what the environment said is no row"


def make_batches(dataset: DatasetRows | None, *, kind: Any, gang: Gang | None = None, minibatches: int = 2) -> Batches:
    header = batch_pb2.BatchHeader(run_uid="run", kind=kind, run_hash="hash", previous_chain_hash=bytes(32))
    chunks = pack_batch(header, [rollout(ordinal, 4 + ordinal) for ordinal in range(3)])
    for number, chunk in enumerate(header.chunks):
        chunk.key = f"chunk-{number}"
    run_log: Any = SimpleNamespace(
        is_stop_requested=lambda: False,
        poll_header=lambda step, *, timeout_s: header.SerializeToString(),
        read_superseded=lambda step, revisions: [],
        read_chunks=lambda step, wanted: {number: chunks[number] for number in wanted},
        prefetch=lambda step: None,
    )
    return Batches(
        run_log,
        gang=gang or Gang(),
        run_uid="run",
        run_hash="hash",
        previous_chain_hash=bytes(32),
        layout=BatchLayout(seq_len=SEQ_LEN, micro_batch_tokens=64, minibatches=minibatches, packing=None),
        dataset=dataset,
    )


def test_every_minibatch_has_its_share_and_the_closing_header_none(tokenizer: Any, opened: Any) -> None:
    batch = make_batches(opened(), kind=batch_pb2.BATCH_KIND_TRAIN).read(0)
    places = [sorted(place for places in each.samples for place in places) for each in batch.minibatches]
    assert places == [[0, 2, 3, 5], [1, 4]], "three samples are in the table, and three rows behind them"
    assert [sum(each.num_ce_tokens > 0 for each in m.micro_batches) > 0 for m in batch.minibatches] == [True, True]
    closing = make_batches(opened(), kind=batch_pb2.BATCH_KIND_CLOSE).read(0)
    assert sorted(place for m in closing.minibatches for rows in m.samples for place in rows) == [0, 1, 2]


def test_what_is_not_finite_in_a_row_names_the_row() -> None:
    header = batch_pb2.BatchHeader(step=4, samples=[batch_pb2.SampleEntry(length=3)])
    bad = NotFinite(sample=2, token=7, what="loss", numbers="x")
    assert "row 1 of those that it took of trainer.dataset, at its token 7" in describe_not_finite(header, [bad])


def test_a_checkpoint_of_other_rows_is_not_continued(tokenizer: Any, opened: Any, tmp_path: Path) -> None:
    first, same = opened(), opened()
    other = opened('{"prompt": "a", "completion": "b"}\n')
    assert first.digest == same.digest != other.digest
    author = Author(run_hash="r", epoch=1, determinism="best_effort", dataset_digest=first.digest)
    checkpoints = CheckpointStore(LocalStore(tmp_path / "store"), Names("t", "run"), gang=Gang())
    state = {"model.a": torch.ones(3)}
    written = checkpoints.write(state, step=4, lineage=0, author=author, chain_hash=b"\1" * 32)
    manifest = checkpoints.commit(written, gang=Gang())
    require_same_dataset(checkpoints.read(4), dataset_digest=same.digest)
    require_same_dataset(replace(manifest, dataset_digest=""), dataset_digest=same.digest)  # of a fork's start
    for digest in (other.digest, ""):
        with pytest.raises(InvalidStateError, match="some rows twice") as raised:
            require_same_dataset(manifest, dataset_digest=digest)
        assert raised.value.reason == "CHECKPOINT_DATASET_DIFFERS" and "trainer.dataset.name" in raised.value.remedy


def test_ranks_with_other_rows_are_refused_before_they_wait_for_each_other(opened: Any) -> None:
    rows = opened()

    class First(Gang):
        """Rank 0 of two; the other one holds what it is told."""

        def __init__(self, other: str) -> None:
            super().__init__(rank=0, world_size=2)
            self._other, _ = encode_result(lambda: other, rank=1)

        def gather(self, data: bytes) -> list[bytes]:
            return [data, self._other]

        def broadcast(self, data: bytes | None) -> bytes:
            return data or b""

    require_one_dataset(rows, gang=First(rows.digest))
    with pytest.raises(InvalidSpecError, match=r"trainer\.dataset\.name: holds other rows.*at the ranks \[1\]"):
        require_one_dataset(rows, gang=First("other"))


def test_rows_that_cannot_be_learned_are_refused_with_place_and_remedy(opened: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidSpecError, match=r"trainer\.dataset\.name.*rows\.jsonl:2"):
        opened('{"prompt": "a", "completion": "b"}\n{"question": "a"}\n')
    with pytest.raises(InvalidSpecError, match=r"trainer\.model\.seq_len.*leaves no completion token") as raised:
        opened(seq_len=3)
    assert "set trainer.model.seq_len to" in str(raised.value.remedy)
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFoundError, match="empty"):
        load = DatasetConfig(name=str(tmp_path / "empty"))
        DatasetRows(load, None, seq_len=8, stops=turn_stops(None))


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ({}, "trainer.dataset.name: is required"),
        ({"name": "x", "rows_per_step": 0}, "trainer.dataset.rows_per_step"),
        ({"name": "x", "weight": 0}, "trainer.dataset.weight"),
        ({"name": "x", "loss_mask": {"assistant": False}}, "trainer.dataset.loss_mask: trains on no role"),
        ({"name": "x", "subsets": ["a", "b"], "splits": ["c"]}, "trainer.dataset.splits"),
        ({"name": "x", "batch_size": 3}, "trainer.dataset.batch_size: unknown key"),
    ],
)
def test_keys_that_contradict_are_refused(dataset: dict[str, Any], message: str) -> None:
    document = {"orchestrator": {"env": [{"id": "a"}]}, "trainer": {"dataset": dataset}}
    with pytest.raises(InvalidSpecError) as raised:
        validate_document(document, RLConfig)
    assert message in str(raised.value)
