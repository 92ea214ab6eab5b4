"""Rows cut over ranks, and kernels of attention that compute over the whole row.

Before attention the ranks exchange tokens for heads, so that each has all tokens of its share of the heads (all-to-all,
as in DeepSpeed-Ulysses), and back after it. If heads do not divide, each rank gathers keys and values of all tokens and
computes its own queries. Attention itself is sdpa, with the whole rows' mask, so that packed samples stay apart.

The model is one of transformers: the positions of the whole rows are passed through its layers to attention as the
argument `context`. A call without it computes whole rows.

Shape suffixes: R rows, L longest row with padding, l a piece of it, N tokens whose log-probs are needed.
"""

import logging
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.varlen import varlen_attn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from millrace.trainer.model.mesh import all_to_all, gather_sequence, gather_shares

_NAME = "millrace_context_parallel"
PROVED = (
    "arcee",
    "cohere",
    "cohere2",
    "deepseek_v3",
    "ernie4_5",
    "exaone4",
    "gemma",
    "gemma3_text",
    "glm4",
    "gpt_neox",
    "granite",
    "helium",
    "llama",
    "ministral",
    "mistral",
    "mixtral",
    "olmo",
    "olmo2",
    "olmo3",
    "phi",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "seed_oss",
    "smollm3",
    "starcoder2",
)
"""Types of models that are known to learn the same from rows in pieces.

Other types' layers may not pass `context` to attention (nemotron, gemma2), which then takes each piece for a row.
"""


class Rows(Protocol):
    """The part of `learning.batch.ModelRows` that is needed here."""

    @property
    def token_ids_RL(self) -> torch.Tensor: ...  # noqa: D102
    @property
    def position_ids_RL(self) -> torch.Tensor: ...  # noqa: D102
    @property
    def before_N(self) -> torch.Tensor: ...  # noqa: D102


@dataclass(slots=True)
class Context:
    """The group and the whole rows' positions, which attention needs to compute a piece of the rows."""

    group: dist.ProcessGroup
    position_ids_RL: torch.Tensor
    _masks: dict[int | None, torch.Tensor | None] = field(default_factory=dict)

    def mask(self, window: int | None) -> torch.Tensor | None:
        """Return which token of whole rows attends to which, bool [R, 1, L, L]; None if the plain causal mask does.

        A token attends to itself and earlier tokens of its own sample, with `window` to that many tokens in all.
        `window` None means no limit. Masks are cached by window.
        """
        if window not in self._masks:
            self._masks[window] = self._new_mask(window)
        return self._masks[window]

    def _new_mask(self, window: int | None) -> torch.Tensor | None:
        """Compute the mask that `mask` returns and caches."""
        positions_RL = self.position_ids_RL
        length = positions_RL.shape[1]
        # Positions restart at 0 with each sample of a packed row.
        is_packed = bool((positions_RL[:, 1:] == 0).any())
        if not is_packed and (window is None or window >= length):
            return None
        # [1, 1, L, L], True where a token attends.
        mask_R1LL = causal_mask(length, device=positions_RL.device)
        if window is not None:
            # `tril(-window)` is what is `window` or more tokens away: a window counts the token itself.
            mask_R1LL = mask_R1LL & ~torch.ones_like(mask_R1LL).tril(-window)
        if is_packed:
            sample_RL = (positions_RL == 0).cumsum(1)
            mask_R1LL = mask_R1LL & (sample_RL[:, None, :, None] == sample_RL[:, None, None, :])
        return mask_R1LL


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """This rank's piece of the rows of a micro-batch.

    `arguments` are those of the model's forward. `own_N` are the indices, among the tokens that need a log-prob, of
    those whose previous token is in this piece, and `before_N` the flat indices of these previous tokens in [R, l].
    """

    arguments: dict[str, Any]
    own_N: torch.Tensor
    before_N: torch.Tensor
    counts: list[int]
    order_N: torch.Tensor
    group: dist.ProcessGroup

    def gathered(self, own: torch.Tensor) -> torch.Tensor:
        """Return the values of all tokens that need a log-prob, in their order in the rows, from those of all ranks.

        `own` are this rank's values, in the order of `own_N`. Every rank gets the same result. Collective.
        """
        shares = gather_shares(own, self.group, self.counts)
        return torch.empty_like(shares).index_copy(0, self.order_N, shares)


