"""Activation checkpointing and how FSDP holds parameters: they trade memory for time, and change no values."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
import torch.nn.attention.varlen  # defines the operation that is named below
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from millrace.config.sections.trainer import ActivationCheckpointConfig, ModelMemoryConfig

_aten = torch.ops.aten
_DEAR = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.torch_attn._varlen_attn.default,
}
"""Operations that take most of a block's time: selective checkpointing keeps their results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How FSDP computes and holds parameters, the same for one process and for many."""

    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype = torch.float32
    reshards_after_forward: bool | None = None
    offloads: bool = False

    @classmethod
    def of(cls, config: ModelMemoryConfig, *, compute_dtype: torch.dtype) -> "Sharding":
        """Make the sharding that a config says; `compute_dtype` is the dtype of forward and backward."""
        return cls(
            compute_dtype=compute_dtype,
            reduce_dtype=getattr(torch, config.reduce_dtype),
            reshards_after_forward=config.reshard_after_forward,
            offloads=config.fsdp_cpu_offload,
        )

    def is_needed(self, device: torch.device) -> bool:
        """Return whether a process without other ranks needs FSDP all the same.

        It does to compute or reduce in another dtype than float32, and to offload from a GPU to the host.
        """
        is_float32 = self.compute_dtype == self.reduce_dtype == torch.float32
        return not is_float32 or (self.offloads and device.type != "cpu")

    def keeps_unsharded(self, model: nn.Module) -> bool:
        """Return whether a process without other ranks keeps parameters and gradients unsharded over a whole step.

        That saves copies between master weights and those in the compute dtype at each micro-batch, and takes the
        memory of the latter. It needs float32 masters that are all trained, gradients reduced in float32, another
        compute dtype, and neither offload nor `reshards_after_forward`: otherwise weights would be in memory twice
        without use.
        """
        is_casting = all(each.requires_grad and each.dtype == torch.float32 for each in model.parameters())
        is_summed_exactly = self.compute_dtype != torch.float32 and self.reduce_dtype == torch.float32
        return is_casting and is_summed_exactly and not self.offloads and not self.reshards_after_forward

    def arguments(self, device: torch.device) -> dict[str, Any]:
        """Return the policies for mixed precision and for offload, as keyword arguments of FSDP's `fully_shard`."""
        param_dtype = None if self.compute_dtype == torch.float32 else self.compute_dtype
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=self.reduce_dtype)
        offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if self.offloads else OffloadPolicy()
        return {"mp_policy": policy, "offload_policy": offload}


_WHOLE = WeakSet[nn.Module]()
"""Models that `keep_unsharded` marked: this process has them whole, over all micro-batches of a step."""


def keep_unsharded(model: nn.Module) -> None:
    """Mark a model, so that `defer_resharding` keeps it unsharded between the micro-batches of a step."""
    _WHOLE.add(model)


def defer_resharding(model: nn.Module, *, is_last: bool) -> None:
    """Let the next backward of a model that `keep_unsharded` marked reshard it only if it `is_last` of a step.

    Parameters and gradients stay unsharded until then. The sums of gradients are the same, bit for bit. Does nothing
    for models that are not marked.
    """
    if model in _WHOLE and isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last)
        model.set_reshard_after_backward(is_last)


def unsharded_gradients(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the unsharded gradients, live, that FSDP accumulates until a step's last backward.

    They are read from FSDP's private state; none are yielded for a model without FSDP.
    """
    for module in model.modules():
        group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        for each in () if group is None else group.fsdp_params:
            gradient = each.unsharded_accumulated_grad
            if gradient is not None:
                yield gradient.to_local() if isinstance(gradient, DTensor) else gradient


def reshard_all(model: nn.Module) -> None:
    """Reshard every FSDP module of the model, in place, so that its parameters are the sharded ones again.

    After a forward without backward the root, and perhaps blocks, hold unsharded parameters. These are other objects,
    in the compute dtype: an optimizer made with them would change nothing.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def cast_weights(model: nn.Module, config: ModelMemoryConfig) -> None:
    """Cast a model's weights to bfloat16 in place if `optimization_dtype` is bfloat16; otherwise do nothing.

    Call it before sharding.
    """
    if config.optimization_dtype == "bfloat16":
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(torch.bfloat16)  # the object stays, and so do ties


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the model's repeated blocks (decoder layers) in order; empty for a model that declares none.

    They are modules of the classes in transformers' `_no_split_modules`.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if names & {each.__name__ for each in type(module).__mro__}]


def checkpoint_activations(model: nn.Module, config: ActivationCheckpointConfig | None) -> None:
    """Let every `freq`-th block recompute its activations in the backward, in place; do nothing if `config` is None.

    Call it before sharding.
    """
    if config is None:
        return
    for block in blocks_of(model)[:: config.freq]:
        block.__dict__["forward"] = _recomputing(block.forward, is_selective=config.mode == "selective")


def _recomputing(forward: Callable[..., Any], *, is_selective: bool) -> Callable[..., Any]:
    """Return `forward` wrapped so that its activations are recomputed in the backward; unchanged without gradients.

    If `is_selective`, results of costly operations (`_DEAR`) are kept.
    """
    contexts = {"context_fn": functools.partial(create_selective_checkpoint_contexts, _policy)} if is_selective else {}

    @functools.wraps(forward)
    def recomputing(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # The reentrant variant takes neither keyword arguments nor a `context_fn`.
        return checkpoint(forward, *args, use_reentrant=False, **contexts, **kwargs)

    return recomputing


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Decide whether selective checkpointing keeps an operation's result: it does for the operations in `_DEAR`."""
    return CheckpointPolicy.MUST_SAVE if operation in _DEAR else CheckpointPolicy.PREFER_RECOMPUTE
