"""`Backoff`: what it waits after which failure."""

import pytest

from millrace.backoff import Backoff


def test_each_delay_is_twice_the_one_before_up_to_the_longest() -> None:
    backoff = Backoff(0.5, 3.0)
    assert [backoff.after(number) for number in range(1, 6)] == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_before_the_first_failure_it_is_the_first_delay() -> None:
    assert Backoff(0.5, 3.0).after(0) == 0.5


def test_a_broken_number_of_failures_lies_between() -> None:
    """A supervisor forgets deaths little by little."""
    assert Backoff(1.0, 100.0, factor=4.0).after(1.5) == 2.0


def test_it_never_overflows() -> None:
    assert Backoff(0.01, 60.0, factor=3.0).after(10**9) == 60.0


def test_it_is_spread() -> None:
    delays = {Backoff(2.0, 8.0, spread=(0.5, 1.0)).after(2) for _ in range(200)}
    assert len(delays) > 100
    assert 2.0 <= min(delays) < 2.5
    assert 3.5 < max(delays) <= 4.0


@pytest.mark.parametrize(("asked_s", "given_s"), [(3.0, 3.0), (600.0, 8.0)])
def test_what_another_asks_for_is_limited_as_well(asked_s: float, given_s: float) -> None:
    assert Backoff(1.0, 8.0).limited(asked_s) == given_s
