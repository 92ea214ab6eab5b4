"""Batches round-trip exactly, in part too; damage of any byte of a chunk is found."""

import dataclasses
import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.errors import CorruptObjectError, InvalidStateError
from millrace.internal.v1 import batch_pb2
from millrace.rollouts import batch_wire
from millrace.rollouts.types import OwnSampling, TrainSample, Truncation

FLOAT32 = st.floats(-1e6, 1e6, width=32)


CUT = Truncation(top_p=0.5, top_k=3)


# Columns are drawn as bytes, in one draw: values drawn one by one double the time of these tests.
@st.composite
def train_samples(draw: st.DrawFn) -> TrainSample:
    length = draw(st.integers(1, 30))
    words = st.binary(min_size=4 * length, max_size=4 * length).map(lambda data: np.frombuffer(data, np.uint32))
    column = words.map(lambda drawn: np.clip(np.nan_to_num(drawn.view(np.float32)), -1e6, 1e6))
    mask = (draw(words) & 1).astype(np.uint8)
    logprobs = -np.clip(np.abs(draw(column)), 0, 50)
    low, high = sorted((draw(st.integers(0, 2**40)), draw(st.integers(0, 2**40))))
    return TrainSample(
        token_ids=(draw(words) >> draw(st.sampled_from([1, 8, 16]))).astype(np.int32),  # of four, three and two bytes
        loss_mask=mask,
        inference_logprobs=np.where(mask == 1, logprobs, np.float32(0)),
        advantages=draw(column | column.map(lambda drawn: np.full_like(drawn, drawn[0]))),
        rl_weights=draw(st.none() | column),
        ce_weights=draw(st.none() | column),
        ordinal=draw(st.integers(0, 2**64 - 1)),
        member=draw(st.integers(0, 1000)),
        attempt=draw(st.integers(0, 1000)),
        env=draw(st.sampled_from(["a", "b", "ç"])),
        reward=draw(FLOAT32),
        temperature=draw(FLOAT32),
        min_version=low,
        max_version=high,
        lineage=draw(st.integers(0, 9)),
        mean_version=draw(st.sampled_from([None, low, (low + high) / 2, high])),
        own_sampling=draw(st.sampled_from([(), (OwnSampling(start=0, end=length, temperature=0.5, truncation=CUT),)])),
    )


def _pack(samples, target: int = 300) -> tuple[batch_pb2.BatchHeader, list[bytes]]:
    header = batch_pb2.BatchHeader(run_uid="u", kind=batch_pb2.BATCH_KIND_TRAIN, step=3)
    chunks = batch_wire.pack_batch(header, samples, target_chunk_bytes=target)
    return batch_wire.decode_header(header.SerializeToString()), chunks


def _with_default_weights(sample: TrainSample, found: TrainSample) -> TrainSample:
    """Return what a missing weight column becomes when its chunk has the column."""
    rl, ce = sample.rl_weights, sample.ce_weights
    if rl is None and found.rl_weights is not None:
        rl = sample.loss_mask.astype(np.float32)
    if ce is None and found.ce_weights is not None:
        ce = np.zeros(sample.num_tokens, np.float32)
    return dataclasses.replace(sample, rl_weights=rl, ce_weights=ce)


@pytest.mark.computes
@given(st.lists(train_samples(), max_size=12), st.integers(1, 2000))
def test_round_trip(samples, target):
    header, chunks = _pack(samples, target)
    found = batch_wire.unpack_batch(header, dict(enumerate(chunks)))
    assert found == [_with_default_weights(s, f) for s, f in zip(samples, found, strict=True)]
    assert header.num_tokens == sum(sample.num_tokens for sample in samples)
    assert header.num_loss_tokens == sum(sample.num_loss_tokens for sample in samples)
    assert [chunk.size_bytes for chunk in header.chunks] == [len(chunk) for chunk in chunks]


@pytest.mark.computes
@given(st.lists(train_samples(), min_size=1, max_size=12), st.data())
def test_a_part_needs_only_its_chunks(samples, data):
    header, chunks = _pack(samples)
    only = data.draw(st.lists(st.integers(0, len(samples) - 1), max_size=6))
    needed = batch_wire.chunks_for(header, only)
    found = batch_wire.unpack_batch(header, {index: chunks[index] for index in needed}, only=only)
    whole = batch_wire.unpack_batch(header, dict(enumerate(chunks)))
    assert found == [whole[index] for index in only]


@pytest.mark.computes
@given(st.lists(train_samples(), min_size=1, max_size=6), st.data())
def test_every_damaged_chunk_is_found(samples, data):
    header, chunks = _pack(samples)
    which = data.draw(st.integers(0, len(chunks) - 1))
    damaged = bytearray(chunks[which])
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
    chunks[which] = data.draw(st.sampled_from([bytes(damaged), chunks[which][:-1], chunks[which] + b"\0", b""]))
    with pytest.raises(CorruptObjectError, match="sha256"):
        batch_wire.unpack_batch(header, dict(enumerate(chunks)))


