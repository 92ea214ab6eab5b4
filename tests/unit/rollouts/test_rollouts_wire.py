"""Rollouts round-trip exactly; what is malformed or damaged is refused, never returned wrong."""

import dataclasses
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.errors import CorruptObjectError
from millrace.internal.v1 import rollout_pb2
from millrace.rollouts import wire
from millrace.rollouts.types import (
    ROLES,
    OwnSampling,
    PolicySpan,
    Purpose,
    RoleSpan,
    Rollout,
    RolloutError,
    RolloutStatus,
    Sample,
    TurnReward,
)

FINITE = st.floats(allow_nan=False, allow_infinity=False)
TEXT = st.text(st.characters(codec="utf-8"), max_size=20)


def own_at(*ranges: tuple[int, int, float]) -> tuple[OwnSampling, ...]:
    return tuple(OwnSampling(start=start, end=end, temperature=temperature) for start, end, temperature in ranges)


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    length = draw(st.integers(1, 40))
    words = st.binary(min_size=4 * length, max_size=4 * length).map(lambda data: np.frombuffer(data, np.uint32))
    mask = (draw(words) & 1).astype(np.uint8)
    logprobs = (draw(words) / 2**32 * -50).astype(np.float32)
    cut = draw(st.integers(1, length))
    spans = [PolicySpan(lineage=0, version=draw(st.integers(0, 2**40)), start=0, end=cut)]
    if cut < length:
        spans.append(PolicySpan(lineage=1, version=draw(st.integers(0, 2**40)), start=cut, end=length))
    ends = [int(at) + 1 for at in np.flatnonzero(mask)]
    turns = [TurnReward(end=end, reward=draw(st.floats(-9, 9))) for end in ends[-1:] if draw(st.booleans())]
    return Sample(
        token_ids=(draw(words) >> 1).astype(np.int32),
        loss_mask=mask,
        inference_logprobs=np.where(mask == 1, logprobs, np.float32(0)),
        policy_spans=tuple(spans),
        turns=tuple(turns),
        own_sampling=draw(st.sampled_from([(), own_at((0, len(mask), 0.5))])),
        roles=tuple(
            RoleSpan(role=draw(st.sampled_from(ROLES)), start=int(at), end=int(at) + 1)
            for at in np.flatnonzero(mask == 0)
            if draw(st.booleans())
        ),
    )


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    status = draw(st.sampled_from(RolloutStatus))
    is_ok = status is RolloutStatus.OK
    size = draw(st.integers(1, 64))
    return Rollout(
        run_uid=draw(TEXT.filter(bool)),
        purpose=draw(st.sampled_from(Purpose)),
        ordinal=draw(st.integers(0, 2**64 - 1)),
        member=draw(st.integers(0, size - 1)),
        attempt=draw(st.integers(0, 2**32 - 1)),
        group_size=size,
        env=draw(TEXT),
        task_index=draw(st.integers(0, 2**64 - 1)),
        task_id=draw(TEXT),
        status=status,
        error=None
        if is_ok
        else RolloutError(
            type=draw(TEXT), message=draw(TEXT), frames=draw(TEXT), is_infrastructure=draw(st.booleans())
        ),
        samples=tuple(draw(st.lists(samples(), max_size=3))) if is_ok else (),
        reward=draw(FINITE),
        metrics=draw(st.dictionaries(TEXT, FINITE, max_size=3)),
        stop_condition=draw(TEXT),
        is_truncated=draw(st.booleans()),
        num_turns=draw(st.integers(0, 1000)),
        seconds=draw(FINITE),
        temperature=draw(FINITE),
        env_server=draw(TEXT),
        planned_step=draw(st.integers(0, 2**64 - 1)),
        messages_json=draw(TEXT),
    )


@pytest.mark.computes
@given(rollouts())
def test_round_trip(rollout):
    again = wire.decode_rollout(wire.encode_rollout(rollout))
    assert again == rollout
    assert wire.encode_rollout(again) == wire.encode_rollout(rollout)


@given(st.lists(rollouts(), max_size=4))
@settings(max_examples=10)
def test_archives_round_trip_in_order(many):
    found = wire.decode_archive(wire.encode_archive(many))
    assert found == sorted(many, key=lambda r: (r.ordinal, r.attempt, r.member))


@given(st.lists(rollouts(), max_size=3))
@settings(max_examples=20)
def test_an_archive_is_one_message(many):
    data = zstandard.decompress(wire.encode_archive(many))
    message = rollout_pb2.RolloutArchive.FromString(data)
    assert data == message.SerializeToString(deterministic=True) and len(message.rollouts) == len(many)


