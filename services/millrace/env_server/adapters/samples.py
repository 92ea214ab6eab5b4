"""Turns → samples: the exact tokens that the policy saw and sampled, never a second tokenization.

A turn is one model call: the prompt's token ids, the sampled ids, their log-probs and which policy versions produced
them. Consecutive turns become ONE sample if the next prompt begins with everything before it, prompt and sampled
tokens alike. If it does not (the chat template dropped or rewrote something, or a reply did not survive decoding and
encoding), the turn begins a new sample: nothing is trained in a context in which it was not sampled.
"""

import hashlib
import itertools
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.env_server.own_sampling import Way
from millrace.rollouts.routed_experts import RoutedCall, extended
from millrace.rollouts.types import ROLES, OwnSampling, PolicySpan, RoleSpan, RoutedArray, Sample, TurnReward

# Engines write minus infinity as this value, because JSON has no infinity: nobody samples such a token.
_NO_EVIDENCE = -9999.0
# A log-prob is at most 0; rounding in half precision may lift it by that much.
_MAX_LOGPROB = 1e-2


class MissingTokensError(Exception):
    """A model call came back without exact tokens or log-probs."""

    error_type = "MissingTokens"


class MissingSpansError(MissingTokensError):
    """A model call came back without the policy versions that produced its tokens."""

    error_type = "MissingPolicySpans"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One model call. `spans` are indices into `completion_ids`."""

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    logprobs: Sequence[float]
    spans: Sequence[PolicySpan]
    own_way: Way | None = None
    """How it was sampled, where that is not how the run asks for it."""
    reward: float | None = None
    """What the environment gave for this turn by itself, if it gave anything."""
    routed: RoutedCall | None = None
    """Experts that the engine computed its tokens with; None where it does not say."""
    asked_by: str = ""
    """Role of all messages after the last reply in the prompt; empty where they are of several, or not known."""


def engine_spans(choice: Mapping[str, Any]) -> tuple[PolicySpan, ...]:
    """Return which policy version made which tokens of a choice, as the engine's answer reports it; () if it cannot be
    read.

    Millrace's servers answer `policy_spans`; vLLM's own routes answer `weight_versions`, whose `version` is the text
    `<lineage>-<version>` that Millrace set. If both can be read, `policy_spans` are returned.
    """
    return parse_spans(choice.get("policy_spans")) or parse_spans(choice.get("weight_versions"))


def parse_spans(raw: Any) -> tuple[PolicySpan, ...]:
    """Return the policy spans of a JSON list of either form; () if it is no list or one of them is malformed."""
    if not isinstance(raw, Sequence) or isinstance(raw, str | bytes):
        return ()
    spans: list[PolicySpan] = []
    for item in raw:
        try:
            spans.append(_parse_span(item))
        except (KeyError, TypeError, ValueError):
            return ()
    return tuple(spans)


def _parse_span(item: Mapping[str, Any]) -> PolicySpan:
    """Return one policy span of a JSON object: with `lineage` and `version`, or with `version` as
    `<lineage>-<version>`.

    Raises KeyError, TypeError or ValueError if it is malformed.
    """
    version = item["version"]  # a TypeError if the item is no table
    lineage = item.get("lineage")
    if lineage is None:
        lineage, separator, version = str(version).partition("-")
        if not separator:
            raise ValueError(f"{item['version']!r} is not LINEAGE-VERSION")
    numbers = [int(lineage), int(version), int(item["start"]), int(item["end"])]
    if min(numbers) < 0:
        raise ValueError("a span has no negative numbers")
    return PolicySpan(lineage=numbers[0], version=numbers[1], start=numbers[2], end=numbers[3])


def check_turn(turn: Turn, *, index: int, requires_spans: bool) -> None:
    """Raise MissingTokensError unless the turn has token ids of prompt and completion, and a finite log-prob for each
    sampled token.

    With `requires_spans` raise MissingSpansError unless policy spans cover all sampled tokens. `index` is the model
    call's number, for messages.
    """
    where = f"model call {index}"
    num_tokens = len(turn.completion_ids)
    if not turn.prompt_ids or not num_tokens:
        raise MissingTokensError(
            f"{where} has {len(turn.prompt_ids)} prompt and {num_tokens} sampled token ids; "
            "the engine must return prompt_token_ids and token_ids (`return_token_ids`)"
        )
    if len(turn.logprobs) != num_tokens:
        raise MissingTokensError(f"{where} has {num_tokens} sampled tokens but {len(turn.logprobs)} log-probs")
    for value in turn.logprobs:
        if not math.isfinite(value) or not _NO_EVIDENCE < value <= _MAX_LOGPROB:
            raise MissingTokensError(f"{where} has a log-prob of {value}, which is not a finite number of at most 0")
    if not requires_spans:
        return
    at = 0
    for span in turn.spans:
        # Spans must follow each other without a gap: a token without a version cannot be trained on.
        if span.start != at or span.end <= span.start:
            break
        at = span.end
    if at != num_tokens:
        raise MissingSpansError(
            f"{where}: the engine's policy_spans (vLLM: weight_versions) cover tokens 0 to {at} of {num_tokens}; only "
            "what the engine says about every sampled token is trained on, so serve the policy with Millrace's "
            "inference service, or with vLLM and its plugin"
        )


def merge_turns(turns: Sequence[Turn], *, requires_spans: bool, is_agent: bool = False) -> tuple[Sample, ...]:
    """Merge the turns of one rollout, in order, into its samples: a turn whose prompt begins with all tokens of a
    sample extends it, any other begins a new one.

    Without `is_agent` only the last sample can be extended; an agent may have several conversations at the same time,
    so its turn extends the newest sample that fits. With `requires_spans` every sampled token must have a policy
    version. Raises MissingTokensError, also for no turns.
    """
    if not turns:
        raise MissingTokensError("the rollout made no model call")
    has_rewards = any(turn.reward is not None for turn in turns)
    builders: list[_SampleBuilder] = []
    for index, turn in enumerate(turns):
        check_turn(turn, index=index, requires_spans=requires_spans)
        # An agent may ask in several conversations by turns, so any of its samples may go on, the latest first.
        extended = reversed(builders if is_agent else builders[-1:])
        builder = next((each for each in extended if each.is_extended_by(turn.prompt_ids)), None)
        if builder is None:
            builder = _SampleBuilder()
            builders.append(builder)
        builder.add(turn)
        if has_rewards:
            earned = 0.0 if turn.reward is None else turn.reward
            builder.turns.append(TurnReward(end=len(builder.token_ids), reward=earned))
    return tuple(builder.build() for builder in builders)


class OwnRanges:
    """Collects ranges of a sample that were not sampled as the run asks.

    Neighbouring turns of the same way are one range.
    """

    def __init__(self) -> None:
        self._found: list[OwnSampling] = []
        self._last: Way | None = None

    def add(self, start: int, end: int, way: Way | None) -> None:
        """Add a turn's sampled tokens `[start, end)` of the sample, which were sampled in the way `way`.

        None is the way that the run asks for: such tokens get no range. A turn that follows one of the same way extends
        its range.
        """
        if way is not None and way == self._last:
            self._found[-1] = replace(self._found[-1], end=end)
        elif way is not None:
            self._found.append(OwnSampling(start=start, end=end, temperature=way[0], truncation=way[1]))
        self._last = way

    @property
    def ranges(self) -> tuple[OwnSampling, ...]:
        """Return the collected ranges of tokens that were not sampled as the run asks, in order."""
        return tuple(self._found)


def spans_of_roles(found: Sequence[str], *, start: int) -> list[RoleSpan]:
    """Return ranges of neighbouring tokens with the same role.

    `found` has one role for each token, the first of which has the index `start` in the sample. Tokens whose role is ""
    get no range.
    """
    spans: list[RoleSpan] = []
    at = start
    for role, same in itertools.groupby(found):
        end = at + len(list(same))
        if role:
            spans.append(RoleSpan(role=role, start=at, end=end))
        at = end
    return spans


class _SampleBuilder:
    """A sample that grows turn by turn."""

    def __init__(self) -> None:
        """Begin a sample without tokens."""
        self.token_ids: list[int] = []
        self.loss_mask: list[int] = []
        self.logprobs: list[float] = []
        self.spans: list[PolicySpan] = []
        self.turns: list[TurnReward] = []
        self.roles: list[RoleSpan] = []
        self.own = OwnRanges()
        self.experts: RoutedArray | None = None

    def is_extended_by(self, prompt_ids: Sequence[int]) -> bool:
        """Return whether the prompt begins with all tokens of this sample."""
        # Tokens are compared, not texts: the same text may have been encoded otherwise the second time.
        return list(prompt_ids[: len(self.token_ids)]) == self.token_ids

    def add(self, turn: Turn) -> None:
        """Append to the sample the tokens that the turn's prompt adds, which are not trained, then its sampled tokens,
        which are.

        The prompt must begin with the sample's tokens. Policy spans are shifted to the sample's indices.
        """
        added = list(turn.prompt_ids[len(self.token_ids) :])
        # The first prompt has messages of many roles, and which tokens are whose is not known.
        if self.token_ids and turn.asked_by in ROLES:
            self.roles += spans_of_roles([turn.asked_by] * len(added), start=len(self.token_ids))
        self._extend(added, [0] * len(added), [0.0] * len(added))
        start = len(self.token_ids)
        self._extend(turn.completion_ids, [1] * len(turn.completion_ids), turn.logprobs)
        for span in turn.spans:
            self.spans.append(
                PolicySpan(lineage=span.lineage, version=span.version, start=start + span.start, end=start + span.end)
            )
        self.own.add(start, len(self.token_ids), turn.own_way)
        self.experts = extended(self.experts, turn.routed)

    def _extend(self, token_ids: Sequence[int], mask: Sequence[int], logprobs: Sequence[float]) -> None:
        """Append tokens with their loss mask and log-probs, all of one length."""
        self.token_ids.extend(token_ids)
        self.loss_mask.extend(mask)
        self.logprobs.extend(logprobs)

    def build(self) -> Sample:
        """Return the sample of all turns added so far, its columns as arrays."""
        return Sample(
            # Each of the three columns is [T], with an entry for every token of the sample.
            token_ids=np.asarray(self.token_ids, dtype=np.int32),
            loss_mask=np.asarray(self.loss_mask, dtype=np.uint8),
            inference_logprobs=np.asarray(self.logprobs, dtype=np.float32),
            policy_spans=tuple(self.spans),
            turns=tuple(self.turns),
            roles=tuple(self.roles),
            own_sampling=self.own.ranges,
            routed_experts=self.experts,
        )


# The parameters of each model call, the policy versions that answered it and the experts of its tokens; records of
# `verifiers` cannot have them.
#
# The engine returns `policy_spans` and `routed_experts` in the body of a completion. Neither generation of `verifiers`
# carries unknown fields of a response into its records, so the HTTP layer notes them here under the rollout's id (v0:
# `trajectory_id`, v1: the trace id, which its clients send as `X-Session-ID`), and the adapter takes them when the
# rollout is over. A call is found again by its token ids, those of prompt and completion, and calls that are equal in
# their order. The sampling parameters of its request are noted with it.

# Rollouts that failed half-way never take their notes; the oldest ones are forgotten beyond this number. It is far
# above the rollouts that one worker plays at once.
MAX_ROLLOUTS = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A model call: the tokens that came of it, the versions that made them, and the request's parameters.

    `routed` are the experts of its tokens, if the engine records them. `prompt` is the digest of its prompt
    (`digest_of`).
    """

    completion_ids: tuple[int, ...] = ()
    prompt: bytes = b""
    spans: tuple[PolicySpan, ...] = ()
    sent: Mapping[str, Any] | None = None
    routed: RoutedCall | None = None

    def routed_of(self, num_tokens: int) -> RoutedCall | None:
        """Return the experts of the call for a turn that keeps its first `num_tokens` tokens, of prompt and completion.

        None if the engine recorded none. The last token that is kept has experts only if more of the completion
        followed it.
        """
        routed = self.routed
        if routed is None:
            return None
        return replace(routed, experts=routed.experts[: max(num_tokens - routed.start, 0)])


