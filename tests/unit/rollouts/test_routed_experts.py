"""Experts of tokens: one strict reader of what engines answer, one of what is stored, and samples of several turns."""

import base64
import dataclasses
import io

import numpy as np
import pytest

from millrace.errors import CorruptObjectError
from millrace.internal.v1 import batch_pb2, rollout_pb2
from millrace.rollouts import batch_wire, routed_experts
from millrace.rollouts.routed_experts import RoutedCall, extended, from_answer
from millrace.rollouts.types import PolicySpan, Purpose, Rollout, RolloutStatus, Sample, TrainSample
from millrace.rollouts.wire import decode_archive, decode_rollout, encode_archive, encode_rollout, validate_rollout


def _experts(tokens: int, *, start: int = 0, layers: int = 3, top_k: int = 2, dtype: str = "u1") -> np.ndarray:
    count = np.arange(start * layers * top_k, (start + tokens) * layers * top_k)
    return (count % 200).astype(dtype).reshape(tokens, layers, top_k)


@pytest.mark.parametrize("dtype", ["u1", "<u2"])
def test_an_answer_is_a_npy_file_as_numpy_itself_reads_and_writes_it(dtype: str) -> None:
    experts = _experts(5, dtype=dtype)
    text = routed_experts.to_answer(experts)
    read = np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
    assert read.dtype == experts.dtype and np.array_equal(read, experts)
    written = io.BytesIO()
    np.save(written, experts, allow_pickle=False)
    for answered in (text, base64.b64encode(written.getvalue()).decode()):
        call = from_answer({"routed_experts": answered}, num_tokens=6)
        assert call is not None and call.start == 0 and call.end == 5
        assert call.experts.dtype == experts.dtype and np.array_equal(call.experts, experts)
    later = from_answer({"routed_experts": routed_experts.to_answer(experts[3:])}, num_tokens=6, start=3)
    assert later is not None and later.start == 3 and np.array_equal(later.experts, experts[3:])


def test_an_engine_that_says_nothing_is_no_error() -> None:
    assert from_answer({}, num_tokens=6) is None
    assert from_answer({"routed_experts": None}, num_tokens=6) is None


def test_a_layer_without_experts_is_none_that_repeats_them() -> None:
    experts = _experts(5)
    experts[:, 1] = 0
    call = from_answer({"routed_experts": routed_experts.to_answer(experts)}, num_tokens=6)
    assert call is not None and np.array_equal(call.experts, experts)
    experts[3, 1] = 4
    assert routed_experts.repeating_layer(experts) == 1
    assert routed_experts.repeating_layer(experts[:, :, :1]) is None, "a token has one expert"


def _npy(array: np.ndarray) -> str:
    written = io.BytesIO()
    np.save(written, array, allow_pickle=False)
    return base64.b64encode(written.getvalue()).decode()


@pytest.mark.parametrize(
    ("answered", "problem"),
    [
        (7, "is no text"),
        ("###", "is no base64"),
        (base64.b64encode(b"\x93NUMPY\x02\x00").decode(), "is no .npy file"),
        ("", "is no .npy file"),
        (_npy(np.zeros((5, 3, 2), np.int64)), "is no header"),
        (_npy(np.zeros((5, 3, 2), np.float32)), "is no header"),
        (_npy(np.asfortranarray(np.arange(30, dtype=np.uint8).reshape(5, 3, 2))), "is no header"),
        (_npy(np.zeros((5, 6), np.uint8)), "is no header"),
        (_npy(np.zeros((5, 0, 2), np.uint8)), "is not [tokens"),
        (_npy(np.full((5, 3, 2), 7, np.uint8)), "layer 0 has an expert twice"),
        (_npy(np.array([[[1, 2], [5, 3]]] * 4 + [[[1, 2], [5, 5]]], np.uint8)), "layer 1 has an expert twice"),
        (_npy(_experts(4)), "are not all but the last of 6 tokens"),
        (_npy(_experts(6)), "are not all but the last of 6 tokens"),
        (base64.b64encode(base64.b64decode(_npy(_experts(5)))[:-1]).decode(), "are not [5, 3, 2] numbers of 1 bytes"),
        (base64.b64encode(base64.b64decode(_npy(_experts(5))) + b"\0").decode(), "are not [5, 3, 2] numbers of 1"),
    ],
)
def test_an_answer_of_another_form_is_refused(answered: object, problem: str) -> None:
    with pytest.raises(CorruptObjectError) as caught:
        from_answer({"routed_experts": answered}, num_tokens=6)
    assert problem in str(caught.value) and caught.value.reason == "ROUTED_EXPERTS_INVALID"


def test_turns_add_the_experts_of_what_is_new() -> None:
    whole = _experts(20)
    first = RoutedCall(start=0, experts=whole[:7])
    known = extended(None, first)
    assert known is not None and np.array_equal(known, whole[:7])
    # The second turn computes the conversation anew, and its own choice for the known tokens does not count.
    again = RoutedCall(start=0, experts=np.concatenate([whole[:7] + 1, whole[7:15]]))
    known = extended(known, again)
    assert known is not None and np.array_equal(known, whole[:15])
    known = extended(known, RoutedCall(start=15, experts=whole[15:]))
    assert known is not None and np.array_equal(known, whole)
    assert extended(whole[:7], None) is not None


def test_a_turn_that_leaves_a_gap_or_is_of_another_shape_adds_nothing() -> None:
    known = _experts(7)
    assert extended(None, RoutedCall(start=1, experts=known)) is None
    for other in (
        RoutedCall(start=9, experts=_experts(3)),
        RoutedCall(start=0, experts=_experts(5)),
        RoutedCall(start=0, experts=_experts(9, layers=4)),
        RoutedCall(start=0, experts=_experts(9, dtype="<u2")),
    ):
        assert extended(known, other) is known


