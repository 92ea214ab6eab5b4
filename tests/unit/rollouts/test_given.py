"""What a task is scored with is kept whatever it is, within bounds, and costs no rollout."""

import json
import math
import time
from datetime import date
from typing import Any

import numpy as np
import pytest

from millrace.decoding import decode_json
from millrace.env_server.adapters.outcome import bounded_object
from millrace.rollouts.types import MAX_TASK_JSON_BYTES


class Shy:
    """An object of an environment's author that has no text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


def kept(value: Any) -> Any:
    """Return what remains of an info's value, as every reader of the log finds it."""
    text = bounded_object({"answer": "42", "thing": value})
    assert len(text.encode()) <= MAX_TASK_JSON_BYTES
    found = decode_json(text, what="it", reason="CORRUPT")
    assert found["answer"] == "42", "what is odd takes nothing else along"
    return found["thing"]


OWN: dict[str, Any] = {}
OWN["self"] = OWN


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, 0),
        (False, False),
        (None, None),
        ([], []),
        ([1, "a", {"b": None}], [1, "a", {"b": None}]),
        (10**30, str(10**30)),
        (math.nan, "nan"),
        ([math.inf], ["inf"]),
        (np.arange(5), [0, 1, 2, 3, 4]),
        (np.float32(0.25), 0.25),
        (np.int64(7), 7),
        (np.bool_(True), True),
        (np.zeros(10**6), "[0. 0. 0. ... 0. 0. 0.]"),
        (b"\x00\xff", "b'\\x00\\xff'"),
        ({3}, [3]),
        ({(1, 2): "b", 1: "a"}, {"(1, 2)": "b", "1": "a"}),
        (date(2026, 1, 2), "2026-01-02"),
        ("\ud83d", "?"),
        (Shy(), "<Shy that cannot be shown: RuntimeError>"),
        (10**5000, "<int that cannot be shown: ValueError>"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_whatever_an_author_gives_is_kept_as_json(value: Any, expected: Any) -> None:
    assert kept(value) == expected and type(kept(value)) is type(expected)


@pytest.mark.parametrize("value", [OWN, nested(5000), {"a": OWN}])
def test_what_has_no_end_is_cut(value: Any) -> None:
    assert "…" in json.dumps(kept(value), ensure_ascii=False)


def test_long_values_are_cut_and_names_that_do_not_fit_are_counted() -> None:
    assert kept("x" * 5000) == "x" * 1024 + "… (3976 characters cut)"
    assert kept(["x" * 40] * 400).startswith('["xxxx') and kept(["x" * 40] * 400).endswith("… (cut)")
    given = json.loads(bounded_object({f"field{at:02}": "y" * 900 for at in range(50)} | {"answer": "first"}))
    assert next(iter(given)) == "answer" and given["…"] == f"{50 - (len(given) - 2)} more left out"
    assert bounded_object({}) == ""


def test_a_large_info_costs_what_is_kept_of_it() -> None:
    large = {"answer": "42", "table": [{"a": "y" * 1000}] * 200_000} | {f"name{at}": at for at in range(20_000)}
    began = time.process_time()
    given = json.loads(bounded_object(large))
    assert time.process_time() - began < 0.25, "4 s where all of it is written, name by name"
    assert given["answer"] == "42" and "more left out" in given["…"]
