import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RunKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RUN_KIND_UNSPECIFIED: _ClassVar[RunKind]
    RUN_KIND_RL: _ClassVar[RunKind]
    RUN_KIND_SFT: _ClassVar[RunKind]
    RUN_KIND_EVAL: _ClassVar[RunKind]

class RunState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RUN_STATE_UNSPECIFIED: _ClassVar[RunState]
    RUN_STATE_QUEUED: _ClassVar[RunState]
    RUN_STATE_STARTING: _ClassVar[RunState]
    RUN_STATE_RUNNING: _ClassVar[RunState]
    RUN_STATE_PAUSED: _ClassVar[RunState]
    RUN_STATE_STOPPING: _ClassVar[RunState]
    RUN_STATE_SUCCEEDED: _ClassVar[RunState]
    RUN_STATE_FAILED: _ClassVar[RunState]
    RUN_STATE_CANCELLED: _ClassVar[RunState]
    RUN_STATE_DAMAGED: _ClassVar[RunState]
RUN_KIND_UNSPECIFIED: RunKind
RUN_KIND_RL: RunKind
RUN_KIND_SFT: RunKind
RUN_KIND_EVAL: RunKind
RUN_STATE_UNSPECIFIED: RunState
RUN_STATE_QUEUED: RunState
RUN_STATE_STARTING: RunState
RUN_STATE_RUNNING: RunState
RUN_STATE_PAUSED: RunState
RUN_STATE_STOPPING: RunState
RUN_STATE_SUCCEEDED: RunState
RUN_STATE_FAILED: RunState
RUN_STATE_CANCELLED: RunState
RUN_STATE_DAMAGED: RunState

class Run(_message.Message):
    __slots__ = ("name", "uid", "kind", "state", "config_json", "run_hash", "progress", "error", "create_time", "start_time", "end_time", "labels", "parent", "queue_place", "tenant")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    RUN_HASH_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    END_TIME_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    QUEUE_PLACE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    name: str
    uid: str
    kind: RunKind
    state: RunState
    config_json: str
    run_hash: str
    progress: RunProgress
    error: RunError
    create_time: _timestamp_pb2.Timestamp
    start_time: _timestamp_pb2.Timestamp
    end_time: _timestamp_pb2.Timestamp
    labels: _containers.ScalarMap[str, str]
    parent: RunParent
    queue_place: str
    tenant: str
    def __init__(self, name: _Optional[str] = ..., uid: _Optional[str] = ..., kind: _Optional[_Union[RunKind, str]] = ..., state: _Optional[_Union[RunState, str]] = ..., config_json: _Optional[str] = ..., run_hash: _Optional[str] = ..., progress: _Optional[_Union[RunProgress, _Mapping]] = ..., error: _Optional[_Union[RunError, _Mapping]] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., start_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., end_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., labels: _Optional[_Mapping[str, str]] = ..., parent: _Optional[_Union[RunParent, _Mapping]] = ..., queue_place: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class RunParent(_message.Message):
    __slots__ = ("name", "uid", "step")
    NAME_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    name: str
    uid: str
    step: int
    def __init__(self, name: _Optional[str] = ..., uid: _Optional[str] = ..., step: _Optional[int] = ...) -> None: ...

class RunProgress(_message.Message):
    __slots__ = ("step", "max_steps", "policy_version", "min_inference_version", "num_rollouts", "num_tokens", "reward", "environments", "num_easy_tasks", "num_normal_tasks", "num_hard_tasks", "num_groups", "num_groups_dropped")
    STEP_FIELD_NUMBER: _ClassVar[int]
    MAX_STEPS_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    MIN_INFERENCE_VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENTS_FIELD_NUMBER: _ClassVar[int]
    NUM_EASY_TASKS_FIELD_NUMBER: _ClassVar[int]
    NUM_NORMAL_TASKS_FIELD_NUMBER: _ClassVar[int]
    NUM_HARD_TASKS_FIELD_NUMBER: _ClassVar[int]
    NUM_GROUPS_FIELD_NUMBER: _ClassVar[int]
    NUM_GROUPS_DROPPED_FIELD_NUMBER: _ClassVar[int]
    step: int
    max_steps: int
    policy_version: int
    min_inference_version: int
    num_rollouts: int
    num_tokens: int
    reward: float
    environments: _containers.RepeatedCompositeFieldContainer[EnvRollouts]
    num_easy_tasks: int
    num_normal_tasks: int
    num_hard_tasks: int
    num_groups: int
    num_groups_dropped: int
    def __init__(self, step: _Optional[int] = ..., max_steps: _Optional[int] = ..., policy_version: _Optional[int] = ..., min_inference_version: _Optional[int] = ..., num_rollouts: _Optional[int] = ..., num_tokens: _Optional[int] = ..., reward: _Optional[float] = ..., environments: _Optional[_Iterable[_Union[EnvRollouts, _Mapping]]] = ..., num_easy_tasks: _Optional[int] = ..., num_normal_tasks: _Optional[int] = ..., num_hard_tasks: _Optional[int] = ..., num_groups: _Optional[int] = ..., num_groups_dropped: _Optional[int] = ...) -> None: ...

class EnvRollouts(_message.Message):
    __slots__ = ("env", "num_rollouts", "num_failed", "failed", "num_recent", "num_recent_failed", "first_error", "frames")
    class FailedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    ENV_FIELD_NUMBER: _ClassVar[int]
    NUM_ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    NUM_RECENT_FIELD_NUMBER: _ClassVar[int]
    NUM_RECENT_FAILED_FIELD_NUMBER: _ClassVar[int]
    FIRST_ERROR_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    env: str
    num_rollouts: int
    num_failed: int
    failed: _containers.ScalarMap[str, int]
    num_recent: int
    num_recent_failed: int
    first_error: str
    frames: str
    def __init__(self, env: _Optional[str] = ..., num_rollouts: _Optional[int] = ..., num_failed: _Optional[int] = ..., failed: _Optional[_Mapping[str, int]] = ..., num_recent: _Optional[int] = ..., num_recent_failed: _Optional[int] = ..., first_error: _Optional[str] = ..., frames: _Optional[str] = ...) -> None: ...

class RunError(_message.Message):
    __slots__ = ("reason", "message", "component", "remedy")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    COMPONENT_FIELD_NUMBER: _ClassVar[int]
    REMEDY_FIELD_NUMBER: _ClassVar[int]
    reason: str
    message: str
    component: str
    remedy: str
    def __init__(self, reason: _Optional[str] = ..., message: _Optional[str] = ..., component: _Optional[str] = ..., remedy: _Optional[str] = ...) -> None: ...
