"""Rules over several keys: values that are right alone and wrong together.

A rule yields findings, and a finding names every key that it looked at, so that a caller which already reported one of
those keys can leave the finding out.
"""

from collections.abc import Iterable, Iterator

from millrace.config.inference import InferenceConfig, engine_rules
from millrace.config.orchestrator import EnvConfig, EvalEnvConfig, OrchestratorConfig
from millrace.config.paths import Path, dotted
from millrace.config.rules_base import Finding
from millrace.config.trainer import OptimConfig, SchedulerConfig, TrainerConfig

RESERVED_ENV_NAME = "all"


def _at(dotted: str) -> Path:
    return tuple(dotted.split("."))


def _finding(message: str, *dotted: str) -> Finding:
    return Finding(paths=tuple(_at(path) for path in dotted), message=message)


def rl_rules(*, trainer: TrainerConfig, orchestrator: OrchestratorConfig, inference: InferenceConfig) -> list[Finding]:
    """Every broken rule of an RL config whose shared keys are filled."""
    return [
        *_batch_rules(orchestrator),
        *_teacher_rules(orchestrator),
        *_length_rules(trainer, orchestrator, inference),
        *_env_rules(orchestrator),
        *engine_rules(inference),
        *schedule_rules(trainer.scheduler, trainer.optim, trainer.max_steps, prefix="trainer."),
    ]


def sft_rules(
    *, scheduler: SchedulerConfig, optim: OptimConfig, max_steps: int | None, seq_len: int, micro_batch_tokens: int
) -> list[Finding]:
    """Every broken rule of an SFT config."""
    findings = list(schedule_rules(scheduler, optim, max_steps, prefix=""))
    if micro_batch_tokens < seq_len:
        message = f"must hold one whole sample, but `data.seq_len` is {seq_len}; raise it to at least {seq_len}"
        findings.append(_finding(message, "micro_batch_tokens", "data.seq_len"))
    return findings


def _batch_rules(config: OrchestratorConfig) -> Iterator[Finding]:
    """Whole groups per batch, groups that can have an advantage, staleness that the schedule can meet."""
    size, group = config.batch_size, config.rollouts_per_example
    if size % group:
        lower, upper = size // group * group, -(-size // group) * group
        near = f"{lower} or {upper}" if lower else f"{upper}"
        yield _finding(
            f"must be a multiple of `orchestrator.rollouts_per_example`, which is {group}; use {near}",
            "orchestrator.batch_size",
            "orchestrator.rollouts_per_example",
        )
    if config.algo.type == "grpo" and group < 2:
        yield _finding(
            "must be at least 2 for grpo: it compares rollouts of the same task, so with one every advantage is 0; "
            "set it to 8 or 16",
            "orchestrator.rollouts_per_example",
            "orchestrator.algo.type",
        )
    if config.max_off_policy_steps < config.async_level:
        yield _finding(
            f"must be at least `orchestrator.async_level`, which is {config.async_level}: else rollouts that sampling "
            f"ahead makes are dropped as stale; raise it, or lower `async_level`",
            "orchestrator.max_off_policy_steps",
            "orchestrator.async_level",
        )


def _teacher_rules(config: OrchestratorConfig) -> Iterator[Finding]:
    """A teacher where one is needed, and a policy whose log-probs mean the same as the teacher's."""
    algo = config.algo
    if algo.type != "opd":
        if algo.teacher is not None:
            yield _finding(
                f"has no meaning for {algo.type}; leave it out, or use opd",
                "orchestrator.algo.teacher",
                "orchestrator.algo.type",
            )
        return
    if algo.teacher is None:
        message = "is required for opd: name the model and the base_url of the server that scores the policy's tokens"
        yield _finding(message, "orchestrator.algo.teacher", "orchestrator.algo.type")
    else:
        yield from algo.teacher.broken_rules("orchestrator", "algo", "teacher")
    if config.sampling.temperature != 1.0:
        yield _finding(
            "must be 1.0 for opd: the teacher's log-probabilities are those of temperature 1, and the two would be of "
            "different distributions",
            "orchestrator.sampling.temperature",
            "orchestrator.algo.type",
        )


