"""What the rollouts of the last batches say that needs a person, told after 1, 2, 4, 8, … such batches."""

from collections import Counter, deque
from collections.abc import Sequence

from millrace.config.sections.orchestrator import OrchestratorConfig
from millrace.orchestrator.events import RunEvents, is_told
from millrace.orchestrator.play.play import Play
from millrace.rollouts.types import CUT_METRIC, Rollout

WINDOW = 8
"""Batches over which shares are computed: one good rollout does not hide that hundreds are not."""
MOST = 0.9
"""Share of rollouts from which nearly all of them are meant."""


class RecentShare:
    """How many rollouts of the last batches have something in common, and in how many batches nearly all had."""

    def __init__(self) -> None:
        self._batches: deque[tuple[int, int]] = deque(maxlen=WINDOW)
        self._num_told = 0

    def note(self, number: int, total: int) -> bool:
        """Take a batch, `number` of whose `total` rollouts have it; whether that is to be told."""
        self._batches.append((number, total))
        is_most = self.number >= MOST * self.total and number > 0
        self._num_told += is_most
        return is_most and is_told(self._num_told)

    @property
    def number(self) -> int:
        """Rollouts of the window that have it."""
        return sum(number for number, _ in self._batches)

    @property
    def total(self) -> int:
        """Rollouts of the window."""
        return sum(total for _, total in self._batches)

    @property
    def words(self) -> str:
        """`37 of 40 rollouts of the last 5 batches`."""
        batches = "this batch" if len(self._batches) == 1 else f"the last {len(self._batches)} batches"
        return f"{self.number} of {self.total} rollouts of {batches}"


class BatchWarnings:
    """Looks at each batch behind its commit; counts only for itself, so a successor begins anew."""

    def __init__(self, settings: OrchestratorConfig, events: RunEvents) -> None:
        self._settings, self._events = settings, events
        self._by_turn = {env.name for env in settings.env if (env.algo or settings.algo).credit == "turn"}
        self._truncated, self._without_turns, self._num_rewritten = RecentShare(), dict[str, RecentShare](), 0
        self._num_cut = self._num_unequal = 0
        self._num_env_cut = Counter[str]()

    async def look(self, groups: Sequence[Play], *, step: int) -> None:
        """Warn of what batch `step` shows."""
        rollouts = [rollout for group in groups for rollout in group.rollouts()]
        await self._note_truncated(rollouts, step=step)
        await self._note_cut(rollouts, step=step)
        await self._note_env_cut(rollouts, step=step)
        await self._note_rewritten(rollouts, step=step)
        await self._note_unrewarded_turns(rollouts, step=step)
        await self._note_unequal_turns(rollouts, step=step)

    async def _note_truncated(self, rollouts: Sequence[Rollout], *, step: int) -> None:
        if self._truncated.note(sum(rollout.is_truncated for rollout in rollouts), len(rollouts)):
            await self._events.warning(
                "ALL_TRUNCATED",
                f"{self._truncated.words} up to step {step + 1} were cut at their token limit: the policy never ends "
                "by itself, or has no room to; raise orchestrator.sampling.max_tokens and orchestrator.seq_len, or see "
                "whether the prompts use the model's own chat template",
            )

    async def _note_cut(self, rollouts: Sequence[Rollout], *, step: int) -> None:
        """Warn of samples that are longer than what is trained on."""
        lengths = [sample.num_tokens for rollout in rollouts for sample in rollout.samples]
        longer = [length for length in lengths if length > self._settings.seq_len]
        self._num_cut += bool(longer)
        if longer and is_told(self._num_cut):
            lost = sum(longer) - len(longer) * self._settings.seq_len
            await self._events.warning(
                "SAMPLES_CUT",
                f"{len(longer)} of {len(lengths)} samples of batch {step} are longer than orchestrator.seq_len = "
                f"{self._settings.seq_len}, the longest has {max(longer)} tokens: {lost} tokens at their ends are not "
                f"trained on; raise orchestrator.seq_len to {max(longer)}, or let rollouts end sooner",
            )

    async def _note_env_cut(self, rollouts: Sequence[Rollout], *, step: int) -> None:
        """Warn of environments that have their samples cut by a limit of their own."""
        lost = Counter[str]()
        for rollout in rollouts:
            lost[rollout.env] += round(rollout.metrics.get(CUT_METRIC, 0.0))
        for env in sorted(env for env, number in lost.items() if number > 0):
            self._num_env_cut[env] += 1
            if not is_told(self._num_env_cut[env]):
                continue
            mine = [rollout for rollout in rollouts if rollout.env == env]
            num_cut = sum(rollout.metrics.get(CUT_METRIC, 0.0) > 0 for rollout in mine)
            await self._events.warning(
                "SAMPLES_CUT",
                f"environment {env!r} cuts what is sampled at its own `max_seq_len`: {lost[env]} tokens of {num_cut} "
                f"of {len(mine)} rollouts of batch {step} are not trained on, although rewards are for the whole; "
                "raise it, or leave it out (orchestrator.seq_len bounds samples, too)",
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
        for env in sorted({rollout.env for rollout in rollouts} & self._by_turn):
            mine = [rollout for rollout in rollouts if rollout.env == env]
            share = self._without_turns.setdefault(env, RecentShare())
            if not share.note(sum(not rollout.has_turn_rewards for rollout in mine), len(mine)):
                continue
            await self._events.warning(
                "NO_TURN_REWARDS",
                f'`credit = "turn"` has no effect on {env!r}: no turn has a reward of its own in {share.words} up to '
                f"batch {step}, so every turn gets the rollout's; let the environment give its steps rewards "
                '(`state.add_step_reward` in `verifiers`), or set orchestrator.algo.credit = "rollout"',
            )

    async def _note_unequal_turns(self, rollouts: Sequence[Rollout], *, step: int) -> None:
        """Where credit is by turn, warn of rollouts whose turns do not add up to their reward."""
        mine = [rollout for rollout in rollouts if rollout.env in self._by_turn and rollout.has_turn_rewards]
        unequal = [rollout for rollout in mine if rollout.earned_turns is None]
        self._num_unequal += bool(unequal)
        if unequal and is_told(self._num_unequal):
            first = unequal[0]
            earned = sum(turn.reward for sample in first.samples for turn in sample.turns)
            await self._events.warning(
                "TURN_REWARDS_UNEQUAL",
                f"the rewards of the turns do not add up to the rollout's in {len(unequal)} of {len(mine)} rollouts of "
                f"batch {step}, such as ordinal {first.ordinal} of environment {first.env!r} ({earned:g} of its reward "
                f"{first.reward:g}), so all turns of their groups get the rollout's; let the rubric sum the steps "
                "(`state.total_step_reward()` in `verifiers`), with a weight of 1 and nothing beside it",
            )
