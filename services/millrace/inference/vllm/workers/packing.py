"""Layers that vLLM's CPU backend packs. Linear ones are built from plain weights beside the served ones, then put in.

On CPU `process_weights_after_loading` of an unquantised layer turns `weight` into a packed copy behind
`layer.cpu_linear`. It reads nothing of the layer but `weight` and `bias`, so it can be run on a shell that has only
these, while the layer serves; afterwards the layer takes over the shell's function.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A packed weight, ready to be put into its layer."""

    cpu_linear: Callable[..., torch.Tensor]

    def put_into(self, layer: torch.nn.Module) -> None:
        """Make the layer compute with it from the next call on."""
        layer.cpu_linear = self.cpu_linear  # pyright: ignore[reportArgumentType] - an attribute of vLLM's


def is_repackable(layer: torch.nn.Module) -> bool:
    """Whether the layer is unquantised and computes with a packed weight."""
    method: Any = getattr(layer, "quant_method", None)
    return hasattr(layer, "cpu_linear") and type(method).__name__ in (
        "UnquantizedLinearMethod",
        "UnquantizedEmbeddingMethod",
    )


def build_packed(layer: torch.nn.Module, weight: torch.Tensor) -> Packed:
    """Pack a plain weight as the layer's own method does. `weight` may be dropped or reused afterwards."""
    shell: Any = torch.nn.Module()
    shell.weight = torch.nn.Parameter(weight.detach(), requires_grad=False)
    # What vLLM leaves unpacked (`kv_b_proj` of multi-head latent attention) stays so.
    shell._cpu_skip_gemm_dispatch = getattr(layer, "_cpu_skip_gemm_dispatch", False)
    if (bias := getattr(layer, "bias", None)) is not None:
        shell.bias = torch.nn.Parameter(bias.detach().clone(), requires_grad=False)
    method: Any = layer.quant_method
    method.process_weights_after_loading(shell)
    return Packed(cpu_linear=shell.cpu_linear)


def pack_experts(module: torch.nn.Module) -> None:
    """Pack the fused experts of a module on a CPU whose weights vLLM's layerwise reload has just filled.

    vLLM (0.32) packs them behind the first load only, and would compute with plain weights as if they were packed.
    """
    for layer in module.modules():
        method: Any = getattr(layer, "quant_method", None)
        weight = layer._parameters.get("w13_weight")
        if type(method).__name__ == "UnquantizedFusedMoEMethod" and weight is not None and weight.device.type == "cpu":
            method.moe_kernel.fused_experts.process_weights_after_loading(layer)
