"""Which cases of a table the default suite keeps."""

import pytest

from millrace_testing.lanes import by_default, one_by_default, pairs_by_default


def kept(cases) -> list:
    """Return the values of the cases that are not marked long."""
    found = []
    for case in cases:
        values, marks = (case.values, case.marks) if hasattr(case, "values") else ((case,), ())
        found += [values] if not marks else []
    return found


def test_corners_are_kept_and_the_other_cases_are_long() -> None:
    assert kept(by_default("abcd", "bd")) == [("b",), ("d",)]
    assert kept(one_by_default("abc")) == [("a",)]
    with pytest.raises(ValueError, match="no cases: \\['e'\\]"):
        by_default("abcd", "de")


@pytest.mark.parametrize(
    ("rows", "columns"), [("abcde", "xyz"), ("ab", "xyz"), ("abcd", "xy"), ("a", "x"), ("abc", "xyz")]
)
def test_each_row_and_each_column_is_kept_in_a_pair(rows: str, columns: str) -> None:
    pairs = pairs_by_default(rows, columns)
    assert [each.values for each in pairs] == [(row, column) for row in rows for column in columns]
    assert {row for row, _ in kept(pairs)} == set(rows) and {column for _, column in kept(pairs)} == set(columns)
    assert len(kept(pairs)) == max(len(rows), len(columns))
