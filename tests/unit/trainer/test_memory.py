"""The keys that save memory: each has its effect, and the gradients stay what they are."""

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from millrace.config.sections.trainer import ActivationCheckpointConfig, ModelMemoryConfig, PackConfig
from millrace.trainer.gang import distributed
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.learning.packing import packing_of
from millrace.trainer.model.memory import Sharding, blocks_of, cast_weights, checkpoint_activations, defer_resharding

pytestmark = pytest.mark.computes


class Live(TorchDispatchMode):
    """Knows how many bytes of what was computed in it are still held."""

    def __init__(self) -> None:
        super().__init__()
        self._storages = weakref.WeakValueDictionary[int, torch.UntypedStorage]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in tree_iter(result):
            if isinstance(each, torch.Tensor):
                storage = each.untyped_storage()
                self._storages[storage._cdata] = storage
        return result

    @property
    def num_bytes(self) -> int:
        return sum(storage.nbytes() for storage in self._storages.values())


def model(*, dropout: float = 0.0) -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        attention_dropout=dropout,
        initializer_range=0.2,
    )
    return Qwen3ForCausalLM(config).train(dropout > 0)


def backward(trained: nn.Module) -> tuple[int, list[torch.Tensor]]:
    """Return bytes that the forward leaves behind for the backward, and the gradients."""
    torch.manual_seed(1)
    tokens = torch.arange(2 * 48).view(2, 48) % 32
    with Live() as live:
        loss = trained(input_ids=tokens, use_cache=False).logits.logsumexp(-1).mean()
        held = live.num_bytes
    loss.backward()
    grads = [parameter.grad for parameter in trained.parameters()]
    return held, [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads if grad is not None]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_checkpointed_blocks_keep_less_and_have_the_same_gradients(dropout: float) -> None:
    held, gradients = {}, {}
    settings = {
        "none": None,
        "selective": ActivationCheckpointConfig(mode="selective"),
        "every second": ActivationCheckpointConfig(freq=2),
        "full": ActivationCheckpointConfig(),
    }
    for name, config in settings.items():
        trained = model(dropout=dropout)
        names = [name for name, _ in trained.named_parameters()]
        checkpoint_activations(trained, config)
        assert [name for name, _ in trained.named_parameters()] == names
        held[name], gradients[name] = backward(trained)
    assert held["full"] < held["every second"] < held["none"] and held["full"] < held["selective"] < held["none"]
    assert held["full"] < 0.4 * held["none"]
    for each in gradients.values():
        assert all(torch.equal(one, other) for one, other in zip(each, gradients["none"], strict=True))


@pytest.fixture
def group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def sharded(compute_dtype: torch.dtype = torch.float32, **keys: Any) -> nn.Module:
    config = ModelMemoryConfig.model_validate(keys)
    trained = model()
    cast_weights(trained, config)
    checkpoint_activations(trained, config.ac)
    return Gang().shard(trained, Sharding.of(config, compute_dtype=compute_dtype))


@pytest.mark.usefixtures("group")
def test_gradients_are_summed_in_the_format_that_is_asked_for() -> None:
    _, whole = backward(model())
    assert not isinstance(sharded(), FSDPModule), "one process in float32 needs no FSDP"
    _, rounded = backward(sharded(reduce_dtype="bfloat16"))
    for one, other in zip(rounded, whole, strict=True):
        assert torch.equal(one, other.bfloat16().float()) and not torch.equal(one, other)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("is_kept", [False, True], ids=["given up", "kept"])
def test_blocks_are_kept_whole_until_the_backward_if_asked_for(is_kept: bool) -> None:
    trained = sharded(torch.bfloat16, reshard_after_forward=not is_kept)
    with torch.no_grad():
        trained(input_ids=torch.arange(4)[None], use_cache=False)
    are_whole = [not isinstance(next(block.parameters()), DTensor) for block in blocks_of(trained)]
    assert are_whole == [is_kept] * 4


