"""Plain types of the data plane: what a rollout is, and what of it the trainer sees.

Columns are numpy arrays over the T tokens of a sample, prompts included; nothing here knows protobuf
(`wire.py` and `batch_wire.py` do) or torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Int32Array: TypeAlias = NDArray[np.int32]
Uint8Array: TypeAlias = NDArray[np.uint8]
Float32Array: TypeAlias = NDArray[np.float32]
RoutedArray: TypeAlias = NDArray[np.uint8 | np.uint16]
"""Experts of tokens, [tokens, layers, top_k]; see `routed_experts.py`."""

MAX_ERROR_MESSAGE_CHARS = 2000  # bound of `RolloutError.message`, stated in rollout.proto
MAX_ERROR_FRAMES_CHARS = 1000  # bound of `RolloutError.frames`, stated in rollout.proto
MAX_MESSAGES_JSON_BYTES = 64 * 1024  # bound of `Rollout.messages_json`, stated in rollout.proto
MAX_TASK_JSON_BYTES = 8 * 1024  # bound of `Rollout.task_json`, stated in rollout.proto
MAX_DEMONSTRATION_BYTES = 256 << 10  # bound of `Rollout.demonstration`, stated in rollout.proto
MAX_SAMPLING_JSON_CHARS = 64 << 10
MAX_AGENT_CHARS = 256
OWN_SAMPLING = "OwnSampling"
"""Type of the error of a rollout whose environment set what the trainer cannot compute: all of its others will, too."""
CUT_METRIC = "max_seq_len_cut_tokens"
"""Metric of a rollout: sampled tokens that its environment had cut off, by a `max_seq_len` of its own."""


class Purpose(StrEnum):
    """Why a rollout was played."""

    TRAIN = "train"
    EVAL = "eval"


class RolloutStatus(StrEnum):
    """How a rollout ended; only `OK` is ever trained on."""

    OK = "ok"
    ENV_ERROR = "env_error"
    MODEL_ERROR = "model_error"
    TIMEOUT = "timeout"
    PROMPT_TOO_LONG = "prompt_too_long"
    MISSING_TOKENS = "missing_tokens"
    CANCELLED = "cancelled"
    WORKER_DIED = "worker_died"
    QUARANTINED = "quarantined"
    ENGINE_LOST = "engine_lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySpan:
    """Tokens `[start, end)` of a sample came from policy (`lineage`, `version`)."""

    lineage: int
    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnReward:
    """What the environment gave for the turn whose sampled tokens end before `end`; part of the rollout's reward."""

    end: int
    reward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutError:
    """Why a rollout did not end OK: class name and message of the error."""

    type: str
    message: str
    frames: str = ""
    """Last frames of the environment's own code, one per line; "" if none is known."""
    is_infrastructure: bool = False
    """Not the environment's doing: an engine or a worker was lost, an engine answered 5xx, a store was away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """Which tokens may be sampled. Log-probs are those of what is left, renormalised.

    Of the tokens with at least `min_p` of the likeliest one's probability the `top_k` likeliest, and of these the
    smallest set with probability `top_p`. `top_p` 1, `top_k` 0 and `min_p` 0 are off.
    """

    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @property
    def is_full(self) -> bool:
        """Return whether every token may be sampled."""
        return self.top_p >= 1 and self.top_k == 0 and self.min_p == 0


FULL = Truncation()


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSampling:
    """How tokens `[start, end)` of a sample were sampled, by what their environment sent in place of the run's."""

    start: int
    end: int
    temperature: float
    truncation: Truncation = FULL


