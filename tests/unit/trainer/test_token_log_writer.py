"""Storing log-probs beside the training: no step waits for the store, and no failure of it ends anything."""

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from millrace.errors import FencedError, UnavailableError
from millrace.internal.v1 import batch_pb2
from millrace.policies.manifest import sha256_hex
from millrace.rollouts.token_log import chosen_rollouts
from millrace.rollouts.types import TrainSample
from millrace.runlog.names import Names
from millrace.runlog.records.token_logs import StoredTokenLog, find_token_log, load_token_log
from millrace.storage.local import LocalStore
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.learning.batch import Minibatch, build_micro_batch
from millrace.trainer.log.batches import Batch
from millrace.trainer.log.token_log import MAX_WAITING, TokenLogWriter

NAMES = Names("t", "run-a")
CPU = torch.device("cpu")
LENGTHS = (5, 3, 8, 4)
SEQ_LEN = 6


class SlowStore(LocalStore):
    """Creates objects only when it is allowed to."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.may_create = threading.Event()
        self.is_asked = threading.Event()
        self.failures: list[Exception] = []

    def create(self, key: str, data: bytes) -> bool:
        self.is_asked.set()
        assert self.may_create.wait(20)
        if self.failures:
            raise self.failures.pop()
        return super().create(key, data)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SlowStore]:
    found = SlowStore(tmp_path)
    yield found
    found.may_create.set()


def writer(
    store: LocalStore, told: list[str], *, share: float = 1.0, stored: list[StoredTokenLog] | None = None
) -> TokenLogWriter:
    on_stored = [].append if stored is None else stored.append
    return TokenLogWriter(
        store, NAMES, share=share, lineage=0, gang=Gang(), on_stored=on_stored, on_problem=told.append
    )


def sample(index: int) -> TrainSample:
    length = LENGTHS[index]
    mask = np.array([0, 0] + [1] * (length - 2), np.uint8)
    zeros = np.zeros(length, np.float32)
    return TrainSample(
        token_ids=np.arange(length, dtype=np.int32), loss_mask=mask, inference_logprobs=zeros, advantages=zeros,
        ordinal=index // 2, member=index % 2, attempt=0, env="e", reward=0.0, temperature=1.0, min_version=0,
        max_version=0, lineage=0,
    )  # fmt: skip


def batch(step: int) -> Batch:
    """Return two minibatches; the first one has two micro-batches."""
    header = batch_pb2.BatchHeader(run_uid="run-a", step=step)
    for index, length in enumerate(LENGTHS):
        header.samples.add(length=length, ordinal=index // 2, member=index % 2)
    places = [[[2], [0]], [[3, 1]]]
    minibatches = [
        Minibatch(
            micro_batches=[build_micro_batch([sample(i) for i in row], seq_len=SEQ_LEN, device=CPU) for row in part],
            samples=part,
        )
        for part in places
    ]
    return Batch(header=header, chain_hash=bytes([step]) * 32, minibatches=minibatches, wait_s=0.0, load_s=0.0)


def hand_over(to: TokenLogWriter, step: int) -> None:
    """What the loop does of a step; the value of a token says where it is."""
    taken = batch(step)
    rows = to.collect(taken)
    for minibatch in taken.minibatches if rows is not None else ():
        for micro_batch, places in zip(minibatch.micro_batches, minibatch.samples, strict=True):
            row_B1, column_1T = torch.tensor(places)[:, None], torch.arange(micro_batch.token_ids_BT.shape[1])[None]
            values = (-step - row_B1 - column_1T / 8).requires_grad_()
            rows.add(micro_batch, places, logprobs_BT=values * 1.0, entropy_BT=-values.detach())
    to.write(taken, rows)


def test_each_sampled_token_has_its_own_value(store: SlowStore) -> None:
    told, stored = list[str](), list[StoredTokenLog]()
    store.may_create.set()
    with writer(store, told, stored=stored) as writing:
        hand_over(writing, 3)
    key = find_token_log(store, NAMES, 3)
    assert key is not None and told == []
    assert [(NAMES.root + each.key, each.sha256) for each in stored] == [(key, sha256_hex(store.get(key)))]
    log = load_token_log(store, key)
    assert (log.step, log.chain_hash, log.num_rollouts, log.share) == (3, b"\3" * 32, 4, 1.0)
    assert [each.sample for each in log.samples] == [0, 1, 2, 3]
    assert [each.minibatch for each in log.samples] == [0, 1, 0, 1]
    assert [len(each.mask) for each in log.samples] == [5, 3, SEQ_LEN, 4]
    for each in log.samples:
        columns = np.arange(2, len(each.mask))
        assert np.flatnonzero(each.mask).tolist() == columns.tolist()
        assert each.logprobs.tolist() == (-3 - each.sample - columns / 8).tolist()
        assert each.entropies.tolist() == (3 + each.sample + columns / 8).tolist()


@pytest.mark.parametrize("share", [0.5, 0.25, 0.0])
def test_the_share_is_what_is_collected(store: SlowStore, share: float) -> None:
    store.may_create.set()
    with writer(store, [], share=share) as writing:
        hand_over(writing, 0)
    key = find_token_log(store, NAMES, 0)
    if share == 0:
        assert key is None
        return
    assert key is not None
    members = [(index // 2, index % 2, 0) for index in range(len(LENGTHS))]
    assert {each.key for each in load_token_log(store, key).samples} == chosen_rollouts(members, share)


def test_no_step_waits_for_the_store_and_a_step_goes_without_where_it_is_too_slow(store: SlowStore) -> None:
    told: list[str] = []
    with writer(store, told) as writing:
        hand_over(writing, 0)
        assert store.is_asked.wait(20)
        for step in range(1, MAX_WAITING + 3):  # all of this returns while the store has not answered
            hand_over(writing, step)
        assert list(store.list(NAMES.root)) == []
        store.may_create.set()
    stored = [step for step in range(MAX_WAITING + 3) if find_token_log(store, NAMES, step)]
    assert stored == list(range(MAX_WAITING + 1))
    (message,) = told
    assert f"step {MAX_WAITING + 2} " in message and f"{MAX_WAITING} steps before are not stored yet" in message


@pytest.mark.parametrize(
    "failure", [UnavailableError("the store is away"), RuntimeError("a bug of ours")], ids=["store", "bug"]
)
def test_a_failure_is_told_once_and_what_comes_later_is_stored(store: SlowStore, failure: Exception) -> None:
    told: list[str] = []
    store.may_create.set()
    store.failures = [failure, failure]
    with writer(store, told) as writing:
        for step in range(4):
            hand_over(writing, step)
    assert [step for step in range(4) if find_token_log(store, NAMES, step)] == [2, 3]
    (message,) = told
    assert "step 1 " in message and str(failure) in message


@pytest.mark.parametrize(
    "failure", [UnavailableError("the log is away"), RuntimeError("a bug of ours")], ids=["log", "bug"]
)
def test_a_warning_that_cannot_be_written_ends_nothing(store: SlowStore, failure: Exception) -> None:
    def refuse(message: str) -> None:
        raise failure

    store.may_create.set()
    store.failures = [UnavailableError("away")]
    with TokenLogWriter(
        store, NAMES, share=1.0, lineage=0, gang=Gang(), on_stored=[].append, on_problem=refuse
    ) as writing:
        hand_over(writing, 0)
        hand_over(writing, 1)
    assert [step for step in range(2) if find_token_log(store, NAMES, step)] == [1]


def test_who_lost_the_run_writes_no_more(store: SlowStore) -> None:
    with pytest.raises(FencedError), writer(store, []) as writing:
        hand_over(writing, 0)
        assert store.is_asked.wait(20)
        hand_over(writing, 1)
        threading.Timer(0.2, store.may_create.set).start()
        raise FencedError("another trainer has the run")
    assert find_token_log(store, NAMES, 1) is None
