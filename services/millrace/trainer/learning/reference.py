"""The start model, frozen, as the policy that a run stays near (`trainer.loss.kl`)."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Protocol, Self

import torch
from torch import nn

from millrace.trainer.gang.agreement import agreed
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.learning.batch import MicroBatch
from millrace.trainer.learning.forward import token_logprobs
from millrace.trainer.learning.trained import fill_opened, open_model
from millrace.trainer.model.attention import use_varlen_kernel
from millrace.trainer.model.lora import without_adapters
from millrace.trainer.model.memory import Sharding


class Reference(Protocol):
    """Log-probs under the start model."""

    def logprobs(self, micro_batch: MicroBatch) -> torch.Tensor:
        """Those of every token, [B, T], without gradient, at each sample's temperature and over the whole vocabulary.

        A truncated policy may sample what the truncated reference could not, and the divergence would be infinite.
        """
        ...


class StartModel:
    """A copy of the start model, in the format that is computed in."""

    def __init__(self, model: nn.Module, *, gang: Gang, sharding: Sharding, is_varlen: bool = False) -> None:
        model.requires_grad_(False)
        if is_varlen:
            use_varlen_kernel(model, compute_dtype=sharding.compute_dtype, device=gang.device)
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(sharding.compute_dtype)  # the object stays, and so do ties
        self._model = gang.shard(model, sharding)

    @classmethod
    def load(
        cls, directory: Path, *, gang: Gang, sharding: Sharding, context_length: int, is_varlen: bool = False
    ) -> Self:
        """That of the model in `directory`. Collective in a gang."""
        with agreed(gang):
            model = open_model(directory, gang=gang, context_length=context_length)
        start = cls(model, gang=gang, sharding=sharding, is_varlen=is_varlen)
        with agreed(gang):
            fill_opened(start._model, directory, gang=gang, sharding=sharding)
        return start

    @torch.no_grad()
    def logprobs(self, micro_batch: MicroBatch) -> torch.Tensor:
        """See `Reference`."""
        return token_logprobs(self._model, replace(micro_batch, sampled=micro_batch.sampled.uncut()))[0]


class UnadaptedModel:
    """The base of the adapters that are trained: the live model without them, at no memory of its own."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    @torch.no_grad()
    def logprobs(self, micro_batch: MicroBatch) -> torch.Tensor:
        """See `Reference`."""
        with without_adapters(self._model), _evaluating(self._model):
            return token_logprobs(self._model, replace(micro_batch, sampled=micro_batch.sampled.uncut()))[0]


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
