"""What the rollouts of a batch were, as metrics of its step: why a reward is what it is.

Where prime-rl has the metric, the name is prime-rl's (docs/metrics.md).
"""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from millrace.config.sections.orchestrator import OrchestratorConfig
from millrace.orchestrator.events import RunEvents, is_reported
from millrace.orchestrator.play.intake import ExpertsCheck
from millrace.orchestrator.play.play import Play
from millrace.rollouts.types import CUT_METRIC, Rollout, are_equal, reaches

MAX_NAMES = 64
"""Functions of one environment, and reasons to stop, that become metrics; the rest are left out, by name."""


# How long the groups of each environment take, and which of them became too old to be trained on.
#
# Tasks of one environment may take a hundred times as long as those of another. Steps that are cut as soon as enough
# quick groups are there would drop the slow ones as stale, and the policy learns from quick
# tasks alone. What is measured here says how long a cut waits for them.

PATIENCE_QUANTILE = 0.9
"""A group is waited for as long as this share of its environment's groups takes; stragglers beyond are not."""
PATIENCE_SLACK = 1.25
"""Beyond what was measured, because the next ones differ."""
MIN_MEASURED = 16
"""Groups of an environment before their times are trusted: the first to come are the quick ones."""
_SLOW_QUANTILE = 0.75
_MAX_ENVIRONMENTS = 1000


@dataclass(frozen=True, slots=True)
class _Ended:
    env: str
    seconds: float
    is_stale: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StaleShare:
    """Of one environment's groups of the window, how many were dropped as stale."""

    num_groups: int
    num_stale: int
    num_slow: int
    """The slowest quarter of them."""
    num_slow_stale: int
    median_s: float

    @property
    def share(self) -> float:
        """Return the share of stale groups among all, 0 to 1."""
        return self.num_stale / self.num_groups

    @property
    def slow_share(self) -> float:
        """Return the share of stale groups among the slowest quarter, 0 to 1."""
        return self.num_slow_stale / self.num_slow


class Durations:
    """The last groups of a run, whichever way they ended; a successor begins anew."""

    def __init__(self, *, window: int) -> None:
        """Make an empty record of the last `window` groups over all environments."""
        self._ended: deque[_Ended] = deque(maxlen=window)
        self._by_env: dict[str, deque[float]] = {}
        self._window = window
        self.num_stale: Counter[str] = Counter()
        """By environment, since this process drives the run."""

    def note(self, env: str, seconds: float | None, *, is_stale: bool) -> None:
        """Record a group of environment `env` that was trained, or dropped as stale (`is_stale`).

        `seconds` is its age, None if its beginning is not known. A group that was dropped would have taken longer, so
        the figures are lower bounds until slow ones come.
        """
        self.num_stale[env] += is_stale
        self._ended.append(_Ended(env, math.nan if seconds is None else seconds, is_stale))
        # Environments are named by users: without a bound a run with generated names would grow for ever.
        if seconds is None or (env not in self._by_env and len(self._by_env) >= _MAX_ENVIRONMENTS):
            return
        self._by_env.setdefault(env, deque(maxlen=self._window)).append(seconds)

    def patience_s(self, env: str) -> float:
        """Return for how many seconds a cut waits for a group of an environment: a little more than most groups take.

        That is `PATIENCE_SLACK` times the quantile `PATIENCE_QUANTILE` of the seconds of its recorded groups. Infinite
        before `MIN_MEASURED` groups of the environment were measured.
        """
        measured = self._by_env.get(env, ())
        if len(measured) < MIN_MEASURED:
            return math.inf
        return PATIENCE_SLACK * float(np.quantile(measured, PATIENCE_QUANTILE))

    def stale_shares(self) -> Mapping[str, StaleShare]:
        """Return by environment how many of its recorded groups were dropped as stale, of all and of the slowest
        quarter.
        """
        found: dict[str, StaleShare] = {}
        for env in sorted({each.env for each in self._ended}):
            mine = [each for each in self._ended if each.env == env]
            seconds = [each.seconds for each in mine if not math.isnan(each.seconds)] or [0.0]
            border = float(np.quantile(seconds, _SLOW_QUANTILE))
            # A comparison with NaN is false: groups of unknown duration are in no quarter.
            slow = [each for each in mine if each.seconds >= border] or mine
            found[env] = StaleShare(
                num_groups=len(mine),
                num_stale=sum(each.is_stale for each in mine),
                num_slow=len(slow),
                num_slow_stale=sum(each.is_stale for each in slow),
                median_s=float(np.median(seconds)),
            )
        return found


