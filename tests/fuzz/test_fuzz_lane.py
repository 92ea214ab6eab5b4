"""The lane finds what it looks for, and its corpus is that of every target; the lane itself is `make fuzz`."""

import random
import subprocess
import sys
import time

import pytest

from millrace.errors import CorruptObjectError
from millrace_testing.fuzz import mutate, run
from millrace_testing.fuzz.targets import CORPUS, TARGETS, Target


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


BAD_TARGETS = """
import os
from millrace_testing.fuzz import run
from millrace_testing.fuzz.targets import Target

def die(data):
    os._exit(7)

held, calls = [], iter(range(10_000_000))

def grow(data):
    if next(calls) > 5 and not held:
        held.append(bytearray(b"x") * (300 << 20))
    return data

for decode in (die, grow):
    print(run.in_child(Target(name="rollout", load=lambda: (decode, None)), 0.3, 1).findings)
"""


def test_a_process_that_dies_or_grows_is_a_finding():
    # In a process of its own: the lane forks, which is no good beside the threads of other tests.
    lane = [sys.executable, "-c", BAD_TARGETS]
    done = subprocess.run(lane, capture_output=True, text=True, timeout=60, check=True)
    died, grew = done.stdout.splitlines()
    assert "ended with 7" in died
    assert "grew by" in grew


def test_every_target_has_a_corpus_and_nothing_else_has():
    assert {path.name for path in CORPUS.iterdir()} == {target.name for target in TARGETS}
    assert all(target.seeds() for target in TARGETS)


def test_inputs_come_again_with_the_seed():
    seeds = [b"abcdef" * 10, b"123"]
    once, again = ([mutate.spliced(r, seeds, mutate.bytes_of) for _ in range(50)] for r in map(random.Random, (3, 3)))
    assert once == again and len(set(once)) > 30
