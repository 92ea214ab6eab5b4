"""How one play of a task ended, in the env-server's own terms, and the rollout made from it."""

import contextlib
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any

import numpy as np

from millrace.errors import InvalidSpecError, Violation
from millrace.internal.v1.play_pb2 import PlayGroupRequest
from millrace.rollouts.requests import request_parameters, truncation_of
from millrace.rollouts.types import (
    MAX_DEMONSTRATION_BYTES,
    MAX_ERROR_FRAMES_CHARS,
    MAX_ERROR_MESSAGE_CHARS,
    MAX_MESSAGES_JSON_BYTES,
    MAX_REWARD,
    MAX_SAMPLING_JSON_CHARS,
    MAX_TASK_JSON_BYTES,
    Rollout,
    RolloutError,
    RolloutStatus,
    Sample,
    Trace,
)
from millrace.rollouts.wire import purpose_from_wire

_DEMO_KEY = "`orchestrator.algo.demo_key`"
_SHOWN_NAMES = 20
_LOOKED_AT = 256
"""Training tasks of which one at least must have a demonstration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one member's play.

    `samples`, `traces` and `reward` are empty or 0 unless the status is OK.
    """

    status: RolloutStatus
    error_type: str = ""
    error_message: str = ""
    frames: str = ""
    """Last frames of the environment's own code, one per line."""
    is_infrastructure: bool = False
    """Whether the failure is not the environment's fault."""
    samples: Sequence[Sample] = ()
    reward: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    stop_condition: str = ""
    is_truncated: bool = False
    num_turns: int = 0
    model_s: float = 0.0
    messages: Sequence[Mapping[str, Any]] = ()
    task: Mapping[str, Any] = field(default_factory=dict)
    """What the task's author provides to score it with, such as `answer`."""
    traces: Sequence[Trace] = ()
    """One for each of several trained agents; empty where one agent did everything."""
    demonstration: str = ""
    """The task's demonstration, for the teacher of opsd alone."""
    sent_instead: Sequence[Mapping[str, Any]] = ()
    """The sampling of requests that deviates from the run's, each way once."""


def failed(
    status: RolloutStatus,
    error_type: str,
    message: str,
    *,
    of: Outcome | None = None,
    frames: str = "",
    is_infrastructure: bool = False,
) -> Outcome:
    """Make the outcome of a failure with this status, error class and message.

    The conversation, metrics and counters come from the played outcome `of`; without it they are empty. `frames` are
    lines of the environment's own code. `is_infrastructure` is whether the failure is not the environment's fault.
    """
    error = Outcome(
        status=status,
        error_type=error_type,
        error_message=message,
        frames=frames,
        is_infrastructure=is_infrastructure,
    )
    return error if of is None else failed_like(error, of=of)


def failed_like(error: Outcome, *, of: Outcome) -> Outcome:
    """Return the played outcome `of` with the status and error of `error`, without samples, traces and reward."""
    return replace(
        of,
        status=error.status,
        error_type=error.error_type,
        error_message=error.error_message,
        frames=error.frames,
        is_infrastructure=error.is_infrastructure,
        samples=(),
        reward=0.0,
        traces=(),
    )


def require_demonstrations(tasks: Iterable[Mapping[str, Any]], key: str) -> None:
    """Raise InvalidSpecError if `tasks` is not empty and none of its first 256 tasks has a value under `key`.

    A single task without a value fails only its own rollouts (`demonstrated`).
    """
    looked_at = list(itertools.islice(tasks, _LOOKED_AT))
    if looked_at and all(_is_missing(task.get(key)) for task in looked_at):
        named = sorted({str(name) for task in looked_at for name, value in task.items() if not _is_missing(value)})
        which = f"none of its first {len(looked_at)} training tasks" if len(looked_at) > 1 else "its training task"
        has = f"{which} has" if len(looked_at) > 1 else f"{which} does not have"
        message = f"{has} `{key}` to show the teacher (they have {', '.join(named[:_SHOWN_NAMES]) or 'nothing'})"
        raise InvalidSpecError(
            [Violation(field="orchestrator.algo.demo_key", value=key, message=message)],
            reason="ENV_LOAD_FAILED",
            remedy=f"name a field that they have in {_DEMO_KEY}",
        )


def _is_missing(value: Any) -> bool:
    """Return whether a field of a task has no value: None or "". 0 and False are values."""
    return value is None or value == ""


