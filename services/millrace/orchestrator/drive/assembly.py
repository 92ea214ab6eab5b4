"""The parts of one run's driver, and how they are wired."""

import math
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass

from millrace.algorithms import Algorithm, Baselines
from millrace.config import EvalRunConfig, RLConfig
from millrace.config.sections.algo import DISTILLING
from millrace.config.sections.environments import EnvConfig
from millrace.config.sections.orchestrator import MAX_FAILURE_WINDOW
from millrace.errors import InvalidStateError
from millrace.orchestrator.drive.batch_writer import BatchWriter
from millrace.orchestrator.drive.damage import DamageBook
from millrace.orchestrator.drive.device_turns import DeviceTurns
from millrace.orchestrator.drive.fixed_model import FixedEndpoints, NoTrainer
from millrace.orchestrator.drive.loop import RolloutLoop
from millrace.orchestrator.drive.policy_driver import PolicyDriver
from millrace.orchestrator.drive.trainer_watch import Trainer, TrainerWatch
from millrace.orchestrator.play.admission import AdmissionRule
from millrace.orchestrator.play.book import Book
from millrace.orchestrator.play.buffer import TaskBuffer
from millrace.orchestrator.play.env_servers import EnvServers, OpenedEnv, env_spec
from millrace.orchestrator.play.evals import Evaluation, Evaluator
from millrace.orchestrator.play.failures import Failures
from millrace.orchestrator.play.intake import Intake
from millrace.orchestrator.play.play import Play, load_of
from millrace.orchestrator.play.player import Player, RunIdentity
from millrace.orchestrator.play.rollout_stream import RolloutStream
from millrace.orchestrator.play.routing import Policies, Router
from millrace.orchestrator.play.sampler import Sampler
from millrace.orchestrator.play.settings import of_run, of_training, plays_of_training
from millrace.orchestrator.play.tasks import TaskSource
from millrace.orchestrator.run_context import RunContext
from millrace.rollouts.requests import EnvSpec, Sampling
from millrace.rollouts.types import Rollout

