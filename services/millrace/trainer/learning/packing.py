"""Which samples a model may compute at once: those of one row, those of one micro-batch, or each alone.

What keeps the samples of a row apart is transformers' reading of position ids that restart: a dense block-diagonal mask
for sdpa, or, on a GPU, a kernel for rows of varying lengths. What keeps rows apart is that nothing looks across them.
Whether a model does so is tried, not believed (`apart`), on samples on both sides of every length that its config
names, as far as samples get so long: recurrent layers carry their state from one sample into the next, chunks of
attention are counted from the beginning of a row, and factors may follow the longest row.
"""

import logging

import torch
from torch import nn

from millrace.config.sections.trainer import PackConfig
from millrace.errors import InvalidSpecError, Violation
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.learning.apart import Apart
from millrace.trainer.learning.flops import FlopCount
from millrace.trainer.learning.plan import ALONE, Packing
from millrace.trainer.model.attention import use_varlen_kernel

logger = logging.getLogger(__name__)

_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-10}
"""Of the largest log-prob; what is computed in fewer bits rounds to some hundredths."""


def packing_of(
    model: nn.Module, config: PackConfig, *, longest: int, compute_dtype: torch.dtype, gang: Gang
) -> Packing | None:
    """What the plan decides with; None where every row is one sample. Samples have at most `longest` tokens.

    Collective in a gang. InvalidSpecError: PACK_UNSUPPORTED if rows shall be packed always, and the model mixes their
    samples; SAMPLES_MIXED if not even a sample that is computed alone is independent of those before it.
    """
    is_varlen = config.mode != "never" and use_varlen_kernel(model, compute_dtype=compute_dtype, device=gang.device)
    tolerance = _TOLERANCE.get(compute_dtype, 0.05)
    found = Apart.of(model, longest=longest, tolerance=tolerance, device=gang.device, is_packed=config.mode != "never")
    # Ranks that round differently, or have other GPUs, could make different plans.
    told = gang.agree(lambda: [found.in_row, found.in_micro_batch, found.in_turn, is_varlen])
    in_row, in_micro_batch, in_turn, is_varlen = (all(column) for column in zip(*told, strict=True))
    if not in_turn:
        raise _mixes_calls(model)
    if config.mode == "always" and not (in_row and in_micro_batch):
        raise _mixes_samples(model)
    if not in_micro_batch:
        logger.warning("the model mixes samples of one micro-batch, so every micro-batch holds one sample")
        return ALONE
    if config.mode == "never":
        return None
    if not in_row:
        logger.warning("the model mixes samples of one row, so every row holds one sample")
        return None
    flops = FlopCount.of(model)
    return Packing(
        per_token=flops.per_token,
        per_square=flops.per_square,
        causal_cost=config.causal_cost,
        masked_cost=config.masked_cost,
        is_always=config.mode == "always",
        is_varlen=is_varlen,
    )


def _mixes_samples(model: nn.Module) -> InvalidSpecError:
    name = type(model).__name__
    return InvalidSpecError(
        [Violation(field="pack.mode", value="always", message=f"{name} mixes the samples of one row")],
        reason="PACK_UNSUPPORTED",
        remedy='set pack.mode = "never": every row holds one sample',
    )


def _mixes_calls(model: nn.Module) -> InvalidSpecError:
    name = type(model).__name__
    message = f"{name} computes a sample differently behind others: it keeps something from call to call"
    return InvalidSpecError(
        [Violation(field="model.name", value=name, message=message)],
        reason="SAMPLES_MIXED",
        remedy="train another model: what this one learned of a sample would depend on the order of the batch",
    )
