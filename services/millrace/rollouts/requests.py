"""What an env-server is asked to play, what it says that it plays, and what an environment consists of.

The orchestrator and the env-server share these terms; `request_wire.py` writes and reads them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from millrace.rollouts.types import Purpose, Truncation


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvSpec:
    """Which environment: its name in the run, its package id, its arguments as a JSON object."""

    name: str = ""
    id: str = ""
    args_json: str = ""
    takes_several_traces: bool = False
    """Its rollouts may have several trained agents, each with a reward of its own."""
    is_text_only: bool = False
    """It is played at engines of ours alone, which take text."""
    judge_max_concurrent: int = 0
    """Most calls of endpoints at once, per worker, while rollouts are scored; 0 is no limit."""
    judge_timeout_s: float = 0.0
    """Seconds that each of them may take; 0 is no limit."""
    judge_key_var: str = ""
    """Variable that must hold the key of such an endpoint; empty if none."""

    python: str = ""
    """Interpreter that its workers run in; empty: the env-server's own."""
    image: str = ""
    """Container image that its env-servers run; empty: any of those that announce none."""
    select_json: str = ""
    """Which of its tasks are played (`env_server/adapters/selection.py`); empty: all."""

    demo_key: str = ""
    """Field of its training tasks with the demonstration that a teacher gets; empty if it gets none."""
    agent_json: str = ""
    """What of its agents is trained on, and their limits (`env_server/agents/sessions.py`); empty: as it says."""

    @property
    def label(self) -> str:
        """Return the name by which people know it."""
        return self.name or self.id

    @property
    def loaded_as(self) -> tuple[object, ...]:
        """Return what two environments must have in common to share workers, besides their arguments.

        The run's name for an environment is not part of it.
        """
        kept = (self.takes_several_traces, self.is_text_only, self.judge_max_concurrent, self.judge_timeout_s)
        return (self.id, self.python, self.select_json, self.demo_key, self.agent_json, *kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to sample; fields as in env_service.proto, where a `top_p` or `repetition_penalty` of 0 says nothing."""

    temperature: float = 0.0
    max_tokens: int = 0
    top_p: float = 0.0
    extra_body_json: str = ""
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 0.0
    allows_bias: bool = False
    """An environment may set what `orchestrator.sampling` may with `allow_biased_sampling`."""
    is_plain: bool = False
    """Nothing but temperature 1 and the full distribution may be set."""
    holds_temperature: bool = False
    """The temperature is that of a schedule: what an environment was made with does not take its place."""

    @property
    def truncation(self) -> Truncation:
        """Return the truncation parameters, which limit the tokens that may be sampled."""
        return Truncation(top_p=_or_neutral(self.top_p), top_k=self.top_k, min_p=self.min_p)

    def parameters(self, *, is_external: bool) -> dict[str, Any]:
        """Return all parameters of a request to an engine, the further fields of `extra_body_json` included.

        Engines of ours get every parameter, also one that changes nothing: what is left out vLLM takes from the
        model's `generation_config.json`, without a word. Other endpoints (`is_external`) may refuse what
        OpenAI's API does not know, so they get only those that change something.
        """
        neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
        asked = {
            "top_p": _or_neutral(self.top_p),
            "top_k": self.top_k,
            "min_p": self.min_p,
            "repetition_penalty": _or_neutral(self.repetition_penalty),
        }
        if is_external:
            asked = {name: value for name, value in asked.items() if value != neutral[name]}
        own = {"temperature": self.temperature} | ({"max_tokens": self.max_tokens} if self.max_tokens else {}) | asked
        penalties = {} if is_external else {"presence_penalty": 0.0, "frequency_penalty": 0.0}
        return penalties | json.loads(self.extra_body_json or "{}") | own


def _or_neutral(value: float) -> float:
    return 1.0 if value == 0 else value


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayRequest:
    """Members of a group that are to be played; fields as in `PlayGroupRequest` of env_service.proto."""

    run_uid: str
    purpose: Purpose
    ordinal: int
    members: Sequence[int]
    group_size: int
    env: EnvSpec
    base_url: str = ""
    eval_id: str = ""
    attempt: int = 0
    use_train_tasks: bool = False
    task_index: int = 0
    model: str = ""
    sampling: Sampling = field(default_factory=Sampling)
    rollout_timeout_seconds: float = 0.0
    epoch: int = 0
    generation: int = 0
    planned_step: int = 0
    tokenizer_manifest_key: str = ""
    dispatched_after: str = ""
    is_external: bool = False
    api_key_var: str = ""
    demo_key: str = ""

    @property
    def is_training(self) -> bool:
        """Return whether its rollouts are trained on."""
        return self.purpose is Purpose.TRAIN

    @property
    def has_train_task(self) -> bool:
        """Return whether its task is one of the training tasks, and not a held-out one."""
        return self.use_train_tasks or self.is_training


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedGroup:
    """A group that an env-server plays, or that it is to stop; fields as in `PlayingGroup` of env_service.proto."""

    purpose: Purpose
    ordinal: int
    eval_id: str = ""
    attempt: int = 0
    members: Sequence[int] = ()
    """Those that it has not finished."""
    age_seconds: float = 0.0
    planned_step: int = 0
    base_url: str = ""


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

    def tasks(self, request: PlayRequest) -> TaskSet:
        """Return the set with the request's task: the training tasks or the held-out ones."""
        return self.train if request.has_train_task else self.eval

    def task_id(self, request: PlayRequest) -> str:
        """Return the id of the request's task."""
        return self.tasks(request).ids[request.task_index]
