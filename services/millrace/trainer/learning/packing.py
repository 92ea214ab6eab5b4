"""Which samples a model may compute at once, and the floating point operations of a step.

Samples of a row are separated by position ids that restart, from which transformers makes a dense block-diagonal mask
for sdpa, or, on a GPU, calls a kernel for rows of varying lengths. Rows are independent unless a model computes across
them. Whether a model keeps samples apart is tried out (`Apart`), on samples shorter and longer than every length that
its config names, up to the longest sample: recurrent layers carry their state from one sample into the next, chunks of
attention are counted from the beginning of a row, and factors may depend on the longest row.
"""

import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Self

import numpy as np
import torch
from torch import nn

from millrace.config.sections.trainer import PackConfig
from millrace.errors import InvalidSpecError, Violation
from millrace.rollouts.types import TrainSample
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.learning.batch import build_micro_batch, fake_sample
from millrace.trainer.learning.forward import token_logprobs
from millrace.trainer.learning.plan import ALONE, Packing, Rows, in_order
from millrace.trainer.model.context_parallel import use_varlen_kernel
from millrace.trainer.model.memory import reshard_all

logger = logging.getLogger(__name__)

_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-10}
"""Allowed difference as a share of the largest log-prob; formats of fewer bits round to some hundredths."""


def packing_of(
    model: nn.Module, config: PackConfig, *, longest: int, compute_dtype: torch.dtype, gang: Gang
) -> Packing | None:
    """Try whether the model keeps samples apart; return how to pack rows, or None for one sample in each row.

    A model that mixes rows gets one sample in each micro-batch (`ALONE`). Samples have at most `longest` tokens. Raises
    InvalidSpecError: PACK_UNSUPPORTED if the config packs always and the model mixes samples; SAMPLES_MIXED if even a
    sample that is computed alone depends on earlier calls. Collective in a gang.
    """
    # Before the trial, which has to run with the attention that training will use.
    is_varlen = config.mode != "never" and use_varlen_kernel(model, compute_dtype=compute_dtype, device=gang.device)
    tolerance = _TOLERANCE.get(compute_dtype, 0.05)
    found = Apart.of(model, longest=longest, tolerance=tolerance, device=gang.device, is_packed=config.mode != "never")
    # Ranks that round differently, or have other GPUs, could make different plans.
    answers = gang.agree(lambda: [found.in_row, found.in_micro_batch, found.in_turn, is_varlen])
    in_row, in_micro_batch, in_turn, is_varlen = (all(column) for column in zip(*answers, strict=True))
    if not in_turn:
        raise _mixes_calls(model)
    if config.mode == "always" and not (in_row and in_micro_batch):
        raise _mixes_samples(model)
    if not in_micro_batch:
        logger.warning("the model mixes samples of one micro-batch, so every micro-batch holds one sample")
        return ALONE
    if config.mode == "never":
        return None
    if not in_row:
        logger.warning("the model mixes samples of one row, so every row holds one sample")
        return None
    flops = FlopCount.of(model)
    return Packing(
        per_token=flops.per_token,
        per_square=flops.per_square,
        causal_cost=config.causal_cost,
        masked_cost=config.masked_cost,
        is_always=config.mode == "always",
        is_varlen=is_varlen,
    )


def _mixes_samples(model: nn.Module) -> InvalidSpecError:
    """Make the error that the config packs always and the model mixes the samples of a row."""
    name = type(model).__name__
    return InvalidSpecError(
        [Violation(field="pack.mode", value="always", message=f"{name} mixes the samples of one row")],
        reason="PACK_UNSUPPORTED",
        remedy='set pack.mode = "never": every row holds one sample',
    )


def _mixes_calls(model: nn.Module) -> InvalidSpecError:
    """Make the error that the model's result for a sample depends on what it computed before."""
    name = type(model).__name__
    message = f"{name} computes a sample differently after others: it keeps something from call to call"
    return InvalidSpecError(
        [Violation(field="model.name", value=name, message=message)],
        reason="SAMPLES_MIXED",
        remedy="train another model: what this one learned of a sample would depend on the order of the batch",
    )


# Trial of a model: whether its result for a sample depends on other samples, by computing it in several ways.
#
# Samples are tried on both sides of every length that the model's config names, because masks, windows and factors
# change there. Lengths that a run does not have are not tried, so that the trial costs some forwards of the run's
# longest rows.

