"""How far trainer and engine are apart on a sample's tokens, as its page gets it, and why that is not known."""

import json
import threading
from pathlib import Path

import numpy as np
import pytest

from millrace.rollouts.token_log import LoggedSample, TokenLog
from millrace.runlog.records.frontier import chain_hash
from millrace.runlog.records.token_logs import store_token_log
from millrace.storage.local import LocalStore
from millrace_testing.dashboard import NAMES, RUN, UID, RunWriter, Served, ServedInThread

SAMPLES = f"/api/runs/{RUN}/samples"
STEPS = 7


def trainer_of(served: Served, sample: str, query: str = "") -> dict:
    status, tokens = served.json(f"{SAMPLES}/{sample}/tokens?{query}")
    assert status == 200, tokens
    return tokens["trainer"]


def complete(served: Served) -> None:
    for _ in range(600):
        _, page = served.json(SAMPLES)
        if page["index"]["batches"] >= STEPS:
            return
        threading.Event().wait(0.1)
    raise AssertionError(page["index"])


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> LocalStore:
    """Return steps whose log-probs are there, damaged, of another batch, not there any more, or not there yet (the
    last).
    """
    found = LocalStore(tmp_path_factory.mktemp("differences") / "store")
    writer = RunWriter(store=found, members=4)
    for step in range(STEPS - 1):
        writer.step(step)
    writer.commit(STEPS - 1)
    writer.token_log(0, members=[2])
    writer.token_log(1, members=[0, 1, 2], difference=-0.125)
    found.create(NAMES.token_log(2, 0), b"MRTOKLG1 and nothing else")
    writer.token_log(3, members=[2], chain=b"x" * 32)
    writer.token_log(5, members=[2])
    return found


@pytest.fixture(scope="module")
def served(store: LocalStore, tmp_path_factory: pytest.TempPathFactory):
    with ServedInThread(store, tmp_path_factory.mktemp("index")) as found:
        complete(found)
        yield found


def test_each_token_has_its_difference(served: Served) -> None:
    """Two tokens of the prompt, then four that were sampled."""
    found = trainer_of(served, "0-2")
    assert (found["reason"], found["why"], found["minibatch"]) == ("", "", 0)
    assert found["differences"] == [None, None, 0.25, 0.5, 0.75, 1.0]
    assert found["logprobs"] == [None, None, -0.25, 0.0, 0.25, 0.5]
    assert found["entropies"] == [None, None, 1.5, 1.5, 1.5, 1.5]
    assert (found["mean"], found["max"], found["num_tokens"], found["num_not_finite"]) == (0.625, 1.0, 4, 0)


def test_a_page_of_tokens_has_its_own_and_the_mean_of_all(served: Served) -> None:
    found = trainer_of(served, "1-1", "offset=3&size=1")
    assert (found["differences"], found["mean"], found["max"]) == ([-0.25], 0.25, 0.375)


@pytest.mark.parametrize(
    ("sample", "reason", "words"),
    [
        (
            "0-1",
            "NOT_CHOSEN",
            "of batch 0, 1 of 3 rollouts are stored, and this one is not: trainer.token_log.share",
        ),
        ("0-3", None, "a rollout that failed has no tokens"),
        ("2-2", "OBJECT_DAMAGED", "token_logs/00000002/0000.bin"),
        ("3-2", "OTHER_HISTORY", "is of another batch"),
        ("4-2", "OBJECT_MISSING", "it was killed before it had written that, or the store refused it"),
        (f"{STEPS - 1}-2", "STEP_NOT_DONE", f"has not finished step {STEPS - 1} yet"),
    ],
)
def test_why_there_is_none(served: Served, sample: str, reason: str | None, words: str) -> None:
    if reason is None:
        status, answer = served.json(f"{SAMPLES}/{sample}/tokens")
        assert status == 404 and words in str(answer)
        return
    found = trainer_of(served, sample)
    assert found["reason"] == reason and words in found["why"]
    assert "differences" not in found


def test_whose_are_stored_is_said_where_this_one_is_not(served: Served) -> None:
    assert trainer_of(served, "0-1")["samples"] == ["0-2"]


def test_a_token_that_is_outside_of_the_truncation_or_not_a_number_is_told_apart(
    served: Served, store: LocalStore
) -> None:
    _, found = served.json(f"{SAMPLES}/5-2")
    assert found["step"] == 5
    log = TokenLog(
        run_uid=UID,
        step=5,
        lineage=1,
        chain_hash=chain_hash(bytes(32), store.get(NAMES.batch_header(5))),
        num_rollouts=3,
        share=1.0,
        samples=(
            LoggedSample(
                sample=2,
                ordinal=5,
                member=2,
                attempt=0,
                minibatch=3,
                mask=np.array([0, 0, 1, 1, 1, 1], np.uint8),
                logprobs=np.array([-np.inf, np.nan, -0.5, -1.5], np.float32),
                entropies=np.array([np.nan, np.inf, 1, 2], np.float16),
            ),
        ),
    )
    store_token_log(store, NAMES, log)  # of a newer lineage: the run went on with it
    found = trainer_of(served, "5-2")
    assert found["differences"] == [None, None, None, None, 0.0, -1.0]
    assert found["is_outside"] == [0, 0, 1, 0, 0, 0]
    assert found["entropies"] == [None, None, None, None, 1.0, 2.0]
    assert (found["mean"], found["max"], found["num_not_finite"], found["minibatch"]) == (0.5, 1.0, 2, 3)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"config": {"trainer": {"token_log": {"share": 0.0}}}}, "SHARE_IS_ZERO"),
        ({"config": {"trainer": {"token_log": {"share": 0.5}}}}, "OBJECT_MISSING"),
        ({"config": {"trainer": 7}}, "OBJECT_MISSING"),
        ("no record", "OBJECT_MISSING"),
    ],
)
def test_a_run_that_stores_none_says_so(tmp_path: Path, record: object, reason: str) -> None:
    store = LocalStore(tmp_path / "store")
    writer = RunWriter(store=store)
    for step in range(STEPS):
        writer.step(step)
    store.create(NAMES.run_json, json.dumps(record).encode())
    with ServedInThread(store, tmp_path / "index") as served:
        complete(served)
        assert trainer_of(served, "3-1")["reason"] == reason
