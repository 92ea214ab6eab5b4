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

_ROUTED_AS_DEEPSEEK = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa")
"""Types of models whose router transformers and vLLM have from DeepSeek-V3."""
_ROUTER = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
"""Keys that say how this router chooses. transformers takes them for granted and writes none.

vLLM takes other values where they are missing, and then has no place for the correction bias.
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
        """Return the index, in `source`, of the element after the last one of this tensor."""
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
    # A model whose conversions were set anew has another list of them, and so another key.
    key = (id(getattr(model, "_weight_conversions", None)), tuple(shapes), frozenset(own))
    layouts = _LAYOUTS.setdefault(model, {})
    if key not in layouts:
        layouts[key] = dict(_saved(model, {name: tuple(shape) for name, shape in shapes.items()}, own=own))
    return layouts[key]


def recall_conversions(model: Any, names: Iterable[str]) -> None:
    """Make `saved_tensors` answer for a model that was built from its config as if it was loaded from tensors of these
    names.

    Sets an attribute of the model.
    """
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

    It is the config of the live class, which may be the text part alone of the model on disk. A model with the router
    of DeepSeek-V3 gets the keys by which vLLM knows that router, unless its config has them.
    """
    # The model goes on with its own config, in which none of this may change.
    config = copy.deepcopy(model.config)
    config.architectures = [own_class(model).__name__]
    for level in _levels(config):
        level.dtype = dtype
        for name in _OF_THE_FILES:
            if hasattr(level, name):
                delattr(level, name)
    document = decode_object(config.to_json_string().encode(), what="a model's config", reason="MODEL_CORRUPT")
    is_corrected = any(name.endswith(".e_score_correction_bias") for name, _ in model.named_buffers())
    if is_corrected and config.model_type in _ROUTED_AS_DEEPSEEK:
        document = _ROUTER | document
    return json.dumps(with_older_names(config, document), indent=2, sort_keys=True).encode() + b"\n"


def own_class(model: nn.Module) -> type[Any]:
    """Return transformers' class of a model, of which FSDP makes a subclass."""
    return next(each for each in type(model).__mro__ if not each.__name__.startswith("FSDP"))


def _saved(
    model: Any, shapes: Mapping[str, tuple[int, ...]], *, own: Collection[str]
) -> Iterator[tuple[str, tuple[SavedTensor, ...]]]:
    """Yield each of the model's own tensors with its saved tensors, as `saved_tensors` returns them.

    `shapes` are those of the own tensors; the ones in `own` keep their names.
    """
    ranges = _ranges(model, shapes)
    # A name that two of the model's tensors would be saved as is no range of one of them.
    claimed = Counter(each.name for name, found in ranges.items() if name not in own for each in found)
    for name, shape in shapes.items():
        parts = sorted(ranges.get(name, ()), key=lambda each: (each.start, each.end))
        is_plain = name not in own and all(claimed[each.name] == 1 for each in parts)
        at = 0
        for each in parts:
            # The ranges have to tile the tensor: with a gap some of its elements would not be saved.
            is_plain &= each.start == at
            at = each.end
        if not parts or not is_plain or at != prod(shape):
            parts = [SavedTensor(name=name, source=name, start=0, shape=shape)]
        yield name, tuple(parts)


def _ranges(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, list[SavedTensor]]:
    """Return, by the model's own tensors, the saved tensors that are ranges of them.

    They are found by letting transformers revert its conversions on tensors without data, whose views show the ranges.
    `shapes` are those of the own tensors by name.
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
        """Do the operation `func`, except that `contiguous` returns the tensor itself."""
        if func is torch.Tensor.contiguous:
            return args[0]
        return super().__torch_function__(func, types, args, kwargs or {})


def _storage(tensor: torch.Tensor) -> int:
    """Return what identifies the storage of a tensor, which its views share."""
    return tensor.untyped_storage()._cdata


def _kept(model: Any, dtype: torch.dtype) -> Iterator[str]:
    """Yield the names of the model's own tensors that stay float32 in a model of this dtype."""
    from transformers.core_model_loading import build_glob_alternation

    patterns = [*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())]
    named = build_glob_alternation(patterns)[0].search if patterns else lambda _: None
    # Made without memory, only to see which tensors the class makes in float32 whatever the dtype.
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
