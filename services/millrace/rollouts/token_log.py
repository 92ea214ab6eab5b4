"""What the trainer computed of the sampled tokens of a step, as stored bytes: log-probs and entropies.

The object is written beside the training and no step waits for it, so no header names it: it carries a digest of its
own and the chain hash of its batch. Which rollouts it has is a function of the header, so that every rank and a resumed
run choose alike.
"""

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from millrace.decoding import decode_message
from millrace.errors import CapacityError, CorruptObjectError
from millrace.internal.v1 import token_log_pb2
from millrace.rollouts.types import Float32Array, Rollout, Uint8Array
from millrace.rollouts.wire import column_from_bytes, column_to_bytes

Member = tuple[int, int, int]
"""Ordinal, member and attempt: what tells rollouts of a run apart."""

MAX_TOKEN_LOG_BYTES = 256 << 20
"""Of one step: some 40 million sampled tokens."""
_MAGIC = b"MRTOKLG1"
_HEAD_BYTES = len(_MAGIC) + hashlib.sha256().digest_size
_HASH_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedSample:
    """One sample; `mask` uint8 [length] has a 1 for each value of the other two columns.

    A log-prob of -inf is that of a token which the truncation leaves out under the trainer's policy. `minibatch` is the
    number of optimizer steps that the batch had taken before.
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
        """Its rollout."""
        return self.ordinal, self.member, self.attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLog:
    """Those of a step, in the order of the batch; `num_rollouts` are all that the batch has samples of."""

    run_uid: str
    step: int
    lineage: int
    chain_hash: bytes
    num_rollouts: int
    share: float
    samples: tuple[LoggedSample, ...]


def chosen_rollouts(members: Iterable[Member], share: float) -> frozenset[Member]:
    """The rollouts of a batch whose tokens are logged: a share of them, at least one, spread by a hash."""
    distinct = set(members)
    count = math.ceil(share * len(distinct) - 1e-9)
    return frozenset(sorted(distinct, key=lambda member: (_place(member), member))[:count])


def _place(member: Member) -> bytes:
    return hashlib.sha256(b"".join(number.to_bytes(8, "little") for number in member)).digest()


def merged(parts: Sequence[TokenLog]) -> TokenLog:
    """The log of a step of which every rank has a part."""
    samples = sorted((each for part in parts for each in part.samples), key=lambda each: each.sample)
    return replace(parts[0], samples=tuple(samples))


def encode_token_log(log: TokenLog) -> bytes:
    """The object: a mark, the sha256 of what follows, a `TokenLog`. CapacityError if it would be too large."""
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
    """The log in an object; `CorruptObjectError` naming `where` it lies if it is none."""
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
    """The samples, which fill the columns exactly."""
    if len(message.logprobs) != 2 * len(message.entropies) or len(message.entropies) % 2:
        raise _corrupt(where, (len(message.logprobs), len(message.entropies)), "bytes are not columns of one length")
    logprobs = column_from_bytes(message.logprobs, "<f4", where)
    entropies = column_from_bytes(message.entropies, "<f2", where)
    bits = np.frombuffer(message.mask, np.uint8)
    samples, at, at_byte, last = list[LoggedSample](), 0, 0, -1
    for entry in message.entries:
        num_bytes = -(-entry.length // 8)
        own = bits[at_byte : at_byte + num_bytes]
        if entry.length < 1 or len(own) != num_bytes or entry.sample <= last:
            raise _corrupt(where, entry.length, f"tokens of sample {entry.sample} are not there, or in another place")
        mask = np.unpackbits(own)
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
    """What was logged of each token sequence of a rollout; None of one that the batch has no sample of.

    A batch has the sequences in their order, each cut, and leaves out those of which nothing sampled is left then.
    """
    key = (rollout.ordinal, rollout.member, rollout.attempt)
    waiting: Sequence[LoggedSample] = [each for each in log.samples if each.key == key]
    found: list[LoggedSample | None] = []
    for sample in rollout.samples:
        first = waiting[0] if waiting else None
        # nothing precedes the first token, so that it never has a log-prob
        is_it = first is not None and np.array_equal(first.mask[1:], sample.loss_mask[1 : len(first.mask)] != 0)
        found.append(first if is_it else None)
        waiting = waiting[1:] if is_it else waiting
    return found


_REASON = "TOKEN_LOG_CORRUPT"
_REMEDY = "restore the object from a replica of the bucket; training goes on without it"


def _corrupt(where: str, value: object, problem: str) -> CorruptObjectError:
    return CorruptObjectError(
        f"token log {where}: {value} {problem}", reason=_REASON, remedy=_REMEDY, metadata={"object": where}
    )
