"""A base model that is held once, and adapters on it that are trained one after the other.

The base is in float32 and never changes. An adapter's gradients are summed over calls until it steps. What an adapter
becomes is a function of its seed and of the calls on it: equal calls give equal bits, whichever adapters are trained
between them.
"""

import contextlib
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import nn

from millrace.config.sections.trainer import LoraConfig
from millrace.decoding import Fields, decode_object
from millrace.errors import CorruptObjectError, InvalidStateError
from millrace.models import loading
from millrace.models.context_length import fix_context_length
from millrace.policies.peft.config import AdapterSpec, published_name
from millrace.tinker.examples import Example, refused
from millrace.tinker.losses import Loss
from millrace.tinker.states import ALPHA, OWN
from millrace.trainer.model.lora import LoraLinear

MAX_RANK = 512
_LEAST_EPS = 1e-37
MICRO_BATCH_TOKENS = 4096
"""Tokens, padding included, of one forward and backward."""
_DEFAULT_POSITIONS = 2048
_ATTENTION = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "out_proj"})
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterShape:
    """Rank, seed and layers of an adapter."""

    rank: int
    seed: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParams:
    """What one optimizer step is given; `grad_clip_norm` 0 clips nothing."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    def __post_init__(self) -> None:
        """Raise InvalidSpecError, naming the field, for a number that no step can be taken with."""
        for name in self.__slots__:
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0 or (name.startswith("beta") and value >= 1):
                raise refused(f"adam_params.{name}", "must be finite, at least 0, and a beta below 1", value)
        if self.eps < _LEAST_EPS:
            # Where a gradient was always 0, as that of A is at first, the step would be 0 / 0.
            raise refused("adam_params.eps", f"must be at least {_LEAST_EPS:g}, which is not 0 in float32", self.eps)


class TrainedAdapter:
    """One adapter with its optimizer and gradients; `SharedBase.new_adapter` makes one."""

    def __init__(self, shape: AdapterShape, layers: Mapping[str, LoraLinear]) -> None:
        self.shape = shape
        self.layers = layers
        self.parameters: dict[str, torch.Tensor] = {}
        for name, layer in layers.items():
            self.parameters[f"{name}.lora_A.weight"] = layer.lora_A.weight
            self.parameters[f"{name}.lora_B.weight"] = layer.lora_B.weight
        self.gradients: dict[str, torch.Tensor] = {}
        """Summed since the last step; empty if there was no backward."""
        self.num_steps = 0
        self._optimizer = torch.optim.AdamW(self.parameters.values())

    def step(self, params: StepParams) -> dict[str, float]:
        """Clip the gradient, step, clear the gradient, and return metrics.

        A gradient that is not finite changes no weight, and the metrics say so. Raises InvalidStateError without a
        gradient.
        """
        if not self.gradients:
            raise InvalidStateError(
                "there is no gradient: no forward_backward succeeded since the last optim_step",
                reason="NO_GRADIENT",
                remedy="call forward_backward first",
            )
        for name, parameter in self.parameters.items():
            parameter.grad = self.gradients[name]
        self.gradients = {}
        parameters = list(self.parameters.values())
        norm = float(torch.nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None]))
        metrics = {"grad_norm": norm} if math.isfinite(norm) else {"skipped": 1.0}
        if math.isfinite(norm):
            if params.grad_clip_norm and norm > params.grad_clip_norm:
                torch.nn.utils.clip_grads_with_norm_(parameters, params.grad_clip_norm, torch.tensor(norm))
            for group in self._optimizer.param_groups:
                group |= {
                    "lr": params.learning_rate,
                    "betas": (params.beta1, params.beta2),
                    "eps": params.eps,
                    "weight_decay": params.weight_decay,
                }
            self._optimizer.step()
            self.num_steps += 1
        self._optimizer.zero_grad(set_to_none=True)
        return metrics

    def export(self) -> bytes:
        """Return all that training goes on from: weights, optimizer state, gradients, number of steps."""
        tensors = {f"{OWN}{name}": parameter.detach() for name, parameter in self.parameters.items()}
        tensors |= {f"grad/{name}": gradient for name, gradient in self.gradients.items()}
        for name, parameter in self.parameters.items():
            state = self._optimizer.state.get(parameter, {})
            tensors |= {f"{part}/{name}": state[part] for part in _MOMENTS if part in state}
        return save_tensors({name: each.contiguous() for name, each in tensors.items()}, self._about())

    def export_weights(self) -> bytes:
        """Return the weights alone, by the names that PEFT gives them."""
        tensors = {published_name(name): each.detach().contiguous() for name, each in self.parameters.items()}
        return save_tensors(tensors, self._about())

    @torch.no_grad()
    def restore(self, data: bytes, *, with_optimizer: bool = True, with_gradients: bool = True) -> None:
        """Take over what `export` of an adapter of the same shape returned.

        Without the optimizer its state begins anew, without the gradients there are none. Raises InvalidSpecError if
        the layers or ranks differ, and changes nothing then.
        """
        tensors = load_tensors(data)
        found = {name.removeprefix(OWN): each for name, each in tensors.items() if name.startswith(OWN)}
        shapes = {name: tuple(each.shape) for name, each in found.items()}
        if shapes != {name: tuple(each.shape) for name, each in self.parameters.items()}:
            raise refused("path", "must name weights of the same rank and layers as this model has")
        for name, parameter in self.parameters.items():
            parameter.copy_(found[name])
        self.gradients = {}
        if with_gradients:
            self.gradients = {n.removeprefix("grad/"): each for n, each in tensors.items() if n.startswith("grad/")}
        self._optimizer = torch.optim.AdamW(self.parameters.values())
        self.num_steps = 0
        steps = _steps_of(data) if with_optimizer else 0
        if steps:
            self.num_steps = steps
            for name, parameter in self.parameters.items():
                self._optimizer.state[parameter] = {
                    "step": torch.tensor(float(steps)),
                    **{part: tensors[f"{part}/{name}"] for part in _MOMENTS},
                }

    def _about(self) -> dict[str, str]:
        """Return the metadata of the adapter's files."""
        # One entry: safetensors writes several in a random order, and equal adapters need equal bytes.
        return {"num_steps": str(self.num_steps)}


