"""One frozen base, held once, beside many adapters: a view of the model for each, and one forward for several.

A view has modules of its own around the base's parameters, so that it is a model with one adapter to everything that
trains, publishes or probes one. `JointModel` computes micro-batches of several views at once: what tokens do not share
is computed for all of them together, from the base's weights, and attention, adapters and head for each micro-batch by
itself, in the shapes that it has alone. On a processor whose matrix products give a row the same bits whatever other
rows there are, each micro-batch then has the bits that it has alone. That is so for float32 on the CPUs tried, from
some rows on; `learning.adapters` tries it before it relies on it.

Shape suffixes: R rows of a micro-batch, L longest row, T tokens of all micro-batches (the sum of R · L), H heads, D
size of a head.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, create_causal_mask, flash_attention_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from millrace.trainer.model.expert_parallel import experts_of
from millrace.trainer.model.lora import LoraLinear

_NAME = "millrace_joint"
_FIXED_ROPE = ("default", "linear", "llama3", "yarn", "proportional")
"""Rotary embeddings whose angles depend on a token's position only, not on the longest row of a call."""


def view_of(model: nn.Module) -> nn.Module:
    """Return a copy of the model's modules with the same parameters and buffers, not copied."""
    shared = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})


@dataclass(frozen=True, slots=True, kw_only=True)
class JointPiece:
    """A micro-batch's rows among the tokens of a joint forward, and the adapter's layers by their names in the model.

    `mask` is the one that attention has alone: bool [R, 1, L, L], or None for the plain causal mask.
    """

    layers: Mapping[str, LoraLinear]
    num_rows: int
    width: int
    mask: torch.Tensor | None

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of the rows with their padding."""
        return self.num_rows * self.width


_pieces = ContextVar[Sequence[JointPiece] | None]("_pieces", default=None)


class JointModel:
    """A model whose forward takes the rows of several micro-batches, each with the adapter of its own."""

    def __init__(self, base: nn.Module) -> None:
        """Make a view of `base`, a causal model of transformers without adapters, and prepare it for joint forwards."""
        self._config: Any = base.config.get_text_config()  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
        self.model: Any = view_of(base)
        ALL_ATTENTION_FUNCTIONS.register(_NAME, _attend_by_piece)
        # Positions restart with each row: this function makes no mask, and attention gets that of each piece.
        ALL_MASK_ATTENTION_FUNCTIONS.register(_NAME, flash_attention_mask)
        self.model.set_attn_implementation(_NAME)
        self._joined = set[str]()

    @property
    def unsuited(self) -> str | None:
        """Return why micro-batches of this model are not computed together, in words; None if they may be."""
        config = self._config
        is_plain = config._attn_implementation == "sdpa" and self.model.config._attn_implementation == _NAME
        if not is_plain or not getattr(config, "num_attention_heads", 0):
            return "its attention cannot be replaced"
        if type(self.model.get_output_embeddings()) is not nn.Linear:
            return "its head is not a linear layer"
        if any(True for _ in experts_of(self.model)) or getattr(config, "num_experts", None):
            return "its experts compute tokens of all rows together"
        if set(getattr(config, "layer_types", None) or ["full_attention"]) != {"full_attention"}:
            return "not all of its layers attend to the whole row"
        if getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None):
            return "its attention sees a part of the row"
        rope = getattr(config, "rope_parameters", None) or {}
        if rope.get("rope_type", "default") not in _FIXED_ROPE:
            return f"its positions ({rope['rope_type']}) depend on the longest row"
        return None

    def piece(self, layers: Mapping[str, LoraLinear], position_ids_RL: torch.Tensor) -> JointPiece:
        """Make the piece of rows with these positions, computed with these layers of an adapter."""
        self._join(layers)
        num_rows, width = position_ids_RL.shape
        # The function and the config with which the model makes its mask alone. It reads shape, dtype and device only.
        like = torch.empty((num_rows, width, 0), dtype=self.model.dtype, device=position_ids_RL.device)
        mask = create_causal_mask(self._config, like, None, None, position_ids_RL)
        assert mask is None or isinstance(mask, torch.Tensor)  # a config for sdpa makes nothing else
        return JointPiece(layers=layers, num_rows=num_rows, width=width, mask=mask)

    def _join(self, layers: Mapping[str, LoraLinear]) -> None:
        """Replace those of the view's layers that an adapter has, and no adapter before it had, by `JointLinear`."""
        for name in layers:
            if name not in self._joined:
                parent, _, attribute = name.rpartition(".")
                layer = self.model.get_submodule(name)
                setattr(self.model.get_submodule(parent), attribute, JointLinear(layer, name=name))
                self._joined.add(name)


@contextmanager
def joint(pieces: Sequence[JointPiece]) -> Iterator[None]:
    """Let the model of a `JointModel` compute these pieces in the block, whose tokens are one row of its input."""
    token = _pieces.set(pieces)
    try:
        yield
    finally:
        _pieces.reset(token)


class JointLinear(nn.Linear):
    """A frozen linear layer, beside which each piece's tokens go through the adapter of that piece, if it has one."""

    def __init__(self, base: nn.Linear, *, name: str) -> None:
        """Make a layer with the weight and bias of `base`, not copied; `name` is its name in the model."""
        nn.Module.__init__(self)  # not nn.Linear's, which would make a weight
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias, self._name = base.weight, base.bias, name

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return W x + bias for all tokens, plus what the adapters add to those of their pieces, [1, T, in] → out.

        Raises NotByTokenError if the input has another number of vectors than there are tokens.
        """
        # In the order of `LoraLinear.forward`: the backward adds gradients of an input in the order of its uses.
        result = functional.linear(input, self.weight, self.bias)
        pieces = _pieces.get() or ()
        layers = [piece.layers.get(self._name) for piece in pieces]
        if not any(layer is not None for layer in layers):
            return result
        sizes, vectors = [piece.num_tokens for piece in pieces], input.flatten(0, -2)
        if len(vectors) != sum(sizes):
            raise NotByTokenError(f"layer {self._name} computes {len(vectors)} vectors for {sum(sizes)} tokens")
        added = [
            result.new_zeros((len(part), self.out_features)) if layer is None else layer.added(part).to(result.dtype)
            for layer, part in zip(layers, vectors.split(sizes), strict=True)
        ]
        return result + torch.cat(added).view_as(result)


class NotByTokenError(Exception):
    """A layer's input has not one vector for each token, in their order."""


def _attend_by_piece(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within the rows of each piece, by sdpa in the shapes that it has alone: [1, H, T, D] → [1, T, H, D].

    The interface is that of transformers, whose second result, the attention weights, is None.
    """
    pieces = _pieces.get()
    if pieces is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    sizes = [piece.num_tokens for piece in pieces]
    found = list[torch.Tensor]()
    for piece, *each in zip(pieces, *(whole.split(sizes, dim=2) for whole in (query, key, value)), strict=True):
        # [1, H, R · L, D] → [R, H, L, D]
        query_RHLD, key_RHLD, value_RHLD = (
            part.squeeze(0).unflatten(1, (piece.num_rows, piece.width)).transpose(0, 1) for part in each
        )
        attended_RLHD, _ = sdpa_attention_forward(module, query_RHLD, key_RHLD, value_RHLD, piece.mask, **kwargs)
        found.append(attended_RLHD.flatten(0, 1))
    return torch.cat(found)[None], None
