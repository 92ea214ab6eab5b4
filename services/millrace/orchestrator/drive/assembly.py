"""The parts of one run's driver, and how they are wired."""

import asyncio
import logging
import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass

from millrace.algorithms import Algorithm, Baselines
from millrace.config import EvalRunConfig, RLConfig
from millrace.config.sections.algo import DISTILLING
from millrace.config.sections.environments import EnvConfig
from millrace.config.sections.orchestrator import MAX_FAILURE_WINDOW
from millrace.errors import InvalidStateError
from millrace.internal.v1 import policy_pb2
from millrace.internal.v1.play_pb2 import EnvSpec, Sampling
from millrace.orchestrator.drive.batch_writer import BatchWriter
from millrace.orchestrator.drive.loop import RolloutLoop
from millrace.orchestrator.drive.policy_driver import PolicyDriver
from millrace.orchestrator.drive.trainer_watch import DeviceTurns, Trainer, TrainerWatch
from millrace.orchestrator.events import RunContext, RunEvents
from millrace.orchestrator.play.book import Book, RolloutStream
from millrace.orchestrator.play.env_servers import EnvServers, OpenedEnv, env_spec
from millrace.orchestrator.play.evals import Evaluation, Evaluator
from millrace.orchestrator.play.failures import Failures
from millrace.orchestrator.play.intake import ExpertsCheck, Intake
from millrace.orchestrator.play.play import Play, load_of
from millrace.orchestrator.play.player import Player, RunIdentity
from millrace.orchestrator.play.pools import TaskBuffer
from millrace.orchestrator.play.routing import AdmissionRule, Policies, ReadyReplica, Router
from millrace.orchestrator.play.settings import of_run, of_training, plays_of_training
from millrace.orchestrator.play.tasks import Sampler, TaskSource
from millrace.orchestrator.run_meters import entries_damaged
from millrace.rollouts.types import Rollout
from millrace.runlog import Entry, RunLog, Stream

_MIN_FAILURE_WINDOW = 64
"""Fewest groups that say whether a run can learn, unless its config names another number."""
NO_SAMPLES = 1
"""Length to which the samples of a run without samples are cut."""


# Damaged and foreign entries of a run's rollouts and events: counted, reported in an event, and removed from Redis.
#
# They are skipped where they are met. Nothing is lost with them but what they pretend to be: a rollout is appended
# again by its env-server, from its spool, or played again; an event that cannot be read is in no archive.

logger = logging.getLogger(__name__)

MAX_NAMED = 5
"""Entries that one event names."""


class SkippedEntries:
    """The damaged and foreign entries of a run's log that this drive of it skipped."""

    def __init__(self, run_log: RunLog, events: RunEvents, *, run: str) -> None:
        """Make an empty collection; `run` is the run's name."""
        self._log = run_log
        self._events = events
        self._run = run
        self._met: dict[tuple[Stream, str], str] = {}
        self.num_rollouts = 0
        """Damaged entries of the rollouts that were removed: env-servers append what is missing now."""

    def note(self, stream: Stream, entry: Entry) -> None:
        """Keep a damaged entry that was skipped in `stream` for the next `report`; the same entry counts once."""
        self._met.setdefault((stream, entry.id), entry.damage)

    async def report(self) -> bool:
        """Write an event for each stream that had entries noted since the last call, and remove these from Redis.

        Return whether there were any. Removed entries of the rollouts are added to `num_rollouts`: env-servers have to
        append what is missing then.
        """
        # Taken out before the awaits: what is met during them is for the next report.
        met, self._met = self._met, {}
        for stream in Stream:
            found = {id_: cause for (of, id_), cause in met.items() if of is stream}
            if found:
                entries_damaged(self._run, stream, len(found))
                logger.error(
                    "entries of the log are damaged and were skipped",
                    extra={"run": self._run, "stream": stream.value, "count": len(found)},
                )
                await self._events.warning("ENTRY_DAMAGED", _text(stream, found))
                # Else every reader that begins at the first entry would meet, and report, the same damage again.
                await self._log.remove_entries(stream, list(found))
                self.num_rollouts += len(found) if stream is Stream.ROLLOUTS else 0
        return bool(met)


