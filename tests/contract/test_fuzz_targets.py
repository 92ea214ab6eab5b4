"""Every fuzz target exists: a decoder that moved fails here, and not after half an hour in the lane."""

import pytest

from millrace_testing.fuzz.run import check
from millrace_testing.fuzz.targets import TARGETS, Target

SERVERS = {"grpc", "http", "dashboard"}
"""Targets that start servers when they are loaded."""


@pytest.mark.parametrize("target", [each for each in TARGETS if each.name not in SERVERS], ids=lambda each: each.name)
def test_a_target_loads_and_reads_an_input_of_its_corpus(target: Target) -> None:
    decode, encode = target.load()
    target.mutate()
    assert max(check(target, decode, encode, data) for data in target.seeds()[:5])
