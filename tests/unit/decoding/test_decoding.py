"""Hostile documents, messages and frames end in one typed error, before memory is spent on them."""

import json
import tracemalloc

import pytest
import zstandard

from millrace.decoding import decode_json, decode_message, decode_object, decode_request, decompress
from millrace.errors import CorruptObjectError, InvalidSpecError
from millrace.internal.v1 import rollout_pb2, worker_service_pb2
from millrace.rollouts.wire import decode_archive
from millrace.v1 import event_pb2

WHERE = {"what": "this", "reason": "THIS_CORRUPT"}
ZERO = zstandard.ZstdCompressor().compress(b"abc" * 20)


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        (b"", "Expecting value"),
        (b"{", "Expecting property name"),
        (b"\xff", "invalid start byte"),
        (b'{"a": NaN}', "NaN is no JSON"),
        (b"[1, -Infinity]", "-Infinity is no JSON"),
        (b"[1e999]", "1e999 is no JSON"),
        (b'{"a": 1, "a": 2}', "a key twice"),
        (b'["\\ud800"]', "surrogates not allowed"),
        (b"[" * 100_000, "nests deeper than 64"),
        (b'{"a":' * 65, "nests deeper than 64"),
        (b"1" * 5000, "4300"),
        (b"[" + b"1," * 100 + b"1]", "at most 200 are read"),
    ],
)
def test_json_that_is_refused(data: bytes, cause: str) -> None:
    with pytest.raises(CorruptObjectError, match=cause) as caught:
        decode_json(data, **WHERE, max_bytes=200 if b"1," in data else 1 << 20)
    assert caught.value.reason == "THIS_CORRUPT"
    assert caught.value.message.startswith("this cannot be read: ")


def test_json_that_is_read() -> None:
    document = {"a": [1, 2.5, None, True], "deep": json.loads("[" * 60 + "]" * 60), "text": '[{"\\' * 100 + "é😀"}
    assert decode_json(json.dumps(document), **WHERE) == document
    assert decode_object(json.dumps(document, ensure_ascii=False).encode(), **WHERE) == document
    with pytest.raises(CorruptObjectError, match="instead of an object"):
        decode_object(b"[]", **WHERE)


@pytest.mark.parametrize("data", [b"\xff", b"\x0a\xff\xff\xff\xff\x0f", b"\x0a\x01\xff", b"\x0b" * 200])
def test_messages_that_are_refused(data: bytes) -> None:
    with pytest.raises(CorruptObjectError) as caught:
        decode_message(event_pb2.Event, data, **WHERE)
    assert caught.value.reason == "THIS_CORRUPT"


def test_a_message_larger_than_its_bound_is_not_parsed() -> None:
    event = event_pb2.Event(writer="w" * 100)
    assert decode_message(event_pb2.Event, event.SerializeToString(), **WHERE).writer == event.writer
    with pytest.raises(CorruptObjectError, match="at most 50 are read"):
        decode_message(event_pb2.Event, event.SerializeToString(), **WHERE, max_bytes=50)


def test_a_frame_that_expands_beyond_its_bound_takes_no_memory() -> None:
    bomb = zstandard.ZstdCompressor().compress(b"\0" * (100 << 20))
    tracemalloc.start()
    with pytest.raises(CorruptObjectError, match=f"holds {100 << 20} bytes, which is not from 0 to {1 << 20}"):
        decompress(bomb, **WHERE, max_bytes=1 << 20)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_frames() -> None:
    good = zstandard.ZstdCompressor(write_checksum=True).compress(b"abc" * 1000)
    assert decompress(good, **WHERE, max_bytes=3000) == b"abc" * 1000
    assert decompress(zstandard.ZstdCompressor().compress(b""), **WHERE, max_bytes=0) == b""
    streamed = zstandard.ZstdCompressor().compressobj()
    for bad in (
        b"",
        good[:-1],
        good + b"x",
        good[:20] + b"\0" + good[21:],
        good[:-1] + b"\0",
        ZERO[:5] + b"\0" + ZERO[6:],  # it says that it holds nothing
        zstandard.ZstdCompressor().compress(b"") + b"x",
        streamed.compress(b"abc") + streamed.flush(),  # it does not say how much it holds
    ):
        with pytest.raises(CorruptObjectError):
            decompress(bad, **WHERE, max_bytes=1 << 20)


@pytest.mark.parametrize("text", [b"a" * (1 << 20), b"\\n" * (1 << 19)])
def test_a_long_string_takes_no_more_memory_than_its_text(text: bytes) -> None:
    document = b'["' + text + b'"' + b",[]" * 70 + b"]"
    tracemalloc.start()
    assert len(decode_json(document, **WHERE)) == 71
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 * len(document), f"{peak / len(document):.0f} times"


def test_messages_within_a_message_are_counted_before_they_are_made() -> None:
    """Two bytes each, and 260 when they are parsed: a rollout archive of 400 bytes took 9 GB."""
    packed = zstandard.ZstdCompressor().compress(b"\x0a\0" * (2 << 20))
    assert len(packed) < 1000
    with pytest.raises(CorruptObjectError, match="holds too many messages"):
        decode_archive(packed)
    samples = rollout_pb2.Rollout(samples=[rollout_pb2.Sample()]).SerializeToString()
    nested = rollout_pb2.RolloutArchive(rollouts=[rollout_pb2.Rollout()]).SerializeToString()[:1]
    deep = nested + b"\x80\x80\x80\x02" + samples * ((4 << 20) // len(samples))
    with pytest.raises(CorruptObjectError, match="holds too many messages"):
        decode_message(rollout_pb2.RolloutArchive, deep, **WHERE)


def test_a_large_message_is_read() -> None:
    sample = rollout_pb2.Sample(token_ids=bytes(range(256)) * 4096, policy_spans=[rollout_pb2.PolicySpan(end=9)] * 100)
    archive = rollout_pb2.RolloutArchive(rollouts=[rollout_pb2.Rollout(run_uid="u" * 300, samples=[sample] * 3)] * 2)
    assert decode_message(rollout_pb2.RolloutArchive, archive.SerializeToString(), **WHERE) == archive
    for damaged in (b"\xff" * (2 << 20), archive.SerializeToString()[:-1], b"\x0b" * (2 << 20)):
        with pytest.raises(CorruptObjectError):
            decode_message(rollout_pb2.RolloutArchive, damaged, **WHERE)


def test_a_request_of_very_many_messages_is_not_parsed():
    empty = b"\x12\x00"  # a wait: 2 bytes, and a hundred when it is parsed
    with pytest.raises(InvalidSpecError) as refused:
        decode_request(worker_service_pb2.HeartbeatRequest.FromString, empty * (2 << 20))
    assert refused.value.reason == "REQUEST_MALFORMED"
    waits = [event_pb2.Wait(owner="env-server", reason="r" * 100)] * 10_000
    many = worker_service_pb2.HeartbeatRequest(waits=waits).SerializeToString()
    assert len(decode_request(worker_service_pb2.HeartbeatRequest.FromString, many).waits) == 10_000
