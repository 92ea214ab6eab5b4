"""vLLM's layerwise reload, completed by what some loaders write without it.

The reload puts a layer's parameters on the meta device, keeps the arguments of calls of their `weight_loader`, and
loads them once the layer is complete. Some loaders (gpt-oss, MiMo, Step 3) copy into a parameter themselves, which has
no effect on the meta device, so that the layer would keep its old weights; others (the head's bias of models that
transformers runs) register a parameter while they load, which the reload removes again.
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode

from millrace.errors import InvalidStateError
from millrace.inference.vllm.workers.layout import Slot

Late = dict[tuple[torch.nn.Module, str], torch.nn.Parameter]


@contextmanager
def whole_reload(module: torch.nn.Module) -> Iterator[None]:
    """Have vLLM's layerwise reload of `module`, which is made in this block, load all that the loaders write.

    Without this block the reload loses what loaders copy into parameters, or register, by themselves.
    """
    own = {(layer, name) for layer in module.modules() for name in layer._parameters}
    with _late_parameters(own) as late, _DirectCopies(module).active():
        yield
    for (layer, name), parameter in late.items():
        if layer._parameters.get(name) is None:
            layer.register_parameter(name, parameter)


@contextmanager
def _late_parameters(own: Iterable[tuple[torch.nn.Module, str]]) -> Iterator[Late]:
    """Yield a table of the parameters that are registered in this block, by layer and name, the newest of each.

    Those in `own`, (layer, name), which are there already, are left out.
    """
    known, late = set(own), Late()

    def note(layer: torch.nn.Module, name: str, parameter: torch.nn.Parameter) -> None:
        """Keep a parameter that is registered under a name that was not there."""
        if (layer, name) not in known or layer._parameters.get(name) is None:
            late[layer, name] = parameter

    hook = register_module_parameter_registration_hook(note)
    try:
        yield late
    finally:
        hook.remove()


class _DirectCopies(TorchDispatchMode):
    """Gives vLLM what a loader copies into a parameter on the meta device, as if it had called the `weight_loader`."""

    def __init__(self, module: torch.nn.Module) -> None:
        """Take the module that is being reloaded."""
        from vllm.model_executor.model_loader.reload import layerwise  # pyright: ignore[reportMissingImports]

        super().__init__()
        self._module = module
        self._vllm: Any = layerwise
        self._places: dict[int, tuple[torch.nn.Module, str]] = {}
        self._is_counting = False

    @contextmanager
    def active(self) -> Iterator[None]:
        """Give vLLM what loaders copy into meta tensors in this block, as if they had called `weight_loader`.

        Copies that vLLM makes only to count elements are left alone.
        """
        count = self._vllm.get_numel_loaded

        def counted(*args: Any) -> Any:
            """Count elements as vLLM does, with copies into the meta device left alone."""
            self._is_counting = True
            try:
                return count(*args)
            finally:
                self._is_counting = False

        self._vllm.get_numel_loaded = counted
        try:
            with self:
                yield
        finally:
            self._vllm.get_numel_loaded = count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Give vLLM a loader's copy into a known parameter on the meta device, and run every other operation as it
        is.
        """
        if func is torch.ops.aten.copy_.default and not self._is_counting and args[0].is_meta and not args[1].is_meta:
            place = self._place_of(args[0])
            if place is not None:
                self._take(*place, target=args[0], source=args[1])
                return args[0]
        return func(*args, **(kwargs or {}))

    def _place_of(self, target: torch.Tensor) -> tuple[torch.nn.Module, str] | None:
        """Return the layer whose parameter has this tensor's memory, and the parameter's name; None if there is none.

        The layers are searched again, because the reload puts more of them on the meta device as it goes.
        """
        if _storage(target) not in self._places:
            for layer in self._module.modules():
                for name, tensor in self._vllm.get_layer_tensors(layer).items():
                    if tensor.is_meta:
                        self._places[_storage(tensor)] = layer, name
        return self._places.get(_storage(target))

    def _take(self, layer: torch.nn.Module, name: str, *, target: torch.Tensor, source: torch.Tensor) -> None:
        """Add a copy of `source` into a part of the layer's parameter, `target`, to what vLLM will load.

        If the layer is complete with it, it is loaded; a layer that was complete before gets the copy at once.
        """
        info, parameter = self._vllm.get_layerwise_info(layer), getattr(layer, name)
        box = (tuple(target.shape), tuple(target.stride()), target.storage_offset())
        if not info.can_load():  # it was complete before
            parameter.data.as_strided(*box).copy_(source)
            return
        loader = self._vllm._get_original_loader(parameter)
        if not hasattr(loader, "places"):
            loader = parameter.weight_loader = _placing(loader)
        info.loaded_weights.append(
            (name, inspect.signature(loader).bind(param=parameter, loaded_weight=source, box=box))
        )
        info.load_numel_total = self._vllm.get_layer_size(layer)
        info.load_numel += target.numel()
        if info.load_numel >= info.load_numel_total and not self._vllm.is_deferred_attention_layer(layer):
            self._vllm._layerwise_process(layer, info)


