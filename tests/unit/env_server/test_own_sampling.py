"""What environments may send of their own with a model call: a table of fields against a run's sampling."""

from typing import Any

import pytest

from millrace.env_server.adapters.client_v0 import request_body
from millrace.env_server.adapters.samples import OwnRanges
from millrace.env_server.adapters.v0 import declared_by, sampling_args
from millrace.env_server.own_sampling import AskedSampling, OwnSamplingError, Way, flat, sent_of
from millrace.internal.v1 import rollout_pb2
from millrace.internal.v1.play_pb2 import EnvSpec, PlayGroupRequest, Sampling
from millrace.rollouts.types import FULL, OwnSampling, Truncation


def own_way(
    says: dict[str, Any], *, purpose: rollout_pb2.Purpose = rollout_pb2.PURPOSE_TRAIN, **sampling: Any
) -> Way | None:
    """Return what is recorded of a turn whose environment changes the arguments that the library hands it."""
    asked = Sampling(**{"temperature": 0.7, "max_tokens": 24, **sampling})
    request = PlayGroupRequest(
        run_uid="r",
        purpose=purpose,
        ordinal=0,
        members=[0],
        group_size=1,
        env=EnvSpec(name="talk", id="talk"),
        model="policy",
        sampling=asked,
    )
    args = sampling_args(asked)
    args |= says | {"extra_body": (args.get("extra_body") or {}) | (says.get("extra_body") or {})}
    body = request_body([], args.pop("model", "policy"), args, None)
    return AskedSampling.of(request).own_way(sent_of(body))


SAME = {
    "the run's own": {"temperature": 0.7, "top_p": 1.0, "extra_body": {"top_k": 0, "repetition_penalty": 1.0}},
    "shorter": {"max_tokens": 5, "stop": ["zz"]},
    "neutral": {"seed": None, "presence_penalty": 0, "extra_body": {"top_k": -1, "logit_bias": {}, "min_tokens": 0}},
    "told of": {"user": "u", "extra_body": {"skip_special_tokens": False, "chat_template_kwargs": {}, "n": 1}},
}