_MIN_FAILURE_WINDOW = 64
"""Fewest groups that say whether a run can learn, unless its config names another number."""
NO_SAMPLES = 1
"""Length to which the samples of a run without samples are cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunParts:
    """Everything that works on one run under one epoch."""

    context: RunContext
    training: RLConfig | None
    """None where nothing is trained."""
    trainer: Trainer
    envs: EnvServers
    policies: Policies
    book: Book
    failures: Failures
    intake: Intake
    stream: RolloutStream
    player: Player
    evals: Evaluator
    writer: BatchWriter
    damage: DamageBook
    turns: DeviceTurns | None
    """None where trainer and replicas have devices of their own."""
    specs: list[EnvSpec]
    """Environments to train on, then those that are only evaluated."""

    @property
    def max_steps(self) -> float:
        """Steps of the run; infinite if it has no end."""
        given = None if self.training is None else self.training.max_steps
        return math.inf if given is None else given


def assemble(context: RunContext, config: RLConfig | EvalRunConfig, *, reported_evals: Container[str] = ()) -> RunParts:
    """Make the parts of a run's driver; nothing of them works yet.

    `reported_evals` are the ids of the evaluations that the log has reports of.
    """
    run_log, uid, epoch, events = context.log, context.record.uid, context.epoch.number, context.events
    failures, router = _failures(config), Router()

    def count(rollout: Rollout) -> None:
        events.meters.rollout(rollout)
        failures.note(rollout)

    book = Book(count=count, on_resolved=failures.resolve)
    envs = EnvServers(run_uid=uid, epoch=epoch, registry=context.registry, trained=trained_envs(config))
    policies: Policies
    trainer: Trainer
    if isinstance(config, EvalRunConfig):
        training, evaluation, is_scored = None, of_run(config), False
        urls = [] if config.client is None else config.client.base_url
        policies = FixedEndpoints(urls, model=config.model.name, max_concurrent=config.max_concurrent)
        trainer = NoTrainer()
    else:
        training, evaluation = config, of_training(config.orchestrator)
        is_scored = config.orchestrator.algo.type in DISTILLING
        policies = PolicyDriver(
            run_uid=uid,
            epoch=epoch,
            registry=context.registry,
            events=events,
            on_change=book.changed.set,
            is_due=lambda version: evals.may_be_due(version, before=config.max_steps),
        )
        trainer = TrainerWatch(run_uid=uid, registry=context.registry)
    damage = DamageBook(run_log, events, run=context.record.name)
    evaluations: dict[str, Evaluation] = {}
    intake = Intake(
        book=book,
        evaluations=evaluations,
        policies=policies,
        reported=reported_evals,
        keeps_evaluated=training is not None,  # a run that is nothing but an evaluation keeps the best of each place
    )
    stream = RolloutStream(run_log, take=intake.take, is_scored=is_scored, on_damaged=damage.note)
    identity = RunIdentity(uid=uid, epoch=epoch, generation=run_log.generation)
    player = Player(run=identity, envs=envs, policies=policies, stream=stream, router=router)
    evals = Evaluator(settings=evaluation, epoch=epoch, envs=envs, player=player, evaluations=evaluations)
    turns = None
    if training is not None and training.inference.sleep_while_training:
        turns = DeviceTurns(run_uid=uid, epoch=epoch, registry=context.registry, is_evaluating=lambda: evals.is_playing)
    router.count(lambda: load_of(book.plays.values()))
    router.count(evals.load)
    return RunParts(
        context=context,
        training=training,
        trainer=trainer,
        envs=envs,
        policies=policies,
        book=book,
        failures=failures,
        intake=intake,
        stream=stream,
        player=player,
        evals=evals,
        writer=_writer(context, training, book=book, envs=envs, stream=stream, failures=failures),
        damage=damage,
        turns=turns,
        specs=env_specs(config),
    )


def trained_envs(config: RLConfig | EvalRunConfig) -> dict[str, Sampling]:
    """Return how the environments that are trained on are sampled, by name."""
    if isinstance(config, EvalRunConfig):
        return {}
    settings = config.orchestrator
    return {env.name: plays_of_training(settings, env).sampling for env in settings.env}


def task_sources(parts: RunParts, config: RLConfig) -> list[TaskSource]:
    """The training tasks of a run whose environments are open. InvalidStateError if one has none."""
    return [_source(env, parts.envs.envs[env.name]) for env in config.orchestrator.env]


def make_loop(
    parts: RunParts,
    config: RLConfig,
    *,
    algorithms: Mapping[str, Algorithm],
    sampler: Sampler | None,
    is_stopping: Callable[[], bool],
) -> RolloutLoop:
    """The loop of a run whose environments are open, with the algorithm of each."""
    settings, opened, sources = config.orchestrator, parts.envs.envs, task_sources(parts, config)
    writer = parts.writer
    writer.opened({source.env: source.digest for source in sources})
    buffer = TaskBuffer(sources, settings.buffer, seed=settings.seed, pools=lambda: writer.pools, sampler=sampler)
    if settings.buffer.has_pools:
        writer.pool_sizes = buffer.sizes
    rule = _rule(config)
    plays = {env.name: plays_of_training(settings, env) for env in settings.env}
    sizes = settings.group_sizes

    def make_play(ordinal: int, planned_step: int) -> Play:
        task = buffer.task(ordinal)
        return Play(
            task=task,
            group_size=sizes[task.env],
            settings=plays[task.env],
            planned_step=planned_step,
            min_version=rule.min_version(planned_step=planned_step),
            is_scored_whole=opened[task.env].requires_group,
            is_drawn_by_pools=settings.buffer.changes_draws,
        )

    return RolloutLoop(
        max_steps=parts.max_steps,
        rule=rule,
        make_play=make_play,
        is_exhausted=buffer.is_exhausted,
        book=parts.book,
        failures=parts.failures,
        player=parts.player,
        policies=parts.policies,
        writer=parts.writer,
        events=parts.context.events,
        algorithms=algorithms,
        settings=settings,
        timeout_s=max(each.timeout_s for each in plays.values()),
        is_stopping=is_stopping,
    )


def require_tasks(env: EnvConfig, opened: OpenedEnv) -> None:
    """InvalidStateError if an environment to train on has nothing to train on."""
    if not opened.num_train:
        raise InvalidStateError(
            f"environment {env.name!r} (id {env.id!r}) has no training tasks, and {opened.num_eval} held-out ones",
            reason="ENV_WITHOUT_TASKS",
            remedy="see what its args select (orchestrator.env.args); if it is there to evaluate, name it under "
            "orchestrator.eval.env alone",
            metadata={"env": env.name},
        )


def _source(env: EnvConfig, opened: OpenedEnv) -> TaskSource:
    require_tasks(env, opened)
    return TaskSource(env=env.name, num_tasks=opened.num_train, digest=opened.train_digest, weight=env.weight)


def _writer(
    context: RunContext,
    training: RLConfig | None,
    *,
    book: Book,
    envs: EnvServers,
    stream: RolloutStream,
    failures: Failures,
) -> BatchWriter:
    if training is None:
        return BatchWriter(context, book=book, envs=envs, stream=stream, failures=failures, seq_len=NO_SAMPLES)
    settings = training.orchestrator
    return BatchWriter(
        context,
        book=book,
        envs=envs,
        stream=stream,
        failures=failures,
        seq_len=settings.seq_len,
        buffer=settings.buffer,
        baselines=Baselines(decays=settings.baseline_decays),
    )


def _rule(config: RLConfig) -> AdmissionRule:
    settings = config.orchestrator
    return AdmissionRule(
        rollouts_per_step=settings.batch_size,
        async_level=settings.async_level,
        max_off_policy_steps=settings.max_off_policy_steps,
        oversampling_factor=settings.oversampling_factor,
        max_steps=config.max_steps,
    )


def _failures(config: RLConfig | EvalRunConfig) -> Failures:
    """What counts the rollouts that fail; an evaluation counts its own."""
    if isinstance(config, EvalRunConfig):
        return Failures(num_groups=1, group_sizes={}, max_share=1.0)
    settings = config.orchestrator
    return Failures(
        num_groups=settings.failure_window or failure_window_of(settings.groups_per_step),
        group_sizes=settings.group_sizes,
        max_share=settings.max_failed_share,
    )


def env_specs(config: RLConfig | EvalRunConfig) -> list[EnvSpec]:
    """Environments to train on, then those that are only evaluated."""
    settings = config if isinstance(config, EvalRunConfig) else config.orchestrator
    selected = settings.selections()
    if isinstance(settings, EvalRunConfig):
        envs, several, is_text_only = [*settings.env], dict.fromkeys(selected, True), settings.client is None
    else:
        several = {env.name: settings.takes_several_traces(env) for env in settings.env}
        evaluated = [] if settings.eval is None else settings.eval.env
        envs, is_text_only = [*settings.env, *(env for env in evaluated if env.name not in several)], True
    return [
        env_spec(
            env,
            takes_several_traces=several.get(env.name, True),
            is_text_only=is_text_only,
            select_json=selected[env.name],
        )
        for env in envs
    ]


def failure_window_of(groups_per_step: int) -> int:
    """Groups over which failed rollouts are counted where the config names no number."""
    return max(min(2 * groups_per_step, MAX_FAILURE_WINDOW), _MIN_FAILURE_WINDOW)
