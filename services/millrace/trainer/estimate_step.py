"""One training step on fake tensors: the trainer's own code on a model of which only the config exists.

If all blocks are alike, steps of two short models show what a block adds, and a long model is extrapolated: every
kind of memory grows by the same number of bytes per block. A unit test compares that with a step of the whole model.
"""

import contextlib
import copy
import functools
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

from millrace.config.sections.trainer import TrainerConfig
from millrace.models.routing import Routers
from millrace.trainer.estimate_report import KINDS
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.learning.batch import MicroBatch, build_micro_batch, fake_sample
from millrace.trainer.learning.forward import sketched
from millrace.trainer.learning.learner import Learner, Reference, StartModel, UnadaptedModel
from millrace.trainer.learning.optimizer import PolicyOptimizer
from millrace.trainer.learning.packing import FlopCount
from millrace.trainer.losses import Objective, divisor, token_losses
from millrace.trainer.model.expert_parallel import experts_of
from millrace.trainer.model.lora import add_adapters, round_base
from millrace.trainer.model.memory import (
    Sharding,
    blocks_of,
    cast_weights,
    checkpoint_activations,
    defer_resharding,
    unsharded_gradients,
)
from millrace.trainer.model.mesh import RankLayout
from millrace.trainer.model.pretrained import resolve_compute_dtype, resolve_publish_dtype