ROLES = ("system", "user", "assistant", "tool")
"""Roles of messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSpan:
    """Tokens `[start, end)` of a sample are of a message of `role` that the environment added after a reply."""

    role: str
    start: int
    end: int


def _equal_fields(left: object, right: object) -> bool:
    """Return whether two instances of one dataclass have equal fields; arrays are compared by dtype and content."""
    for item in fields(left):  # pyright: ignore[reportArgumentType] - both are dataclass instances
        a, b = getattr(left, item.name), getattr(right, item.name)
        if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
            if not (isinstance(a, np.ndarray) and isinstance(b, np.ndarray)):
                return False
            if a.dtype != b.dtype or not np.array_equal(a, b):
                return False
        elif a != b:
            return False
    return True


class _TokenColumns:
    """What a sequence of tokens is, whatever else is known of it: equal where all columns are, and not hashable."""

    __slots__ = ()
    token_ids: Int32Array
    loss_mask: Uint8Array

    def __eq__(self, other: object) -> bool:
        return _equal_fields(self, other) if type(self) is type(other) else NotImplemented

    __hash__ = None  # pyright: ignore[reportAssignmentType] - arrays are not hashable

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens, prompts included."""
        return len(self.token_ids)

    @property
    def num_loss_tokens(self) -> int:
        """Return the number of tokens that the policy sampled."""
        return int(np.count_nonzero(self.loss_mask))


