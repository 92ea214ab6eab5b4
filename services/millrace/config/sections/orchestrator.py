"""`[orchestrator]`: environments, sampling, batches, staleness, evaluation."""

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import model_validator

from millrace.config.section import BrokenRule, ConfigSection, broken, option, required, table
from millrace.config.sections.algo import COMPARING, DISTILLING, PER_AGENT, AdvantageConfig, AlgoConfig
from millrace.config.sections.buffer import BufferConfig, FilterConfig
from millrace.config.sections.environments import EnvConfig, PeriodicEvalEnvConfig, env_names, selection_json
from millrace.config.sections.sampling import (
    EvalSamplingConfig,
    SamplingConfig,
    bias_rules,
    sampling_rules,
    teacher_sampling_rules,
)
from millrace.config.sections.shared import DEFAULT_MODEL, SHARED_MODEL
from millrace.config.sections.trainer import DEFAULT_SEQ_LEN
from millrace.config.tree import Facts, Limit, Path

_ALL = "all"
_GROUP = "orchestrator.rollouts_per_example"
_ALGO = "orchestrator.algo.type"
_SAMPLING = "orchestrator.sampling"
_UNPENALISED = {
    **{name: f"lowers rewards, and {name} has none; use mask or drop" for name in DISTILLING},
    "max_rl": "lowers rewards, and max_rl divides by their mean, which has to stay a pass rate; use mask or drop",
}
_ROLLOUTS = Facts(aliases=("group_size",))
TrajectoryStrategy = Literal["branching", "interleaved"]
ZeroAdvantageFilter = Literal[True, False, "refill", "shrink"]
"""What happens to samples without an advantage; true means shrink."""
MAX_FAILURE_WINDOW = 4096
"""Most groups of a failure window: every batch header carries it, a few bytes a group."""


class EvalConfig(ConfigSection):
    """Evaluation before the first step, every `interval` steps and at the end."""

    env: list[PeriodicEvalEnvConfig] = table(
        list,
        "Environments to evaluate on. One without a name, with the id of a training environment and other `args`, is "
        "called `ID-eval`.",
        facts=Facts(follows="orchestrator.env", default_text="the training environments"),
    )
    num_examples: int = option(-1, "Tasks per environment; -1: all held-out ones.", ge=-1)
    rollouts_per_example: int = option(1, "Rollouts per task.", facts=_ROLLOUTS, ge=1)
    interval: int = option(100, "Steps between evaluations.", ge=1)
    skip_first_step: bool = option(False, "No evaluation before the first step.")
    pin: Literal["hold", "span"] = option(
        "hold",
        "hold: a replica keeps the evaluated version until the end; the trainer may wait for it. span: later "
        "versions answer, too.",
    )
    sampling: EvalSamplingConfig = table(EvalSamplingConfig, "How the policy is sampled.")


class OrchestratorModelConfig(ConfigSection):
    """The model whose policies are sampled."""

    name: str = option(DEFAULT_MODEL, "Equal to `model.name`.", facts=SHARED_MODEL, min_length=1)


