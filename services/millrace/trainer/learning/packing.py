"""Whether and how a model takes rows of several samples.

What keeps them apart is transformers' reading of position ids that restart: a dense block-diagonal mask for sdpa, or,
on a GPU, a kernel for rows of varying lengths. Whether a model respects them is tried, not
believed: recurrent layers carry their state from one sample into the next, and such models are padded.
"""

import logging

import torch
from torch import nn

from millrace.config.sections.trainer import PackConfig
from millrace.errors import InvalidSpecError, Violation
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.learning.flops import FlopCount
from millrace.trainer.learning.plan import Packing
from millrace.trainer.model.attention import use_varlen_kernel
from millrace.trainer.model.memory import give_up_whole

logger = logging.getLogger(__name__)

_FIRST, _OTHER, _SECOND = (3, 1, 4, 1, 5), (2, 7, 1, 8, 2), (9, 2, 6, 5)
"""Two samples that may stand before a third one."""
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-10}
"""Of the largest logit; what is computed in fewer bits rounds to some hundredths."""


def packing_of(model: nn.Module, config: PackConfig, *, compute_dtype: torch.dtype, gang: Gang) -> Packing | None:
    """What the plan decides with; None where every row is one sample. Collective in a gang.

    InvalidSpecError (PACK_UNSUPPORTED) if rows shall be packed always, and the model mixes their samples.
    """
    if config.mode == "never":
        return None
    is_varlen = use_varlen_kernel(model, compute_dtype=compute_dtype, device=gang.device)
    is_apart = keeps_samples_apart(model, tolerance=_TOLERANCE.get(compute_dtype, 0.05), device=gang.device)
    # Ranks that round differently, or have other GPUs, could make different plans.
    told = gang.agree(lambda: [is_apart, is_varlen])
    is_apart, is_varlen = (all(column) for column in zip(*told, strict=True))
    if not is_apart:
        if config.mode == "always":
            raise _mixes_samples(model)
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


@torch.no_grad()
def keeps_samples_apart(model: nn.Module, *, tolerance: float, device: torch.device) -> bool:
    """Whether a sample behind another one has the logits that it has alone, and behind any other. Collective."""

    def logits(*samples: tuple[int, ...]) -> torch.Tensor:
        tokens = torch.tensor([[token for sample in samples for token in sample]], device=device)
        positions = torch.tensor([[at for sample in samples for at in range(len(sample))]], device=device)
        return model(input_ids=tokens, position_ids=positions, use_cache=False).logits[0, -len(_SECOND) :].double()

    alone, *behind = logits(_SECOND), logits(_FIRST, _SECOND), logits(_OTHER, _SECOND)
    give_up_whole(model)  # the optimizer is to get the shards
    allowed = tolerance * float(alone.abs().max())
    return all(float((each - alone).abs().max()) <= allowed for each in behind)


def _mixes_samples(model: nn.Module) -> InvalidSpecError:
    name = type(model).__name__
    return InvalidSpecError(
        [Violation(field="pack.mode", value="always", message=f"{name} mixes the samples of one row")],
        reason="PACK_UNSUPPORTED",
        remedy='set pack.mode = "never": every row holds one sample',
    )