@given(rollouts(), st.data())
def test_damaged_bytes_are_refused_or_still_a_valid_rollout(rollout, data):
    """The log's sha256 finds every damage; this layer must at least never crash or return malformed columns."""
    encoded = bytearray(wire.encode_rollout(rollout))
    at = data.draw(st.integers(0, len(encoded) - 1))
    encoded[at] ^= 1 << data.draw(st.integers(0, 7))
    try:
        found = wire.decode_rollout(bytes(encoded))
    except CorruptObjectError:
        return
    wire.validate_rollout(found)


@given(st.binary(max_size=200))
def test_garbage_is_corrupt(garbage):
    for decode in (wire.decode_rollout, wire.decode_archive):
        with pytest.raises(CorruptObjectError):
            decode(garbage)


@given(st.lists(rollouts(), min_size=1, max_size=3), st.data())
@settings(max_examples=50)
def test_a_damaged_archive_is_corrupt(many, data):
    encoded = bytearray(wire.encode_archive(many))
    at = data.draw(st.integers(0, len(encoded) - 1))
    encoded[at] ^= data.draw(st.integers(1, 255))
    try:
        found = wire.decode_archive(bytes(encoded))
    except CorruptObjectError:
        return
    # A reserved or unused bit of the frame header may flip without effect; the content is under the checksum.
    assert found == sorted(many, key=lambda r: (r.ordinal, r.attempt, r.member))


def _sample(**changes) -> Sample:
    sample = Sample(
        token_ids=np.arange(6, dtype=np.int32),
        loss_mask=np.array([0, 0, 1, 1, 0, 1], np.uint8),
        inference_logprobs=np.array([0, 0, -1, -2, 0, -3], np.float32),
        policy_spans=(
            PolicySpan(lineage=0, version=5, start=2, end=4),
            PolicySpan(lineage=1, version=3, start=5, end=6),
        ),
    )
    return dataclasses.replace(sample, **changes)


def _rollout(**changes) -> Rollout:
    base = Rollout(
        run_uid="u",
        purpose=Purpose.TRAIN,
        ordinal=1,
        member=0,
        attempt=0,
        group_size=2,
        env="e",
        task_index=0,
        task_id="t",
        status=RolloutStatus.OK,
        samples=(_sample(),),
    )
    return dataclasses.replace(base, **changes)


def test_properties():
    rollout = _rollout()
    assert (rollout.num_tokens, rollout.num_loss_tokens) == (6, 3)
    assert (rollout.min_version, rollout.max_version) == (3, 5)
    assert (rollout.samples[0].min_version, rollout.samples[0].max_version, rollout.samples[0].lineage) == (3, 5, 1)
    assert _rollout(samples=()).min_version is None


def test_equality_is_by_content():
    assert _sample() == _sample()
    assert _sample() != _sample(token_ids=np.arange(1, 7, dtype=np.int32))
    assert _sample() != _sample(token_ids=np.arange(6, dtype=np.int64))
    assert _rollout() != _rollout(samples=(_sample(policy_spans=()),))


SPAN = PolicySpan(lineage=0, version=1, start=0, end=6)
FAILED = {"status": RolloutStatus.TIMEOUT, "samples": ()}


def turns_at(*ends: int) -> tuple[TurnReward, ...]:
    return tuple(TurnReward(end=end, reward=1.0) for end in ends)


def of_others(role: str, start: int, end: int) -> dict[str, object]:
    return {"samples": (_sample(roles=(RoleSpan(role=role, start=start, end=end),)),)}


