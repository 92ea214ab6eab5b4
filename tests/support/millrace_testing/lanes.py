"""Which of a test's cases the default suite runs; `make test-long` runs the others."""

from collections.abc import Collection, Iterable
from typing import Any

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


def pairs_by_default(rows: Iterable[Any], columns: Iterable[Any]) -> list[ParameterSet]:
    """Return each pair of a row and a column, all marked long but so few that each row and each column is in one."""
    rows, columns = list(rows), list(columns)
    kept = {(place % len(rows), place % len(columns)) for place in range(max(len(rows), len(columns)))}
    return [
        pytest.param(row, column, marks=() if (down, across) in kept else pytest.mark.long)
        for down, row in enumerate(rows)
        for across, column in enumerate(columns)
    ]
