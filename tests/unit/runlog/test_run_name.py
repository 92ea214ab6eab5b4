"""Names of runs: made, suggested, and found again."""

import pytest

from millrace.errors import InvalidSpecError, NotFoundError
from millrace.runlog import names

RUNS = {"alpha-1": "01a", "alpha-2": "03c", "beta": "02b"}


@pytest.mark.parametrize(
    ("stem", "tail", "made"),
    [
        ("Reverse_Text", "abc123", "reverse-text-abc123"),
        ("2048", "ff", "run-2048-ff"),
        ("***", "ff", "run-ff"),
        ("a--b", "", "a--b"),
        ("x" * 80, "at-3-beef", "x" * 53 + "-at-3-beef"),
    ],
)
def test_a_made_name_is_legal(stem: str, tail: str, made: str) -> None:
    assert names.make(stem, tail) == made
    assert names.is_legal(made)


def test_a_taken_name_gets_a_number_and_stays_legal() -> None:
    taken = {"demo", "demo-2", "y" * 63}
    assert names.make("demo", is_taken=taken.__contains__) == "demo-3"
    assert names.make("y" * 63, is_taken=taken.__contains__) == "y" * 61 + "-2"


@pytest.mark.parametrize(
    ("text", "name"),
    [("alpha-1", "alpha-1"), ("runs/beta", "beta"), ("03c", "alpha-2"), ("be", "beta"), ("-", "alpha-2")],
)
def test_a_run_is_found(text: str, name: str) -> None:
    assert names.resolve(text, RUNS) == name


def test_exact_names_are_not_completed() -> None:
    assert names.resolve("02b", RUNS, is_exact=True) == "beta"
    for text in ("be", "-"):
        with pytest.raises(NotFoundError):
            names.resolve(text, RUNS, is_exact=True)


def test_what_is_not_found_says_what_may_be_meant() -> None:
    with pytest.raises(InvalidSpecError, match="begins the names of 2 runs: alpha-1, alpha-2"):
        names.resolve("alp", RUNS)
    with pytest.raises(NotFoundError, match="the store holds no run 'bteta'") as caught:
        names.resolve("bteta", RUNS, holder="the store holds")
    assert caught.value.remedy == "did you mean beta?"
    with pytest.raises(NotFoundError, match="no run yet"):
        names.resolve("-", {})