def _text(stream: Stream, found: dict[str, str]) -> str:
    """Return the text of the warning that damaged entries of a stream were skipped and removed.

    `found` has by entry id what is wrong with it; the first `MAX_NAMED` entries are named.
    """
    named = "; ".join(f"{id_}: {cause}" for id_, cause in list(found.items())[:MAX_NAMED])
    more = f"; and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
    costs = {
        Stream.ROLLOUTS: "its env-server appends the rollout again, or it is played again",
        Stream.EVENTS: "it is in no archive",
    }[stream]
    return (
        f"redis: stream {stream} had {len(found)} damaged or foreign entries, which were skipped and removed "
        f"({named}{more}); {costs}; find out who else writes to this Redis"
    )


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
    damage: SkippedEntries
    turns: DeviceTurns | None
    """None where trainer and replicas have devices of their own."""
    specs: list[EnvSpec]
    """Environments to train on, then those that are only evaluated."""

    @property
    def max_steps(self) -> float:
        """Return the number of steps of the run; infinite if it has no end, or does not train."""
        given = None if self.training is None else self.training.max_steps
        return math.inf if given is None else given


def assemble(context: RunContext, config: RLConfig | EvalRunConfig, *, reported_evals: Container[str] = ()) -> RunParts:
    """Make and return the parts of a run's driver, connected to each other; none of them works yet.

    `reported_evals` are the ids of the evaluations that the log has reports of.
    """
    run_log, uid, epoch, events = context.log, context.record.uid, context.epoch.number, context.events
    failures, router = _failures(config), Router()

    def count(rollout: Rollout) -> None:
        """Count a rollout that is no duplicate, for Prometheus and for the failures of the run."""
        events.meters.rollout(rollout)
        failures.note(rollout)

    book = Book(count=count, on_resolved=failures.resolve)
    envs = EnvServers(run_uid=uid, epoch=epoch, registry=context.registry, trained=trained_envs(config))
    policies: Policies
    trainer: Trainer
    experts: ExpertsCheck | None = None
    if isinstance(config, EvalRunConfig):
        training, evaluation, is_scored = None, of_run(config), False
        urls = [] if config.client is None else config.client.base_url
        policies = FixedEndpoints(urls, model=config.model.name, max_concurrent=config.max_concurrent)
        trainer = NoTrainer()
    else:
        training, evaluation = config, of_training(config.orchestrator)
        is_scored = config.orchestrator.algo.type in DISTILLING
        policies = driver = PolicyDriver(
            run_uid=uid,
            epoch=epoch,
            registry=context.registry,
            events=events,
            on_change=book.changed.set,
            # `evals` is made below; nobody asks before the drive begins.
            is_due=lambda version: evals.may_be_due(version, before=config.max_steps),
        )
        experts = ExpertsCheck(lambda: driver.routed)
        trainer = TrainerWatch(run_uid=uid, registry=context.registry)
    damage = SkippedEntries(run_log, events, run=context.record.name)
    evaluations: dict[str, Evaluation] = {}
    intake = Intake(
        book=book,
        evaluations=evaluations,
        policies=policies,
        reported=reported_evals,
        # A run that is nothing but an evaluation keeps the best rollout of each place by itself, at its end.
        keeps_evaluated=training is not None,
        experts=experts,
    )
    stream = RolloutStream(
        run_log, take=intake.take, prepare=intake.prepare, is_scored=is_scored, on_damaged=damage.note
    )
    identity = RunIdentity(uid=uid, epoch=epoch, generation=run_log.generation)
    player = Player(run=identity, envs=envs, policies=policies, stream=stream, router=router)
    evals = Evaluator(settings=evaluation, epoch=epoch, envs=envs, player=player, evaluations=evaluations)
    turns = None
    if training is not None and training.inference.sleep_while_training:
        turns = DeviceTurns(run_uid=uid, epoch=epoch, registry=context.registry, is_evaluating=lambda: evals.is_playing)
    # Training and evaluation share the replicas, so that each has to see the load of both.
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
    """Return by name how each environment that is trained on is sampled; empty for an evaluation run."""
    if isinstance(config, EvalRunConfig):
        return {}
    settings = config.orchestrator
    return {env.name: plays_of_training(settings, env).sampling for env in settings.env}