def _sample(experts: np.ndarray | None) -> Sample:
    return Sample(
        token_ids=np.arange(6, dtype=np.int32),
        loss_mask=np.array([0, 0, 1, 1, 1, 1], np.uint8),
        inference_logprobs=np.array([0, 0, -1, -1, -1, -1], np.float32),
        policy_spans=(PolicySpan(lineage=0, version=0, start=2, end=6),),
        routed_experts=experts,
    )


def _rollout(experts: np.ndarray | None) -> Rollout:
    return Rollout(
        run_uid="u",
        purpose=Purpose.TRAIN,
        ordinal=0,
        member=0,
        attempt=0,
        group_size=1,
        env="e",
        task_index=0,
        task_id="t",
        status=RolloutStatus.OK,
        samples=(_sample(experts),),
    )


@pytest.mark.parametrize("experts", [None, _experts(5), _experts(6, dtype="<u2"), _experts(1)])
def test_a_rollout_keeps_them_and_its_archive_does_not(experts: np.ndarray | None) -> None:
    rollout = _rollout(experts)
    validate_rollout(rollout)
    assert decode_rollout(encode_rollout(rollout)) == rollout
    assert decode_archive(encode_archive([rollout])) == [_rollout(None)]


@pytest.mark.parametrize("experts", [_experts(7), _experts(5).astype(np.int64), _experts(5)[0], _experts(0)])
def test_a_rollout_with_experts_of_another_form_is_refused(experts: np.ndarray) -> None:
    with pytest.raises(CorruptObjectError, match="samples"):
        validate_rollout(_rollout(experts))


@pytest.mark.parametrize(
    "changes",
    [{"id_bytes": 3}, {"id_bytes": 0}, {"num_layers": 0}, {"top_k": 3}, {"experts": b"123"}, {"num_layers": 5000}],
)
def test_stored_experts_of_another_length_than_their_shape_are_refused(changes: dict[str, object]) -> None:
    message = rollout_pb2.Rollout.FromString(encode_rollout(_rollout(_experts(5, layers=1))))
    for name, value in changes.items():
        setattr(message.samples[0].routed_experts, name, value)
    with pytest.raises(CorruptObjectError, match="experts"):
        decode_rollout(message.SerializeToString())


def _trained(experts: np.ndarray | None, length: int = 6) -> TrainSample:
    return TrainSample(
        token_ids=np.arange(length, dtype=np.int32),
        loss_mask=np.ones(length, np.uint8),
        inference_logprobs=np.full(length, -1, np.float32),
        advantages=np.ones(length, np.float32),
        ordinal=0,
        member=0,
        attempt=0,
        env="e",
        reward=0.0,
        temperature=1.0,
        min_version=0,
        max_version=0,
        lineage=0,
        routed_experts=experts,
    )


def _packed(samples: list[TrainSample], target: int = 1 << 20) -> tuple[batch_pb2.BatchHeader, list[bytes]]:
    header = batch_pb2.BatchHeader(run_uid="u", kind=batch_pb2.BATCH_KIND_TRAIN, step=3)
    return header, batch_wire.pack_batch(header, samples, target_chunk_bytes=target)


@pytest.mark.parametrize("target", [1, 300, 1 << 20])
def test_a_batch_keeps_them_for_every_sample_that_has_any(target: int) -> None:
    samples = [
        _trained(None),
        _trained(_experts(6)),
        _trained(_experts(3, start=20), length=9),
        _trained(_experts(2, layers=4)),
        _trained(None),
        _trained(_experts(2, dtype="<u2")),
        _trained(_experts(5, start=7)),
    ]
    header, chunks = _packed(samples, target)
    assert batch_wire.unpack_batch(header, dict(enumerate(chunks))) == samples
    numbers = [entry.chunk for entry in header.samples]
    assert numbers[2] < numbers[3] < numbers[5] < numbers[6], "a chunk has experts of one shape"
    only = batch_wire.unpack_batch(header, dict(enumerate(chunks)), only=[2, 5])
    assert only == [samples[2], samples[5]]


def test_a_token_costs_a_byte_for_each_expert_and_a_bit() -> None:
    experts, length = np.zeros((1000, 48, 8), np.uint8), 1001
    plain, routed = (_packed([_trained(each, length)])[1][0] for each in (None, experts))
    assert (len(routed) - len(plain)) / length == pytest.approx(48 * 8, abs=1)


def test_a_chunk_with_experts_of_other_tokens_is_refused() -> None:
    header, [data] = _packed([_trained(_experts(3)), _trained(_experts(2))])
    chunk = batch_pb2.BatchChunk.FromString(data)
    for broken in (b"", b"\xff\xff", b"\xe0\xc0\x00"):
        changed = batch_pb2.BatchChunk()
        changed.CopyFrom(chunk)
        changed.routed_tokens = broken
        with pytest.raises(CorruptObjectError, match="routed"):
            batch_wire.decode_chunk(changed.SerializeToString(), header.num_tokens, where="chunks[0]")
    changed = batch_pb2.BatchChunk()
    changed.CopyFrom(chunk)
    # Five tokens, but not the first ones of the first sample.
    changed.routed_tokens = np.packbits([0, 1, 1, 1, 0, 0, 1, 1, 0, 0, 0, 0]).tobytes()
    columns = batch_wire.decode_chunk(changed.SerializeToString(), header.num_tokens, where="chunks[0]")
    with pytest.raises(CorruptObjectError, match="first tokens"):
        columns.sample(header, 0)


def test_what_is_no_experts_of_a_sample_is_not_packed() -> None:
    with pytest.raises(CorruptObjectError, match=r"samples\[0\]"):
        _packed([dataclasses.replace(_trained(None), routed_experts=_experts(7))])
