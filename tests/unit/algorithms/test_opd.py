"""On-policy distillation: credit by hand, config rules, and scores that belong to one rollout only."""

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from millrace.algorithms import ALGORITHMS, Opd
from millrace.config.load import validate_document
from millrace.config.sections.algo import AlgoConfig
from millrace.errors import CorruptObjectError, InternalError, InvalidSpecError, NotFoundError
from millrace.rollouts.token_log import encode_scores, with_scores
from millrace.rollouts.types import PolicySpan, Purpose, Rollout, RolloutStatus, Sample, Taught
from millrace.runlog.names import Names
from millrace.runlog.records.token_logs import load_scores, name_scores, store_scores
from millrace.storage.local import LocalStore

TEACHER = {"name": "big", "base_url": "http://localhost:8001/v1/", "api_key_var": "TEACHER_KEY"}


def sample(mask: list[int], policy: list[float], teacher: list[float] | None) -> Sample:
    return Sample(
        token_ids=np.arange(len(mask), dtype=np.int32),
        loss_mask=np.asarray(mask, np.uint8),
        inference_logprobs=np.asarray(policy, np.float32),
        policy_spans=(PolicySpan(lineage=0, version=0, start=0, end=len(mask)),),
        teacher_logprobs=None if teacher is None else np.asarray(teacher, np.float32),
    )


def rollout(*samples: Sample, reward: float = 0.0) -> Rollout:
    return Rollout(
        run_uid="r",
        purpose=Purpose.TRAIN,
        ordinal=3,
        member=0,
        attempt=0,
        group_size=1,
        env="e",
        task_index=0,
        task_id="t",
        status=RolloutStatus.OK,
        samples=samples,
        reward=reward,
    )


def document(**algo: Any) -> dict[str, Any]:
    return {"orchestrator": {"env": [{"id": "reverse-text"}], "batch_size": 8, "algo": algo}}


def test_credit_is_the_teachers_log_prob_minus_the_policys() -> None:
    # Two prompt tokens, then tokens of probability 1/2, 1/4, 1/8 under the policy and 1/4, 1/4, 1/2 under the teacher.
    half = float(np.log(2.0))
    first = sample([0, 0, 1, 1, 1], [0, 0, -half, -2 * half, -3 * half], [0, 0, -2 * half, -2 * half, -half])
    second = sample([0, 1], [0, -half], [0, -half])
    [[credit, same], [other]] = Opd(kl_coef=0.5).credit([rollout(first, second, reward=1.0), rollout(first)])
    assert credit.advantages.dtype == np.float32
    assert np.allclose(credit.advantages, [0, 0, -0.5 * half, 0, 0.5 * 2 * half], atol=1e-7)
    assert not same.advantages.any()
    assert np.array_equal(other.advantages, credit.advantages), "neither the reward nor the group counts"
    assert credit.rl_weights is None and credit.ce_weights is None


def test_a_sample_without_scores_is_no_sample_of_a_distillation() -> None:
    with pytest.raises(InternalError, match="ordinal 3, member 0 has no teacher_logprobs"):
        Opd().credit([rollout(sample([0, 1], [0, -1], None))])


def test_config_makes_the_algorithm() -> None:
    config = validate_document(document(type="opd", teacher=TEACHER, kl_coef=2.0)).orchestrator  # groups of one will do
    assert config.algo.teacher is not None and config.algo.teacher.base_url == ["http://localhost:8001/v1"]
    made = ALGORITHMS[config.algo.type].from_config(config.algo)
    [[credit]] = made.credit([rollout(sample([0, 1], [0, -1], [0, -0.25]))])
    assert credit.advantages.tolist() == [0, 1.5]
    assert AlgoConfig().teacher is None


