"""Which of a test's cases the default suite runs; `make test-long` runs the others."""

from collections.abc import Collection, Iterable

import pytest
from _pytest.mark.structures import ParameterSet


def by_default(cases: Iterable[str], corners: Collection[str]) -> list[str | ParameterSet]:
    """Return `cases`, all but the `corners` marked long. ValueError if a corner is no case."""
    cases = list(cases)
    if unknown := set(corners).difference(cases):
        raise ValueError(f"no cases: {sorted(unknown)}")
    return [case if case in corners else pytest.param(case, marks=pytest.mark.long) for case in cases]


def one_by_default(cases: Iterable[str]) -> list[str | ParameterSet]:
    """Return the first case as it is, and the others marked long: each of them costs as much as the first."""
    cases = list(cases)
    return by_default(cases, cases[:1])