@pytest.mark.computes
@given(st.lists(train_samples(), min_size=1, max_size=6), st.data())
def test_a_damaged_header_is_refused_or_still_consistent(samples, data):
    header, chunks = _pack(samples)
    encoded = bytearray(header.SerializeToString())
    encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        damaged = batch_wire.decode_header(bytes(encoded))
        found = batch_wire.unpack_batch(damaged, dict(enumerate(chunks)))
    except (CorruptObjectError, InvalidStateError):
        return
    assert all(len(s.token_ids) == len(s.loss_mask) == len(s.advantages) for s in found)


@given(st.binary(max_size=100))
def test_garbage_is_no_header(garbage):
    with pytest.raises(CorruptObjectError):
        batch_wire.decode_header(garbage)


def _sample(length: int = 10, **changes) -> TrainSample:
    mask = np.arange(length, dtype=np.int64) % 2
    sample = TrainSample(
        token_ids=np.arange(length, dtype=np.int32),
        loss_mask=mask.astype(np.uint8),
        inference_logprobs=(-mask).astype(np.float32),
        advantages=np.ones(length, np.float32),
        ordinal=1,
        member=0,
        attempt=0,
        env="e",
        reward=0.5,
        temperature=1.0,
        min_version=1,
        max_version=2,
        lineage=0,
    )
    return dataclasses.replace(sample, **changes)


def test_chunks_hold_whole_samples_of_about_the_target():
    samples = [_sample(1000) for _ in range(40)]
    header, chunks = _pack(samples, 100_000)
    assert len(chunks) == 4 and max(map(len, chunks)) < 100_100
    assert [entry.chunk for entry in header.samples] == sorted(entry.chunk for entry in header.samples)
    _, chunks = _pack([_sample(5000), _sample(10), _sample(10)], 1000)
    assert len(chunks) == 2, "a sample above the target has a chunk of its own"


def test_columns_are_views_that_cannot_be_written():
    header, chunks = _pack([_sample(), _sample()], 10_000)
    first, second = batch_wire.unpack_batch(header, {0: chunks[0]})
    assert first.token_ids.base is not None and not first.token_ids.flags.owndata
    assert np.shares_memory(first.advantages.base, second.advantages.base)
    with pytest.raises(ValueError, match="read-only"):
        second.advantages[0] = 1


def test_a_token_takes_at_most_eight_bytes():
    """Of a vocabulary of 150k, every token sampled, one advantage per sample: id 3, log-prob 4, mask an eighth."""
    ids = np.random.default_rng(0).integers(0, 151_936, 3000, dtype=np.int32)
    ones = {"loss_mask": np.ones(3000, np.uint8), "inference_logprobs": np.full(3000, -0.5, np.float32)}
    samples = [_sample(3000, token_ids=ids, advantages=np.full(3000, place, np.float32), **ones) for place in range(3)]
    _, [chunk] = _pack(samples, 1 << 20)
    assert len(chunk) / 9000 < 7.15


def _advantages_of_no_length(chunk: batch_pb2.BatchChunk) -> None:
    chunk.advantages.lengths = np.array([9], "<u4").tobytes()
    chunk.advantages.values = np.array([1], "<f4").tobytes()


@pytest.mark.parametrize(
    ("match", "damage"),
    [
        ("token_ids", lambda chunk: setattr(chunk, "token_ids_low", chunk.token_ids_low[:-1])),
        ("token_ids", lambda chunk: setattr(chunk, "token_ids_high", b"x" * 3)),
        ("loss_mask", lambda chunk: setattr(chunk, "loss_mask", b"x" * 3)),
        ("inference_logprobs", lambda chunk: setattr(chunk, "loss_mask", b"\xff\xff")),
        ("is not 10 tokens", _advantages_of_no_length),
        ("advantages", lambda chunk: setattr(chunk.advantages, "lengths", b"xxxx")),
    ],
)
def test_columns_that_contradict_the_number_of_tokens_are_refused(match, damage):
    _, chunks = _pack([_sample()])
    chunk = batch_pb2.BatchChunk.FromString(chunks[0])
    damage(chunk)
    with pytest.raises(CorruptObjectError, match=match):
        batch_wire.decode_chunk(chunk.SerializeToString(), 10, where="chunks[0]")


def test_a_missing_chunk_is_named():
    header, _ = _pack([_sample()])
    with pytest.raises(InvalidStateError, match="chunk 0 of batch 3"):
        batch_wire.unpack_batch(header, {})


def test_an_empty_batch():
    header, chunks = _pack([])
    assert chunks == [] and batch_wire.unpack_batch(header, {}) == []


def test_packing_again_replaces_the_table():
    header, _ = _pack([_sample(), _sample()])
    chunks = batch_wire.pack_batch(header, [_sample(7)])
    assert len(header.samples) == len(header.chunks) == 1
    assert batch_wire.unpack_batch(header, {0: chunks[0]}) == [_sample(7)]