NO_CALL = Call()


def digest_of(token_ids: Sequence[int] | NDArray[np.int64]) -> bytes:
    """Return the digest that tells token ids from others of the same number.

    What does not fit into 64 bits is no token of a policy, and has the digest b"".
    """
    try:
        return hashlib.blake2b(np.asarray(token_ids, np.int64).tobytes(), digest_size=16).digest()
    except OverflowError:
        return b""


@dataclass(slots=True)
class _RolloutNotes:
    """The model calls of one rollout, and the experts of its sequences: by digest, with their number of tokens."""

    calls: list[Call] = field(default_factory=list[Call])
    routed: dict[bytes, RoutedCall] = field(default_factory=dict[bytes, RoutedCall])

    def begun_by(self, prompt_ids: Sequence[int]) -> RoutedCall | None:
        """Return the experts of the longest sequence with which the prompt begins; None if those of none are known."""
        if not self.routed:
            return None
        ids = np.asarray(prompt_ids, np.int64)
        # Of a call's tokens the last one has no experts.
        lengths = {call.end + 1 for call in self.routed.values()}
        for length in sorted((each for each in lengths if each <= len(ids)), reverse=True):
            if (found := self.routed.get(digest_of(ids[:length]))) is not None:
                return found
        return None


class SpanLog:
    """The model calls of one worker's rollouts, until their adapters take them."""

    def __init__(self) -> None:
        self._notes: OrderedDict[str, _RolloutNotes] = OrderedDict()

    def note(
        self,
        rollout_id: str,
        completion_ids: Sequence[int],
        spans: tuple[PolicySpan, ...],
        sent: Mapping[str, Any] | None = None,
        routed: RoutedCall | None = None,
        *,
        prompt_ids: Sequence[int] = (),
    ) -> None:
        """Add one model call to those of a rollout. A call without tokens is a request that the engine refused.

        `spans` are indices into `completion_ids`, and `sent` has the request's sampling parameters, None if they are
        not known; `routed` are the experts of its tokens, None if they are not recorded. Of these only what earlier
        calls of the rollout did not record is kept. Beyond MAX_ROLLOUTS rollouts the oldest one's calls are dropped.
        """
        notes = self._notes.setdefault(rollout_id, _RolloutNotes())
        if routed is not None:
            routed = routed.after(notes.begun_by(prompt_ids))
            notes.routed[digest_of([*prompt_ids, *completion_ids])] = routed
        call = Call(completion_ids=tuple(completion_ids), spans=spans, sent=sent, routed=routed)
        notes.calls.append(replace(call, prompt=digest_of(prompt_ids)))
        while len(self._notes) > MAX_ROLLOUTS:
            self._notes.popitem(last=False)

    def num_routed(self, rollout_id: str, prompt_ids: Sequence[int]) -> int:
        """Return the number of first tokens of a prompt whose experts are noted for that rollout, without a gap."""
        notes = self._notes.get(rollout_id)
        known = None if notes is None else notes.begun_by(prompt_ids)
        return 0 if known is None or known.since(0) is None else known.end

    def take(self, rollout_id: str) -> "Spans":
        """Return the model calls that were noted for one rollout, and remove them from this log."""
        notes = self._notes.pop(rollout_id, None)
        return Spans([] if notes is None else notes.calls)