def task_sources(parts: RunParts, config: RLConfig) -> list[TaskSource]:
    """Return for each environment to train on, all of which are open, its number of tasks, their digest and its weight.

    Raises InvalidStateError if one has no training tasks.
    """
    return [_source(env, parts.envs.envs[env.name]) for env in config.orchestrator.env]


def make_loop(
    parts: RunParts,
    config: RLConfig,
    *,
    algorithms: Mapping[str, Algorithm],
    sampler: Sampler | None,
    is_stopping: Callable[[], bool],
) -> RolloutLoop:
    """Make and return the loop of a training run, whose environments are open.

    `algorithms` are by name of the environment; `sampler` is the user's function that draws tasks, None for none;
    `is_stopping` says whether the run was asked to pause or end. The writer drops pools of other task sets than those
    that are open. Raises InvalidStateError if an environment has no tasks.
    """
    settings, opened, sources = config.orchestrator, parts.envs.envs, task_sources(parts, config)
    writer = parts.writer
    # Before the buffer draws from the pools, among which may be those of other task sets.
    writer.opened({source.env: source.digest for source in sources})
    buffer = TaskBuffer(sources, settings.buffer, seed=settings.seed, pools=lambda: writer.pools, sampler=sampler)
    if settings.buffer.has_pools:
        writer.pool_sizes = buffer.sizes
    rule = _rule(config)
    plays = {env.name: plays_of_training(settings, env) for env in settings.env}
    sizes = settings.group_sizes

    def make_play(ordinal: int, planned_step: int) -> Play:
        """Return an unplaced play of the task that an ordinal draws, for the step that it is planned for."""
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
        draw=buffer.choose,
        is_exhausted=buffer.is_exhausted,
        book=parts.book,
        failures=parts.failures,
        player=parts.player,
        policies=parts.policies,
        writer=parts.writer,
        events=parts.context.events,
        full_spool=lambda: parts.envs.full_spool,
        experts=parts.intake.experts,
        algorithms=algorithms,
        settings=settings,
        timeout_s=max(each.timeout_s for each in plays.values()),
        is_stopping=is_stopping,
    )


def require_tasks(env: EnvConfig, opened: OpenedEnv) -> None:
    """Raise InvalidStateError if an environment to train on has no training tasks.

    `opened` is what an env-server has of it.
    """
    if not opened.num_train:
        raise InvalidStateError(
            f"environment {env.name!r} (id {env.id!r}) has no training tasks, and {opened.num_eval} held-out ones",
            reason="ENV_WITHOUT_TASKS",
            remedy="see what its args select (orchestrator.env.args); if it is there to evaluate, name it under "
            "orchestrator.eval.env alone",
            metadata={"env": env.name},
        )


def _source(env: EnvConfig, opened: OpenedEnv) -> TaskSource:
    """Return an open environment as the task order needs it; raise InvalidStateError if it has no training tasks."""
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
    """Return the writer of the run's headers; `training` is None for a run that trains nothing."""
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
    """Return the admission rule of a training run, by its config."""
    settings = config.orchestrator
    return AdmissionRule(
        rollouts_per_step=settings.batch_size,
        async_level=settings.async_level,
        max_off_policy_steps=settings.max_off_policy_steps,
        oversampling_factor=settings.oversampling_factor,
        max_steps=config.max_steps,
    )


def _failures(config: RLConfig | EvalRunConfig) -> Failures:
    """Return the counter of failed rollouts; that of an evaluation run never fails the run."""
    if isinstance(config, EvalRunConfig):
        return Failures(num_groups=1, group_sizes={}, max_share=1.0)
    settings = config.orchestrator
    return Failures(
        num_groups=settings.failure_window or failure_window_of(settings.groups_per_step),
        group_sizes=settings.group_sizes,
        max_share=settings.max_failed_share,
    )


