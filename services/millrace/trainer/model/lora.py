"""LoRA: low-rank adapters on chosen linear layers of a frozen base model.

    y = W x + b + (alpha / rank) · B (A · dropout(x))        A: [rank, in], B: [out, rank], B = 0 at the start

Names and initial values are those of the PEFT library (`layer.lora_A.weight`, `layer.lora_B.weight`, Kaiming-uniform
A), so that published adapters load there and in vLLM. The layer itself is our own, because PEFT renames every base
weight that it wraps, which version 0, its digest, the checkpoints and the replay would depend on. Here the base keeps
its names, and the initial values of an adapter depend only on the run's seed and the adapter's name.
"""

import contextlib
import hashlib
import math
import re
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from millrace.config.sections.trainer import DEFAULT_LORA_TARGETS, LoraConfig
from millrace.errors import InvalidStateError
from millrace.models.saved import kept_in_float32
from millrace.policies.peft.config import AdapterSpec, PeftConfig

_EXAMPLES = 8  # names in a message


class LoraLinear(nn.Linear):
    """A linear layer whose weight and bias are frozen, with an adapter beside them."""

    def __init__(self, base: nn.Linear, *, config: LoraConfig, seed: int, name: str) -> None:
        """Make a layer with the weight and bias of `base`, not copied, and a new adapter that adds 0 at first.

        The adapter's initial values depend on `seed` and `name`, the layer's name in the model, only.
        """
        nn.Module.__init__(self)  # not nn.Linear's, which would make a weight: this layer has `base`'s own
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self.scaling = config.alpha / config.rank
        self.lora_dropout = config.dropout
        self.is_active = True
        self.is_learning = False  # apart from `training`, which is the base's dropout and off in most runs
        digest = hashlib.sha256(f"lora/{seed}/{name}".encode()).digest()
        # `manual_seed` takes signed 64-bit numbers.
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        bound = 1 / math.sqrt(base.in_features)  # Kaiming-uniform with a = sqrt(5), as in PEFT
        self.lora_A = _linear(torch.empty(config.rank, base.in_features).uniform_(-bound, bound, generator=generator))
        self.lora_B = _linear(torch.zeros(base.out_features, config.rank))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return W x + bias, plus scaling · B (A x) unless the adapter is off.

        [..., in] → [..., out] in the base's dtype. The adapter computes in its own dtype, with dropout before A while
        it is learning.
        """
        result = functional.linear(input, self.weight, self.bias)
        if not self.is_active:
            return result
        return result + self.added(input).to(result.dtype)

    def added(self, input: torch.Tensor) -> torch.Tensor:
        """Return what the adapter adds: scaling · B (A x), [..., in] → [..., out] in the adapter's dtype."""
        # [..., in] → [..., rank] → [..., out]
        low = functional.dropout(input.to(self.lora_A.weight.dtype), self.lora_dropout, self.is_learning)
        return self.lora_B(self.lora_A(low)) * self.scaling


def add_adapters(model: nn.Module, config: LoraConfig, *, seed: int) -> AdapterSpec:
    """Freeze the model, replace its target layers by `LoraLinear`, and unfreeze `modules_to_save`, in place.

    Returns the spec by which PEFT finds the same layers. `seed` decides the initial values. Raises InvalidStateError if
    a pattern fits no layer (LORA_TARGET_UNKNOWN, LORA_SAVED_UNKNOWN), or a layer to save has a tied weight
    (LORA_SAVED_TIED).
    """
    model.requires_grad_(False)
    saved = _saved_modules(model, config)
    adapted: list[str] = []
    for name, layer in _target_layers(model, config, saved=saved):
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, LoraLinear(layer, config=config, seed=seed, name=name))
        adapted.append(name)
    for name in saved:
        model.get_submodule(name).requires_grad_(True)
    return _spec(model, config, adapted=adapted, saved=saved)


def is_adapted(model: nn.Module) -> bool:
    """Return whether the model has LoRA adapters."""
    return bool(adapted_layers(model))


