"""Floating point operations of a step, for MFU: what the model needs, not what is computed again or padded.

    a sample of n tokens:  (4 P + 2 P_trained) n + 6 L A n²

P are the weights of the matrix products that a token goes through: two operations each forwards, two backwards for the
gradient of the input, and two for that of the weight where it is trained. Embeddings are looked up and count nothing,
the head counts once, an expert by the share of tokens that it sees. L are the layers and A the heads times their size:
causal attention has two products of n² A operations forwards, and four backwards.

Sliding windows and other kinds of attention than softmax are taken for full attention.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

_DENSE_BFLOAT16 = {"GB200": 2500, "B200": 2250, "B100": 1800, "GH200": 989, "H200": 989, "H100": 989, "A100": 312}
"""TFLOP/s of GPUs on SXM boards by the word of their name, from their data sheets, without sparsity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopCount:
    """Operations of a training step by the lengths of its samples."""

    per_token: float
    per_square: float

    @classmethod
    def of(cls, model: Any) -> Self:
        """That of a causal model of transformers, sharded or not, whose frozen weights stay so."""
        config = model.config.get_text_config()
        head = model.get_output_embeddings()
        looked_up = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)} - {id(head.weight)}
        per_token, experts = 0.0, getattr(config, "num_experts_per_tok", None)
        for parameter in model.parameters():
            if parameter.ndim >= 2 and id(parameter) not in looked_up:
                share = experts / parameter.shape[0] if parameter.ndim == 3 and experts else 1.0
                per_token += (6 if parameter.requires_grad else 4) * parameter.numel() * share
        heads = getattr(config, "num_attention_heads", 0)  # recurrent models have none
        width = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)
        per_square = 6.0 * config.num_hidden_layers * heads * width
        return cls(per_token=per_token, per_square=per_square)

    def of_samples(self, lengths: Iterable[int]) -> float:
        """Operations of a step on samples of these lengths."""
        return sum(self.per_token * length + self.per_square * length**2 for length in lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class Utilization:
    """Model FLOPs utilization: the operations that steps need, by what all ranks could do in their seconds."""

    flops: FlopCount
    peak: float

    @classmethod
    def of(
        cls,
        model: nn.Module,
        *,
        tflops: float | None,
        compute_dtype: torch.dtype,
        device: torch.device,
        world_size: int,
    ) -> Self | None:
        """That of a model on `world_size` devices of `tflops`; None where that is not said, and not known either."""
        known = tflops
        if known is None and compute_dtype == torch.bfloat16:
            known = _known_tflops(device)
        return None if known is None else cls(flops=FlopCount.of(model), peak=known * 1e12 * world_size)

    def mfu(self, lengths: Iterable[int], *, seconds: float) -> float:
        """The utilization of a step, from 0 to 1."""
        return self.flops.of_samples(lengths) / (self.peak * seconds) if seconds > 0 else 0.0


def _known_tflops(device: torch.device) -> float | None:
    """The peak of a GPU that is in the table, in bfloat16."""
    if device.type != "cuda":
        return None
    words = torch.cuda.get_device_name(device).replace("-", " ").split()
    if "PCIe" in words or "NVL" in words:
        return None  # slower than the same chip on a board
    return next((float(_DENSE_BFLOAT16[word]) for word in words if word in _DENSE_BFLOAT16), None)