_FIRST = 8
"""Tokens of a first micro-batch, which only makes gradients: they are held while the second one is computed."""
_SHORT = (3, 5)
"""Number of blocks of the small models from which a long one is extrapolated."""
_CPU = torch.device("cpu")
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # advises to send less; nothing is


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """Bytes of the fullest rank by kind, at the peak of forward and backward and at that of the optimizer's step.

    The kinds `elsewhere` are in host memory.
    """

    learning: Mapping[str, int]
    stepping: Mapping[str, int]
    elsewhere: frozenset[str]
    num_parameters: int
    num_trained: int
    flops: FlopCount
    rows: int

    @property
    def device(self) -> Mapping[str, int]:
        """Return the bytes in the device's memory by kind, at the moment of the step when most is used."""
        both = [{kind: size * (kind not in self.elsewhere) for kind, size in each.items()} for each in self._moments]
        return max(both, key=lambda each: sum(each.values()))

    @property
    def host(self) -> Mapping[str, int]:
        """Return the bytes in host memory by kind; empty without offload."""
        return {kind: max(each[kind] for each in self._moments) for kind in self.elsewhere}

    @property
    def peak(self) -> int:
        """Return the peak bytes in the device's memory."""
        return sum(self.device.values())

    @property
    def _moments(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        return self.learning, self.stepping


def simulate(config: TrainerConfig, model_config: Any, *, num_gpus: int) -> Simulated:
    """Simulate the memory that a training step takes at rank 0 of `num_gpus`; 0 is one process on a CPU.

    `model_config` is the model's config of transformers. A long model of equal blocks is extrapolated from two short
    ones.
    """
    blocks = model_config.get_text_config().num_hidden_layers
    if blocks <= max(_SHORT) or not _has_equal_blocks(config, model_config):
        return simulate_whole(config, model_config, num_gpus=num_gpus)
    short = [simulate_whole(config, _cut(model_config, count), num_gpus=num_gpus) for count in _SHORT]
    return _grown(*short, factor=(blocks - _SHORT[0]) / (_SHORT[1] - _SHORT[0]))


def simulate_whole(config: TrainerConfig, model_config: Any, *, num_gpus: int) -> Simulated:
    """Simulate a step with a full micro-batch on fake tensors, as rank 0 of `num_gpus`; 0 is one process on a CPU.

    Settings of `auto` resolve as they do on such devices, though no tensor is on one.
    """
    kind = torch.device("cuda" if num_gpus else "cpu")  # a name for what `auto` means
    compute_dtype = resolve_compute_dtype(config.model, device=kind)
    offloaded = config.model.fsdp_cpu_offload and num_gpus > 0
    ledger = Ledger()
    with _gang(max(num_gpus, 1)) as gang, ledger.following_resizes(), ledger:
        gang.lay_out(RankLayout.of(config.model, world_size=gang.world_size))
        if offloaded:
            ledger.elsewhere = frozenset({"parameters", "gradients", "optimizer"})
        elif config.model.optim_cpu_offload and num_gpus > 0:
            ledger.elsewhere = frozenset({"optimizer"})
        model = _new_model(model_config, ledger)
        # In the order in which `learner.build_model` does it.
        cast_weights(model, config.model)
        if config.model.lora is not None:
            publish_dtype = resolve_publish_dtype(config.model, device=kind)
            round_base(model, config.model.lora, publish_dtype=publish_dtype, compute_dtype=compute_dtype)
            add_adapters(model, config.model.lora, seed=0)
        flops, counts = FlopCount.of(model), _counts(model)
        checkpoint_activations(model, config.model.ac)
        sharding = Sharding.of(config.model, compute_dtype=compute_dtype)
        learner = _learner(config, gang.shard(model, sharding), gang=gang)
        learner.reference = _reference(config, learner, sharding, lambda: _new_model(model_config, ledger))
        parts = [part for each in learner.optimizer.state_tensors().values() for part in each.values()]
        ledger.rename(parts, "optimizer")
        ledger.kind = "activations"
        for experts in experts_of(model):
            experts.register_forward_pre_hook(_routed_evenly)
        micro_batches = _micro_batches(config, vocabulary=model_config.get_text_config().vocab_size)
        ledger.gathers = "buffers"
        given = _given_experts(config, model)
        ledger.rename([given], "activations")
        learning, stepping = _step(learner, micro_batches, ledger, kind=kind)
    return Simulated(
        learning=learning,
        stepping=stepping,
        elsewhere=ledger.elsewhere,
        num_parameters=counts[0],
        num_trained=counts[1],
        flops=flops,
        rows=len(micro_batches[-1].token_ids_BT),
    )


def _given_experts(config: TrainerConfig, model: nn.Module) -> torch.Tensor | None:
    """Return a tensor as large as the experts that a full micro-batch gives to the model's routers; None without."""
    routers = Routers.of(model) if config.model.moe.replay else None
    if routers is None:
        return None
    tokens = max(config.micro_batch_tokens // config.model.seq_len, 1) * config.model.seq_len
    # Of floating-point numbers with 2 bytes, as experts have: it is counted, and no memory is taken.
    return torch.empty((tokens, len(routers.shape.layers), routers.shape.top_k), dtype=torch.float16)


# Memory of a computation that is not done: tensors are fake, and every storage is counted while it lives.

_aten = torch.ops.aten
_Storages = dict[int, tuple[weakref.ref[torch.UntypedStorage], str, int]]


class Ledger(TorchDispatchMode):
    """A mode in which new floating-point tensors are fake, so that memory is counted and nothing computed.

    Integers are real, because models look at positions and masks. A number that is read from a fake tensor is 1.
    Bytes are counted under the `kind` of the moment at which they are allocated, until their storage is freed. `peak`
    are the bytes of the moment when most was held; kinds `elsewhere` do not count for finding it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kind = "parameters"
        self.gathers = "parameters"
        self.elsewhere: frozenset[str] = frozenset()
        self._fake = _fake_mode()
        self._storages: _Storages = {}
        self._held = dict.fromkeys(KINDS, 0)
        self._peak = dict(self._held)
        self._highest = 0

    @property
    def held(self) -> Mapping[str, int]:
        """Return the bytes that are allocated, by kind."""
        return dict(self._held)

    @property
    def peak(self) -> Mapping[str, int]:
        """Return the bytes by kind at the peak."""
        return dict(self._peak)

    def forget_peak(self) -> None:
        """Reset the peak to what is allocated now."""
        self._highest = 0
        self._look()

    def rename(self, tensors: Iterable[torch.Tensor | None], kind: str) -> None:
        """Count the storage of these tensors under `kind` from now on; None is skipped."""
        for tensor in tensors:
            if tensor is None:
                continue
            storage = _local(tensor).untyped_storage()
            self._drop(storage._cdata)
            self._add(storage, kind)

    def all_fake(self) -> FakeTensorMode:
        """Return a context in which every new tensor is fake, and uncounted until it is renamed."""
        return self._fake

    def unseen(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which the ledger neither fakes nor counts tensors."""
        return _disable_current_modes()

    @contextlib.contextmanager
    def following_resizes(self) -> Iterator[None]:
        """Count memory that FSDP frees and allocates again within a storage, during the block.

        Resizing a storage is no operation on tensors, so that the mode does not see it. Replaces torch's method for the
        block.
        """
        resize = torch.UntypedStorage.resize_

        def counted(storage: torch.UntypedStorage, size: int) -> Any:
            """Count the new size of a storage, after resizing it, under the kind that it had."""
            result = resize(storage, size)
            _, kind, _ = self._drop(storage._cdata) or (None, self.gathers, 0)
            self._add(storage, kind)
            return result

        torch.UntypedStorage.resize_ = counted  # pyright: ignore[reportAttributeAccessIssue] - for the block only
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize  # pyright: ignore[reportAttributeAccessIssue]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do an operation of torch, count the storage that it allocated, and return its result.

        New floating-point tensors are fake: only their shapes are computed. A number read from a floating-point tensor
        is 1.
        """
        if func is torch.ops.prim.device.default and type(args[0]) is FakeTensor:
            return args[0].fake_device
        kwargs = kwargs or {}
        tensors = [each for each in tree_iter((args, kwargs)) if isinstance(each, torch.Tensor)]
        if any(isinstance(each, DTensor) for each in tensors):
            return func(*args, **kwargs)  # of the optimizer, in place; what DTensor computes for itself is no memory
        if func is _aten._local_scalar_dense.default and args[0].is_floating_point():
            return 1.0
        if func is _aten._grouped_mm.default:
            return self._count(_grouped(*args), self.kind)
        if not tensors and _is_floating(func, args, kwargs):
            with self._fake:
                result = func(*args, **kwargs)
            return self._count(result, self.gathers)
        # FSDP makes its buffers from a buffer: they are of the same kind.
        if func is _aten.new_empty.default and self._kind_of(args[0]) == self.gathers:
            return self._count(func(*args, **kwargs), self.gathers)
        return self._count(func(*args, **kwargs), self.kind)

    def _count(self, result: Any, kind: str) -> Any:
        """Count each new storage in a result under `kind`, and return the result."""
        for each in tree_iter(result):
            if isinstance(each, torch.Tensor):
                storage = each.untyped_storage()
                if storage._cdata not in self._storages:
                    self._add(storage, kind)
        return result

    def _kind_of(self, tensor: torch.Tensor) -> str:
        """Return the kind under which a tensor's storage is counted; empty if it is not."""
        found = self._storages.get(tensor.untyped_storage()._cdata)
        return found[1] if found else ""

    def _add(self, storage: torch.UntypedStorage, kind: str) -> None:
        """Count a storage under `kind` until it is freed."""
        key, size = storage._cdata, storage.nbytes()
        self._storages[key] = (weakref.ref(storage, functools.partial(self._died, key)), kind, size)
        self._held[kind] += size
        self._look()

    def _died(self, key: int, reference: object) -> None:
        # The key is an address, which a newer storage may have by now.
        if key in self._storages and self._storages[key][0] is reference:
            self._drop(key)

    def _drop(self, key: int) -> tuple[object, str, int] | None:
        """Stop counting the storage with this key; return its weak reference, kind and bytes, or None."""
        found = self._storages.pop(key, None)
        if found is not None:
            self._held[found[1]] -= found[2]
        return found

    def _look(self) -> None:
        """Record what is allocated as the peak if it is more than before, without the kinds `elsewhere`."""
        total = sum(size for kind, size in self._held.items() if kind not in self.elsewhere)
        if total > self._highest:
            self._highest, self._peak = total, dict(self._held)


@functools.cache
def _fake_mode() -> FakeTensorMode:
    """Return the one fake mode of all ledgers, because DTensor caches fake tensors, and modes cannot be mixed."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def _grouped(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor | None = None, *_: Any) -> torch.Tensor:
    """Return an empty tensor in the shape of the product of `left` and `right` by groups.

    It is that of torch's `_grouped_mm`, with the groups' `ends`. Torch itself knows the shape for bfloat16 only.
    """
    groups = {(2, 2): [0 if ends is None else ends.numel()], (3, 3): [left.shape[0]]}
    return left.new_empty([*groups.get((left.dim(), right.dim()), []), left.shape[-2], right.shape[-1]])


def _is_floating(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a function without tensor arguments makes floats, or bytes to hold them, not indices or masks."""
    if func.overloadpacket is _aten.arange and kwargs.get("dtype") is None:
        return any(isinstance(each, float) for each in args)
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    return dtype.is_floating_point or dtype == torch.uint8


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _step(
    learner: Learner, micro_batches: Sequence[MicroBatch], ledger: Ledger, *, kind: torch.device
) -> tuple[Mapping[str, int], ...]:
    """Take a training step; return the bytes by kind at the peak of forward and backward, and at the optimizer's peak.

    `kind` is the device whose chunk sizes are used.
    """
    ledger.forget_peak()
    head = learner.model.get_output_embeddings()  # pyright: ignore[reportCallIssue] - a model of transformers
    objective = Objective(
        loss_of=token_losses,
        config=learner.config.loss,
        rl_divisor=divisor(learner.config.loss, num_tokens=micro_batches[-1].num_rl_tokens, num_samples=1),
        num_ce_tokens=0,
    )

    def is_over(grad: torch.Tensor) -> None:
        ledger.kind = "activations"

    def begins(module: nn.Module, args: tuple[Any, ...]) -> None:
        if args[0].requires_grad:
            ledger.kind = "logits"  # and what the loss makes of them, until the gradient is back here
            args[0].register_hook(is_over)

    handle = head.register_forward_pre_hook(begins)  # pyright: ignore
    with learner.learning(), sketched(kind.type):
        for micro_batch in micro_batches:
            defer_resharding(learner.model, is_last=micro_batch is micro_batches[-1])
            ledger.kind = "activations"
            inputs, _logprobs, _entropy = learner.loss_inputs(micro_batch, objective)
            losses, loss = objective(inputs)
            loss.backward()
            del inputs, losses, loss, _logprobs, _entropy
            ledger.rename([parameter.grad for parameter in learner.model.parameters()], "gradients")
            ledger.rename(unsharded_gradients(learner.model), "gradients")
    handle.remove()
    ledger.kind, learning = "optimizer", ledger.peak
    ledger.forget_peak()
    learner.optimizer.step(0)
    return learning, ledger.peak


def _has_equal_blocks(config: TrainerConfig, model_config: Any) -> bool:
    """Return whether all blocks take the same memory: equal weights, and one kind if the config lists kinds."""
    text = model_config.get_text_config()
    lists = [each for each in text.to_dict().values() if isinstance(each, list)]
    if any(len(each) == text.num_hidden_layers and len(set(map(str, each))) > 1 for each in lists):
        return False
    weights = {tuple(each.shape for each in block.parameters()) for block in blocks_of(_on_meta(model_config))}
    return len(weights) == 1 and (config.model.ac is None or config.model.ac.freq == 1)


def _cut(model_config: Any, blocks: int) -> Any:
    """Return a copy of a model's config with `blocks` layers."""
    cut = copy.deepcopy(model_config)
    text = cut.get_text_config()
    text.num_hidden_layers = blocks
    if len(kinds := getattr(text, "layer_types", None) or ()) > blocks:  # else it follows from the number
        text.layer_types = kinds[:blocks]
    return cut


def _grown(small: Simulated, large: Simulated, *, factor: float) -> Simulated:
    """Return `small` plus `factor` times the difference from `small` to `large`, field by field."""

    def grow(one: Any, other: Any) -> Any:
        return type(one)(one + factor * (other - one))

    def each(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
        return {kind: grow(size, other[kind]) for kind, size in one.items()}

    return Simulated(
        learning=each(small.learning, large.learning),
        stepping=each(small.stepping, large.stepping),
        elsewhere=small.elsewhere,
        num_parameters=grow(small.num_parameters, large.num_parameters),
        num_trained=grow(small.num_trained, large.num_trained),
        flops=FlopCount(
            per_token=grow(small.flops.per_token, large.flops.per_token),
            per_square=grow(small.flops.per_square, large.flops.per_square),
        ),
        rows=small.rows,
    )


def _on_meta(model_config: Any) -> Any:
    """Make the model of a config on the meta device, without memory for its weights."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(model_config, dtype=torch.float32)


def _new_model(model_config: Any, ledger: Ledger) -> Any:
    """Make the model of a config with fake weights, which `ledger` counts."""
    with ledger.unseen():
        model = _on_meta(model_config).eval()
    with ledger.all_fake():
        model.to_empty(device=_CPU)
    model.tie_weights()  # each end has storage of its own now
    ledger.rename(model.parameters(), "parameters")
    ledger.rename(model.buffers(), "buffers")
    # It is where it should be. Torch would move a fake parameter by swapping it, which the ledger's entry forbids.
    model.__dict__["to"] = lambda *args, **kwargs: model
    return model


def _learner(config: TrainerConfig, model: nn.Module, *, gang: Gang) -> Learner:
    """Make a learner with the model and a new optimizer."""
    optimizer = PolicyOptimizer(model, optim=config.optim, scheduler=config.scheduler, max_steps=config.max_steps)
    return Learner(config=config, gang=gang, model=model, optimizer=optimizer, is_strict=True)


def _reference(
    config: TrainerConfig, learner: Learner, sharding: Sharding, new_model: Callable[[], nn.Module]
) -> Reference | None:
    """Return the reference model if the loss has a term that keeps the policy near the start model, else None.

    It is the learner's model without its adapters if only adapters are trained; else `new_model` makes a start model,
    which is sharded as `sharding` says.
    """
    if config.loss.kl is None:
        return None
    if config.model.lora is not None and not config.model.lora.modules_to_save:
        return UnadaptedModel(learner.model)
    return StartModel(new_model(), gang=learner.gang, sharding=sharding)


def _routed_evenly(experts: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return an experts module's arguments with real expert indices, each equally often, instead of a fake router's.

    `args` are hidden states, expert indices and weights. A hook before the module's forward.
    """
    hidden_TH, index_TK, weights_TK = args
    num_experts = int(experts.num_experts)  # pyright: ignore[reportArgumentType] - a number in transformers' modules
    return hidden_TH, torch.arange(index_TK.numel()).view(index_TK.shape) % num_experts, weights_TK


def _counts(model: nn.Module) -> tuple[int, int]:
    """Return the numbers of parameters and of trained parameters."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, is_trained in sizes if is_trained)


def _micro_batches(config: TrainerConfig, *, vocabulary: int) -> list[MicroBatch]:
    """Make a short micro-batch and one filled with samples of `seq_len`, all tokens but the first trained on."""
    length, first = config.model.seq_len, min(_FIRST, config.model.seq_len)
    rows = max(config.micro_batch_tokens // length, 1)
    full = [fake_sample(length, vocabulary=vocabulary) for _ in range(rows)]
    short = [fake_sample(first, vocabulary=vocabulary)]
    return [build_micro_batch(samples, seq_len=length, device=_CPU) for samples in (short, full)]


@contextlib.contextmanager
def _gang(world_size: int) -> Iterator[Gang]:
    """Yield rank 0 of a gang of `world_size` whose other ranks do not exist.

    What it receives in collectives has the right shape and any value.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield Gang(rank=0, world_size=world_size, device=_CPU)
    finally:
        dist.destroy_process_group()