def env_specs(config: RLConfig | EvalRunConfig) -> list[EnvSpec]:
    """Return the messages by which env-servers load the run's environments: those to train on, then those only
    evaluated.
    """
    settings = config if isinstance(config, EvalRunConfig) else config.orchestrator
    selected = settings.selections()
    demo_key = ""
    if isinstance(settings, EvalRunConfig):
        envs, several, is_text_only = [*settings.env], dict.fromkeys(selected, True), settings.client is None
    else:
        several = {env.name: settings.takes_several_traces(env) for env in settings.env}
        demo_key = settings.demo_key
        evaluated = [] if settings.eval is None else settings.eval.env
        envs, is_text_only = [*settings.env, *(env for env in evaluated if env.name not in several)], True
    return [
        env_spec(
            env,
            takes_several_traces=several.get(env.name, True),
            is_text_only=is_text_only,
            select_json=selected[env.name],
            demo_key=demo_key if env.name in several else "",
        )
        for env in envs
    ]


def failure_window_of(groups_per_step: int) -> int:
    """Return the number of groups over which failed rollouts are counted if the config names none: those of two steps.

    It is at least `_MIN_FAILURE_WINDOW` and at most `MAX_FAILURE_WINDOW`.
    """
    return max(min(2 * groups_per_step, MAX_FAILURE_WINDOW), _MIN_FAILURE_WINDOW)


# What an evaluation run has instead of policies that change, and of a trainer.


class FixedEndpoints:
    """Policies that never change: endpoints known by configuration, which neither register nor update."""

    desired = None
    newest_due = held_version = None

    def __init__(self, urls: Sequence[str], *, model: str, max_concurrent: int) -> None:
        """Make one replica of each URL, without a call: the first rollout finds out whether the endpoints answer.

        `model` is the name by which they serve the model, `max_concurrent` how many rollouts each plays at once.
        """
        self._endpoints = [
            ReadyReplica(worker_id=url, http_url=url, model=model, version=0, max_num_seqs=max_concurrent)
            for url in urls
        ]

    def publish(self, entry: policy_pb2.PolicyEntry) -> None:
        """Do nothing: no policy is published to endpoints."""

    def ready(self) -> list[ReadyReplica]:
        """Return all endpoints."""
        return list(self._endpoints)

    def oldest_in_use(self) -> int | None:
        """Return None: no stored policy version is in use, because the endpoints serve models of their own."""
        return None

    def served_version(self) -> int | None:
        """Return 0, the only version; None if there are no endpoints."""
        return 0 if self._endpoints else None

    def up_to(self, version: int) -> str:
        """Return "inference", the component that would have to serve `version`: endpoints have no trainer."""
        return "inference"

    def hold(self, version: int) -> None:
        """Do nothing: endpoints never change their version."""

    def release(self) -> None:
        """Do nothing: endpoints have no newer version."""

    def known(self) -> set[str]:
        """Return the URLs of the endpoints, which are their worker ids."""
        return {endpoint.worker_id for endpoint in self._endpoints}

    def replica_at(self, http_url: str) -> str:
        """Return the URL itself if it is one of the endpoints', else an empty text."""
        return http_url if http_url in self.known() else ""

    def suspect(self, worker_id: str) -> None:
        """Do nothing: a rollout that an endpoint lost is played again after a pause."""

    async def run(self) -> None:
        """Wait until cancelled: endpoints need no driving."""
        await asyncio.Event().wait()


class NoTrainer:
    """The trainer of a run that trains nothing: none is assigned."""

    async def run(self, *, is_closing: Callable[[], bool]) -> None:
        """Wait until cancelled: no trainer has to be assigned."""
        await asyncio.Event().wait()

    async def wait_finished(self, *, is_needed: bool, spare_s: float) -> None:
        """Return at once: there is no trainer that could have anything left to write."""
