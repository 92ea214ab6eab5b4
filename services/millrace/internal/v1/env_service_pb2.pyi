from millrace.internal.v1 import play_pb2 as _play_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EnvState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENV_STATE_UNSPECIFIED: _ClassVar[EnvState]
    ENV_STATE_LOADING: _ClassVar[EnvState]
    ENV_STATE_READY: _ClassVar[EnvState]
    ENV_STATE_FAILED: _ClassVar[EnvState]
ENV_STATE_UNSPECIFIED: EnvState
ENV_STATE_LOADING: EnvState
ENV_STATE_READY: EnvState
ENV_STATE_FAILED: EnvState

class TaskSet(_message.Message):
    __slots__ = ("num_tasks", "digest")
    NUM_TASKS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    num_tasks: int
    digest: str
    def __init__(self, num_tasks: _Optional[int] = ..., digest: _Optional[str] = ...) -> None: ...

class OpenEnvRequest(_message.Message):
    __slots__ = ("env", "api_key_var", "teacher_key_var", "sampling")
    ENV_FIELD_NUMBER: _ClassVar[int]
    API_KEY_VAR_FIELD_NUMBER: _ClassVar[int]
    TEACHER_KEY_VAR_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    env: _play_pb2.EnvSpec
    api_key_var: str
    teacher_key_var: str
    sampling: _play_pb2.Sampling
    def __init__(self, env: _Optional[_Union[_play_pb2.EnvSpec, _Mapping]] = ..., api_key_var: _Optional[str] = ..., teacher_key_var: _Optional[str] = ..., sampling: _Optional[_Union[_play_pb2.Sampling, _Mapping]] = ...) -> None: ...

class OpenEnvResponse(_message.Message):
    __slots__ = ("state", "train", "eval", "api", "requires_group", "error_type", "error_message", "error_remedy", "played_in")
    STATE_FIELD_NUMBER: _ClassVar[int]
    TRAIN_FIELD_NUMBER: _ClassVar[int]
    EVAL_FIELD_NUMBER: _ClassVar[int]
    API_FIELD_NUMBER: _ClassVar[int]
    REQUIRES_GROUP_FIELD_NUMBER: _ClassVar[int]
    ERROR_TYPE_FIELD_NUMBER: _ClassVar[int]
    ERROR_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ERROR_REMEDY_FIELD_NUMBER: _ClassVar[int]
    PLAYED_IN_FIELD_NUMBER: _ClassVar[int]
    state: EnvState
    train: TaskSet
    eval: TaskSet
    api: str
    requires_group: bool
    error_type: str
    error_message: str
    error_remedy: str
    played_in: str
    def __init__(self, state: _Optional[_Union[EnvState, str]] = ..., train: _Optional[_Union[TaskSet, _Mapping]] = ..., eval: _Optional[_Union[TaskSet, _Mapping]] = ..., api: _Optional[str] = ..., requires_group: bool = ..., error_type: _Optional[str] = ..., error_message: _Optional[str] = ..., error_remedy: _Optional[str] = ..., played_in: _Optional[str] = ...) -> None: ...

class PlayGroupResponse(_message.Message):
    __slots__ = ("already_playing",)
    ALREADY_PLAYING_FIELD_NUMBER: _ClassVar[int]
    already_playing: bool
    def __init__(self, already_playing: bool = ...) -> None: ...

class ListPlayingRequest(_message.Message):
    __slots__ = ("run_uid", "epoch", "log_instance")
    RUN_UID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LOG_INSTANCE_FIELD_NUMBER: _ClassVar[int]
    run_uid: str
    epoch: int
    log_instance: str
    def __init__(self, run_uid: _Optional[str] = ..., epoch: _Optional[int] = ..., log_instance: _Optional[str] = ...) -> None: ...

class ListPlayingResponse(_message.Message):
    __slots__ = ("groups",)
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[_play_pb2.PlayingGroup]
    def __init__(self, groups: _Optional[_Iterable[_Union[_play_pb2.PlayingGroup, _Mapping]]] = ...) -> None: ...

class CancelGroupsRequest(_message.Message):
    __slots__ = ("run_uid", "groups", "epoch")
    RUN_UID_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    run_uid: str
    groups: _containers.RepeatedCompositeFieldContainer[_play_pb2.PlayingGroup]
    epoch: int
    def __init__(self, run_uid: _Optional[str] = ..., groups: _Optional[_Iterable[_Union[_play_pb2.PlayingGroup, _Mapping]]] = ..., epoch: _Optional[int] = ...) -> None: ...

class CancelGroupsResponse(_message.Message):
    __slots__ = ("num_cancelled",)
    NUM_CANCELLED_FIELD_NUMBER: _ClassVar[int]
    num_cancelled: int
    def __init__(self, num_cancelled: _Optional[int] = ...) -> None: ...