def _placing(otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """Return a weight loader that copies into a box (shape, strides, offset) of the parameter if it is called with one.

    Without a box it calls `otherwise`.
    """

    def place(param: Any, loaded_weight: torch.Tensor, *args: Any, box: Any = None, **kwargs: Any) -> Any:
        """Copy the weight into the box of the parameter, or call the layer's own loader without a box."""
        if box is None:
            return otherwise(param, loaded_weight, *args, **kwargs)
        return param.data.as_strided(*box).copy_(loaded_weight)

    place.places = True  # pyright: ignore[reportFunctionMemberAccess]
    return place


def _storage(tensor: torch.Tensor) -> int:
    """Return a number by which tensors with the same memory are recognised."""
    return tensor.untyped_storage()._cdata


# Tensors that vLLM derives from weights when they are loaded, and keeps beside them.
#
# A version that is written into the parameters leaves these as they were: the model would compute with stale ones,
# while every parameter reads back right. vLLM's layerwise reload computes those of layers again, so such a model is
# loaded whole. Those that the model itself derives after its layers (DeepSeek-V4, Kimi K3) it does not compute again,
# and such a model is refused.

_PLAIN = ("W_UK_T", "W_UV", "W_UK", "W_K", "W_V", "W_UK_T_dcp_qrep")
"""Tensors that a layer keeps as plain attributes: halves of `kv_b_proj`, with which latent attention decodes."""
_OF_BACKENDS = ("sinks", "_w_uk_packed", "_w_uv_packed", "_w_scale")
"""Tensors of an attention backend: FlashInfer's float32 copy of the sinks, and the weights packed for AMX."""


def derived_tensors(model: torch.nn.Module, loaded: Collection[Slot]) -> list[str]:
    """Return the names of the tensors of a loaded model that are derived from its weights, sorted.

    `loaded` are the parameters that loaders fill. A view of a weight changes with it, and is not derived.
    """
    own: set[int] = set()
    others: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        for each, parameter in module._parameters.items():
            if parameter is None:
                continue
            if Slot(module=name, name=each) in loaded:
                own.add(parameter.untyped_storage().data_ptr())
            else:
                others[f"{name}.{each}"] = parameter
        own |= {each.untyped_storage().data_ptr() for each in module._buffers.values() if each is not None}
        others |= _kept(name, module.__dict__, _PLAIN)
        others |= _kept(f"{name}.impl", getattr(module.__dict__.get("impl"), "__dict__", {}), _OF_BACKENDS)
    return sorted(
        name for name, each in others.items() if each.untyped_storage().data_ptr() not in own and each.numel()
    )


def require_reloadable(model: torch.nn.Module) -> None:
    """Raise InvalidStateError if the model derives tensors from its weights once all layers are loaded.

    vLLM's reload does not compute such tensors again: new versions would be served with old ones.
    """
    if not hasattr(model, "process_weights_after_loading"):
        return
    raise InvalidStateError(
        f"{type(model).__name__} derives tensors from all of its weights once vLLM has loaded them, and vLLM's reload "
        "does not make them anew: it would serve new versions with stale tensors",
        reason="MODEL_KEEPS_STALE_TENSORS",
        remedy="train a model of another architecture, or serve this one without a run",
    )


def _kept(name: str, attributes: dict[str, object], names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Return those of a module's attributes with these names that are tensors, by `NAME.ATTRIBUTE`."""
    found = {f"{name}.{each}": attributes.get(each) for each in names}
    return {each: value for each, value in found.items() if isinstance(value, torch.Tensor)}


# Layers that vLLM's CPU backend packs. Linear ones are built from plain weights beside the served ones, then put in.
#
# On CPU `process_weights_after_loading` of an unquantised layer turns `weight` into a packed copy inside the function
# `layer.cpu_linear`. It reads nothing of the layer but `weight` and `bias`, so it can be run on a shell that has only
# these, while the layer serves; afterwards the layer gets the shell's function.


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A packed weight, ready for its layer."""

    cpu_linear: Callable[..., torch.Tensor]

    def put_into(self, layer: torch.nn.Module) -> None:
        """Have the layer compute with the packed weight from its next call on."""
        layer.cpu_linear = self.cpu_linear  # pyright: ignore[reportArgumentType] - an attribute of vLLM's


def is_repackable(layer: torch.nn.Module) -> bool:
    """Return whether the layer is unquantised and computes with a packed weight."""
    method: Any = getattr(layer, "quant_method", None)
    return hasattr(layer, "cpu_linear") and type(method).__name__ in (
        "UnquantizedLinearMethod",
        "UnquantizedEmbeddingMethod",
    )


def build_packed(layer: torch.nn.Module, weight: torch.Tensor) -> Packed:
    """Pack a plain weight with the layer's bias, as the layer's own method does; the layer stays as it is.

    `weight` may be reused afterwards.
    """
    shell: Any = torch.nn.Module()
    shell.weight = torch.nn.Parameter(weight.detach(), requires_grad=False)
    # A layer that vLLM leaves unpacked (`kv_b_proj` of multi-head latent attention) stays so.
    shell._cpu_skip_gemm_dispatch = getattr(layer, "_cpu_skip_gemm_dispatch", False)
    if (bias := getattr(layer, "bias", None)) is not None:
        shell.bias = torch.nn.Parameter(bias.detach().clone(), requires_grad=False)
    method: Any = layer.quant_method
    method.process_weights_after_loading(shell)
    return Packed(cpu_linear=shell.cpu_linear)


def pack_experts(module: torch.nn.Module) -> None:
    """Pack the fused experts of a module on a CPU, after vLLM's layerwise reload has filled their weights.

    vLLM (0.32) packs them after the first load only, and would compute with plain weights as if they were packed.
    """
    for layer in module.modules():
        method: Any = getattr(layer, "quant_method", None)
        weight = layer._parameters.get("w13_weight")
        if type(method).__name__ == "UnquantizedFusedMoEMethod" and weight is not None and weight.device.type == "cpu":
            method.moe_kernel.fused_experts.process_weights_after_loading(layer)
