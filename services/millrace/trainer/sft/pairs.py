"""Direct Preference Optimization: loss and rewards of pairs of responses, their reference, and their micro-batches.

With log-probs summed over the tokens of a response, of the policy (log π) and of the start model (log π_ref),

    r = beta (log π - log π_ref)                 the reward of a response
    loss = -log σ(r_chosen - r_rejected)         of a pair (Rafailov et al. 2023, equation 7)

and with label smoothing e it is (1 - e) times that, plus e times the loss of the pair the other way round (Mitchell,
"A note on DPO with noisy preferences", 2023). The loss of a step is the mean over its pairs.

Samples come in pairs: the chosen one has an even index, and the rejected one is the next.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import logsigmoid

from millrace.config.sections.sft import DPOConfig, SFTConfig
from millrace.errors import InvalidSpecError, Violation
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.learning.batch import MicroBatch
from millrace.trainer.learning.forward import token_logprobs
from millrace.trainer.learning.learner import Reference, StartModel, UnadaptedModel
from millrace.trainer.learning.plan import Packing, Rows, plan_micro_batches
from millrace.trainer.model.memory import Sharding
from millrace.trainer.model.pretrained import resolve_compute_dtype


def preference_losses(rewards_P2: torch.Tensor, *, label_smoothing: float) -> torch.Tensor:
    """Return the DPO loss of each pair, [P], from the rewards of its chosen and its rejected response, [P, 2].

    `label_smoothing` is the share of pairs that is taken to be labelled the wrong way round, from 0 to below 0.5.
    """
    margin_P = rewards_P2[:, 0] - rewards_P2[:, 1]
    return -(1 - label_smoothing) * logsigmoid(margin_P) - label_smoothing * logsigmoid(-margin_P)


def plan_pairs(
    lengths: Sequence[int], *, max_tokens: int, world_size: int = 1, packing: Packing | None = None
) -> list[list[Rows]]:
    """Return each rank's micro-batches, in which both samples of a pair are together; samples are named by index.

    `lengths` has the tokens of each sample. Rows times longest row are at most `max_tokens`, or the rows of one pair
    that is longer. Every rank gets equally many micro-batches, of which some may be empty. A row holds one sample, or,
    if `packing` packs always or has a kernel for varying lengths, whole pairs.
    """
    both = list(zip(lengths[::2], lengths[1::2], strict=True))
    if packing is not None and (packing.is_always or packing.is_varlen):
        sums = [sum(pair) for pair in both]
        plan = plan_micro_batches(sums, max_tokens=max_tokens, world_size=world_size, packing=packing)
        return [[[[at for pair in row for at in _samples(pair)] for row in rows] for rows in own] for own in plan]
    # Two rows as long as the longer response: padded, a pair takes as much room as this.
    room = [2 * max(pair) for pair in both]
    plan = plan_micro_batches(room, max_tokens=max_tokens, world_size=world_size)
    return [[[[at] for row in rows for pair in row for at in _samples(pair)] for rows in own] for own in plan]


def _samples(pair: int) -> tuple[int, int]:
    """Return the indices of a pair's two samples."""
    return 2 * pair, 2 * pair + 1


@dataclass(slots=True, kw_only=True)
class Preferences:
    """The DPO loss of micro-batches, and sums over the pairs of a step at this rank for its metrics.

    `sums` are of the chosen rewards, of the rejected ones, and of pairs whose chosen reward is the larger one.
    """

    config: DPOConfig
    reference: Reference
    sums: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])

    @classmethod
    def of(
        cls, config: SFTConfig, *, model: nn.Module, directory: Path, packing: Packing | None, gang: Gang
    ) -> "Preferences | None":
        """Make the loss of `[dpo]`, None without it; the start model in `directory` is the reference. Collective.

        The reference is a frozen copy, or `model` without its adapters. `packing` is how rows are packed, None for one
        sample in each. Raises InvalidSpecError for a model that mixes the samples of a micro-batch.
        """
        if config.dpo is None:
            return None
        if packing is not None and packing.is_alone:
            message = "mixes the samples of a micro-batch, and both responses of a pair have to be in one"
            raise InvalidSpecError(
                [Violation(field="model.name", value=config.model.name, message=message)],
                reason="SAMPLES_MIXED",
                remedy="train another model, or leave [dpo] out",
            )
        # With `modules_to_save` the base itself changes, so that a copy of the start model is needed.
        if config.model.lora is not None and not config.model.lora.modules_to_save:
            return cls(config=config.dpo, reference=UnadaptedModel(model))
        reference = StartModel.load(
            directory,
            gang=gang,
            sharding=Sharding.of(config.model, compute_dtype=resolve_compute_dtype(config.model, device=gang.device)),
            context_length=config.data.seq_len,
            is_varlen=packing is not None and packing.is_varlen,
        )
        return cls(config=config.dpo, reference=reference)

    def loss(self, model: nn.Module, micro_batch: MicroBatch, *, num_pairs: int) -> torch.Tensor:
        """Return a micro-batch's share of the mean loss over `num_pairs`, the pairs of the whole step.

        Adds its pairs to `sums`. Collective in a gang.
        """
        reference_BT = self.reference.logprobs(micro_batch)
        logprobs_BT, _ = token_logprobs(model, micro_batch)
        # Responses are long, and what is compared are small differences of their sums.
        difference_BT = logprobs_BT.double() - reference_BT.double()
        rewards_B = self.config.beta * torch.where(micro_batch.ce_weights_BT != 0, difference_BT, 0.0).sum(-1)
        # A micro-batch without samples is one row of padding: no pair, and a gradient of zero.
        rewards_P2 = rewards_B[: len(rewards_B) // 2 * 2].view(-1, 2)
        losses_P = preference_losses(rewards_P2, label_smoothing=self.config.label_smoothing)
        chosen_P, rejected_P = rewards_P2.detach().unbind(-1)
        for at, values in enumerate((chosen_P, rejected_P, chosen_P > rejected_P)):
            self.sums[at] += float(values.sum())
        return losses_P.sum() / num_pairs

    def take_metrics(self, num_pairs: int, *, gang: Gang) -> dict[str, float]:
        """Return the means of the step's `num_pairs` pairs over all ranks under TRL's names, and begin anew.

        Collective.
        """
        chosen, rejected, num_right = (each / num_pairs for each in gang.sum_of_data(self.sums))
        self.sums = [0.0, 0.0, 0.0]
        return {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margins": chosen - rejected,
            "rewards/accuracies": num_right,
        }
