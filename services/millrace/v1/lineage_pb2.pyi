import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from millrace.v1 import rollout_pb2 as _rollout_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RolloutLineage(_message.Message):
    __slots__ = ("rollout", "made_by", "batch", "became")
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    MADE_BY_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    BECAME_FIELD_NUMBER: _ClassVar[int]
    rollout: _rollout_pb2.Rollout
    made_by: _containers.RepeatedCompositeFieldContainer[TracedVersion]
    batch: TracedBatch
    became: TracedVersion
    def __init__(self, rollout: _Optional[_Union[_rollout_pb2.Rollout, _Mapping]] = ..., made_by: _Optional[_Iterable[_Union[TracedVersion, _Mapping]]] = ..., batch: _Optional[_Union[TracedBatch, _Mapping]] = ..., became: _Optional[_Union[TracedVersion, _Mapping]] = ...) -> None: ...

class VersionLineage(_message.Message):
    __slots__ = ("version", "made_from", "made", "trained_steps", "next")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MADE_FROM_FIELD_NUMBER: _ClassVar[int]
    MADE_FIELD_NUMBER: _ClassVar[int]
    TRAINED_STEPS_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    version: TracedVersion
    made_from: TracedRollouts
    made: TracedRollouts
    trained_steps: _containers.RepeatedScalarFieldContainer[int]
    next: TracedVersion
    def __init__(self, version: _Optional[_Union[TracedVersion, _Mapping]] = ..., made_from: _Optional[_Union[TracedRollouts, _Mapping]] = ..., made: _Optional[_Union[TracedRollouts, _Mapping]] = ..., trained_steps: _Optional[_Iterable[int]] = ..., next: _Optional[_Union[TracedVersion, _Mapping]] = ...) -> None: ...

class TracedVersion(_message.Message):
    __slots__ = ("version", "is_known", "num_tokens", "publish_time", "digest", "uri", "codec", "size_bytes", "replicas", "batch", "checkpoint")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    IS_KNOWN_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_TIME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    URI_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    version: int
    is_known: bool
    num_tokens: int
    publish_time: _timestamp_pb2.Timestamp
    digest: str
    uri: str
    codec: str
    size_bytes: int
    replicas: _containers.RepeatedScalarFieldContainer[str]
    batch: TracedBatch
    checkpoint: TracedCheckpoint
    def __init__(self, version: _Optional[int] = ..., is_known: bool = ..., num_tokens: _Optional[int] = ..., publish_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., digest: _Optional[str] = ..., uri: _Optional[str] = ..., codec: _Optional[str] = ..., size_bytes: _Optional[int] = ..., replicas: _Optional[_Iterable[str]] = ..., batch: _Optional[_Union[TracedBatch, _Mapping]] = ..., checkpoint: _Optional[_Union[TracedCheckpoint, _Mapping]] = ...) -> None: ...

class TracedBatch(_message.Message):
    __slots__ = ("step", "is_done", "key", "num_rollouts", "num_trained", "reward_mean", "dropped", "problem")
    class DroppedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    IS_DONE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    NUM_ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    NUM_TRAINED_FIELD_NUMBER: _ClassVar[int]
    REWARD_MEAN_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    step: int
    is_done: bool
    key: str
    num_rollouts: int
    num_trained: int
    reward_mean: float
    dropped: _containers.ScalarMap[str, int]
    problem: str
    def __init__(self, step: _Optional[int] = ..., is_done: bool = ..., key: _Optional[str] = ..., num_rollouts: _Optional[int] = ..., num_trained: _Optional[int] = ..., reward_mean: _Optional[float] = ..., dropped: _Optional[_Mapping[str, int]] = ..., problem: _Optional[str] = ...) -> None: ...

class TracedCheckpoint(_message.Message):
    __slots__ = ("step", "uri", "size_bytes")
    STEP_FIELD_NUMBER: _ClassVar[int]
    URI_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    step: int
    uri: str
    size_bytes: int
    def __init__(self, step: _Optional[int] = ..., uri: _Optional[str] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class TracedRollouts(_message.Message):
    __slots__ = ("num_rollouts", "rollouts")
    NUM_ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    num_rollouts: int
    rollouts: _containers.RepeatedCompositeFieldContainer[_rollout_pb2.Rollout]
    def __init__(self, num_rollouts: _Optional[int] = ..., rollouts: _Optional[_Iterable[_Union[_rollout_pb2.Rollout, _Mapping]]] = ...) -> None: ...
