"""What the library asks again for every rollout is answered from memory, and answered the same."""

import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("verifiers")

import verifiers as vf

from millrace.env_server.library.lookups import remember_lookups


def _rubric_module() -> ModuleType:
    module = inspect.getmodule(vf.Rubric)
    assert module is not None
    return module


@pytest.fixture
def library() -> Iterator[Any]:
    module = _rubric_module()
    before = vars(module)["inspect"]
    remember_lookups()
    yield vars(module)["inspect"]
    vars(module)["inspect"] = before


def test_a_signature_is_computed_once_and_is_the_functions_own(library: Any) -> None:
    class Reward:
        def score(self, completion: str, *, answer: str = "") -> float:
            return float(completion == answer)

    method = Reward().score
    assert library.signature(method) == inspect.signature(method)
    assert library.signature(method) is library.signature(method)
    assert library.iscoroutinefunction is inspect.iscoroutinefunction
    assert inspect.signature(method) is not inspect.signature(method), "nobody else's module is changed"


def test_what_cannot_be_kept_is_computed_each_time(library: Any) -> None:
    class Unhashable:
        __hash__ = None  # pyright: ignore[reportAssignmentType]

        def __call__(self, prompt: str) -> float:
            return float(len(prompt))

    assert list(library.signature(Unhashable()).parameters) == ["prompt"]
    with pytest.raises(TypeError, match="not a callable object"):
        library.signature("text")
