"""Losses for test_trainer_replay.py, named on its command lines as millrace_testing.trainer.other_losses:<function>."""

import dataclasses

import torch

from millrace.config.sections.loss import LossConfig
from millrace.trainer.losses import LossInputs, TokenLosses, policy_losses

NOT_A_FUNCTION = 3


def doubled(inputs: LossInputs, config: LossConfig) -> TokenLosses:
    losses = policy_losses(inputs, config)
    return dataclasses.replace(losses, rl=2 * losses.rl)


def per_sequence(inputs: LossInputs, config: LossConfig) -> TokenLosses:
    losses = policy_losses(inputs, config)
    return dataclasses.replace(losses, rl=losses.rl.sum(-1))


def constant(inputs: LossInputs, config: LossConfig) -> TokenLosses:
    losses = policy_losses(inputs, config)
    return dataclasses.replace(losses, rl=torch.zeros_like(losses.rl), ce=torch.zeros_like(losses.ce))


def a_number(inputs: LossInputs, config: LossConfig) -> float:
    return 1.0


def broken(inputs: LossInputs, config: LossConfig) -> TokenLosses:
    raise ZeroDivisionError("by design")