def demonstrated(outcome: Outcome, key: str) -> Outcome:
    """Return an OK outcome with `demonstration` set to the text that its task has under `key`, for opsd's teacher.

    The outcome becomes an ENV_ERROR if the task has no such value, one that is neither text nor a number, or a text
    that is too large. Outcomes that are not OK are returned as they are.
    """
    if outcome.status is not RolloutStatus.OK:
        return outcome
    value = outcome.task.get(key)
    if _is_missing(value):
        names = ", ".join(sorted(map(str, outcome.task))[:_SHOWN_NAMES]) or "nothing"
        problem = f"the task has no `{key}` to show the teacher (it has {names}); name another field in"
        return failed(RolloutStatus.ENV_ERROR, "DemonstrationMissing", f"{problem} {_DEMO_KEY}", of=outcome)
    if isinstance(value, bool | int | float):
        value = str(value)
    if not isinstance(value, str):
        problem = f"the task's `{key}` is a {type(value).__name__}, and a demonstration is text; let the environment"
        problem = f"{problem} write it as text, or name another field in {_DEMO_KEY}"
        return failed(RolloutStatus.ENV_ERROR, "DemonstrationNotText", problem, of=outcome)
    text = storable(value)
    if (size := len(text.encode())) > MAX_DEMONSTRATION_BYTES:
        problem = f"the task's `{key}` has {size} bytes, and a demonstration at most {MAX_DEMONSTRATION_BYTES}; cut it"
        return failed(RolloutStatus.ENV_ERROR, "DemonstrationTooLarge", problem, of=outcome)
    return replace(outcome, demonstration=text)


class NotANumberError(TypeError):
    """A value of the environment's that must be a number is none."""


def number_of(value: Any) -> float:
    """Return a number of Python, numpy or torch as a float; raise NotANumberError for anything else.

    Texts are refused, also those of digits, and so are numpy's texts and complex numbers, which `float` would take.
    """
    kind = type(value)
    # numpy's complex numbers, bytes and texts have `__float__`, too.
    is_other = isinstance(value, np.generic | np.ndarray) and value.dtype.kind in "cSU"
    if is_other or isinstance(value, str | bytes) or not (hasattr(kind, "__float__") or hasattr(kind, "__index__")):
        raise NotANumberError(f"{value!r:.100}, which is no number")
    try:
        return float(value)
    except Exception as error:  # foreign code: torch raises RuntimeError
        raise NotANumberError(f"{value!r:.100}, which is no number") from error


def checked(outcome: Outcome) -> Outcome:
    """Return an OK outcome as it is, or as an ENV_ERROR if a reward in it is not finite or its absolute value is above
    MAX_REWARD.

    The rewards of the rollout, of its agents and of its turns are looked at: one that is not finite or too large would
    make every advantage of its group useless. Outcomes that are not OK are returned as they are.
    """
    if outcome.status is not RolloutStatus.OK:
        return outcome
    turns = [turn.reward for sample in outcome.samples for turn in sample.turns]
    texts = [
        ("the reward", outcome.reward),
        *((f"the reward of agent {trace.agent!r}", trace.reward) for trace in outcome.traces),
        *((f"the reward of turn {number}", reward) for number, reward in enumerate(turns, start=1)),
    ]
    for what, value in texts:
        # Written this way round so that NaN, which compares as false, goes on.
        if abs(value) <= MAX_REWARD:
            continue
        parts = [f"{name} = {part}" for name, part in outcome.metrics.items() if _is_unusable(part)]
        which = f" ({', '.join(parts)})" if parts else ""
        kind = "NonFiniteReward" if not math.isfinite(value) else "RewardTooLarge"
        problem = f"beyond ±{MAX_REWARD:g}" if math.isfinite(value) else "not a finite number"
        message = f"{what} is {value}{which}, {problem}; fix the environment's reward function"
        return failed(RolloutStatus.ENV_ERROR, kind, message, of=outcome)
    return outcome


def _is_unusable(value: Any) -> bool:
    """Return whether a metric is a number that is not finite or beyond MAX_REWARD; False for what is no number."""
    try:
        return not abs(number_of(value)) <= MAX_REWARD
    except NotANumberError:
        return False


def bounded_json(messages: Sequence[Mapping[str, Any]], *, limit_bytes: int = MAX_MESSAGES_JSON_BYTES) -> str:
    """Return the conversation as JSON of at most `limit_bytes`.

    If it is too long, of more than 32 messages the first 32 are kept, and contents are cut ever shorter; at last only a
    note is left, which has the number of messages.
    """

    def encode(items: Sequence[Mapping[str, Any]]) -> str:
        return json.dumps(items, ensure_ascii=False, default=str)

    text = encode(messages)
    keep_chars = 4096
    while len(text.encode("utf-8", "replace")) > limit_bytes:
        if keep_chars < 16:
            return encode([{"role": "note", "content": f"conversation of {len(messages)} messages was too long"}])
        cut = [
            {"role": item.get("role", ""), "content": shortened(str(item.get("content") or ""), keep_chars)}
            for item in messages[:32]
        ]
        if len(messages) > 32:
            cut.append({"role": "note", "content": f"{len(messages) - 32} more messages were cut"})
        text = encode(cut)
        # Characters of text may take several bytes each, so the length is tried and not computed.
        keep_chars //= 2
    return storable(text)