_SHORT, _OTHER, _SECOND = 5, 6, 4
"""Lengths in tokens of samples that are shorter than every length that is tried."""
_SCORED = 4
"""Tokens at the end of a sample that are compared, because they depend on all of it."""
_LENGTH = re.compile(r"position|length|len$|window|chunk|block_size|context|span|stride|topk|n_ctx")
"""Names that keys of lengths have."""
_MOST = re.compile(r"max_position|n_position|max_seq|seq_len|seq_length|n_ctx")
"""Names that keys of the longest sequence have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Apart:
    """Whether a sample computes the same as alone: after others in a row, beside other rows, after other calls."""

    in_row: bool
    in_micro_batch: bool
    in_turn: bool

    @classmethod
    def of(cls, model: Any, *, longest: int, tolerance: float, device: torch.device, is_packed: bool = True) -> Self:
        """Try on fake samples of at most `longest` tokens whether a causal model keeps samples apart.

        Collective in a gang. `tolerance` is the allowed difference as a share of the largest log-prob. Without
        `is_packed` rows of several samples are not tried, and `in_row` is True.
        """
        trial = _Trial(model, tolerance=tolerance, device=device)
        borders = lengths_named(model.config, below=min(longest, _most_positions(model)))
        trial.compute_alone({_SHORT, _OTHER, _SECOND}.union(borders, (border + 1 for border in borders)))
        # Samples on both sides of every border, in both orders: a window or a position table of a wrong size shows only
        # when another sample in the row pushes it over the border.
        rows = [[[_SHORT, _SECOND], [_OTHER, _SECOND]], *([[_SHORT, border], [border, _SHORT]] for border in borders)]
        beside = [[[_SHORT], [_SECOND]], *([[_SHORT], [border], [border + 1]] for border in borders)]
        # Everything is computed whatever is found: other ranks may round differently, and wait for their peers.
        in_row = [trial.is_alike(each) for each in (rows if is_packed else ())]
        in_micro_batch = [trial.is_alike(each) for each in beside]
        # In the reverse order of `compute_alone`: a model that caches something per call, such as the longest sequence
        # so far, now meets each length after longer ones.
        in_turn = [trial.is_alike([[length]]) for length in reversed(trial.lengths)]
        reshard_all(model)  # the optimizer is to get the shards
        return cls(in_row=all(in_row), in_micro_batch=all(in_micro_batch), in_turn=all(in_turn))


def lengths_named(config: Any, *, below: float) -> list[int]:
    """Return the numbers of tokens below `below` that a model's config names at any depth, ascending.

    Those that are no longer than the shortest samples of the trial are left out.
    """
    named = {number for key, number in _numbers(config.to_dict()) if _LENGTH.search(key)}
    return sorted(number for number in named if _OTHER < number < below)


def _most_positions(model: Any) -> int | float:
    """Return how many tokens the longest sequence has that the model has positions for.

    Infinite with rotary embeddings.
    """
    if any("rotary" in type(module).__name__.lower() for module in model.modules()):
        return math.inf
    return min((number for key, number in _numbers(model.config.to_dict()) if _MOST.search(key)), default=math.inf)


def _numbers(value: Any, key: str = "") -> Iterator[tuple[str, int]]:
    """Yield the whole numbers anywhere in nested dicts and lists, each with its key, or that of the list it is in.

    `key` is that of `value` itself.
    """
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _numbers(inner, str(name))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _numbers(inner, key)
    elif isinstance(value, int | float) and value == value // 1:
        yield key, int(value)


class _Trial:
    """The results of a model for made-up samples, one of each length."""

    def __init__(self, model: nn.Module, *, tolerance: float, device: torch.device) -> None:
        """Begin without results. `tolerance` is the allowed difference as a share of the largest log-prob."""
        self._model = model
        self._tolerance = tolerance
        self._device = device
        self._alone: dict[int, torch.Tensor] = {}

    @property
    def lengths(self) -> list[int]:
        """Return the samples' lengths in the order in which they were computed alone."""
        return list(self._alone)

    def compute_alone(self, lengths: Iterable[int]) -> None:
        """Run the model on one sample of each length, alone, shortest first, and keep the results for `is_alike`."""
        for length in sorted(lengths):
            [self._alone[length]] = self._compute([[length]])

    def is_alike(self, rows: Rows) -> bool:
        """Return whether samples in these rows compute the same, within the tolerance, as each did alone.

        `rows` has the length of each sample in place of its index.
        """
        found = self._compute(rows)
        pairs = [(self._alone[length], each) for length, each in zip(chain(*rows), found, strict=True)]
        allowed = self._tolerance * max(float(alone.abs().max()) for alone, _ in pairs)
        return all(float((each - alone).abs().max()) <= allowed for alone, each in pairs)

    @torch.no_grad()
    def _compute(self, rows: Rows) -> list[torch.Tensor]:
        """Return log-probs and entropies of the last tokens of each sample, float64 [2, tokens].

        `rows` are samples' lengths.
        """
        lengths = list(chain(*rows))
        micro_batch = build_micro_batch(
            [self._sample(length) for length in lengths],
            rows=in_order(rows),
            seq_len=max(lengths),
            device=self._device,
        )
        values_2BT = torch.stack(token_logprobs(self._model, micro_batch)).double().cpu()
        return [values_2BT[:, place, length - _SCORED + 1 : length] for place, length in enumerate(lengths)]

    def _sample(self, length: int) -> TrainSample:
        """Make a sample with tokens spread over the vocabulary, different for each length."""
        vocabulary = int(self._model.config.get_text_config().vocab_size)  # pyright: ignore
        sample = fake_sample(length, vocabulary=vocabulary)
        # Two primes: tokens differ within a sample and between lengths, without a random generator.
        sample.token_ids[:] = (7919 * np.arange(1, length + 1) + 104729 * length) % vocabulary
        # The first of the last `_SCORED` tokens has its predecessor among those compared, so one fewer is scored.
        sample.loss_mask[: length - _SCORED + 1] = 0
        return sample