MALFORMED = {
    "role": (_rollout(**of_others("tools", 4, 5)), r"roles\[0\] = tools\[4:5\]"),
    "role of a sampled token": (_rollout(**of_others("tool", 3, 5)), r"roles\[0\]"),
    "role of no token": (_rollout(**of_others("tool", 4, 4)), r"roles\[0\]"),
    "role beyond": (_rollout(**of_others("tool", 6, 7)), r"roles\[0\]"),
    "roles overlap": (_rollout(samples=(_sample(roles=(RoleSpan(role="tool", start=4, end=5),) * 2),)), r"roles\[1\]"),
    "lengths": (_rollout(samples=(_sample(loss_mask=np.ones(5, np.uint8)),)), r"loss_mask"),
    "dtype": (_rollout(samples=(_sample(token_ids=np.arange(6, dtype=np.int64)),)), r"token_ids.*int32\[6\]"),
    "empty": (
        _rollout(
            samples=(
                Sample(
                    token_ids=np.zeros(0, np.int32),
                    loss_mask=np.zeros(0, np.uint8),
                    inference_logprobs=np.zeros(0, np.float32),
                ),
            )
        ),
        "no token",
    ),
    "mask 2": (_rollout(samples=(_sample(loss_mask=np.full(6, 2, np.uint8)),)), "neither 0 nor 1"),
    "nan": (_rollout(samples=(_sample(inference_logprobs=np.full(6, np.nan, np.float32)),)), "finite"),
    "masked logprob": (_rollout(samples=(_sample(inference_logprobs=np.full(6, -1, np.float32)),)), "must be 0"),
    "negative id": (_rollout(samples=(_sample(token_ids=np.full(6, -1, np.int32)),)), "negative"),
    "no span": (_rollout(samples=(_sample(policy_spans=()),)), "no span covers"),
    "uncovered": (_rollout(samples=(_sample(policy_spans=(dataclasses.replace(SPAN, end=5),)),)), "no span covers"),
    "beyond": (_rollout(samples=(_sample(policy_spans=(dataclasses.replace(SPAN, end=7),)),)), "ascending"),
    "overlap": (_rollout(samples=(_sample(policy_spans=(SPAN, SPAN)),)), "ascending"),
    "empty span": (_rollout(samples=(_sample(policy_spans=(dataclasses.replace(SPAN, end=0),)),)), "ascending"),
    "turn in a prompt": (_rollout(samples=(_sample(turns=turns_at(2, 6)),)), "does not end a turn"),
    "turns that descend": (_rollout(samples=(_sample(turns=turns_at(4, 4, 6)),)), "does not end a turn"),
    "turn beyond": (_rollout(samples=(_sample(turns=turns_at(4, 7)),)), "does not end a turn"),
    "own sampling of nothing": (_rollout(samples=(_sample(own_sampling=own_at((2, 2, 1.0))),)), "not ascending"),
    "own sampling beyond": (_rollout(samples=(_sample(own_sampling=own_at((2, 7, 1.0))),)), "not ascending"),
    "own sampling that descends": (
        _rollout(samples=(_sample(own_sampling=own_at((2, 4, 1.0), (3, 6, 1.0))),)),
        "not ascending",
    ),
    "own sampling at no temperature": (
        _rollout(samples=(_sample(own_sampling=own_at((2, 4, float("inf")))),)),
        "temperature inf",
    ),
    "a token behind the turns": (_rollout(samples=(_sample(turns=turns_at(4)),)), "last sampled token"),
    "turn's reward": (_rollout(samples=(_sample(turns=(TurnReward(end=6, reward=float("nan")),)),)), "not finite"),
    "reward": (_rollout(reward=float("inf")), "reward"),
    "metric": (_rollout(metrics={"m": float("nan")}), r"metrics\[m\]"),
    "member": (_rollout(member=2), "member"),
    "no run": (_rollout(run_uid=""), "run_uid"),
    "error but ok": (_rollout(error=RolloutError(type="E", message="")), "status is OK"),
    "failed with samples": (_rollout(status=RolloutStatus.TIMEOUT), "must be empty"),
    "failed without error": (_rollout(**FAILED), "must be set"),
    "long frames": (_rollout(**FAILED, error=RolloutError(type="E", message="", frames="x" * 1001)), "1000"),
    "long error": (_rollout(**FAILED, error=RolloutError(type="E", message="x" * 2001)), "2000"),
    "long messages": (_rollout(messages_json="ä" * 40_000), "messages_json"),
}


MALFORMED_SAMPLES = {name for name, (rollout, _) in MALFORMED.items() if rollout.samples} - {
    "member", "no run", "reward", "metric", "error but ok", "failed with samples", "long messages",
}  # fmt: skip


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_rollouts_do_not_leave_who_made_them(name):
    rollout, match = MALFORMED[name]
    with pytest.raises(CorruptObjectError, match=match):
        wire.rollout_to_proto(rollout)


@pytest.mark.parametrize("name", sorted(MALFORMED.keys() - MALFORMED_SAMPLES))
def test_malformed_fields_are_not_written(name):
    """Samples come from workers, and were checked when they came in."""
    rollout, match = MALFORMED[name]
    with pytest.raises(CorruptObjectError, match=match):
        wire.encode_rollout(rollout)


@pytest.mark.parametrize("name", sorted(MALFORMED_SAMPLES - {"dtype"}))  # as bytes they are of the right type
def test_malformed_samples_are_read_neither_from_a_worker_nor_from_the_log_nor_from_an_archive(name):
    rollout, match = MALFORMED[name]
    data = wire.encode_rollout(rollout)
    for read in (
        lambda: wire.rollout_from_proto(rollout_pb2.Rollout.FromString(data)),
        lambda: wire.decode_rollout(data),
        lambda: wire.decode_archive(wire.encode_archive([rollout])),
    ):
        with pytest.raises(CorruptObjectError, match=match):
            read()