def finite_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that are finite numbers, as floats; leave out all others, which cannot be averaged."""
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        with contextlib.suppress(NotANumberError):
            if math.isfinite(number := number_of(value)):
                numbers[str(name)] = number
    return numbers


def _sampling_json(request: PlayGroupRequest, instead: Sequence[Mapping[str, Any]]) -> str:
    """Encode the sampling parameters that the run asks for as JSON.

    `instead` has the parameters of requests that deviated; they are added under `environment`, unless the JSON would
    then be too long.
    """
    asked = request_parameters(request.sampling, is_external=request.is_external)
    whole = json.dumps(asked | ({"environment": list(instead)} if instead else {}), sort_keys=True, default=str)
    return whole if len(whole) <= MAX_SAMPLING_JSON_CHARS else json.dumps(asked, sort_keys=True)


def make_rollout(
    request: PlayGroupRequest,
    *,
    member: int,
    task_id: str,
    outcome: Outcome,
    seconds: float,
    env_server: str = "",
) -> Rollout:
    """Make the rollout of the group's member `member` (a number from 0) from the request and the outcome.

    `task_id` is the hash that identifies the task, `seconds` how long the member was played, and `env_server` this
    env-server's id. Texts are cut to what may be stored; samples, reward and traces of an outcome that is not OK are
    dropped.
    """
    is_ok = outcome.status is RolloutStatus.OK
    error = None
    if not is_ok:
        error = RolloutError(
            type=outcome.error_type,
            message=storable(outcome.error_message)[:MAX_ERROR_MESSAGE_CHARS],
            frames=storable(outcome.frames)[-MAX_ERROR_FRAMES_CHARS:],
            is_infrastructure=outcome.is_infrastructure,
        )
    return Rollout(
        run_uid=request.run_uid,
        purpose=purpose_from_wire(request.purpose),
        ordinal=request.ordinal,
        member=member,
        attempt=request.attempt,
        group_size=request.group_size,
        env=request.env.name,
        task_index=request.task_index,
        task_id=task_id,
        status=outcome.status,
        error=error,
        samples=tuple(outcome.samples) if is_ok else (),
        reward=outcome.reward if is_ok else 0.0,
        metrics=finite_metrics(outcome.metrics),
        stop_condition=outcome.stop_condition,
        is_truncated=outcome.is_truncated,
        num_turns=outcome.num_turns,
        seconds=seconds,
        model_seconds=outcome.model_s,
        temperature=request.sampling.temperature,
        truncation=truncation_of(request.sampling),
        sampling_json=_sampling_json(request, outcome.sent_instead),
        env_server=env_server,
        planned_step=request.planned_step,
        eval_id=request.eval_id,
        messages_json=bounded_json(outcome.messages),
        task_json=bounded_object(outcome.task),
        dispatched_after=request.dispatched_after,
        traces=tuple(outcome.traces) if is_ok else (),
        demonstration=outcome.demonstration if is_ok else "",
    )


# The data that a task is scored with, as the log keeps it: JSON of a bounded size, whatever the author put there.
#
# An answer or an info may be anything: an array, bytes, an object of a class, a table of a gigabyte, or a mapping that
# has itself as a value. None of it may cost a rollout or block the worker, so no more of a value is read than is kept.

_MAX_DEPTH = 16
_MAX_NAME_CHARS = 200
_MAX_INTEGER = 1 << 53
"""The largest integer that every reader of JSON has exactly; larger ones become text."""
_MAX_NAMES = 256
_LEFT_OUT = "…"
"""The name under which a mapping has the number of names that were left out."""
_ROOM_OF_LEFT_OUT = 64


class _Budget:
    """Counts how many more characters of one value may be kept."""

    def __init__(self, chars: int) -> None:
        """Make a budget of `chars` characters."""
        self.chars = chars
        self.is_cut = False

    def take(self, count: int) -> bool:
        """Take `count` characters from the budget; return whether they fitted.

        After one refusal all are refused, and `is_cut` stays True.
        """
        self.chars -= count
        self.is_cut = self.is_cut or self.chars < 0
        return not self.is_cut


def bounded_object(given: Mapping[str, Any], *, limit_bytes: int = MAX_TASK_JSON_BYTES) -> str:
    """Return the fields of `given` as a JSON object of at most `limit_bytes`, `answer` first; "" if it has none.

    A value whose JSON is longer than an eighth of the limit is cut, and kept as text. Fields that then do not fit are
    left out, and their number is added under `…`. What JSON does not have (arrays, objects of classes, NaN) becomes a
    list or text.
    """
    kept: dict[str, Any] = {}
    used, left_out = 2, 0
    for name in itertools.islice(_names(given), _MAX_NAMES):
        shown = storable(shortened(str(name), _MAX_NAME_CHARS))
        # An eighth of the room for one field, so that no field displaces all others.
        item = _bounded(given[name], limit_bytes // 8)
        size = len(json.dumps({shown: item}, ensure_ascii=False).encode())
        if used + size > limit_bytes - _ROOM_OF_LEFT_OUT:
            left_out += 1
            continue
        used += size
        kept[shown] = item
    left_out += max(len(given) - _MAX_NAMES, 0)
    if left_out:
        kept[_LEFT_OUT] = f"{left_out} more left out"
    return json.dumps(kept, ensure_ascii=False) if kept else ""


def _names(given: Mapping[str, Any]) -> list[str]:
    """Return the mapping's keys, `answer` first and the others sorted; only the first `_MAX_NAMES` are looked at."""
    others = [name for name in itertools.islice(given, _MAX_NAMES) if name != "answer"]
    return [*(["answer"] if "answer" in given else []), *sorted(others, key=str)]


