"""Log-probs and entropies of several micro-batches, each of an adapter of its own, in one forward of their base."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from millrace.config.sections.trainer import LoraConfig
from millrace.trainer.learning.batch import MicroBatch, build_micro_batch, fake_sample
from millrace.trainer.learning.forward import OnePass, changes_logits, linear_logprobs, scoring, token_logprobs
from millrace.trainer.learning.plan import in_order
from millrace.trainer.model.joint import JointModel, NotByTokenError, joint, view_of
from millrace.trainer.model.lora import LoraLinear, adapted_layers, add_adapters


@dataclass(frozen=True, slots=True, kw_only=True)
class JointPart:
    """A micro-batch of a joint forward, the layers of its adapter by their names, and its arguments of a lone forward.

    `is_entropy_learned` and `one_pass` are those of `token_logprobs`.
    """

    layers: Mapping[str, LoraLinear]
    micro_batch: MicroBatch
    is_entropy_learned: bool = False
    one_pass: OnePass | None = None


def joint_logprobs(joined: JointModel, parts: Sequence[JointPart]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return for each part what `token_logprobs` returns for it, log-probs and entropies [B, T], from one forward.

    `JointModel.unsuited` must be None, no part may have an adapter on the head, and the model must return its head's
    output unchanged.
    """
    model, rows = joined.model, [part.micro_batch.rows for part in parts]
    pieces = [joined.piece(part.layers, each.position_ids_RL) for part, each in zip(parts, rows, strict=True)]
    head: Any = model.get_output_embeddings()
    scored = [
        scoring(
            part.micro_batch,
            vocabulary=head.weight.shape[0],
            scored_N=each.scored_N,
            before_N=each.before_N,
            is_entropy_learned=part.is_entropy_learned,
            one_pass=part.one_pass,
        )
        for part, each in zip(parts, rows, strict=True)
    ]
    counts, sizes = [len(each.scored_N) for each in rows], [piece.num_tokens for piece in pieces]

    def score(hidden: torch.Tensor) -> torch.Tensor:
        """Return log-probs and entropies of all parts' targets, [N, 2], from the hidden states [1, T, ...]."""
        found = [
            linear_logprobs(targets.select(part), head.weight, head.bias, targets=targets)
            for (targets, _), part in zip(scored, hidden.split(sizes, dim=1), strict=True)
        ]
        return torch.cat(found)

    # Set on the instance, as in `instead_of_logits`: `nn.Module.__call__` still runs around it.
    head.__dict__["forward"] = score
    try:
        with joint(pieces):
            both_N2 = model(
                input_ids=torch.cat([each.token_ids_RL.reshape(-1) for each in rows])[None],
                position_ids=torch.cat([each.position_ids_RL.reshape(-1) for each in rows])[None],
                use_cache=False,
            ).logits
    finally:
        del head.__dict__["forward"]  # the class's own again
    return [
        both(values_N2, each.scored_N)
        for (_, both), values_N2, each in zip(scored, both_N2.split(counts), rows, strict=True)
    ]


# The trial: whether micro-batches have together the bits that they have alone, with this model on this machine.

_TRIED = ([[19], [13]], [[16]], [[9, 14]], [[31], [7], [25]], [[37]])
"""Lengths of the samples in each row of the trial's micro-batches: one row or more, packed or not, odd and even."""


def why_apart(joined: JointModel, base: nn.Module, *, is_exact: bool) -> str | None:
    """Return why micro-batches are to be computed one after the other, in words; None if they may share forwards.

    `base` is the frozen model of which `joined` is a view. With `is_exact` log-probs, entropies and gradients of
    made-up micro-batches must have the same bits together as alone.
    """
    if joined.unsuited is not None:
        return joined.unsuited
    models = [_trial_model(base, seed) for seed in range(len(_TRIED))]
    micro_batches = [_trial_micro_batch(base, lengths) for lengths in _TRIED]
    alone = [_results(model, token_logprobs(model, each)) for model, each in zip(models, micro_batches, strict=True)]
    if any(map(changes_logits, models)):
        return "it changes its head's output"
    parts = [
        JointPart(layers=adapted_layers(model), micro_batch=each)
        for model, each in zip(models, micro_batches, strict=True)
    ]
    try:
        outputs = joint_logprobs(joined, parts)
    except NotByTokenError as error:
        return str(error)
    # One backward for all, as in a step.
    torch.autograd.backward([logprobs_BT.sum() for logprobs_BT, _ in outputs])
    for model, output, before in zip(models, outputs, alone, strict=True):
        if is_exact and not all(
            torch.equal(*pair) for pair in zip(_results(model, output, is_done=True), before, strict=True)
        ):
            return "a product of more rows gives a row other bits on this machine"
    return None


def _trial_model(base: nn.Module, seed: int) -> nn.Module:
    """Return a view of the base with an adapter, none of whose values is 0, on all linear layers but the head."""
    model, head = view_of(base), base.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    linear = [name for name, module in base.named_modules() if type(module) is nn.Linear and module is not head]
    ends = sorted({name.rpartition(".")[2] for name in linear})
    add_adapters(model, LoraConfig(rank=4 + seed, target_modules=ends), seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for parameter in (each for each in model.parameters() if each.requires_grad):
        drawn = torch.empty(parameter.shape).normal_(0, 0.05, generator=generator)
        parameter.data = drawn.to(next(base.parameters()).device)
    return model


def _trial_micro_batch(base: Any, lengths: Sequence[Sequence[int]]) -> MicroBatch:
    """Make a micro-batch with samples of these lengths in each row, whose tokens are spread over the vocabulary."""
    vocabulary = int(base.config.get_text_config().vocab_size)
    samples = [fake_sample(length, vocabulary=vocabulary) for row in lengths for length in row]
    for at, sample in enumerate(samples):
        # Two primes: tokens differ within a sample and between samples, without a random generator.
        sample.token_ids[:] = (7919 * np.arange(1, len(sample.token_ids) + 1) + 104729 * at) % vocabulary
    return build_micro_batch(
        samples,
        rows=in_order([list(row) for row in lengths]),
        seq_len=max(len(sample.token_ids) for sample in samples),
        device=next(base.parameters()).device,
    )


def _results(
    model: nn.Module, output: tuple[torch.Tensor, torch.Tensor], *, is_done: bool = False
) -> list[torch.Tensor]:
    """Return log-probs, entropies and gradients of a trial; the backward is done here unless it `is_done`.

    The gradients are taken out of the model.
    """
    if not is_done:
        output[0].sum().backward()
    found = [each.detach() for each in output]
    for parameter in (each for each in model.parameters() if each.requires_grad):
        assert parameter.grad is not None
        found.append(parameter.grad)
        parameter.grad = None
    return found
