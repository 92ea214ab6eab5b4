"""Many adapters of one frozen base, trained beside each other as if each were alone.

    pool = AdapterPool(load_model(directory), max_tokens=8192)
    pool.add("a", LoraConfig(rank=8), seed=1)
    pool.forward_backward([Work(adapter="a", micro_batches=[...], loss=...), Work(adapter="b", ...)])
    pool.step("a", AdamParams(lr=1e-4, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0, max_norm=None))

The base is held once. Each adapter has its own gradients, optimizer state, step counter and random numbers.
Micro-batches of different adapters go through the base in one forward and one backward, up to `max_tokens` tokens with
padding. Whatever they share it with, an adapter's log-probs, gradients and weights have the bits that they have alone,
which are those of `Learner` for a run with the same config: where that does not hold, micro-batches are computed one
after the other. Reasons are the model (experts, windows), the machine (a trial at the start finds it), few tokens,
dropout, and an adapter on the head.

Nothing here is safe for several threads.

Shape suffixes: B samples, T longest sample.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn

from millrace.config.sections.trainer import LoraConfig, OptimConfig, SchedulerConfig
from millrace.errors import AlreadyExistsError, InvalidSpecError, InvalidStateError, NotFoundError, Violation
from millrace.policies.peft.config import AdapterSpec
from millrace.trainer.gang.distributed import RandomState, seed_rank
from millrace.trainer.learning.batch import MicroBatch
from millrace.trainer.learning.forward import OnePass, token_logprobs
from millrace.trainer.learning.joint import JointPart, joint_logprobs, why_apart
from millrace.trainer.learning.optimizer import AdamParams, OptimizerReport, PolicyOptimizer
from millrace.trainer.model.joint import JointModel, view_of
from millrace.trainer.model.lora import LoraLinear, adapted_layers, add_adapters, set_learning, trained_tensors

logger = logging.getLogger(__name__)

Loss = Callable[[MicroBatch, torch.Tensor, torch.Tensor], torch.Tensor]
"""Returns the loss of a micro-batch, a scalar, from its tokens' log-probs and entropies, both [B, T].

It is to be a pure function: it may be called more than once for a micro-batch.
"""

_FEWEST_TOKENS = 16
"""Tokens that a micro-batch needs to share a forward: products of few rows have kernels, and bits, of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Micro-batches of one adapter, whose losses' gradients are added up in their order.

    `is_by_token` says that the share of each token in the loss depends on the log-prob and the entropy of that token
    only, which saves a product of the head. The entropy has a gradient only if `is_entropy_learned`.
    """

    adapter: str
    micro_batches: Sequence[MicroBatch]
    loss: Loss
    is_by_token: bool = False
    is_entropy_learned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredMicroBatch:
    """What the adapter's model gives for a micro-batch, without gradients; `loss` is 0 if none was asked for.

    Tokens that no loss needs have the log-prob log(1/V) and the entropy log V, where V is the size of the vocabulary.
    """

    logprobs_BT: torch.Tensor
    entropy_BT: torch.Tensor
    loss: float = 0.0


@dataclass(slots=True, kw_only=True)
class _Adapter:
    """One adapter: its view of the model, its layers by their names, its optimizer, and the steps that it made."""

    model: nn.Module
    spec: AdapterSpec
    layers: dict[str, LoraLinear]
    optimizer: PolicyOptimizer
    random: RandomState
    has_dropout: bool
    num_steps: int = 0

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the adapter's parameters by their names in the model."""
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}


@dataclass(slots=True, kw_only=True)
class _Task:
    """One micro-batch to compute, and the list to which its result is added."""

    name: str
    adapter: _Adapter
    micro_batch: MicroBatch
    work: Work
    results: list[ScoredMicroBatch]

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of the micro-batch's rows, with their padding."""
        return self.micro_batch.rows.token_ids_RL.numel()

    @property
    def one_pass(self) -> OnePass | None:
        """Return the loss for the head to compute its gradient with; None if it needs all tokens at once."""
        if not self.work.is_by_token:
            return None
        return OnePass(lambda logprobs_BT, entropy_BT: self.work.loss(self.micro_batch, logprobs_BT, entropy_BT))


