"""Loads the loss that a user names as `my.module:fn`, and checks what it returns."""

import importlib
import os
import sys

import torch

from millrace.config.sections.loss import LossConfig
from millrace.errors import InvalidSpecError, Violation
from millrace.trainer.losses import LossFunction, LossInputs, TokenLosses

_FLOATS = ("rl", "ce", "mismatch_kl")
_BOOLEANS = ("rl_members", "ce_members", "is_masked_low", "is_masked_high")


def load_loss(text: str) -> LossFunction:
    """The function `fn` of `my.module:fn`, found as `python -m` would find it; InvalidSpecError says what is wrong.

    It must have the shape of `millrace.trainer.losses.token_losses`:

        def fn(inputs: LossInputs, config: LossConfig) -> TokenLosses

    pure, over tensors of one shape [B, T]: `rl` and `ce` are the weighted loss of every token and 0 outside the bool
    tensors `rl_members` and `ce_members`; config is the run's `[trainer.loss]`. The other fields only feed metrics.
    """
    module_name, _, name = text.partition(":")
    if not module_name or not name.isidentifier():
        raise _bad(text, "must be module:function, such as my.module:fn")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # an installed command has its own directory there instead
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module may raise anything while it is imported
        raise _bad(text, f"module {module_name!r} cannot be imported: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        found = "has no" if function is None else f"has a {type(function).__name__}, not a function, as"
        raise _bad(text, f"module {module_name!r} ({module.__file__}) {found} {name!r}")

    def checked(inputs: LossInputs, config: LossConfig) -> TokenLosses:
        try:
            losses = function(inputs, config)
        except Exception as error:  # and so may a user's function
            raise _bad(text, f"it raised {type(error).__name__}: {error}") from error
        return _check(text, losses, shape=inputs.trainer_logprobs.shape)

    return checked


def _check(text: str, losses: object, *, shape: torch.Size) -> TokenLosses:
    if not isinstance(losses, TokenLosses):
        raise _bad(text, f"it returned a {type(losses).__name__}, not a millrace.trainer.losses.TokenLosses")
    for name in (*_FLOATS, *_BOOLEANS):
        value = getattr(losses, name)
        if not isinstance(value, torch.Tensor) or value.shape != shape:
            got = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
            raise _bad(text, f"its {name} must be a tensor of shape {tuple(shape)}, one value per token, not {got}")
        if (value.dtype == torch.bool) != (name in _BOOLEANS):
            raise _bad(text, f"its {name} must be {'bool' if name in _BOOLEANS else 'floating'}, not {value.dtype}")
    if not (losses.rl.requires_grad or losses.ce.requires_grad):
        raise _bad(text, "neither its rl nor its ce depends on inputs.trainer_logprobs, so it trains nothing")
    return losses


def _bad(text: str, problem: str) -> InvalidSpecError:
    violation = Violation(field="--loss", value=text, message=problem, source="command line")
    return InvalidSpecError(
        [violation],
        reason="LOSS_INVALID",
        remedy="write it like millrace.trainer.losses.token_losses: (LossInputs, LossConfig) -> TokenLosses",
    )
