"""Batches on the wire: samples ↔ chunks of packed columns plus a table of where each sample is.

A chunk holds whole samples, about 2 MiB of them (Redis and the network are fastest with 1–4 MiB entries), so a rank
that needs some samples fetches only the chunks that hold them. Samples are views of a chunk's columns.
Nothing is trusted: a chunk must have the hash that the header names, and the table must tile its columns exactly.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from millrace.decoding import KEY_RULE, decode_message, require_key
from millrace.errors import CorruptObjectError, InvalidStateError
from millrace.internal.v1 import batch_pb2
from millrace.rollouts.routed_experts import RoutedColumn, check_experts, experts_to_proto, shape_of
from millrace.rollouts.types import Float32Array, Int32Array, TrainSample, Uint8Array
from millrace.rollouts.wire import (
    check_column,
    check_masked,
    own_sampling_from_wire,
    own_sampling_problem,
    own_sampling_to_wire,
    truncation_from_wire,
    truncation_to_wire,
)

TARGET_CHUNK_BYTES = 2 << 20
# At most 1.2 GiB of columns: below protobuf's limit of 2 GiB per message.
MAX_SAMPLE_TOKENS = 1 << 26
MAX_HEADER_BYTES = 64 << 20
"""Largest header that is read: a sample takes about 50 bytes of it."""
_REASON = "BATCH_CORRUPT"
_REMEDY = "read the batch again from the object store; if it stays, its writer has a bug"
_BYTES_PER_TOKEN = 8  # an id of three bytes, a bit of the mask, a log-prob, runs of advantages
_WEIGHT_BYTES_PER_TOKEN = 4


def pack_batch(
    header: batch_pb2.BatchHeader, samples: Sequence[TrainSample], *, target_chunk_bytes: int = TARGET_CHUNK_BYTES
) -> list[bytes]:
    """Pack samples in their order into chunks of about `target_chunk_bytes`, and return the chunks.

    Replaces in `header` the table of samples, the names of environments, the chunks' sizes and hashes, and the counts
    of tokens; the object keys of the chunks come with the commit. `CorruptObjectError` names the sample and column that
    is malformed. In a chunk where some samples carry weights and others do not, the others get their defaults written
    out (rl 1 where the mask is 1, ce 0); the meaning stays, the `None` does not.
    """
    return list(iter_chunks(header, samples, target_chunk_bytes=target_chunk_bytes))


def iter_chunks(
    header: batch_pb2.BatchHeader, samples: Sequence[TrainSample], *, target_chunk_bytes: int = TARGET_CHUNK_BYTES
) -> Iterator[bytes]:
    """Yield the encoded chunks of a batch, each of about `target_chunk_bytes`, with the samples in their order.

    The tables of `header` (samples, names of environments, chunks' sizes and hashes) are emptied, grow with each chunk,
    and are complete, with the counts of tokens, once the last chunk was taken. `CorruptObjectError` names the sample
    and column that is malformed; types and shapes of all samples are checked before the first chunk.
    """
    # All samples are checked before the first chunk is made: a caller may have uploaded chunks by the time of a later
    # one.
    for index, sample in enumerate(samples):
        _check_sample(sample, where=f"samples[{index}]")
    envs = {env: index for index, env in enumerate(dict.fromkeys(sample.env for sample in samples))}
    del header.envs[:], header.samples[:], header.chunks[:]
    header.envs.extend(envs)
    for number, group in enumerate(_split(samples, target_chunk_bytes)):
        offset = 0
        for sample in group:
            header.samples.append(_entry(sample, chunk=number, offset=offset, env=envs[sample.env]))
            offset += sample.num_tokens
        data = _encode_chunk(group, first=len(header.samples) - len(group))
        header.chunks.add(sha256=hashlib.sha256(data).digest(), size_bytes=len(data), num_tokens=offset)
        yield data
    header.num_tokens = sum(sample.num_tokens for sample in samples)
    header.num_loss_tokens = sum(sample.num_loss_tokens for sample in samples)


def decode_header(data: bytes) -> batch_pb2.BatchHeader:
    """Parse the bytes of a batch's header and return it.

    `CorruptObjectError` if they do not parse, its samples do not fill its chunks exactly, or an object key in it is no
    legal key.
    """
    what = f"a batch header of {len(data)} bytes"
    header = decode_message(
        batch_pb2.BatchHeader, data, what=what, max_bytes=MAX_HEADER_BYTES, reason=_REASON, remedy=_REMEDY
    )
    check_header(header)
    _check_keys(header)
    return header


def decode_link(data: bytes) -> batch_pb2.BatchLink:
    """Parse a batch's header as a link of its chain, and return that: without samples and resolutions.

    `CorruptObjectError` if it is no header, or names what is no key. The chain hash covers what is left out.
    """
    what = f"a batch header of {len(data)} bytes"
    link = decode_message(
        batch_pb2.BatchLink, data, what=what, max_bytes=MAX_HEADER_BYTES, reason=_REASON, remedy=_REMEDY
    )
    _check_kind(link)
    _check_keys(link)
    return link


def closes_run(header: batch_pb2.BatchHeader | batch_pb2.BatchLink) -> bool:
    """Return whether a header is a closing header, which records how the run ended and trains nothing."""
    return header.kind == batch_pb2.BATCH_KIND_CLOSE


def check_header(header: batch_pb2.BatchHeader) -> None:
    """Raise `CorruptObjectError` unless a header's samples fill its chunks exactly and its counts of tokens add up.

    It must also have a run's uid, a kind that is known, and a sha256 of 32 bytes for each chunk. Data is not read.
    """
    _check_kind(header)
    filled = _fill_chunks(header)
    for index, (chunk, tokens) in enumerate(zip(header.chunks, filled, strict=True)):
        if chunk.num_tokens != tokens:
            raise _corrupt(f"chunks[{index}].num_tokens", chunk.num_tokens, f"but its samples have {tokens}")
        if len(chunk.sha256) != 32:
            raise _corrupt(f"chunks[{index}].sha256", chunk.sha256.hex(), "is not 32 bytes")
    if header.num_tokens != sum(filled):
        raise _corrupt("num_tokens", header.num_tokens, f"but the samples have {sum(filled)}")


def _check_kind(header: batch_pb2.BatchHeader | batch_pb2.BatchLink) -> None:
    """Raise `CorruptObjectError` unless a header has a run's uid and a kind that is known."""
    is_known = header.kind != batch_pb2.BATCH_KIND_UNSPECIFIED and header.kind in batch_pb2.BatchKind.values()
    if not is_known or not header.run_uid:
        raise _corrupt("kind, run_uid", (header.kind, header.run_uid), "must be set, to a kind that is known")


def _fill_chunks(header: batch_pb2.BatchHeader) -> list[int]:
    """Return the number of tokens that the samples of a header have in each chunk.

    `CorruptObjectError` for the first sample that is wrong. Samples must fill each chunk from 0 on, in order: then no
    token is missing, shared or read twice.
    """
    filled = [0] * len(header.chunks)
    # Looked up once: the loop runs over every sample in each process that reads a header.
    num_chunks, num_envs, is_finite, last_chunk = len(filled), len(header.envs), math.isfinite, 0
    for index, entry in enumerate(header.samples):
        chunk, offset, length = entry.chunk, entry.offset, entry.length
        oldest, newest = entry.min_policy_version, entry.max_policy_version
        # The mean is optional: 0 is read where there is none.
        mean = entry.mean_policy_version
        if not (
            last_chunk <= chunk < num_chunks
            and offset == filled[chunk]
            and length >= 1
            and entry.env < num_envs
            and is_finite(entry.reward)
            and is_finite(entry.temperature)
            and is_finite(entry.reference_kl)
            and oldest <= newest
            and (oldest <= mean <= newest or not entry.HasField("mean_policy_version"))
            and entry.num_sampled_tokens <= length
        ):
            raise _wrong_sample(header, index, filled, last_chunk)
        if entry.own_sampling or entry.HasField("truncation"):
            _check_sampling(entry, where=f"samples[{index}]")
        filled[chunk] = offset + length
        last_chunk = chunk
    return filled


def _wrong_sample(
    header: batch_pb2.BatchHeader, index: int, filled: Sequence[int], last_chunk: int
) -> CorruptObjectError:
    """Return the error that says what is wrong with sample `index` of a header.

    `filled` are the tokens that the samples before it have in each chunk, `last_chunk` is the chunk of the one before.
    """
    entry, where = header.samples[index], f"samples[{index}]"
    if not last_chunk <= entry.chunk < len(filled):
        return _corrupt(f"{where}.chunk", entry.chunk, f"is not ascending below {len(filled)}")
    if entry.offset != filled[entry.chunk] or entry.length < 1:
        problem = f"must be {filled[entry.chunk]}, with a length of 1 or more"
        return _corrupt(f"{where}.offset", entry.offset, problem)
    if entry.env >= len(header.envs):
        return _corrupt(f"{where}.env", entry.env, f"is not below {len(header.envs)}")
    numbers = entry.reward, entry.temperature, entry.reference_kl
    if not all(map(math.isfinite, numbers)):
        return _corrupt(f"{where}.reward", numbers, "is not finite")
    if entry.min_policy_version > entry.max_policy_version:
        return _corrupt(f"{where}.min_policy_version", entry.min_policy_version, "is above the newest version")
    if entry.num_sampled_tokens > entry.length:
        return _corrupt(f"{where}.num_sampled_tokens", entry.num_sampled_tokens, f"is above {entry.length}")
    problem = "is not between the oldest and the newest version"
    return _corrupt(f"{where}.mean_policy_version", entry.mean_policy_version, problem)


def _check_sampling(entry: batch_pb2.SampleEntry, *, where: str) -> None:
    """Raise `CorruptObjectError` if parameters that a sample's tokens were sampled with are out of range.

    Checked are its truncation (top-p, min-p) and `own_sampling`: the ranges of its tokens that were sampled with
    parameters of the environment in place of the run's. The ranges must ascend within the sample. Each must have a
    valid temperature and truncation. `where` names the sample in errors; those about a truncation do not name it.
    """
    truncation_from_wire(entry)
    if problem := own_sampling_problem(own_sampling_from_wire(entry.own_sampling), entry.length):
        raise _corrupt(f"{where}.own_sampling", len(entry.own_sampling), problem)


def _check_keys(header: batch_pb2.BatchHeader | batch_pb2.BatchLink) -> None:
    """Raise `CorruptObjectError` unless every object key that a header names is a legal one; keys may be empty."""
    keys = {f"chunks[{index}].key": chunk.key for index, chunk in enumerate(header.chunks) if chunk.key}
    keys |= {f"objects[{index}].key": item.key for index, item in enumerate(header.objects)}
    if header.rollouts_key:
        keys["rollouts_key"] = header.rollouts_key
    for where, key in keys.items():
        try:
            require_key(key, what="it")
        except ValueError as error:
            raise _corrupt(where, repr(key[:200]), f"is no object key: {KEY_RULE}") from error


def chunks_for(header: batch_pb2.BatchHeader, only: Sequence[int]) -> list[int]:
    """Return the indices of the chunks that hold the samples with the indices `only`, ascending."""
    return sorted({header.samples[index].chunk for index in only})


def verify_chunk(header: batch_pb2.BatchHeader, index: int, data: bytes) -> None:
    """Raise `CorruptObjectError` unless `data` has the size and sha256 that the header names for chunk `index`."""
    ref = header.chunks[index]
    if len(data) != ref.size_bytes or hashlib.sha256(data).digest() != ref.sha256:
        raise _corrupt(f"chunks[{index}] of batch {header.step}", f"{len(data)} bytes", "has not the header's sha256")


def unpack_batch(
    header: batch_pb2.BatchHeader, chunks: Mapping[int, bytes], *, only: Sequence[int] | None = None
) -> list[TrainSample]:
    """Check a batch's header and return its samples as read-only views of its chunks, or those with the indices `only`.

    `chunks` has the bytes by index of chunk; the samples come in the order of `only`. InvalidStateError if a chunk that
    is needed is not given, CorruptObjectError if header or chunk is damaged.
    """
    check_header(header)
    indices = range(len(header.samples)) if only is None else only
    columns: dict[int, _Columns] = {}
    samples = []
    for index in indices:
        number = header.samples[index].chunk
        if number not in columns:
            if number not in chunks:
                raise InvalidStateError(
                    f"chunk {number} of batch {header.step} is needed for sample {index} and was not given",
                    reason="CHUNK_MISSING",
                    remedy="fetch the chunks that chunks_for() names",
                )
            # Each chunk is proved once, however many samples are taken from it.
            verify_chunk(header, number, chunks[number])
            columns[number] = decode_chunk(chunks[number], header.chunks[number].num_tokens, where=f"chunks[{number}]")
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
    routed: RoutedColumn | None = None

    def sample(self, header: batch_pb2.BatchHeader, index: int) -> TrainSample:
        """Return sample `index` of the batch as views of these columns, which are those of the chunk that the header
        says.
        """
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
            own_sampling=own_sampling_from_wire(entry.own_sampling),
            reference_kl=entry.reference_kl,
            min_version=entry.min_policy_version,
            max_version=entry.max_policy_version,
            lineage=entry.lineage,
            mean_version=entry.mean_policy_version if entry.HasField("mean_policy_version") else None,
            routed_experts=None if self.routed is None else self.routed.of(part),
        )