class ContextParallel:
    """The ranks that share rows, of which this process is one."""

    def __init__(self, mesh: DeviceMesh) -> None:
        """Hold the ranks of `mesh`, of one dimension, which share rows; this process is one of them."""
        self._group = mesh.get_group()
        self._size, self._piece = mesh.size(), mesh.get_local_rank()

    def share(self, rows: Rows) -> Share:
        """Return this rank's piece of the rows, after padding them so that the pieces of all ranks are equally long."""
        tokens_RL, positions_RL = _padded(rows, self._size)
        length, width = tokens_RL.shape[1] // self._size, rows.token_ids_RL.shape[1]
        piece = slice(self._piece * length, (self._piece + 1) * length)
        # `before_N` counts places in rows without the padding that was just added.
        row_N, column_N = rows.before_N // width, rows.before_N % width
        piece_N = column_N // length
        own_N = (piece_N == self._piece).nonzero().squeeze(1)
        return Share(
            arguments={
                "input_ids": tokens_RL[:, piece].contiguous(),
                "position_ids": positions_RL[:, piece].contiguous(),
                # Four dimensions: a mask that is ready. None would have a wrong one made, of the piece's tokens only.
                "attention_mask": torch.ones((1, 1, 1, 1), dtype=torch.bool, device=tokens_RL.device),
                "context": Context(self._group, positions_RL),
            },
            own_N=own_N,
            before_N=(row_N * length + column_N % length)[own_N],
            counts=torch.bincount(piece_N, minlength=self._size).tolist(),
            # Stable: a rank returns the values of its piece in the order of the rows.
            order_N=torch.argsort(piece_N, stable=True),
            group=self._group,
        )


_PARALLEL = WeakKeyDictionary[nn.Module, ContextParallel]()


def cut_rows(model: Any, mesh: DeviceMesh) -> None:
    """Replace a model's attention, in place, by one for ranks that each compute a piece of the same rows.

    `mesh` has these ranks, in one dimension. From then on `context_parallel_of` returns the ranks of the model.
    """
    # No compiled graph has the exchanges: ranks that compile differently could reorder them differently.
    ALL_ATTENTION_FUNCTIONS.register(_NAME, torch.compiler.disable(_attend_to_rows))
    ALL_MASK_ATTENTION_FUNCTIONS.register(_NAME, sdpa_mask)
    model.set_attn_implementation(_NAME)
    _PARALLEL[model] = ContextParallel(mesh)


def context_parallel_of(model: nn.Module) -> ContextParallel | None:
    """Return the ranks that share a model's rows, as `cut_rows` was called for it; None if it computes whole rows."""
    return _PARALLEL.get(model)


def causal_mask(length: int, *, device: torch.device) -> torch.Tensor:
    """Return the causal mask, bool [1, 1, length, length]: each token attends to itself and to earlier ones."""
    return torch.ones((1, 1, length, length), dtype=torch.bool, device=device).tril()


