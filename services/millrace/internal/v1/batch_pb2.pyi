from millrace.internal.v1 import rollout_pb2 as _rollout_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BatchKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BATCH_KIND_UNSPECIFIED: _ClassVar[BatchKind]
    BATCH_KIND_TRAIN: _ClassVar[BatchKind]
    BATCH_KIND_CLOSE: _ClassVar[BatchKind]

class OrdinalOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ORDINAL_OUTCOME_UNSPECIFIED: _ClassVar[OrdinalOutcome]
    ORDINAL_OUTCOME_TRAINED: _ClassVar[OrdinalOutcome]
    ORDINAL_OUTCOME_DROPPED: _ClassVar[OrdinalOutcome]

class RunOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RUN_OUTCOME_UNSPECIFIED: _ClassVar[RunOutcome]
    RUN_OUTCOME_SUCCEEDED: _ClassVar[RunOutcome]
    RUN_OUTCOME_FAILED: _ClassVar[RunOutcome]
    RUN_OUTCOME_CANCELLED: _ClassVar[RunOutcome]
BATCH_KIND_UNSPECIFIED: BatchKind
BATCH_KIND_TRAIN: BatchKind
BATCH_KIND_CLOSE: BatchKind
ORDINAL_OUTCOME_UNSPECIFIED: OrdinalOutcome
ORDINAL_OUTCOME_TRAINED: OrdinalOutcome
ORDINAL_OUTCOME_DROPPED: OrdinalOutcome
RUN_OUTCOME_UNSPECIFIED: RunOutcome
RUN_OUTCOME_SUCCEEDED: RunOutcome
RUN_OUTCOME_FAILED: RunOutcome
RUN_OUTCOME_CANCELLED: RunOutcome

class SampleEntry(_message.Message):
    __slots__ = ("chunk", "offset", "length", "ordinal", "member", "attempt", "env", "reward", "min_policy_version", "max_policy_version", "lineage", "temperature", "truncation", "reference_kl", "num_sampled_tokens", "mean_policy_version", "own_sampling")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    ORDINAL_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ENV_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    MIN_POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    MAX_POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TRUNCATION_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_KL_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MEAN_POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    OWN_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    chunk: int
    offset: int
    length: int
    ordinal: int
    member: int
    attempt: int
    env: int
    reward: float
    min_policy_version: int
    max_policy_version: int
    lineage: int
    temperature: float
    truncation: _rollout_pb2.Truncation
    reference_kl: float
    num_sampled_tokens: int
    mean_policy_version: float
    own_sampling: _containers.RepeatedCompositeFieldContainer[_rollout_pb2.OwnSampling]
    def __init__(self, chunk: _Optional[int] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ..., ordinal: _Optional[int] = ..., member: _Optional[int] = ..., attempt: _Optional[int] = ..., env: _Optional[int] = ..., reward: _Optional[float] = ..., min_policy_version: _Optional[int] = ..., max_policy_version: _Optional[int] = ..., lineage: _Optional[int] = ..., temperature: _Optional[float] = ..., truncation: _Optional[_Union[_rollout_pb2.Truncation, _Mapping]] = ..., reference_kl: _Optional[float] = ..., num_sampled_tokens: _Optional[int] = ..., mean_policy_version: _Optional[float] = ..., own_sampling: _Optional[_Iterable[_Union[_rollout_pb2.OwnSampling, _Mapping]]] = ...) -> None: ...

