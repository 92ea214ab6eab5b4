"""Token logs: what is encoded is decoded, which rollouts are chosen, and what damaged bytes give."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest

from millrace.errors import CapacityError, CorruptObjectError
from millrace.internal.v1 import token_log_pb2
from millrace.rollouts import token_log as module
from millrace.rollouts.token_log import (
    LoggedSample,
    TokenLog,
    chosen_rollouts,
    decode_token_log,
    encode_token_log,
    merged,
    samples_by_part,
)
from millrace.rollouts.types import PolicySpan, Purpose, Rollout, RolloutStatus, Sample


def logged(sample: int, mask: list[int], *, member: int = 0, first: float = -1.0) -> LoggedSample:
    count = sum(mask)
    return LoggedSample(
        sample=sample,
        ordinal=4,
        member=member,
        attempt=1,
        minibatch=2,
        mask=np.array(mask, np.uint8),
        logprobs=np.array([first - at / 7 for at in range(count)], np.float32),
        entropies=np.array([at / 3 for at in range(count)], np.float16),
    )


def whole(*samples: LoggedSample) -> TokenLog:
    return TokenLog(
        run_uid="u", step=7, lineage=1, chain_hash=b"c" * 32, num_rollouts=9, share=0.25, samples=tuple(samples)
    )


def columns(log: TokenLog) -> list[tuple]:
    return [
        (each.sample, each.key, each.minibatch, each.mask.tolist(), each.logprobs.tobytes(), each.entropies.tobytes())
        for each in log.samples
    ]


def test_what_is_encoded_is_decoded_bit_for_bit() -> None:
    odd = replace(logged(5, [0, 1, 1]), logprobs=np.array([-np.inf, np.nan], np.float32))
    log = whole(logged(0, [0] * 9 + [1] * 8), logged(3, [0, 1], member=2), odd, logged(6, [0, 0, 0]))
    found = decode_token_log(encode_token_log(log), where="x")
    assert replace(found, samples=()) == replace(log, samples=())
    assert columns(found) == columns(log)
    assert decode_token_log(encode_token_log(whole()), where="x") == whole()


def test_it_is_as_small_as_it_is_said_to_be() -> None:
    """Six bytes per sampled token, and a bit per token."""
    count = 4096
    assert len(encode_token_log(whole(logged(0, [1] * count)))) == pytest.approx(count * 6.125, abs=200)


def test_parts_of_ranks_become_one_in_the_order_of_the_batch() -> None:
    first, second = whole(logged(1, [0, 1]), logged(4, [1, 1])), whole(logged(0, [1]), logged(2, [0, 1]))
    assert [each.sample for each in merged([first, second]).samples] == [0, 1, 2, 4]
    assert columns(merged([whole(), second])) == columns(second)


MEMBERS = [(ordinal, member, ordinal % 3) for ordinal in range(20) for member in range(4)]


@pytest.mark.parametrize(
    ("share", "count"), [(0.0, 0), (0.001, 1), (0.1, 8), (0.7, 56), (0.99, 80), (1.0, 80), (1 / 3, 27)]
)
def test_a_share_of_the_rollouts_is_chosen(share: float, count: int) -> None:
    chosen = chosen_rollouts(MEMBERS, share)
    assert len(chosen) == count and chosen <= set(MEMBERS)
    assert chosen == chosen_rollouts([*reversed(MEMBERS), *MEMBERS], share)
    assert chosen <= chosen_rollouts(MEMBERS, min(1.0, share * 1.5))


def test_the_choice_stays_as_it_is_and_is_spread_over_the_groups() -> None:
    """It decides what a resumed run writes: other releases must choose alike."""
    assert sorted(chosen_rollouts(MEMBERS, 0.05)) == [(11, 2, 2), (12, 3, 0), (13, 3, 1), (17, 2, 2)]
    assert len({ordinal for ordinal, _, _ in chosen_rollouts(MEMBERS, 0.25)}) > 8


def enveloped(body: bytes) -> bytes:
    return b"MRTOKLG1" + hashlib.sha256(body).digest() + body


def changed(**fields: object) -> bytes:
    message = token_log_pb2.TokenLog.FromString(encode_token_log(whole(logged(0, [0, 1, 1]), logged(2, [1])))[40:])
    for name, value in fields.items():
        setattr(message, name, value)
    return enveloped(message.SerializeToString())


def with_entry(**fields: int) -> bytes:
    message = token_log_pb2.TokenLog.FromString(changed()[40:])
    for name, value in fields.items():
        setattr(message.entries[1], name, value)
    return enveloped(message.SerializeToString())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"MRTOKLG1",
        changed()[:-1],
        changed() + b"x",
        b"MRSCORE1" + changed()[8:],
        enveloped(b"\xff" * 20),
        changed(run_uid=""),
        changed(chain_hash=b"short"),
        changed(share=1.5),
        changed(share=float("nan")),
        changed(mask=b""),
        changed(mask=b"\x60\x80\x00"),
        changed(mask=b"\x68\x80"),
        changed(logprobs=b"\0" * 13),
        changed(logprobs=b"\0" * 8),
        changed(logprobs=b"\0" * 16),
        changed(entropies=b"\0" * 5),
        changed(entropies=b"\0" * 4),
        changed(entropies=b"\0" * 4, logprobs=b"\0" * 8),
        with_entry(sample=0),
        with_entry(length=0),
        with_entry(length=9),
        with_entry(length=4_000_000_000),
    ],
)
def test_bytes_that_are_no_token_log_are_named(data: bytes) -> None:
    with pytest.raises(CorruptObjectError, match="token log s3://b/k") as caught:
        decode_token_log(data, where="s3://b/k")
    assert caught.value.reason == "TOKEN_LOG_CORRUPT"


def test_one_that_is_too_large_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TOKEN_LOG_BYTES", 200)
    with pytest.raises(CapacityError, match="at most 200 are stored") as caught:
        encode_token_log(whole(logged(0, [1] * 64)))
    assert "trainer.token_log.share" in str(caught.value)


def rollout(*masks: list[int]) -> Rollout:
    samples = tuple(
        Sample(
            token_ids=np.zeros(len(mask), np.int32),
            loss_mask=np.array(mask, np.uint8),
            inference_logprobs=np.zeros(len(mask), np.float32),
            policy_spans=(PolicySpan(lineage=0, version=0, start=0, end=len(mask)),),
        )
        for mask in masks
    )
    return Rollout(
        run_uid="u", purpose=Purpose.TRAIN, ordinal=4, member=0, attempt=1, group_size=1, env="e", task_index=0,
        task_id="t", status=RolloutStatus.OK, samples=samples,
    )  # fmt: skip


def test_the_sequences_of_a_rollout_find_their_own() -> None:
    """The batch was cut at four tokens: of the second sequence nothing sampled was left, and the third lost its end."""
    first, third = logged(3, [0, 1, 1]), logged(4, [0, 0, 1, 0])
    log = whole(first, third, logged(5, [1, 1], member=1))
    found = samples_by_part(log, rollout([0, 1, 1], [0, 0, 0, 0, 1], [0, 0, 1, 0, 1]))
    assert [None if each is None else each.sample for each in found] == [3, None, 4]
    assert samples_by_part(whole(), rollout([0, 1])) == [None]


def test_a_first_token_that_was_sampled_has_no_log_prob() -> None:
    (found,) = samples_by_part(whole(logged(0, [0, 1])), rollout([1, 1]))
    assert found is not None and found.sample == 0
