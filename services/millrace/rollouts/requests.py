"""Questions to the messages of `play.proto`, and the parts of a loaded environment.

The orchestrator, the env-server and its workers use the messages themselves. There a `top_p` or `repetition_penalty` of
0 means that it is not set.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from google.protobuf.message import Message

from millrace.internal.v1 import rollout_pb2
from millrace.internal.v1.play_pb2 import EnvSpec, PlayGroupRequest, Sampling
from millrace.rollouts.types import Truncation

M = TypeVar("M", bound=Message)

NUM_RUNS = "num_runs"
"""Of a full spool's refusal (SPOOL_FULL): the number of runs whose rollouts fill it."""


def changed(message: M, **fields: Any) -> M:
    """Return a copy of a protobuf message with other values in `fields`, none of which is None; the message stays as it
    is.
    """
    copy = type(message)()
    copy.CopyFrom(message)
    for name in fields:
        # Merging appends to repeated fields and fills in messages, so the old value goes first.
        copy.ClearField(name)
    copy.MergeFrom(type(message)(**fields))
    return copy


def label_of(env: EnvSpec) -> str:
    """Return the name by which an environment is shown: its name in the run, or the package's id if it has none."""
    return env.name or env.id


def loaded_as(env: EnvSpec) -> tuple[object, ...]:
    """Return a key that is equal for environments which may share workers, as far as everything but their arguments
    goes.

    It has the package's id and interpreter, the selection of tasks, `demo_key`, the agent and the judge's limits. The
    run's name for an environment is not part of it.
    """
    kept = (env.takes_several_traces, env.is_text_only, env.judge_max_concurrent, env.judge_timeout_s)
    return (env.id, env.python, env.select_json, env.demo_key, env.agent_json, *kept)


def truncation_of(sampling: Sampling) -> Truncation:
    """Return top-p, top-k and min-p of a sampling message, where 0 for top-p means that it is not set."""
    return Truncation(top_p=_or_neutral(sampling.top_p), top_k=sampling.top_k, min_p=sampling.min_p)


def request_parameters(sampling: Sampling, *, is_external: bool) -> dict[str, Any]:
    """Return all parameters of a request to an engine by name, the further fields of `extra_body_json` included.

    What the run samples with wins over a field of the same name there. Engines of ours get every parameter, also one
    that changes nothing: vLLM silently takes what is left out from the model's `generation_config.json`. Other
    endpoints (`is_external`) may refuse what OpenAI's API does not know: of top-p, top-k, min-p and the repetition
    penalty they get only those that change something, and no other penalty.
    """
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    asked = {
        "top_p": _or_neutral(sampling.top_p),
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": _or_neutral(sampling.repetition_penalty),
    }
    if is_external:
        asked = {name: value for name, value in asked.items() if value != neutral[name]}
    limit = {"max_tokens": sampling.max_tokens} if sampling.max_tokens else {}
    penalties = {} if is_external else {"presence_penalty": 0.0, "frequency_penalty": 0.0}
    extra = json.loads(sampling.extra_body_json or "{}")
    # In this order: what the run samples with wins over `extra_body_json`, which must not change it unseen.
    return penalties | extra | {"temperature": sampling.temperature} | limit | asked


def _or_neutral(value: float) -> float:
    """Return 1, which changes nothing, for a parameter that is not set (0), else its value."""
    return 1.0 if value == 0 else value


def is_training(request: PlayGroupRequest) -> bool:
    """Return whether the request's rollouts are trained on."""
    return request.purpose == rollout_pb2.PURPOSE_TRAIN


def has_train_task(request: PlayGroupRequest) -> bool:
    """Return whether the task of a request is one of the training tasks; else it is a held-out one."""
    return request.use_train_tasks or is_training(request)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSet:
    """The tasks of one set by content: their ids, in order, and a digest of all."""

    ids: Sequence[str]
    digest: str

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedEnv:
    """What a loaded environment consists of."""

    api: str
    requires_group: bool
    train: TaskSet
    eval: TaskSet
    declared: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """How it has its model calls sampled, by the place in its code or args that sets it; empty if none does."""

    def tasks(self, request: PlayGroupRequest) -> TaskSet:
        """Return the set of tasks that has the request's task: the training tasks or the held-out ones."""
        return self.train if has_train_task(request) else self.eval

    def task_id(self, request: PlayGroupRequest) -> str:
        """Return the id of the request's task, which the request has as an index into its set."""
        return self.tasks(request).ids[request.task_index]
