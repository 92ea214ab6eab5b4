"""Sampling: what `extra_body` may say, and what it is refused for."""

import json
from typing import Any

import pytest

from millrace.config.load import validate_document
from millrace.config.sections.orchestrator import OrchestratorConfig
from millrace.errors import InvalidSpecError
from millrace.internal.v1.play_pb2 import Sampling
from millrace.orchestrator.play import settings


def document(sampling: dict[str, Any], evaluation: dict[str, Any] | None = None) -> dict[str, Any]:
    orchestrator: dict[str, Any] = {
        "env": [{"id": "reverse-text"}],
        "batch_size": 8,
        "sampling": sampling,
        "rollouts_per_example": 4,
    }
    return {"orchestrator": orchestrator | ({"eval": {"sampling": evaluation}} if evaluation is not None else {})}


def trained(config: OrchestratorConfig) -> Sampling:
    return settings.plays_of_training(config, config.env[0]).sampling


def evaluated(config: OrchestratorConfig) -> Sampling:
    evaluation = settings.of_training(config)
    assert evaluation is not None
    return evaluation.envs[0].sampling


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"temperature": 0.5}, "write `orchestrator.sampling.temperature`"),
        ({"top_p": 0.5}, "write `orchestrator.sampling.top_p`"),
        ({"max_completion_tokens": 5}, "write `orchestrator.sampling.max_tokens`"),
        ({"n": 2}, "one answer"),
        ({"logprobs": False}, "log-probs"),
        ({"seed": 1}, "same tokens"),
        ({"presence_penalty": 0.1}, "does not compute"),
        ({"frequency_penalty": 0.1}, "does not compute"),
        ({"repetition_penalty": 1.1}, "does not compute"),
        ({"logit_bias": {"3": 1}}, "does not compute"),
        ({"top_k": "many"}, "must be a whole number"),
        ({"top_k": 1.5}, "must be a whole number"),
        ({"min_p": 5}, "must be a number of 0 to 1"),
    ],
)
def test_what_the_trainer_would_not_know_is_refused(extra: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidSpecError) as caught:
        validate_document(document({"extra_body": extra}))
    [violation] = caught.value.violations
    assert violation.field == f"orchestrator.sampling.extra_body.{next(iter(extra))}"
    assert text in violation.message


def test_a_value_that_differs_from_its_key_is_refused() -> None:
    with pytest.raises(InvalidSpecError, match="differs from"):
        validate_document(document({"top_k": 3, "extra_body": {"top_k": 5}}))


def test_a_least_length_above_the_greatest_is_refused() -> None:
    training = {"min_tokens": 9, "max_tokens": 8, "allow_biased_sampling": True}
    with pytest.raises(InvalidSpecError, match=r"must be at most `orchestrator.sampling.max_tokens`, which is 8"):
        validate_document(document(training))
    with pytest.raises(InvalidSpecError, match=r"must be at most `orchestrator.eval.sampling.max_tokens`"):
        validate_document(document({}, {"min_tokens": 9, "max_tokens": 8}))


def test_evaluations_may_have_penalties_and_seeds() -> None:
    found = validate_document(document({}, {"repetition_penalty": 1.1, "extra_body": {"seed": 3}}))
    sent = evaluated(found.orchestrator)
    assert (sent.repetition_penalty, sent.extra_body_json) == (1.1, '{"seed": 3}')


@pytest.mark.parametrize(
    ("key", "value"),
    [("repetition_penalty", 1.1), ("presence_penalty", 0.5), ("frequency_penalty", -0.5), ("min_tokens", 4)],
)
def test_what_biases_training_has_to_be_allowed(key: str, value: float) -> None:
    with pytest.raises(InvalidSpecError, match="allow_biased_sampling = true") as caught:
        validate_document(document({key: value}))
    assert [each.field for each in caught.value.violations] == [f"orchestrator.sampling.{key}"]
    allowed = validate_document(document({key: value, "allow_biased_sampling": True}, {})).orchestrator
    sent, of_evaluations = trained(allowed), evaluated(allowed)
    if key == "repetition_penalty":
        assert sent.repetition_penalty == value and of_evaluations.repetition_penalty == 1
    else:
        assert sent.extra_body_json == json.dumps({key: value}) and not of_evaluations.extra_body_json


