"""The saved form of a live model as transformers saves it: names of tensors, number formats, and config.

transformers 5 renames and fuses tensors while it loads them (the projections of all experts become one tensor), and
reverts that when it saves. Files, policies and engines use the names of the saved form. A saved tensor is a range of
one of the model's own tensors, so that nothing is copied: ranks publish the part of it that they hold, and engines
write into the memory of the model.
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
"""Keys of configs on how weight files are stored and named, and on code in the directory.

They are removed: a live model is not quantised, is stored under the usual names, and is of a class of transformers.
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
    """Return the saved tensors of each of the model's own tensors (`shapes` by name, tied ones once), in order.

    The model must have been loaded by transformers, or `recall_conversions` been called. Tensors in `own` keep their
    names, and so do those whose saved form is no range of them (interleaved or transposed ones): transformers loads
    either. The result is cached by model and arguments.
    """
    key = (id(getattr(model, "_weight_conversions", None)), tuple(shapes), frozenset(own))
    layouts = _LAYOUTS.setdefault(model, {})
    if key not in layouts:
        layouts[key] = dict(_saved(model, {name: tuple(shape) for name, shape in shapes.items()}, own=own))
    return layouts[key]


def recall_conversions(model: Any, names: Iterable[str]) -> None:
    """Make `saved_tensors` of a model built from its config as if it was loaded from tensors of these names."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    found = get_model_conversion_mapping(model)
    renamings = [each for each in found if isinstance(each, WeightRenaming)]
    converters = [each for each in found if isinstance(each, WeightConverter)]
    for name in names:
        rename_source_key(name, renamings, converters)  # marks the conversions that are used
    model._weight_conversions = [each for each in found if each.was_used()]


def kept_in_float32(model: nn.Module, *, dtype: torch.dtype) -> frozenset[str]:
    """Return the names of the model's own tensors that stay float32 when its weights are saved in `dtype`.

    Those are the tensors that the class declares (`_keep_in_fp32_modules`, `_keep_in_fp32_modules_strict`), such as the
    biases of routers, and tensors that it makes in float32 for any dtype.
    """
    from transformers import PreTrainedModel

    if dtype == torch.float32 or not isinstance(model, PreTrainedModel):
        return frozenset()
    known = _KEPT.setdefault(model, {})
    if dtype not in known:
        known[dtype] = frozenset(_kept(model, dtype))
    return known[dtype]


def saved_config(model: Any, *, dtype: torch.dtype) -> bytes:
    """Return `config.json` of a live model with weights in `dtype`, encoded, with the keys of transformers 4 and 5.

    It is the config of the live class, which may be the text part alone of the model on disk.
    """
    config = copy.deepcopy(model.config)
    config.architectures = [own_class(model).__name__]
    for level in _levels(config):
        level.dtype = dtype
        for name in _OF_THE_FILES:
            if hasattr(level, name):
                delattr(level, name)
    document = decode_object(config.to_json_string().encode(), what="a model's config", reason="MODEL_CORRUPT")
    return json.dumps(with_older_names(config, document), indent=2, sort_keys=True).encode() + b"\n"


def own_class(model: nn.Module) -> type[Any]:
    """Return transformers' class of a model, of which FSDP makes a subclass."""
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
    """Return, by the model's own tensors, the saved tensors that are ranges of them.

    They are found by letting transformers revert its conversions on tensors without data, whose views show the ranges.
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
    """A tensor without data whose views are never copied, so that their offsets show where their elements come from."""

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