def adapted_layers(model: nn.Module) -> dict[str, LoraLinear]:
    """Return the layers with LoRA adapters by their names in the model; empty without adapters."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


def set_learning(model: nn.Module, is_learning: bool) -> None:
    """Switch the dropout of all LoRA adapters on or off; the dropout of the base model stays as it is."""
    for layer in adapted_layers(model).values():
        layer.is_learning = is_learning


@contextlib.contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Switch all adapters of the model off during the block, so that it computes as the base model does."""
    layers = adapted_layers(model).values()
    for layer in layers:
        layer.is_active = False
    try:
        yield
    finally:
        for layer in layers:
            layer.is_active = True


def trained_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors that require a gradient by their names in the model, detached views of the live ones.

    With adapters these are the adapters and the layers in `modules_to_save`.
    """
    state = model.state_dict(keep_vars=True)  # FSDP reshards parameters that it still has whole, in the compute dtype
    return {name: tensor.detach() for name, tensor in state.items() if tensor.requires_grad}


def weight_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the model's weights and persistent buffers without adapters, by name, detached views of the live ones.

    A tied weight is returned once, under the name by which transformers saves it.
    """
    state, found, seen = model.state_dict(keep_vars=True), dict[str, torch.Tensor](), set[int]()
    ties: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    for name, tensor in state.items():
        is_copy = name in ties and state.get(ties[name]) is tensor  # transformers saves the other name of the two
        if id(tensor) not in seen and not is_copy and not _is_adapter(name):
            seen.add(id(tensor))
            found[name] = tensor.detach()
    return found


def round_base(model: nn.Module, config: LoraConfig, *, publish_dtype: torch.dtype, compute_dtype: torch.dtype) -> None:
    """Round the weights to `publish_dtype` in place, except those kept in float32. Call it before `add_adapters`.

    Frozen weights never change, so the trainer has to compute with the rounded ones that engines have. They are held in
    `publish_dtype` if it is also the compute dtype, which halves their memory, else in float32, and always in float32
    with `modules_to_save`, because layers that are trained whole need float32 masters.
    """
    held = publish_dtype if publish_dtype == compute_dtype and not config.modules_to_save else torch.float32
    kept = kept_in_float32(model, dtype=publish_dtype)
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and name not in kept:
            parameter.data = parameter.data.to(publish_dtype).to(held)  # the object stays, and so do ties


@torch.no_grad()
def round_filled(model: nn.Module, *, publish_dtype: torch.dtype) -> None:
    """Round the weights to `publish_dtype` in place, keeping the dtype that holds them.

    Call it after `fill_opened` has read the weights into a model that was empty. Adapters, and weights held in
    `publish_dtype` or kept in float32, stay as they are.
    """
    kept = kept_in_float32(model, dtype=publish_dtype)
    for name, parameter in model.named_parameters():
        is_rounded = not _is_adapter(name) and name not in kept and parameter.is_floating_point()
        if is_rounded and parameter.dtype != publish_dtype:
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.copy_(local.to(publish_dtype))


def _linear(weight: torch.Tensor) -> nn.Linear:
    """Make a linear layer without bias from `weight` [out, in], trainable."""
    # Made without memory, because its weight is replaced at once.
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight)
    return layer


def _is_adapter(name: str) -> bool:
    """Return whether a parameter's name is that of an adapter's matrix A or B."""
    return name.endswith((".lora_A.weight", ".lora_B.weight"))


def _target_layers(model: nn.Module, config: LoraConfig, *, saved: list[str]) -> list[tuple[str, nn.Linear]]:
    """Return names and linear layers, in the model's order, that fit a pattern in `target_modules`.

    Layers within those named in `saved`, which are trained whole, are left out. Raises InvalidStateError for a pattern,
    other than a default one, that fits no layer, and if no layer is found.
    """
    linear = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    found: dict[str, nn.Linear] = {}
    for pattern in config.target_modules:
        fits = [name for name in linear if _fits(pattern, name)]
        # The default patterns are names of several families, of which a model has some.
        if not fits and pattern not in DEFAULT_LORA_TARGETS:
            raise _unknown(pattern, model, key="target_modules", what="linear layer", names=sorted(linear))
        found |= {name: linear[name] for name in fits if not any(_is_within(name, whole) for whole in saved)}
    if not found:
        raise _unknown(", ".join(config.target_modules), model, key="target_modules", what="linear layer", names=linear)
    return [(name, found[name]) for name in linear if name in found]