def _split(samples: Sequence[TrainSample], target_bytes: int) -> Iterator[list[TrainSample]]:
    """Yield the samples in their order, in lists of about `target_bytes` encoded.

    A larger sample is in a list of its own. Experts of one list have one shape.
    """
    group: list[TrainSample] = []
    size, shape = 0, None
    for sample in samples:
        weights = (sample.rl_weights is not None) + (sample.ce_weights is not None)
        sample_bytes = sample.num_tokens * (_BYTES_PER_TOKEN + weights * _WEIGHT_BYTES_PER_TOKEN)
        sample_bytes += 0 if sample.routed_experts is None else sample.routed_experts.nbytes
        own_shape = shape_of(sample.routed_experts)
        if group and (size + sample_bytes > target_bytes or (None not in (shape, own_shape) and shape != own_shape)):
            yield group
            group, size, shape = [], 0, None
        group.append(sample)
        size, shape = size + sample_bytes, shape or own_shape
    if group:
        yield group


def _entry(sample: TrainSample, *, chunk: int, offset: int, env: int) -> batch_pb2.SampleEntry:
    """Return the row of a header's table for a sample at token `offset` of chunk `chunk`.

    `env` is the index of its environment in the header's names.
    """
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
        own_sampling=own_sampling_to_wire(sample.own_sampling),
        reference_kl=sample.reference_kl,
        num_sampled_tokens=sample.num_loss_tokens,
        mean_policy_version=sample.mean_version,
    )