def test_columns_that_came_in_cannot_be_changed():
    """So that they need no second look before they go on."""
    [sample] = wire.decode_rollout(wire.encode_rollout(_rollout())).samples
    for column in (sample.token_ids, sample.loss_mask, sample.inference_logprobs):
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 1


def test_malformed_rollouts_are_not_read():
    message = rollout_pb2.Rollout.FromString(wire.encode_rollout(_rollout()))
    message.samples[0].loss_mask = b"\1" * 5
    with pytest.raises(CorruptObjectError, match="loss_mask"):
        wire.decode_rollout(message.SerializeToString())
    message.samples[0].token_ids = b"\1" * 23
    with pytest.raises(CorruptObjectError, match="multiple of 4"):
        wire.decode_rollout(message.SerializeToString())
    for field in ("status", "purpose"):
        message = rollout_pb2.Rollout.FromString(wire.encode_rollout(_rollout()))
        setattr(message, field, 99)
        with pytest.raises(CorruptObjectError, match=field):
            wire.decode_rollout(message.SerializeToString())


def test_an_evaluation_may_lack_spans():
    rollout = _rollout(purpose=Purpose.EVAL, samples=(_sample(policy_spans=()),))
    assert wire.decode_rollout(wire.encode_rollout(rollout)) == rollout


def test_every_enum_value_has_a_wire_value():
    for status in RolloutStatus:
        assert wire.STATUS_FROM_WIRE[rollout_pb2.RolloutStatus.Value(f"ROLLOUT_STATUS_{status.name}")] is status
    assert len(RolloutStatus) == len(rollout_pb2.RolloutStatus.keys()) - 1
    assert all(wire.purpose_from_wire(wire.PURPOSE_TO_WIRE[purpose]) is purpose for purpose in Purpose)


def _bomb(size: int) -> bytes:
    """Return a frame of few bytes that says, truly, that it holds `size` of them."""
    return zstandard.ZstdCompressor(level=3).compress(bytes(size))


def test_an_archive_of_few_bytes_does_not_become_gigabytes():
    bomb = _bomb(300 << 20)
    assert len(bomb) < 100_000
    tracemalloc.start()
    with pytest.raises(CorruptObjectError, match="which is not from 0 to") as caught:
        wire.decode_archive(bomb)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert caught.value.reason == "ROLLOUT_ARCHIVE_CORRUPT"
    assert peak < 1 << 20


def test_an_archive_that_could_not_be_read_again_is_not_written(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(wire, "MAX_ARCHIVE_BYTES", 100)
    error = RolloutError(type="Error", message="x" * 200)
    rollout = Rollout(
        run_uid="u", purpose=Purpose.TRAIN, ordinal=0, member=0, attempt=0, group_size=1, env="e", task_index=0,
        task_id="t", status=RolloutStatus.ENV_ERROR, error=error, samples=(), reward=0.0, metrics={},
        stop_condition="", is_truncated=False, num_turns=0, seconds=0.0, temperature=1.0, env_server="s",
        planned_step=0, messages_json="",
    )  # fmt: skip
    with pytest.raises(CorruptObjectError, match="would be read again") as caught:
        wire.encode_archive([rollout])
    assert caught.value.reason == "ROLLOUT_ARCHIVE_TOO_LARGE"


def test_a_rollout_above_its_bound_is_not_parsed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(wire, "MAX_ROLLOUT_BYTES", 100)
    with pytest.raises(CorruptObjectError, match="at most 100 are read"):
        wire.decode_rollout(bytes(101))


@pytest.mark.parametrize(
    ("status", "is_infrastructure", "counts"),
    [
        (RolloutStatus.ENV_ERROR, False, True),
        (RolloutStatus.WORKER_DIED, False, True),
        (RolloutStatus.MODEL_ERROR, False, True),
        (RolloutStatus.MODEL_ERROR, True, False),
        (RolloutStatus.ENGINE_LOST, False, False),
        (RolloutStatus.CANCELLED, False, False),
    ],
)
def test_only_what_the_environment_did_is_its_failure(
    status: RolloutStatus, is_infrastructure: bool, counts: bool
) -> None:
    error = RolloutError(type="E", message="m", is_infrastructure=is_infrastructure)
    assert _rollout(samples=(), status=status, error=error).is_environment_failure is counts
    assert not _rollout().is_environment_failure
