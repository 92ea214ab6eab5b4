"""Which of a test's cases the default suite runs; `make test-long` runs the others."""

from collections.abc import Iterable

import pytest
from _pytest.mark.structures import ParameterSet


def one_by_default(cases: Iterable[str]) -> list[str | ParameterSet]:
    """The first case as it is, and the others marked long: each of them costs as much as the first."""
    first, *others = cases
    return [first, *(pytest.param(case, marks=pytest.mark.long) for case in others)]
