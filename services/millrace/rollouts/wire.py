"""Rollouts on the wire: the only file that knows the protobuf of rollouts (rollout.proto).

What is not a well-formed rollout neither leaves the process that made it (`rollout_to_proto`, of env workers) nor
enters another (`rollout_from_proto`, `decode_rollout`, `decode_archive`): not an env-server from its workers, which run
foreign code, nor an orchestrator, an export or an audit from the log. Bytes that do not decode raise
`CorruptObjectError`, never yield wrong arrays. What came in and goes on is not checked anew: its columns are read-only
views of the bytes.
"""

import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

import numpy as np
import zstandard

from millrace.decoding import decode_message, decompress
from millrace.errors import CorruptObjectError
from millrace.internal.v1 import batch_pb2, rollout_pb2
from millrace.rollouts.routed_experts import check_experts, experts_from_proto, experts_to_proto
from millrace.rollouts.types import (
    FULL,
    MAX_AGENT_CHARS,
    MAX_DEMONSTRATION_BYTES,
    MAX_ERROR_FRAMES_CHARS,
    MAX_ERROR_MESSAGE_CHARS,
    MAX_MESSAGES_JSON_BYTES,
    MAX_SAMPLING_JSON_CHARS,
    MAX_TASK_JSON_BYTES,
    ROLES,
    OwnSampling,
    PolicySpan,
    Purpose,
    RoleSpan,
    Rollout,
    RolloutError,
    RolloutStatus,
    Sample,
    Trace,
    Truncation,
    TurnReward,
)

PURPOSE_TO_WIRE = {
    Purpose.TRAIN: rollout_pb2.PURPOSE_TRAIN,
    Purpose.EVAL: rollout_pb2.PURPOSE_EVAL,
}
_PURPOSE_FROM_WIRE = {wire: purpose for purpose, wire in PURPOSE_TO_WIRE.items()}
STATUS_FROM_WIRE = {
    rollout_pb2.RolloutStatus.Value(f"ROLLOUT_STATUS_{status.name}"): status for status in RolloutStatus
}

# Fields that are the same on either side.
_OTHER = {"purpose", "status", "error", "samples", "metrics", "truncation", "traces"}
_SAME = tuple(part.name for part in fields(Rollout) if part.name not in _OTHER)
MAX_ROLLOUT_BYTES = 256 << 20
"""Largest rollout that is read: 16 million tokens with their columns, and its messages."""
MAX_ARCHIVE_BYTES = 1 << 30
"""Largest archive, decompressed: a thousand rollouts of 64k tokens have 0.6 GB."""
# Log-probs hardly compress: real archives expand about 5 times.
_SMALL_ARCHIVE_BYTES, _MAX_EXPANSION = 64 << 20, 256


def purpose_to_wire(purpose: Purpose) -> rollout_pb2.Purpose:
    """Return the protobuf value of a purpose."""
    return PURPOSE_TO_WIRE[purpose]


def purpose_from_wire(value: int) -> Purpose:
    """Return the purpose of a protobuf value; `CorruptObjectError` when it is unknown or not set."""
    if value not in _PURPOSE_FROM_WIRE:
        raise _corrupt("purpose", value, "is not a known Purpose")
    return _PURPOSE_FROM_WIRE[value]  # pyright: ignore[reportArgumentType] - checked above


def encode_rollout(rollout: Rollout) -> bytes:
    """Serialise a rollout that came from a worker; the log stores and hashes these bytes.

    `CorruptObjectError` if a field is invalid: the env-server fills some in. Its samples are not checked again.
    """
    _validate_fields(rollout)
    return _to_proto(rollout).SerializeToString(deterministic=True)


def decode_rollout(data: bytes) -> Rollout:
    """Parse the bytes of `encode_rollout` and return the rollout; `CorruptObjectError` if it is invalid.

    Columns are read-only views of `data`.
    """
    message = decode_message(
        rollout_pb2.Rollout,
        data,
        what=f"a rollout of {len(data)} bytes",
        reason="ROLLOUT_CORRUPT",
        remedy="read the entry again; if it stays, drop the attempt",
        max_bytes=MAX_ROLLOUT_BYTES,
    )
    return rollout_from_proto(message)


