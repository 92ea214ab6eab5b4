"""Advantages by a function of the user's own: loaded where it is allowed, checked before a run starts."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from millrace.algorithms import Custom, make_algorithms
from millrace.config.load import validate_document
from millrace.config.sections.algo import AlgoConfig
from millrace.custom_code import EVERYTHING, CustomCode
from millrace.errors import InvalidSpecError

CODE = """
import numpy as np
not_a_function = 3
def shifted(rewards, lengths, by=0.5): return rewards - by
def by_length(rewards, lengths): return rewards / lengths
def raises(rewards, lengths): raise KeyError("no such thing")
def wrong_shape(rewards, lengths): return rewards[:1]
def not_finite(rewards, lengths): return rewards / 0
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_advantages.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "modules", {name: each for name, each in sys.modules.items() if name != "my_advantages"})
    return "my_advantages"


def config(function: str, **kwargs: float) -> AlgoConfig:
    return AlgoConfig(type="custom", import_path=f"my_advantages:{function}", kwargs=dict(kwargs))


def document(algo: dict[str, object], *envs: dict[str, object]) -> str:
    orchestrator = {"algo": algo, "rollouts_per_example": 2, "env": list(envs) or [{"id": "e"}]}
    return json.dumps({"model": {"name": "gpt2"}, "orchestrator": orchestrator})


def test_the_function_makes_the_advantages(module: str) -> None:
    custom = Custom.load(config("shifted", by=0.25), EVERYTHING)
    assert custom.advantages(np.asarray([1.0, 0.0]), np.asarray([1, 1])).tolist() == [0.75, -0.25]
    by_length = Custom.load(config("by_length"), EVERYTHING)
    assert by_length.advantages(np.asarray([1.0, 1.0]), np.asarray([2, 4])).tolist() == [0.5, 0.25]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("raises", "it raised KeyError: 'no such thing'"),
        ("wrong_shape", r"it returned the shape \(1,\), not one advantage for each of 3 rollouts"),
        ("not_finite", "it returned an advantage that is not finite, of rewards 0, 1, 0.5"),
        ("missing", "has no 'missing'"),
        ("not_a_function", "has a int, not a function, as 'not_a_function'"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_when_it_is_loaded(module: str, function: str, message: str) -> None:
    with np.errstate(all="ignore"), pytest.raises(InvalidSpecError, match=message) as raised:
        Custom.load(config(function), EVERYTHING)
    assert raised.value.reason == "CUSTOM_CODE_INVALID"
    assert raised.value.violations[0].field == "orchestrator.algo.import_path"


def test_a_module_that_does_not_import_is_refused() -> None:
    wrong = AlgoConfig(type="custom", import_path="no_such_module_at_all:fn")
    with pytest.raises(InvalidSpecError, match="cannot be imported: ModuleNotFoundError"):
        Custom.load(wrong, EVERYTHING)


@pytest.mark.parametrize(
    ("allowed", "is_allowed"),
    [("", False), ("my_advantages", True), ("my_", False), ("other, my_advantages", True), ("*", True), ("os", False)],
)
def test_only_allowed_modules_are_loaded(module: str, allowed: str, is_allowed: bool) -> None:
    code = CustomCode.parse(allowed)
    if is_allowed:
        Custom.load(config("shifted"), code)
        return
    with pytest.raises(InvalidSpecError, match="MILLRACE_CUSTOM_CODE") as raised:
        Custom.load(config("shifted"), code)
    assert raised.value.reason == "CUSTOM_CODE_NOT_ALLOWED" and module not in sys.modules


def test_modules_below_an_allowed_one_are_allowed() -> None:
    code = CustomCode.parse("team.rl")
    assert code.allows("team.rl") and code.allows("team.rl.losses")
    assert not code.allows("team.rlx") and not code.allows("team")


def test_a_module_that_was_edited_is_loaded_anew(module: str, tmp_path: Path) -> None:
    Custom.load(config("shifted"), EVERYTHING)
    source = tmp_path / "my_advantages.py"
    source.write_text(CODE.replace("rewards - by", "rewards + by"))
    os.utime(source, (1e9, 1e9))
    edited = Custom.load(config("shifted"), EVERYTHING)
    assert edited.advantages(np.asarray([1.0, 0.0]), np.asarray([1, 1])).tolist() == [1.5, 0.5]


def test_an_environment_may_have_a_function_of_its_own(module: str) -> None:
    own = {"type": "custom", "import_path": "my_advantages:shifted"}
    settings = validate_document(document({"type": "grpo"}, {"id": "a"}, {"id": "b", "algo": own})).orchestrator
    made = make_algorithms(settings, EVERYTHING)
    assert isinstance(made["b"], Custom) and not isinstance(made["a"], Custom)


def test_the_path_is_required_and_only_for_custom() -> None:
    with pytest.raises(InvalidSpecError, match="is required for custom"):
        validate_document(document({"type": "custom"}))
    with pytest.raises(InvalidSpecError, match="import_path"):
        validate_document(document({"type": "grpo", "import_path": "a:b"}))
