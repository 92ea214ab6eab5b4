"""Groups of rows times the weights of their experts: one operation, as on a GPU, gives what a loop gives."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from millrace.trainer.model import expert_parallel
from millrace.trainer.model.expert_parallel import (
    cut_experts,
    experts_of,
    fits_kernel,
    grouped,
    grouped_by_kernel,
    grouped_by_loop,
    has_kernel,
)

Way = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
LAYERS = 2


def tensors_of(counts: list[int], *, columns: int = 16, width: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    rows = torch.randn(sum(counts), width, dtype=torch.bfloat16)
    return rows, torch.randn(len(counts), columns, width, dtype=torch.bfloat16)


@pytest.mark.parametrize("counts", [[3, 0, 5, 2], [0, 0, 4, 0], [1, 2, 3, 0]], ids=["a gap", "one", "none at the end"])
def test_one_operation_gives_what_the_loop_gives_forwards_and_backwards(counts: list[int]) -> None:
    rows, weight = tensors_of(counts)
    assert fits_kernel(rows, weight)

    def computed(way: Way) -> list[torch.Tensor]:
        own_rows, own_weight = rows.clone().requires_grad_(), weight.clone().requires_grad_()
        out = way(own_rows, own_weight, torch.tensor(counts))
        out.backward(torch.arange(out.numel(), dtype=out.dtype).view_as(out) / out.numel())
        assert own_rows.grad is not None and own_weight.grad is not None
        return [out.detach(), own_rows.grad, own_weight.grad]

    by_kernel, by_loop = computed(grouped_by_kernel), computed(grouped_by_loop)
    for one, other in zip(by_kernel, by_loop, strict=True):
        torch.testing.assert_close(one, other)
        assert other.abs().max() > 0.5
    idle = [expert for expert, count in enumerate(counts) if count == 0]
    assert idle and not by_kernel[2][idle].any(), "an expert without rows has a gradient, of zeros"


@pytest.mark.parametrize(("columns", "width"), [(12, 8), (16, 4), (16, 12), (7, 8)])
def test_what_the_operation_refuses_goes_through_the_loop(
    columns: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows and columns have to be multiples of 16 bytes, which torch says as well, of columns in the backward."""
    counts = [3, 0, 5, 2]
    rows, weight = tensors_of(counts, columns=columns, width=width)
    assert not fits_kernel(rows, weight)
    with pytest.raises(RuntimeError, match="multiple of 16 bytes"):
        out = grouped_by_kernel(rows, weight.clone().requires_grad_(), torch.tensor(counts))
        out.backward(torch.ones_like(out))
    monkeypatch.setattr(expert_parallel, "has_kernel", lambda device: True)
    found = grouped(rows, weight, torch.tensor(counts))
    assert torch.equal(found, grouped_by_loop(rows, weight, torch.tensor(counts)))


def test_no_rows_and_other_formats_do_not_fit() -> None:
    rows, weight = tensors_of([2, 2])
    assert fits_kernel(rows, weight)
    assert not fits_kernel(rows[:0], weight)
    assert not fits_kernel(rows.float(), weight.float())
    assert not fits_kernel(rows, weight.float())
    assert grouped(rows[:0], weight, torch.tensor([0, 0])).shape == (0, 16)
    assert has_kernel(torch.device("cuda", 0)) and not has_kernel(torch.device("cpu"))


@pytest.fixture
def alone() -> Iterator[None]:
    """Yield a process group of this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_layer_of_experts_computes_the_same_by_kernel(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way of a rank's tokens, where every gradient has to come as the operation takes it."""
    used: list[bool] = []

    def counted(rows: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        used.append(True)
        return grouped_by_kernel(rows, weight, counts)

    monkeypatch.setattr(expert_parallel, "grouped_by_kernel", counted)
    by_loop, by_kernel = learned(monkeypatch, has_kernel=False), learned(monkeypatch, has_kernel=True)
    assert len(used) == 2 * LAYERS, "two products in a layer"
    assert by_loop.keys() == by_kernel.keys()
    for name, gradient in by_loop.items():
        torch.testing.assert_close(by_kernel[name], gradient, msg=lambda text, name=name: f"{name}: {text}")
    assert all(by_kernel[name].abs().max() > 0 for name in by_kernel)


def learned(monkeypatch: pytest.MonkeyPatch, *, has_kernel: bool) -> dict[str, torch.Tensor]:
    """Return the gradients of a tiny model in bfloat16."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    monkeypatch.setattr(expert_parallel, "has_kernel", lambda device: has_kernel)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        initializer_range=0.2,
    )
    model = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    cut_experts(model, init_device_mesh("cpu", (1,)))
    assert len(list(experts_of(model))) == LAYERS
    tokens = torch.arange(10).view(2, 5)
    model(input_ids=tokens, labels=tokens).loss.backward()
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        gradient = parameter.grad
        found[name] = gradient.to_local() if hasattr(gradient, "to_local") else gradient  # type: ignore[operator]
    return found
