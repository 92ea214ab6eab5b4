"""vLLM's layerwise reload, with what loaders write past it.

The reload puts a layer's parameters on the meta device, keeps what their `weight_loader` is called with, and loads
that once the layer is complete. Some loaders (gpt-oss, MiMo, Step 3) copy into a parameter themselves, which goes
nowhere on the meta device, so that the layer would keep what was in its memory; others (the head's bias of models that
transformers runs) register a parameter while they load, which the reload takes away again.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode

Late = dict[tuple[torch.nn.Module, str], torch.nn.Parameter]


@contextmanager
def whole_reload(module: torch.nn.Module) -> Iterator[None]:
    """In this block vLLM's layerwise reload of a module of a model, or of all of it, loads what its loaders fill."""
    own = {(layer, name) for layer in module.modules() for name in layer._parameters}
    with _late_parameters(own) as late, _DirectCopies(module).active():
        yield
    for (layer, name), parameter in late.items():
        if layer._parameters.get(name) is None:
            layer.register_parameter(name, parameter)


@contextmanager
def _late_parameters(own: Iterable[tuple[torch.nn.Module, str]]) -> Iterator[Late]:
    """Parameters that are registered in this block under names that no module had before, the newest of each."""
    known, late = set(own), Late()

    def note(layer: torch.nn.Module, name: str, parameter: torch.nn.Parameter) -> None:
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
        from vllm.model_executor.model_loader.reload import layerwise  # pyright: ignore[reportMissingImports]

        super().__init__()
        self._module = module
        self._vllm: Any = layerwise
        self._places: dict[int, tuple[torch.nn.Module, str]] = {}
        self._is_counting = False

    @contextmanager
    def active(self) -> Iterator[None]:
        """In this block loaders are watched, but for those that vLLM runs to count what they load."""
        count = self._vllm.get_numel_loaded

        def counted(*args: Any) -> Any:
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
        if func is torch.ops.aten.copy_.default and not self._is_counting and args[0].is_meta and not args[1].is_meta:
            place = self._place_of(args[0])
            if place is not None:
                self._take(*place, target=args[0], source=args[1])
                return args[0]
        return func(*args, **(kwargs or {}))

    def _place_of(self, target: torch.Tensor) -> tuple[torch.nn.Module, str] | None:
        """The layer that has it, and its name there: the reload has put it on the meta device since the last look."""
        if _storage(target) not in self._places:
            for layer in self._module.modules():
                for name, tensor in self._vllm.get_layer_tensors(layer).items():
                    if tensor.is_meta:
                        self._places[_storage(tensor)] = layer, name
        return self._places.get(_storage(target))

    def _take(self, layer: torch.nn.Module, name: str, *, target: torch.Tensor, source: torch.Tensor) -> None:
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
    """Return a weight loader that copies into a box (shape, strides, offset) of the parameter where it is given one."""

    def place(param: Any, loaded_weight: torch.Tensor, *args: Any, box: Any = None, **kwargs: Any) -> Any:
        if box is None:
            return otherwise(param, loaded_weight, *args, **kwargs)
        return param.data.as_strided(*box).copy_(loaded_weight)

    place.places = True  # pyright: ignore[reportFunctionMemberAccess]
    return place


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