# Floating point operations of a step, for MFU: those that the model needs, without recomputation and padding.
#
# a sample of n tokens: (4 P + 2 P_trained) n + 6 L A n²
#
# P are the weights of the matrix products that a token goes through: two operations each forwards, two backwards for
# the gradient of the input, and two for that of the weight where it is trained. Embeddings are looked up and count
# nothing, the head counts once, an expert by the share of tokens that it sees. L are the layers and A the heads times
# their size: causal attention has two products of n² A operations forwards, and four backwards.
#
# Sliding windows and other kinds of attention than softmax are taken for full attention.

_DENSE_BFLOAT16 = {"GB200": 2500, "B200": 2250, "B100": 1800, "GH200": 989, "H200": 989, "H100": 989, "A100": 312}
"""TFLOP/s of GPUs on SXM boards by the word of their name, from their data sheets, without sparsity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopCount:
    """Operations of a training step by the lengths of its samples."""

    per_token: float
    per_square: float

    @classmethod
    def of(cls, model: Any) -> Self:
        """Count the operations of a causal model of transformers, sharded or not; frozen weights have no gradient's."""
        config = model.config.get_text_config()
        head = model.get_output_embeddings()
        looked_up = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)} - {id(head.weight)}
        per_token, experts = 0.0, getattr(config, "num_experts_per_tok", None)
        for parameter in model.parameters():
            if parameter.ndim >= 2 and id(parameter) not in looked_up:
                # A layer's experts are one tensor [experts, …], of which a token goes through `num_experts_per_tok`.
                share = experts / parameter.shape[0] if parameter.ndim == 3 and experts else 1.0
                # Two operations per weight forwards, two for the gradient of the input, and two for that of a trained
                # weight.
                per_token += (6 if parameter.requires_grad else 4) * parameter.numel() * share
        heads = getattr(config, "num_attention_heads", 0)  # recurrent models have none
        width = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)
        per_square = 6.0 * config.num_hidden_layers * heads * width
        return cls(per_token=per_token, per_square=per_square)

    def of_samples(self, lengths: Iterable[int]) -> float:
        """Return the floating point operations of a training step on samples of these numbers of tokens."""
        return sum(self.per_token * length + self.per_square * length**2 for length in lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class Utilization:
    """Model FLOPs utilization: operations that a step needs, divided by what all ranks can do in its time."""

    flops: FlopCount
    peak: float

    @classmethod
    def of(
        cls,
        model: nn.Module,
        *,
        tflops: float | None,
        compute_dtype: torch.dtype,
        device: torch.device,
        world_size: int,
    ) -> Self | None:
        """Make the utilization of a model on `world_size` devices that have a peak of `tflops` (TFLOP/s) each.

        With `tflops` None it is the peak of a known GPU in bfloat16. Returns None if the peak is unknown.
        """
        known = tflops
        if known is None and compute_dtype == torch.bfloat16:
            known = _known_tflops(device)
        return None if known is None else cls(flops=FlopCount.of(model), peak=known * 1e12 * world_size)

    def mfu(self, lengths: Iterable[int], *, seconds: float) -> float:
        """Return the model FLOPs utilization of a step, from 0 to 1; `lengths` are the tokens of its samples."""
        return self.flops.of_samples(lengths) / (self.peak * seconds) if seconds > 0 else 0.0


def _known_tflops(device: torch.device) -> float | None:
    """Return the peak of a GPU in dense bfloat16, in TFLOP/s; None if the table does not have it."""
    if device.type != "cuda":
        return None
    words = torch.cuda.get_device_name(device).replace("-", " ").split()
    if "PCIe" in words or "NVL" in words:
        return None  # slower than the same chip on a board
    return next((float(_DENSE_BFLOAT16[word]) for word in words if word in _DENSE_BFLOAT16), None)
