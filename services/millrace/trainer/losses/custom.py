"""A loss of the user's own, for `trainer.loss.type = "custom"` and for `millrace run replay --loss`."""

import torch

from millrace.config.sections.loss import LossConfig
from millrace.custom_code import CustomCode, bad_code
from millrace.errors import InvalidSpecError
from millrace.models.torch_support import is_shortage
from millrace.trainer.losses.base import LossFunction, LossInputs, TokenLosses

FIELD = "trainer.loss.import_path"
_FLOATS = ("rl", "ce", "mismatch_kl")
_REMEDY = "write it like millrace.trainer.losses.policy_losses: (LossInputs, LossConfig) -> TokenLosses"
_BOOLEANS = ("rl_members", "ce_members", "is_masked_low", "is_masked_high")


def load_custom_loss(import_path: str, code: CustomCode, *, field: str = FIELD) -> LossFunction:
    """Import the function of `my.module:fn`; return it wrapped in a check of its result.

    Raises InvalidSpecError if it cannot be imported, and at a call if it raises or returns something unusable. It must
    have the signature of `millrace.trainer.losses.policy_losses`:

        def fn(inputs: LossInputs, config: LossConfig) -> TokenLosses

    It is pure, over tensors of one shape [B, T]: `rl` and `ce` are the weighted loss of every token and 0 outside the
    bool tensors `rl_members` and `ce_members`; config is the run's `[trainer.loss]`, `config.kwargs` are the user's own
    options. The other fields only feed metrics.
    """
    function = code.load(import_path, field=field, remedy=_REMEDY)

    def bad(problem: str) -> InvalidSpecError:
        return bad_code(field, import_path, problem, reason="LOSS_INVALID", remedy=_REMEDY)

    def checked(inputs: LossInputs, config: LossConfig) -> TokenLosses:
        try:
            losses = function(inputs, config)
        except Exception as error:  # a user's function may raise anything
            if is_shortage(error):  # no mistake of the function: reported as a shortage
                raise
            raise bad(f"it raised {type(error).__name__}: {error}") from error
        if not isinstance(losses, TokenLosses):
            raise bad(f"it returned a {type(losses).__name__}, not a millrace.trainer.losses.TokenLosses")
        if problem := _problem(losses, shape=inputs.trainer_logprobs.shape):
            raise bad(problem)
        return losses

    return checked


def try_loss(loss_of: LossFunction, config: LossConfig) -> None:
    """Compute the loss of two small samples, so that an unusable function raises before a model is loaded."""
    shape = (2, 3)
    logprobs = torch.full(shape, -1.0, requires_grad=True)
    mask = torch.tensor([[False, True, True], [False, True, False]])
    loss_of(
        LossInputs(
            trainer_logprobs=logprobs,
            inference_logprobs=torch.full(shape, -1.1),
            advantages=torch.tensor([[0.5], [-0.5]]).expand(shape),
            loss_mask=mask,
            rl_weights=torch.ones(shape),
            ce_weights=torch.zeros(shape),
            entropy=logprobs + 2.0 if config.entropy_coef else None,
            reference_logprobs=torch.full(shape, -1.2) if config.kl is not None else None,
        ),
        config,
    )


def _problem(losses: TokenLosses, *, shape: torch.Size) -> str:
    """Return what is wrong with the fields of a function's result, as text; empty if nothing is."""
    for name in (*_FLOATS, *_BOOLEANS):
        value = getattr(losses, name)
        if not isinstance(value, torch.Tensor) or value.shape != shape:
            got = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
            return f"its {name} must be a tensor of shape {tuple(shape)}, one value per token, not {got}"
        if (value.dtype == torch.bool) != (name in _BOOLEANS):
            return f"its {name} must be {'bool' if name in _BOOLEANS else 'floating'}, not {value.dtype}"
    if not (losses.rl.requires_grad or losses.ce.requires_grad):
        return "neither its rl nor its ce depends on inputs.trainer_logprobs, so it trains nothing"
    return ""