def _encode_chunk(group: Sequence[TrainSample], *, first: int) -> bytes:
    """Return the encoded chunk of these samples, of which the first has the index `first` in the batch.

    `CorruptObjectError` names the sample and column that has an invalid value.
    """

    def join(columns: Sequence[np.ndarray] | None) -> np.ndarray | None:
        """Return the columns of all samples as one; None for no column."""
        return None if columns is None else np.concatenate(columns)

    # One sample with weights gives the whole chunk a column; those of the others are what their absence means.
    rl = ce = None
    if any(sample.rl_weights is not None for sample in group):
        rl = [s.loss_mask.astype(np.float32) if s.rl_weights is None else s.rl_weights for s in group]
    if any(sample.ce_weights is not None for sample in group):
        ce = [np.zeros(s.num_tokens, np.float32) if s.ce_weights is None else s.ce_weights for s in group]
    columns = _Columns(
        token_ids=np.concatenate([sample.token_ids for sample in group]),
        loss_mask=np.concatenate([sample.loss_mask for sample in group]),
        inference_logprobs=np.concatenate([sample.inference_logprobs for sample in group]),
        advantages=np.concatenate([sample.advantages for sample in group]),
        rl_weights=join(rl),
        ce_weights=join(ce),
        routed=RoutedColumn.joined([s.routed_experts for s in group], [s.num_tokens for s in group]),
    )
    try:
        _check_values(columns, where="samples")
    except CorruptObjectError:
        # The joined columns are checked at once because that is fast. An error is looked for again, to name its sample.
        for index, sample in enumerate(group, first):
            _check_values(sample, where=f"samples[{index}]")
        raise
    low, high = ids_to_bytes(columns.token_ids)
    chunk = batch_pb2.BatchChunk(
        token_ids_low=low,
        token_ids_high=high,
        loss_mask=mask_to_bytes(columns.loss_mask),
        inference_logprobs=masked_to_bytes(columns.inference_logprobs, columns.loss_mask),
        advantages=runs_to_proto(columns.advantages),
        rl_weights=None if columns.rl_weights is None else runs_to_proto(columns.rl_weights),
        ce_weights=None if columns.ce_weights is None else runs_to_proto(columns.ce_weights),
        routed_experts=None if columns.routed is None else experts_to_proto(columns.routed.experts),
        routed_tokens=None if columns.routed is None else mask_to_bytes(columns.routed.is_known),
    )
    return chunk.SerializeToString(deterministic=True)