class OrchestratorConfig(ConfigSection):
    """Which rollouts are played, and what becomes a batch."""

    model: OrchestratorModelConfig = table(OrchestratorModelConfig, "The model.")
    env: list[EnvConfig] = required("Training environments, at least one (`[[orchestrator.env]]`).", min_length=1)
    sampling: SamplingConfig = table(SamplingConfig, "How the policy is sampled.")
    algo: AlgoConfig = table(AlgoConfig, "How rollouts become advantages.")
    eval: EvalConfig | None = option(None, "Evaluation during the run; off if left out.")
    batch_size: int = option(128, "Rollouts per step, a multiple of `rollouts_per_example`.", ge=1)
    rollouts_per_example: int = option(1, "Rollouts per task, whose rewards are compared.", facts=_ROLLOUTS, ge=1)
    oversampling_factor: float = option(
        1.0, "Start this many times a batch's rollouts, and train on the first that finish.", ge=1
    )
    async_level: int = option(
        1,
        "Steps that sampling may run ahead of training; 0 alternates them.",
        facts=Facts(shared="async_level", aliases=("max_async_level",)),
        ge=0,
    )
    max_off_policy_steps: int = option(
        8,
        "Drop rollouts with a token sampled more versions ago.",
        facts=Facts(
            limit=Limit(
                "at least",
                "orchestrator.async_level",
                ": else rollouts that sampling ahead makes are dropped as stale; raise it, or lower `async_level`",
            )
        ),
        ge=0,
    )
    max_steps: int | None = option(
        None, "Batches to cut; unlimited if left out.", facts=Facts(shared="max_steps"), ge=1
    )
    seq_len: int = option(
        DEFAULT_SEQ_LEN,
        "Longest sample in tokens with its prompt; longer ones are cut.",
        facts=Facts(shared="seq_len"),
        ge=2,
    )
    seed: int = option(0, "Seed of the task order.", facts=Facts(shared="seed"), ge=0)
    trajectory_strategy: TrajectoryStrategy = option(
        "branching",
        "A rollout whose chat template rewrites earlier turns becomes several samples; interleaved warns of it.",
    )
    filter_zero_advantages: ZeroAdvantageFilter = option(
        True,
        "Samples without an advantage: shrink or true leaves them out, refill replaces groups of them before "
        "the cut, false trains on them.",
    )
    buffer: BufferConfig = table(BufferConfig, "Which tasks are drawn, by what their groups were worth.")
    filters: list[FilterConfig] = table(
        list, "Rollouts that are not trained on as they are (`[[orchestrator.filters]]`); none if left out."
    )
    advantage_timeout_s: float = option(
        1800.0,
        "Seconds until the run fails because advantages are not computed.",
        gt=0,
    )
    retain_batches: int | None = option(
        None,
        "Newest steps whose batches and rollouts are kept (docs/reliability.md); all if left out.",
        ge=1,
    )
    retain_policies: int | None = option(
        None,
        "Newest versions that are kept (docs/reliability.md); all if left out.",
        ge=1,
    )
    max_failed_share: float = option(
        0.9,
        "Share of failed rollouts in `failure_window` at which the run fails.",
        gt=0,
        le=1,
    )
    failure_window: int | None = option(
        None,
        "Groups over which they are counted; by default 64, or two steps' if more.",
        ge=1,
        le=MAX_FAILURE_WINDOW,
    )
    rollout_timeout_s: float = option(600.0, "Seconds until an unfinished rollout fails.", gt=0)

    def algo_of(self, env: EnvConfig) -> AdvantageConfig:
        """Return how an environment's rewards become advantages: its own table, else the run's."""
        return env.algo or self.algo

    def takes_several_traces(self, env: EnvConfig) -> bool:
        """Return whether several trained agents of a rollout of an environment get an advantage each."""
        return self.algo_of(env).type in PER_AGENT

    @property
    def baseline_decays(self) -> dict[str, float]:
        """Return the decay of agents' moving averages of rewards, by name of the environment.

        Environments that another algorithm than rae trains are left out.
        """
        return {env.name: self.algo_of(env).decay for env in self.env if self.algo_of(env).type == "rae"}

    @property
    def group_sizes(self) -> dict[str, int]:
        """Return the number of rollouts of one task, by name of the environment."""
        return {env.name: env.rollouts_per_example or self.rollouts_per_example for env in self.env}

    @property
    def groups_per_step(self) -> int:
        """Return the number of groups in a batch: `batch_size` divided by the group size.

        With groups of different sizes it is the least possible number: `batch_size` divided by the largest size,
        rounded up.
        """
        sizes = set(self.group_sizes.values())
        return self.batch_size // max(sizes) if len(sizes) == 1 else -(-self.batch_size // max(sizes))

    def sampling_of(self, env: EnvConfig) -> SamplingConfig:
        """Return the sampling of an environment's training rollouts.

        It is the run's, overridden by the environment's own keys.
        """
        return env.sampling.over(self.sampling)

    @property
    def demo_key(self) -> str:
        """Return the task's field whose text the teacher of opsd also reads; empty for other algorithms."""
        return self.algo.demo_key if self.algo.type == "opsd" else ""

    def selections(self) -> dict[str, str]:
        """Return the selection of tasks as JSON that env-servers take, by name of the training or evaluated
        environment.
        """
        evaluated = {} if self.eval is None else {env.name: env for env in self.eval.env}
        trained = {env.name: env for env in self.env}
        found: dict[str, str] = {}
        for name in {**trained, **evaluated}:
            env, other = trained.get(name), evaluated.get(name)
            found[name] = selection_json(
                train=env and env.select,
                evaluated=other and other.select,
                num_evaluated=(other and other.num_examples) or (self.eval.num_examples if self.eval else -1),
                trained=[each.select for each in self.env if other and (each.id, each.args) == (other.id, other.args)],
            )
        return found

    @model_validator(mode="before")
    @classmethod
    def _name_evaluated(cls, data: Any) -> Any:
        """Return the raw table of the section with the name `ID-eval` for evaluated environments that would have a
        wrong one.

        These have no name, and the id of a training environment with other args: by the id they would count as the
        same.
        """
        evaluation = data.get("eval") if isinstance(data, dict) else None
        envs = evaluation.get("env") if isinstance(evaluation, dict) else None
        trained = data.get("env") if isinstance(data, dict) else None
        if not isinstance(evaluation, dict) or not isinstance(envs, list) or not isinstance(trained, list):
            return data
        args = {env.get("name", env.get("id")): env.get("args", {}) for env in trained if isinstance(env, dict)}

        def named(env: Any) -> Any:
            """Return one evaluated environment's table, with the name `ID-eval` if it needs it."""
            is_bare = isinstance(env, dict) and env.get("name") is None and isinstance(env.get("id"), str)
            is_other = is_bare and env["id"] in args and args[env["id"]] != env.get("args", {})
            return {**env, "name": f"{env['id']}-eval"} if is_other else env

        return {**data, "eval": {**evaluation, "env": [named(env) for env in envs]}}

    def broken_rules(self) -> Iterator[BrokenRule]:
        """Yield rules over several keys of this section that do not hold."""
        yield from self._size_rules()
        yield from self._algo_rules()
        yield from self.buffer.broken_rules(num_envs=len(self.env))
        if self.distils and (self.buffer.online_difficulty_filtering or self.buffer.has_pools):
            key = "online_difficulty_filtering" if self.buffer.online_difficulty_filtering else "easy_threshold"
            message = (
                f"has no meaning for {self.algo.type}: it learns from every task, whatever its reward; leave it out"
            )
            yield broken(message, f"orchestrator.buffer.{key}", _ALGO)
        yield from sampling_rules(self.sampling, "orchestrator.sampling", is_training=True)
        yield from self._sampling_rules(self.sampling)
        for index, env in enumerate(self.env):
            # The run's keys with the environment's own over them are checked as a whole, and reported is only what
            # concerns its own keys: the rest was reported above.
            own = env.sampling.written
            rules = [*sampling_rules(self.sampling_of(env), _SAMPLING, is_training=True)] if own else []
            for rule in (*rules, *(self._sampling_rules(self.sampling_of(env)) if own else ())):
                if any(path[:3] in own for path in rule.paths):
                    there = ("orchestrator", "env", index)
                    paths = tuple((*there, *path[1:]) if path[:3] in own else path for path in rule.paths)
                    yield BrokenRule(paths=paths, message=rule.message)
        yield from env_names(self.env, ("orchestrator", "env"), reserved=(_ALL,))
        if self.eval:
            yield from sampling_rules(self.eval.sampling, "orchestrator.eval.sampling")
            yield from self._eval_rules(self.eval)

    @property
    def distils(self) -> bool:
        """Return whether a teacher scores what is trained on."""
        return self.algo.type in DISTILLING

    def _size_rules(self) -> Iterator[BrokenRule]:
        """Yield a violation if `batch_size` is no multiple of the group size, or below the largest of several sizes."""
        size, sizes = self.batch_size, self.group_sizes
        group, keys = max(sizes.values()), [_GROUP] if None in [env.rollouts_per_example for env in self.env] else []
        own = tuple(("orchestrator", "env", index, "rollouts_per_example") for index in self._own_sizes())
        paths = (("orchestrator", "batch_size"), *(tuple(key.split(".")) for key in keys), *own)
        if len(set(sizes.values())) > 1:
            if size < group:
                yield BrokenRule(paths=paths, message=f"must be at least the largest group, which is {group}; raise it")
        elif size % group:
            lower, upper = size // group * group, -(-size // group) * group
            near = f"{lower} or {upper}" if lower else f"{upper}"
            where = f"`{_GROUP}`" if keys else "`rollouts_per_example` of the environments"
            yield BrokenRule(paths=paths, message=f"must be a multiple of {where}, which is {group}; use {near}")

    def _own_sizes(self) -> list[int]:
        """Return the indices of the environments that have a group size of their own."""
        return [index for index, env in enumerate(self.env) if env.rollouts_per_example is not None]

    def _sampling_rules(self, sampling: SamplingConfig) -> Iterator[BrokenRule]:
        """Yield violations of sampling that the trainer cannot compute, and of a schedule of temperatures without an
        end.
        """
        yield from bias_rules(sampling, teacher_of=self.algo.type if self.distils else None)
        if self.distils:
            yield from teacher_sampling_rules(sampling, self.algo.type)
        schedule, where = sampling.temp_scheduler, "orchestrator.sampling.temp_scheduler"
        if schedule is None:
            return
        if schedule.total_steps is None and self.max_steps is None:
            message = "is required without `max_steps`: set it to the last step of the schedule"
            yield broken(message, f"{where}.total_steps")
        if sampling.temperature != 1.0:
            message = "has no effect beside `temp_scheduler`; leave it out"
            yield broken(message, "orchestrator.sampling.temperature", where)
        if self.distils:
            message = "the teacher's log-probabilities are those of temperature 1; leave it out"
            yield broken(f"has no meaning for {self.algo.type}: {message}", where, _ALGO)

    def _algo_rules(self) -> Iterator[BrokenRule]:
        """Yield violations of algorithm, filters and reward ranges, such as a missing teacher or groups of one."""
        if self.distils:
            yield from self._teacher_rules()
        else:
            yield from self._group_rules()
        if self.distils:
            for index, env in enumerate(self.env):
                if env.min_abs_advantage:
                    message = f"has no meaning for {self.algo.type}, which learns from every token; leave it out"
                    yield BrokenRule(paths=(("orchestrator", "env", index, "min_abs_advantage"),), message=message)
        yield from self.algo.broken_rules("orchestrator.algo")
        for index, each in enumerate(self.filters):
            for key, other, message in each.misplaced():
                paths = tuple(("orchestrator", "filters", index, name) for name in (key, other))
                yield BrokenRule(paths=paths, message=message)
            path: Path = ("orchestrator", "filters", index, "action")
            for named, algorithm in self._algorithms() if each.action == "penalise" else ():
                if message := _UNPENALISED.get(algorithm):
                    yield BrokenRule(paths=(path, named), message=message)
            if each.action == "penalise" and self.baseline_decays:
                message = "lowers rewards that are compared, and rae compares none; use mask or drop"
                yield BrokenRule(paths=(path, ("orchestrator", "algo", "type")), message=message)
        for index, env in enumerate(self.env):
            if not env.reward_range[0] < env.reward_range[1]:
                paths: tuple[Path, ...] = (("orchestrator", "env", index, "reward_range"),)
                yield BrokenRule(paths=paths, message="must be the lowest reward, and a higher one")
            if env.algo is None:
                continue
            yield from env.algo.broken_rules(f"orchestrator.env[{index}].algo")
            if self.distils:
                where: Path = ("orchestrator", "env", index, "algo")
                message = f"has no meaning for {self.algo.type}: it distils on every environment; leave it out"
                yield BrokenRule(paths=(where, ("orchestrator", "algo", "type")), message=message)

    def _algorithms(self) -> Iterator[tuple[Path, str]]:
        """Yield the path and the type of the run's algorithm and of those of single environments."""
        yield ("orchestrator", "algo", "type"), self.algo.type
        for index, env in enumerate(self.env):
            if env.algo is not None:
                yield ("orchestrator", "env", index, "algo", "type"), env.algo.type

    def _group_rules(self) -> Iterator[BrokenRule]:
        """Yield a violation for each algorithm that compares rewards of the same task and has groups of one."""
        reported: set[Path] = set()
        for index, env in enumerate(self.env):
            there: Path = ("orchestrator", "env", index)
            algorithm = self.algo_of(env).type
            path: Path = (*there, "algo", "type") if env.algo else ("orchestrator", "algo", "type")
            has_own = env.rollouts_per_example is not None
            size: Path = (*there, "rollouts_per_example") if has_own else tuple(_GROUP.split("."))
            is_compared = algorithm in (*COMPARING, "hierarchical_grpo")
            if is_compared and self.group_sizes[env.name] < 2 and (size + path) not in reported:
                reported.add(size + path)
                message = (
                    f"must be at least 2 for {algorithm}: it compares rollouts of the same task, so with one every "
                    "advantage is 0; set it to 8 or 16"
                )
                yield BrokenRule(paths=(size, path), message=message)

    def _teacher_rules(self) -> Iterator[BrokenRule]:
        """Yield violations of the teacher's table, or one if opd has no teacher."""
        teacher = "orchestrator.algo.teacher"
        if self.algo.teacher is not None:
            yield from self.algo.teacher.broken_rules(teacher)
        elif self.algo.type == "opd":
            message = (
                "is required for opd: name the model and the base_url of the server that scores the policy's tokens"
            )
            yield broken(message, teacher, _ALGO)

    def _own_eval_sampling_rules(
        self, index: int, env: PeriodicEvalEnvConfig, evaluation: EvalConfig
    ) -> Iterator[BrokenRule]:
        """Yield violations in the sampling of the evaluated environment `env`, the `index`-th, combined with that of
        all.
        """
        where: Path = ("orchestrator", "eval", "env", index, "sampling")
        yield from env.sampling.broken_rules(evaluation.sampling, where)
        if env.sampling.max_tokens is not None and env.sampling.max_tokens >= self.seq_len:
            message = f"must be below `orchestrator.seq_len`, which is {self.seq_len}, and counts the prompt too"
            yield BrokenRule(paths=((*where, "max_tokens"), ("orchestrator", "seq_len")), message=message)

    def _eval_rules(self, evaluation: EvalConfig) -> Iterator[BrokenRule]:
        """Yield violations of `[orchestrator.eval]`: counts of 0, sampling, names, and environments unlike training's.

        An evaluated environment with the name of a training environment must have the same id, args and place.
        """
        if evaluation.num_examples == 0:
            yield broken(
                "must be -1 for all held-out tasks, or at least 1; leave out [orchestrator.eval] for no evaluation",
                "orchestrator.eval.num_examples",
            )
        for index, env in enumerate(evaluation.env):
            if env.num_examples == 0:
                message = "must be -1 for all held-out tasks, or at least 1; leave the environment out otherwise"
                yield BrokenRule(paths=(("orchestrator", "eval", "env", index, "num_examples"),), message=message)
            yield from self._own_eval_sampling_rules(index, env, evaluation)
        names = [env.name for env in self.env]
        if [env.name for env in evaluation.env] != names:
            yield from env_names(evaluation.env, ("orchestrator", "eval", "env"), reserved=(_ALL,))
        known = {env.name: (index, env) for index, env in enumerate(self.env) if names.count(env.name) == 1}
        for index, env in enumerate(evaluation.env):
            first, trained = known.get(env.name, (0, env))
            for key in ("id", "args", "judge", "python", "image"):
                if getattr(env, key) != getattr(trained, key):
                    yield BrokenRule(
                        paths=(("orchestrator", "eval", "env", index, key), ("orchestrator", "env", first, key)),
                        message=f"must be equal to `orchestrator.env[{first}].{key}`, because both environments are "
                        f"called `{env.name}`; leave [[orchestrator.eval.env]] out, or give this one another `name`",
                    )