class ChunkRef(_message.Message):
    __slots__ = ("key", "sha256", "size_bytes", "num_tokens")
    KEY_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    key: str
    sha256: bytes
    size_bytes: int
    num_tokens: int
    def __init__(self, key: _Optional[str] = ..., sha256: _Optional[bytes] = ..., size_bytes: _Optional[int] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class Resolution(_message.Message):
    __slots__ = ("ordinal", "env", "task_id", "outcome", "reason", "attempts")
    ORDINAL_FIELD_NUMBER: _ClassVar[int]
    ENV_FIELD_NUMBER: _ClassVar[int]
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    ordinal: int
    env: str
    task_id: str
    outcome: OrdinalOutcome
    reason: str
    attempts: int
    def __init__(self, ordinal: _Optional[int] = ..., env: _Optional[str] = ..., task_id: _Optional[str] = ..., outcome: _Optional[_Union[OrdinalOutcome, str]] = ..., reason: _Optional[str] = ..., attempts: _Optional[int] = ...) -> None: ...

class ObjectRef(_message.Message):
    __slots__ = ("key", "sha256", "digest")
    KEY_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    key: str
    sha256: bytes
    digest: str
    def __init__(self, key: _Optional[str] = ..., sha256: _Optional[bytes] = ..., digest: _Optional[str] = ...) -> None: ...

class BatchHeader(_message.Message):
    __slots__ = ("run_uid", "kind", "step", "envs", "samples", "chunks", "resolutions", "resolved_below", "resolved_above", "previous_chain_hash", "writer_epoch", "lineage", "run_hash", "config_revision", "orchestrator_state", "rollouts_key", "rollouts_sha256", "num_rollouts", "num_tokens", "num_loss_tokens", "reward_mean", "outcome", "final_version", "error_reason", "error_message", "error_component", "objects", "revision", "error_remedy", "total_prompt_tokens", "total_sampled_tokens")
    RUN_UID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ENVS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    RESOLUTIONS_FIELD_NUMBER: _ClassVar[int]
    RESOLVED_BELOW_FIELD_NUMBER: _ClassVar[int]
    RESOLVED_ABOVE_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_CHAIN_HASH_FIELD_NUMBER: _ClassVar[int]
    WRITER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    RUN_HASH_FIELD_NUMBER: _ClassVar[int]
    CONFIG_REVISION_FIELD_NUMBER: _ClassVar[int]
    ORCHESTRATOR_STATE_FIELD_NUMBER: _ClassVar[int]
    ROLLOUTS_KEY_FIELD_NUMBER: _ClassVar[int]
    ROLLOUTS_SHA256_FIELD_NUMBER: _ClassVar[int]
    NUM_ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOSS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REWARD_MEAN_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    FINAL_VERSION_FIELD_NUMBER: _ClassVar[int]
    ERROR_REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ERROR_COMPONENT_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    ERROR_REMEDY_FIELD_NUMBER: _ClassVar[int]
    TOTAL_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SAMPLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    run_uid: str
    kind: BatchKind
    step: int
    envs: _containers.RepeatedScalarFieldContainer[str]
    samples: _containers.RepeatedCompositeFieldContainer[SampleEntry]
    chunks: _containers.RepeatedCompositeFieldContainer[ChunkRef]
    resolutions: _containers.RepeatedCompositeFieldContainer[Resolution]
    resolved_below: int
    resolved_above: _containers.RepeatedScalarFieldContainer[int]
    previous_chain_hash: bytes
    writer_epoch: int
    lineage: int
    run_hash: str
    config_revision: int
    orchestrator_state: bytes
    rollouts_key: str
    rollouts_sha256: bytes
    num_rollouts: int
    num_tokens: int
    num_loss_tokens: int
    reward_mean: float
    outcome: RunOutcome
    final_version: int
    error_reason: str
    error_message: str
    error_component: str
    objects: _containers.RepeatedCompositeFieldContainer[ObjectRef]
    revision: int
    error_remedy: str
    total_prompt_tokens: int
    total_sampled_tokens: int
    def __init__(self, run_uid: _Optional[str] = ..., kind: _Optional[_Union[BatchKind, str]] = ..., step: _Optional[int] = ..., envs: _Optional[_Iterable[str]] = ..., samples: _Optional[_Iterable[_Union[SampleEntry, _Mapping]]] = ..., chunks: _Optional[_Iterable[_Union[ChunkRef, _Mapping]]] = ..., resolutions: _Optional[_Iterable[_Union[Resolution, _Mapping]]] = ..., resolved_below: _Optional[int] = ..., resolved_above: _Optional[_Iterable[int]] = ..., previous_chain_hash: _Optional[bytes] = ..., writer_epoch: _Optional[int] = ..., lineage: _Optional[int] = ..., run_hash: _Optional[str] = ..., config_revision: _Optional[int] = ..., orchestrator_state: _Optional[bytes] = ..., rollouts_key: _Optional[str] = ..., rollouts_sha256: _Optional[bytes] = ..., num_rollouts: _Optional[int] = ..., num_tokens: _Optional[int] = ..., num_loss_tokens: _Optional[int] = ..., reward_mean: _Optional[float] = ..., outcome: _Optional[_Union[RunOutcome, str]] = ..., final_version: _Optional[int] = ..., error_reason: _Optional[str] = ..., error_message: _Optional[str] = ..., error_component: _Optional[str] = ..., objects: _Optional[_Iterable[_Union[ObjectRef, _Mapping]]] = ..., revision: _Optional[int] = ..., error_remedy: _Optional[str] = ..., total_prompt_tokens: _Optional[int] = ..., total_sampled_tokens: _Optional[int] = ...) -> None: ...

class BatchLink(_message.Message):
    __slots__ = ("run_uid", "kind", "step", "chunks", "previous_chain_hash", "rollouts_key", "outcome", "objects", "revision")
    RUN_UID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_CHAIN_HASH_FIELD_NUMBER: _ClassVar[int]
    ROLLOUTS_KEY_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    run_uid: str
    kind: BatchKind
    step: int
    chunks: _containers.RepeatedCompositeFieldContainer[ChunkRef]
    previous_chain_hash: bytes
    rollouts_key: str
    outcome: RunOutcome
    objects: _containers.RepeatedCompositeFieldContainer[ObjectRef]
    revision: int
    def __init__(self, run_uid: _Optional[str] = ..., kind: _Optional[_Union[BatchKind, str]] = ..., step: _Optional[int] = ..., chunks: _Optional[_Iterable[_Union[ChunkRef, _Mapping]]] = ..., previous_chain_hash: _Optional[bytes] = ..., rollouts_key: _Optional[str] = ..., outcome: _Optional[_Union[RunOutcome, str]] = ..., objects: _Optional[_Iterable[_Union[ObjectRef, _Mapping]]] = ..., revision: _Optional[int] = ...) -> None: ...

class BatchChunk(_message.Message):
    __slots__ = ("token_ids_low", "token_ids_high", "loss_mask", "inference_logprobs", "advantages", "rl_weights", "ce_weights", "routed_experts", "routed_tokens")
    TOKEN_IDS_LOW_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_HIGH_FIELD_NUMBER: _ClassVar[int]
    LOSS_MASK_FIELD_NUMBER: _ClassVar[int]
    INFERENCE_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ADVANTAGES_FIELD_NUMBER: _ClassVar[int]
    RL_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    CE_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    ROUTED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    ROUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    token_ids_low: bytes
    token_ids_high: bytes
    loss_mask: bytes
    inference_logprobs: bytes
    advantages: RunColumn
    rl_weights: RunColumn
    ce_weights: RunColumn
    routed_experts: _rollout_pb2.RoutedExperts
    routed_tokens: bytes
    def __init__(self, token_ids_low: _Optional[bytes] = ..., token_ids_high: _Optional[bytes] = ..., loss_mask: _Optional[bytes] = ..., inference_logprobs: _Optional[bytes] = ..., advantages: _Optional[_Union[RunColumn, _Mapping]] = ..., rl_weights: _Optional[_Union[RunColumn, _Mapping]] = ..., ce_weights: _Optional[_Union[RunColumn, _Mapping]] = ..., routed_experts: _Optional[_Union[_rollout_pb2.RoutedExperts, _Mapping]] = ..., routed_tokens: _Optional[bytes] = ...) -> None: ...

class RunColumn(_message.Message):
    __slots__ = ("values", "lengths")
    VALUES_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    values: bytes
    lengths: bytes
    def __init__(self, values: _Optional[bytes] = ..., lengths: _Optional[bytes] = ...) -> None: ...
