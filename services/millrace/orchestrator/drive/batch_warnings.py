"""What the rollouts of a committed batch say that needs a person, told after 1, 3, 8, … batches."""

from collections.abc import Sequence

from millrace.config.sections.orchestrator import OrchestratorConfig
from millrace.orchestrator.events import RunEvents, is_told
from millrace.orchestrator.play.play import Play
from millrace.rollouts.types import Rollout


class BatchWarnings:
    """Looks at each batch behind its commit; counts only for itself, so a successor begins anew."""

    def __init__(self, settings: OrchestratorConfig, events: RunEvents) -> None:
        self._settings, self._events = settings, events
        self._by_turn = {env.name for env in settings.env if (env.algo or settings.algo).credit == "turn"}
        self._num_truncated_in_a_row = self._num_rewritten = self._num_without_turns = 0

    async def look(self, groups: Sequence[Play], *, step: int) -> None:
        """Warn of what batch `step` shows."""
        rollouts = [rollout for group in groups for rollout in group.rollouts()]
        await self._note_truncated(rollouts, step=step)
        await self._note_rewritten(rollouts, step=step)
        await self._note_unrewarded_turns(rollouts, step=step)

    async def _note_truncated(self, rollouts: Sequence[Rollout], *, step: int) -> None:
        is_truncated = all(rollout.is_truncated for rollout in rollouts)
        self._num_truncated_in_a_row = self._num_truncated_in_a_row + 1 if is_truncated else 0
        if is_truncated and is_told(self._num_truncated_in_a_row):
            await self._events.warning(
                "ALL_TRUNCATED",
                f"every rollout of batch {step} was cut at its token limit ({self._num_truncated_in_a_row} batches in "
                "a row): the policy never ends by itself, or has no room to; raise orchestrator.sampling.max_tokens "
                "and orchestrator.seq_len, or see whether the prompts use the model's own chat template",
            )

    async def _note_rewritten(self, rollouts: Sequence[Rollout], *, step: int) -> None:
        """Where one sample per rollout is expected, warn of rollouts that are several."""
        if self._settings.trajectory_strategy != "interleaved":
            return
        rewritten = [rollout for rollout in rollouts if rollout.rewritten_turn is not None]
        self._num_rewritten += bool(rewritten)
        if rewritten and is_told(self._num_rewritten):
            first = rewritten[0]
            await self._events.warning(
                "HISTORY_REWRITTEN",
                f"{len(rewritten)} of {len(rollouts)} rollouts of batch {step} are several samples, such as ordinal "
                f"{first.ordinal} of environment {first.env!r}: the prompt of turn {first.rewritten_turn} does not "
                "begin with the tokens before it, so that turn is trained in a sample of its own, in the context in "
                "which it was sampled; use a chat template that keeps earlier turns as they were (one that strips "
                '`<think>` does not), or say orchestrator.trajectory_strategy = "branching"',
            )

    async def _note_unrewarded_turns(self, rollouts: Sequence[Rollout], *, step: int) -> None:
        """Where credit is by turn, warn of an environment none of whose turns has a reward."""
        envs = sorted({rollout.env for rollout in rollouts} & self._by_turn)
        silent = [env for env in envs if not any(each.has_turn_rewards for each in rollouts if each.env == env)]
        self._num_without_turns = self._num_without_turns + 1 if silent else 0
        if silent and is_told(self._num_without_turns):
            await self._events.warning(
                "NO_TURN_REWARDS",
                f'`credit = "turn"` has no effect: no turn of a rollout of {", ".join(map(repr, silent))} in batch '
                f"{step} has a reward of its own ({self._num_without_turns} batches in a row), so every turn gets the "
                "rollout's; let the environment give its steps rewards (`state.add_step_reward` in `verifiers`), or "
                'set orchestrator.algo.credit = "rollout"',
            )
