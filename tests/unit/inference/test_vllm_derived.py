"""What is derived from weights, and would go stale, is found; what no reload makes anew is refused."""

from types import SimpleNamespace

import pytest
import torch

from millrace.errors import InvalidStateError
from millrace.inference.vllm.workers.layout import Slot
from millrace.inference.vllm.workers.reloading import derived_tensors, require_reloadable

LOADED = (Slot(module="attention", name="weight"), Slot(module="attention", name="bias"))


@pytest.fixture
def model() -> torch.nn.Module:
    model = torch.nn.Module()
    model.attention = torch.nn.Linear(4, 4)
    model.attention.register_buffer("scale", torch.ones(()))
    return model


def test_weights_buffers_and_views_of_weights_are_not_derived(model: torch.nn.Module) -> None:
    assert derived_tensors(model, LOADED) == []
    attention = model.attention
    attention.W_UV = torch.nn.Parameter(attention.weight.data.view(2, 2, 4), requires_grad=False)  # as vLLM 0.32 does
    attention.W_K = attention.weight.data.view(2, 2, 4)
    attention.impl = SimpleNamespace(sinks=attention.bias.data)
    assert derived_tensors(model, LOADED) == []


def test_copies_are_found_as_parameters_as_attributes_and_in_the_backend(model: torch.nn.Module) -> None:
    attention = model.attention
    attention.W_UV = torch.nn.Parameter(attention.weight.data.clone(), requires_grad=False)
    attention.W_K = attention.weight.data.clone()
    attention.impl = SimpleNamespace(sinks=attention.bias.data.double())
    assert derived_tensors(model, LOADED) == ["attention.W_K", "attention.W_UV", "attention.impl.sinks"]


def test_a_model_that_derives_behind_its_layers_is_refused(model: torch.nn.Module) -> None:
    require_reloadable(model)
    model.process_weights_after_loading = lambda: None
    with pytest.raises(InvalidStateError, match=r"Module derives tensors from all of its weights.*stale") as caught:
        require_reloadable(model)
    assert caught.value.reason == "MODEL_KEEPS_STALE_TENSORS" and "another architecture" in caught.value.remedy