@dataclass(slots=True)
class AdapterPool:
    """Adapters of `base`, a causal model of transformers on its device, frozen and in the dtype that it computes in.

    A joint forward has at most `max_tokens` tokens with padding, or one micro-batch. With `is_exact` False any model
    that can share forwards shares them, even if results then differ from those of an adapter alone by rounding.
    """

    base: nn.Module
    max_tokens: int
    is_exact: bool = True
    why_alone: str | None = field(init=False, default=None)
    """Why micro-batches are computed one after the other, in words; None if they share forwards."""
    _adapters: dict[str, _Adapter] = field(init=False, default_factory=dict)
    _joint: JointModel = field(init=False)

    def __post_init__(self) -> None:
        """Freeze the base, and try whether micro-batches that share a forward compute as alone."""
        self.base.requires_grad_(False)
        self.base.eval()
        self._joint = JointModel(self.base)
        self.why_alone = why_apart(self._joint, self.base, is_exact=self.is_exact)
        if self.why_alone is not None:
            logger.warning("adapters are computed one after the other", extra={"reason": self.why_alone})

    # Adapters come and go.

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the adapters, the oldest first."""
        return tuple(self._adapters)

    def add(
        self,
        name: str,
        lora: LoraConfig,
        *,
        seed: int,
        optim: OptimConfig | None = None,
        scheduler: SchedulerConfig | None = None,
        max_steps: int | None = None,
    ) -> AdapterSpec:
        """Add an adapter that adds 0 at first; return the spec by which PEFT finds its layers.

        `seed` decides its initial values and its dropout. `optim`, `scheduler` and `max_steps` are what `step` does
        without settings of its own. Raises AlreadyExistsError, and InvalidStateError for patterns that fit no layer and
        for layers that would be trained whole, which is not possible on a shared base (LORA_SAVED_SHARED).
        """
        if name in self._adapters:
            raise AlreadyExistsError(f"there is an adapter {name!r}", reason="ADAPTER_EXISTS", remedy="choose a name")
        if lora.modules_to_save:
            raise InvalidStateError(
                f"adapter {name!r} would train {', '.join(lora.modules_to_save)} whole, which other adapters share",
                reason="LORA_SAVED_SHARED",
                remedy="leave `modules_to_save` out, or train it on a base of its own",
            )
        model = view_of(self.base)
        spec = add_adapters(model, lora, seed=seed)
        for parameter in model.parameters():
            # New matrices are made on the CPU; the base's are where they were.
            if parameter.requires_grad:
                parameter.data = parameter.data.to(next(self.base.parameters()).device)
        self._adapters[name] = _Adapter(
            model=model,
            spec=spec,
            layers=adapted_layers(model),
            optimizer=PolicyOptimizer(
                model, optim=optim or OptimConfig(), scheduler=scheduler or SchedulerConfig(), max_steps=max_steps
            ),
            random=_seeded(seed, device=next(model.parameters()).device),
            has_dropout=lora.dropout > 0,
        )
        return spec

    def remove(self, name: str) -> None:
        """Forget an adapter and all of its state; raises NotFoundError if there is none of this name."""
        del self._adapters[self._known(name)]

    def model(self, name: str) -> nn.Module:
        """Return the model with this adapter alone, live: its parameters are the base's and the adapter's own."""
        return self._adapters[self._known(name)].model

    def num_steps(self, name: str) -> int:
        """Return the number of steps that an adapter has made, skipped ones included."""
        return self._adapters[self._known(name)].num_steps

    def _known(self, name: str) -> str:
        """Return the name of an adapter; raises NotFoundError (ADAPTER_NOT_FOUND) if there is none of this name."""
        if name not in self._adapters:
            raise NotFoundError(f"there is no adapter {name!r}", reason="ADAPTER_NOT_FOUND", remedy="add it first")
        return name

    # Forward and backward.

    def forward_backward(self, work: Sequence[Work]) -> list[list[ScoredMicroBatch]]:
        """Add the gradients of all losses to their adapters'; return the results by work and micro-batch.

        An adapter may occur more than once: its micro-batches are computed in their order. After an error, such as one
        that a loss raises, the gradients of all adapters are those before the call. Raises NotFoundError for an unknown
        adapter, and InvalidSpecError (LOSS_INVALID) for a loss that is no scalar or has no gradient.
        """
        tasks, results = self._tasks(work)
        with self._unchanged_on_error({each.adapter for each in work}):
            for group in self._groups(tasks):
                outputs, losses = self._scores(group, learns=True), list[torch.Tensor]()
                for task, both_BT in zip(group, outputs, strict=True):
                    losses.append(_checked(task.work.loss(task.micro_batch, *both_BT), adapter=task.name))
                torch.autograd.backward(losses)
                _put(group, outputs, losses)
        return results

    def forward(self, work: Sequence[Work]) -> list[list[ScoredMicroBatch]]:
        """Return the results of `forward_backward` without gradients and without dropout; no loss is called."""
        tasks, results = self._tasks(work)
        with torch.no_grad():
            for group in self._groups(tasks):
                _put(group, self._scores(group, learns=False))
        return results

    def _tasks(self, work: Sequence[Work]) -> tuple[list[_Task], list[list[ScoredMicroBatch]]]:
        """Return the micro-batches of all work as tasks in their order, and the lists that get their results."""
        results = [list[ScoredMicroBatch]() for _ in work]
        tasks = [
            _Task(
                name=each.adapter,
                adapter=self._adapters[self._known(each.adapter)],
                micro_batch=micro_batch,
                work=each,
                results=own,
            )
            for each, own in zip(work, results, strict=True)
            for micro_batch in each.micro_batches
        ]
        return tasks, results

    def _groups(self, tasks: Sequence[_Task]) -> Iterator[list[_Task]]:
        """Yield the tasks that share a forward: of each adapter at most one, at most `max_tokens` tokens, or one task.

        The tasks of an adapter keep their order, because its gradients are added up in that order.
        """
        waiting: dict[str, deque[_Task]] = {}
        for task in tasks:
            waiting.setdefault(task.name, deque()).append(task)
        while waiting:
            group, num_tokens = list[_Task](), 0
            for name in list(waiting):
                task = waiting[name][0]
                if not self._may_join(task):
                    yield [self._taken(waiting, name)]
                elif not group or num_tokens + task.num_tokens <= self.max_tokens:
                    group.append(self._taken(waiting, name))
                    num_tokens += task.num_tokens
            if group:
                yield group

    @staticmethod
    def _taken(waiting: dict[str, deque[_Task]], name: str) -> _Task:
        """Take the first task of an adapter out of those that wait, and return it."""
        task = waiting[name].popleft()
        if not waiting[name]:
            del waiting[name]
        return task

    def _may_join(self, task: _Task) -> bool:
        """Return whether a task may share a forward with others."""
        adapter, head = task.adapter, self.base.get_output_embeddings()  # pyright: ignore[reportCallIssue]
        has_head = any(self.base.get_submodule(name) is head for name in adapter.layers)
        is_small = self.is_exact and task.num_tokens < _FEWEST_TOKENS
        return self.why_alone is None and not (adapter.has_dropout or has_head or is_small)

    def _scores(self, group: Sequence[_Task], *, learns: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return log-probs and entropies, [B, T], of the tasks of a group; with dropout if it `learns`."""
        if len(group) > 1:
            parts = [
                JointPart(
                    layers=task.adapter.layers,
                    micro_batch=task.micro_batch,
                    is_entropy_learned=task.work.is_entropy_learned,
                    one_pass=task.one_pass,
                )
                for task in group
            ]
            return joint_logprobs(self._joint, parts)
        [task] = group
        with _learning(task.adapter) if learns and task.adapter.has_dropout else nullcontext():
            both_BT = token_logprobs(
                task.adapter.model,
                task.micro_batch,
                is_entropy_learned=task.work.is_entropy_learned,
                one_pass=task.one_pass,
            )
        return [both_BT]

    @contextmanager
    def _unchanged_on_error(self, names: set[str]) -> Iterator[None]:
        """Restore the gradients of these adapters if the block raises."""
        parameters = [parameter for name in names for parameter in self._adapters[name].parameters.values()]
        before = [None if parameter.grad is None else parameter.grad.clone() for parameter in parameters]
        try:
            yield
        except BaseException:  # restored, and raised again
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient
            raise

    # Steps and state.

    def step(self, name: str, adam: AdamParams | None = None) -> OptimizerReport:
        """Clip an adapter's gradient, apply it and clear it; the adapter's number of steps grows by one.

        With `adam` these settings are used, for which the adapter's optimizer must be AdamW, otherwise those that it
        was added with. Weights stay as they are if the gradient is not finite, which the report says.
        """
        adapter = self._adapters[self._known(name)]
        if adam is None:
            report = adapter.optimizer.step(adapter.num_steps)
        else:
            report = adapter.optimizer.step_as(adapter.num_steps, adam)
        adapter.num_steps += 1
        return report

    def state(self, name: str) -> dict[str, torch.Tensor]:
        """Return copies of all state of an adapter on the CPU, by name: what `load_state` needs to go on bit by bit.

        They are `model.*` (weights), `optim.*`, `grad.*` (what has been added up since the last step), `steps` and, of
        an adapter with dropout, `rng.*`.
        """
        return {key: tensor.detach().cpu().clone() for key, tensor in self._state(self._adapters[self._known(name)])}

    @staticmethod
    def _state(adapter: _Adapter) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the state of an adapter by name, live except for counter and random numbers."""
        for key, tensor in trained_tensors(adapter.model).items():
            yield f"model.{key}", tensor
        for key, parts in adapter.optimizer.state_tensors().items():
            yield from ((f"optim.{key}.{part}", tensor) for part, tensor in parts.items())
        yield "steps", torch.tensor(adapter.num_steps)
        for key, parameter in adapter.parameters.items():
            if parameter.grad is not None:
                yield f"grad.{key}", parameter.grad
        if adapter.has_dropout:
            yield "rng.host", adapter.random.host
            if adapter.random.gpu is not None:
                yield "rng.gpu", adapter.random.gpu

    @torch.no_grad()
    def load_state(self, name: str, state: Mapping[str, torch.Tensor]) -> None:
        """Replace the state of an adapter by `state`, which `state` returned for an adapter with the same config.

        Gradients may be there or not. Raises InvalidStateError (ADAPTER_STATE_MISFIT), and changes nothing, if names,
        shapes or dtypes are not those of this adapter.
        """
        adapter = self._adapters[self._known(name)]
        live = {key: tensor for key, tensor in self._state(adapter) if not key.startswith("grad.")}
        gradients = {key: p for key, p in adapter.parameters.items() if f"grad.{key}" in state}
        _require_fit(name, state, live | {f"grad.{key}": parameter for key, parameter in gradients.items()})
        self._load_live(state, live)
        for key, parameter in adapter.parameters.items():
            parameter.grad = state[f"grad.{key}"].to(parameter.device, copy=True) if key in gradients else None
        adapter.num_steps = int(state["steps"])
        if adapter.has_dropout:
            gpu = state["rng.gpu"].clone() if adapter.random.gpu is not None else None
            adapter.random = RandomState(device=adapter.random.device, host=state["rng.host"].clone(), gpu=gpu)

    def load_weights(self, name: str, weights: Mapping[str, torch.Tensor]) -> None:
        """Replace the weights of an adapter, by name as in `state`, and begin anew with all else.

        Optimizer state and number of steps become 0, and gradients are cleared. Raises InvalidStateError
        (ADAPTER_STATE_MISFIT), and changes nothing, if names, shapes or dtypes are not those of this adapter.
        """
        adapter = self._adapters[self._known(name)]
        live = {key: tensor for key, tensor in self._state(adapter) if key.startswith("model.")}
        _require_fit(name, weights, live)
        self._load_live(weights, live)
        for tensor in (part for parts in adapter.optimizer.state_tensors().values() for part in parts.values()):
            tensor.zero_()
        for parameter in adapter.parameters.values():
            parameter.grad = None
        adapter.num_steps = 0

    @staticmethod
    def _load_live(state: Mapping[str, torch.Tensor], live: Mapping[str, torch.Tensor]) -> None:
        """Copy weights and optimizer state into the live tensors of the same names."""
        for key, tensor in live.items():
            if key.startswith(("model.", "optim.")):
                tensor.copy_(state[key])


# What an adapter draws, and what it is checked against.


def _seeded(seed: int, *, device: torch.device) -> RandomState:
    """Return the random state from which a run of this seed draws dropout, and leave the current one as it is."""
    current = RandomState.of(device)
    try:
        seed_rank(seed, rank=0)
        return RandomState.of(device)
    finally:
        current.restore()


@contextmanager
def _learning(adapter: _Adapter) -> Iterator[None]:
    """Activate an adapter's dropout in the block, drawn from the adapter's own random state, which moves on."""
    outside = RandomState.of(adapter.random.device)
    adapter.random.restore()
    set_learning(adapter.model, True)
    try:
        yield
        adapter.random = RandomState.of(adapter.random.device)
    finally:
        set_learning(adapter.model, False)
        outside.restore()


def _checked(loss: object, *, adapter: str) -> torch.Tensor:
    """Return a loss; raises InvalidSpecError if it is no scalar with a gradient. `adapter` is for the message."""
    if isinstance(loss, torch.Tensor) and loss.ndim == 0 and loss.requires_grad:
        return loss
    got = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
    message = "must be a scalar tensor that depends on the log-probs or on the learned entropies"
    raise InvalidSpecError(
        [Violation(field="loss", message=message, value=got, source=f"adapter {adapter}")], reason="LOSS_INVALID"
    )


def _put(
    group: Sequence[_Task],
    outputs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    losses: Sequence[torch.Tensor] | None = None,
) -> None:
    """Put the results of a group's tasks where they belong."""
    for at, (task, (logprobs_BT, entropy_BT)) in enumerate(zip(group, outputs, strict=True)):
        loss = 0.0 if losses is None else float(losses[at].detach())
        task.results.append(
            ScoredMicroBatch(logprobs_BT=logprobs_BT.detach(), entropy_BT=entropy_BT.detach(), loss=loss)
        )


def _require_fit(name: str, state: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Raise InvalidStateError unless `state` has the names, shapes and dtypes of `expected`; `name` is for messages."""
    missing, unknown = expected.keys() - state.keys(), state.keys() - expected.keys()
    other = [
        key
        for key in sorted(expected.keys() & state.keys())
        if (state[key].shape, state[key].dtype) != (expected[key].shape, expected[key].dtype)
    ]
    problems = {"lacks": sorted(missing), "has beside it": sorted(unknown), "has in another shape or dtype": other}
    found = [f"{what} {keys[0]}" for what, keys in problems.items() if keys]
    if found:
        raise InvalidStateError(
            f"the state is not that of adapter {name!r}: it {'; it '.join(found)}",
            reason="ADAPTER_STATE_MISFIT",
            remedy="load it into an adapter with the same config on the same base",
        )