@dataclass(frozen=True, slots=True, kw_only=True)
class Taught:
    """Which policy scored a sample as its own teacher, and what it read: `hint_ids`, then the sample from `skipped`."""

    lineage: int
    version: int
    hint_ids: tuple[int, ...]
    skipped: int = 0
    """Tokens of the sample that the hint has already: 1 where both begin with the beginning of a text, else 0."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample(_TokenColumns):
    """One token sequence for the loss, cut from a rollout. All columns have the length T.

    `token_ids` int32 [T]; `loss_mask` uint8 [T], 1 where the policy sampled the token; `inference_logprobs` float32 [T]
    under the behaviour policy, 0 where the mask is 0. `policy_spans` cover every sampled token, in order;
    `own_sampling` those that were sampled in another way than the rollout says.
    """

    token_ids: Int32Array
    loss_mask: Uint8Array
    inference_logprobs: Float32Array
    policy_spans: tuple[PolicySpan, ...] = ()
    own_sampling: tuple[OwnSampling, ...] = ()
    roles: tuple[RoleSpan, ...] = ()
    """Ranges after its first reply that the policy did not sample, where it is known whose message they are of."""
    turns: tuple[TurnReward, ...] = ()
    """Its model calls, in order, where the environment gave any turn of the rollout a reward of its own."""
    teacher_logprobs: Float32Array | None = None
    """float32 [T] of the teacher of a distillation, 0 where the mask is 0; kept beside the log (`token_logs.py`)."""
    routed_experts: RoutedArray | None = None
    """Experts of its first tokens, [tokens, layers, top_k]; None where the engine does not say."""
    taught: Taught | None = None
    """How the policy itself scored it as its teacher; None where another model did. Kept with `teacher_logprobs`."""

    @property
    def unrewarded_turns(self) -> tuple[TurnReward, ...]:
        """Return the sample's runs of sampled tokens, each as a turn with the reward 0."""
        # A run ends where the mask falls from 1 to 0; the appended 0 ends one at the last token.
        ends = np.flatnonzero(np.diff(self.loss_mask.astype(np.int8), append=0) == -1) + 1
        return tuple(TurnReward(end=int(end), reward=0.0) for end in ends)

    @property
    def min_version(self) -> int | None:
        """Return the oldest policy version among the sampled tokens; None when no span is known."""
        return min((span.version for span in self.policy_spans), default=None)

    @property
    def max_version(self) -> int | None:
        """Return the newest policy version among the sampled tokens; None when no span is known."""
        return max((span.version for span in self.policy_spans), default=None)

    def mean_version(self, num_tokens: int) -> float | None:
        """Return the mean policy version of the sampled tokens among the first `num_tokens` tokens of the sample.

        None if none of these was sampled, or their versions are not known.
        """
        sampled = self.loss_mask[:num_tokens]
        counts = [np.count_nonzero(sampled[span.start : span.end]) for span in self.policy_spans]
        if not sum(counts):
            return None
        return sum(span.version * n for span, n in zip(self.policy_spans, counts, strict=True)) / sum(counts)

    @property
    def lineage(self) -> int | None:
        """Return the lineage of the oldest policy version among the sampled tokens; None when no span is known."""
        oldest = min(self.policy_spans, key=lambda span: span.version, default=None)
        return None if oldest is None else oldest.lineage


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What one agent did in a rollout: its reward, and how many of the rollout's samples and turns are its own."""

    agent: str
    reward: float
    num_samples: int
    num_turns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One complete play of a task; the fields are those of `millrace.internal.v1.Rollout`."""

    run_uid: str
    purpose: Purpose
    ordinal: int
    member: int
    attempt: int
    group_size: int
    env: str
    task_index: int
    task_id: str
    status: RolloutStatus
    error: RolloutError | None = None
    samples: tuple[Sample, ...] = ()
    reward: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    stop_condition: str = ""
    is_truncated: bool = False
    num_turns: int = 0
    seconds: float = 0.0
    model_seconds: float = 0.0
    temperature: float = 1.0
    env_server: str = ""
    planned_step: int = 0
    eval_id: str = ""
    messages_json: str = ""
    task_json: str = ""
    """What the task is scored with, as a JSON object: its `answer` and small `info`."""
    truncation: Truncation = FULL
    sampling_json: str = ""
    """Every sampling parameter that the run asks for, and what the environment sent in place of them."""
    dispatched_after: str = ""
    """Newest entry of the rollout stream that the orchestrator had read when it asked for this play."""
    entry_id: str = ""
    """In the archive only: id of its entry in the rollout stream."""
    is_duplicate: bool = False
    """In the archive only: its member was there already, so it was discarded."""
    traces: tuple[Trace, ...] = ()
    """What each of several trained agents did, their samples in this order; empty where one agent did everything."""
    demonstration: str = ""
    """What only the teacher of opsd learns of the task; empty for other algorithms."""

    @property
    def agent_traces(self) -> tuple[Trace, ...]:
        """Return the rollout's traces; where one agent did everything, a single one without a name."""
        return self.traces or (Trace(agent="", reward=self.reward, num_samples=len(self.samples)),)

    def penalised(self, penalty: float, *, has_turns: bool = False) -> "Rollout":
        """Return a copy with `penalty` taken off the reward, off that of every trace, and off that of the last turn.

        Only a rollout with turn rewards has such a turn. `has_turns` says that some rollout of the group has turn
        rewards: then one without any gets them first, 0 for each of its turns.
        """
        traces = tuple(replace(trace, reward=trace.reward - penalty) for trace in self.traces)
        samples = list(self.samples)
        if has_turns and not self.has_turn_rewards:
            samples = [replace(sample, turns=sample.unrewarded_turns) for sample in samples]
        # Off the last turn as well: the rewards of the turns have to go on adding up to the rollout's (`earned_turns`).
        at = max((index for index, sample in enumerate(samples) if sample.turns), default=None)
        if at is not None:
            last = samples[at].turns[-1]
            lower = replace(last, reward=last.reward - penalty)
            samples[at] = replace(samples[at], turns=(*samples[at].turns[:-1], lower))
        return replace(self, reward=self.reward - penalty, traces=traces, samples=tuple(samples))

    @property
    def trace_of_sample(self) -> list[int]:
        """Return for each sample, in order, the index of the trace in `agent_traces` that it belongs to."""
        return [index for index, trace in enumerate(self.agent_traces) for _ in range(trace.num_samples)]

    @property
    def has_turn_rewards(self) -> bool:
        """Return whether the environment gave any of its turns a reward of its own."""
        return any(sample.turns for sample in self.samples)

    @property
    def earned_turns(self) -> tuple[tuple[TurnReward, ...], ...] | None:
        """Return, for each sample, its turns with their rewards; None if these do not sum to the rollout's reward.

        In a sample without turn rewards each run of sampled tokens is a turn with the reward 0.
        """
        turns = tuple(sample.turns or sample.unrewarded_turns for sample in self.samples)
        return turns if add_up([turn.reward for own in turns for turn in own], self.reward) else None

    @property
    def rewritten_turn(self) -> int | None:
        """Return the first turn, from 1, whose prompt did not begin with all tokens before it; None if there is none.

        Such a turn begins a further sample of the same trace. Turns are counted within the trace.
        """
        owners = self.trace_of_sample
        # A trace goes on in a second sample only where a prompt did not continue the first.
        first = next((at for at in range(1, len(owners)) if owners[at] == owners[at - 1]), None)
        if first is None:
            return None
        # Each run of sampled tokens is one reply, so their number is that of turns before the new sample.
        starts = np.diff(self.samples[first - 1].loss_mask.astype(np.int8), prepend=0) == 1
        return int(np.count_nonzero(starts)) + 1

    @property
    def is_environment_failure(self) -> bool:
        """Return whether the rollout failed because of its environment, not of engines, workers, stores or restarts."""
        is_blameless = self.status in (RolloutStatus.OK, RolloutStatus.CANCELLED, RolloutStatus.ENGINE_LOST)
        return not is_blameless and not (self.error is not None and self.error.is_infrastructure)

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of all samples, prompts included."""
        return sum(sample.num_tokens for sample in self.samples)

    @property
    def num_loss_tokens(self) -> int:
        """Return the number of sampled tokens of all samples."""
        return sum(sample.num_loss_tokens for sample in self.samples)

    @property
    def min_version(self) -> int | None:
        """Return the oldest policy version among all sampled tokens.

        None when nothing was sampled or no version is known.
        """
        return min((v for s in self.samples if (v := s.min_version) is not None), default=None)

    @property
    def max_version(self) -> int | None:
        """Return the newest policy version among all sampled tokens.

        None when nothing was sampled or no version is known.
        """
        return max((v for s in self.samples if (v := s.max_version) is not None), default=None)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainSample(_TokenColumns):
    """A sample with its per-token advantages and the facts of its rollout: one row of a batch.

    `rl_weights` None means 1 where the mask is 1; `ce_weights` None means 0 everywhere (float32 [T] otherwise).
    `reference_kl` is not 0 where the advantages are that times the log-ratio of a reference to the behaviour policy.
    `mean_version` is over the sampled tokens, None where it is not known. `own_sampling` are ranges of tokens that were
    sampled in another way than `temperature` and `truncation` say. `routed_experts` are those of its first tokens,
    [tokens, layers, top_k], None where the engine does not say.
    """

    token_ids: Int32Array
    loss_mask: Uint8Array
    inference_logprobs: Float32Array
    advantages: Float32Array
    ordinal: int
    member: int
    attempt: int
    env: str
    reward: float
    temperature: float
    min_version: int
    max_version: int
    lineage: int
    rl_weights: Float32Array | None = None
    ce_weights: Float32Array | None = None
    truncation: Truncation = FULL
    own_sampling: tuple[OwnSampling, ...] = ()
    reference_kl: float = 0.0
    mean_version: float | None = None
    routed_experts: RoutedArray | None = None


# What numbers rewards may be, when two of them are the same, and when one reaches a threshold.
#
# Rewards are sums of weighted parts in float64, so equal ones may differ by rounding: 0.7 + 0.2 + 0.1 is not 1. Every
# place that asks whether rewards are equal, or reach a bound, asks here.

MAX_REWARD = 1e15
"""Largest magnitude of a reward that is trained on: its square, and sums of it, are still numbers in float32."""
EQUALITY = 1e-12
"""Rewards are equal if they differ by at most this times the largest magnitude among them: some thousand roundings of a
float64. A difference that means something is larger, also where all rewards have a large part in common."""
_TOLERANCE = 1e-6
"""Relative to the threshold, and at least so much: beyond float32's rounding, below every difference that is meant."""


def are_equal(rewards: Sequence[float] | np.ndarray) -> bool:
    """Return whether all rewards of a group are the same but for rounding, relative to the largest; True for none."""
    values = np.asarray(rewards, dtype=np.float64)
    return not values.size or bool(np.ptp(values) <= EQUALITY * np.abs(values).max())


def reaches(reward: float, threshold: float) -> bool:
    """Return whether a reward is at least a threshold, but for rounding: a millionth of it, or 1e-6, is forgiven."""
    return reward >= threshold - _TOLERANCE * max(1.0, abs(threshold))


def add_up(parts: Sequence[float], total: float) -> bool:
    """Return whether `parts` sum to `total` but for rounding, that of float32 included.

    The tolerance is a millionth of the largest magnitude among parts and total.
    """
    scale = max([abs(total), *(abs(part) for part in parts)])
    return abs(sum(parts) - total) <= _TOLERANCE * scale