def encode_archive(rollouts: Iterable[Rollout]) -> bytes:
    """Return a zstd-compressed `RolloutArchive` message of rollouts, in order of ordinal, attempt and member.

    The rollouts were decoded, and are not checked anew. Experts of tokens are left out: those that are trained with are
    in the batch. `CorruptObjectError` if the archive would be larger than what
    `decode_archive` reads.
    """
    ordered = sorted(rollouts, key=lambda r: (r.ordinal, r.attempt, r.member))
    # Rollout by rollout, which gives the bytes of the whole message and never needs them at once. A frame begins with
    # its size.
    size = sum(_archive_of(rollout).ByteSize() for rollout in ordered)
    compressor, packed = zstandard.ZstdCompressor(level=3, write_checksum=True), io.BytesIO()
    if not 0 < size <= MAX_ARCHIVE_BYTES:
        # Nothing to compress, or too much, which is refused below.
        packed.write(compressor.compress(b""))
    else:
        with compressor.stream_writer(packed, size=size, closefd=False) as writer:
            for rollout in ordered:
                writer.write(_archive_of(rollout).SerializeToString(deterministic=True))
    data = packed.getvalue()
    if size > (most := _max_archive_bytes(data)):
        raise CorruptObjectError(
            f"the archive of {len(ordered)} rollouts has {size} bytes, and at most {most} would be read again",
            reason="ROLLOUT_ARCHIVE_TOO_LARGE",
            remedy="cut smaller batches (orchestrator.batch_size), or shorter rollouts",
        )
    return data


def _archive_of(rollout: Rollout) -> rollout_pb2.RolloutArchive:
    """Return an archive message of one rollout; the bytes of such messages, joined, are those of one message of all."""
    samples = tuple(replace(sample, routed_experts=None) for sample in rollout.samples)
    return rollout_pb2.RolloutArchive(rollouts=[_to_proto(replace(rollout, samples=samples))])


def decode_archive(data: bytes) -> list[Rollout]:
    """Return the rollouts of an archive object; `CorruptObjectError` when the bytes are damaged or expand too much."""
    where = {
        "what": f"a rollout archive of {len(data)} bytes",
        "reason": "ROLLOUT_ARCHIVE_CORRUPT",
        "remedy": "restore the object from a replica of the bucket",
    }
    unpacked = decompress(data, max_bytes=_max_archive_bytes(data), **where)
    archive = decode_message(rollout_pb2.RolloutArchive, unpacked, max_bytes=MAX_ARCHIVE_BYTES, **where)
    return [rollout_from_proto(message) for message in archive.rollouts]


def _max_archive_bytes(packed: bytes) -> int:
    """Return the largest size to which these compressed bytes may expand: a few bytes must not become gigabytes."""
    return min(MAX_ARCHIVE_BYTES, max(_SMALL_ARCHIVE_BYTES, _MAX_EXPANSION * len(packed)))


def rollout_to_proto(rollout: Rollout) -> rollout_pb2.Rollout:
    """Check a rollout that was made here, and return its protobuf form.

    `CorruptObjectError` names the field that is invalid.
    """
    validate_rollout(rollout)
    return _to_proto(rollout)


def _to_proto(rollout: Rollout) -> rollout_pb2.Rollout:
    """Return the protobuf form of a rollout, which is not checked."""
    values: dict[str, Any] = {name: getattr(rollout, name) for name in _SAME}
    values["purpose"] = purpose_to_wire(rollout.purpose)
    values["status"] = f"ROLLOUT_STATUS_{rollout.status.name}"
    values["error"] = rollout.error and rollout_pb2.RolloutError(**asdict(rollout.error))
    values["samples"] = [_sample_to_proto(sample) for sample in rollout.samples]
    values["truncation"] = truncation_to_wire(rollout.truncation)
    values["traces"] = [rollout_pb2.Trace(**asdict(trace)) for trace in rollout.traces]
    return rollout_pb2.Rollout(metrics=rollout.metrics, **values)