@pytest.mark.usefixtures("group")
def test_parameters_are_offloaded_and_the_gradients_are_the_same() -> None:
    kept, offloaded = sharded(torch.bfloat16), sharded(torch.bfloat16, fsdp_cpu_offload=True, ac={"freq": 1})
    _, one = backward(kept)
    _, other = backward(offloaded)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    for trained, is_offloaded in ((kept, False), (offloaded, True)):
        for block in blocks_of(trained):
            assert isinstance(block, FSDPModule)
            group = block._get_fsdp_state()._fsdp_param_group
            assert group is not None and all(each.offload_to_cpu == is_offloaded for each in group.fsdp_params)


def is_whole(trained: nn.Module) -> list[bool]:
    return [not isinstance(next(block.parameters()), DTensor) for block in blocks_of(trained)]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    "keys",
    [{}, {"reduce_dtype": "bfloat16"}, {"optimization_dtype": "bfloat16"}, {"reshard_after_forward": True}],
    ids=["held whole", "bfloat16 sums", "bfloat16 weights", "given up"],
)
def test_gradients_that_are_shared_out_once_are_those_that_are_shared_out_each_time(keys: dict[str, Any]) -> None:
    """Bit for bit over as many micro-batches as lose most of a sum in bfloat16; and the next forward knows the step."""

    def learned(*, is_deferred: bool) -> list[torch.Tensor]:
        trained = sharded(torch.bfloat16, **keys)
        shares = list(trained.parameters())
        optimizer = torch.optim.SGD(shares, lr=0.1)
        for _ in range(2):
            for at in range(20):
                defer_resharding(trained, is_last=not is_deferred or at == 19)
                logits = trained(input_ids=torch.arange(at % 8, at % 8 + 8)[None], use_cache=False).logits
                logits.float().square().mean().div(20).backward()
                if is_deferred and at == 0:
                    assert set(is_whole(trained)) == {not keys}
                    assert all((each.grad is None) == (not keys) for each in shares)
            optimizer.step()
            optimizer.zero_grad()
        return [each.full_tensor() for each in trained.parameters() if isinstance(each, DTensor)]

    one, other = learned(is_deferred=True), learned(is_deferred=False)
    assert one and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.usefixtures("group")
def test_frozen_and_offloaded_weights_are_not_held_twice() -> None:
    for frozen, keys in ((True, {}), (False, {"fsdp_cpu_offload": True})):
        base = model()
        for parameter in list(base.parameters())[:1] if frozen else []:
            parameter.requires_grad_(False)
        config = ModelMemoryConfig.model_validate(keys)
        trained = Gang().shard(base, Sharding.of(config, compute_dtype=torch.bfloat16))
        defer_resharding(trained, is_last=False)
        trained(input_ids=torch.arange(8)[None], use_cache=False).logits.float().square().mean().backward()
        assert not any(is_whole(trained))


@pytest.mark.usefixtures("group")
def test_one_process_shares_on_the_device_that_it_computes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on the GPU that torch finds on the machine: estimates, and trainers on the CPU, are made beside one, too."""
    meshes = set[str]()

    def noted(module: nn.Module, *, mesh: DeviceMesh, **more: Any) -> None:
        meshes.add(mesh.device_type)
        fully_shard(module, mesh=mesh, **more)

    monkeypatch.setattr(distributed, "fully_shard", noted)
    sharded(torch.bfloat16)
    assert meshes == {"cpu"}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("reshards", [None, False, True])
def test_an_optimizer_is_given_what_gets_the_gradients_behind_a_look_at_packing(reshards: bool | None) -> None:
    trained = sharded(torch.bfloat16, reshard_after_forward=reshards)
    assert packing_of(trained, PackConfig(), longest=8, compute_dtype=torch.bfloat16, gang=Gang()) is not None
    given = list(trained.parameters())
    assert all(isinstance(each, DTensor) and each.dtype == torch.float32 for each in given)
    trained(input_ids=torch.arange(8)[None], use_cache=False).logits.float().square().mean().backward()
    assert all(each.grad is not None for each in given)
