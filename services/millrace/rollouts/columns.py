"""Columns of a batch as few bytes: what every token id has in its low bytes, log-probs of sampled tokens only, runs.

All of it is lossless, vectorised, and bounded by the number of tokens that the caller knows: bytes that say anything
else raise `CorruptObjectError`. Decoded columns cannot be written.
"""

import numpy as np

from millrace.errors import CorruptObjectError
from millrace.internal.v1 import batch_pb2
from millrace.rollouts.types import Float32Array, Int32Array, Uint8Array

_RUN_BYTES, _VALUE_BYTES = 8, 4


def ids_to_bytes(token_ids: Int32Array) -> tuple[bytes, bytes]:
    """The two low bytes of token ids int32 [T], none negative, and the bytes above in as few as the largest needs."""
    largest = int(token_ids.max()) if token_ids.size else 0
    low = token_ids.astype("<u2")  # keeps the low bytes
    if largest < 1 << 16:
        return low.tobytes(), b""
    return low.tobytes(), (token_ids >> 16).astype("u1" if largest < 1 << 24 else "<u2").tobytes()


def ids_from_bytes(low: bytes, high: bytes, num_tokens: int, where: str) -> Int32Array:
    """Token ids int32 [num_tokens]."""
    if len(low) != 2 * num_tokens or len(high) not in (0, num_tokens, 2 * num_tokens):
        raise _corrupt(where, f"{len(low)} and {len(high)} bytes", f"are not the parts of {num_tokens} ids")
    ids = np.frombuffer(low, "<u2").astype(np.int32)
    if high:
        ids |= np.frombuffer(high, "u1" if len(high) == num_tokens else "<u2").astype(np.int32) << 16
    return _fixed(ids)


def mask_to_bytes(mask: Uint8Array) -> bytes:
    """A mask of zeros and ones uint8 [T], eight tokens to a byte."""
    return np.packbits(mask).tobytes()


def mask_from_bytes(data: bytes, num_tokens: int, where: str) -> Uint8Array:
    """A mask uint8 [num_tokens]."""
    if len(data) != -(-num_tokens // 8):
        raise _corrupt(where, f"{len(data)} bytes", f"are not the bits of {num_tokens} tokens")
    return _fixed(np.unpackbits(np.frombuffer(data, np.uint8), count=num_tokens))


def masked_to_bytes(column: Float32Array, mask: Uint8Array) -> bytes:
    """The values float32 [T] where the mask is 1; the others are 0."""
    return column[mask.view(np.bool_)].astype("<f4", copy=False).tobytes()


def masked_from_bytes(data: bytes, mask: Uint8Array, where: str) -> Float32Array:
    """A column float32 [T] with values where the mask is 1."""
    if len(data) != _VALUE_BYTES * np.count_nonzero(mask):
        raise _corrupt(where, f"{len(data)} bytes", f"are not the values of {np.count_nonzero(mask)} sampled tokens")
    column = np.zeros(mask.size, np.float32)
    column[mask.view(np.bool_)] = np.frombuffer(data, "<f4")
    return _fixed(column)


def runs_to_proto(column: Float32Array) -> batch_pb2.RunColumn:
    """A column float32 [T], bit for bit, as runs of equal values where that is smaller."""
    bits = column.view(np.uint32)
    starts = np.flatnonzero(bits[1:] != bits[:-1])
    starts += 1
    if (starts.size + 1) * _RUN_BYTES >= column.size * _VALUE_BYTES:
        return batch_pb2.RunColumn(values=column.astype("<f4", copy=False).tobytes())
    starts = np.concatenate(([0], starts))
    lengths = np.diff(starts, append=column.size).astype("<u4")
    return batch_pb2.RunColumn(values=column[starts].astype("<f4", copy=False).tobytes(), lengths=lengths.tobytes())


def runs_from_proto(message: batch_pb2.RunColumn, num_tokens: int, where: str) -> Float32Array:
    """A column float32 [num_tokens]."""
    expected = len(message.lengths) or _VALUE_BYTES * num_tokens
    if len(message.values) != expected or expected % _VALUE_BYTES:
        raise _corrupt(where, f"{len(message.values)} and {len(message.lengths)} bytes", "are no runs of values")
    values = np.frombuffer(message.values, "<f4")
    if not message.lengths:
        return values
    lengths = np.frombuffer(message.lengths, "<u4")
    if int(lengths.sum(dtype=np.uint64)) != num_tokens:
        raise _corrupt(where, int(lengths.sum(dtype=np.uint64)), f"is not {num_tokens} tokens")
    return _fixed(np.repeat(values, lengths))


def _fixed(column: np.ndarray) -> np.ndarray:
    column.flags.writeable = False
    return column


def _corrupt(where: str, value: object, problem: str) -> CorruptObjectError:
    return CorruptObjectError(
        f"batch field {where} = {value} {problem}",
        reason="BATCH_CORRUPT",
        remedy="read the batch again from the object store; if it stays, its writer has a bug",
        metadata={"field": where},
    )
