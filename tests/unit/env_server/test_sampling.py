"""What engines learn of the sampling, and what the rollout says of it."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from millrace.config import EvalRunConfig, RLConfig
from millrace.config.load import validate_document
from millrace.config.sections import sampling as sections
from millrace.config.sections.eval import FixedSamplingConfig
from millrace.config.sections.sampling import EvalEnvSamplingConfig, EvalSamplingConfig, SamplingConfig
from millrace.env_server.adapters.client_v0 import request_body
from millrace.env_server.adapters.outcome import Outcome, make_rollout
from millrace.env_server.adapters.v0 import sampling_args
from millrace.inference.engine import SamplingParams
from millrace.inference.http.schema import ChatBody
from millrace.internal.v1 import rollout_pb2
from millrace.internal.v1.play_pb2 import EnvSpec, PlayGroupRequest, Sampling
from millrace.orchestrator.play import settings
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


SCHEDULE = {"start_temperature": 0.5, "end_temperature": 1.0, "total_steps": 9}
WRITTEN: dict[str, tuple[Any, dict[str, Any]]] = {
    "temperature": (0.7, {"temperature": 0.7}),
    "temp_scheduler": (SCHEDULE, {"temperature": 0.5}),
    "max_tokens": (9, {"max_tokens": 9}),
    "top_p": (0.9, {"top_p": 0.9}),
    "top_k": (5, {"top_k": 5}),
    "min_p": (0.1, {"min_p": 0.1}),
    "repetition_penalty": (1.2, {"repetition_penalty": 1.2}),
    "presence_penalty": (0.5, {"presence_penalty": 0.5}),
    "frequency_penalty": (0.25, {"frequency_penalty": 0.25}),
    "min_tokens": (3, {"min_tokens": 3}),
    "stop": (["."], {"stop": ["."]}),
    "extra_body": ({"skip_special_tokens": False}, {"skip_special_tokens": False}),
}
"""A value of each key of a sampling table, and the parameters of the request to an engine that it becomes."""
TABLES: dict[str, type[sections.ConfigSection]] = {
    "orchestrator.sampling": SamplingConfig,
    "orchestrator.env.sampling": sections.EnvSamplingConfig,
    "orchestrator.eval.sampling": EvalSamplingConfig,
    "orchestrator.eval.env.sampling": EvalEnvSamplingConfig,
    "sampling": FixedSamplingConfig,
    "env.sampling": EvalEnvSamplingConfig,
}
OF_NO_REQUEST = {"allow_biased_sampling"}


def message(table: str, written: Mapping[str, Any]) -> Sampling:
    """Return the message of a document in which only the sampling table `table` says something."""
    at = {each: written if each == table else {} for each in TABLES}
    env = {"id": "reverse-text"}
    if table in ("sampling", "env.sampling"):
        tree = {"model": {"name": "m"}, "sampling": at["sampling"], "env": [{**env, "sampling": at["env.sampling"]}]}
        return settings.of_run(EvalRunConfig.model_validate(tree)).envs[0].sampling
    trained = {**env, "sampling": at["orchestrator.env.sampling"]}
    evaluated = {
        "sampling": {"temperature": 1.0, **at["orchestrator.eval.sampling"]},
        "env": [{**env, "sampling": at["orchestrator.eval.env.sampling"]}],
    }
    orchestrator = {
        "env": [trained],
        "batch_size": 8,
        "rollouts_per_example": 4,
        "sampling": {"allow_biased_sampling": True, **at["orchestrator.sampling"]},
        "eval": evaluated,
    }
    config: RLConfig = validate_document({"orchestrator": orchestrator})
    if table.startswith("orchestrator.eval"):
        evaluation = settings.of_training(config.orchestrator)
        assert evaluation is not None
        return evaluation.envs[0].sampling
    return settings.plays_of_training(config.orchestrator, config.orchestrator.env[0]).sampling_at(0)


@pytest.mark.parametrize(
    ("table", "key"),
    [(table, key) for table, section in TABLES.items() for key in section.model_fields if key not in OF_NO_REQUEST],
)
def test_each_key_of_a_config_reaches_the_request_and_the_embedded_engine(table: str, key: str) -> None:
    value, asked = WRITTEN[key]
    sampling = message(table, {key: value})
    before = request_parameters(message(table, {}), is_external=False)
    assert request_parameters(sampling, is_external=False) == {**before, **asked}
    assert not asked.items() <= before.items(), "the value is no default"
    # The body that vLLM and our engine get.
    body = request_body([{"role": "user", "content": "x"}], "m", sampling_args(sampling), None)
    sent = {"max_completion_tokens" if name == "max_tokens" else name: each for name, each in asked.items()}
    assert sent.items() <= body.items()
    read = ChatBody.model_validate(body)
    taken = read.params(read.max_completion_tokens or 77)
    assert {name: getattr(taken, name) for name in asked} == {
        name: tuple(each) if isinstance(each, list) else each for name, each in asked.items()
    }


def test_a_parameter_has_one_neutral_value_everywhere() -> None:
    engine = SamplingParams(max_tokens=1)
    assert {name: getattr(engine, name) for name in sections.NEUTRAL} == sections.NEUTRAL
    config = SamplingConfig()
    assert {name: getattr(config, name) for name in sections.NEUTRAL} == sections.NEUTRAL
    asked = request_parameters(Sampling(temperature=1.0), is_external=False)
    assert asked.items() <= sections.NEUTRAL.items()
    assert ChatBody(messages=[{}]).params(1) == engine
    assert Truncation() == Truncation(**{name: sections.NEUTRAL[name] for name in ("top_p", "top_k", "min_p")})
    assert not engine.has_penalties and FULL.is_full
