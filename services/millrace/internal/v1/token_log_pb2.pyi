from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TokenLogEntry(_message.Message):
    __slots__ = ("sample", "ordinal", "member", "attempt", "length", "minibatch")
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    ORDINAL_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    MINIBATCH_FIELD_NUMBER: _ClassVar[int]
    sample: int
    ordinal: int
    member: int
    attempt: int
    length: int
    minibatch: int
    def __init__(self, sample: _Optional[int] = ..., ordinal: _Optional[int] = ..., member: _Optional[int] = ..., attempt: _Optional[int] = ..., length: _Optional[int] = ..., minibatch: _Optional[int] = ...) -> None: ...

class TokenLog(_message.Message):
    __slots__ = ("run_uid", "step", "lineage", "chain_hash", "num_rollouts", "share", "entries", "mask", "logprobs", "entropies")
    RUN_UID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    CHAIN_HASH_FIELD_NUMBER: _ClassVar[int]
    NUM_ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    MASK_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ENTROPIES_FIELD_NUMBER: _ClassVar[int]
    run_uid: str
    step: int
    lineage: int
    chain_hash: bytes
    num_rollouts: int
    share: float
    entries: _containers.RepeatedCompositeFieldContainer[TokenLogEntry]
    mask: bytes
    logprobs: bytes
    entropies: bytes
    def __init__(self, run_uid: _Optional[str] = ..., step: _Optional[int] = ..., lineage: _Optional[int] = ..., chain_hash: _Optional[bytes] = ..., num_rollouts: _Optional[int] = ..., share: _Optional[float] = ..., entries: _Optional[_Iterable[_Union[TokenLogEntry, _Mapping]]] = ..., mask: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., entropies: _Optional[bytes] = ...) -> None: ...
