"""What a model's blocks keep for the backward, and how FSDP holds the parameters: memory against time, never values."""

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
"""What costs most of a block's time: selective checkpointing keeps its results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How FSDP computes and holds parameters. The formats differ from float32 for one process as for many."""

    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype = torch.float32
    reshards_after_forward: bool | None = None
    offloads: bool = False

    @classmethod
    def of(cls, config: ModelMemoryConfig, *, compute_dtype: torch.dtype) -> "Sharding":
        """Make the sharding of a config."""
        return cls(
            compute_dtype=compute_dtype,
            reduce_dtype=getattr(torch, config.reduce_dtype),
            reshards_after_forward=config.reshard_after_forward,
            offloads=config.fsdp_cpu_offload,
        )

    def is_needed(self, device: torch.device) -> bool:
        """Return whether one process needs FSDP for the offload; on a CPU parameters are in host memory already."""
        is_float32 = self.compute_dtype == self.reduce_dtype == torch.float32
        return not is_float32 or (self.offloads and device.type != "cpu")

    def holds_whole(self, model: nn.Module) -> bool:
        """Return whether one process keeps parameters and gradients unsharded over the micro-batches of a step.

        It saves the copies between what is shared and what computes, for the memory of the parameters in the format of
        computation. Gradients have to come together in float32 either way; frozen and offloaded weights, and those that
        are stepped in the format of computation, would be in memory twice for nothing.
        """
        is_casting = all(each.requires_grad and each.dtype == torch.float32 for each in model.parameters())
        is_summed_exactly = self.compute_dtype != torch.float32 and self.reduce_dtype == torch.float32
        return is_casting and is_summed_exactly and not self.offloads and not self.reshards_after_forward

    def arguments(self, device: torch.device) -> dict[str, Any]:
        """Return the arguments of `fully_shard`."""
        param_dtype = None if self.compute_dtype == torch.float32 else self.compute_dtype
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=self.reduce_dtype)
        offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if self.offloads else OffloadPolicy()
        return {"mp_policy": policy, "offload_policy": offload}


_WHOLE = WeakSet[nn.Module]()
"""Models of which this process has all shares, and whose gradients and parameters stay whole over a step."""


def hold_whole(model: nn.Module) -> None:
    """Mark a model to be kept unsharded (`Sharding.holds_whole`), for `defer_sharing`."""
    _WHOLE.add(model)


def defer_sharing(model: nn.Module, *, is_last: bool) -> None:
    """Keep gradients and parameters unsharded after the next backward as `hold_whole` asked, unless it is the last.

    The sums are the same, bit for bit.
    """
    if model in _WHOLE and isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last)
        model.set_reshard_after_backward(is_last)


def whole_gradients(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the unsharded gradients that wait for the last backward of a step, which FSDP has no public access to."""
    for module in model.modules():
        group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        for each in () if group is None else group.fsdp_params:
            gradient = each.unsharded_accumulated_grad
            if gradient is not None:
                yield gradient.to_local() if isinstance(gradient, DTensor) else gradient


def give_up_whole(model: nn.Module) -> None:
    """Reshard every block: after a forward alone a model may hold parameters unsharded, and its root does.

    They are other objects then, in the format that is computed in; an optimizer that was given them would step nothing.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def hold_weights(model: nn.Module, config: ModelMemoryConfig) -> None:
    """Hold a model's weights in the format that they are stepped in, in place; before it is sharded."""
    if config.optimization_dtype == "bfloat16":
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(torch.bfloat16)  # the object stays, and so do ties


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks in order, by the class names that transformers declares (FSDP makes subclasses)."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if names & {each.__name__ for each in type(module).__mro__}]


def checkpoint_activations(model: nn.Module, config: ActivationCheckpointConfig | None) -> None:
    """Let every `freq`-th block compute its activations again in the backward, in place; before it is sharded."""
    if config is None:
        return
    for block in blocks_of(model)[:: config.freq]:
        block.__dict__["forward"] = _recomputing(block.forward, is_selective=config.mode == "selective")


def _recomputing(forward: Callable[..., Any], *, is_selective: bool) -> Callable[..., Any]:
    contexts = {"context_fn": functools.partial(create_selective_checkpoint_contexts, _policy)} if is_selective else {}

    @functools.wraps(forward)
    def recomputing(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **contexts, **kwargs)

    return recomputing


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _DEAR else CheckpointPolicy.PREFER_RECOMPUTE