def rollout_from_proto(message: rollout_pb2.Rollout) -> Rollout:
    """Return the rollout of a message; `CorruptObjectError` unless it keeps every rule of rollout.proto."""
    if message.status not in STATUS_FROM_WIRE:
        raise _corrupt("status", message.status, "is not a known RolloutStatus")
    values: dict[str, Any] = {name: getattr(message, name) for name in _SAME}
    values["purpose"] = purpose_from_wire(message.purpose)
    values["status"] = STATUS_FROM_WIRE[message.status]
    if message.HasField("error"):
        values["error"] = RolloutError(
            **{part.name: getattr(message.error, part.name) for part in fields(RolloutError)}
        )
    values["samples"] = tuple(_sample_from_proto(sample) for sample in message.samples)
    values["truncation"] = truncation_from_wire(message)
    values["traces"] = tuple(
        Trace(**{part.name: getattr(trace, part.name) for part in fields(Trace)}) for trace in message.traces
    )
    rollout = Rollout(metrics=dict(message.metrics), **values)
    validate_rollout(rollout)
    return rollout


def truncation_to_wire(truncation: Truncation) -> rollout_pb2.Truncation | None:
    """Return the protobuf form of truncation parameters; None for the full distribution."""
    return None if truncation.is_full else rollout_pb2.Truncation(**asdict(truncation))


def truncation_from_wire(message: rollout_pb2.Rollout | rollout_pb2.OwnSampling | batch_pb2.SampleEntry) -> Truncation:
    """Return the truncation parameters in the field `truncation` of a message, the full distribution if it is not set.

    `CorruptObjectError` if one is out of range.
    """
    if not message.HasField("truncation"):
        return FULL
    found = message.truncation
    if not (0 < found.top_p <= 1 and 0 <= found.min_p <= 1):
        raise _corrupt("truncation", (found.top_p, found.min_p), "is not between 0 and 1")
    return Truncation(top_p=found.top_p, top_k=found.top_k, min_p=found.min_p)


def own_sampling_to_wire(ranges: Sequence[OwnSampling]) -> list[rollout_pb2.OwnSampling]:
    """Return the protobuf form of ranges that were sampled in a way of their own."""
    return [
        rollout_pb2.OwnSampling(
            start=each.start,
            end=each.end,
            temperature=each.temperature,
            truncation=truncation_to_wire(each.truncation),
        )
        for each in ranges
    ]


def own_sampling_from_wire(messages: Iterable[rollout_pb2.OwnSampling]) -> tuple[OwnSampling, ...]:
    """Return the ranges of messages; `CorruptObjectError` for a truncation that is out of range."""
    return tuple(
        OwnSampling(start=each.start, end=each.end, temperature=each.temperature, truncation=truncation_from_wire(each))
        for each in messages
    )


def own_sampling_problem(ranges: Sequence[OwnSampling], num_tokens: int) -> str:
    """Return what is wrong with a sample's ranges of own sampling, which must ascend within `num_tokens`.

    Empty if nothing is.
    """
    end = 0
    for number, each in enumerate(ranges):
        if not end <= each.start < each.end <= num_tokens:
            return f"[{number}] is not ascending inside {num_tokens} tokens"
        if not 0 <= each.temperature < math.inf:
            return f"[{number}] has the temperature {each.temperature}"
        end = each.end
    return ""


def validate_rollout(rollout: Rollout) -> None:
    """Raise `CorruptObjectError` unless the rollout keeps every rule of rollout.proto."""
    _validate_fields(rollout)
    for index, sample in enumerate(rollout.samples):
        validate_sample(sample, where=f"samples[{index}]", needs_spans=rollout.purpose is Purpose.TRAIN)