def decode_chunk(data: bytes, num_tokens: int | None = None, *, where: str) -> _Columns:
    """Decode a chunk and return its columns; CorruptObjectError if they are damaged or not `num_tokens` long.

    With None all columns must have the length of the token ids. `where` names the chunk in errors.
    """
    chunk = decode_message(
        batch_pb2.BatchChunk, data, what=f"batch {where} of {len(data)} bytes", reason=_REASON, remedy=_REMEDY
    )
    num_tokens = len(chunk.token_ids_low) // 2 if num_tokens is None else num_tokens

    def runs(name: str) -> np.ndarray:
        """Return the chunk's run-encoded column `name`, float32 [num_tokens]."""
        return runs_from_proto(getattr(chunk, name), num_tokens, f"{where}.{name}")

    ids = ids_from_bytes(chunk.token_ids_low, chunk.token_ids_high, num_tokens, f"{where}.token_ids")
    mask = mask_from_bytes(chunk.loss_mask, num_tokens, f"{where}.loss_mask")
    routed = None
    if chunk.HasField("routed_experts"):
        known = mask_from_bytes(chunk.routed_tokens, num_tokens, f"{where}.routed_tokens")
        routed = RoutedColumn.decoded(chunk.routed_experts, known, where=f"{where}.routed_experts")
    columns = _Columns(
        token_ids=ids,
        loss_mask=mask,
        inference_logprobs=masked_from_bytes(chunk.inference_logprobs, mask, f"{where}.inference_logprobs"),
        advantages=runs("advantages"),
        rl_weights=runs("rl_weights") if chunk.HasField("rl_weights") else None,
        ce_weights=runs("ce_weights") if chunk.HasField("ce_weights") else None,
        routed=routed,
    )
    _check_values(columns, where=where)
    return columns


