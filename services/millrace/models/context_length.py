"""Rotary embeddings whose factors depend on the longest position of a call: fixed by the context length instead.

`longrope` and `dynamic` embeddings of transformers choose one set of factors by the longest row of a call: the factors
of a sample depend on the other samples in the call, and those of a completion on how long it was when they were
computed. vLLM chooses once, by its `max_model_len`. A fixed embedding computes as in a sequence of the context's
length, whatever a call holds, so that trainer and engines with the same context length have the same factors.

Shape suffixes: L tokens of a row.
"""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

Contexts = tuple[int, ...]
"""The least and the most tokens of contexts that have the same factors; only the least if there is no upper bound."""

_SHORTEST, _LONGEST = 2, 1 << 40
_FIXED = WeakKeyDictionary[nn.Module, Contexts]()


@torch.no_grad()
def fix_context_length(model: nn.Module, length: int) -> None:
    """Make every rotary embedding that depends on a call's longest position compute as for `length` tokens, in place.

    `length` is that of the longest sequence, at least 2. Positions after it can only be padding, and become the last
    position. Call it once, before the model computes anything, because some embeddings remember the longest call.
    """
    alike: list[tuple[int, int]] = []
    for module, kinds in _following(model):
        alike += [_alike(module, kind, length) for kind in kinds]
        module.register_forward_pre_hook(partial(_with_last_position, length=length), with_kwargs=True)
        module.register_forward_hook(_without_last_position)
    if alike:
        least, most = max(low for low, _ in alike), min(high for _, high in alike)
        _FIXED[model] = (least,) if most == _LONGEST else (least, most)


def contexts_like(model: nn.Module) -> Contexts:
    """Return the context lengths, in tokens, with which a model computes what it computes with its fixed one.

    `fix_context_length` has fixed it. The result is the least and the most; only the least if there is no upper bound;
    and empty if the model has no embedding that depends on the context's length.
    """
    return _FIXED.get(model, ())


def _following(model: nn.Module) -> list[tuple[nn.Module, list[str | None]]]:
    """Return the embeddings that depend on a call's longest position, each with the types of layers concerned.

    The type is None for an embedding that is the same for all layers.
    """
    found = []
    for module in model.modules():
        types = getattr(module, "rope_type", None)
        by_layer: Mapping[str | None, Any] = types if isinstance(types, Mapping) else {None: types}
        kinds = [kind for kind, name in by_layer.items() if isinstance(name, str) and _follows(name)]
        if kinds:
            found.append((module, kinds))
    return found


def _follows(name: str) -> bool:
    """Return whether a type of rotary embedding depends on the longest position of a call."""
    return name == "longrope" or "dynamic" in name  # as `transformers.modeling_rope_utils.dynamic_rope_update` asks


def _alike(module: nn.Module, kind: str | None, length: int) -> tuple[int, int]:
    """Return the least and the most tokens for which an embedding equals that for `length` tokens, by computing it.

    `kind` is the type of layers, None if the embedding is the same for all.
    """
    wanted = _first_two(module, kind, length)

    def is_alike(other: int) -> bool:
        """Return whether the embedding for `other` tokens is the same."""
        return torch.equal(_first_two(module, kind, other), wanted)

    least = _SHORTEST if is_alike(_SHORTEST) else _border(is_alike, length, _SHORTEST)
    return least, _LONGEST if is_alike(_LONGEST) else _border(is_alike, length, _LONGEST)


def _border(is_alike: Callable[[int], bool], inside: int, outside: int) -> int:
    """Return the last length, from `inside` towards `outside`, for which `is_alike` is true, by bisection.

    It is true for `inside` and false for `outside`.
    """
    while abs(outside - inside) > 1:
        middle = (inside + outside) // 2
        inside, outside = (middle, outside) if is_alike(middle) else (inside, middle)
    return inside


def _first_two(module: nn.Module, kind: str | None, length: int) -> torch.Tensor:
    """Return the embeddings of the first two positions in a sequence of `length` tokens, flat, by a fresh copy of the
    module.

    `kind` is the type of layers, None if the embedding is the same for all.
    """
    # A copy: the module itself would remember the longest call it has seen.
    # The memo has the config as its own copy, so that only the module is copied.
    fresh = copy.deepcopy(module, {id(config): config for config in [getattr(module, "config", None)]})
    # The last position is that of the whole context: it is what the factors depend on.
    positions_1L = torch.tensor([[0, 1, length - 1]], device=next(fresh.buffers()).device)
    arguments = {} if kind is None else {"layer_type": kind}
    given = fresh(torch.zeros(1, device=positions_1L.device), positions_1L, **arguments)
    return torch.cat([each[..., :2, :].flatten() for each in _tensors(given)])


def _with_last_position(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, length: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments `args` and `kwargs` of an embedding (x, position_ids, …) with one more position.

    It is the last one of `length` tokens: an embedding that depends on the longest position of a call then computes as
    for the whole context. The function is a hook before the module's call.
    """
    positions_L = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
    # [..., L] → [..., L + 1]
    last = positions_L.new_full((*positions_L.shape[:-1], 1), length - 1)
    longer = torch.cat([positions_L.clamp(max=length - 1), last], dim=-1)
    if "position_ids" in kwargs:
        return args, kwargs | {"position_ids": longer}
    return (args[0], longer, *args[2:]), kwargs


def _without_last_position(module: nn.Module, args: tuple[Any, ...], given: Any) -> Any:
    """Return an embedding's result without the position that `_with_last_position` added.

    A hook after the module's call.
    """
    shorter = tuple(each[..., :-1, :] for each in _tensors(given))
    return shorter[0] if isinstance(given, torch.Tensor) else shorter


def _tensors(given: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Return one tensor or several as a tuple."""
    return (given,) if isinstance(given, torch.Tensor) else given