def _validate_fields(rollout: Rollout) -> None:
    """Raise `CorruptObjectError` if a field of a rollout breaks a rule; its samples are not looked at."""
    if not rollout.run_uid:
        raise _corrupt("run_uid", rollout.run_uid, "is empty")
    if rollout.group_size < 1 or not 0 <= rollout.member < rollout.group_size:
        raise _corrupt("member", rollout.member, f"is not in a group of {rollout.group_size}")
    numbers = {"reward": rollout.reward, "temperature": rollout.temperature, "seconds": rollout.seconds}
    numbers |= {f"traces[{index}].reward": trace.reward for index, trace in enumerate(rollout.traces)}
    numbers |= {"model_seconds": rollout.model_seconds} | {f"metrics[{k}]": v for k, v in rollout.metrics.items()}
    for name, value in numbers.items():
        if not math.isfinite(value):
            raise _corrupt(name, value, "is not finite")
    if rollout.status is RolloutStatus.OK:
        if rollout.error is not None:
            raise _corrupt("error", rollout.error.type, "is set although the status is OK")
    elif rollout.samples:
        raise _corrupt("samples", len(rollout.samples), f"must be empty when the status is {rollout.status}")
    elif rollout.error is None:
        raise _corrupt("error", None, f"must be set when the status is {rollout.status}")
    if rollout.error is not None and len(rollout.error.message) > MAX_ERROR_MESSAGE_CHARS:
        raise _corrupt("error.message", len(rollout.error.message), f"has more than {MAX_ERROR_MESSAGE_CHARS} chars")
    if rollout.error is not None and len(rollout.error.frames) > MAX_ERROR_FRAMES_CHARS:
        raise _corrupt("error.frames", len(rollout.error.frames), f"has more than {MAX_ERROR_FRAMES_CHARS} chars")
    if len(rollout.sampling_json) > MAX_SAMPLING_JSON_CHARS:
        raise _corrupt("sampling_json", len(rollout.sampling_json), f"has more than {MAX_SAMPLING_JSON_CHARS} chars")
    if len(rollout.messages_json.encode()) > MAX_MESSAGES_JSON_BYTES:
        raise _corrupt("messages_json", len(rollout.messages_json), f"is above {MAX_MESSAGES_JSON_BYTES} bytes")
    if len(rollout.task_json.encode()) > MAX_TASK_JSON_BYTES:
        raise _corrupt("task_json", len(rollout.task_json), f"is above {MAX_TASK_JSON_BYTES} bytes")
    if len(rollout.demonstration.encode()) > MAX_DEMONSTRATION_BYTES:
        raise _corrupt("demonstration", len(rollout.demonstration), f"is above {MAX_DEMONSTRATION_BYTES} bytes")
    _validate_traces(rollout)


def _validate_traces(rollout: Rollout) -> None:
    """Raise `CorruptObjectError` if a rollout's traces do not fit its status or samples.

    The traces' numbers of samples must add up to those of the rollout, the names of agents must not be too long, and a
    failed rollout has no trace. A rollout without traces is right.
    """
    if not rollout.traces:
        return
    if rollout.status is not RolloutStatus.OK:
        raise _corrupt("traces", len(rollout.traces), f"must be empty when the status is {rollout.status}")
    owned = sum(trace.num_samples for trace in rollout.traces)
    if owned != len(rollout.samples):
        raise _corrupt("traces", owned, f"is not the number of samples, which is {len(rollout.samples)}")
    for index, trace in enumerate(rollout.traces):
        if len(trace.agent) > MAX_AGENT_CHARS:
            raise _corrupt(f"traces[{index}].agent", len(trace.agent), f"has more than {MAX_AGENT_CHARS} chars")