class SharedBase:
    """The base model, on the CPU, with the adapter that is trained at the moment."""

    def __init__(self, directory: Path, *, max_tokens: int | None = None) -> None:
        """Read the model in `directory`; sequences have at most `max_tokens` tokens (None: the model's positions)."""
        config = loading.load_config(directory)
        self._model: Any = loading.empty_model(directory, dtype=torch.float32)
        loading.fill_model(self._model, directory, device=torch.device("cpu"))
        text = config.get_text_config(decoder=True)
        positions = int(getattr(text, "max_position_embeddings", 0) or _DEFAULT_POSITIONS)
        self.max_tokens = min(positions, max_tokens or positions)
        fix_context_length(self._model, self.max_tokens)
        self._model.eval().requires_grad_(False)
        self.vocab_size = int(text.vocab_size)
        self._head = self._model.get_output_embeddings()
        self._linear = {name: each for name, each in self._model.named_modules() if type(each) is nn.Linear}
        self._head_name = next(name for name, each in self._model.named_modules() if each is self._head)

    def new_adapter(self, shape: AdapterShape) -> TrainedAdapter:
        """Return a new adapter that changes nothing yet; its initial values follow from seed and names of layers.

        Raises InvalidSpecError for a rank out of bounds, or where no layer is left.
        """
        if not 1 <= shape.rank <= MAX_RANK:
            raise refused("lora_config.rank", f"must be 1 to {MAX_RANK}", shape.rank)
        names = self.targets(shape)
        if not names:
            raise refused("lora_config", "must train at least one of attention, MLP and unembedding")
        config = LoraConfig(rank=shape.rank, alpha=ALPHA)
        return TrainedAdapter(
            shape, {n: LoraLinear(self._linear[n], config=config, seed=shape.seed, name=n) for n in names}
        )

    def targets(self, shape: AdapterShape) -> list[str]:
        """Return the names of the layers that an adapter of this shape is on, in the model's order."""

        def is_meant(name: str) -> bool:
            if name == self._head_name:
                return shape.train_unembed
            return shape.train_attn if name.rpartition(".")[2] in _ATTENTION else shape.train_mlp

        return [name for name in self._linear if is_meant(name)]

    def spec(self, shape: AdapterShape) -> AdapterSpec:
        """Return what PEFT has to know of an adapter of this shape."""
        return AdapterSpec(rank=shape.rank, alpha=ALPHA, target_modules=tuple(self.targets(shape)))

    def forward_backward(
        self,
        adapter: TrainedAdapter,
        examples: Sequence[Example],
        loss: Loss,
        config: Mapping[str, float],
        *,
        learns: bool,
    ) -> tuple[list[NDArray[np.float32]], float]:
        """Return the log-probs float32 [T] of each example's targets, and the sum of the examples' losses.

        With `learns` the loss's gradient is added to the adapter's. After an error the adapter is as it was before.
        """
        parameters = list(adapter.parameters.values())
        sums: list[torch.Tensor] | None = None
        logprobs: list[NDArray[np.float32]] = []
        total = 0.0
        with self._with(adapter):
            for rows in _micro_batches(examples):
                with torch.set_grad_enabled(learns):
                    scored = self._logprobs(rows)
                    losses = [
                        loss.compute(each, {n: torch.from_numpy(v) for n, v in row.values.items()}, config)
                        for each, row in zip(scored, rows, strict=True)
                    ]
                    value = torch.stack(losses).sum()
                if learns:
                    gradients = torch.autograd.grad(value, parameters)
                    sums = (
                        list(gradients) if sums is None else [a.add_(g) for a, g in zip(sums, gradients, strict=True)]
                    )
                logprobs += [each.detach().numpy() for each in scored]
                total += float(value.detach())
        if sums is not None:
            for name, gradient in zip(adapter.parameters, sums, strict=True):
                held = adapter.gradients.get(name)
                adapter.gradients[name] = gradient if held is None else held.add_(gradient)
        return logprobs, total

    def _logprobs(self, rows: Sequence[Example]) -> list[torch.Tensor]:
        """Return the log-probs float32 [T] of each row's targets."""
        width = max(len(row.tokens) for row in rows)
        # Padding is on the right, where causal attention does not see it.
        input_ids = torch.zeros(len(rows), width, dtype=torch.long)
        for place, row in enumerate(rows):
            input_ids[place, : len(row.tokens)] = torch.from_numpy(row.tokens)
        lengths = [len(row.tokens) for row in rows]
        places = torch.cat([torch.arange(n) + at * width for at, n in enumerate(lengths)])
        with self._scored_at(places):
            logits = self._model(input_ids=input_ids, use_cache=False).logits
        targets = torch.from_numpy(np.concatenate([row.targets for row in rows]))
        # [1, N, V] → [N]
        scored = torch.log_softmax(logits[0].float(), dim=-1).gather(-1, targets[:, None])[:, 0]
        return list(scored.split(lengths))

    @contextlib.contextmanager
    def _scored_at(self, places: torch.Tensor) -> Iterator[None]:
        """Let the head see only the hidden vectors at flat indices `places` during the block: [R, L, H] → [1, N, H].

        So padding takes no memory of the vocabulary's size.
        """
        head = self._model.get_output_embeddings()
        whole = head.forward
        head.__dict__["forward"] = lambda hidden: whole(hidden.flatten(0, 1).index_select(0, places)[None])
        try:
            yield
        finally:
            del head.__dict__["forward"]

    @contextlib.contextmanager
    def _with(self, adapter: TrainedAdapter) -> Iterator[None]:
        """Let the model compute with an adapter during the block."""
        try:
            for name, layer in adapter.layers.items():
                self._put(name, layer)
            yield
        finally:
            for name in adapter.layers:
                self._put(name, self._linear[name])

    def _put(self, name: str, layer: nn.Module) -> None:
        """Put a layer in its place in the model."""
        parent, _, attribute = name.rpartition(".")
        setattr(self._model.get_submodule(parent), attribute, layer)


def base_digest(directory: Path) -> str:
    """Return the sha256 (hex) over the model's config and weight files, by name."""
    digest = hashlib.sha256()
    for path in sorted([directory / "config.json", *directory.glob("*.safetensors")]):
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _micro_batches(examples: Sequence[Example]) -> Iterator[Sequence[Example]]:
    """Yield the examples in their order, as many at a time as `MICRO_BATCH_TOKENS` allow, at least one."""
    rows: list[Example] = []
    for example in examples:
        width = max(len(each.tokens) for each in [*rows, example])
        if rows and width * (len(rows) + 1) > MICRO_BATCH_TOKENS:
            yield rows
            rows = []
        rows.append(example)
    yield rows


def _steps_of(data: bytes) -> int:
    """Return the number of steps in the header of an exported adapter; CorruptObjectError if it has none."""
    length = int.from_bytes(data[:8], "little")
    header = decode_object(data[8 : 8 + length], what="the header of a state", reason="STATE_DAMAGED")
    try:
        return int(Fields(Fields(header).entries("__metadata__")).text("num_steps"))
    except ValueError as error:
        raise CorruptObjectError(f"a state's header is wrong: {error}", reason="STATE_DAMAGED") from error
