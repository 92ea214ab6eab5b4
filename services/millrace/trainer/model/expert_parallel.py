"""Experts split over ranks: tokens are sent to the ranks that have their experts, and results back.

transformers holds all experts of a layer in one module with a tensor for each projection, and lets others compute it by
the module's flags (`transformers.integrations.moe`). Any model with such modules can be split; the flags are read here.
Routers stay whole at every rank, with their correction bias, which nothing changes.

The rows that a rank receives are sorted by expert, and multiplied in one product per expert; on a GPU these are one
kernel. The number of rows differs from micro-batch to micro-batch, so counts are exchanged first.

Shape suffixes: T tokens, K experts of each, P = T · K pairs of both, E experts, e those of a rank, M rows received,
H hidden size, I a projection's size.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

from millrace.errors import InvalidSpecError, InvalidStateError, Violation
from millrace.trainer.model.mesh import all_to_all

_FLAGS = ("num_experts", "has_gate", "has_bias", "is_transposed", "is_concatenated")
"""Attributes of every module of experts that follows transformers' interface."""

_LOSS_WEIGHTS = (("", "router_aux_loss_coef"), ("", "aux_loss_coef"), ("ffn_config", "moe_loss_weight"))
"""Where configs have the weight of the loss that balances experts: the config in it, if any, and the key. The second
is that of JetMoE, the third that of DBRX."""


def experts_of(model: nn.Module) -> Iterator[nn.Module]:
    """Yield, layer by layer, the modules that hold all experts of a layer; none for experts of another form."""
    for module in model.modules():
        if all(hasattr(module, flag) for flag in _FLAGS):
            yield module


def cut_experts(model: nn.Module, mesh: DeviceMesh, *, prefix: str = "trainer.model") -> list[nn.Module]:
    """Split the experts of a whole model over the ranks of a one-dimensional mesh, in place; return their modules.

    Each rank keeps its experts only, and the modules' forward sends tokens to the ranks of their experts. Call it
    before FSDP shards the experts further. Raises InvalidSpecError (LAYOUT_IMPOSSIBLE) for experts that cannot be
    split, with the reason; `prefix` is the name of the config's table, for messages.
    """
    found = list(experts_of(model))
    if (reason := _unfit(model, found, size=mesh.size())) is not None:
        violation = Violation(field=f"{prefix}.ep", value=str(mesh.size()), message=reason)
        raise InvalidSpecError([violation], reason="LAYOUT_IMPOSSIBLE", remedy=f"leave {prefix}.ep out")
    for experts in found:
        for name, parameter in list(experts.named_parameters(recurse=False)):
            size, place = mesh.size(), mesh.get_local_rank()
            own = parameter.detach().chunk(size)[place].clone()  # not a view, which would keep all of them in memory
            cut = DTensor.from_local(own, mesh, [Shard(0)], run_check=False)
            setattr(experts, name, nn.Parameter(cut, requires_grad=parameter.requires_grad))
        # How many rows come is known on the host only, so that no compiled graph can go on here.
        experts.__dict__["forward"] = torch.compiler.disable(_Dispatch(experts, mesh.get_group()))
    return found


def require_no_router_loss(model_config: Any) -> None:
    """Raise InvalidStateError (ROUTER_LOSS_UNSUPPORTED) if a model's config asks for a loss that balances its experts.

    transformers adds that loss with `output_router_logits`, times a weight (`_LOSS_WEIGHTS`); no step here computes it.
    """
    text = model_config.get_text_config()
    found = [(name, getattr(level, name, None)) for level, name in _loss_weights(text)]
    weight = next((f"{name} {value}" for name, value in found if value), None)
    if getattr(text, "output_router_logits", False) and weight is not None:
        raise InvalidStateError(
            f"config.json of the model asks for a loss that balances its experts (output_router_logits, with "
            f"{weight}), which is not computed here",
            reason="ROUTER_LOSS_UNSUPPORTED",
            remedy="set output_router_logits to false in config.json: the routers learn by the run's own loss, and "
            "max_vio shows how even the experts' load is",
        )


def _loss_weights(text: Any) -> Iterator[tuple[Any, str]]:
    """Yield each place where a config may have the weight of a balancing loss: the config or one in it, and the key."""
    for inner, name in _LOSS_WEIGHTS:
        yield (getattr(text, inner, None) if inner else text), name


def _unfit(model: nn.Module, found: list[Any], *, size: int) -> str | None:
    """Return why the modules of experts `found` in a model cannot be split over `size` ranks, or None if they can."""
    name = type(model).__name__
    if not found:
        return f"{name} has no module that holds all experts of a layer as transformers' own models hold them"
    for experts in found:
        kind, count = type(experts).__name__, experts.num_experts
        if count % size:
            return f"a layer of {name} has {count} experts, which {size} ranks cannot share"
        if shared := [each for each, value in experts.named_parameters() if "." in each or value.shape[0] != count]:
            return f"the experts of {name} ({kind}) share {', '.join(shared)}, whose gradient no rank has whole"
    return None


