"""Experts that are cut compute what transformers' own modules compute, whatever form these have.

Groups of rows times the weights of their experts: one operation, as on a GPU, gives what a loop gives.
"""

import importlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig

from millrace.config.sections.trainer import TrainerModelConfig
from millrace.errors import InvalidSpecError, InvalidStateError, MillraceError
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.learning.learner import build_model
from millrace.trainer.model import expert_parallel
from millrace.trainer.model.expert_parallel import (
    cut_experts,
    experts_of,
    fits_kernel,
    grouped,
    grouped_by_kernel,
    grouped_by_loop,
    has_kernel,
    require_no_router_loss,
)
from millrace_testing.lanes import by_default

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
    weight = weight.transpose(1, 2)

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
        out = grouped_by_kernel(rows, weight.clone().requires_grad_().transpose(1, 2), torch.tensor(counts))
        out.backward(torch.ones_like(out))
    monkeypatch.setattr(expert_parallel, "has_kernel", lambda device: True)
    found = grouped(rows, weight, torch.tensor(counts))
    assert torch.equal(found, grouped_by_loop(rows, weight.transpose(1, 2), torch.tensor(counts)))


@pytest.mark.parametrize("by_kernel", [False, True])
def test_a_weight_may_be_held_transposed(by_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_parallel, "has_kernel", lambda device: by_kernel)
    counts = torch.tensor([3, 0, 5, 2])
    rows, weight = tensors_of(counts.tolist())
    held = weight.transpose(1, 2).contiguous().requires_grad_()
    weight.requires_grad_()
    found, wanted = grouped(rows, held, counts, is_transposed=True), grouped(rows, weight, counts)
    torch.testing.assert_close(found, wanted)
    for each in (found, wanted):
        each.backward(torch.arange(each.numel(), dtype=each.dtype).view_as(each) / each.numel())
    assert held.grad is not None and weight.grad is not None and held.grad.abs().max() > 0.5
    torch.testing.assert_close(held.grad, weight.grad.transpose(1, 2))


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


def classes_of_experts() -> dict[str, str]:
    """Return the module of every class of experts in transformers that follows its interface."""
    import transformers.models

    pattern = re.compile(r"^@use_experts_implementation.*\nclass (\w+)\(", re.MULTILINE)
    return {
        name: f"transformers.models.{path.parent.name}.{path.stem}"
        for path in sorted(Path(str(transformers.models.__file__)).parent.glob("*/modeling_*.py"))
        for name in pattern.findall(path.read_text())
    }


class AnyConfig(SimpleNamespace):
    """A config of tiny sizes, whatever the class of experts asks for."""

    def __getattr__(self, name: str) -> Any:
        if "act" in name:
            return "silu"
        if "alpha" in name or "limit" in name or "eps" in name:
            return 0.7
        if "expert" in name and "intermediate" not in name:
            return 4
        return None if "latent" in name else 16 if "intermediate" in name or "ffn" in name else 8


SMALL = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 16, "num_attention_heads": 2}
SHARING = {"MuseSparkExperts": "post_expert_norm.weight"}
"""Classes whose experts share a weight, which is why they are refused."""
CLASSES = classes_of_experts()
CORNERS = ("GptOssExperts", "MuseSparkExperts", "NemotronHExperts", "OlmoeExperts")


def layer_of(name: str) -> Any:
    """Return a layer of experts of a class, in a model of its own, with numbers drawn."""
    torch.manual_seed(0)
    made = getattr(importlib.import_module(CLASSES[name]), name)(AnyConfig(_experts_implementation="eager"))
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    return nn.Sequential(made)


@pytest.mark.parametrize("name", by_default(CLASSES, CORNERS))
def test_cut_experts_of_every_class_compute_what_the_class_computes(name: str, alone: None) -> None:
    whole, cut = layer_of(name), layer_of(name)
    if name in SHARING:
        with pytest.raises(InvalidSpecError, match=f"share {SHARING[name]}, whose gradient") as told:
            cut_experts(cut, init_device_mesh("cpu", (1,)))
        assert told.value.reason == "LAYOUT_IMPOSSIBLE" and told.value.violations[0].field == "trainer.model.ep"
        return
    assert cut_experts(cut, init_device_mesh("cpu", (1,))) == [cut[0]]
    hidden, (weights, index) = torch.randn(7, 8), torch.rand(7, 4).topk(2)
    index[:, 0] = index[:, 0] % 2  # the last experts have few tokens, and may have none
    found: list[list[torch.Tensor]] = []
    for layer in (whole, cut):
        given = [each.clone().requires_grad_() for each in (hidden, weights)]
        out = layer[0](given[0], index, given[1])
        (out * torch.arange(8.0)).sum().backward()
        gradients = [each.grad for each in (*given, *layer.parameters()) if each.grad is not None]
        found.append([out.detach(), *(getattr(each, "to_local", lambda each=each: each)() for each in gradients)])
    assert len(found[0]) == len(found[1]) >= 5
    for one, other in zip(*found, strict=True):
        assert one.abs().max() > 0
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5 * float(one.abs().max()))


def test_a_model_that_asks_for_a_balancing_loss_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    config = {"model_type": "mixtral", "router_aux_loss_coef": 0.02, "output_router_logits": True}

    def refusal(**changes: Any) -> MillraceError:
        (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
        model = TrainerModelConfig(name=str(tmp_path))
        with pytest.raises(MillraceError) as told:
            build_model(model, tmp_path, gang=Gang(), seed=0, prefix="trainer.model", context_length=8)
        return told.value

    told = refusal()
    assert told.reason == "ROUTER_LOSS_UNSUPPORTED" and "router_aux_loss_coef 0.02" in told.message
    for allowed in ({"output_router_logits": False}, {"router_aux_loss_coef": 0.0}):
        assert refusal(**allowed, **SMALL).reason != "ROUTER_LOSS_UNSUPPORTED", "there are no weights"


@pytest.mark.parametrize(
    ("config", "weight"),
    [
        ({"model_type": "jetmoe", "aux_loss_coef": 0.03}, "aux_loss_coef 0.03"),
        ({"model_type": "dbrx", "ffn_config": {"moe_loss_weight": 0.04}}, "moe_loss_weight 0.04"),
    ],
)
def test_a_balancing_loss_is_refused_under_every_name_of_its_weight(config: dict[str, Any], weight: str) -> None:
    asked = AutoConfig.for_model(**config, output_router_logits=True)
    with pytest.raises(InvalidStateError, match=f"with {weight}"):
        require_no_router_loss(asked)
    require_no_router_loss(AutoConfig.for_model(**config))


def test_transformers_has_no_other_name_for_the_weight_of_a_balancing_loss() -> None:
    import transformers.models

    paths = Path(str(transformers.models.__file__)).parent.glob("*/modeling_*.py")
    found = {name for path in paths for name in re.findall(r"loss \+= self\.([\w.]+) \* aux_loss", path.read_text())}
    assert {name.rpartition(".")[2] for name in found} == {"router_aux_loss_coef", "aux_loss_coef"}


def test_experts_that_cannot_be_cut_are_refused_by_name() -> None:
    class Mesh:
        """Three ranks, of which none is asked."""

        def size(self) -> int:
            return 3

    mesh: Any = Mesh()
    with pytest.raises(InvalidSpecError, match="a layer of Sequential has 4 experts, which 3 ranks cannot share"):
        cut_experts(layer_of("OlmoeExperts"), mesh)
    with pytest.raises(InvalidSpecError, match="Linear has no module that holds all experts of a layer"):
        cut_experts(nn.Linear(2, 2), mesh, prefix="model")
