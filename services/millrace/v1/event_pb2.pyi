import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from millrace.v1 import run_pb2 as _run_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Event(_message.Message):
    __slots__ = ("cursor", "time", "writer", "writer_sequence", "state_changed", "step_completed", "eval_completed", "policy_published", "checkpoint_saved", "warning", "wait_reported", "score_completed", "batch_committed", "policy_served", "rollouts_failed", "token_log_stored", "training_resumed", "workers_assigned")
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    WRITER_FIELD_NUMBER: _ClassVar[int]
    WRITER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    STATE_CHANGED_FIELD_NUMBER: _ClassVar[int]
    STEP_COMPLETED_FIELD_NUMBER: _ClassVar[int]
    EVAL_COMPLETED_FIELD_NUMBER: _ClassVar[int]
    POLICY_PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_SAVED_FIELD_NUMBER: _ClassVar[int]
    WARNING_FIELD_NUMBER: _ClassVar[int]
    WAIT_REPORTED_FIELD_NUMBER: _ClassVar[int]
    SCORE_COMPLETED_FIELD_NUMBER: _ClassVar[int]
    BATCH_COMMITTED_FIELD_NUMBER: _ClassVar[int]
    POLICY_SERVED_FIELD_NUMBER: _ClassVar[int]
    ROLLOUTS_FAILED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_LOG_STORED_FIELD_NUMBER: _ClassVar[int]
    TRAINING_RESUMED_FIELD_NUMBER: _ClassVar[int]
    WORKERS_ASSIGNED_FIELD_NUMBER: _ClassVar[int]
    cursor: str
    time: _timestamp_pb2.Timestamp
    writer: str
    writer_sequence: int
    state_changed: StateChanged
    step_completed: StepCompleted
    eval_completed: EvalCompleted
    policy_published: PolicyPublished
    checkpoint_saved: CheckpointSaved
    warning: Warning
    wait_reported: WaitReported
    score_completed: ScoreCompleted
    batch_committed: BatchCommitted
    policy_served: PolicyServed
    rollouts_failed: RolloutsFailed
    token_log_stored: TokenLogStored
    training_resumed: TrainingResumed
    workers_assigned: WorkersAssigned
    def __init__(self, cursor: _Optional[str] = ..., time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., writer: _Optional[str] = ..., writer_sequence: _Optional[int] = ..., state_changed: _Optional[_Union[StateChanged, _Mapping]] = ..., step_completed: _Optional[_Union[StepCompleted, _Mapping]] = ..., eval_completed: _Optional[_Union[EvalCompleted, _Mapping]] = ..., policy_published: _Optional[_Union[PolicyPublished, _Mapping]] = ..., checkpoint_saved: _Optional[_Union[CheckpointSaved, _Mapping]] = ..., warning: _Optional[_Union[Warning, _Mapping]] = ..., wait_reported: _Optional[_Union[WaitReported, _Mapping]] = ..., score_completed: _Optional[_Union[ScoreCompleted, _Mapping]] = ..., batch_committed: _Optional[_Union[BatchCommitted, _Mapping]] = ..., policy_served: _Optional[_Union[PolicyServed, _Mapping]] = ..., rollouts_failed: _Optional[_Union[RolloutsFailed, _Mapping]] = ..., token_log_stored: _Optional[_Union[TokenLogStored, _Mapping]] = ..., training_resumed: _Optional[_Union[TrainingResumed, _Mapping]] = ..., workers_assigned: _Optional[_Union[WorkersAssigned, _Mapping]] = ...) -> None: ...

class StateChanged(_message.Message):
    __slots__ = ("old_state", "new_state", "reason", "error", "chain_hash")
    OLD_STATE_FIELD_NUMBER: _ClassVar[int]
    NEW_STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    CHAIN_HASH_FIELD_NUMBER: _ClassVar[int]
    old_state: _run_pb2.RunState
    new_state: _run_pb2.RunState
    reason: str
    error: _run_pb2.RunError
    chain_hash: str
    def __init__(self, old_state: _Optional[_Union[_run_pb2.RunState, str]] = ..., new_state: _Optional[_Union[_run_pb2.RunState, str]] = ..., reason: _Optional[str] = ..., error: _Optional[_Union[_run_pb2.RunError, _Mapping]] = ..., chain_hash: _Optional[str] = ...) -> None: ...

class WorkersAssigned(_message.Message):
    __slots__ = ("trainer_accelerators", "replica_accelerators")
    TRAINER_ACCELERATORS_FIELD_NUMBER: _ClassVar[int]
    REPLICA_ACCELERATORS_FIELD_NUMBER: _ClassVar[int]
    trainer_accelerators: int
    replica_accelerators: int
    def __init__(self, trainer_accelerators: _Optional[int] = ..., replica_accelerators: _Optional[int] = ...) -> None: ...

