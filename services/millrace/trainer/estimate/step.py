"""One training step on fake tensors: the trainer's own code on a model of which only the config exists.

Where all blocks are alike, steps of two short models tell what a block adds, and the rest is arithmetic: every kind
grows by the same number of bytes per block. A unit test holds both equal.
"""

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from millrace.config.sections.trainer import TrainerConfig
from millrace.trainer.estimate.ledger import Ledger
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.learning.batch import MicroBatch, build_micro_batch
from millrace.trainer.learning.fake_samples import fake_sample
from millrace.trainer.learning.flops import FlopCount
from millrace.trainer.learning.head import sketched
from millrace.trainer.learning.learner import Learner
from millrace.trainer.learning.optimizer import PolicyOptimizer
from millrace.trainer.learning.reference import Reference, StartModel, UnadaptedModel
from millrace.trainer.losses import divisor, token_losses, total_loss
from millrace.trainer.model.expert_parallel import experts_of
from millrace.trainer.model.lora import add_adapters, round_base
from millrace.trainer.model.memory import (
    Sharding,
    blocks_of,
    checkpoint_activations,
    defer_sharing,
    hold_weights,
    whole_gradients,
)
from millrace.trainer.model.mesh import RankLayout
from millrace.trainer.model.pretrained import resolve_compute_dtype, resolve_publish_dtype

