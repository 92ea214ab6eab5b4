"""What each tensor of an adapter changes in its base.

Every tensor has its place and every place its tensor, or there is no plan: what PEFT would leave out or fill with a
start of its own is an error here.
"""

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from enum import Enum
from math import prod
from typing import Any

import numpy as np

from millrace.errors import InvalidStateError
from millrace.models.files import first_names
from millrace.policies.peft.config import PeftConfig, Shape, model_name, not_supported
from millrace.policies.tensors import FLOATS, TensorBytes, as_float32, from_float32

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
        """Return whether the layer with this name stores its weight as [in, out], as GPT-2's `Conv1D` does."""
        families = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")
        return self.model_type in families and not is_vocabulary(layer)


def describe_base(config: Mapping[str, Any], tensors: Mapping[str, TensorBytes]) -> BaseModel:
    """Return what is known of a model from its decoded `config.json` and its tensors, without their values."""
    text = config.get("text_config")
    inner = text if isinstance(text, dict) else {}
    has_head = any(name.endswith(".weight") and end_of(name.removesuffix(".weight")) in HEADS for name in tensors)
    return BaseModel(
        tensors={name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()},
        model_type=str(config.get("model_type", "")),
        is_tied=not has_head or True in (config.get("tie_word_embeddings"), inner.get("tie_word_embeddings")),
    )


# LoRA on the fused parameters of experts (`target_parameters`), and where a base's files have these parameters.
#
#     ΔW_e = scaling · B_e·A_e          A: [experts · rank, in], one expert after the other
#                                       B: [out, rank · experts], the experts of one rank side by side
#
# transformers 5 holds the projections of all experts of a block in one parameter. Its files have a tensor for each
# expert, or the parameter itself. PEFT nests the adapters of several parameters of one module, in the order in which
# the module has the parameters: the file's names say how deep an adapter is, and not which parameter it is on.

_MODULE = "mlp.experts"
_PARAMETERS = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
"""Of a module of experts, in its order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """Where a family's files have its experts, and which tensors of one make up a parameter."""

    module: str = _MODULE
    joined: Mapping[str, tuple[str, ...]]
    is_transposed: bool = False
    """Whether a parameter is [experts, in, out]."""


