"""Samples without an environment or a data set behind them: what a step costs depends on their lengths only."""

import numpy as np

from millrace.rollouts.types import TrainSample


def fake_sample(length: int, *, vocabulary: int, of_rl: bool = True) -> TrainSample:
    """A sample of `length` tokens, every one but the first trained on: as sampled, or as a completion to imitate."""
    ones, zeros = np.ones(length, np.float32), np.zeros(length, np.float32)
    return TrainSample(
        token_ids=np.arange(length, dtype=np.int32) % vocabulary,
        loss_mask=(ones if of_rl else zeros).astype(np.uint8),
        inference_logprobs=zeros,
        advantages=ones,
        ordinal=0,
        member=0,
        attempt=0,
        env="",
        reward=0.0,
        temperature=1.0,
        min_version=0,
        max_version=0,
        lineage=0,
        ce_weights=None if of_rl else ones,
    )
