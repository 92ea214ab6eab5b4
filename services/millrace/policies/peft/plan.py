"""What each tensor of an adapter changes in its base.

Every tensor has its place and every place its tensor, or there is no plan: what PEFT would leave out or fill with a
start of its own is an error here.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from millrace.errors import InvalidStateError
from millrace.models.errors import first_names
from millrace.policies.adapter import Shape, model_name
from millrace.policies.peft.config import PeftConfig, not_supported
from millrace.policies.peft.experts import Fused, fits_experts, fused_parameters
from millrace.policies.peft.vocabulary import HEADS, Whole, end_of, is_vocabulary, place_whole
from millrace.policies.tensors import FLOATS, TensorBytes

_REMEDY = "use the adapter on the base that it was trained on, or merge it with PEFT and use the result"
_EXPERT = re.compile(r"\.experts\.\d+\.")


class AdapterPart(Enum):
    """What a tensor is for its layer; the value is the end of its name."""

    LOW = ".lora_A.weight"
    HIGH = ".lora_B.weight"
    HIGH_BIAS = ".lora_B.bias"
    EMBEDDING_LOW = ".lora_embedding_A"
    EMBEDDING_HIGH = ".lora_embedding_B"
    MAGNITUDE = ".lora_magnitude_vector"
    ROWS = ".token_adapter.trainable_tokens_delta"


_LINEAR = frozenset({AdapterPart.LOW, AdapterPart.HIGH})
_EMBEDDING = frozenset({AdapterPart.EMBEDDING_LOW, AdapterPart.EMBEDDING_HIGH})


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModel:
    """What is known of the base without its values."""

    tensors: Mapping[str, Shape]
    """Dtype and shape by name."""
    model_type: str = ""
    is_tied: bool = False
    """Whether the head has the weight of the embedding."""

    def is_transposed(self, layer: str) -> bool:
        """Whether a layer's weight is [in, out], as in the families whose linear layers are `Conv1D`."""
        families = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")
        return self.model_type in families and not is_vocabulary(layer)


