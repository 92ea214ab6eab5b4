"""What a training step computes with: model, optimizer, and their state as tensors by name."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol, Self

import torch
from torch import nn

from millrace.config.sections.sft import SFTModelConfig
from millrace.config.sections.trainer import TrainerConfig, TrainerModelConfig
from millrace.custom_code import CustomCode
from millrace.device_digest import device_digest
from millrace.models.context_length import fix_context_length
from millrace.models.loading import check_weights, empty_model, fill_model, load_config
from millrace.models.routing import RoutingShape, replay_routing, routers_of
from millrace.models.torch_support import shortage_named
from millrace.policies.digest import digest_hex, policy_digest, tensor_digest
from millrace.policies.manifest import whole_digest
from millrace.policies.peft.config import AdapterSpec
from millrace.policies.publish import merge_digests
from millrace.policies.tensors import TensorBytes
from millrace.trainer.gang.agreement import agreed
from millrace.trainer.gang.distributed import Gang, resolve_determinism, seed_rank, set_determinism
from millrace.trainer.learning.batch import MicroBatch, Minibatch, StepRows
from millrace.trainer.learning.forward import OnePass, token_logprobs
from millrace.trainer.learning.metrics import ExpertLoad
from millrace.trainer.learning.optimizer import PolicyOptimizer
from millrace.trainer.learning.packing import Utilization, packing_of
from millrace.trainer.learning.plan import Packing
from millrace.trainer.losses import LossFunction, LossInputs, Objective, loss_function, token_losses
from millrace.trainer.model.compiled import compile_blocks
from millrace.trainer.model.context_parallel import use_varlen_kernel
from millrace.trainer.model.expert_parallel import require_no_router_loss
from millrace.trainer.model.fit import fit_layout
from millrace.trainer.model.lora import (
    add_adapters,
    is_adapted,
    round_base,
    round_filled,
    set_learning,
    trained_tensors,
    weight_tensors,
    without_adapters,
)
from millrace.trainer.model.memory import Sharding, cast_weights, checkpoint_activations, defer_resharding
from millrace.trainer.model.pretrained import load_model, resolve_compute_dtype, resolve_publish_dtype
from millrace.trainer.model.published import published_share, published_tensors


class LearnerConfig(Protocol):
    """The part of a run's config that a learner needs."""

    @property
    def trainer(self) -> TrainerConfig:
        """Return the section `[trainer]`."""
        ...

    @property
    def seed(self) -> int:
        """Return the seed of all randomness."""
        ...

    @property
    def context_length(self) -> int:
        """Return the number of tokens of the longest sequence that the policy's engines serve."""
        ...


# The model that is trained, put together: weights, adapters, what its blocks keep, and its place among the ranks.


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """A model ready to train. `adapter` describes its adapters, if any; `base_digest` (hex) is version 0's, or ""."""

    model: nn.Module
    adapter: AdapterSpec | None
    base_digest: str


