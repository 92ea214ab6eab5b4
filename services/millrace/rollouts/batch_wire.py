"""Batches on the wire: samples ↔ chunks of little-endian columns plus a table of where each sample lies.

A chunk holds whole samples, about 2 MiB of them (Redis and the network are fastest with 1–4 MiB entries), so a rank
that needs some samples fetches only the chunks that hold them. Columns decode to numpy views without a copy.
Nothing is trusted: a chunk must have the hash that the header names, and the table must tile its columns exactly.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from millrace.decoding import decode_message
from millrace.errors import CorruptObjectError, InvalidStateError
from millrace.internal.v1 import batch_pb2
from millrace.rollouts.types import TrainSample
from millrace.rollouts.wire import (
    check_column,
    check_masked,
    column_from_bytes,
    column_to_bytes,
    truncation_from_wire,
    truncation_to_wire,
)

TARGET_CHUNK_BYTES = 2 << 20
MAX_SAMPLE_TOKENS = 1 << 26  # 0.9 GiB of columns: below protobuf's limit of 2 GiB per message
MAX_HEADER_BYTES = 64 << 20
"""Largest header that is read: a sample takes about 50 bytes of it."""
_REASON = "BATCH_CORRUPT"
_REMEDY = "read the batch again from the object store; if it stays, its writer has a bug"
_BYTES_PER_TOKEN = 4 + 1 + 4 + 4
_WEIGHT_BYTES_PER_TOKEN = 4


def pack_batch(
    header: batch_pb2.BatchHeader, samples: Sequence[TrainSample], *, target_chunk_bytes: int = TARGET_CHUNK_BYTES
) -> list[bytes]:
    """Pack samples in their order into chunks, and write table, chunk sizes, hashes and token counts into `header`.

    The object keys of the chunks come with the commit. `CorruptObjectError` names the sample and column that is
    malformed. In a chunk where some samples carry weights and others do not, the others get their defaults written out
    (rl 1 where the mask is 1, ce 0); the meaning stays, the `None` does not.
    """
    for index, sample in enumerate(samples):
        _check_sample(sample, where=f"samples[{index}]")
    envs = {env: index for index, env in enumerate(dict.fromkeys(sample.env for sample in samples))}
    del header.envs[:], header.samples[:], header.chunks[:]
    header.envs.extend(envs)
    chunks: list[bytes] = []
    for group in _split(samples, target_chunk_bytes):
        offset = 0
        for sample in group:
            header.samples.append(_entry(sample, chunk=len(chunks), offset=offset, env=envs[sample.env]))
            offset += sample.num_tokens
        data = _encode_chunk(group)
        header.chunks.add(sha256=hashlib.sha256(data).digest(), size_bytes=len(data), num_tokens=offset)
        chunks.append(data)
    header.num_tokens = sum(sample.num_tokens for sample in samples)
    header.num_loss_tokens = sum(sample.num_loss_tokens for sample in samples)
    return chunks


def decode_header(data: bytes) -> batch_pb2.BatchHeader:
    """Parse a header and check its sample table; `CorruptObjectError` if either is wrong."""
    what = f"a batch header of {len(data)} bytes"
    header = decode_message(
        batch_pb2.BatchHeader, data, what=what, max_bytes=MAX_HEADER_BYTES, reason=_REASON, remedy=_REMEDY
    )
    check_header(header)
    return header


def check_header(header: batch_pb2.BatchHeader) -> None:
    """Raise `CorruptObjectError` unless the samples tile the chunks exactly and the counts add up."""
    is_known = header.kind != batch_pb2.BATCH_KIND_UNSPECIFIED and header.kind in batch_pb2.BatchKind.values()
    if not is_known or not header.run_uid:
        raise _corrupt("kind, run_uid", (header.kind, header.run_uid), "must be set, to a kind that is known")
    filled = [0] * len(header.chunks)
    last_chunk = 0
    for index, entry in enumerate(header.samples):
        where = f"samples[{index}]"
        if not last_chunk <= entry.chunk < len(header.chunks):
            raise _corrupt(f"{where}.chunk", entry.chunk, f"is not ascending below {len(header.chunks)}")
        if entry.offset != filled[entry.chunk] or entry.length < 1:
            raise _corrupt(
                f"{where}.offset", entry.offset, f"must be {filled[entry.chunk]}, with a length of 1 or more"
            )
        if entry.env >= len(header.envs):
            raise _corrupt(f"{where}.env", entry.env, f"is not below {len(header.envs)}")
        if not all(map(math.isfinite, (entry.reward, entry.temperature, entry.reference_kl))):
            raise _corrupt(f"{where}.reward", (entry.reward, entry.temperature, entry.reference_kl), "is not finite")
        truncation_from_wire(entry)
        if entry.min_policy_version > entry.max_policy_version:
            raise _corrupt(f"{where}.min_policy_version", entry.min_policy_version, "is above the newest version")
        if entry.num_sampled_tokens > entry.length:
            raise _corrupt(f"{where}.num_sampled_tokens", entry.num_sampled_tokens, f"is above {entry.length}")
        mean = entry.mean_policy_version if entry.HasField("mean_policy_version") else entry.min_policy_version
        if not entry.min_policy_version <= mean <= entry.max_policy_version:
            raise _corrupt(f"{where}.mean_policy_version", mean, "is not between the oldest and the newest version")
        filled[entry.chunk] += entry.length
        last_chunk = entry.chunk
    for index, (chunk, tokens) in enumerate(zip(header.chunks, filled, strict=True)):
        if chunk.num_tokens != tokens:
            raise _corrupt(f"chunks[{index}].num_tokens", chunk.num_tokens, f"but its samples have {tokens}")
        if len(chunk.sha256) != 32:
            raise _corrupt(f"chunks[{index}].sha256", chunk.sha256.hex(), "is not 32 bytes")
    if header.num_tokens != sum(filled):
        raise _corrupt("num_tokens", header.num_tokens, f"but the samples have {sum(filled)}")


def chunks_for(header: batch_pb2.BatchHeader, only: Sequence[int]) -> list[int]:
    """The chunks that hold the samples with these indices, ascending."""
    return sorted({header.samples[index].chunk for index in only})


def verify_chunk(header: batch_pb2.BatchHeader, index: int, data: bytes) -> None:
    """Raise `CorruptObjectError` unless `data` has the size and sha256 that the header names for chunk `index`."""
    ref = header.chunks[index]
    if len(data) != ref.size_bytes or hashlib.sha256(data).digest() != ref.sha256:
        raise _corrupt(f"chunks[{index}] of step {header.step}", f"{len(data)} bytes", "has not the header's sha256")


def unpack_batch(
    header: batch_pb2.BatchHeader, chunks: Mapping[int, bytes], *, only: Sequence[int] | None = None
) -> list[TrainSample]:
    """The samples of a batch (or those with the indices `only`, in that order), as read-only views of the chunks."""
    check_header(header)
    indices = range(len(header.samples)) if only is None else only
    columns: dict[int, _Columns] = {}
    samples = []
    for index in indices:
        number = header.samples[index].chunk
        if number not in columns:
            if number not in chunks:
                raise InvalidStateError(
                    f"chunk {number} of step {header.step} is needed for sample {index} and was not given",
                    reason="CHUNK_MISSING",
                    remedy="fetch the chunks that chunks_for() names",
                )
            verify_chunk(header, number, chunks[number])
            columns[number] = decode_chunk(chunks[number], header.chunks[number].num_tokens, f"chunks[{number}]")
        samples.append(columns[number].sample(header, index))
    return samples


@dataclass(frozen=True, slots=True, kw_only=True)
class _Columns:
    """The decoded columns of one chunk."""

    token_ids: np.ndarray
    loss_mask: np.ndarray
    inference_logprobs: np.ndarray
    advantages: np.ndarray
    rl_weights: np.ndarray | None
    ce_weights: np.ndarray | None

    def sample(self, header: batch_pb2.BatchHeader, index: int) -> TrainSample:
        entry = header.samples[index]
        part = slice(entry.offset, entry.offset + entry.length)
        return TrainSample(
            token_ids=self.token_ids[part],
            loss_mask=self.loss_mask[part],
            inference_logprobs=self.inference_logprobs[part],
            advantages=self.advantages[part],
            rl_weights=None if self.rl_weights is None else self.rl_weights[part],
            ce_weights=None if self.ce_weights is None else self.ce_weights[part],
            ordinal=entry.ordinal,
            member=entry.member,
            attempt=entry.attempt,
            env=header.envs[entry.env],
            reward=entry.reward,
            temperature=entry.temperature,
            truncation=truncation_from_wire(entry),
            reference_kl=entry.reference_kl,
            min_version=entry.min_policy_version,
            max_version=entry.max_policy_version,
            lineage=entry.lineage,
            mean_version=entry.mean_policy_version if entry.HasField("mean_policy_version") else None,
        )


def _split(samples: Sequence[TrainSample], target_bytes: int) -> Iterator[list[TrainSample]]:
    """Consecutive samples of about `target_bytes`; a larger sample gets a chunk of its own."""
    group: list[TrainSample] = []
    size = 0
    for sample in samples:
        weights = (sample.rl_weights is not None) + (sample.ce_weights is not None)
        sample_bytes = sample.num_tokens * (_BYTES_PER_TOKEN + weights * _WEIGHT_BYTES_PER_TOKEN)
        if group and size + sample_bytes > target_bytes:
            yield group
            group, size = [], 0
        group.append(sample)
        size += sample_bytes
    if group:
        yield group


def _entry(sample: TrainSample, *, chunk: int, offset: int, env: int) -> batch_pb2.SampleEntry:
    return batch_pb2.SampleEntry(
        chunk=chunk,
        offset=offset,
        length=sample.num_tokens,
        ordinal=sample.ordinal,
        member=sample.member,
        attempt=sample.attempt,
        env=env,
        reward=sample.reward,
        min_policy_version=sample.min_version,
        max_policy_version=sample.max_version,
        lineage=sample.lineage,
        temperature=sample.temperature,
        truncation=truncation_to_wire(sample.truncation),
        reference_kl=sample.reference_kl,
        num_sampled_tokens=sample.num_loss_tokens,
        mean_policy_version=sample.mean_version,
    )


def _encode_chunk(group: Sequence[TrainSample]) -> bytes:
    rl = ce = b""
    if any(sample.rl_weights is not None for sample in group):
        rl = _join([s.loss_mask if s.rl_weights is None else s.rl_weights for s in group], "<f4")
    if any(sample.ce_weights is not None for sample in group):
        zeros = [np.zeros(s.num_tokens, np.float32) if s.ce_weights is None else s.ce_weights for s in group]
        ce = _join(zeros, "<f4")
    chunk = batch_pb2.BatchChunk(
        token_ids=_join([sample.token_ids for sample in group], "<i4"),
        loss_mask=_join([sample.loss_mask for sample in group], "u1"),
        inference_logprobs=_join([sample.inference_logprobs for sample in group], "<f4"),
        advantages=_join([sample.advantages for sample in group], "<f4"),
        rl_weights=rl,
        ce_weights=ce,
    )
    return chunk.SerializeToString(deterministic=True)


def _join(columns: Sequence[np.ndarray], dtype: str) -> bytes:
    return column_to_bytes(np.concatenate(columns), dtype)


def decode_chunk(data: bytes, num_tokens: int, where: str) -> _Columns:
    """Decode the columns of one chunk; raise CorruptObjectError if they are not `num_tokens` long."""
    chunk = decode_message(
        batch_pb2.BatchChunk, data, what=f"batch {where} of {len(data)} bytes", reason=_REASON, remedy=_REMEDY
    )

    def column(name: str, dtype: str, kind: type[np.generic]) -> np.ndarray:
        values = column_from_bytes(getattr(chunk, name), dtype, f"{where}.{name}")
        check_column(values, kind, num_tokens, f"{where}.{name}")
        return values

    columns = _Columns(
        token_ids=column("token_ids", "<i4", np.int32),
        loss_mask=column("loss_mask", "u1", np.uint8),
        inference_logprobs=column("inference_logprobs", "<f4", np.float32),
        advantages=column("advantages", "<f4", np.float32),
        rl_weights=column("rl_weights", "<f4", np.float32) if chunk.rl_weights else None,
        ce_weights=column("ce_weights", "<f4", np.float32) if chunk.ce_weights else None,
    )
    check_masked(columns.loss_mask, columns.inference_logprobs, where=where)
    _check_values(columns.token_ids, columns.advantages, columns.rl_weights, columns.ce_weights, where=where)
    return columns


def _check_sample(sample: TrainSample, *, where: str) -> None:
    length = sample.num_tokens
    if not 1 <= length <= MAX_SAMPLE_TOKENS:
        raise _corrupt(f"{where}.token_ids", length, f"is not 1 to {MAX_SAMPLE_TOKENS} tokens")
    check_column(sample.token_ids, np.int32, length, f"{where}.token_ids")
    check_column(sample.loss_mask, np.uint8, length, f"{where}.loss_mask")
    for name in ("inference_logprobs", "advantages", "rl_weights", "ce_weights"):
        values = getattr(sample, name)
        if values is not None:
            check_column(values, np.float32, length, f"{where}.{name}")
    check_masked(sample.loss_mask, sample.inference_logprobs, where=where)
    _check_values(sample.token_ids, sample.advantages, sample.rl_weights, sample.ce_weights, where=where)
    if not (math.isfinite(sample.reward) and math.isfinite(sample.temperature)):
        raise _corrupt(f"{where}.reward", (sample.reward, sample.temperature), "is not finite")
    if not 0 <= sample.min_version <= sample.max_version:
        raise _corrupt(f"{where}.min_version", sample.min_version, f"is not in 0 to {sample.max_version}")
    mean = sample.min_version if sample.mean_version is None else sample.mean_version
    if not sample.min_version <= mean <= sample.max_version:
        raise _corrupt(f"{where}.mean_version", mean, "is not between the oldest and the newest version")


def _check_values(
    token_ids: np.ndarray,
    advantages: np.ndarray,
    rl_weights: np.ndarray | None,
    ce_weights: np.ndarray | None,
    *,
    where: str,
) -> None:
    if token_ids.size and int(token_ids.min()) < 0:
        raise _corrupt(f"{where}.token_ids", int(token_ids.min()), "is negative")
    for name, values in (("advantages", advantages), ("rl_weights", rl_weights), ("ce_weights", ce_weights)):
        if values is not None and not bool(np.isfinite(values).all()):
            raise _corrupt(f"{where}.{name}", "nan or inf", "is not finite")


def _corrupt(where: str, value: object, problem: str) -> CorruptObjectError:
    return CorruptObjectError(
        f"batch field {where} = {value} {problem}",
        reason=_REASON,
        remedy=_REMEDY,
        metadata={"field": where},
    )
