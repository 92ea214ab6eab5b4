from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class Rollout(_message.Message):
    __slots__ = ("name", "step", "ordinal", "member", "attempt", "env", "purpose", "status", "stop_condition", "drop_reason", "reward", "advantage", "num_tokens", "num_sampled_tokens", "num_turns", "min_version", "max_version", "is_truncated", "is_trained", "seconds", "prompt", "completion", "answer", "error")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ORDINAL_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ENV_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    STOP_CONDITION_FIELD_NUMBER: _ClassVar[int]
    DROP_REASON_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    ADVANTAGE_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_TURNS_FIELD_NUMBER: _ClassVar[int]
    MIN_VERSION_FIELD_NUMBER: _ClassVar[int]
    MAX_VERSION_FIELD_NUMBER: _ClassVar[int]
    IS_TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    IS_TRAINED_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    name: str
    step: int
    ordinal: int
    member: int
    attempt: int
    env: str
    purpose: str
    status: str
    stop_condition: str
    drop_reason: str
    reward: float
    advantage: float
    num_tokens: int
    num_sampled_tokens: int
    num_turns: int
    min_version: int
    max_version: int
    is_truncated: bool
    is_trained: bool
    seconds: float
    prompt: str
    completion: str
    answer: str
    error: str
    def __init__(self, name: _Optional[str] = ..., step: _Optional[int] = ..., ordinal: _Optional[int] = ..., member: _Optional[int] = ..., attempt: _Optional[int] = ..., env: _Optional[str] = ..., purpose: _Optional[str] = ..., status: _Optional[str] = ..., stop_condition: _Optional[str] = ..., drop_reason: _Optional[str] = ..., reward: _Optional[float] = ..., advantage: _Optional[float] = ..., num_tokens: _Optional[int] = ..., num_sampled_tokens: _Optional[int] = ..., num_turns: _Optional[int] = ..., min_version: _Optional[int] = ..., max_version: _Optional[int] = ..., is_truncated: bool = ..., is_trained: bool = ..., seconds: _Optional[float] = ..., prompt: _Optional[str] = ..., completion: _Optional[str] = ..., answer: _Optional[str] = ..., error: _Optional[str] = ...) -> None: ...

class UnreadableBatch(_message.Message):
    __slots__ = ("step", "problem")
    STEP_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    step: int
    problem: str
    def __init__(self, step: _Optional[int] = ..., problem: _Optional[str] = ...) -> None: ...
