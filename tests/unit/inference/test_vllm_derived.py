"""What is derived from weights, and would go stale, is found."""

from types import SimpleNamespace

import torch

from millrace.inference.vllm.workers.derived import derived_attributes


def test_copies_are_found_and_views_are_not():
    model = torch.nn.Module()
    model.attention = torch.nn.Linear(4, 4)
    assert derived_attributes(model) == []
    model.attention.W_UV = model.attention.weight.data.view(2, 2, 4)
    model.attention.impl = SimpleNamespace(sinks=model.attention.bias.data)
    assert derived_attributes(model) == []
    model.attention.W_UV = model.attention.weight.data.clone()
    model.attention.impl = SimpleNamespace(sinks=model.attention.bias.data.double())
    assert derived_attributes(model) == ["attention.W_UV", "attention.impl.sinks"]