def _check_sample(sample: TrainSample, *, where: str) -> None:
    """Raise CorruptObjectError if a column of a sample has another shape or type, or a number of it is out of range.

    `where` names the sample in the error. The values in columns are checked after they are joined (`_check_values`).
    """
    length = sample.num_tokens
    if not 1 <= length <= MAX_SAMPLE_TOKENS:
        raise _corrupt(f"{where}.token_ids", length, f"is not 1 to {MAX_SAMPLE_TOKENS} tokens")
    check_column(sample.token_ids, np.int32, length, f"{where}.token_ids")
    check_column(sample.loss_mask, np.uint8, length, f"{where}.loss_mask")
    for name in ("inference_logprobs", "advantages", "rl_weights", "ce_weights"):
        values = getattr(sample, name)
        if values is not None:
            check_column(values, np.float32, length, f"{where}.{name}")
    check_experts(sample.routed_experts, length, where=f"{where}.routed_experts")
    if not (math.isfinite(sample.reward) and math.isfinite(sample.temperature)):
        raise _corrupt(f"{where}.reward", (sample.reward, sample.temperature), "is not finite")
    if problem := own_sampling_problem(sample.own_sampling, length):
        raise _corrupt(f"{where}.own_sampling", len(sample.own_sampling), problem)
    if not 0 <= sample.min_version <= sample.max_version:
        raise _corrupt(f"{where}.min_version", sample.min_version, f"is not in 0 to {sample.max_version}")
    mean = sample.min_version if sample.mean_version is None else sample.mean_version
    if not sample.min_version <= mean <= sample.max_version:
        raise _corrupt(f"{where}.mean_version", mean, "is not between the oldest and the newest version")