def build_model(
    config: TrainerModelConfig | SFTModelConfig,
    directory: Path,
    *,
    gang: Gang,
    seed: int,
    prefix: str,
    context_length: int,
    is_proved: bool = False,
) -> TrainedModel:
    """Load the model in a directory, with adapters, sharding and compilation as `config` says. Collective in a gang.

    Lays out the gang as well. The model computes sequences of at most `context_length` tokens. `seed` decides the
    initial values of adapters. The digest of its weights is computed if it has adapters or `is_proved`. Raises
    InvalidSpecError, before weights are read, for a config that does not fit the model, and InvalidStateError
    (ROUTER_LOSS_UNSUPPORTED) for a model that asks for a further loss; `prefix` is the name of the config's table, for
    messages.
    """
    with agreed(gang):  # the model's files are of this rank's machine: what is wrong with them here, all get to know
        layout = fit_layout(config, directory, world_size=gang.world_size, prefix=prefix)
    gang.lay_out(layout)
    compute_dtype = resolve_compute_dtype(config, device=gang.device)
    publish_dtype = resolve_publish_dtype(config, device=gang.device)
    with agreed(gang):
        require_no_router_loss(load_config(directory))
        # The order matters: adapters replace layers that exist, recomputation wraps the blocks with their adapters, the
        # compiler wraps that, and the hooks of FSDP come last, outside of the compiled graphs.
        model, adapter = open_model(directory, gang=gang, context_length=context_length), None
        cast_weights(model, config)
        if config.lora is not None:
            round_base(model, config.lora, publish_dtype=publish_dtype, compute_dtype=compute_dtype)
            adapter = add_adapters(model, config.lora, seed=seed)
        checkpoint_activations(model, config.ac)
        compile_blocks(model, config.compile, has_exchanges=layout.cp > 1 or layout.ep > 1)
    # Sharding is collective, and a block of `agreed` must have no collectives: an error in it would leave the others
    # waiting.
    sharding = Sharding.of(config, compute_dtype=compute_dtype)
    model = gang.shard(model, sharding)
    with agreed(gang):
        fill_opened(model, directory, gang=gang, sharding=sharding)
    if config.lora is not None:
        round_filled(model, publish_dtype=publish_dtype)
    digest = model_digest(model, dtype=publish_dtype, gang=gang) if is_proved or adapter is not None else ""
    return TrainedModel(model=model, adapter=adapter, base_digest=digest)


def open_model(directory: Path, *, gang: Gang, context_length: int) -> nn.Module:
    """Load the model in a directory on the CPU, for sequences of at most `context_length` tokens.

    With several ranks its files are only checked, and the model is made without weights: `fill_opened` reads them after
    sharding.
    """
    if gang.is_alone:
        model = load_model(directory)
    else:
        check_weights(directory)  # all of them: filling its shares, a rank would notice damage in those only
        model = empty_model(directory)
    fix_context_length(model, context_length)
    return model


def fill_opened(model: nn.Module, directory: Path, *, gang: Gang, sharding: Sharding) -> None:
    """Read this rank's shares of the weights into a model that `open_model` made and `gang.shard` sharded.

    Does nothing for one process, whose model has its weights.
    """
    if not gang.is_alone:
        with shortage_named(f"load model {directory.name}"):
            fill_model(model, directory, device=torch.device("cpu") if sharding.offloads else gang.device)


@torch.no_grad()
def model_digest(model: nn.Module, *, dtype: torch.dtype, gang: Gang) -> str:
    """Return the digest (hex) of the model as policy version 0 in the format `dtype`. Collective in a gang.

    Every rank digests its own share on its device; no tensor is gathered whole.
    """
    is_first_part = gang.layout.is_first_part(gang.rank)
    rows: list[list[object]] = []
    for each in published_tensors(model, version=0, dtype=dtype):
        share = published_share(each.tensor, rank=gang.rank, is_first_part=is_first_part)
        # The rank that holds rows digests them; `merge_digests` adds the digests of a tensor's ranges to that of the
        # whole.
        if share is None:
            continue
        flat, start = share[0].to(each.dtype).reshape(-1), share[1]
        for saved, begin, end in each.within(start, flat.numel()):
            digest = digest_hex(device_digest(flat[begin - start : end - start], start=begin - saved.start))
            rows.append([saved.name, each.tag, list(saved.shape), end - begin, digest])
    return whole_digest(merge_digests(gang.agree(lambda: rows)))


# The start model, frozen, as the policy that a run stays near (`trainer.loss.kl`).


class Reference(Protocol):
    """Log-probs under the start model."""

    def logprobs(self, micro_batch: MicroBatch) -> torch.Tensor:
        """Return every token's log-prob under the start model, [B, T], without gradient, at the sample's temperature.

        It is not truncated: a truncated policy may sample what the truncated reference could not, and the divergence
        would be infinite.
        """
        ...