class StepCompleted(_message.Message):
    __slots__ = ("step", "reward_mean", "staleness_mean", "staleness_max", "num_tokens", "num_rollouts", "step_seconds", "wait_seconds", "metrics", "chain_hash")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    REWARD_MEAN_FIELD_NUMBER: _ClassVar[int]
    STALENESS_MEAN_FIELD_NUMBER: _ClassVar[int]
    STALENESS_MAX_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    CHAIN_HASH_FIELD_NUMBER: _ClassVar[int]
    step: int
    reward_mean: float
    staleness_mean: float
    staleness_max: int
    num_tokens: int
    num_rollouts: int
    step_seconds: float
    wait_seconds: float
    metrics: _containers.ScalarMap[str, float]
    chain_hash: str
    def __init__(self, step: _Optional[int] = ..., reward_mean: _Optional[float] = ..., staleness_mean: _Optional[float] = ..., staleness_max: _Optional[int] = ..., num_tokens: _Optional[int] = ..., num_rollouts: _Optional[int] = ..., step_seconds: _Optional[float] = ..., wait_seconds: _Optional[float] = ..., metrics: _Optional[_Mapping[str, float]] = ..., chain_hash: _Optional[str] = ...) -> None: ...

class EvalCompleted(_message.Message):
    __slots__ = ("env", "policy_version", "step", "reward_mean", "num_rollouts", "num_failed", "metrics", "seconds", "policy_version_max", "eval_id", "failed_tasks", "skipped")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    ENV_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    REWARD_MEAN_FIELD_NUMBER: _ClassVar[int]
    NUM_ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILED_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_MAX_FIELD_NUMBER: _ClassVar[int]
    EVAL_ID_FIELD_NUMBER: _ClassVar[int]
    FAILED_TASKS_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    env: str
    policy_version: int
    step: int
    reward_mean: float
    num_rollouts: int
    num_failed: int
    metrics: _containers.ScalarMap[str, float]
    seconds: float
    policy_version_max: int
    eval_id: str
    failed_tasks: _containers.RepeatedScalarFieldContainer[str]
    skipped: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, env: _Optional[str] = ..., policy_version: _Optional[int] = ..., step: _Optional[int] = ..., reward_mean: _Optional[float] = ..., num_rollouts: _Optional[int] = ..., num_failed: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ..., seconds: _Optional[float] = ..., policy_version_max: _Optional[int] = ..., eval_id: _Optional[str] = ..., failed_tasks: _Optional[_Iterable[str]] = ..., skipped: _Optional[_Iterable[int]] = ...) -> None: ...

class PolicyPublished(_message.Message):
    __slots__ = ("lineage", "version", "size_bytes", "seconds", "uri", "full_bytes", "codec", "changed_fraction", "digest", "manifest_sha256")
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    URI_FIELD_NUMBER: _ClassVar[int]
    FULL_BYTES_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FRACTION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_SHA256_FIELD_NUMBER: _ClassVar[int]
    lineage: int
    version: int
    size_bytes: int
    seconds: float
    uri: str
    full_bytes: int
    codec: str
    changed_fraction: float
    digest: str
    manifest_sha256: str
    def __init__(self, lineage: _Optional[int] = ..., version: _Optional[int] = ..., size_bytes: _Optional[int] = ..., seconds: _Optional[float] = ..., uri: _Optional[str] = ..., full_bytes: _Optional[int] = ..., codec: _Optional[str] = ..., changed_fraction: _Optional[float] = ..., digest: _Optional[str] = ..., manifest_sha256: _Optional[str] = ...) -> None: ...

class PolicyServed(_message.Message):
    __slots__ = ("replica", "lineage", "version", "pause_seconds", "proof", "fetched_bytes", "full_bytes", "update_seconds")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PAUSE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    FETCHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FULL_BYTES_FIELD_NUMBER: _ClassVar[int]
    UPDATE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    replica: str
    lineage: int
    version: int
    pause_seconds: float
    proof: str
    fetched_bytes: int
    full_bytes: int
    update_seconds: float
    def __init__(self, replica: _Optional[str] = ..., lineage: _Optional[int] = ..., version: _Optional[int] = ..., pause_seconds: _Optional[float] = ..., proof: _Optional[str] = ..., fetched_bytes: _Optional[int] = ..., full_bytes: _Optional[int] = ..., update_seconds: _Optional[float] = ...) -> None: ...