_FIRST = 8
"""Tokens of a first micro-batch, which is there for its gradients: from the second one on they are held beside it."""
_SHORT = (3, 5)
"""Blocks of the models that stand for a longer one."""
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
        """Bytes in the device's memory, when they are most."""
        both = [{kind: size * (kind not in self.elsewhere) for kind, size in each.items()} for each in self._moments]
        return max(both, key=lambda each: sum(each.values()))

    @property
    def host(self) -> Mapping[str, int]:
        """Bytes in host memory."""
        return {kind: max(each[kind] for each in self._moments) for kind in self.elsewhere}

    @property
    def peak(self) -> int:
        """Bytes in the device's memory."""
        return sum(self.device.values())

    @property
    def _moments(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        return self.learning, self.stepping


def simulate(config: TrainerConfig, model_config: Any, *, num_gpus: int) -> Simulated:
    """What a step takes of rank 0 of `num_gpus`; 0 is one process on a CPU."""
    blocks = model_config.get_text_config().num_hidden_layers
    if blocks <= max(_SHORT) or not _has_equal_blocks(config, model_config):
        return simulate_whole(config, model_config, num_gpus=num_gpus)
    short = [simulate_whole(config, _cut(model_config, count), num_gpus=num_gpus) for count in _SHORT]
    return _grown(*short, factor=(blocks - _SHORT[0]) / (_SHORT[1] - _SHORT[0]))


def simulate_whole(config: TrainerConfig, model_config: Any, *, num_gpus: int) -> Simulated:
    """Take a step, whose last micro-batch is as full as it may be, as rank 0 of `num_gpus`; 0 is one process on a CPU.

    `auto` is what it is on such devices, but the tensors are on none.
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
        hold_weights(model, config.model)
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


def _step(
    learner: Learner, micro_batches: Sequence[MicroBatch], ledger: Ledger, *, kind: torch.device
) -> tuple[Mapping[str, int], ...]:
    """Forward and backward of the micro-batches, and the optimizer's step: the peak of each."""
    ledger.forget_peak()
    head = learner.model.get_output_embeddings()  # pyright: ignore[reportCallIssue] - a model of transformers
    loss_divisor = divisor(learner.config.loss, num_tokens=micro_batches[-1].num_rl_tokens, num_samples=1)

    def is_over(grad: torch.Tensor) -> None:
        ledger.kind = "activations"

    def begins(module: nn.Module, args: tuple[Any, ...]) -> None:
        if args[0].requires_grad:
            ledger.kind = "logits"  # and what the loss makes of them, until the gradient is back here
            args[0].register_hook(is_over)

    handle = head.register_forward_pre_hook(begins)  # pyright: ignore
    with learner.learning(), sketched(kind.type):
        for micro_batch in micro_batches:
            defer_sharing(learner.model, is_last=micro_batch is micro_batches[-1])
            ledger.kind = "activations"
            inputs, _logprobs, _entropy = learner.loss_inputs(micro_batch)
            losses = token_losses(inputs, learner.config.loss)
            total_loss(losses, rl_divisor=loss_divisor, num_ce_tokens=0).backward()
            del inputs, losses, _logprobs, _entropy
            ledger.rename([parameter.grad for parameter in learner.model.parameters()], "gradients")
            ledger.rename(whole_gradients(learner.model), "gradients")
    handle.remove()
    ledger.kind, learning = "optimizer", ledger.peak
    ledger.forget_peak()
    learner.optimizer.step(0)
    return learning, ledger.peak


def _has_equal_blocks(config: TrainerConfig, model_config: Any) -> bool:
    """Whether one block takes as much as any other: equal weights, and one kind as far as the config lists kinds."""
    text = model_config.get_text_config()
    lists = [each for each in text.to_dict().values() if isinstance(each, list)]
    if any(len(each) == text.num_hidden_layers and len(set(map(str, each))) > 1 for each in lists):
        return False
    weights = {tuple(each.shape for each in block.parameters()) for block in blocks_of(_on_meta(model_config))}
    return len(weights) == 1 and (config.model.ac is None or config.model.ac.freq == 1)


def _cut(model_config: Any, blocks: int) -> Any:
    """The config with fewer blocks."""
    cut = copy.deepcopy(model_config)
    text = cut.get_text_config()
    text.num_hidden_layers = blocks
    if len(kinds := getattr(text, "layer_types", None) or ()) > blocks:  # else it follows from the number
        text.layer_types = kinds[:blocks]
    return cut


def _grown(small: Simulated, large: Simulated, *, factor: float) -> Simulated:
    """`small` and `factor` times what `large` has more."""

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
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(model_config, dtype=torch.float32)


def _new_model(model_config: Any, ledger: Ledger) -> Any:
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
    optimizer = PolicyOptimizer(model, optim=config.optim, scheduler=config.scheduler, max_steps=config.max_steps)
    return Learner(config=config, gang=gang, model=model, optimizer=optimizer, is_strict=True)


def _reference(
    config: TrainerConfig, learner: Learner, sharding: Sharding, new_model: Callable[[], nn.Module]
) -> Reference | None:
    """The start model, where the loss keeps the policy near it."""
    if config.loss.kl is None:
        return None
    if config.model.lora is not None and not config.model.lora.modules_to_save:
        return UnadaptedModel(learner.model)
    return StartModel(new_model(), gang=learner.gang, sharding=sharding)


def _routed_evenly(experts: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Real places of experts, each as often as any other, for those that a router of fake numbers has chosen."""
    hidden_TH, index_TK, weights_TK = args
    num_experts = int(experts.num_experts)  # pyright: ignore[reportArgumentType] - a number in transformers' modules
    return hidden_TH, torch.arange(index_TK.numel()).view(index_TK.shape) % num_experts, weights_TK


def _counts(model: nn.Module) -> tuple[int, int]:
    """Parameters, and those that are trained."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, is_trained in sizes if is_trained)


def _micro_batches(config: TrainerConfig, *, vocabulary: int) -> list[MicroBatch]:
    """A short one, and one of as many samples of `seq_len` as it holds; every token but the first is trained on."""
    length, first = config.model.seq_len, min(_FIRST, config.model.seq_len)
    rows = max(config.micro_batch_tokens // length, 1)
    full = [fake_sample(length, vocabulary=vocabulary) for _ in range(rows)]
    short = [fake_sample(first, vocabulary=vocabulary)]
    return [build_micro_batch(samples, seq_len=length, device=_CPU) for samples in (short, full)]


@contextlib.contextmanager
def _gang(world_size: int) -> Iterator[Gang]:
    """Rank 0 of a gang whose other ranks are not there: what it receives has the right shape."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield Gang(rank=0, world_size=world_size, device=_CPU)
    finally:
        dist.destroy_process_group()