class _Dispatch:
    """The forward of a split experts module: sends tokens to their experts' ranks, and gets the results back."""

    def __init__(self, experts: Any, group: dist.ProcessGroup) -> None:
        """Bind the split module `experts` to `group`, the ranks that share its experts."""
        self._experts = experts
        self._group = group
        self._size = dist.get_world_size(group)

    def __call__(self, hidden_TH: torch.Tensor, index_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        """Return for every token the weighted sum of its experts' outputs, [T, H].

        `index_TK` has the experts of each token, and `weights_TK` their weights. Collective: tokens go to the ranks of
        their experts, and results come back.
        """
        # Sorted by expert, the pairs are sorted by rank as well: a rank holds consecutive experts.
        order_P = torch.argsort(index_TK.reshape(-1), stable=True)
        token_P = torch.div(order_P, index_TK.shape[1], rounding_mode="floor")
        sent_RE = torch.bincount(index_TK.reshape(-1), minlength=self._experts.num_experts).view(self._size, -1)
        received_RE = sent_RE.clone()  # the result in the fake group of `trainer.estimate_step`, which sends nothing
        dist.all_to_all_single(received_RE, sent_RE, group=self._group)
        # Both sums in one copy to the host, because each copy waits for the GPU.
        sends, receives = torch.stack([sent_RE.sum(1), received_RE.sum(1)]).tolist()
        rows_MH = all_to_all(hidden_TH[token_P], self._group, sends=sends, receives=receives)
        # The received rows are sorted by rank, then by expert.
        expert_M = torch.arange(received_RE.numel(), device=received_RE.device) % received_RE.shape[1]
        expert_M = expert_M.repeat_interleave(received_RE.reshape(-1))
        order_M = torch.argsort(expert_M, stable=True)
        # `argsort` of a permutation is its inverse: results go back in the order in which the rows came.
        rows_MH = self._compute(rows_MH[order_M], received_RE.sum(0))[torch.argsort(order_M)]
        rows_PH = all_to_all(rows_MH, self._group, sends=receives, receives=sends)
        # A token's weights are applied at its own rank: they are not sent, and their gradient arises here. A sum over
        # an axis has a fixed order, and the format of the weights, which many routers give in float32.
        rows_TKH = rows_PH[torch.argsort(order_P)].unflatten(0, index_TK.shape)
        return (rows_TKH * weights_TK[..., None]).sum(1).to(hidden_TH.dtype)

    def _compute(self, rows_MH: torch.Tensor, counts_e: torch.Tensor) -> torch.Tensor:
        """Return the outputs of this rank's experts, [M, H], for rows sorted by expert.

        `counts_e` has rows by expert.
        """
        experts = self._experts
        if experts.has_gate:
            rows_MI = experts._apply_gate(self._project(rows_MH, "gate_up_proj", counts_e))
        else:
            rows_MI = experts.act_fn(self._project(rows_MH, "up_proj", counts_e))
        return self._project(rows_MI, "down_proj", counts_e)

    def _project(self, rows_MX: torch.Tensor, name: str, counts_e: torch.Tensor) -> torch.Tensor:
        """Return the rows times the weight `name` of their experts, plus its bias if the experts have biases.

        The rows are sorted by expert; `counts_e` has rows by expert.
        """
        weight = _local(getattr(self._experts, name))
        found_MY = grouped(rows_MX, weight, counts_e, is_transposed=self._experts.is_transposed)
        if self._experts.has_bias:
            bias_eY = _local(getattr(self._experts, f"{name}_bias"))
            found_MY = found_MY + bias_eY.repeat_interleave(counts_e, dim=0, output_size=len(found_MY))
        return found_MY


def grouped(
    rows_MX: torch.Tensor, weight_eYX: torch.Tensor, counts_e: torch.Tensor, *, is_transposed: bool = False
) -> torch.Tensor:
    """Multiply each row by the weight of its expert, [M, X] → [M, Y], in one kernel where possible.

    Rows are sorted by expert, and `counts_e` says how many each expert has. With `is_transposed` the weight is
    [e, X, Y]. An expert without rows takes part, too: every weight has to get a gradient, or the collectives of FSDP's
    ranks would not match.
    """
    by_kernel = has_kernel(rows_MX.device) and fits_kernel(rows_MX, weight_eYX)
    weight_eXY = weight_eYX if is_transposed else weight_eYX.transpose(1, 2)
    return (grouped_by_kernel if by_kernel else grouped_by_loop)(rows_MX, weight_eXY, counts_e)


def grouped_by_kernel(rows_MX: torch.Tensor, weight_eXY: torch.Tensor, counts_e: torch.Tensor) -> torch.Tensor:
    """Multiply each row by the weight of its expert, as `grouped` of a transposed weight, in one operation.

    The tensors are some that `fits_kernel` accepts. The backward needs a contiguous gradient.
    """
    # `grouped_mm` takes the end of each expert's rows, as int32.
    offsets_e = counts_e.cumsum(0).to(torch.int32)
    return functional.grouped_mm(rows_MX, weight_eXY, offs=offsets_e)


def grouped_by_loop(rows_MX: torch.Tensor, weight_eXY: torch.Tensor, counts_e: torch.Tensor) -> torch.Tensor:
    """Multiply each row by the weight of its expert, as `grouped` of a transposed weight, with a product per expert."""
    groups = rows_MX.split(counts_e.tolist())
    return torch.cat([rows @ weight for rows, weight in zip(groups, weight_eXY, strict=True)])


def has_kernel(device: torch.device) -> bool:
    """Return whether torch's grouped product is one kernel on the device: on CUDA only, elsewhere it is a loop."""
    return device.type == "cuda"


def fits_kernel(rows_MX: torch.Tensor, weight_eYX: torch.Tensor) -> bool:
    """Return whether torch's grouped product accepts the tensors.

    They must be bfloat16, the weights aligned to 16 bytes, and there must be a row.
    """
    # Both weight matrices' strides: the forward reads it by rows, the backward by columns.
    is_even = all(size * weight_eYX.element_size() % 16 == 0 for size in weight_eYX.shape[1:])
    return rows_MX.dtype == weight_eYX.dtype == torch.bfloat16 and is_even and len(rows_MX) > 0


def _local(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's experts of a parameter that FSDP has gathered, as a plain tensor."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
