"""What the trainer computed of a step's sampled tokens, and a teacher's scores, as stored bytes.

The object is written beside the training and no step waits for it, so no header names it: it carries a digest of its
own and the chain hash of its batch. Which rollouts it has is a function of the header, so that every rank and a resumed
run choose alike.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
from numpy.typing import NDArray

from millrace.decoding import Fields, decode_json, decode_message
from millrace.errors import CapacityError, CorruptObjectError
from millrace.internal.v1 import token_log_pb2
from millrace.rollouts.types import Float32Array, Rollout, Sample, Taught, Uint8Array
from millrace.rollouts.wire import check_column, column_from_bytes, column_to_bytes

Member = tuple[int, int, int]
"""Ordinal, member and attempt: what tells rollouts of a run apart."""

MAX_TOKEN_LOG_BYTES = 256 << 20
"""Of one step: some 40 million sampled tokens."""
_MAGIC = b"MRTOKLG1"
_HEAD_BYTES = len(_MAGIC) + hashlib.sha256().digest_size
_HASH_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedSample:
    """What the trainer computed for the sampled tokens of one sample.

    `mask` uint8 [length] is 1 for each token that has a value in `logprobs` and `entropies`, which have no others. A
    log-prob of -inf is that of a token which the truncation leaves out under the trainer's policy. `minibatch` is the
    number of optimizer steps that the batch had taken before. `sample` is the index in the batch.
    """

    sample: int
    ordinal: int
    member: int
    attempt: int
    minibatch: int
    mask: Uint8Array
    logprobs: Float32Array
    entropies: NDArray[np.float16]

    @property
    def key(self) -> Member:
        """Return ordinal, member and attempt of the sample's rollout, which identify the rollout in the run."""
        return self.ordinal, self.member, self.attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLog:
    """The logged samples of one step, in the order of the batch.

    `num_rollouts` counts all rollouts that the batch has samples of, and `share` (0 to 1) says how many of them are
    logged.
    """

    run_uid: str
    step: int
    lineage: int
    chain_hash: bytes
    num_rollouts: int
    share: float
    samples: tuple[LoggedSample, ...]


def chosen_rollouts(members: Iterable[Member], share: float) -> frozenset[Member]:
    """Return the rollouts of a batch whose tokens are logged: `share` (0 to 1) of the distinct `members`, rounded up.

    They are chosen by a hash of their keys, so that every rank and every replay chooses the same.
    """
    distinct = set(members)
    # The product may be a rounding above a whole number, which must not choose one more.
    count = math.ceil(share * len(distinct) - 1e-9)
    return frozenset(sorted(distinct, key=lambda member: (_place(member), member))[:count])


def _place(member: Member) -> bytes:
    """Return a rollout's place in the order in which rollouts are chosen: the sha256 of its key."""
    return hashlib.sha256(b"".join(number.to_bytes(8, "little") for number in member)).digest()


def merged(parts: Sequence[TokenLog]) -> TokenLog:
    """Return one log of a step from the parts that its ranks have, with all their samples in the order of the batch."""
    samples = sorted((each for part in parts for each in part.samples), key=lambda each: each.sample)
    return replace(parts[0], samples=tuple(samples))


def encode_token_log(log: TokenLog) -> bytes:
    """Return the bytes that the store keeps of a log: the format's mark, the sha256 of the rest, a `TokenLog` message.

    CapacityError if they are more than `decode_token_log` reads.
    """
    body = token_log_pb2.TokenLog(
        run_uid=log.run_uid,
        step=log.step,
        lineage=log.lineage,
        chain_hash=log.chain_hash,
        num_rollouts=log.num_rollouts,
        share=log.share,
        entries=[
            token_log_pb2.TokenLogEntry(
                sample=each.sample,
                ordinal=each.ordinal,
                member=each.member,
                attempt=each.attempt,
                length=len(each.mask),
                minibatch=each.minibatch,
            )
            for each in log.samples
        ],
        # Each sample's mask is padded to whole bytes; the two columns below are joined without padding.
        mask=b"".join(np.packbits(each.mask).tobytes() for each in log.samples),
        logprobs=b"".join(column_to_bytes(each.logprobs, "<f4") for each in log.samples),
        entropies=b"".join(column_to_bytes(each.entropies, "<f2") for each in log.samples),
    ).SerializeToString(deterministic=True)
    if len(body) + _HEAD_BYTES > MAX_TOKEN_LOG_BYTES:
        raise CapacityError(
            f"the log-probs of batch {log.step} have {len(body)} bytes, and at most {MAX_TOKEN_LOG_BYTES} are stored",
            reason="TOKEN_LOG_TOO_LARGE",
            remedy=f"lower trainer.token_log.share, which is {log.share:g}",
        )
    return _MAGIC + hashlib.sha256(body).digest() + body