def batch_metrics(
    groups: Sequence[Play], *, seq_len: int, stale: Mapping[str, int], shares: Mapping[str, StaleShare]
) -> dict[str, float]:
    """Return the metrics of the groups that a batch is made of, by name (docs/metrics.md).

    `seq_len` is the number of tokens to which samples are cut. `stale` has by environment the number of groups dropped
    as stale since the batch before, `shares` the stale ones among the last groups.
    """
    by_env: dict[str, list[Play]] = defaultdict(list)
    for group in groups:
        by_env[group.task.env].append(group)
    values = _whole(groups)
    lengths = [sample.num_tokens for group in groups for each in group.rollouts() for sample in each.samples]
    values["seq_len/cut_samples"] = float(sum(length > seq_len for length in lengths))
    values["seq_len/cut_tokens"] = float(sum(max(length - seq_len, 0) for length in lengths))
    cut_by_envs = (each.metrics.get(CUT_METRIC, 0.0) for group in groups for each in group.rollouts())
    values["seq_len/env_cut_tokens"] = sum(cut_by_envs)
    for env, members in sorted(by_env.items()):
        values |= _of_environment(env, members)
    for env, count in sorted(stale.items()):
        values[f"batch/dropped/stale/{env}"] = float(count)
    for env, share in shares.items():
        values[f"stale_share/{env}/mean"] = share.share
        values[f"stale_share/{env}/slowest_quarter"] = share.slow_share
    return values


def _whole(groups: Sequence[Play]) -> dict[str, float]:
    """Return the metrics over all environments of a batch's groups, by name."""
    rollouts = [rollout for group in groups for rollout in group.rollouts()]
    values = {f"{name}/all": value for name, value in _solved(groups).items()}
    values["is_truncated/all/mean"] = _mean(rollout.is_truncated for rollout in rollouts)
    turns = [float(rollout.num_turns) for rollout in rollouts]
    sampled = [float(rollout.num_loss_tokens) for rollout in rollouts]
    for name, found in (("num_turns", turns), ("decode_len", sampled)):
        values |= {f"{name}/all/mean": _mean(found), f"{name}/all/max": max(found), f"{name}/all/min": min(found)}
    return values


def _of_environment(env: str, groups: Sequence[Play]) -> dict[str, float]:
    """Return the metrics of environment `env`, of its groups in a batch, by name."""
    rollouts = [rollout for group in groups for rollout in group.rollouts()]
    rewards = np.asarray([rollout.reward for rollout in rollouts], np.float64)
    values = {
        f"reward/{env}/mean": float(rewards.mean()),
        f"reward/{env}/std": float(rewards.std()),
        f"reward/{env}/min": float(rewards.min()),
        f"reward/{env}/max": float(rewards.max()),
        f"reward/{env}/group_std": _mean(float(np.std([each.reward for each in group.rollouts()])) for group in groups),
        f"is_truncated/{env}/mean": _mean(rollout.is_truncated for rollout in rollouts),
        f"num_turns/{env}/mean": _mean(float(rollout.num_turns) for rollout in rollouts),
        f"time/rollout/{env}/mean": _mean(rollout.seconds for rollout in rollouts),
    }
    values |= {f"{name}/{env}": value for name, value in _solved(groups).items()}
    for name, value in _functions(rollouts).items():
        values[f"metrics/{env}/{name}"] = value
    stops = Counter(rollout.stop_condition or "unknown" for rollout in rollouts)
    for name, count in stops.most_common(MAX_NAMES):
        values[f"stop_condition/{env}/{name}"] = count / len(rollouts)
    return values