def validate_sample(sample: Sample, *, where: str, needs_spans: bool) -> None:
    """Raise `CorruptObjectError` if columns, spans, ranges or turns of a sample are invalid; `where` names the sample.

    Policy spans, ranges of own sampling and ranges of roles must ascend within the sample, and roles cover no sampled
    token. Policy spans must cover every sampled token when there are any. With `needs_spans`, as for training, there
    must be some, because staleness is counted by them. (An evaluation against an external endpoint cannot know the
    version.)
    """
    length = sample.num_tokens
    if length < 1:
        raise _corrupt(f"{where}.token_ids", length, "has no token")
    check_column(sample.token_ids, np.int32, length, f"{where}.token_ids")
    check_column(sample.loss_mask, np.uint8, length, f"{where}.loss_mask")
    check_column(sample.inference_logprobs, np.float32, length, f"{where}.inference_logprobs")
    check_masked(sample.loss_mask, sample.inference_logprobs, where=where)
    if int(np.minimum.reduce(sample.token_ids)) < 0:
        raise _corrupt(f"{where}.token_ids", int(sample.token_ids.min()), "is negative")
    end = num_covered = 0
    for number, span in enumerate(sample.policy_spans):
        if not end <= span.start < span.end <= length:
            raise _corrupt(f"{where}.policy_spans[{number}]", span, f"is not ascending inside {length} tokens")
        num_covered += int(np.count_nonzero(sample.loss_mask[span.start : span.end]))
        end = span.end
    has_to_cover = needs_spans or bool(sample.policy_spans)
    # Spans ascend and are disjoint, so equal counts mean that each sampled token is covered.
    if has_to_cover and num_covered != np.count_nonzero(sample.loss_mask):
        # The slow way, which is only taken to name the first uncovered token.
        covered = np.zeros(length, dtype=bool)
        for span in sample.policy_spans:
            covered[span.start : span.end] = True
        first = int(np.flatnonzero((sample.loss_mask != 0) & ~covered)[0])
        raise _corrupt(f"{where}.policy_spans", first, "a sampled token that no span covers")
    if problem := own_sampling_problem(sample.own_sampling, length):
        raise _corrupt(f"{where}.own_sampling", len(sample.own_sampling), problem)
    end = 0
    for number, span in enumerate(sample.roles):
        is_of_others = end <= span.start < span.end <= length and not sample.loss_mask[span.start : span.end].any()
        if span.role not in ROLES or not is_of_others:
            raise _corrupt(f"{where}.roles[{number}]", f"{span.role}[{span.start}:{span.end}]", "is no message's")
        end = span.end
    check_experts(sample.routed_experts, length, where=f"{where}.routed_experts")
    if sample.turns:
        _validate_turns(sample, where=where)


def _validate_turns(sample: Sample, *, where: str) -> None:
    """Raise `CorruptObjectError` unless a sample's turns ascend, each ends after a sampled token, and the last one
    after all.

    Their rewards must be finite. `where` names the sample.
    """
    end = 0
    for number, turn in enumerate(sample.turns):
        if not end < turn.end <= sample.num_tokens or not sample.loss_mask[turn.end - 1]:
            raise _corrupt(f"{where}.turns[{number}]", turn.end, "does not end a turn")
        if not math.isfinite(turn.reward):
            raise _corrupt(f"{where}.turns[{number}].reward", turn.reward, "is not finite")
        end = turn.end
    if sample.loss_mask[end:].any():
        raise _corrupt(f"{where}.turns", end, "is not where the last sampled token ends")


def check_column(column: np.ndarray, dtype: type[np.generic], length: int, where: str) -> None:
    """Raise `CorruptObjectError`, naming `where`, unless `column` is one-dimensional, of `dtype`, with `length`
    items.
    """
    if column.dtype != np.dtype(dtype) or column.shape != (length,):
        raise _corrupt(where, f"{column.dtype}{list(column.shape)}", f"is not {np.dtype(dtype)}[{length}]")