def _padded(rows: Rows, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and positions of the rows, [R, L], padded at their end to a length that `size` divides.

    Padding has token id 0 and continues the positions of the last sample, so that it begins no sample.
    """
    tokens_RL, positions_RL = rows.token_ids_RL, rows.position_ids_RL
    if not (missing := -tokens_RL.shape[1] % size):
        return tokens_RL, positions_RL
    further = torch.arange(1, missing + 1, device=positions_RL.device)
    return (
        nn.functional.pad(tokens_RL, (0, missing)),
        torch.cat([positions_RL, positions_RL[:, -1:] + further], dim=1),
    )


def _attend_to_rows(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    context: Context | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention over whole rows for this rank's piece: query, key, value [R, heads, l, D] → [R, l, heads, D].

    The interface is that of transformers, whose second result, the attention weights, is None. `context` has the ranks
    and the positions of the whole rows, and `attention_mask` is ignored then. With `context` None it is plain sdpa.
    Collective with `context`.
    """
    if context is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    group, size, mask = context.group, dist.get_world_size(context.group), context.mask(kwargs.get("sliding_window"))
    # Grouped-query attention may have fewer heads of keys than ranks; then keys and values of all tokens are gathered.
    if query.shape[1] % size == key.shape[1] % size == 0:
        query, key, value = (_heads_of_all_tokens(each, group, size) for each in (query, key, value))
        found, _ = sdpa_attention_forward(module, query, key, value, mask, **kwargs)
        return _tokens_of_all_heads(found, group, size), None
    length = query.shape[2]
    # This rank's queries begin in the middle of the rows, which `is_causal` of sdpa cannot say: it needs the mask's
    # rows.
    mask = causal_mask(length * size, device=query.device) if mask is None else mask
    own = slice(dist.get_rank(group) * length, (dist.get_rank(group) + 1) * length)
    key, value = gather_sequence(key, group), gather_sequence(value, group)
    found, _ = sdpa_attention_forward(module, query, key, value, mask[:, :, own], **kwargs)
    return found, None


def _heads_of_all_tokens(tensor: torch.Tensor, group: dist.ProcessGroup, size: int) -> torch.Tensor:
    """Exchange this rank's tokens of all heads for all tokens of its share of the heads.

    [R, heads, l, D] → [R, heads / size, L, D]; `size` is the number of ranks of `group`. Collective.
    """
    heads = all_to_all(tensor.unflatten(1, (size, -1)).transpose(0, 1), group)  # [size, R, heads / size, l, D]
    return heads.permute(1, 2, 0, 3, 4).flatten(2, 3)


def _tokens_of_all_heads(tensor: torch.Tensor, group: dist.ProcessGroup, size: int) -> torch.Tensor:
    """Exchange all tokens of this rank's share of the heads for its tokens of all heads.

    [R, L, heads / size, D] → [R, l, heads, D]; `size` is the number of ranks of `group`. Collective.
    """
    tokens = all_to_all(tensor.unflatten(1, (size, -1)).transpose(0, 1), group)  # [size, R, l, heads / size, D]
    return tokens.permute(1, 2, 0, 3, 4).flatten(2, 3)


# The kernel of attention for rows of samples of varying lengths, on GPUs; elsewhere it is sdpa with a dense mask.
#
# torch has the kernel (FlashAttention 2, `torch.nn.attention.varlen`), so that nothing else has to be installed.
# Its backward adds up in a fixed order if torch is set to be deterministic.
#
# Shape suffixes: R rows, L longest row with padding, N tokens of all rows, H heads, D size of a head, S samples.

logger = logging.getLogger(__name__)

_ATTENTION_NAME = "millrace_varlen"
# The limit of FlashAttention 2.
_LARGEST_HEAD = 256
_OLDEST = (8, 0)
"""Compute capability: Ampere."""


def use_varlen_kernel(model: Any, *, compute_dtype: torch.dtype, device: torch.device) -> bool:
    """Use the kernel for samples of varying lengths as the model's attention where it computes the same.

    Returns whether it is used. It is not used without a GPU that has it, for other compute dtypes than 16-bit ones, for
    attention with a feature that it lacks, and if rows are split over ranks, which needs its own attention.
    """
    if context_parallel_of(model) is not None:
        return False
    # FlashAttention 2 computes in 16-bit formats only, on Ampere and newer.
    if device.type != "cuda" or compute_dtype not in (torch.bfloat16, torch.float16):
        return False
    if torch.cuda.get_device_capability(device) < _OLDEST:
        return False
    if reason := _unsuited(model):
        logger.info("attention over packed rows takes a dense mask", extra={"reason": reason})
        return False
    ALL_ATTENTION_FUNCTIONS.register(_ATTENTION_NAME, _attend_to_samples)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_ATTENTION_NAME, flash_attention_mask)
    model.set_attn_implementation(_ATTENTION_NAME)  # which leaves models that know no other attention as they are
    return model.config._attn_implementation == _ATTENTION_NAME