@pytest.mark.parametrize(
    ("algo", "sampling", "field", "text"),
    [
        ({"type": "opd"}, {}, "orchestrator.algo.teacher", "is required for opd"),
        ({"type": "grpo", "teacher": TEACHER}, {}, "orchestrator.algo.teacher", "has no meaning for grpo"),
        ({"type": "opd", "teacher": TEACHER}, {"temperature": 0.7}, "orchestrator.sampling.temperature", "1.0 for opd"),
        (
            {"type": "opd", "teacher": {**TEACHER, "base_url": "http://me:secret@host/v1"}},
            {},
            "orchestrator.algo.teacher.base_url",
            "`orchestrator.algo.teacher.api_key_var`",
        ),
        ({"type": "opd", "teacher": {"base_url": "http://h/v1"}}, {}, "orchestrator.algo.teacher.name", "is required"),
        ({"type": "opsd", "teacher": TEACHER}, {}, "orchestrator.algo.teacher", "has no meaning for opsd"),
        ({"type": "opsd"}, {"top_p": 0.9}, "orchestrator.sampling.top_p", "must be off for opsd: the teacher's"),
        ({"type": "opsd", "template": "told"}, {}, "orchestrator.algo.template", "must have `{demonstration}`"),
        ({"type": "grpo", "demo_key": "hint"}, {}, "orchestrator.algo.demo_key", "has no meaning for grpo"),
        ({"type": "opd", "teacher": TEACHER, "kl_coef": 0.0}, {}, "orchestrator.algo.kl_coef", "above 0"),
    ],
)
def test_what_cannot_distil_is_refused(algo: dict, sampling: dict, field: str, text: str) -> None:
    tree = document(**algo)
    tree["orchestrator"] |= {"sampling": sampling, "rollouts_per_example": 2}
    with pytest.raises(InvalidSpecError) as caught:
        validate_document(tree)
    found = {violation.field: violation.message for violation in caught.value.violations}
    assert text in found[field], found


def test_scores_are_kept_beside_the_log_and_belong_to_one_rollout(local_store: LocalStore) -> None:
    names = Names("test", "r1")
    bare = rollout(sample([0, 1, 1], [0, -1, -2], None), sample([0, 1], [0, -3], None))
    scores = [np.array([0, -4, -5], np.float32), np.array([0, -6], np.float32)]
    store_scores(local_store, names, bare, scores)
    found = load_scores(local_store, names, bare)
    assert [s.teacher_logprobs.tolist() for s in found.samples if s.teacher_logprobs is not None] == [
        [0, -4, -5],
        [0, -6],
    ]
    store_scores(local_store, names, bare, [column * 2 for column in scores])
    assert load_scores(local_store, names, bare) == found, "the first ones stay: a batch may be cut from them already"
    with pytest.raises(NotFoundError):
        load_scores(local_store, names, replace(bare, samples=bare.samples[:1]))


def test_which_policy_scored_its_own_tokens_behind_what_hint_is_kept_with_the_scores(local_store: LocalStore) -> None:
    names = Names("test", "r1")
    bare = replace(rollout(sample([0, 1], [0, -1], None), sample([0, 0], [0, 0], None)), demonstration="the answer")
    taught = [Taught(lineage=1, version=7, hint_ids=(5, 6, 7), skipped=1), None]
    scores = [np.array([0, -4], np.float32), np.zeros(2, np.float32)]
    store_scores(local_store, names, bare, scores, taught)
    found = load_scores(local_store, names, bare)
    assert [each.taught for each in found.samples] == taught
    [named] = name_scores(names, [found])
    assert hashlib.sha256(local_store.get(names.root + named.key)).digest() == named.sha256, "as the header names it"
    with pytest.raises(NotFoundError):  # the same tokens, taught by another hint
        load_scores(local_store, names, replace(bare, demonstration="another answer"))


@pytest.mark.parametrize(
    "told", ["7", '{"lineage": 1}', '{"lineage": 1, "version": -1, "hint_ids": [], "skipped": 0}', "[1]", "x"]
)
def test_what_is_told_of_scores_is_read_strictly(told: str) -> None:
    bare = rollout(sample([0, 1], [0, -1], None))
    good = encode_scores(bare.samples, [np.array([0, -4], np.float32)])
    text = f"[{told}]".encode()
    body = len(text).to_bytes(4, "little") + text + good[-8:]
    with pytest.raises(CorruptObjectError, match="how a teacher's scores came about"):
        with_scores(bare, good[:8] + hashlib.sha256(body).digest() + body, where="o")


def test_damaged_scores_are_refused() -> None:
    bare = rollout(sample([0, 1], [0, -1], None))
    data = encode_scores(bare.samples, [np.array([0, -4], np.float32)])
    for damaged in (data[:-1], data[:-1] + b"\1", b"x" + data[1:], b""):
        with pytest.raises(CorruptObjectError):
            with_scores(bare, damaged, where="o")
    with pytest.raises(CorruptObjectError, match="2 scores, but the rollout has 4 tokens"):
        with_scores(rollout(sample([0, 1, 1, 1], [0, -1, -1, -1], None)), data, where="o")
    with pytest.raises(CorruptObjectError, match="no list of 2"):
        with_scores(replace(bare, samples=bare.samples * 2), data, where="o")
    with pytest.raises(CorruptObjectError, match="loss_mask"):
        encode_scores(bare.samples, [np.array([-1, -4], np.float32)])
    with pytest.raises(CorruptObjectError, match="not finite"):
        encode_scores(bare.samples, [np.array([0, np.nan], np.float32)])