def describe_base(config: Mapping[str, Any], tensors: Mapping[str, TensorBytes]) -> BaseModel:
    """What a model's `config.json` and its tensors say."""
    text = config.get("text_config")
    inner = text if isinstance(text, dict) else {}
    has_head = any(name.endswith(".weight") and end_of(name.removesuffix(".weight")) in HEADS for name in tensors)
    return BaseModel(
        tensors={name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()},
        model_type=str(config.get("model_type", "")),
        is_tied=not has_head or True in (config.get("tie_word_embeddings"), inner.get("tie_word_embeddings")),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MergePlan:
    """What is to be done, in this order: whole tensors, layers, experts. Tensors are named as in the adapter's file."""

    whole: Mapping[str, str]
    """By name in the merged model."""
    head_of_base: tuple[str, str] | None = None
    """Name of a head that keeps the base's embedding, and that embedding's name."""
    is_untied: bool = False
    vocabulary: int | None = None
    """Rows of the new embedding; None if the base's count stays."""
    layers: Mapping[str, Mapping[AdapterPart, str]] = field(default_factory=dict)
    experts: Mapping[str, tuple[Fused, Mapping[AdapterPart, str]]] = field(default_factory=dict)
    """By the file's name of the layer that holds an adapter of a parameter."""


def plan_merge(config: PeftConfig, adapter: Mapping[str, TensorBytes], base: BaseModel, *, source: str) -> MergePlan:
    """The place of every tensor of an adapter; both by name as stored, `source` names the adapter in an error.

    InvalidStateError: ADAPTER_MODEL_MISMATCH, with the first names and a count, if a tensor has no place, none is there
    for a layer that the config names, or shapes differ; LORA_TARGET_TIED for a layer that shares its weight.
    """
    layers, whole = _sorted_by_part(adapter, source=source)
    fused = fused_parameters(config, base.model_type, base.tensors)
    if config.target_parameters and not fits_experts(config, fused):
        raise not_supported(source, "target_parameters", config.target_parameters)
    experts = {layer: (each, layers.pop(layer, {})) for layer, each in fused.items()}
    for layer, parts in layers.items():
        shared = base.is_tied and end_of(layer) in HEADS
        if shared or (base.is_tied and is_vocabulary(layer) and parts.keys() != {AdapterPart.ROWS}):
            raise InvalidStateError(
                f"{source} adapts {layer}, whose weight is another layer's, too, in the base",
                reason="LORA_TARGET_TIED",
                remedy="use the adapter on its base, without merging it: a merge would change both layers",
            )
    placed = place_whole(whole, adapter, base.tensors, config=config, is_tied=base.is_tied)
    problems = [
        *placed.problems,
        *_unfit_layers(config, layers, adapter, {**base.tensors, **placed.shapes}, base=base),
        *_unfit_experts(config, experts, adapter),
        *(f"{layer} has no adapter" for layer in _missing(config, layers, base)),
        *(f"{name} is not there" for name in _unsaved(config, placed, base)),
    ]
    if not adapter:
        problems.append("it has no tensor")
    if problems:
        raise InvalidStateError(
            f"{source} does not fit the base model: {first_names(problems)}",
            reason="ADAPTER_MODEL_MISMATCH",
            remedy=_REMEDY,
        )
    return MergePlan(
        whole=placed.tensors,
        head_of_base=placed.head_of_base,
        is_untied=placed.is_untied,
        vocabulary=placed.vocabulary,
        layers=layers,
        experts=experts,
    )


def _sorted_by_part(names: Iterable[str], *, source: str) -> tuple[dict[str, dict[AdapterPart, str]], dict[str, str]]:
    """The stored names of each layer's parts, and those of whole tensors by their names in the model."""
    layers: defaultdict[str, dict[AdapterPart, str]] = defaultdict(dict)
    whole: dict[str, str] = {}
    for stored in names:
        name = model_name(stored, source=source)
        part = next((part for part in AdapterPart if name.endswith(part.value)), None)
        if part is not None:
            layers[name.removesuffix(part.value)][part] = stored
            continue
        name = re.sub(r"\.base_layer\.(weight|bias)$", r".\1", name)
        if name in whole:
            raise InvalidStateError(
                f"{source} has {name} twice, as {whole[name]} and as {stored}",
                reason="ADAPTER_MODEL_MISMATCH",
                remedy=_REMEDY,
            )
        whole[name] = stored
    return dict(layers), whole


def _unfit_layers(
    config: PeftConfig,
    layers: Mapping[str, Mapping[AdapterPart, str]],
    adapter: Mapping[str, TensorBytes],
    weights: Mapping[str, Shape],
    *,
    base: BaseModel,
) -> Iterator[str]:
    """What is wrong with the parts of each layer, in words."""
    for layer, parts in layers.items():
        weight = weights.get(f"{layer}.weight")
        if weight is None or len(weight[1]) != 2:
            yield f"{layer} is no layer with a matrix in the model"
        elif weight[0] not in FLOATS:
            yield f"{layer} has {weight[0]} weights, to which nothing can be added"
        elif parts.keys() - {AdapterPart.ROWS} and not config.targets(layer):
            yield f"{layer} has an adapter that the config does not name"
        elif AdapterPart.ROWS in parts and (most := max(config.tokens(layer), default=0)) >= weight[1][0]:
            yield f"{layer} has no row for token {most}"
        else:
            wanted = dict(_wanted(config, layer, parts, weight[1], bias=weights.get(f"{layer}.bias"), base=base))
            for part in sorted(wanted.keys() | parts.keys(), key=lambda part: part.value):
                found = adapter[parts[part]] if part in parts else None
                if found is None:
                    yield f"{layer}{part.value} is not there"
                elif part not in wanted:
                    yield f"{layer}{part.value} is nothing that the config asks for"
                elif found.dtype not in FLOATS or found.shape != wanted[part]:
                    shown = f"{found.dtype}{list(found.shape)}"
                    yield f"{layer}{part.value} is {shown}, the model takes {list(wanted[part])}"


def _wanted(
    config: PeftConfig,
    layer: str,
    parts: Mapping[AdapterPart, str],
    shape: tuple[int, ...],
    *,
    bias: Shape | None,
    base: BaseModel,
) -> Iterator[tuple[AdapterPart, tuple[int, ...]]]:
    """The parts that a layer of this shape must have, with their shapes."""
    rank = config.rank(layer)
    rows, columns = reversed(shape) if base.is_transposed(layer) else shape
    if parts.keys() & _EMBEDDING:
        yield AdapterPart.EMBEDDING_LOW, (rank, rows)
        yield AdapterPart.EMBEDDING_HIGH, (columns, rank)
    elif parts.keys() - {AdapterPart.ROWS}:
        yield AdapterPart.LOW, (rank, columns)
        yield AdapterPart.HIGH, (rows, rank)
        if config.lora_bias and bias is not None:
            yield AdapterPart.HIGH_BIAS, (rows,)
    if config.use_dora and parts.keys() - {AdapterPart.ROWS}:
        yield AdapterPart.MAGNITUDE, (columns if parts.keys() & _EMBEDDING else rows,)
    if tokens := config.tokens(layer) if AdapterPart.ROWS in parts else ():
        yield AdapterPart.ROWS, (len(tokens), columns)


def _unfit_experts(
    config: PeftConfig,
    experts: Mapping[str, tuple[Fused, Mapping[AdapterPart, str]]],
    adapter: Mapping[str, TensorBytes],
) -> Iterator[str]:
    """Yield what is wrong with the parts of each parameter of experts, in words."""
    for layer, (fused, parts) in experts.items():
        wanted = dict(zip((AdapterPart.LOW, AdapterPart.HIGH), fused.wanted(config.rank(fused.name)), strict=True))
        for part in sorted(wanted.keys() | parts.keys(), key=lambda part: part.value):
            if part not in parts:
                yield f"{layer}{part.value} is not there, which is on {fused.name}"
            elif part not in wanted:
                yield f"{layer}{part.value} is nothing that a parameter of experts takes"
            elif (found := adapter[parts[part]]).dtype not in FLOATS or found.shape != wanted[part]:
                shown = f"{found.dtype}{list(found.shape)}"
                yield f"{layer}{part.value} is {shown}, {fused.name} takes {list(wanted[part])}"


def _missing(config: PeftConfig, layers: Mapping[str, object], base: BaseModel) -> Iterable[str]:
    """The layers that the config names and that have no adapter.

    Of experts none may have one: transformers 5 holds them in one tensor, which names of layers do not reach.
    """
    has_experts = any(_EXPERT.search(layer) for layer in layers)
    for name, (_, shape) in base.tensors.items():
        layer = name.removesuffix(".weight")
        is_meant = layer != name and len(shape) == 2 and config.targets(layer)
        if is_meant and layer not in layers and (has_experts or not _EXPERT.search(layer)):
            yield layer


def _unsaved(config: PeftConfig, placed: Whole, base: BaseModel) -> Iterable[str]:
    """The tensors of layers in `modules_to_save` that are not among the adapter's."""
    heads = [f"{head}.weight" for head in HEADS if base.is_tied and head in config.modules_to_save]
    return [
        name for name in (*base.tensors, *heads) if name not in placed.given and config.saves(name.rpartition(".")[0])
    ]