def lengths_of_samples(model: Any, position_ids_RL: torch.Tensor) -> dict[str, Any]:
    """Return the keyword arguments of the model's forward with which the kernel for varying lengths separates samples.

    Empty if the model does not use the kernel. A sample begins where a position is 0.
    """
    return _lengths(position_ids_RL) if model.config._attn_implementation == _ATTENTION_NAME else {}


def _unsuited(model: Any) -> str | None:
    """Return why the kernel for varying lengths cannot compute the model's attention, in words; None if it can."""
    config = model.config.get_text_config()
    if not getattr(config, "num_attention_heads", 0):
        return "it has none"  # recurrent models
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if getattr(config, "kv_lora_rank", None):
        return "keys and values have heads of different sizes"
    if head > _LARGEST_HEAD or head % 8:
        return f"a head has {head} values, and the kernel takes multiples of 8 up to {_LARGEST_HEAD}"
    if getattr(config, "attn_logit_softcapping", None):
        return "its scores are capped"
    if getattr(config, "attention_chunk_size", None):
        return "it is chunked"
    if getattr(config, "attention_dropout", 0.0) or getattr(config, "attn_pdrop", 0.0):
        return "it drops scores out"
    if any(name.endswith("sinks") for name, _ in model.named_parameters()):
        return "it has sinks"
    return None


def _lengths(position_ids_RL: torch.Tensor) -> dict[str, Any]:
    """Return where samples begin in the concatenated rows, [S + 1] with the end, and the longest sample's length.

    The dict has both, for queries and for keys, by transformers' names of arguments.
    """
    starts_S = (position_ids_RL.reshape(-1) == 0).nonzero().squeeze(1)
    bounds = nn.functional.pad(starts_S, (0, 1), value=position_ids_RL.numel()).int()
    longest = int(bounds.diff().max())
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}


def _attend_to_samples(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    position_ids: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within each sample of packed rows, by the kernel: query, key, value [R, heads, L, D] → [R, L, heads, D].

    The interface is that of transformers, whose second result, the attention weights, is None. `scaling` None is 1 /
    sqrt(D). `sliding_window` counts tokens, None is no limit. Without `lengths_of_samples` in `kwargs`, samples begin
    at the zeros of `position_ids`, and without these each row is a sample. Raises ValueError for a mask, and for
    arguments that the kernel does not have.
    """
    if attention_mask is not None:
        raise ValueError("positions say where samples begin and end, not a mask")
    if unknown := [name for name in ("dropout", "softcap", "s_aux") if kwargs.get(name)]:
        raise ValueError(f"the kernel for varying lengths knows no {', '.join(unknown)}")
    if "cu_seq_lens_q" not in kwargs:  # of a caller that has not asked for `lengths_of_samples`
        rows, length = query.shape[0], query.shape[2]
        whole = torch.arange(length, device=query.device).expand(rows, -1)
        kwargs |= _lengths(whole if position_ids is None else position_ids.expand(rows, -1))
    bounds, longest = kwargs["cu_seq_lens_q"], kwargs["max_length_q"]
    # [R, heads, L, D] → [R · L, heads, D]
    query_NHD, key_NHD, value_NHD = (each.transpose(1, 2).flatten(0, 1) for each in (query, key, value))
    found_NHD = varlen_attn(
        query_NHD,
        key_NHD,
        value_NHD,
        bounds,
        bounds,
        longest,
        longest,
        scale=scaling,
        # The kernel counts the tokens before a token; transformers counts the token itself, too.
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        enable_gqa=True,
    )
    assert isinstance(found_NHD, torch.Tensor)  # without auxiliary outputs
    return found_NHD.unflatten(0, (query.shape[0], query.shape[2])), None
