"""Where token logs are: created once, never overwritten, and the newest of a step is found."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from millrace.errors import CorruptObjectError
from millrace.rollouts.token_log import LoggedSample, TokenLog
from millrace.runlog.names import Names
from millrace.runlog.records.token_logs import find_token_log, load_token_log, store_token_log
from millrace.storage.local import LocalStore

NAMES = Names("t", "run-a")
ROOT = "t/runs/run-a/token_logs/00000007/"


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


def log(value: float, *, lineage: int = 0) -> TokenLog:
    sample = LoggedSample(
        sample=0,
        ordinal=1,
        member=0,
        attempt=0,
        minibatch=0,
        mask=np.array([0, 1], np.uint8),
        logprobs=np.array([value], np.float32),
        entropies=np.array([1], np.float16),
    )
    return TokenLog(
        run_uid="run-a", step=7, lineage=lineage, chain_hash=b"c" * 32, num_rollouts=1, share=1.0, samples=(sample,)
    )


def value_of(store: LocalStore) -> float:
    key = find_token_log(store, NAMES, 7)
    assert key is not None
    return float(load_token_log(store, key).samples[0].logprobs[0])


def keys(store: LocalStore) -> list[str]:
    return [info.key.removeprefix(ROOT) for info in store.list(ROOT)]


def test_equal_bytes_are_written_once_and_others_stand_behind_them(store: LocalStore) -> None:
    assert find_token_log(store, NAMES, 7) is None
    stored = store_token_log(store, NAMES, log(-1.0))
    assert not stored.is_another and store_token_log(store, NAMES, log(-1.0)) == stored
    data = store.get(NAMES.root + stored.key)
    assert (stored.sha256, stored.size_bytes) == (hashlib.sha256(data).hexdigest(), len(data))
    assert keys(store) == ["0000.bin"] and value_of(store) == -1
    assert store_token_log(store, NAMES, log(-2.0)).is_another
    assert not store_token_log(store, NAMES, log(-2.0)).is_another
    assert keys(store) == ["0000.bin", "0000.r1.bin"] and value_of(store) == -2


def test_a_damaged_one_stays_and_gets_a_successor(store: LocalStore) -> None:
    store.create(f"{ROOT}0000.bin", b"damaged")
    with pytest.raises(CorruptObjectError, match=r"0000\.bin"):
        load_token_log(store, f"{ROOT}0000.bin")
    assert store_token_log(store, NAMES, log(-1.0)).is_another
    assert store.get(f"{ROOT}0000.bin") == b"damaged" and value_of(store) == -1


def test_the_lineage_that_the_run_went_on_with_counts(store: LocalStore) -> None:
    for lineage in (0, 2, 10, 1):
        assert not store_token_log(store, NAMES, log(-lineage, lineage=lineage)).is_another
    assert value_of(store) == -10
    for name in ("99.bin", "0011.bin.x", "0011.r0.bin", "x", "0012"):
        store.put(ROOT + name, b"of nobody")
    assert value_of(store) == -10