def _functions(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the mean of each reward function and metric, by its bare name, over the rollouts that have it.

    Names beyond the first `MAX_NAMES`, in alphabetical order, are left out.
    """
    found: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        for name, value in rollout.metrics.items():
            found[name].append(value)
    return {name: _mean(found[name]) for name in sorted(found)[:MAX_NAMES]}


def _solved(groups: Sequence[Play]) -> dict[str, float]:
    """Return the shares (0 to 1) of groups whose rewards are all at least 1, all at most 0, or all equal, by name.

    The names are `solve_all`, `solve_none` and `zero_advantage`. Errors of rounding do not count.
    """
    rewards = [[rollout.reward for rollout in group.rollouts()] for group in groups]
    return {
        "solve_all": _mean(all(reaches(reward, 1.0) for reward in each) for each in rewards),
        "solve_none": _mean(all(reaches(-reward, 0.0) for reward in each) for each in rewards),
        # The advantages' own comparison: `reaches` forgives a millionth, which is an advantage where rewards are small.
        "zero_advantage": _mean(are_equal(each) for each in rewards),
    }


def _mean(values: Iterable[float]) -> float:
    """Return the mean of at least one number."""
    return float(np.mean(np.fromiter(values, np.float64)))


# What the rollouts of the last batches say that needs a person, reported after 1, 2, 4, 8, … such batches.

WINDOW = 8
"""Batches over which shares are computed: one good rollout does not hide that hundreds are not."""
MOST = 0.9
"""Share of rollouts from which nearly all of them are meant."""


class RecentShare:
    """How many rollouts of the last batches have something in common, and in how many batches nearly all had."""

    def __init__(self) -> None:
        self._batches: deque[tuple[int, int]] = deque(maxlen=WINDOW)
        self._num_noted = 0

    def note(self, number: int, total: int) -> bool:
        """Count a batch, `number` of whose `total` rollouts have the property; return whether to report that.

        To report are the first, second, fourth, … batch at which the share over the window is at least `MOST`.
        """
        self._batches.append((number, total))
        is_most = self.number >= MOST * self.total and number > 0
        self._num_noted += is_most
        return is_most and is_reported(self._num_noted)

    @property
    def number(self) -> int:
        """Return the number of rollouts in the window that have the property."""
        return sum(number for number, _ in self._batches)

    @property
    def total(self) -> int:
        """Return the number of rollouts in the window."""
        return sum(total for _, total in self._batches)

    @property
    def words(self) -> str:
        """Return the counts in words, as in `37 of 40 rollouts of the last 5 batches`."""
        batches = "this batch" if len(self._batches) == 1 else f"the last {len(self._batches)} batches"
        return f"{self.number} of {self.total} rollouts of {batches}"


class BatchWarnings:
    """Looks at each batch after its commit; counts only for itself, so a successor begins anew."""

    def __init__(self, settings: OrchestratorConfig, events: RunEvents, *, experts: ExpertsCheck | None = None) -> None:
        """Make the writer of warnings on a run's batches, with all counts at 0.

        `experts` has refused recorded experts, of which it warns; None has refused none.
        """
        self._settings, self._events, self._experts = settings, events, experts
        self._by_turn = {env.name for env in settings.env if (env.algo or settings.algo).credit == "turn"}
        self._truncated, self._without_turns, self._num_rewritten = RecentShare(), dict[str, RecentShare](), 0
        self._num_cut = self._num_unequal = self._num_misfits = 0
        algos = {env.name: env.algo or settings.algo for env in settings.env}
        self._echoed = {name: algo.role_weights for name, algo in algos.items() if algo.type == "echo"}
        self._unheard: dict[str, RecentShare] = {}
        self._num_env_cut = Counter[str]()

    async def look(self, groups: Sequence[Play], *, step: int) -> None:
        """Write a warning for each thing that the rollouts of batch `step` show.

        A repeated one after 1, 2, 4, … such batches.

        It counts batches for that, and is called once after each commit.
        """
        rollouts = [rollout for group in groups for rollout in group.rollouts()]
        await self._note_truncated(rollouts, step=step)
        await self._note_cut(rollouts, step=step)
        await self._note_env_cut(rollouts, step=step)
        await self._note_rewritten(rollouts, step=step)
        await self._note_unrewarded_turns(rollouts, step=step)
        await self._note_nothing_echoed(rollouts, step=step)
        await self._note_unequal_turns(rollouts, step=step)
        await self._note_misfits()

    async def _note_misfits(self) -> None:
        """Warn of rollouts whose recorded experts were refused since the last batch.

        The warning comes at the first, second, fourth, … such batch.
        """
        problem = "" if self._experts is None else self._experts.report()
        self._num_misfits += bool(problem)
        if problem and is_reported(self._num_misfits):
            await self._events.warning("ROUTED_EXPERTS_MISFIT", problem)

    async def _note_truncated(self, rollouts: Sequence[Rollout], *, step: int) -> None:
        """Warn if nearly all rollouts of the last batches were cut at their token limit.

        `rollouts` are those of batch `step`, which is counted. The warning comes at the first, second, fourth, … such
        batch.
        """
        if self._truncated.note(sum(rollout.is_truncated for rollout in rollouts), len(rollouts)):
            await self._events.warning(
                "ALL_TRUNCATED",
                f"{self._truncated.words} up to step {step + 1} were cut at their token limit: the policy never ends "
                "by itself, or has no room to; raise orchestrator.sampling.max_tokens and orchestrator.seq_len, or see "
                "whether the prompts use the model's own chat template",
            )

    async def _note_cut(self, rollouts: Sequence[Rollout], *, step: int) -> None:
        """Warn of samples of batch `step` longer than `orchestrator.seq_len`: what is beyond is not trained on.

        The warning comes at the first, second, fourth, … such batch.
        """
        lengths = [sample.num_tokens for rollout in rollouts for sample in rollout.samples]
        longer = [length for length in lengths if length > self._settings.seq_len]
        self._num_cut += bool(longer)
        if longer and is_reported(self._num_cut):
            lost = sum(longer) - len(longer) * self._settings.seq_len
            await self._events.warning(
                "SAMPLES_CUT",
                f"{len(longer)} of {len(lengths)} samples of batch {step} are longer than orchestrator.seq_len = "
                f"{self._settings.seq_len}, the longest has {max(longer)} tokens: {lost} tokens at their ends are not "
                f"trained on; raise orchestrator.seq_len to {max(longer)}, or let rollouts end sooner",
            )

    async def _note_env_cut(self, rollouts: Sequence[Rollout], *, step: int) -> None:
        """Warn of each environment that has cut rollouts of batch `step` at a limit of its own.

        The warning comes at the environment's first, second, fourth, … such batch.
        """
        lost = Counter[str]()
        for rollout in rollouts:
            lost[rollout.env] += round(rollout.metrics.get(CUT_METRIC, 0.0))
        for env in sorted(env for env, number in lost.items() if number > 0):
            self._num_env_cut[env] += 1
            if not is_reported(self._num_env_cut[env]):
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
        """Warn of rollouts of batch `step` that became several samples, where one for each trace is expected.

        The warning comes at the first, second, fourth, … such batch.
        """
        if self._settings.trajectory_strategy != "interleaved":
            return
        rewritten = [rollout for rollout in rollouts if rollout.rewritten_turn is not None]
        self._num_rewritten += bool(rewritten)
        if rewritten and is_reported(self._num_rewritten):
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
        """Warn of each environment where credit is by turn and nearly no rollout of the last batches has turn rewards.

        `rollouts` are those of batch `step`, which is counted.
        """
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

    async def _note_nothing_echoed(self, rollouts: Sequence[Rollout], *, step: int) -> None:
        """Warn of each environment trained by echo where nearly no rollout has a token of the roles that are learned.

        `rollouts` are those of batch `step`, which is counted: what matters is the share over the last batches.
        """
        for env in sorted({rollout.env for rollout in rollouts} & self._echoed.keys()):
            mine = [rollout for rollout in rollouts if rollout.env == env]
            spoken = [{span.role for sample in rollout.samples for span in sample.roles} for rollout in mine]
            share = self._unheard.setdefault(env, RecentShare())
            if not share.note(sum(not roles & self._echoed[env].keys() for roles in spoken), len(mine)):
                continue
            roles, present = ", ".join(self._echoed[env]), ", ".join(sorted(set().union(*spoken))) or "nobody"
            await self._events.warning(
                "NOTHING_TO_ECHO",
                f"`echo` learns nothing of what {env!r} says: in {share.words} up to batch {step} no token after a "
                f"reply is of the roles that are learned ({roles}), but of: {present}; name these in "
                "orchestrator.algo.roles, and use a chat template that keeps earlier turns as they were",
            )

    async def _note_unequal_turns(self, rollouts: Sequence[Rollout], *, step: int) -> None:
        """Warn of rollouts of batch `step` whose turn rewards do not add up to the rollout's reward.

        Only environments where credit is by turn count. The warning comes at the first, second, fourth, … such batch.
        """
        mine = [rollout for rollout in rollouts if rollout.env in self._by_turn and rollout.has_turn_rewards]
        unequal = [rollout for rollout in mine if rollout.earned_turns is None]
        self._num_unequal += bool(unequal)
        if unequal and is_reported(self._num_unequal):
            first = unequal[0]
            earned = sum(turn.reward for sample in first.samples for turn in sample.turns)
            await self._events.warning(
                "TURN_REWARDS_UNEQUAL",
                f"the rewards of the turns do not add up to the rollout's in {len(unequal)} of {len(mine)} rollouts of "
                f"batch {step}, such as ordinal {first.ordinal} of environment {first.env!r} ({earned:g} of its reward "
                f"{first.reward:g}), so all turns of their groups get the rollout's; let the rubric sum the steps "
                "(`state.total_step_reward()` in `verifiers`), with a weight of 1 and nothing beside it",
            )
