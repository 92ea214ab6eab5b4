"""How transformers saves a model that it holds: the names of its tensors, their number formats, and its config.

transformers 5 renames and fuses tensors while it loads them (the projections of all experts become one tensor), and
takes back what it did when it saves. Files, policies and engines have the names of the saved form. A saved tensor is
a range of one of the model's own tensors, so that nothing is copied: ranks publish the part of it that they hold, and
engines write into the memory of the model.
"""

import copy
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from millrace.decoding import decode_object
from millrace.models.configs import with_older_names

_OF_THE_FILES = ("quantization_config", "compression_config", "transformers_weights", "auto_map")
"""Keys of configs that say how files are stored, how they are called, and which code beside them makes the model.

What is held is not quantised, is stored under the usual names, and is of a class of transformers.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """A tensor of the saved form: row-major elements of the model's own tensor `source`, from element `start` on."""

    name: str
    source: str
    start: int
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        """Return the element of `source` after the last one."""
        return self.start + prod(self.shape)


_LAYOUTS = WeakKeyDictionary[nn.Module, dict[Any, dict[str, tuple[SavedTensor, ...]]]]()
_KEPT = WeakKeyDictionary[nn.Module, dict[torch.dtype, frozenset[str]]]()


def saved_tensors(
    model: nn.Module, shapes: Mapping[str, Sequence[int]], *, own: Collection[str] = ()
) -> dict[str, tuple[SavedTensor, ...]]:
    """Return the saved tensor of each of the model's own tensors (`shapes` by name, tied ones once), in order of
    `start`.

    The model was loaded by transformers, or `recall_conversions` has said from which names. Tensors in `own` keep
    their names, and so do those of which the saved form is no range (interleaved or transposed ones): transformers
    loads either.
    """
    key = (id(getattr(model, "_weight_conversions", None)), tuple(shapes), frozenset(own))
    layouts = _LAYOUTS.setdefault(model, {})
    if key not in layouts:
        layouts[key] = dict(_saved(model, {name: tuple(shape) for name, shape in shapes.items()}, own=own))
    return layouts[key]


def recall_conversions(model: Any, names: Iterable[str]) -> None:
    """Have a model that was built from its config save as one that was loaded from tensors of these names."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    found = get_model_conversion_mapping(model)
    renamings = [each for each in found if isinstance(each, WeightRenaming)]
    converters = [each for each in found if isinstance(each, WeightConverter)]
    for name in names:
        rename_source_key(name, renamings, converters)  # each takes note that it was used
    model._weight_conversions = [each for each in found if each.was_used()]


def kept_in_float32(model: nn.Module, *, dtype: torch.dtype) -> frozenset[str]:
    """Return the model's own tensors that stay float32 where its weights are saved in `dtype`.

    These are what the class names so (`_keep_in_fp32_modules`, `_keep_in_fp32_modules_strict`), such as the biases of
    routers, and what it makes in float32 whatever the model's format is.
    """
    from transformers import PreTrainedModel

    if dtype == torch.float32 or not isinstance(model, PreTrainedModel):
        return frozenset()
    known = _KEPT.setdefault(model, {})
    if dtype not in known:
        known[dtype] = frozenset(_kept(model, dtype))
    return known[dtype]


def saved_config(model: Any, *, dtype: torch.dtype) -> bytes:
    """Return `config.json` of the model that is held, weights in `dtype`; of the text part alone where only that is
    held.

    It says what transformers 4 and 5 call otherwise in the words of both.
    """
    config = copy.deepcopy(model.config)
    config.architectures = [own_class(model).__name__]
    for level in _levels(config):
        level.dtype = dtype
        for name in _OF_THE_FILES:
            if hasattr(level, name):
                delattr(level, name)
    said = decode_object(config.to_json_string().encode(), what="a model's config", reason="MODEL_CORRUPT")
    return json.dumps(with_older_names(config, said), indent=2, sort_keys=True).encode() + b"\n"


def own_class(model: nn.Module) -> type[Any]:
    """Return the class that transformers has for a model; sharding makes a subclass of it."""
    return next(each for each in type(model).__mro__ if not each.__name__.startswith("FSDP"))


def _saved(
    model: Any, shapes: Mapping[str, tuple[int, ...]], *, own: Collection[str]
) -> Iterator[tuple[str, tuple[SavedTensor, ...]]]:
    ranges = _ranges(model, shapes)
    claimed = Counter(each.name for name, found in ranges.items() if name not in own for each in found)
    for name, shape in shapes.items():
        parts = sorted(ranges.get(name, ()), key=lambda each: (each.start, each.end))
        is_plain = name not in own and all(claimed[each.name] == 1 for each in parts)
        at = 0
        for each in parts:
            is_plain &= each.start == at
            at = each.end
        if not parts or not is_plain or at != prod(shape):
            parts = [SavedTensor(name=name, source=name, start=0, shape=shape)]
        yield name, tuple(parts)


def _ranges(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, list[SavedTensor]]:
    """Return saved tensors that are ranges of the model's own ones: found by watching transformers at work on no
    data.
    """
    from transformers import PreTrainedModel
    from transformers.core_model_loading import revert_weight_conversion

    if not isinstance(model, PreTrainedModel):
        return {}
    traced = {name: torch.empty(shape, device="meta").as_subclass(_Traced) for name, shape in shapes.items()}
    sources = {_storage(tensor): name for name, tensor in traced.items()}
    found: dict[str, list[SavedTensor]] = {}
    for name, tensor in revert_weight_conversion(model, dict(traced)).items():
        source = sources.get(_storage(tensor))
        if source is not None and tensor.is_contiguous():
            part = SavedTensor(name=name, source=source, start=int(tensor.storage_offset()), shape=tuple(tensor.shape))
            found.setdefault(source, []).append(part)
    return found


class _Traced(torch.Tensor):
    """A tensor without data whose views are never copied, so that they say where their elements come from."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.contiguous:
            return args[0]
        return super().__torch_function__(func, types, args, kwargs or {})


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _kept(model: Any, dtype: torch.dtype) -> Iterator[str]:
    from transformers.core_model_loading import build_glob_alternation

    patterns = [*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())]
    named = build_glob_alternation(patterns)[0].search if patterns else lambda _: None
    with torch.device("meta"):
        made = own_class(model)._from_config(copy.deepcopy(model.config), dtype=dtype)
    for name, tensor in made.state_dict().items():
        if tensor.is_floating_point() and (tensor.dtype == torch.float32 or named(name)):
            yield name


def _levels(config: Any) -> Iterator[Any]:
    """Yield a config and the configs in it."""
    yield config
    for name in config.sub_configs:
        if (inner := getattr(config, name, None)) is not None and hasattr(inner, "sub_configs"):
            yield from _levels(inner)
