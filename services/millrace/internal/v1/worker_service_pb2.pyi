from millrace.internal.v1 import policy_pb2 as _policy_pb2
from millrace.internal.v1 import policy_service_pb2 as _policy_service_pb2
from millrace.v1 import event_pb2 as _event_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_KIND_UNSPECIFIED: _ClassVar[WorkerKind]
    WORKER_KIND_ENV_SERVER: _ClassVar[WorkerKind]
    WORKER_KIND_INFERENCE: _ClassVar[WorkerKind]
    WORKER_KIND_TRAINER: _ClassVar[WorkerKind]
WORKER_KIND_UNSPECIFIED: WorkerKind
WORKER_KIND_ENV_SERVER: WorkerKind
WORKER_KIND_INFERENCE: WorkerKind
WORKER_KIND_TRAINER: WorkerKind

class Worker(_message.Message):
    __slots__ = ("worker_id", "kind", "address", "http_url", "version", "min_log_format", "max_log_format", "capacity", "slot", "custom_modules", "env_image", "num_ranks")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HTTP_URL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MIN_LOG_FORMAT_FIELD_NUMBER: _ClassVar[int]
    MAX_LOG_FORMAT_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    CUSTOM_MODULES_FIELD_NUMBER: _ClassVar[int]
    ENV_IMAGE_FIELD_NUMBER: _ClassVar[int]
    NUM_RANKS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    kind: WorkerKind
    address: str
    http_url: str
    version: str
    min_log_format: int
    max_log_format: int
    capacity: int
    slot: str
    custom_modules: _containers.RepeatedScalarFieldContainer[str]
    env_image: str
    num_ranks: int
    def __init__(self, worker_id: _Optional[str] = ..., kind: _Optional[_Union[WorkerKind, str]] = ..., address: _Optional[str] = ..., http_url: _Optional[str] = ..., version: _Optional[str] = ..., min_log_format: _Optional[int] = ..., max_log_format: _Optional[int] = ..., capacity: _Optional[int] = ..., slot: _Optional[str] = ..., custom_modules: _Optional[_Iterable[str]] = ..., env_image: _Optional[str] = ..., num_ranks: _Optional[int] = ...) -> None: ...

class TrainerStatus(_message.Message):
    __slots__ = ("run_uid", "epoch", "step", "is_finished", "error_reason", "error_message", "device_turn", "error_remedy")
    RUN_UID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    IS_FINISHED_FIELD_NUMBER: _ClassVar[int]
    ERROR_REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_TURN_FIELD_NUMBER: _ClassVar[int]
    ERROR_REMEDY_FIELD_NUMBER: _ClassVar[int]
    run_uid: str
    epoch: int
    step: int
    is_finished: bool
    error_reason: str
    error_message: str
    device_turn: int
    error_remedy: str
    def __init__(self, run_uid: _Optional[str] = ..., epoch: _Optional[int] = ..., step: _Optional[int] = ..., is_finished: bool = ..., error_reason: _Optional[str] = ..., error_message: _Optional[str] = ..., device_turn: _Optional[int] = ..., error_remedy: _Optional[str] = ...) -> None: ...

class RegisterWorkerRequest(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: Worker
    def __init__(self, worker: _Optional[_Union[Worker, _Mapping]] = ...) -> None: ...

class RegisterWorkerResponse(_message.Message):
    __slots__ = ("heartbeat_seconds", "lease_seconds")
    HEARTBEAT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    heartbeat_seconds: float
    lease_seconds: float
    def __init__(self, heartbeat_seconds: _Optional[float] = ..., lease_seconds: _Optional[float] = ...) -> None: ...

class GpuUse(_message.Message):
    __slots__ = ("index", "uuid", "name", "memory_used_bytes", "memory_total_bytes", "utilization", "power_watts")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    UUID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    MEMORY_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    UTILIZATION_FIELD_NUMBER: _ClassVar[int]
    POWER_WATTS_FIELD_NUMBER: _ClassVar[int]
    index: int
    uuid: str
    name: str
    memory_used_bytes: int
    memory_total_bytes: int
    utilization: float
    power_watts: float
    def __init__(self, index: _Optional[int] = ..., uuid: _Optional[str] = ..., name: _Optional[str] = ..., memory_used_bytes: _Optional[int] = ..., memory_total_bytes: _Optional[int] = ..., utilization: _Optional[float] = ..., power_watts: _Optional[float] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("worker_id", "waits", "policy", "trainer", "num_playing", "is_leaving", "hold_seconds", "gpus")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    TRAINER_FIELD_NUMBER: _ClassVar[int]
    NUM_PLAYING_FIELD_NUMBER: _ClassVar[int]
    IS_LEAVING_FIELD_NUMBER: _ClassVar[int]
    HOLD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    waits: _containers.RepeatedCompositeFieldContainer[_event_pb2.Wait]
    policy: _policy_service_pb2.PolicyStatus
    trainer: TrainerStatus
    num_playing: int
    is_leaving: bool
    hold_seconds: float
    gpus: _containers.RepeatedCompositeFieldContainer[GpuUse]
    def __init__(self, worker_id: _Optional[str] = ..., waits: _Optional[_Iterable[_Union[_event_pb2.Wait, _Mapping]]] = ..., policy: _Optional[_Union[_policy_service_pb2.PolicyStatus, _Mapping]] = ..., trainer: _Optional[_Union[TrainerStatus, _Mapping]] = ..., num_playing: _Optional[int] = ..., is_leaving: bool = ..., hold_seconds: _Optional[float] = ..., gpus: _Optional[_Iterable[_Union[GpuUse, _Mapping]]] = ...) -> None: ...

class Assignment(_message.Message):
    __slots__ = ("run_uid", "resolved_below", "log_instance", "damaged_policy", "num_damage_reports", "is_over", "device_turn")
    RUN_UID_FIELD_NUMBER: _ClassVar[int]
    RESOLVED_BELOW_FIELD_NUMBER: _ClassVar[int]
    LOG_INSTANCE_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_POLICY_FIELD_NUMBER: _ClassVar[int]
    NUM_DAMAGE_REPORTS_FIELD_NUMBER: _ClassVar[int]
    IS_OVER_FIELD_NUMBER: _ClassVar[int]
    DEVICE_TURN_FIELD_NUMBER: _ClassVar[int]
    run_uid: str
    resolved_below: int
    log_instance: str
    damaged_policy: _policy_pb2.PolicyEntry
    num_damage_reports: int
    is_over: bool
    device_turn: int
    def __init__(self, run_uid: _Optional[str] = ..., resolved_below: _Optional[int] = ..., log_instance: _Optional[str] = ..., damaged_policy: _Optional[_Union[_policy_pb2.PolicyEntry, _Mapping]] = ..., num_damage_reports: _Optional[int] = ..., is_over: bool = ..., device_turn: _Optional[int] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("register_again", "assignments", "let_go", "heartbeat_seconds")
    REGISTER_AGAIN_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENTS_FIELD_NUMBER: _ClassVar[int]
    LET_GO_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    register_again: bool
    assignments: _containers.RepeatedCompositeFieldContainer[Assignment]
    let_go: _containers.RepeatedScalarFieldContainer[str]
    heartbeat_seconds: float
    def __init__(self, register_again: bool = ..., assignments: _Optional[_Iterable[_Union[Assignment, _Mapping]]] = ..., let_go: _Optional[_Iterable[str]] = ..., heartbeat_seconds: _Optional[float] = ...) -> None: ...
