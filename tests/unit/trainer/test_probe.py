"""The probe of a policy, of a model that computes nothing usable any more."""

import math
from typing import Any

import pytest
import torch

from millrace.errors import InvalidStateError
from millrace.trainer.model.pretrained import probe
from millrace_testing.inference import tiny


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_said_to_be_so(value: float) -> None:
    """A manifest cannot hold such log-probs: the run would end with an error of JSON, and a gang start for ever."""
    model: Any = tiny.tiny_model(0)
    with torch.no_grad():
        model.get_input_embeddings().weight.fill_(value)
    with pytest.raises(InvalidStateError, match="not finite") as found:
        probe(model, vocabulary=model.config.vocab_size, device=torch.device("cpu"))
    assert found.value.reason == "POLICY_NOT_FINITE"