def check_masked(loss_mask: np.ndarray, inference_logprobs: np.ndarray, *, where: str) -> None:
    """Raise `CorruptObjectError` unless the mask is 0/1 and log-probs are finite, and 0 where the mask is 0.

    `where` names the sample that has them.
    """
    # Counts are what numpy does fastest of short arrays: worker, env-server and orchestrator check every rollout once.
    if loss_mask.size and int(np.maximum.reduce(loss_mask)) > 1:
        raise _corrupt(f"{where}.loss_mask", int(loss_mask.max()), "is neither 0 nor 1")
    if np.count_nonzero(np.isfinite(inference_logprobs)) != inference_logprobs.size:
        raise _corrupt(f"{where}.inference_logprobs", "nan or inf", "is not finite")
    if np.count_nonzero(inference_logprobs) != np.count_nonzero(np.logical_and(inference_logprobs, loss_mask)):
        raise _corrupt(f"{where}.inference_logprobs", "non-zero", "must be 0 where loss_mask is 0")


def column_from_bytes(data: bytes, dtype: str, where: str) -> np.ndarray:
    """Return a read-only view of a column's little-endian bytes; `dtype` is `<i4`, `u1`, `<f4` or `<f2`.

    `CorruptObjectError`, naming `where`, if they are no whole number of items.
    """
    item_size = np.dtype(dtype).itemsize
    if len(data) % item_size:
        raise _corrupt(where, f"{len(data)} bytes", f"is no multiple of {item_size}")
    return np.frombuffer(data, dtype=dtype)


def column_to_bytes(column: np.ndarray, dtype: str) -> bytes:
    """Return a column's items as bytes of `dtype`: `<i4`, `u1`, `<f4` or `<f2`."""
    return np.ascontiguousarray(column, dtype=dtype).tobytes()


def _sample_to_proto(sample: Sample) -> rollout_pb2.Sample:
    """Return the protobuf form of a sample, which is not checked; a teacher's scores are not part of it."""
    return rollout_pb2.Sample(
        token_ids=column_to_bytes(sample.token_ids, "<i4"),
        loss_mask=column_to_bytes(sample.loss_mask, "u1"),
        inference_logprobs=column_to_bytes(sample.inference_logprobs, "<f4"),
        policy_spans=spans_to_proto(sample.policy_spans),
        turns=[rollout_pb2.TurnReward(end=turn.end, reward=turn.reward) for turn in sample.turns],
        own_sampling=own_sampling_to_wire(sample.own_sampling),
        roles=[rollout_pb2.RoleSpan(role=each.role, start=each.start, end=each.end) for each in sample.roles],
        routed_experts=experts_to_proto(sample.routed_experts),
    )


def _sample_from_proto(message: rollout_pb2.Sample) -> Sample:
    """Return the sample of a message, whose values are not checked yet; CorruptObjectError for broken columns."""
    return Sample(
        token_ids=column_from_bytes(message.token_ids, "<i4", "token_ids"),
        loss_mask=column_from_bytes(message.loss_mask, "u1", "loss_mask"),
        inference_logprobs=column_from_bytes(message.inference_logprobs, "<f4", "inference_logprobs"),
        policy_spans=tuple(
            PolicySpan(lineage=span.lineage, version=span.version, start=span.start, end=span.end)
            for span in message.policy_spans
        ),
        turns=tuple(TurnReward(end=turn.end, reward=turn.reward) for turn in message.turns),
        own_sampling=own_sampling_from_wire(message.own_sampling),
        roles=tuple(RoleSpan(role=each.role, start=each.start, end=each.end) for each in message.roles),
        routed_experts=(
            experts_from_proto(message.routed_experts, where="routed_experts")
            if message.HasField("routed_experts")
            else None
        ),
    )


def spans_to_proto(spans: Sequence[PolicySpan]) -> list[rollout_pb2.PolicySpan]:
    """Return the protobuf form of policy spans."""
    return [rollout_pb2.PolicySpan(lineage=s.lineage, version=s.version, start=s.start, end=s.end) for s in spans]


def _corrupt(where: str, value: object, problem: str) -> CorruptObjectError:
    """Return the error that the field `where` of a rollout has this value, which is wrong as `problem` says."""
    return CorruptObjectError(
        f"rollout field {where} = {value} {problem}",
        reason="ROLLOUT_INVALID",
        remedy="drop the attempt and play it again; if it repeats, the env-server or engine that made it has a bug",
        metadata={"field": where},
    )
