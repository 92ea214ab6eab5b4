"""A teacher's log-probs of one rollout as stored bytes: what on-policy distillation adds to a rollout of the log.

They lie in an object of their own that is named by the digest of the rollout's samples and written before the rollout
is appended. So a reader of the entry has the scores as well, and scores are never those of other tokens.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from millrace.errors import CorruptObjectError
from millrace.rollouts.types import Float32Array, Rollout, Sample
from millrace.rollouts.wire import check_column, column_from_bytes, column_to_bytes

_MAGIC = b"MRSCORE1"
_HEAD_BYTES = len(_MAGIC) + hashlib.sha256().digest_size


def scored_digest(samples: Sequence[Sample]) -> str:
    """Hex sha256 over what was sampled: ids, masks and log-probs of every sample, each with its length."""
    whole = hashlib.sha256()
    for sample in samples:
        whole.update(len(sample.token_ids).to_bytes(8, "little"))
        whole.update(column_to_bytes(sample.token_ids, "<i4"))
        whole.update(column_to_bytes(sample.loss_mask, "u1"))
        whole.update(column_to_bytes(sample.inference_logprobs, "<f4"))
    return whole.hexdigest()


def encode_scores(samples: Sequence[Sample], scores: Sequence[Float32Array]) -> bytes:
    """The object: a mark, the sha256 of what follows, then the columns one after the other, float32 little-endian."""
    for index, (sample, column) in enumerate(zip(samples, scores, strict=True)):
        _check(sample, column, where=f"scores[{index}]")
    body = b"".join(column_to_bytes(column, "<f4") for column in scores)
    return _MAGIC + hashlib.sha256(body).digest() + body


def with_scores(rollout: Rollout, data: bytes, *, where: str) -> Rollout:
    """The rollout with the scores of an object in its samples; CorruptObjectError if they are not its own."""
    head, body = data[:_HEAD_BYTES], data[_HEAD_BYTES:]
    if head != _MAGIC + hashlib.sha256(body).digest():
        raise _corrupt(where, f"{len(data)} bytes", "is damaged: its sha256 does not hold")
    values = column_from_bytes(body, "<f4", where)
    if len(values) != rollout.num_tokens:
        raise _corrupt(where, len(values), f"scores, but the rollout has {rollout.num_tokens} tokens")
    samples, start = [], 0
    for sample in rollout.samples:
        column = values[start : start + sample.num_tokens]
        _check(sample, column, where=where)
        samples.append(replace(sample, teacher_logprobs=column))
        start += sample.num_tokens
    return replace(rollout, samples=tuple(samples))


def _check(sample: Sample, column: np.ndarray, *, where: str) -> None:
    check_column(column, np.float32, sample.num_tokens, where)
    if not bool(np.isfinite(column).all()):
        raise _corrupt(where, "nan or inf", "is not finite")
    if bool(np.any(column[sample.loss_mask == 0] != 0)):
        raise _corrupt(where, "non-zero", "must be 0 where loss_mask is 0")


def _corrupt(where: str, value: object, problem: str) -> CorruptObjectError:
    return CorruptObjectError(
        f"teacher scores {where} = {value} {problem}",
        reason="SCORES_CORRUPT",
        remedy="restore the object from a replica of the bucket, or play the task again",
        metadata={"object": where},
    )