def decode_token_log(data: bytes, *, where: str) -> TokenLog:
    """Decode an object of the store into the token log of a step.

    CorruptObjectError, naming the object by `where`, if it is damaged or is no token log.
    """
    head, body = data[:_HEAD_BYTES], data[_HEAD_BYTES:]
    if head != _MAGIC + hashlib.sha256(body).digest():
        raise _corrupt(where, f"{len(data)} bytes", "have not the sha256 that they begin with")
    message = decode_message(
        token_log_pb2.TokenLog,
        body,
        what=f"token log {where}",
        reason=_REASON,
        remedy=_REMEDY,
        max_bytes=MAX_TOKEN_LOG_BYTES,
    )
    if len(message.chain_hash) != _HASH_BYTES or not message.run_uid:
        raise _corrupt(where, message.chain_hash.hex(), "is no chain hash, or the run is not named")
    if not 0 <= message.share <= 1:
        raise _corrupt(where, message.share, "is no share")
    return TokenLog(
        run_uid=message.run_uid,
        step=message.step,
        lineage=message.lineage,
        chain_hash=message.chain_hash,
        num_rollouts=message.num_rollouts,
        share=message.share,
        samples=_samples(message, where),
    )


def _samples(message: token_log_pb2.TokenLog, where: str) -> tuple[LoggedSample, ...]:
    """Return the samples of a message; CorruptObjectError, naming `where`, unless they fill its columns exactly."""
    if len(message.logprobs) != 2 * len(message.entropies) or len(message.entropies) % 2:
        raise _corrupt(where, (len(message.logprobs), len(message.entropies)), "bytes are not columns of one length")
    logprobs = column_from_bytes(message.logprobs, "<f4", where)
    entropies = column_from_bytes(message.entropies, "<f2", where)
    bits = np.frombuffer(message.mask, np.uint8)
    samples, at, at_byte, last = list[LoggedSample](), 0, 0, -1
    for entry in message.entries:
        # Each sample's mask begins at a byte of its own.
        num_bytes = -(-entry.length // 8)
        own = bits[at_byte : at_byte + num_bytes]
        if entry.length < 1 or len(own) != num_bytes or entry.sample <= last:
            raise _corrupt(where, entry.length, f"tokens of sample {entry.sample} are not there, or in another place")
        mask = np.unpackbits(own)
        # Padding bits must be 0: otherwise two different logs would have the same meaning.
        if mask[entry.length :].any():
            raise _corrupt(where, entry.length, f"tokens of sample {entry.sample} are followed by others")
        end = at + int(np.count_nonzero(mask))
        samples.append(
            LoggedSample(
                sample=entry.sample,
                ordinal=entry.ordinal,
                member=entry.member,
                attempt=entry.attempt,
                minibatch=entry.minibatch,
                mask=mask[: entry.length],
                logprobs=logprobs[at:end],
                entropies=entropies[at:end],
            )
        )
        at, at_byte, last = end, at_byte + num_bytes, entry.sample
    if (len(logprobs), len(bits)) != (at, at_byte):
        raise _corrupt(where, len(logprobs), f"values, but its samples have {at}")
    return tuple(samples)


def samples_by_part(log: TokenLog, rollout: Rollout) -> list[LoggedSample | None]:
    """Return, for each sample of a rollout, what the log has of it; None for one without a sample in the batch.

    A batch has a rollout's samples in their order, each possibly cut, without those of which nothing sampled is left
    then. So they are matched by their masks.
    """
    key = (rollout.ordinal, rollout.member, rollout.attempt)
    waiting: Sequence[LoggedSample] = [each for each in log.samples if each.key == key]
    found: list[LoggedSample | None] = []
    for sample in rollout.samples:
        first = waiting[0] if waiting else None
        # Nothing precedes the first token, so that it never has a log-prob.
        is_it = first is not None and np.array_equal(first.mask[1:], sample.loss_mask[1 : len(first.mask)] != 0)
        found.append(first if is_it else None)
        waiting = waiting[1:] if is_it else waiting
    return found


_REASON = "TOKEN_LOG_CORRUPT"
_REMEDY = "restore the object from a replica of the bucket; training goes on without it"


def _corrupt(where: str, value: object, problem: str) -> CorruptObjectError:
    """Return the error that the token log `where` has this value, which is wrong as `problem` says."""
    return CorruptObjectError(
        f"token log {where}: {value} {problem}", reason=_REASON, remedy=_REMEDY, metadata={"object": where}
    )


# A teacher's log-probs of one rollout as stored bytes: what on-policy distillation adds to a rollout of the log.
#
# They are in an object of their own that is named by the digest of what was scored and written before the rollout is
# appended. So a reader of the entry has the scores as well, and scores are never those of other tokens. Where the
# policy is its own teacher, the object says which version of it that was, and which tokens it read before the sample.

_SCORES_MAGIC = b"MRSCORE2"
_SCORES_HEAD_BYTES = len(_SCORES_MAGIC) + hashlib.sha256().digest_size
_SIZE_BYTES = 4
_MAX_TOKEN_ID = (1 << 31) - 1
_CORRUPT = "SCORES_CORRUPT"
_SCORES_REMEDY = "restore the object from a replica of the bucket, or play the task again"
_TAUGHT = "how a teacher's scores came about"


def scored_digest(rollout: Rollout) -> str:
    """Return the sha256 (hex) of what a teacher scores of a rollout: samples with their lengths, and the demonstration.

    Of each sample, token ids, mask and log-probs are covered.
    """
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
    """Encode a teacher's scores, one column float32 [T] per sample, for the store.

    The result is a mark, the sha256 of what follows, the size of a JSON list (uint32), the list, then the columns
    (float32), one after the other; numbers are little-endian. The list has for each sample what `taught` has: how the
    policy scored it as its own teacher, None (null) where another model did, which None for `taught` says of all.
    CorruptObjectError if a column does not fit its sample.
    """
    for index, (sample, column) in enumerate(zip(samples, scores, strict=True)):
        _check(sample, column, where=f"scores[{index}]")
    listed = json.dumps([each and asdict(each) for each in taught or [None] * len(samples)]).encode()
    columns = b"".join(column_to_bytes(column, "<f4") for column in scores)
    body = len(listed).to_bytes(_SIZE_BYTES, "little") + listed + columns
    return _SCORES_MAGIC + hashlib.sha256(body).digest() + body


def with_scores(rollout: Rollout, data: bytes, *, where: str) -> Rollout:
    """Return a copy of the rollout with a teacher's scores in its samples; `data` is the object that `encode_scores`
    made.

    CorruptObjectError, naming the object by `where`, if it is damaged or does not fit the rollout.
    """
    taught, values = decode_scores(data, where=where)
    if len(taught) != len(rollout.samples):
        raise _scores_corrupt(where, _TAUGHT, f"is no list of {len(rollout.samples)}")
    if len(values) != rollout.num_tokens:
        raise _scores_corrupt(where, len(values), f"scores, but the rollout has {rollout.num_tokens} tokens")
    samples, start = [], 0
    for sample, own in zip(rollout.samples, taught, strict=True):
        column = values[start : start + sample.num_tokens]
        _check(sample, column, where=where)
        samples.append(replace(sample, teacher_logprobs=column, taught=own))
        start += sample.num_tokens
    return replace(rollout, samples=tuple(samples))


def decode_scores(data: bytes, *, where: str) -> tuple[list[Taught | None], Float32Array]:
    """Decode the object of a teacher's scores: return an entry per sample, and all samples' log-probs joined, in order.

    An entry says how the policy scored the sample as its own teacher, and is None where another model was the teacher.
    The log-probs are float32 [tokens]. CorruptObjectError, naming `where`, if the object is damaged.
    """
    head, body = data[:_SCORES_HEAD_BYTES], data[_SCORES_HEAD_BYTES:]
    if head != _SCORES_MAGIC + hashlib.sha256(body).digest():
        raise _scores_corrupt(where, f"{len(data)} bytes", "is damaged: its sha256 does not hold")
    begin = _SIZE_BYTES + int.from_bytes(body[:_SIZE_BYTES], "little")
    listed = decode_json(body[_SIZE_BYTES:begin], what=_TAUGHT, reason=_CORRUPT, remedy=_SCORES_REMEDY)
    if not isinstance(listed, list):
        raise _scores_corrupt(where, _TAUGHT, "is no list")
    try:
        taught = [None if each is None else _taught(Fields(each, what=_TAUGHT)) for each in listed]
    except ValueError as error:
        raise _scores_corrupt(where, _TAUGHT, f"cannot be read: {error}") from error
    return taught, column_from_bytes(body[begin:], "<f4", where)


def _taught(entry: Fields) -> Taught:
    """Return an entry of the JSON list of an object of scores: how the policy scored a sample as its own teacher."""
    return Taught(
        lineage=entry.integer("lineage"),
        version=entry.integer("version"),
        hint_ids=entry.integers("hint_ids", largest=_MAX_TOKEN_ID),
        skipped=entry.integer("skipped", most=1),
    )


def _check(sample: Sample, column: np.ndarray, *, where: str) -> None:
    """Raise CorruptObjectError, naming `where`, unless a column of scores fits its sample.

    It must be float32 [T], finite, and 0 where the policy did not sample.
    """
    check_column(column, np.float32, sample.num_tokens, where)
    if not bool(np.isfinite(column).all()):
        raise _scores_corrupt(where, "nan or inf", "is not finite")
    if bool(np.any(column[sample.loss_mask == 0] != 0)):
        raise _scores_corrupt(where, "non-zero", "must be 0 where loss_mask is 0")


def _scores_corrupt(where: str, value: object, problem: str) -> CorruptObjectError:
    """Return the error that the teacher's scores `where` have this value, which is wrong as `problem` says."""
    return CorruptObjectError(
        f"teacher scores {where} = {value} {problem}",
        reason=_CORRUPT,
        remedy=_SCORES_REMEDY,
        metadata={"object": where},
    )