class CheckpointSaved(_message.Message):
    __slots__ = ("step", "uri", "size_bytes", "manifest_sha256")
    STEP_FIELD_NUMBER: _ClassVar[int]
    URI_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_SHA256_FIELD_NUMBER: _ClassVar[int]
    step: int
    uri: str
    size_bytes: int
    manifest_sha256: str
    def __init__(self, step: _Optional[int] = ..., uri: _Optional[str] = ..., size_bytes: _Optional[int] = ..., manifest_sha256: _Optional[str] = ...) -> None: ...

class TokenLogStored(_message.Message):
    __slots__ = ("step", "key", "sha256", "size_bytes")
    STEP_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    step: int
    key: str
    sha256: str
    size_bytes: int
    def __init__(self, step: _Optional[int] = ..., key: _Optional[str] = ..., sha256: _Optional[str] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class TrainingResumed(_message.Message):
    __slots__ = ("step", "start", "reason", "published", "epoch")
    STEP_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    step: int
    start: str
    reason: str
    published: int
    epoch: int
    def __init__(self, step: _Optional[int] = ..., start: _Optional[str] = ..., reason: _Optional[str] = ..., published: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class BatchCommitted(_message.Message):
    __slots__ = ("step", "num_trained", "dropped", "num_tokens", "chain_hash", "filtered", "num_easy_tasks", "num_normal_tasks", "num_hard_tasks", "metrics")
    class DroppedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class FilteredEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    NUM_TRAINED_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHAIN_HASH_FIELD_NUMBER: _ClassVar[int]
    FILTERED_FIELD_NUMBER: _ClassVar[int]
    NUM_EASY_TASKS_FIELD_NUMBER: _ClassVar[int]
    NUM_NORMAL_TASKS_FIELD_NUMBER: _ClassVar[int]
    NUM_HARD_TASKS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    step: int
    num_trained: int
    dropped: _containers.ScalarMap[str, int]
    num_tokens: int
    chain_hash: str
    filtered: _containers.ScalarMap[str, int]
    num_easy_tasks: int
    num_normal_tasks: int
    num_hard_tasks: int
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, step: _Optional[int] = ..., num_trained: _Optional[int] = ..., dropped: _Optional[_Mapping[str, int]] = ..., num_tokens: _Optional[int] = ..., chain_hash: _Optional[str] = ..., filtered: _Optional[_Mapping[str, int]] = ..., num_easy_tasks: _Optional[int] = ..., num_normal_tasks: _Optional[int] = ..., num_hard_tasks: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class RolloutsFailed(_message.Message):
    __slots__ = ("environment", "message")
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    environment: _run_pb2.EnvRollouts
    message: str
    def __init__(self, environment: _Optional[_Union[_run_pb2.EnvRollouts, _Mapping]] = ..., message: _Optional[str] = ...) -> None: ...

class Warning(_message.Message):
    __slots__ = ("reason", "message")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    reason: str
    message: str
    def __init__(self, reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class WaitReported(_message.Message):
    __slots__ = ("wait",)
    WAIT_FIELD_NUMBER: _ClassVar[int]
    wait: Wait
    def __init__(self, wait: _Optional[_Union[Wait, _Mapping]] = ...) -> None: ...

class ScoreCompleted(_message.Message):
    __slots__ = ("version", "num_tokens", "mismatch_kl", "max_abs_logprob_diff")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MISMATCH_KL_FIELD_NUMBER: _ClassVar[int]
    MAX_ABS_LOGPROB_DIFF_FIELD_NUMBER: _ClassVar[int]
    version: int
    num_tokens: int
    mismatch_kl: float
    max_abs_logprob_diff: float
    def __init__(self, version: _Optional[int] = ..., num_tokens: _Optional[int] = ..., mismatch_kl: _Optional[float] = ..., max_abs_logprob_diff: _Optional[float] = ...) -> None: ...

class Wait(_message.Message):
    __slots__ = ("owner", "reason", "waits_on", "age_seconds", "deadline_seconds", "run_uid", "refusal")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    WAITS_ON_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RUN_UID_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    owner: str
    reason: str
    waits_on: str
    age_seconds: float
    deadline_seconds: float
    run_uid: str
    refusal: _run_pb2.RunError
    def __init__(self, owner: _Optional[str] = ..., reason: _Optional[str] = ..., waits_on: _Optional[str] = ..., age_seconds: _Optional[float] = ..., deadline_seconds: _Optional[float] = ..., run_uid: _Optional[str] = ..., refusal: _Optional[_Union[_run_pb2.RunError, _Mapping]] = ...) -> None: ...