MALFORMED = {
    "token_ids": {"token_ids": np.zeros(10, np.int64)},
    "no token": {"token_ids": np.zeros(0, np.int32)},
    "loss_mask": {"loss_mask": np.zeros(9, np.uint8)},
    "inference_logprobs": {"inference_logprobs": np.full(10, np.nan, np.float32)},
    "must be 0": {"inference_logprobs": np.full(10, -1, np.float32)},
    "advantages": {"advantages": np.full(10, np.inf, np.float32)},
    "rl_weights": {"rl_weights": np.zeros(3, np.float32)},
    "ce_weights": {"ce_weights": np.full(10, np.nan, np.float32)},
    "reward": {"reward": float("nan")},
    "min_version": {"min_version": 3},
    "negative": {"token_ids": np.full(10, -5, np.int32)},
    "own_sampling": {"own_sampling": (OwnSampling(start=4, end=11, temperature=1.0),)},
}


@pytest.mark.parametrize("match", MALFORMED)
def test_malformed_samples_are_not_packed(match):
    with pytest.raises(CorruptObjectError, match=match if match != "no token" else "is not 1 to"):
        _pack([_sample(), _sample(**MALFORMED[match])])


def test_tables_that_do_not_tile_the_chunks_are_refused():
    def broken(change) -> batch_pb2.BatchHeader:
        header, _ = _pack([_sample(), _sample(), _sample()], 10_000)
        change(header)
        return header

    changes = {
        "offset": lambda h: setattr(h.samples[1], "offset", 9),
        "is not ascending": lambda h: setattr(h.samples[1], "chunk", 1),
        "num_tokens": lambda h: setattr(h.chunks[0], "num_tokens", 29),
        "num_tokens = 31": lambda h: setattr(h, "num_tokens", 31),
        "env": lambda h: setattr(h.samples[2], "env", 1),
        "32 bytes": lambda h: setattr(h.chunks[0], "sha256", b"x"),
        "newest version": lambda h: setattr(h.samples[0], "min_policy_version", 9),
        "the oldest and the newest": lambda h: setattr(h.samples[0], "mean_policy_version", float("nan")),
        "num_sampled_tokens = 11 is above 10": lambda h: setattr(h.samples[0], "num_sampled_tokens", 11),
        "reward": lambda h: setattr(h.samples[0], "reward", float("nan")),
        "run_uid": lambda h: setattr(h, "run_uid", ""),
    }
    for match, change in changes.items():
        with pytest.raises(CorruptObjectError, match=match):
            batch_wire.check_header(broken(change))


def test_a_chunk_whose_columns_differ_in_length_is_refused_even_with_a_right_hash():
    header, chunks = _pack([_sample()])
    chunk = batch_pb2.BatchChunk.FromString(chunks[0])
    chunk.advantages.values = chunk.advantages.values[:-4]
    data = chunk.SerializeToString()
    header.chunks[0].sha256, header.chunks[0].size_bytes = hashlib.sha256(data).digest(), len(data)
    with pytest.raises(CorruptObjectError, match="advantages"):
        batch_wire.unpack_batch(header, {0: data})


def test_a_header_of_an_unknown_kind_is_refused():
    header = batch_pb2.BatchHeader(run_uid="u", step=3)
    header.MergeFromString(batch_pb2.BatchHeader(kind=batch_pb2.BATCH_KIND_TRAIN).SerializeToString()[:-1] + b"\x63")
    with pytest.raises(CorruptObjectError, match="a kind that is known"):
        batch_wire.decode_header(header.SerializeToString())


def test_a_link_has_the_fields_of_the_header_under_their_numbers():
    header, link = batch_pb2.BatchHeader.DESCRIPTOR, batch_pb2.BatchLink.DESCRIPTOR
    for field in link.fields:
        same = header.fields_by_number[field.number]
        kinds = [(each.name, each.type, each.is_repeated, each.message_type, each.enum_type) for each in (field, same)]
        assert kinds[0] == kinds[1]


@given(st.lists(train_samples(), max_size=4))
def test_a_header_is_read_as_a_link(samples):
    header, _ = _pack(samples)
    header.objects.add(key="epochs/orchestrator/00000001", sha256=bytes(32))
    link = batch_wire.decode_link(header.SerializeToString())
    assert (link.step, link.run_uid, list(link.objects)) == (header.step, header.run_uid, list(header.objects))
    assert list(link.chunks) == list(header.chunks)


@pytest.mark.parametrize("change", [{"run_uid": ""}, {"kind": 0}, {"kind": 9}, {"rollouts_key": "../other"}])
def test_a_header_that_makes_no_sense_is_no_link(change):
    header, _ = _pack([])
    for name, value in change.items():
        setattr(header, name, value)
    with pytest.raises(CorruptObjectError):
        batch_wire.decode_link(header.SerializeToString())