class StartModel:
    """A frozen copy of the start model, in the dtype of the computation."""

    def __init__(self, model: nn.Module, *, gang: Gang, sharding: Sharding, is_varlen: bool = False) -> None:
        """Freeze `model`, cast it to the compute dtype and shard it, all in place.

        `is_varlen` uses the attention kernel for samples of varying lengths where it can. Collective in a gang.
        """
        model.requires_grad_(False)
        if is_varlen:
            use_varlen_kernel(model, compute_dtype=sharding.compute_dtype, device=gang.device)
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(sharding.compute_dtype)  # the object stays, and so do ties
        self._model = gang.shard(model, sharding)

    @classmethod
    def load(
        cls, directory: Path, *, gang: Gang, sharding: Sharding, context_length: int, is_varlen: bool = False
    ) -> Self:
        """Load the model in `directory` as a frozen start model, sharded like the trained one. Collective in a gang.

        It computes sequences of at most `context_length` tokens; `is_varlen` uses the attention kernel for samples of
        varying lengths where it can.
        """
        with agreed(gang):
            model = open_model(directory, gang=gang, context_length=context_length)
        start = cls(model, gang=gang, sharding=sharding, is_varlen=is_varlen)
        with agreed(gang):
            fill_opened(start._model, directory, gang=gang, sharding=sharding)
        return start

    @torch.no_grad()
    def logprobs(self, micro_batch: MicroBatch) -> torch.Tensor:
        """Return every token's log-prob under the start model, [B, T], without gradient or truncation."""
        return token_logprobs(self._model, micro_batch.of_reference())[0]


