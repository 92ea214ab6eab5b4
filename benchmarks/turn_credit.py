"""Learning curves of a task of two turns with rewards of turns: credit by turn, and what goes wrong with it.

    python benchmarks/turn_credit.py [--steps 60] [--seeds 20]

No model and no stack: the policy is a table of logits, the advantages are those of `millrace.algorithms`. A turn has
eight actions, of which one earns 1; the second turn's depends on the first turn's action. Each step plays eight groups
of eight rollouts and takes one step of the policy gradient. Two more curves are what `credit = "turn"` made of the same
rollouts where rollouts that earned nothing were left out of the comparison, and where every turn had the whole reward,
as `verifiers` writes it when it scores a group. A minute on one core.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from report import table

from millrace.algorithms import Grpo
from millrace.rollouts.types import Purpose, Rollout, RolloutStatus, Sample, TurnReward

ACTIONS, GROUP, GROUPS = 8, 8, 8
RATE = 4.0
_ENDS = (1, 2)
Credit = Callable[[Sequence[Rollout]], np.ndarray]
"""Of a group the advantages of both turns of each rollout, float64 [G, 2]."""


def rollout(first: float, second: float) -> Rollout:
    """Two turns of one sampled token each, and what they earned."""
    sample = Sample(
        token_ids=np.zeros(2, np.int32),
        loss_mask=np.ones(2, np.uint8),
        inference_logprobs=np.zeros(2, np.float32),
        turns=tuple(TurnReward(end=end, reward=earned) for end, earned in zip(_ENDS, (first, second), strict=True)),
    )
    return Rollout(
        run_uid="b",
        purpose=Purpose.TRAIN,
        ordinal=0,
        member=0,
        attempt=0,
        group_size=GROUP,
        env="two-turns",
        task_index=0,
        task_id="0",
        status=RolloutStatus.OK,
        samples=(sample,),
        reward=first + second,
    )


def credited(algorithm: Grpo) -> Credit:
    """What an algorithm makes of a group."""
    return lambda group: np.asarray([own[0].advantages for own in algorithm.credit(group)], np.float64)


def _compared(values: np.ndarray) -> np.ndarray:
    return values - values.mean() if len(values) > 1 else np.zeros(len(values))


def without_silent(group: Sequence[Rollout]) -> np.ndarray:
    """Credit by turn, but the second turns of rollouts that earned nothing are compared with nobody's."""
    rewards = np.asarray([[turn.reward for turn in each.samples[0].turns] for each in group])
    advantages = np.zeros((len(group), 2))
    advantages[:, 0] = _compared(rewards.sum(axis=1))
    spoke = rewards.any(axis=1)
    advantages[spoke, 1] = _compared(rewards[spoke, 1])
    advantages[~spoke, 1] = advantages[~spoke, 0]
    return advantages


def with_whole_reward(group: Sequence[Rollout]) -> np.ndarray:
    """Credit by turn where each turn has the whole reward: the reward to go of the second turn is always 0."""
    totals = np.asarray([each.reward for each in group])
    return np.stack([_compared(totals), np.zeros(len(group))], axis=1)


CREDITS: dict[str, Credit] = {
    '`credit = "rollout"`': credited(Grpo()),
    '`credit = "turn"`': credited(Grpo(by_turn=True)),
    "turn, those who earned nothing left out": without_silent,
    "turn, the whole reward in every turn": with_whole_reward,
}


def curve(credit: Credit, *, steps: int, seed: int) -> np.ndarray:
    """The expected reward before each step and behind the last one, float64 [steps + 1]; 2 is the best."""
    rng = np.random.default_rng(seed)
    logits = [np.zeros((1, ACTIONS)), np.zeros((ACTIONS, ACTIONS))]
    good = rng.integers(ACTIONS, size=ACTIONS)  # of the second turn, by the first turn's action
    found = [_expected(logits, good)]
    for _ in range(steps):
        gradient = [np.zeros_like(each) for each in logits]
        first_p, second_p = (_softmax(each) for each in logits)
        for _ in range(GROUPS):
            firsts = rng.choice(ACTIONS, size=GROUP, p=first_p[0])
            seconds = np.asarray([rng.choice(ACTIONS, p=second_p[first]) for first in firsts])
            group = [
                replace(rollout(float(first == 0), float(second == good[first])), member=member)
                for member, (first, second) in enumerate(zip(firsts, seconds, strict=True))
            ]
            for first, second, (at_first, at_second) in zip(firsts, seconds, credit(group), strict=True):
                gradient[0][0] += at_first * (np.eye(ACTIONS)[first] - first_p[0])
                gradient[1][first] += at_second * (np.eye(ACTIONS)[second] - second_p[first])
        for each, way in zip(logits, gradient, strict=True):
            each += RATE / (GROUP * GROUPS) * way
        found.append(_expected(logits, good))
    return np.asarray(found)


def _expected(logits: Sequence[np.ndarray], good: np.ndarray) -> float:
    first, second = (_softmax(each) for each in logits)
    return float(first[0, 0] + first[0] @ second[np.arange(ACTIONS), good])


def _softmax(logits: np.ndarray) -> np.ndarray:
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    return shifted / shifted.sum(axis=1, keepdims=True)


def main() -> None:
    """Print the curves as a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=20)
    args = parser.parse_args()
    shown = [step for step in (0, 5, 10, 20, 30, 40, 60, args.steps) if step <= args.steps]
    shown = list(dict.fromkeys(shown))
    rows = []
    for name, credit in CREDITS.items():
        curves = np.asarray([curve(credit, steps=args.steps, seed=seed) for seed in range(args.seeds)])
        error = curves.std(axis=0, ddof=1) / np.sqrt(args.seeds) if args.seeds > 1 else np.zeros(args.steps + 1)
        rows.append([name, *(f"{curves[:, step].mean():.2f} ± {error[step]:.2f}" for step in shown)])
    print(table(["expected reward (best 2) behind step", *map(str, shown)], rows))


if __name__ == "__main__":
    main()