class Spans:
    """The model calls of one rollout; `find` returns each at most once."""

    def __init__(self, notes: Sequence[Call]) -> None:
        """Take the model calls of one rollout, in their order; those without tokens are requests that the engine
        refused.
        """
        self.calls = tuple(notes)
        """All of them, in order."""
        self._notes = [note for note in notes if note.completion_ids]
        self.refused = [note.sent for note in notes if not note.completion_ids]
        """The requests that the engine refused."""

    def find(self, completion_ids: Sequence[int], prompt_ids: Sequence[int] = ()) -> Call:
        """Return the first call not returned yet whose sampled ids are `completion_ids`, else the first whose ids begin
        with them, else NO_CALL.

        Of several such calls it is the one with that prompt; experts are returned only with that prompt. The call's
        spans are cut to the length of `completion_ids`, because the environment may have cut the completion. Calls may
        be recorded in another order than they ended in.
        """
        sought, prompt = tuple(completion_ids), digest_of(prompt_ids)
        whole = [at for at, call in enumerate(self._notes) if call.completion_ids == sought]
        begun = [at for at, call in enumerate(self._notes) if call.completion_ids[: len(sought)] == sought]
        found = [*whole, *begun]
        if not found:
            return NO_CALL
        index = next((at for at in found if self._notes[at].prompt == prompt), found[0])
        call = self._notes.pop(index)
        routed = call.routed if call.prompt == prompt else None
        return replace(call, spans=clipped(call.spans, len(sought)), routed=routed)


def clipped(spans: Sequence[PolicySpan], end: int) -> tuple[PolicySpan, ...]:
    """Return the spans of the tokens before index `end`; a span that goes beyond is cut there."""
    if not spans or spans[-1].end <= end:
        return tuple(spans)
    return tuple(replace(span, end=min(span.end, end)) for span in spans if span.start < end)


# One per process: a worker hosts one environment.
SPANS = SpanLog()
