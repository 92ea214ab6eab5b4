"""An adapter on a layer whose weight is another layer's cannot be merged into the model."""

import numpy as np
import pytest

from millrace.errors import InvalidStateError
from millrace.policies.adapter import HIGH, LOW, AdapterSpec, published_name
from millrace.policies.merge import merge_adapter
from millrace.policies.tensors import TensorBytes


def test_an_adapter_on_a_tied_head_is_named() -> None:
    def ones(*shape: int) -> TensorBytes:
        return TensorBytes.from_numpy(np.ones(shape, np.float32))

    base = {"model.embed_tokens.weight": ones(8, 4)}  # a policy has tied weights once, under the first name
    adapter = {published_name(f"lm_head{LOW}"): ones(2, 4), published_name(f"lm_head{HIGH}"): ones(8, 2)}
    spec = AdapterSpec(rank=2, alpha=4.0, target_modules=("lm_head",))
    with pytest.raises(InvalidStateError, match="version 3 adapts lm_head, whose weight is another layer's") as found:
        merge_adapter(base, adapter, spec, source="version 3")
    assert found.value.reason == "LORA_TARGET_TIED"