_GATED = _Layout(joined={"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)})
_LAYOUTS = {
    "deepseek_v3": _GATED,
    "ernie4_5_moe": _GATED,
    "glm4_moe": _GATED,
    "gpt_oss": _Layout(joined={}, is_transposed=True),
    "mixtral": _Layout(module="block_sparse_moe.experts", joined={"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}),
    "qwen2_moe": _GATED,
    "qwen3_moe": _GATED,
}
"""By `model_type`; each is compared with PEFT's own merge in a test."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fused:
    """A parameter of experts: [experts, rows, columns], or [rows, columns] for the biases of all."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    is_transposed: bool
    stored: tuple[tuple[str, ...], ...]
    """For each expert the base's tensors whose rows follow one another; empty if the base has the parameter whole."""

    def wanted(self, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the shapes that A and B of an adapter of this rank must have."""
        *experts, rows, columns = self.shape
        count = prod(experts) * rank
        return ((count, rows), (columns, count)) if self._is_turned else ((count, columns), (rows, count))

    def merged(
        self, low: np.ndarray, high: np.ndarray, base: Mapping[str, TensorBytes], *, scaling: float
    ) -> dict[str, TensorBytes]:
        """Return the base's tensors of this parameter, by name, with scaling · B·A added.

        `low` is A and `high` is B.
        """
        # `low` is [experts · rank, in] and `high` [out, rank · experts]; below, `lows` is [experts, rank, in], `highs`
        # is [out, rank, experts], and each change [out, in].
        num_experts = prod(self.shape[:-2])
        # PEFT stacks the experts' factors: those of A as rows, those of B along the last axis.
        lows = low.reshape(num_experts, -1, low.shape[1])
        highs = high.reshape(high.shape[0], -1, num_experts)
        changes = (scaling * (highs[:, :, expert] @ lows[expert]) for expert in range(num_experts))
        if not self.stored:
            change = np.stack([each.T if self._is_turned else each for each in changes]).reshape(self.shape)
            return {self.name: _sum(base[self.name], change)}
        found: dict[str, TensorBytes] = {}
        # A fused parameter is stored as its parts (gate and up): their rows follow one another.
        for names, change in zip(self.stored, changes, strict=True):
            at = 0
            for name in names:
                end = at + base[name].shape[0]
                found[name] = _sum(base[name], change[at:end])
                at = end
        return found

    @property
    def _is_turned(self) -> bool:
        """Return whether the parameter is [experts, in, out]."""
        return self.is_transposed and len(self.shape) == 3


def fused_parameters(config: PeftConfig, model_type: str, base: Mapping[str, Shape]) -> dict[str, Fused]:
    """Return the parameters of experts that `target_parameters` names, by how the adapter's file names their layers.

    `base` has (dtype, shape) by name. Empty for a family whose experts are not known here.
    """
    layout = _LAYOUTS.get(model_type)
    if layout is None:
        return {}
    found: dict[str, Fused] = {}
    for module, prefix in _modules(layout, base).items():
        named = [name for name in _PARAMETERS if config.targets_parameter(f"{module}.{name}")]
        fused = [each for name in named if (each := _fused(layout, module, prefix, name, base))]
        # Each further adapter wraps the ones before, so the first has the most `.base_layer` in its name.
        found |= {module + ".base_layer" * (len(fused) - at): each for at, each in enumerate(fused, 1)}
    return found


def fits_experts(config: PeftConfig, fused: Mapping[str, Fused]) -> bool:
    """Return whether an adapter of experts can be merged: each target is known, and it is plain LoRA from the base.

    A name in `target_parameters` is known if it is the `name` of one of `fused`, or its end after a dot; the keys of
    `fused` do not matter. Adapters with DoRA, with a bias, or with another start than the base are not supported.
    """
    names = [each.name for each in fused.values()]
    is_known = all(any(_is_end(target, name) for name in names) for target in config.target_parameters)
    return is_known and config.start == "base" and not (config.use_dora or config.lora_bias)


def _is_end(target: str, name: str) -> bool:
    """Return whether a name is `target`, or ends with it after a dot."""
    return name == target or name.endswith(f".{target}")


def _modules(layout: _Layout, base: Mapping[str, Shape]) -> dict[str, str]:
    """Return the modules of experts: by the name in the model, the name in the base's files."""
    found: dict[str, str] = {}
    for name in base:
        if match := re.match(rf"(.*\.)({re.escape(layout.module)}|{re.escape(_MODULE)})\.", name):
            found[f"{match[1]}{_MODULE}"] = match[1] + match[2]
    return found


def _fused(layout: _Layout, module: str, prefix: str, name: str, base: Mapping[str, Shape]) -> Fused | None:
    """Return the parameter `name` of a module of experts; `prefix` is the module's name in the base's files.

    None if the base has nothing that could be it, or parts that do not go together.
    """
    own = f"{module}.{name}"
    if own in base:
        dtype, shape = base[own]
        is_known = len(shape) == (2 if name.endswith("_bias") else 3)
        found = Fused(name=own, shape=shape, dtype=dtype, is_transposed=layout.is_transposed, stored=())
        return found if is_known and dtype in FLOATS else None
    stored = tuple(_stored(prefix, layout.joined.get(name, ()), base))
    shapes = {tuple(base[each] for each in names) for names in stored}
    # Experts that differ in shape or type cannot be one parameter.
    if len(shapes) != 1:
        return None
    (parts,) = shapes
    if any(len(shape) != 2 for _, shape in parts):
        return None
    dtypes, widths = {dtype for dtype, _ in parts}, {shape[1] for _, shape in parts}
    if len(dtypes) != 1 or not dtypes.issubset(FLOATS) or len(widths) != 1:
        return None
    shape = (len(stored), sum(shape[0] for _, shape in parts), *widths)
    return Fused(name=own, shape=shape, dtype=dtypes.pop(), is_transposed=False, stored=stored)


def _stored(prefix: str, joined: tuple[str, ...], base: Mapping[str, Shape]) -> Iterator[tuple[str, ...]]:
    """Yield for each expert the names of its tensors that `joined` lists, as long as the base has the next expert."""
    for expert in itertools.count():
        names = tuple(f"{prefix}.{expert}.{each}.weight" for each in joined)
        if not names or any(name not in base for name in names):
            return
        yield names


def _sum(tensor: TensorBytes, change: np.ndarray) -> TensorBytes:
    """Return a tensor plus a change, rounded once to the tensor's format."""
    return from_float32(as_float32(tensor) + change, dtype=tensor.dtype)


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
    """Return where every tensor of an adapter goes in its base; `source` names the adapter in errors.

    `adapter` has the tensors by the names in its file. Raises InvalidStateError: ADAPTER_MODEL_MISMATCH, with the first
    names and a count, if a tensor has no place, none is there for a layer that the config names, or shapes differ;
    LORA_TARGET_TIED for a layer that shares its weight.
    """
    layers, whole = _sorted_by_part(adapter, source=source)
    fused = fused_parameters(config, base.model_type, base.tensors)
    if config.target_parameters and not fits_experts(config, fused):
        raise not_supported(source, "target_parameters", config.target_parameters)
    experts = {layer: (each, layers.pop(layer, {})) for layer, each in fused.items()}
    for layer, parts in layers.items():
        # Not left to PEFT either: with tied weights `merge_and_unload` of PEFT 0.21 gives another model than the
        # unmerged one (findings/peft_tied_merge_twice.sh).
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
    """Return the stored names by layer and part, and those of whole tensors by their names in the model.

    Raises InvalidStateError if two stored names are of the same tensor.
    """
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
    """Yield the problems of each layer's parts, in words.

    `layers` has stored names by layer and part; `weights` has (dtype, shape) of the model's tensors by name, after
    whole ones are replaced.
    """
    for layer, parts in layers.items():
        weight = weights.get(f"{layer}.weight")
        if weight is None or len(weight[1]) != 2:
            yield f"{layer} is no layer with a matrix in the model"
        elif weight[0] not in FLOATS:
            yield f"{layer} has {weight[0]} weights, to which nothing can be added"
        elif parts.keys() - {AdapterPart.ROWS} and not config.targets(layer):
            # Trained rows of tokens need no targeted layer: `trainable_token_indices` names them.
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
    """Yield the parts that the adapter of a layer must have, with their shapes.

    `parts` are those that are there, `shape` is the layer's weight's, and `bias` its bias, if it has one.
    """
    rank = config.rank(layer)
    # A transposed layer (Conv1D) stores [in, out]; an adapter's factors always go by [out, in].
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
    """Yield the problems of the adapter on each parameter of experts, in words."""
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
    """Yield the layers that the config names and that have no adapter among `layers`.

    Of experts none may have one: transformers 5 holds them in one tensor, which names of layers do not reach.
    """
    has_experts = any(_EXPERT.search(layer) for layer in layers)
    for name, (_, shape) in base.tensors.items():
        layer = name.removesuffix(".weight")
        is_meant = layer != name and len(shape) == 2 and config.targets(layer)
        if is_meant and layer not in layers and (has_experts or not _EXPERT.search(layer)):
            yield layer


# Whole tensors of an adapter, and what they mean where embedding and head have one weight.

HEADS = ("lm_head", "embed_out", "output_layer")
"""Last parts of the names of output embeddings."""
_EMBEDDINGS = ("embed_tokens", "wte", "embed_in", "word_embeddings", "embeddings", "embedding", "tok_embeddings")


@dataclass(slots=True, kw_only=True)
class Whole:
    """Where the whole tensors of an adapter go."""

    given: Set[str]
    """The model's names of all of them."""
    tensors: dict[str, str] = field(default_factory=dict)
    """What replaces the base's tensors: name in the model, name as stored."""
    shapes: dict[str, Shape] = field(default_factory=dict)
    """Of what is replaced, by name in the model."""
    problems: list[str] = field(default_factory=list)
    head_of_base: tuple[str, str] | None = None
    """Name of a head that keeps the base's embedding, and that embedding's name."""
    is_untied: bool = False
    vocabulary: int | None = None
    """Rows of the new embedding; None if the base's count stays."""


def end_of(layer: str) -> str:
    """Return the part of a layer's name after its last dot."""
    return layer.rpartition(".")[2]


def is_vocabulary(layer: str) -> bool:
    """Return whether a layer is an embedding or a head, with a row for each token, as its name says."""
    return end_of(layer) in (*HEADS, *_EMBEDDINGS)


def place_whole(
    stored: Mapping[str, str],
    adapter: Mapping[str, TensorBytes],
    base: Mapping[str, Shape],
    *,
    config: PeftConfig,
    is_tied: bool,
) -> Whole:
    """Return where every tensor goes that an adapter has whole, and the problems found.

    `stored` has the names in the adapter's file by the model's names. `is_tied` says whether embedding and head of the
    base have one weight.
    """
    found = Whole(given=stored.keys(), tensors=dict(stored))
    if is_tied:
        _untie(found, adapter, base, config=config)
    for name, source in found.tensors.items():
        layer = name.rpartition(".")[0]
        tensor, old = adapter[source], base.get(name)
        if old is None and found.is_untied and end_of(layer) in HEADS:
            old = base.get(_embedding(base) or "")
        if old is None:
            found.problems.append(f"{name} is no tensor of the model")
        # PEFT wraps a layer that it adapts, whose own weight has `.base_layer` in its name then.
        elif config.targets(layer) != (".base_layer." in source):
            found.problems.append(f"{source} is not where PEFT has it for a layer with its config")
        elif tensor.dtype not in FLOATS or old[0] not in FLOATS or not _fits(layer, tensor.shape, old[1]):
            shown = f"{tensor.dtype}{list(tensor.shape)}"
            found.problems.append(f"{name} is {shown}, the model takes {old[0]}{list(old[1])}")
        else:
            found.shapes[name] = (old[0], tensor.shape)
    found.vocabulary = _resized(found, base)
    return found


def _untie(found: Whole, adapter: Mapping[str, TensorBytes], base: Mapping[str, Shape], *, config: PeftConfig) -> None:
    """Decide which of embedding and head get which weight, as PEFT loads them into one module with two names.

    Change `found`. What is in `modules_to_save` becomes a module of its own; what is not is written into the common
    weight.
    """
    embedding = _embedding(base)
    head = next((name for name in found.given if name.endswith(".weight") and end_of(name[:-7]) in HEADS), None)
    if embedding is None:
        if head is not None:
            found.problems.append(f"{head} is the embedding, too, whose name is not known")
        return
    has_embedding, is_saved = embedding in found.given, config.saves(embedding[:-7])
    if head is None:
        # The saved embedding becomes a module of its own, so the head keeps the base's weight.
        if has_embedding and is_saved:
            found.is_untied, found.head_of_base = True, ("lm_head.weight", embedding)
        return
    is_head_saved, source = config.saves(head[:-7]), found.tensors[head]
    if not has_embedding:
        found.is_untied = is_head_saved
        if not is_head_saved:
            found.tensors[embedding] = found.tensors.pop(head)
    elif adapter[source].data == adapter[found.tensors[embedding]].data:
        # Both names have the same bytes: they are still one weight, which is stored once.
        del found.tensors[head]
    elif is_saved or is_head_saved:
        found.is_untied = True
    else:
        found.problems.append(f"{embedding} and {head} differ, and are one weight in the model")


def _embedding(base: Mapping[str, Shape]) -> str | None:
    """Return the name of the input embedding's weight; None if no tensor, or more than one, has such a name."""
    names = [name for name in base if name.endswith(".weight") and end_of(name[:-7]) in _EMBEDDINGS]
    return names[0] if len(names) == 1 else None


def _fits(layer: str, shape: tuple[int, ...], old: tuple[int, ...]) -> bool:
    """Return whether the shape `shape` may replace a layer's shape `old`: both are equal, or, in an embedding or head,
    they differ in the number of tokens (rows) only.
    """
    return shape == old or (is_vocabulary(layer) and len(shape) == 2 and shape[1:] == old[1:])


def _resized(found: Whole, base: Mapping[str, Shape]) -> int | None:
    """Return the new number of token rows; None if it does not change.

    Adds a problem to `found` if embeddings would have different numbers.
    """
    old = {name: base[name][1] for name in base if name.endswith(".weight") and is_vocabulary(name[:-7])}
    changed = {shape[0] for name, (_, shape) in found.shapes.items() if old.get(name, shape) != shape}
    if not changed:
        return None
    keeps = [name for name in old if name not in found.shapes]
    if found.head_of_base is not None:
        keeps.append(found.head_of_base[0])
    if keeps or len(changed) > 1:
        found.problems.append(f"embeddings have {sorted(changed)} rows; {', '.join(keeps) or 'each'} has another count")
    return max(changed)


def _unsaved(config: PeftConfig, placed: Whole, base: BaseModel) -> Iterable[str]:
    """Return the tensors of layers in `modules_to_save` that are not among the adapter's."""
    heads = [f"{head}.weight" for head in HEADS if base.is_tied and head in config.modules_to_save]
    return [
        name for name in (*base.tensors, *heads) if name not in placed.given and config.saves(name.rpartition(".")[0])
    ]
