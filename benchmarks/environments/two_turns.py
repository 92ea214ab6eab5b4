"""Two turns that earn by themselves, scored as a group: what `benchmarks/turn_credit_runs.py` trains on."""

from typing import Any

import verifiers as vf
from datasets import Dataset

WANTED = (range(0x43), range(0x43, 0x80))
"""First characters that earn 1, by turn: about a quarter of what a model says that knows nothing."""


class TwoTurns(vf.MultiTurnEnv):
    """A turn whose reply begins as wanted earns 1; the others are given no reward."""

    async def add_trajectory_step(self, state: vf.State, trajectory_step: Any) -> None:
        """Take a step, and reward it."""
        await super().add_trajectory_step(state, trajectory_step)
        said = str(trajectory_step["completion"][-1].content or "")
        if said and ord(said[0]) in WANTED[min(len(state["trajectory"]), len(WANTED)) - 1]:
            state.add_step_reward(1.0)

    async def env_response(self, messages: Any, state: vf.State, **kwargs: Any) -> Any:
        """Ask for the second turn."""
        return [vf.UserMessage(content="b")]


def total(states: list[vf.State], **kwargs: Any) -> list[float]:
    """The sum of the steps, for the members of a group together."""
    return [float(sum(step["reward"] or 0.0 for step in state["trajectory"])) for state in states]


def load_environment(num_tasks: int = 400) -> vf.Environment:
    """The environment."""
    rows = Dataset.from_list([{"question": "a", "answer": ""}] * num_tasks)
    return TwoTurns(dataset=rows, eval_dataset=rows.select(range(4)), rubric=vf.Rubric(funcs=[total]), max_turns=2)