def _length_rules(
    trainer: TrainerConfig, orchestrator: OrchestratorConfig, inference: InferenceConfig
) -> Iterator[Finding]:
    """Room for a completion in a rollout, for a rollout in the engine and in the trainer."""
    longest = orchestrator.seq_len
    samplings = [("orchestrator.sampling.max_tokens", orchestrator.sampling.max_tokens)]
    if orchestrator.eval and orchestrator.eval.sampling.max_tokens != orchestrator.sampling.max_tokens:
        samplings.append(("orchestrator.eval.sampling.max_tokens", orchestrator.eval.sampling.max_tokens))
    for path, max_tokens in samplings:
        if max_tokens is not None and max_tokens >= longest:
            yield _finding(
                f"must be below `orchestrator.seq_len`, which is {longest} and counts the prompt too; lower it, or "
                "raise `seq_len`",
                path,
                "orchestrator.seq_len",
            )
    if trainer.model.seq_len < longest:
        yield _finding(
            f"must be at least `orchestrator.seq_len`, which is {longest}: the trainer has to take every rollout; set "
            "`seq_len` at the top for both",
            "trainer.model.seq_len",
            "orchestrator.seq_len",
        )
    if inference.model.max_model_len is not None and inference.model.max_model_len < longest:
        yield _finding(
            f"must be at least `orchestrator.seq_len`, which is {longest}; raise it or leave it out",
            "inference.model.max_model_len",
            "orchestrator.seq_len",
        )
    if trainer.micro_batch_tokens < trainer.model.seq_len:
        yield _finding(
            f"must hold one whole sample, but `trainer.model.seq_len` is {trainer.model.seq_len}; raise it to at least "
            f"{trainer.model.seq_len}",
            "trainer.micro_batch_tokens",
            "trainer.model.seq_len",
        )


def _env_rules(config: OrchestratorConfig) -> Iterator[Finding]:
    """Names that metrics can tell apart, and a task count that means something."""
    lists: list[tuple[Path, Iterable[EnvConfig | EvalEnvConfig]]] = [(("orchestrator", "env"), config.env)]
    if config.eval:
        if [env.name for env in config.eval.env] != [env.name for env in config.env]:
            lists.append((("orchestrator", "eval", "env"), config.eval.env))
        if config.eval.num_examples == 0:
            yield _finding(
                "must be -1 for all held-out tasks, or at least 1; leave out [orchestrator.eval] for no evaluation",
                "orchestrator.eval.num_examples",
            )
        yield from _eval_env_rules(config.env, config.eval.env)
    for path, envs in lists:
        seen: dict[str, int] = {}
        for index, env in enumerate(envs):
            where: Path = (*path, index, "name")
            if env.name == RESERVED_ENV_NAME:
                yield Finding(paths=(where,), message="must not be `all`: metrics over all environments are called so")
            elif env.name in seen:
                yield Finding(
                    paths=(where, (*path, seen[env.name], "name")),
                    message=f"must be unique, but `{dotted((*path, seen[env.name]))}` is called `{env.name}` too; "
                    "give one of them another `name`",
                )
            seen.setdefault(env.name, index)


def _eval_env_rules(training: list[EnvConfig], evaluation: list[EvalEnvConfig]) -> Iterator[Finding]:
    """One name is one environment: a run loads what training says, and other arguments here would mean nothing."""
    names = [env.name for env in training]
    known = {env.name: (index, env) for index, env in enumerate(training) if names.count(env.name) == 1}
    for index, env in enumerate(evaluation):
        first, trained = known.get(env.name, (0, env))
        for key in ("id", "args"):
            if getattr(env, key) != getattr(trained, key):
                yield Finding(
                    paths=(("orchestrator", "eval", "env", index, key), ("orchestrator", "env", first, key)),
                    message=f"must be equal to `orchestrator.env[{first}].{key}`, because both environments are called "
                    f"`{env.name}`; leave [[orchestrator.eval.env]] out, or give this one another `name`",
                )


def schedule_rules(
    scheduler: SchedulerConfig, optim: OptimConfig, max_steps: int | None, *, prefix: str
) -> Iterator[Finding]:
    """A schedule that fits into the run and whose keys mean something for its type."""
    kind, key = scheduler.type, f"{prefix}scheduler"
    if kind != "constant" and max_steps is None:
        yield _finding(
            f"{kind} needs `max_steps` to know where to end; set `max_steps`, or use constant",
            f"{key}.type",
            f"{prefix}max_steps",
        )
    ramps = scheduler.warmup_steps + scheduler.decay_steps
    if kind != "constant" and max_steps is not None and ramps > max_steps:
        yield _finding(
            f"warm-up ({scheduler.warmup_steps}) and decay ({scheduler.decay_steps}) take {ramps} steps, more than "
            f"`max_steps`, which is {max_steps}; shorten them",
            f"{key}.warmup_steps",
            f"{key}.decay_steps",
            f"{prefix}max_steps",
        )
    if kind == "linear" and scheduler.decay_steps < 1:
        yield _finding("must be at least 1 for linear; for no decay use constant", f"{key}.decay_steps", f"{key}.type")
    if kind != "linear" and scheduler.decay_steps:
        yield _finding(f"has no meaning for {kind}; leave it out, or use linear", f"{key}.decay_steps", f"{key}.type")
    if kind == "constant" and scheduler.min_lr:
        yield _finding(
            "has no meaning for constant; leave it out, or use linear or cosine", f"{key}.min_lr", f"{key}.type"
        )
    elif scheduler.min_lr > optim.lr:
        yield _finding(
            f"must be at most the peak `{prefix}optim.lr`, which is {optim.lr}", f"{key}.min_lr", f"{prefix}optim.lr"
        )
