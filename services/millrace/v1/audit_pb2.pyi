from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AuditReport(_message.Message):
    __slots__ = ("run", "run_uid", "is_closed", "num_steps", "first_step", "chain_hash", "num_trained", "dropped", "num_open", "num_duplicates", "num_rollouts", "num_policies", "num_lineages", "num_events", "num_writers", "num_generations", "epochs", "violations", "notes", "not_seen", "is_deep", "num_checkpoints", "num_bytes_verified", "num_attestations", "replayed_steps", "seal_sha256")
    class DroppedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class EpochsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    RUN_FIELD_NUMBER: _ClassVar[int]
    RUN_UID_FIELD_NUMBER: _ClassVar[int]
    IS_CLOSED_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEP_FIELD_NUMBER: _ClassVar[int]
    CHAIN_HASH_FIELD_NUMBER: _ClassVar[int]
    NUM_TRAINED_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    NUM_OPEN_FIELD_NUMBER: _ClassVar[int]
    NUM_DUPLICATES_FIELD_NUMBER: _ClassVar[int]
    NUM_ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    NUM_POLICIES_FIELD_NUMBER: _ClassVar[int]
    NUM_LINEAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_EVENTS_FIELD_NUMBER: _ClassVar[int]
    NUM_WRITERS_FIELD_NUMBER: _ClassVar[int]
    NUM_GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    VIOLATIONS_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    NOT_SEEN_FIELD_NUMBER: _ClassVar[int]
    IS_DEEP_FIELD_NUMBER: _ClassVar[int]
    NUM_CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_VERIFIED_FIELD_NUMBER: _ClassVar[int]
    NUM_ATTESTATIONS_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_STEPS_FIELD_NUMBER: _ClassVar[int]
    SEAL_SHA256_FIELD_NUMBER: _ClassVar[int]
    run: str
    run_uid: str
    is_closed: bool
    num_steps: int
    first_step: int
    chain_hash: str
    num_trained: int
    dropped: _containers.ScalarMap[str, int]
    num_open: int
    num_duplicates: int
    num_rollouts: int
    num_policies: int
    num_lineages: int
    num_events: int
    num_writers: int
    num_generations: int
    epochs: _containers.ScalarMap[str, int]
    violations: _containers.RepeatedCompositeFieldContainer[AuditFinding]
    notes: _containers.RepeatedCompositeFieldContainer[AuditFinding]
    not_seen: _containers.RepeatedCompositeFieldContainer[AuditFinding]
    is_deep: bool
    num_checkpoints: int
    num_bytes_verified: int
    num_attestations: int
    replayed_steps: _containers.RepeatedScalarFieldContainer[int]
    seal_sha256: str
    def __init__(self, run: _Optional[str] = ..., run_uid: _Optional[str] = ..., is_closed: bool = ..., num_steps: _Optional[int] = ..., first_step: _Optional[int] = ..., chain_hash: _Optional[str] = ..., num_trained: _Optional[int] = ..., dropped: _Optional[_Mapping[str, int]] = ..., num_open: _Optional[int] = ..., num_duplicates: _Optional[int] = ..., num_rollouts: _Optional[int] = ..., num_policies: _Optional[int] = ..., num_lineages: _Optional[int] = ..., num_events: _Optional[int] = ..., num_writers: _Optional[int] = ..., num_generations: _Optional[int] = ..., epochs: _Optional[_Mapping[str, int]] = ..., violations: _Optional[_Iterable[_Union[AuditFinding, _Mapping]]] = ..., notes: _Optional[_Iterable[_Union[AuditFinding, _Mapping]]] = ..., not_seen: _Optional[_Iterable[_Union[AuditFinding, _Mapping]]] = ..., is_deep: bool = ..., num_checkpoints: _Optional[int] = ..., num_bytes_verified: _Optional[int] = ..., num_attestations: _Optional[int] = ..., replayed_steps: _Optional[_Iterable[int]] = ..., seal_sha256: _Optional[str] = ...) -> None: ...

class AuditFinding(_message.Message):
    __slots__ = ("check", "message")
    CHECK_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    check: str
    message: str
    def __init__(self, check: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...
