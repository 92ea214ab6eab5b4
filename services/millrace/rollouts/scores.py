"""A teacher's log-probs of one rollout as stored bytes: what on-policy distillation adds to a rollout of the log.

They lie in an object of their own that is named by the digest of what was scored and written before the rollout is
appended. So a reader of the entry has the scores as well, and scores are never those of other tokens. Where the policy
is its own teacher, the object says which version of it that was, and which tokens it read before the sample.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np

from millrace.decoding import Fields, decode_json
from millrace.errors import CorruptObjectError
from millrace.rollouts.types import Float32Array, Rollout, Sample, Taught
from millrace.rollouts.wire import check_column, column_from_bytes, column_to_bytes

_MAGIC = b"MRSCORE2"
_HEAD_BYTES = len(_MAGIC) + hashlib.sha256().digest_size
_SIZE_BYTES = 4
_MAX_TOKEN_ID = (1 << 31) - 1
_CORRUPT = "SCORES_CORRUPT"
_REMEDY = "restore the object from a replica of the bucket, or play the task again"
_TAUGHT = "how a teacher's scores came about"


def scored_digest(rollout: Rollout) -> str:
    """Hex sha256 over what is scored: ids, masks and log-probs of every sample, each with its length, and the hint."""
    whole = hashlib.sha256()
    for sample in rollout.samples:
        whole.update(len(sample.token_ids).to_bytes(8, "little"))
        whole.update(column_to_bytes(sample.token_ids, "<i4"))
        whole.update(column_to_bytes(sample.loss_mask, "u1"))
        whole.update(column_to_bytes(sample.inference_logprobs, "<f4"))
    whole.update(rollout.demonstration.encode())
    return whole.hexdigest()


def encode_scores(
    samples: Sequence[Sample], scores: Sequence[Float32Array], taught: Sequence[Taught | None] | None = None
) -> bytes:
    """Return the object: a mark, the sha256 of what follows, the size of a JSON list, the list, then the columns.

    The list has for each sample what `taught` says, null where another model is the teacher, as it is by default. The
    columns are float32 little-endian, one after the other; the size is a uint32.
    """
    for index, (sample, column) in enumerate(zip(samples, scores, strict=True)):
        _check(sample, column, where=f"scores[{index}]")
    told = json.dumps([each and asdict(each) for each in taught or [None] * len(samples)]).encode()
    columns = b"".join(column_to_bytes(column, "<f4") for column in scores)
    body = len(told).to_bytes(_SIZE_BYTES, "little") + told + columns
    return _MAGIC + hashlib.sha256(body).digest() + body


def with_scores(rollout: Rollout, data: bytes, *, where: str) -> Rollout:
    """The rollout with the scores of an object in its samples; CorruptObjectError if they are not its own."""
    taught, values = decode_scores(data, where=where)
    if len(taught) != len(rollout.samples):
        raise _corrupt(where, _TAUGHT, f"is no list of {len(rollout.samples)}")
    if len(values) != rollout.num_tokens:
        raise _corrupt(where, len(values), f"scores, but the rollout has {rollout.num_tokens} tokens")
    samples, start = [], 0
    for sample, told in zip(rollout.samples, taught, strict=True):
        column = values[start : start + sample.num_tokens]
        _check(sample, column, where=where)
        samples.append(replace(sample, teacher_logprobs=column, taught=told))
        start += sample.num_tokens
    return replace(rollout, samples=tuple(samples))


def decode_scores(data: bytes, *, where: str) -> tuple[list[Taught | None], Float32Array]:
    """Return what an object says of each sample, and its columns, float32 [tokens]; CorruptObjectError if damaged."""
    head, body = data[:_HEAD_BYTES], data[_HEAD_BYTES:]
    if head != _MAGIC + hashlib.sha256(body).digest():
        raise _corrupt(where, f"{len(data)} bytes", "is damaged: its sha256 does not hold")
    begin = _SIZE_BYTES + int.from_bytes(body[:_SIZE_BYTES], "little")
    listed = decode_json(body[_SIZE_BYTES:begin], what=_TAUGHT, reason=_CORRUPT, remedy=_REMEDY)
    if not isinstance(listed, list):
        raise _corrupt(where, _TAUGHT, "is no list")
    try:
        taught = [None if each is None else _taught(Fields(each, what=_TAUGHT)) for each in listed]
    except ValueError as error:
        raise _corrupt(where, _TAUGHT, f"cannot be read: {error}") from error
    return taught, column_from_bytes(body[begin:], "<f4", where)


def _taught(told: Fields) -> Taught:
    return Taught(
        lineage=told.integer("lineage"),
        version=told.integer("version"),
        hint_ids=told.integers("hint_ids", largest=_MAX_TOKEN_ID),
        skipped=told.integer("skipped", most=1),
    )


def _check(sample: Sample, column: np.ndarray, *, where: str) -> None:
    check_column(column, np.float32, sample.num_tokens, where)
    if not bool(np.isfinite(column).all()):
        raise _corrupt(where, "nan or inf", "is not finite")
    if bool(np.any(column[sample.loss_mask == 0] != 0)):
        raise _corrupt(where, "non-zero", "must be 0 where loss_mask is 0")


def _corrupt(where: str, value: object, problem: str) -> CorruptObjectError:
    return CorruptObjectError(
        f"teacher scores {where} = {value} {problem}",
        reason=_CORRUPT,
        remedy=_REMEDY,
        metadata={"object": where},
    )
