"""What engines learn of the sampling, and what the rollout says of it."""

import json

import pytest

from millrace.env_server.adapters.outcome import Outcome, make_rollout
from millrace.env_server.adapters.v0 import sampling_args
from millrace.internal.v1 import rollout_pb2
from millrace.internal.v1.play_pb2 import EnvSpec, PlayGroupRequest, Sampling
from millrace.rollouts.requests import request_parameters
from millrace.rollouts.types import FULL, RolloutStatus, Truncation
from millrace.rollouts.wire import decode_rollout, encode_rollout

NEUTRAL = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


def test_our_engines_are_told_every_parameter() -> None:
    assert request_parameters(Sampling(temperature=0.7), is_external=False) == {"temperature": 0.7, **NEUTRAL}
    asked = Sampling(temperature=1.0, max_tokens=9, top_p=0.9, top_k=5, min_p=0.1, repetition_penalty=1.2)
    assert request_parameters(asked, is_external=False) == NEUTRAL | {
        "temperature": 1.0,
        "max_tokens": 9,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
    }


def test_other_endpoints_are_told_what_is_asked_for() -> None:
    assert request_parameters(Sampling(temperature=0.0), is_external=True) == {"temperature": 0.0}
    asked = Sampling(temperature=1.0, top_k=5, extra_body_json='{"reasoning_effort": "low"}')
    assert request_parameters(asked, is_external=True) == {"temperature": 1.0, "top_k": 5, "reasoning_effort": "low"}


def test_more_fields_never_override_what_is_recorded() -> None:
    extra = json.dumps({"temperature": 0.1, "top_p": 0.2, "top_k": 1, "stop": "now", "presence_penalty": 0.5})
    found = request_parameters(Sampling(temperature=1.0, extra_body_json=extra), is_external=False)
    assert found == NEUTRAL | {"temperature": 1.0, "stop": "now", "presence_penalty": 0.5}
    args = sampling_args(Sampling(temperature=1.0, extra_body_json=extra))
    assert (args["temperature"], args["top_p"], args["extra_body"]["top_k"]) == (1.0, 1.0, 0)
    assert not {"temperature", "top_p"} & args["extra_body"].keys()


@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0.5), Sampling(temperature=0.5, top_p=0.9, top_k=7, min_p=0.1)]
)
def test_a_rollout_says_how_it_was_sampled(sampling: Sampling) -> None:
    request = PlayGroupRequest(
        run_uid="r",
        purpose=rollout_pb2.PURPOSE_TRAIN,
        ordinal=1,
        members=[0],
        group_size=1,
        env=EnvSpec(name="e", id="e"),
        sampling=sampling,
    )
    made = make_rollout(request, member=0, task_id="t", outcome=Outcome(status=RolloutStatus.OK), seconds=1.0)
    found = decode_rollout(encode_rollout(made))
    assert found == made
    assert json.loads(found.sampling_json) == request_parameters(sampling, is_external=False)
    is_full = sampling.top_k == 0
    assert found.truncation == (FULL if is_full else Truncation(top_p=0.9, top_k=7, min_p=0.1))
