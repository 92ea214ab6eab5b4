from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Purpose(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PURPOSE_UNSPECIFIED: _ClassVar[Purpose]
    PURPOSE_TRAIN: _ClassVar[Purpose]
    PURPOSE_EVAL: _ClassVar[Purpose]

class RolloutStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLLOUT_STATUS_UNSPECIFIED: _ClassVar[RolloutStatus]
    ROLLOUT_STATUS_OK: _ClassVar[RolloutStatus]
    ROLLOUT_STATUS_ENV_ERROR: _ClassVar[RolloutStatus]
    ROLLOUT_STATUS_MODEL_ERROR: _ClassVar[RolloutStatus]
    ROLLOUT_STATUS_TIMEOUT: _ClassVar[RolloutStatus]
    ROLLOUT_STATUS_PROMPT_TOO_LONG: _ClassVar[RolloutStatus]
    ROLLOUT_STATUS_MISSING_TOKENS: _ClassVar[RolloutStatus]
    ROLLOUT_STATUS_CANCELLED: _ClassVar[RolloutStatus]
    ROLLOUT_STATUS_WORKER_DIED: _ClassVar[RolloutStatus]
    ROLLOUT_STATUS_QUARANTINED: _ClassVar[RolloutStatus]
    ROLLOUT_STATUS_ENGINE_LOST: _ClassVar[RolloutStatus]
PURPOSE_UNSPECIFIED: Purpose
PURPOSE_TRAIN: Purpose
PURPOSE_EVAL: Purpose
ROLLOUT_STATUS_UNSPECIFIED: RolloutStatus
ROLLOUT_STATUS_OK: RolloutStatus
ROLLOUT_STATUS_ENV_ERROR: RolloutStatus
ROLLOUT_STATUS_MODEL_ERROR: RolloutStatus
ROLLOUT_STATUS_TIMEOUT: RolloutStatus
ROLLOUT_STATUS_PROMPT_TOO_LONG: RolloutStatus
ROLLOUT_STATUS_MISSING_TOKENS: RolloutStatus
ROLLOUT_STATUS_CANCELLED: RolloutStatus
ROLLOUT_STATUS_WORKER_DIED: RolloutStatus
ROLLOUT_STATUS_QUARANTINED: RolloutStatus
ROLLOUT_STATUS_ENGINE_LOST: RolloutStatus

class PolicySpan(_message.Message):
    __slots__ = ("lineage", "version", "start", "end")
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    lineage: int
    version: int
    start: int
    end: int
    def __init__(self, lineage: _Optional[int] = ..., version: _Optional[int] = ..., start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class Sample(_message.Message):
    __slots__ = ("token_ids", "loss_mask", "inference_logprobs", "policy_spans", "turns", "own_sampling", "roles", "routed_experts")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOSS_MASK_FIELD_NUMBER: _ClassVar[int]
    INFERENCE_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    POLICY_SPANS_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    OWN_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    ROUTED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    loss_mask: bytes
    inference_logprobs: bytes
    policy_spans: _containers.RepeatedCompositeFieldContainer[PolicySpan]
    turns: _containers.RepeatedCompositeFieldContainer[TurnReward]
    own_sampling: _containers.RepeatedCompositeFieldContainer[OwnSampling]
    roles: _containers.RepeatedCompositeFieldContainer[RoleSpan]
    routed_experts: RoutedExperts
    def __init__(self, token_ids: _Optional[bytes] = ..., loss_mask: _Optional[bytes] = ..., inference_logprobs: _Optional[bytes] = ..., policy_spans: _Optional[_Iterable[_Union[PolicySpan, _Mapping]]] = ..., turns: _Optional[_Iterable[_Union[TurnReward, _Mapping]]] = ..., own_sampling: _Optional[_Iterable[_Union[OwnSampling, _Mapping]]] = ..., roles: _Optional[_Iterable[_Union[RoleSpan, _Mapping]]] = ..., routed_experts: _Optional[_Union[RoutedExperts, _Mapping]] = ...) -> None: ...

class RoutedExperts(_message.Message):
    __slots__ = ("experts", "num_layers", "top_k", "id_bytes")
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    ID_BYTES_FIELD_NUMBER: _ClassVar[int]
    experts: bytes
    num_layers: int
    top_k: int
    id_bytes: int
    def __init__(self, experts: _Optional[bytes] = ..., num_layers: _Optional[int] = ..., top_k: _Optional[int] = ..., id_bytes: _Optional[int] = ...) -> None: ...

class RoleSpan(_message.Message):
    __slots__ = ("role", "start", "end")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    role: str
    start: int
    end: int
    def __init__(self, role: _Optional[str] = ..., start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class OwnSampling(_message.Message):
    __slots__ = ("start", "end", "temperature", "truncation")
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TRUNCATION_FIELD_NUMBER: _ClassVar[int]
    start: int
    end: int
    temperature: float
    truncation: Truncation
    def __init__(self, start: _Optional[int] = ..., end: _Optional[int] = ..., temperature: _Optional[float] = ..., truncation: _Optional[_Union[Truncation, _Mapping]] = ...) -> None: ...

class TurnReward(_message.Message):
    __slots__ = ("end", "reward")
    END_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    end: int
    reward: float
    def __init__(self, end: _Optional[int] = ..., reward: _Optional[float] = ...) -> None: ...

class RolloutError(_message.Message):
    __slots__ = ("type", "message", "frames", "is_infrastructure")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    IS_INFRASTRUCTURE_FIELD_NUMBER: _ClassVar[int]
    type: str
    message: str
    frames: str
    is_infrastructure: bool
    def __init__(self, type: _Optional[str] = ..., message: _Optional[str] = ..., frames: _Optional[str] = ..., is_infrastructure: bool = ...) -> None: ...

class Truncation(_message.Message):
    __slots__ = ("top_p", "top_k", "min_p")
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    top_p: float
    top_k: int
    min_p: float
    def __init__(self, top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ...) -> None: ...

class Trace(_message.Message):
    __slots__ = ("agent", "reward", "num_samples", "num_turns")
    AGENT_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    NUM_TURNS_FIELD_NUMBER: _ClassVar[int]
    agent: str
    reward: float
    num_samples: int
    num_turns: int
    def __init__(self, agent: _Optional[str] = ..., reward: _Optional[float] = ..., num_samples: _Optional[int] = ..., num_turns: _Optional[int] = ...) -> None: ...

class Rollout(_message.Message):
    __slots__ = ("run_uid", "purpose", "ordinal", "member", "attempt", "group_size", "env", "task_index", "task_id", "status", "error", "samples", "reward", "metrics", "stop_condition", "is_truncated", "num_turns", "seconds", "model_seconds", "temperature", "env_server", "planned_step", "eval_id", "messages_json", "dispatched_after", "entry_id", "is_duplicate", "truncation", "sampling_json", "traces", "task_json", "demonstration")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    RUN_UID_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    ORDINAL_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    ENV_FIELD_NUMBER: _ClassVar[int]
    TASK_INDEX_FIELD_NUMBER: _ClassVar[int]
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    STOP_CONDITION_FIELD_NUMBER: _ClassVar[int]
    IS_TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    NUM_TURNS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    MODEL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    ENV_SERVER_FIELD_NUMBER: _ClassVar[int]
    PLANNED_STEP_FIELD_NUMBER: _ClassVar[int]
    EVAL_ID_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_JSON_FIELD_NUMBER: _ClassVar[int]
    DISPATCHED_AFTER_FIELD_NUMBER: _ClassVar[int]
    ENTRY_ID_FIELD_NUMBER: _ClassVar[int]
    IS_DUPLICATE_FIELD_NUMBER: _ClassVar[int]
    TRUNCATION_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_JSON_FIELD_NUMBER: _ClassVar[int]
    TRACES_FIELD_NUMBER: _ClassVar[int]
    TASK_JSON_FIELD_NUMBER: _ClassVar[int]
    DEMONSTRATION_FIELD_NUMBER: _ClassVar[int]
    run_uid: str
    purpose: Purpose
    ordinal: int
    member: int
    attempt: int
    group_size: int
    env: str
    task_index: int
    task_id: str
    status: RolloutStatus
    error: RolloutError
    samples: _containers.RepeatedCompositeFieldContainer[Sample]
    reward: float
    metrics: _containers.ScalarMap[str, float]
    stop_condition: str
    is_truncated: bool
    num_turns: int
    seconds: float
    model_seconds: float
    temperature: float
    env_server: str
    planned_step: int
    eval_id: str
    messages_json: str
    dispatched_after: str
    entry_id: str
    is_duplicate: bool
    truncation: Truncation
    sampling_json: str
    traces: _containers.RepeatedCompositeFieldContainer[Trace]
    task_json: str
    demonstration: str
    def __init__(self, run_uid: _Optional[str] = ..., purpose: _Optional[_Union[Purpose, str]] = ..., ordinal: _Optional[int] = ..., member: _Optional[int] = ..., attempt: _Optional[int] = ..., group_size: _Optional[int] = ..., env: _Optional[str] = ..., task_index: _Optional[int] = ..., task_id: _Optional[str] = ..., status: _Optional[_Union[RolloutStatus, str]] = ..., error: _Optional[_Union[RolloutError, _Mapping]] = ..., samples: _Optional[_Iterable[_Union[Sample, _Mapping]]] = ..., reward: _Optional[float] = ..., metrics: _Optional[_Mapping[str, float]] = ..., stop_condition: _Optional[str] = ..., is_truncated: bool = ..., num_turns: _Optional[int] = ..., seconds: _Optional[float] = ..., model_seconds: _Optional[float] = ..., temperature: _Optional[float] = ..., env_server: _Optional[str] = ..., planned_step: _Optional[int] = ..., eval_id: _Optional[str] = ..., messages_json: _Optional[str] = ..., dispatched_after: _Optional[str] = ..., entry_id: _Optional[str] = ..., is_duplicate: bool = ..., truncation: _Optional[_Union[Truncation, _Mapping]] = ..., sampling_json: _Optional[str] = ..., traces: _Optional[_Iterable[_Union[Trace, _Mapping]]] = ..., task_json: _Optional[str] = ..., demonstration: _Optional[str] = ...) -> None: ...

class RolloutArchive(_message.Message):
    __slots__ = ("rollouts",)
    ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    rollouts: _containers.RepeatedCompositeFieldContainer[Rollout]
    def __init__(self, rollouts: _Optional[_Iterable[_Union[Rollout, _Mapping]]] = ...) -> None: ...
