from millrace.internal.v1 import rollout_pb2 as _rollout_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EnvSpec(_message.Message):
    __slots__ = ("name", "id", "args_json", "takes_several_traces", "is_text_only", "judge_max_concurrent", "judge_timeout_s", "judge_key_var", "python", "image", "select_json", "demo_key", "agent_json")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    ARGS_JSON_FIELD_NUMBER: _ClassVar[int]
    TAKES_SEVERAL_TRACES_FIELD_NUMBER: _ClassVar[int]
    IS_TEXT_ONLY_FIELD_NUMBER: _ClassVar[int]
    JUDGE_MAX_CONCURRENT_FIELD_NUMBER: _ClassVar[int]
    JUDGE_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    JUDGE_KEY_VAR_FIELD_NUMBER: _ClassVar[int]
    PYTHON_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    SELECT_JSON_FIELD_NUMBER: _ClassVar[int]
    DEMO_KEY_FIELD_NUMBER: _ClassVar[int]
    AGENT_JSON_FIELD_NUMBER: _ClassVar[int]
    name: str
    id: str
    args_json: str
    takes_several_traces: bool
    is_text_only: bool
    judge_max_concurrent: int
    judge_timeout_s: float
    judge_key_var: str
    python: str
    image: str
    select_json: str
    demo_key: str
    agent_json: str
    def __init__(self, name: _Optional[str] = ..., id: _Optional[str] = ..., args_json: _Optional[str] = ..., takes_several_traces: bool = ..., is_text_only: bool = ..., judge_max_concurrent: _Optional[int] = ..., judge_timeout_s: _Optional[float] = ..., judge_key_var: _Optional[str] = ..., python: _Optional[str] = ..., image: _Optional[str] = ..., select_json: _Optional[str] = ..., demo_key: _Optional[str] = ..., agent_json: _Optional[str] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "max_tokens", "top_p", "extra_body_json", "top_k", "min_p", "repetition_penalty", "allows_bias", "is_plain", "holds_temperature")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    EXTRA_BODY_JSON_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    ALLOWS_BIAS_FIELD_NUMBER: _ClassVar[int]
    IS_PLAIN_FIELD_NUMBER: _ClassVar[int]
    HOLDS_TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    max_tokens: int
    top_p: float
    extra_body_json: str
    top_k: int
    min_p: float
    repetition_penalty: float
    allows_bias: bool
    is_plain: bool
    holds_temperature: bool
    def __init__(self, temperature: _Optional[float] = ..., max_tokens: _Optional[int] = ..., top_p: _Optional[float] = ..., extra_body_json: _Optional[str] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., allows_bias: bool = ..., is_plain: bool = ..., holds_temperature: bool = ...) -> None: ...

class PlayGroupRequest(_message.Message):
    __slots__ = ("run_uid", "purpose", "eval_id", "ordinal", "attempt", "members", "group_size", "env", "use_train_tasks", "task_index", "base_url", "model", "sampling", "rollout_timeout_seconds", "epoch", "generation", "planned_step", "tokenizer_manifest_key", "dispatched_after", "is_external", "api_key_var", "demo_key")
    RUN_UID_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    EVAL_ID_FIELD_NUMBER: _ClassVar[int]
    ORDINAL_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    ENV_FIELD_NUMBER: _ClassVar[int]
    USE_TRAIN_TASKS_FIELD_NUMBER: _ClassVar[int]
    TASK_INDEX_FIELD_NUMBER: _ClassVar[int]
    BASE_URL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    PLANNED_STEP_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_MANIFEST_KEY_FIELD_NUMBER: _ClassVar[int]
    DISPATCHED_AFTER_FIELD_NUMBER: _ClassVar[int]
    IS_EXTERNAL_FIELD_NUMBER: _ClassVar[int]
    API_KEY_VAR_FIELD_NUMBER: _ClassVar[int]
    DEMO_KEY_FIELD_NUMBER: _ClassVar[int]
    run_uid: str
    purpose: _rollout_pb2.Purpose
    eval_id: str
    ordinal: int
    attempt: int
    members: _containers.RepeatedScalarFieldContainer[int]
    group_size: int
    env: EnvSpec
    use_train_tasks: bool
    task_index: int
    base_url: str
    model: str
    sampling: Sampling
    rollout_timeout_seconds: float
    epoch: int
    generation: int
    planned_step: int
    tokenizer_manifest_key: str
    dispatched_after: str
    is_external: bool
    api_key_var: str
    demo_key: str
    def __init__(self, run_uid: _Optional[str] = ..., purpose: _Optional[_Union[_rollout_pb2.Purpose, str]] = ..., eval_id: _Optional[str] = ..., ordinal: _Optional[int] = ..., attempt: _Optional[int] = ..., members: _Optional[_Iterable[int]] = ..., group_size: _Optional[int] = ..., env: _Optional[_Union[EnvSpec, _Mapping]] = ..., use_train_tasks: bool = ..., task_index: _Optional[int] = ..., base_url: _Optional[str] = ..., model: _Optional[str] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., rollout_timeout_seconds: _Optional[float] = ..., epoch: _Optional[int] = ..., generation: _Optional[int] = ..., planned_step: _Optional[int] = ..., tokenizer_manifest_key: _Optional[str] = ..., dispatched_after: _Optional[str] = ..., is_external: bool = ..., api_key_var: _Optional[str] = ..., demo_key: _Optional[str] = ...) -> None: ...

class PlayingGroup(_message.Message):
    __slots__ = ("purpose", "eval_id", "ordinal", "attempt", "members", "age_seconds", "planned_step", "base_url")
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    EVAL_ID_FIELD_NUMBER: _ClassVar[int]
    ORDINAL_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PLANNED_STEP_FIELD_NUMBER: _ClassVar[int]
    BASE_URL_FIELD_NUMBER: _ClassVar[int]
    purpose: _rollout_pb2.Purpose
    eval_id: str
    ordinal: int
    attempt: int
    members: _containers.RepeatedScalarFieldContainer[int]
    age_seconds: float
    planned_step: int
    base_url: str
    def __init__(self, purpose: _Optional[_Union[_rollout_pb2.Purpose, str]] = ..., eval_id: _Optional[str] = ..., ordinal: _Optional[int] = ..., attempt: _Optional[int] = ..., members: _Optional[_Iterable[int]] = ..., age_seconds: _Optional[float] = ..., planned_step: _Optional[int] = ..., base_url: _Optional[str] = ...) -> None: ...
