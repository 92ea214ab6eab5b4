"""The lane finds what it looks for, and its corpus is that of every target; the lane itself is `make fuzz`."""

import random
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import mutate
import run
from targets import CORPUS, TARGETS, Target

from millrace.errors import CorruptObjectError


def target(decode, encode=None, **more) -> Target:
    return Target(name="rollout", load=lambda: (decode, encode), **more)


def refuse(data: bytes) -> bytes:
    raise CorruptObjectError("no")


def hang(data: bytes) -> bytes:
    ends = time.process_time() + 0.2
    while time.process_time() < ends:
        pass
    return data


@pytest.mark.parametrize(
    ("decode", "encode", "what"),
    [
        (lambda data: int(data), None, ValueError),
        (lambda data: [data] * (1 / 0), None, ZeroDivisionError),
        (lambda data: data, lambda value: value + b"x", AssertionError),
        (hang, None, AssertionError),
    ],
)
def test_what_a_decoder_must_not_do_is_found(decode, encode, what):
    with pytest.raises(what):
        run.check(target(decode, encode, max_s=0.1), decode, encode, b"x")


def test_what_a_decoder_may_do_is_not():
    assert run.check(target(refuse), refuse, None, b"x") is False
    assert run.check(target(bytes), bytes, bytes, b"x") is True


def test_a_process_that_dies_or_grows_is_a_finding(capfd):
    import os

    def die(data: bytes) -> bytes:
        os._exit(7)

    held = []

    def grow(data: bytes) -> bytes:
        if not held:
            held.append(bytearray(b"x") * (300 << 20))
        return data

    assert "ended with 7" in run.in_child(target(die), 0.1, 1).findings[0]
    calls = iter(range(10_000_000))
    late = target(lambda data: grow(data) if next(calls) > 5 else data)
    assert any("grew by" in finding for finding in run.in_child(late, 0.5, 1).findings)


def test_every_target_has_a_corpus_and_nothing_else_has():
    assert {path.name for path in CORPUS.iterdir()} == {target.name for target in TARGETS}
    assert all(target.seeds() for target in TARGETS)


def test_inputs_come_again_with_the_seed():
    seeds = [b"abcdef" * 10, b"123"]
    once, again = ([mutate.spliced(r, seeds, mutate.bytes_of) for _ in range(50)] for r in map(random.Random, (3, 3)))
    assert once == again and len(set(once)) > 30