def _bounded(value: Any, limit: int) -> Any:
    """Return a value as data that JSON has; as cut text if its JSON has more than about `limit` characters.

    An object whose methods raise becomes a text that names its class.
    """
    try:
        if isinstance(value, str):
            return storable(shortened(value, limit))
        budget = _Budget(limit)
        plain = _plain(value, budget, 0)
        if not budget.is_cut:
            return plain
        return f"{json.dumps(plain, ensure_ascii=False)[:limit]}… (cut)"
    except Exception as error:  # noqa: BLE001 - methods of the author's objects: a sample without one is still a sample
        return f"<{type(value).__name__} that cannot be shown: {type(error).__name__}>"


def _plain(value: Any, budget: _Budget, depth: int) -> Any:
    """Return as much of a value as fits into the budget, as data that JSON has, and take its size from the budget.

    `depth` counts the containers around the value; one that is nested too deeply becomes `…`.
    """
    if value is None or isinstance(value, bool | np.bool_):
        budget.take(5)
        return None if value is None else bool(value)
    if isinstance(value, Integral) and abs(int(value)) <= _MAX_INTEGER:
        budget.take(8)
        return int(value)
    # Not a larger integer, which would lose digits: it becomes a text below.
    if isinstance(value, Real) and not isinstance(value, Integral) and math.isfinite(number := float(value)):
        budget.take(12)
        return number
    # A list takes many times the memory of its array, so one that cannot fit is not made.
    if isinstance(value, np.ndarray) and value.ndim and value.size <= budget.chars:
        value = value.tolist()
    if depth < _MAX_DEPTH and isinstance(value, Mapping):
        return _plain_mapping(value, budget, depth)
    if depth < _MAX_DEPTH and isinstance(value, list | tuple | AbstractSet):
        return _plain_list(value, budget, depth)
    text = storable(_text(value, max(budget.chars, 1)))
    budget.take(len(text) + 2)
    return text


def _plain_mapping(value: Mapping[Any, Any], budget: _Budget, depth: int) -> dict[str, Any]:
    """Return as much of a mapping as fits into the budget; `depth` counts the containers around it."""
    found: dict[str, Any] = {}
    for name, item in value.items():
        shown = storable(shortened(str(name), _MAX_NAME_CHARS))
        if not budget.take(len(shown) + 6):
            break
        found[shown] = _plain(item, budget, depth + 1)
    return found


def _plain_list(value: Iterable[Any], budget: _Budget, depth: int) -> list[Any]:
    """Return as many items as fit into the budget, as a list; `depth` counts the containers around it."""
    found: list[Any] = []
    for item in value:
        if not budget.take(2):
            break
        found.append(_plain(item, budget, depth + 1))
    return found


def _text(value: Any, limit: int) -> str:
    """Return a value as text of at most about `limit` characters; of a container only `…`."""
    if isinstance(value, bytes | bytearray | memoryview):
        return shortened(str(bytes(value[:limit])), limit) + ("…" if len(value) > limit else "")
    if isinstance(value, Mapping | list | tuple | AbstractSet):
        return "…"  # nested too deeply: what it has may have no end
    return shortened(str(value), limit)


def shortened(text: str, limit: int) -> str:
    """Return the text, or its first `limit` characters and how many were cut."""
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text) - limit} characters cut)"


def storable(text: str) -> str:
    """Return the text with `?` for lone surrogates, which cannot be stored as UTF-8."""
    return text.encode("utf-8", "replace").decode("utf-8")