def _saved_modules(model: nn.Module, config: LoraConfig) -> list[str]:
    """Return the names of the layers that fit a pattern in `modules_to_save`, without repetition.

    Raises InvalidStateError for a pattern that fits no layer, and for a layer whose weight is tied to another layer's.
    """
    found: list[str] = []
    # Modules without parameters have nothing to train, and the root, whose name is empty, would be the whole model.
    names = [name for name, module in model.named_modules() if name and any(True for _ in module.parameters())]
    for pattern in config.modules_to_save:
        fits = [name for name in names if _fits(pattern, name)]
        if not fits:
            raise _unknown(pattern, model, key="modules_to_save", what="layer", names=names)
        found += [name for name in fits if name not in found]
    for name in found:
        own = {id(parameter) for parameter in model.get_submodule(name).parameters()}
        for other, parameter in model.named_parameters(remove_duplicate=False):
            if id(parameter) in own and not _is_within(other, name):
                raise InvalidStateError(
                    f"trainer.model.lora.modules_to_save names {name}, whose weight is tied to {other}",
                    reason="LORA_SAVED_TIED",
                    remedy="leave it out: adapters cannot train one end of a tied weight",
                )
    return found


def _fits(pattern: str, name: str) -> bool:
    """Return whether a pattern matches a layer's name by PEFT's rule.

    It has to match the whole name, or all of its end after a dot; it may be a regular expression.
    """
    return re.fullmatch(rf"(.*\.)?({pattern})", name) is not None


def _is_within(name: str, module: str) -> bool:
    """Return whether `name` is that of `module` or of something in it."""
    return name == module or name.startswith(f"{module}.")


def _spec(model: nn.Module, config: LoraConfig, *, adapted: list[str], saved: list[str]) -> AdapterSpec:
    """Return the spec by which PEFT chooses exactly the layers `adapted` and `saved` (names of layers in the model).

    Tried are the config's patterns, the last parts of names, and full names, in this order. PEFT takes no regular
    expression in a list, and for `modules_to_save` it takes every layer whose name ends with an entry, even within a
    word.
    """
    names = [name for name, _ in model.named_modules()]

    def meant(targets: Iterable[str], whole: Iterable[str]) -> PeftConfig:
        """Return PEFT's config with these lists of layers to adapt (`targets`) and to train whole (`whole`)."""
        return PeftConfig(
            r=config.rank,
            lora_alpha=float(config.alpha),
            target_modules=tuple(sorted(targets)),
            modules_to_save=tuple(sorted(whole)),
        )

    inside = {name for name in names if any(_is_within(name, each) for each in saved)}
    ways = [meant((), config.modules_to_save), meant((), saved)]
    whole = next((way for way in ways if {name for name in names if way.saves(name)} == inside), ways[-1])
    patterns = [pattern for pattern in config.target_modules if any(_fits(pattern, name) for name in adapted)]
    ends = {name.rpartition(".")[2] for name in adapted}
    ways = [meant(targets, whole.modules_to_save) for targets in (patterns, ends, adapted)]
    way = next((way for way in ways if {name for name in names if way.targets(name)} == set(adapted)), ways[-1])
    return AdapterSpec(
        rank=config.rank,
        alpha=float(config.alpha),
        target_modules=tuple(way.target_modules),
        modules_to_save=way.modules_to_save,
    )


def _unknown(pattern: str, model: nn.Module, *, key: str, what: str, names: Iterable[str]) -> InvalidStateError:
    """Make the error that a pattern in the config's `key` fits none of `names`.

    `what` is the kind of thing that they name ("linear layer").
    """
    ends = sorted({name.rpartition(".")[2] for name in names})
    shown = ", ".join(ends[:_EXAMPLES]) + (", …" if len(ends) > _EXAMPLES else "")
    # transformers holds them in one parameter for all experts of a layer, which is no linear layer.
    held = any(_fits(pattern, name) for name, parameter in model.named_parameters() if parameter.ndim == 3)
    why = "; it names weights of experts, which have no adapters" if held and key == "target_modules" else ""
    return InvalidStateError(
        f"trainer.model.lora.{key} names {pattern!r}, which fits no {what} of {type(model).__name__} ({shown}){why}",
        reason="LORA_TARGET_UNKNOWN" if key == "target_modules" else "LORA_SAVED_UNKNOWN",
        remedy="name layers of this model",
    )
