from millrace.internal.v1 import policy_pb2 as _policy_pb2
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class InflightMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    INFLIGHT_MODE_UNSPECIFIED: _ClassVar[InflightMode]
    INFLIGHT_MODE_KEEP: _ClassVar[InflightMode]
    INFLIGHT_MODE_RECOMPUTE: _ClassVar[InflightMode]

class PolicyState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    POLICY_STATE_UNSPECIFIED: _ClassVar[PolicyState]
    POLICY_STATE_EMPTY: _ClassVar[PolicyState]
    POLICY_STATE_FETCHING: _ClassVar[PolicyState]
    POLICY_STATE_APPLYING: _ClassVar[PolicyState]
    POLICY_STATE_SERVING: _ClassVar[PolicyState]
    POLICY_STATE_UPDATE_FAILED: _ClassVar[PolicyState]
    POLICY_STATE_BROKEN: _ClassVar[PolicyState]
INFLIGHT_MODE_UNSPECIFIED: InflightMode
INFLIGHT_MODE_KEEP: InflightMode
INFLIGHT_MODE_RECOMPUTE: InflightMode
POLICY_STATE_UNSPECIFIED: PolicyState
POLICY_STATE_EMPTY: PolicyState
POLICY_STATE_FETCHING: PolicyState
POLICY_STATE_APPLYING: PolicyState
POLICY_STATE_SERVING: PolicyState
POLICY_STATE_UPDATE_FAILED: PolicyState
POLICY_STATE_BROKEN: PolicyState

class PolicyStatus(_message.Message):
    __slots__ = ("run_uid", "state", "has_version", "lineage", "version", "digest", "proof", "error", "pause_seconds", "update_seconds", "num_requests", "model_name", "max_num_seqs", "max_model_len", "fetched_bytes", "full_bytes", "engine", "is_damaged", "is_asleep", "routed")
    RUN_UID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    HAS_VERSION_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PAUSE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    UPDATE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    FETCHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FULL_BYTES_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    IS_DAMAGED_FIELD_NUMBER: _ClassVar[int]
    IS_ASLEEP_FIELD_NUMBER: _ClassVar[int]
    ROUTED_FIELD_NUMBER: _ClassVar[int]
    run_uid: str
    state: PolicyState
    has_version: bool
    lineage: int
    version: int
    digest: str
    proof: str
    error: str
    pause_seconds: float
    update_seconds: float
    num_requests: int
    model_name: str
    max_num_seqs: int
    max_model_len: int
    fetched_bytes: int
    full_bytes: int
    engine: str
    is_damaged: bool
    is_asleep: bool
    routed: RoutedForm
    def __init__(self, run_uid: _Optional[str] = ..., state: _Optional[_Union[PolicyState, str]] = ..., has_version: bool = ..., lineage: _Optional[int] = ..., version: _Optional[int] = ..., digest: _Optional[str] = ..., proof: _Optional[str] = ..., error: _Optional[str] = ..., pause_seconds: _Optional[float] = ..., update_seconds: _Optional[float] = ..., num_requests: _Optional[int] = ..., model_name: _Optional[str] = ..., max_num_seqs: _Optional[int] = ..., max_model_len: _Optional[int] = ..., fetched_bytes: _Optional[int] = ..., full_bytes: _Optional[int] = ..., engine: _Optional[str] = ..., is_damaged: bool = ..., is_asleep: bool = ..., routed: _Optional[_Union[RoutedForm, _Mapping]] = ...) -> None: ...

class RoutedForm(_message.Message):
    __slots__ = ("num_layers", "num_experts", "top_k")
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    num_layers: int
    num_experts: int
    top_k: int
    def __init__(self, num_layers: _Optional[int] = ..., num_experts: _Optional[int] = ..., top_k: _Optional[int] = ...) -> None: ...

class UpdatePolicyRequest(_message.Message):
    __slots__ = ("run_uid", "policy", "inflight_mode", "epoch", "wait_seconds")
    RUN_UID_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    INFLIGHT_MODE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    run_uid: str
    policy: _policy_pb2.PolicyEntry
    inflight_mode: InflightMode
    epoch: int
    wait_seconds: float
    def __init__(self, run_uid: _Optional[str] = ..., policy: _Optional[_Union[_policy_pb2.PolicyEntry, _Mapping]] = ..., inflight_mode: _Optional[_Union[InflightMode, str]] = ..., epoch: _Optional[int] = ..., wait_seconds: _Optional[float] = ...) -> None: ...

class UpdatePolicyResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: PolicyStatus
    def __init__(self, status: _Optional[_Union[PolicyStatus, _Mapping]] = ...) -> None: ...

class GetPolicyStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetPolicyStatusResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: PolicyStatus
    def __init__(self, status: _Optional[_Union[PolicyStatus, _Mapping]] = ...) -> None: ...

class PauseGenerationRequest(_message.Message):
    __slots__ = ("run_uid", "frees_memory", "epoch")
    RUN_UID_FIELD_NUMBER: _ClassVar[int]
    FREES_MEMORY_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    run_uid: str
    frees_memory: bool
    epoch: int
    def __init__(self, run_uid: _Optional[str] = ..., frees_memory: bool = ..., epoch: _Optional[int] = ...) -> None: ...

class PauseGenerationResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: PolicyStatus
    def __init__(self, status: _Optional[_Union[PolicyStatus, _Mapping]] = ...) -> None: ...

class ResumeGenerationRequest(_message.Message):
    __slots__ = ("run_uid", "takes_memory", "epoch")
    RUN_UID_FIELD_NUMBER: _ClassVar[int]
    TAKES_MEMORY_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    run_uid: str
    takes_memory: bool
    epoch: int
    def __init__(self, run_uid: _Optional[str] = ..., takes_memory: bool = ..., epoch: _Optional[int] = ...) -> None: ...

class ResumeGenerationResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: PolicyStatus
    def __init__(self, status: _Optional[_Union[PolicyStatus, _Mapping]] = ...) -> None: ...