def test_a_teacher_allows_no_bias_and_a_key_is_said_once() -> None:
    biased = document({"min_tokens": 2, "allow_biased_sampling": True})
    biased["orchestrator"]["algo"] = {"type": "opd", "teacher": {"model": "t", "base_url": "http://127.0.0.1:1/v1"}}
    with pytest.raises(InvalidSpecError, match="has no meaning for opd: the teacher's"):
        validate_document(biased)
    with pytest.raises(InvalidSpecError, match=r"is set by `orchestrator\.eval\.sampling\.stop`, too"):
        validate_document(document({}, {"stop": ["a"], "extra_body": {"stop": ["b"]}}))


def test_stop_texts_need_no_leave_and_are_those_of_evaluations_too() -> None:
    found = validate_document(document({"stop": ["</a>"]}, {})).orchestrator
    for sampling in (trained(found), evaluated(found)):
        assert sampling.extra_body_json == '{"stop": ["</a>"]}'


@pytest.mark.parametrize(("kind", "middle"), [("linear", 0.75), ("cosine", 0.75)])
def test_a_schedule_of_temperatures_by_hand(kind: str, middle: float) -> None:
    schedule = {"type": kind, "start_temperature": 1.0, "end_temperature": 0.5, "total_steps": 5}
    config = validate_document(document({"temp_scheduler": schedule})).orchestrator
    at = settings.plays_of_training(config, config.env[0]).sampling_at
    assert [at(step).temperature for step in (0, 2, 4, 9)] == pytest.approx([1.0, middle, 0.5, 0.5])
    assert at(1).temperature == pytest.approx(0.875 if kind == "linear" else 0.75 + 0.25 * 0.5**0.5)


@pytest.mark.parametrize(
    ("sampling", "says"),
    [
        ({"temp_scheduler": {"start_temperature": 1.0, "end_temperature": 0.5}}, "is required without `max_steps`"),
        (
            {"temperature": 0.7, "temp_scheduler": {"start_temperature": 1, "end_temperature": 0.5, "total_steps": 4}},
            "has no effect beside `temp_scheduler`",
        ),
        ({"temp_scheduler": {"start_temperature": 0.0, "end_temperature": 0.5, "total_steps": 4}}, "start_temperature"),
    ],
)
def test_contradictions_of_a_schedule_are_refused(sampling: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidSpecError, match=says):
        validate_document(document(sampling))


def test_truncation_is_taken_over_from_where_other_servers_have_it() -> None:
    plain = validate_document(document({"top_k": 5, "min_p": 0.1, "top_p": 0.9}))
    other = validate_document(document({"top_p": 0.9, "extra_body": {"top_k": 5, "min_p": 0.1, "stop": "x"}}))
    keys = trained(plain.orchestrator)
    body = trained(other.orchestrator)
    assert (keys.top_k, keys.min_p, keys.top_p) == (body.top_k, body.min_p, body.top_p) == (5, 0.1, 0.9)
    assert body.extra_body_json == '{"stop": "x"}'
    assert trained(validate_document(document({"top_k": -1})).orchestrator).top_k == 0


@pytest.mark.parametrize("key", ["top_p", "top_k", "min_p"])
def test_distillation_needs_the_full_distribution(key: str) -> None:
    tree = document({key: 1 if key == "top_k" else 0.5})
    tree["orchestrator"]["algo"] = {"type": "opd", "teacher": {"name": "big", "base_url": "http://localhost:8001/v1/"}}
    with pytest.raises(InvalidSpecError, match="must be off for opd"):
        validate_document(tree)
