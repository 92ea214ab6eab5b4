from millrace.internal.v1 import env_service_pb2 as _env_service_pb2
from millrace.internal.v1 import play_pb2 as _play_pb2
from millrace.internal.v1 import rollout_pb2 as _rollout_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LoadEnv(_message.Message):
    __slots__ = ("env",)
    ENV_FIELD_NUMBER: _ClassVar[int]
    env: _play_pb2.EnvSpec
    def __init__(self, env: _Optional[_Union[_play_pb2.EnvSpec, _Mapping]] = ...) -> None: ...

class PlayMembers(_message.Message):
    __slots__ = ("play_id", "request", "tokenizer_dir")
    PLAY_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIR_FIELD_NUMBER: _ClassVar[int]
    play_id: int
    request: _play_pb2.PlayGroupRequest
    tokenizer_dir: str
    def __init__(self, play_id: _Optional[int] = ..., request: _Optional[_Union[_play_pb2.PlayGroupRequest, _Mapping]] = ..., tokenizer_dir: _Optional[str] = ...) -> None: ...

class CancelPlay(_message.Message):
    __slots__ = ("play_id",)
    PLAY_ID_FIELD_NUMBER: _ClassVar[int]
    play_id: int
    def __init__(self, play_id: _Optional[int] = ...) -> None: ...

class WorkerCommand(_message.Message):
    __slots__ = ("load", "play", "cancel")
    LOAD_FIELD_NUMBER: _ClassVar[int]
    PLAY_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    load: LoadEnv
    play: PlayMembers
    cancel: CancelPlay
    def __init__(self, load: _Optional[_Union[LoadEnv, _Mapping]] = ..., play: _Optional[_Union[PlayMembers, _Mapping]] = ..., cancel: _Optional[_Union[CancelPlay, _Mapping]] = ...) -> None: ...

class EnvLoaded(_message.Message):
    __slots__ = ("api", "train", "eval", "requires_group", "train_task_ids", "eval_task_ids", "declared_json")
    API_FIELD_NUMBER: _ClassVar[int]
    TRAIN_FIELD_NUMBER: _ClassVar[int]
    EVAL_FIELD_NUMBER: _ClassVar[int]
    REQUIRES_GROUP_FIELD_NUMBER: _ClassVar[int]
    TRAIN_TASK_IDS_FIELD_NUMBER: _ClassVar[int]
    EVAL_TASK_IDS_FIELD_NUMBER: _ClassVar[int]
    DECLARED_JSON_FIELD_NUMBER: _ClassVar[int]
    api: str
    train: _env_service_pb2.TaskSet
    eval: _env_service_pb2.TaskSet
    requires_group: bool
    train_task_ids: _containers.RepeatedScalarFieldContainer[str]
    eval_task_ids: _containers.RepeatedScalarFieldContainer[str]
    declared_json: str
    def __init__(self, api: _Optional[str] = ..., train: _Optional[_Union[_env_service_pb2.TaskSet, _Mapping]] = ..., eval: _Optional[_Union[_env_service_pb2.TaskSet, _Mapping]] = ..., requires_group: bool = ..., train_task_ids: _Optional[_Iterable[str]] = ..., eval_task_ids: _Optional[_Iterable[str]] = ..., declared_json: _Optional[str] = ...) -> None: ...

class EnvFailed(_message.Message):
    __slots__ = ("error_type", "error_message", "error_remedy")
    ERROR_TYPE_FIELD_NUMBER: _ClassVar[int]
    ERROR_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ERROR_REMEDY_FIELD_NUMBER: _ClassVar[int]
    error_type: str
    error_message: str
    error_remedy: str
    def __init__(self, error_type: _Optional[str] = ..., error_message: _Optional[str] = ..., error_remedy: _Optional[str] = ...) -> None: ...

class PlayEnded(_message.Message):
    __slots__ = ("play_id", "rollouts")
    PLAY_ID_FIELD_NUMBER: _ClassVar[int]
    ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    play_id: int
    rollouts: _containers.RepeatedCompositeFieldContainer[_rollout_pb2.Rollout]
    def __init__(self, play_id: _Optional[int] = ..., rollouts: _Optional[_Iterable[_Union[_rollout_pb2.Rollout, _Mapping]]] = ...) -> None: ...

class Standing(_message.Message):
    __slots__ = ("places",)
    class PlacesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    PLACES_FIELD_NUMBER: _ClassVar[int]
    places: _containers.ScalarMap[str, int]
    def __init__(self, places: _Optional[_Mapping[str, int]] = ...) -> None: ...

class WorkerReport(_message.Message):
    __slots__ = ("loaded", "failed", "ended", "standing")
    LOADED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    STANDING_FIELD_NUMBER: _ClassVar[int]
    loaded: EnvLoaded
    failed: EnvFailed
    ended: PlayEnded
    standing: Standing
    def __init__(self, loaded: _Optional[_Union[EnvLoaded, _Mapping]] = ..., failed: _Optional[_Union[EnvFailed, _Mapping]] = ..., ended: _Optional[_Union[PlayEnded, _Mapping]] = ..., standing: _Optional[_Union[Standing, _Mapping]] = ...) -> None: ...