def _check_values(columns: _Columns | TrainSample, *, where: str) -> None:
    """Raise CorruptObjectError if a column, of one sample or of many joined ones, has an invalid value.

    `where` is put before the column's name in the error. Joined columns are checked at once, because a call of numpy
    costs more than a few values do.
    """
    check_masked(columns.loss_mask, columns.inference_logprobs, where=where)
    if columns.token_ids.size and int(columns.token_ids.min()) < 0:
        raise _corrupt(f"{where}.token_ids", int(columns.token_ids.min()), "is negative")
    for name in ("advantages", "rl_weights", "ce_weights"):
        values = getattr(columns, name)
        if values is not None and not bool(np.isfinite(values).all()):
            raise _corrupt(f"{where}.{name}", "nan or inf", "is not finite")


def _corrupt(where: str, value: object, problem: str) -> CorruptObjectError:
    """Return the error that the field `where` of a batch has this value, which is wrong as `problem` says."""
    return CorruptObjectError(
        f"batch field {where} = {value} {problem}",
        reason=_REASON,
        remedy=_REMEDY,
        metadata={"field": where},
    )


# Columns of a batch as few bytes: what every token id has in its low bytes, log-probs of sampled tokens only, runs.
#
# All of it is lossless, vectorised, and bounded by the number of tokens that the caller knows: bytes that say
# anything else raise `CorruptObjectError`. Decoded columns cannot be written.

_RUN_BYTES, _VALUE_BYTES = 8, 4


def ids_to_bytes(token_ids: Int32Array) -> tuple[bytes, bytes]:
    """Return the two low bytes of each token id, int32 [T], and the bytes above them: none, one or two for each.

    No id may be negative; the largest decides how many bytes are above.
    """
    largest = int(token_ids.max()) if token_ids.size else 0
    low = token_ids.astype("<u2")  # keeps the low bytes
    if largest < 1 << 16:
        return low.tobytes(), b""
    return low.tobytes(), (token_ids >> 16).astype("u1" if largest < 1 << 24 else "<u2").tobytes()


def ids_from_bytes(low: bytes, high: bytes, num_tokens: int, where: str) -> Int32Array:
    """Return token ids, int32 [num_tokens], read-only, from their two low bytes and the none, one or two bytes above
    each.

    CorruptObjectError, naming the column `where`, if there are not as many.
    """
    if len(low) != 2 * num_tokens or len(high) not in (0, num_tokens, 2 * num_tokens):
        raise _columns_corrupt(where, f"{len(low)} and {len(high)} bytes", f"are not the parts of {num_tokens} ids")
    ids = np.frombuffer(low, "<u2").astype(np.int32)
    if high:
        ids |= np.frombuffer(high, "u1" if len(high) == num_tokens else "<u2").astype(np.int32) << 16
    return _fixed(ids)


def mask_to_bytes(mask: Uint8Array) -> bytes:
    """Return a mask of zeros and ones, uint8 [T], packed eight tokens to a byte."""
    return np.packbits(mask).tobytes()