class UnadaptedModel:
    """The start model of a run that trains adapters: the live model without them, which takes no further memory."""

    def __init__(self, model: nn.Module) -> None:
        """Take the live model with adapters; its base is the start model."""
        self._model = model

    @torch.no_grad()
    def logprobs(self, micro_batch: MicroBatch) -> torch.Tensor:
        """Return every token's log-prob under the model without adapters, [B, T], without gradient or truncation."""
        # The live model may be in its training mode, with dropout.
        with without_adapters(self._model), _evaluating(self._model):
            return token_logprobs(self._model, micro_batch.of_reference())[0]


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Switch the model to eval mode during the block, and back to its mode after it."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@dataclass(slots=True, kw_only=True)
class Learner:
    """What a step computes with.

    `is_strict` says whether equal steps give equal bits. `adapter` is set if adapters are trained on a frozen base;
    `base_digest` (of version 0, hex) then and if the loss has the start model as `reference`. `num_one_pass_tokens`
    counts the tokens whose gradient the head computed together with their log-prob. `routing` is the model's if its
    tokens are sent to the experts that the engine recorded.
    """

    config: TrainerConfig
    gang: Gang
    model: nn.Module
    optimizer: PolicyOptimizer
    is_strict: bool
    loss_of: LossFunction = token_losses
    reference: Reference | None = None
    packing: Packing | None = None
    expert_load: ExpertLoad | None = None
    adapter: AdapterSpec | None = None
    base_digest: str = ""
    dataset: StepRows | None = None
    num_one_pass_tokens: int = 0
    routing: RoutingShape | None = None

    @classmethod
    def of_start_model(
        cls,
        config: LearnerConfig,
        *,
        gang: Gang,
        directory: Path,
        start_directory: Path,
        code: CustomCode,
        dataset: StepRows | None = None,
    ) -> Self:
        """Load the model in `directory`, and make the learner of a run with it. Collective in a gang.

        `start_directory` has the start model, which the loss compares with if it has a KL term. `dataset` has rows that
        steps learn beside rollouts; None: none. `code` imports the user's own modules. Sets torch's determinism and
        seeds. Raises InvalidSpecError, before anything is loaded, if the loss is the user's own and cannot be used.
        """
        trainer = config.trainer
        with agreed(gang):  # one machine may lack the module, or not allow it
            loss_of = loss_function(trainer.loss, code)
        determinism = resolve_determinism(trainer.determinism, is_compiled=trainer.model.compile is not None)
        is_strict = set_determinism(determinism, seed=config.seed, device=gang.device)
        compute_dtype = resolve_compute_dtype(trainer.model, device=gang.device)
        is_proved = trainer.loss.kl is not None
        built = build_model(
            trainer.model,
            directory,
            gang=gang,
            seed=config.seed,
            prefix="trainer.model",
            context_length=config.context_length,
            is_proved=is_proved,
        )
        model, sharding, reference = built.model, Sharding.of(trainer.model, compute_dtype=compute_dtype), None
        # Before the optimizer is made: the trial runs forwards, and has to leave the sharded parameters in their
        # places.
        packing = packing_of(model, trainer.pack, longest=trainer.model.seq_len, compute_dtype=compute_dtype, gang=gang)
        routing = None
        if trainer.model.moe.replay:
            with agreed(gang):
                routing = replay_routing(model, key="trainer.model.moe.replay")
        if trainer.loss.kl is not None:
            # With `modules_to_save` the base itself changes, so that a copy of the start model is needed.
            is_base = trainer.model.lora is not None and not trainer.model.lora.modules_to_save
            is_varlen = packing is not None and packing.is_varlen
            opened = {"sharding": sharding, "context_length": config.context_length, "is_varlen": is_varlen}
            start = partial(StartModel.load, start_directory, gang=gang, **opened)
            reference = UnadaptedModel(model) if is_base else start()
        # Only from here on may ranks draw different numbers; the model had to be made from the same ones.
        seed_rank(config.seed, rank=gang.layout.random_stream(gang.rank))
        return cls(
            config=trainer,
            gang=gang,
            model=model,
            optimizer=PolicyOptimizer(
                model,
                optim=trainer.optim,
                scheduler=trainer.scheduler,
                max_steps=trainer.max_steps,
                offloads_state=trainer.model.optim_cpu_offload,
            ),
            is_strict=is_strict,
            loss_of=loss_of,
            reference=reference,
            packing=packing,
            expert_load=ExpertLoad.of(model),
            adapter=built.adapter,
            base_digest=built.base_digest,
            dataset=dataset,
            routing=routing,
        )

    @property
    def publish_dtype(self) -> torch.dtype:
        """Return the dtype of published policies; for "auto" it is the dtype that the trainer computes in."""
        return resolve_publish_dtype(self.config.model, device=self.gang.device)

    @property
    def utilization(self) -> Utilization | None:
        """Return the object that computes the gang's MFU from samples' lengths and seconds.

        None if the peak of its devices is unknown.
        """
        return Utilization.of(
            self.model,
            tflops=self.config.peak_tflops,
            compute_dtype=resolve_compute_dtype(self.config.model, device=self.gang.device),
            device=self.gang.device,
            world_size=self.gang.world_size,
        )

    def logprobs(
        self, micro_batch: MicroBatch, *, one_pass: OnePass | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probs and entropies of a micro-batch's tokens under the live model, both [B, T].

        The log-probs have a gradient, the entropies only if they are part of the loss. With `one_pass` the gradient of
        its loss is computed here, and a backward of that loss only hands it on.
        """
        is_learned = self.config.loss.entropy_coef > 0
        return token_logprobs(self.model, micro_batch, is_entropy_learned=is_learned, one_pass=one_pass)

    @torch.no_grad()
    def with_proximal(self, minibatches: Sequence[Minibatch]) -> list[Minibatch]:
        """Return copies of the minibatches whose `proximal_logprobs_BT` are the log-probs under the live policy.

        Call it before the batch's first optimizer step. Unless the loss has a correction or is the user's own, nothing
        is computed and they are returned unchanged.
        """
        if not self.config.loss.correction and self.config.loss.type != "custom":
            return list(minibatches)
        return [
            replace(
                each, micro_batches=[replace(m, proximal_logprobs_BT=self.logprobs(m)[0]) for m in each.micro_batches]
            )
            for each in minibatches
        ]

    def loss_inputs(
        self, micro_batch: MicroBatch, objective: Objective
    ) -> tuple[LossInputs, torch.Tensor, torch.Tensor]:
        """Run the model on a micro-batch.

        Return the inputs of its loss, and the tokens' log-probs and entropies, [B, T]. The gradient of `objective` is
        computed in the same pass over the vocabulary if each token's share of it depends on that token alone.
        """
        reference_BT = None if self.reference is None else self.reference.logprobs(micro_batch)

        def inputs_at(logprobs_BT: torch.Tensor, entropy_BT: torch.Tensor) -> LossInputs:
            learned_BT = entropy_BT if self.config.loss.entropy_coef > 0 else None
            return micro_batch.loss_inputs(logprobs_BT, entropy_BT=learned_BT, reference_logprobs_BT=reference_BT)

        one_pass = OnePass(lambda *both_BT: objective(inputs_at(*both_BT))[1])
        is_by_token = objective.is_by_token(is_truncated=micro_batch.sampled.cuts_any)
        logprobs_BT, entropy_BT = self.logprobs(micro_batch, one_pass=one_pass if is_by_token else None)
        if one_pass.num_tokens:
            # With rows in pieces every rank has counted the tokens of its piece only, but sums over samples take one
            # rank's number: that of all the rows' tokens.
            self.num_one_pass_tokens += len(micro_batch.rows.scored_N)
        return inputs_at(logprobs_BT, entropy_BT), logprobs_BT, entropy_BT

    def micro_batches(self, minibatch: Minibatch) -> Iterator[tuple[MicroBatch, Sequence[int]]]:
        """Yield each micro-batch with the indices of its samples in the sample table.

        Call backward before the next one. Before each one the model is set so that only the last backward reduces
        gradients over the ranks.
        """
        last = len(minibatch.micro_batches) - 1
        for at, each in enumerate(zip(minibatch.micro_batches, minibatch.samples, strict=True)):
            defer_resharding(self.model, is_last=at == last)
            yield each

    @contextlib.contextmanager
    def learning(self) -> Iterator[None]:
        """Activate dropout of model and adapters, as configured, during the block, and deactivate it afterwards.

        Experts that a forward in the block was given are taken back as well.
        """
        self.model.train(self.config.model.dropout)
        set_learning(self.model, True)
        try:
            yield
        finally:
            self.model.eval()
            set_learning(self.model, False)
            # Other forwards follow, such as the probe of a published version: routers choose there.
            if (routers := routers_of(self.model)) is not None:
                routers.give(None)


def state_tensors(model: nn.Module, optimizer: PolicyOptimizer, *, gang: Gang) -> dict[str, torch.Tensor]:
    """Return what a checkpoint of this rank contains: weights once each, optimizer state and random state, by name.

    Weights and optimizer state are live tensors. Of a model with adapters there are only the trained weights: the base
    is the start model, whose digest the manifest has.
    """
    weights = trained_tensors(model) if is_adapted(model) else weight_tensors(model)
    state = {f"model.{name}": tensor for name, tensor in weights.items()}
    for name, parts in optimizer.state_tensors().items():
        state |= {f"optim.{name}.{part}": tensor for part, tensor in parts.items()}
    state[f"rng.cpu.{gang.rank}"] = torch.get_rng_state()
    if gang.device.type == "cuda":
        state[f"rng.cuda.{gang.rank}"] = torch.cuda.get_rng_state(gang.device)
    return state


def restore_random_state(state: dict[str, torch.Tensor], *, gang: Gang) -> None:
    """Set torch's random generators of this rank from `state`, which has the tensors of a checkpoint by name."""
    torch.set_rng_state(state[f"rng.cpu.{gang.rank}"])
    if gang.device.type == "cuda":
        torch.cuda.set_rng_state(state[f"rng.cuda.{gang.rank}"], gang.device)


def digest_of(tensors: Iterable[tuple[str, TensorBytes]]) -> str:
    """Return the digest (hex) of a policy that has these tensors, given as pairs of name and bytes."""
    return policy_digest({name: (t.dtype, t.shape, digest_hex(tensor_digest(t))) for name, t in tensors})