@pytest.mark.parametrize("name", SAME)
def test_what_changes_no_distribution_is_left_alone(name: str) -> None:
    assert own_way(SAME[name]) is None


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "seed": ({"seed": 0}, "would give all rollouts of a group the same tokens"),
    "presence_penalty": ({"presence_penalty": 0.5}, "set `orchestrator.sampling.allow_biased_sampling = true`"),
    "frequency_penalty": ({"frequency_penalty": 0.5}, "biases what is learned"),
    "repetition_penalty": ({"extra_body": {"repetition_penalty": 1.2}}, "biases what is learned"),
    "min_tokens": ({"extra_body": {"min_tokens": 4}}, "biases what is learned"),
    "logit_bias": ({"logit_bias": {"5": 2.0}}, "in a way that the trainer does not compute"),
    "allowed_token_ids": ({"extra_body": {"allowed_token_ids": [5, 6]}}, "in a way that the trainer does not compute"),
    "bad_words": ({"extra_body": {"bad_words": ["a"]}}, "in a way that the trainer does not compute"),
    "response_format": ({"response_format": {"type": "json_object"}}, "in a way that the trainer does not compute"),
    "thinking_token_budget": ({"extra_body": {"thinking_token_budget": 9}}, "`orchestrator.sampling.extra_body`"),
    "tool_choice": ({"tool_choice": "required"}, "may change what is sampled"),
    "model": ({"model": "my-model"}, "is not the policy, 'policy'"),
    "model that nobody serves": ({"model": "another"}, "is not the policy, 'policy'"),
    "temperature": ({"temperature": 0}, "must be 1e-06 to 100"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_trainer_cannot_compute_is_refused_by_name(name: str) -> None:
    says, why = REFUSED[name]
    with pytest.raises(OwnSamplingError) as caught:
        own_way(says)
    assert str(caught.value).startswith(f"environment 'talk' sends `{name.split()[0]}` = ")
    assert why in str(caught.value)
    own_way(says, purpose=rollout_pb2.PURPOSE_EVAL)  # which nothing is trained on


COMPUTED: dict[str, tuple[dict[str, Any], Way]] = {
    "temperature": ({"temperature": 0.5}, (0.5, FULL)),
    "top_p": ({"top_p": 0.9}, (0.7, Truncation(top_p=0.9))),
    "top_k": ({"extra_body": {"top_k": 4}}, (0.7, Truncation(top_k=4))),
    "top_k of the SDK's arguments": ({"top_k": 4}, (0.7, Truncation(top_k=4))),
    "min_p": ({"extra_body": {"min_p": 0.1}}, (0.7, Truncation(min_p=0.1))),
    "left out": ({"temperature": None}, (1.0, FULL)),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_what_the_trainer_computes_is_recorded(name: str) -> None:
    says, way = COMPUTED[name]
    assert own_way(says) == way


def test_a_bias_that_the_run_allows_is_the_environments_too() -> None:
    says = {"presence_penalty": 0.5, "extra_body": {"min_tokens": 4}}
    assert own_way(says, allows_bias=True) is None
    assert own_way({"extra_body": {"min_tokens": 4}}, extra_body_json='{"min_tokens": 4}') is None, "the run's own"
    with pytest.raises(OwnSamplingError, match="does not compute"):
        own_way(says, allows_bias=True, is_plain=True)


@pytest.mark.parametrize(
    ("says", "why"),
    [({"temperature": 0.5}, "must be 1.0 for opd"), ({"top_p": 0.5}, "must be off for opd"), ({"top_k": 5}, "off for")],
)
def test_a_teacher_is_compared_with_the_plain_distribution(says: dict[str, Any], why: str) -> None:
    with pytest.raises(OwnSamplingError, match=why):
        own_way(says, temperature=1.0, is_plain=True)
    assert own_way({"top_k": -1}, temperature=1.0, is_plain=True) is None


class Made:
    """As much of an environment as has to do with how it was made."""

    def __init__(self, **sampling_args: Any) -> None:
        self.sampling_args = {"n": 1, "extra_body": {}, **sampling_args}  # as the library keeps them


MADE = Made(temperature=0.3, max_tokens=9, stop=["zz"], extra_body={"top_k": 4, "min_p": None})


def test_what_an_environment_was_made_with_counts_where_the_run_says_nothing() -> None:
    declared = declared_by(MADE)
    assert declared == {"temperature": 0.3, "max_tokens": 9, "stop": ["zz"], "top_k": 4}
    asked = sampling_args(Sampling(temperature=1.0), declared=declared)
    assert (asked["temperature"], asked["max_tokens"], asked["top_p"]) == (0.3, 9, 1.0)
    assert asked["extra_body"]["top_k"] == 4 and asked["extra_body"]["stop"] == ["zz"]
    sent = sent_of(request_body([], "policy", asked, None))
    asked_by_run = AskedSampling(EnvSpec(id="talk"), Sampling(temperature=1.0), model="policy")
    assert asked_by_run.own_way(sent) == (0.3, Truncation(top_k=4)), "which is what the trainer computes"


def test_what_the_run_says_counts_more() -> None:
    said = Sampling(temperature=0.7, max_tokens=24, top_p=0.5, top_k=2, extra_body_json='{"stop": ["a"]}')
    asked = sampling_args(said, declared=declared_by(MADE))
    assert asked == sampling_args(said)
    external = sampling_args(Sampling(temperature=1.0), is_external=True, declared=declared_by(MADE))
    assert external == {"temperature": 0.3, "max_tokens": 9, "extra_body": {"top_k": 4, "stop": ["zz"]}}


def test_a_schedule_of_the_temperature_is_said_at_every_step() -> None:
    asked = sampling_args(Sampling(temperature=1.0, holds_temperature=True), declared=declared_by(MADE))
    assert asked["temperature"] == 1.0 and asked["max_tokens"] == 9


def test_an_environment_made_with_nothing_changes_nothing() -> None:
    assert declared_by(Made()) == {} == declared_by(object())


@pytest.mark.parametrize("name", sorted(REFUSED.keys() - {"model", "model that nobody serves", "temperature"}))
def test_what_an_environment_declares_is_refused_as_what_it_sends(name: str) -> None:
    says, why = REFUSED[name]
    asked = AskedSampling(EnvSpec(name="talk", id="talk"), Sampling(temperature=0.7))
    with pytest.raises(OwnSamplingError) as caught:
        asked.require_declared({"`args.env.agent.sampling`": flat(says)})
    assert str(caught.value).startswith(f"environment 'talk' declares `{name}` = ")
    assert "(`args.env.agent.sampling`)" in str(caught.value) and why in str(caught.value)


def test_what_the_trainer_computes_may_be_declared() -> None:
    for says, _ in COMPUTED.values():
        AskedSampling(EnvSpec(id="talk"), Sampling(temperature=0.7)).require_declared({"here": flat(says)})
    plain = AskedSampling(EnvSpec(id="talk"), Sampling(temperature=1.0, is_plain=True))
    with pytest.raises(OwnSamplingError, match="for opd and opsd: the teacher"):
        plain.require_declared({"here": {"temperature": 0.3}})


def test_neighbouring_turns_of_one_way_are_one_range() -> None:
    ranges, hot = OwnRanges(), (2.0, FULL)
    for start, way in ((0, hot), (4, hot), (8, None), (12, hot), (16, (2.0, Truncation(top_k=3)))):
        ranges.add(start, start + 2, way)
    assert ranges.ranges == (
        OwnSampling(start=0, end=6, temperature=2.0),
        OwnSampling(start=12, end=14, temperature=2.0),
        OwnSampling(start=16, end=18, temperature=2.0, truncation=Truncation(top_k=3)),
    )