def mask_from_bytes(data: bytes, num_tokens: int, where: str) -> Uint8Array:
    """Return a mask, uint8 [num_tokens], read-only, from bits packed eight to a byte.

    CorruptObjectError, naming the column `where`, if there are not as many.
    """
    if len(data) != -(-num_tokens // 8):
        raise _columns_corrupt(where, f"{len(data)} bytes", f"are not the bits of {num_tokens} tokens")
    return _fixed(np.unpackbits(np.frombuffer(data, np.uint8), count=num_tokens))


def masked_to_bytes(column: Float32Array, mask: Uint8Array) -> bytes:
    """Return, as little-endian float32, the values of a column where the mask is 1; the column is 0 elsewhere."""
    return column[mask.view(np.bool_)].astype("<f4", copy=False).tobytes()


def masked_from_bytes(data: bytes, mask: Uint8Array, where: str) -> Float32Array:
    """Return a column, float32 [T], read-only, with the values of `data` where the mask is 1, and 0 elsewhere.

    CorruptObjectError, naming the column `where`, if there are not as many values.
    """
    if len(data) != _VALUE_BYTES * np.count_nonzero(mask):
        raise _columns_corrupt(
            where, f"{len(data)} bytes", f"are not the values of {np.count_nonzero(mask)} sampled tokens"
        )
    column = np.zeros(mask.size, np.float32)
    column[mask.view(np.bool_)] = np.frombuffer(data, "<f4")
    return _fixed(column)


def runs_to_proto(column: Float32Array) -> batch_pb2.RunColumn:
    """Encode a column, float32 [T], without loss: as runs of equal values, or plainly where that is not larger."""
    bits = column.view(np.uint32)
    # Compared as bits: -0.0 and 0.0 are equal numbers, and would come back as one of them.
    starts = np.flatnonzero(bits[1:] != bits[:-1])
    starts += 1
    if (starts.size + 1) * _RUN_BYTES >= column.size * _VALUE_BYTES:
        return batch_pb2.RunColumn(values=column.astype("<f4", copy=False).tobytes())
    starts = np.concatenate(([0], starts))
    lengths = np.diff(starts, append=column.size).astype("<u4")
    return batch_pb2.RunColumn(values=column[starts].astype("<f4", copy=False).tobytes(), lengths=lengths.tobytes())


def runs_from_proto(message: batch_pb2.RunColumn, num_tokens: int, where: str) -> Float32Array:
    """Return a column, float32 [num_tokens], read-only, from its runs or its plain values.

    CorruptObjectError, naming the column `where`, if it has another length.
    """
    expected = len(message.lengths) or _VALUE_BYTES * num_tokens
    if len(message.values) != expected or expected % _VALUE_BYTES:
        raise _columns_corrupt(
            where, f"{len(message.values)} and {len(message.lengths)} bytes", "are no runs of values"
        )
    values = np.frombuffer(message.values, "<f4")
    if not message.lengths:
        return values
    lengths = np.frombuffer(message.lengths, "<u4")
    # Summed in 64 bits, before anything is allocated: a few bytes could ask for gigabytes.
    if int(lengths.sum(dtype=np.uint64)) != num_tokens:
        raise _columns_corrupt(where, int(lengths.sum(dtype=np.uint64)), f"is not {num_tokens} tokens")
    return _fixed(np.repeat(values, lengths))


def _fixed(column: np.ndarray) -> np.ndarray:
    """Make the array `column` read-only, in place, and return it."""
    column.flags.writeable = False
    return column


def _columns_corrupt(where: str, value: object, problem: str) -> CorruptObjectError:
    """Return the error that the column `where` of a batch has this value, which is wrong as `problem` says."""
    return CorruptObjectError(
        f"batch field {where} = {value} {problem}",
        reason="BATCH_CORRUPT",
        remedy="read the batch again from the object store; if it stays, its writer has a bug",
        metadata={"field": where},
    )
