"""A loss of the user's own: loaded where it is allowed, tried before a model is loaded, checked at every call."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.config.load import validate_document
from millrace.config.sections.loss import LossConfig
from millrace.custom_code import EVERYTHING, CustomCode
from millrace.errors import InvalidSpecError, InvalidStateError
from millrace.models.torch_support import shortage_named
from millrace.trainer.losses import LossInputs, loss_function, token_losses

CODE = """
from dataclasses import replace
import torch
from millrace.trainer.losses import policy_losses

def building(inputs, config):
    return policy_losses(inputs, config)

def doubled(inputs, config):
    losses = policy_losses(inputs, config.model_copy(update={"type": "importance_sampling"}))
    return replace(losses, rl=losses.rl * config.kwargs.get("by", 2.0))

not_a_function = 3
def raises(inputs, config): raise KeyError("no such thing")
def takes_all_memory(inputs, config):
    torch.empty(2**50 if len(inputs.rl_weights) > 2 else 1)
    return policy_losses(inputs, config)
def a_number(inputs, config): return 3.0
def wrong_shape(inputs, config):
    losses = doubled(inputs, config)
    return replace(losses, rl=losses.rl[:1])
def without_gradient(inputs, config):
    losses = doubled(inputs, config)
    return replace(losses, rl=losses.rl.detach(), ce=losses.ce.detach())
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_losses.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "modules", {name: each for name, each in sys.modules.items() if name != "my_losses"})


def config(function: str, **keys: Any) -> LossConfig:
    return LossConfig.model_validate({"type": "custom", "import_path": f"my_losses:{function}", **keys})


def inputs() -> LossInputs:
    shape = (1, 3)
    return LossInputs(
        trainer_logprobs=torch.tensor([[0.0, -1.0, -2.0]], requires_grad=True),
        inference_logprobs=torch.tensor([[0.0, -1.5, -1.0]]),
        advantages=torch.ones(shape),
        loss_mask=torch.tensor([[False, True, True]]),
        rl_weights=torch.ones(shape),
        ce_weights=torch.zeros(shape),
        reference_logprobs=torch.full(shape, -1.5),
    )


def test_the_function_is_the_loss_and_has_its_keywords() -> None:
    plain = token_losses(inputs(), LossConfig.model_validate({"type": "importance_sampling"}))
    assert torch.equal(loss_function(config("doubled"), EVERYTHING)(inputs(), config("doubled")).rl, 2 * plain.rl)
    by_3 = config("doubled", kwargs={"by": 3.0})
    assert torch.equal(loss_function(by_3, EVERYTHING)(inputs(), by_3).rl, 3 * plain.rl)


def test_the_divergence_from_the_start_model_is_added_to_it() -> None:
    with_kl, without = config("doubled", kl={"coef": 0.1}), config("doubled")
    loss_of = loss_function(with_kl, EVERYTHING)
    added = loss_of(inputs(), with_kl).rl - loss_of(inputs(), without).rl
    like = {"type": "importance_sampling"}
    wanted = token_losses(inputs(), LossConfig.model_validate({**like, "kl": {"coef": 0.1}})).rl
    assert torch.allclose(added, wanted - token_losses(inputs(), LossConfig.model_validate(like)).rl)
    assert float(added.detach().sum()) > 0


def test_it_may_build_on_the_default_loss_and_what_is_added_counts_once() -> None:
    for keys in ({}, {"kl": {"coef": 0.1}}):
        own, default = config("building", **keys), LossConfig.model_validate(keys)
        assert torch.equal(loss_function(own, EVERYTHING)(inputs(), own).rl, token_losses(inputs(), default).rl)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("raises", "it raised KeyError: 'no such thing'"),
        ("a_number", "it returned a float, not a millrace.trainer.losses.TokenLosses"),
        ("wrong_shape", r"its rl must be a tensor of shape \(2, 3\), one value per token, not shape \(1, 3\)"),
        ("without_gradient", "neither its rl nor its ce depends on inputs.trainer_logprobs, so it trains nothing"),
        ("missing", "has no 'missing'"),
        ("not_a_function", "has a int, not a function, as 'not_a_function'"),
    ],
)
def test_what_is_wrong_with_it_is_said_before_anything_is_loaded(function: str, says: str) -> None:
    with pytest.raises(InvalidSpecError, match=says) as raised:
        loss_function(config(function), EVERYTHING)
    assert raised.value.violations[0].field == "trainer.loss.import_path"


def test_memory_that_does_not_suffice_is_no_mistake_of_the_function() -> None:
    asked = config("takes_all_memory")
    loss_of = loss_function(asked, EVERYTHING)
    large = replace(inputs(), rl_weights=torch.ones(4, 3))
    with pytest.raises(InvalidStateError) as raised, shortage_named("train the run"):
        loss_of(large, asked)
    assert raised.value.reason == "OUT_OF_MEMORY"


def test_a_module_that_does_not_import_is_refused() -> None:
    wrong = LossConfig.model_validate({"type": "custom", "import_path": "no_such_module_at_all:fn"})
    with pytest.raises(InvalidSpecError, match="cannot be imported: ModuleNotFoundError") as raised:
        loss_function(wrong, EVERYTHING)
    assert raised.value.violations[0].field == "trainer.loss.import_path"


def test_a_trainer_that_does_not_allow_the_module_refuses_it() -> None:
    with pytest.raises(InvalidSpecError, match="MILLRACE_CUSTOM_CODE is not set, which allows none") as raised:
        loss_function(config("doubled"), CustomCode())
    assert raised.value.reason == "CUSTOM_CODE_NOT_ALLOWED"
    assert loss_function(LossConfig(), CustomCode()) is token_losses


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        ({"type": "custom"}, "is required for custom"),
        ({"type": "ppo", "import_path": "a:b"}, "import_path"),
        ({"type": "custom", "import_path": "no colon"}, "import_path"),
        (
            {"type": "custom", "import_path": "a:b", "correction": [{"type": "token_mask"}]},
            "no part of a custom",
        ),
    ],
)
def test_contradictions_are_refused_with_the_reason(loss: dict[str, Any], says: str) -> None:
    orchestrator = {"rollouts_per_example": 2, "env": [{"id": "e"}]}
    with pytest.raises(InvalidSpecError, match=says):
        validate_document({"model": {"name": "gpt2"}, "orchestrator": orchestrator, "trainer": {"loss": loss}})
