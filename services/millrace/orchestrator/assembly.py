"""The parts of one run's driver, and how they hang together."""

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from millrace.algorithms import ALGORITHMS
from millrace.config.schema import EvalRunConfig, RLConfig
from millrace.internal.v1 import env_service_pb2
from millrace.orchestrator.admission import AdmissionRule
from millrace.orchestrator.damage import DamageBook
from millrace.orchestrator.dispatcher import Dispatcher, RunIdentity
from millrace.orchestrator.env_pool import EnvPool, OpenedEnv, env_spec
from millrace.orchestrator.eval_settings import of_run, of_training
from millrace.orchestrator.evals import Evaluator
from millrace.orchestrator.events import RunEvents
from millrace.orchestrator.fixed_model import FixedEndpoints, NoTrainer
from millrace.orchestrator.groups import Group, GroupTable
from millrace.orchestrator.ledger import Ledger
from millrace.orchestrator.loop import RolloutLoop
from millrace.orchestrator.policy_driver import PolicyDriver
from millrace.orchestrator.rollout_stream import RolloutStream
from millrace.orchestrator.routing import Router
from millrace.orchestrator.run_view import EVAL, RunRecord
from millrace.orchestrator.tasks import TaskOrder, TaskSource
from millrace.orchestrator.trainer_watch import TrainerWatch
from millrace.orchestrator.workers import WorkerRegistry
from millrace.runlog import Epoch, Lease, RunLog

NO_SAMPLES = 1
"""Length to which the samples of a run without samples are cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunParts:
    """Everything that works on one run under one epoch."""

    record: RunRecord
    config: RLConfig | EvalRunConfig
    log: RunLog
    epoch: Epoch
    registry: WorkerRegistry
    events: RunEvents
    changed: asyncio.Event
    """Wakes the loop."""
    trainer: TrainerWatch
    envs: EnvPool
    policies: PolicyDriver
    table: GroupTable
    stream: RolloutStream
    ledger: Ledger
    evals: Evaluator
    damage: DamageBook
    dispatcher: Dispatcher | None
    """None where nothing is trained."""
    specs: list[env_service_pb2.EnvSpec]
    """Environments to train on, then those that are only evaluated."""

    @property
    def rl(self) -> RLConfig:
        """The config of a run that trains."""
        assert isinstance(self.config, RLConfig), "the run trains nothing"
        return self.config

    @property
    def max_steps(self) -> float:
        """Steps of the run; infinite if it has no end."""
        return self.rl.max_steps or math.inf


def assemble(
    *,
    record: RunRecord,
    run_log: RunLog,
    epoch: Epoch,
    lease: Lease,
    registry: WorkerRegistry,
    events: RunEvents,
) -> RunParts:
    """Make the parts of a run's driver; nothing of them works yet."""
    changed = asyncio.Event()
    whose = {"run_uid": record.uid, "registry": registry}
    following = {**whose, "epoch": epoch.number, "events": events, "on_change": changed.set}
    envs = EnvPool(epoch=epoch.number, **whose)
    if record.kind == EVAL:
        config = EvalRunConfig.model_validate(record.config)
        policies, trainer, evaluation = _fixed(config, following), NoTrainer(**whose), of_run(config)
        specs, seq_len = [env_spec(env.name, env.id, env.args) for env in config.env], NO_SAMPLES
    else:
        config = RLConfig.model_validate(record.config)
        policies, trainer = PolicyDriver(**following), TrainerWatch(**whose)
        evaluation, seq_len = of_training(config.orchestrator), config.orchestrator.seq_len
        specs = _specs(config)
    is_scored = isinstance(config, RLConfig) and config.orchestrator.algo.teacher is not None
    damage = DamageBook(run_log, events, run=record.name)
    stream = RolloutStream(run_log, is_scored=is_scored, on_damaged=damage.note)
    table, router = GroupTable(), Router()
    identity = RunIdentity(uid=record.uid, epoch=epoch.number, generation=run_log.generation)
    playing = {"run": identity, "envs": envs, "policies": policies, "stream": stream, "router": router}
    evals = Evaluator(settings=evaluation, **playing)
    router.count(table.load)
    router.count(evals.load)
    return RunParts(
        record=record,
        config=config,
        log=run_log,
        epoch=epoch,
        registry=registry,
        events=events,
        changed=changed,
        trainer=trainer,
        envs=envs,
        policies=policies,
        table=table,
        stream=stream,
        ledger=Ledger(
            run_log=run_log,
            epoch=epoch,
            lease=lease,
            run_hash=record.run_hash,
            envs=envs,
            stream=stream,
            events=events,
            seq_len=seq_len,
        ),
        evals=evals,
        damage=damage,
        dispatcher=Dispatcher(config=config.orchestrator, **playing) if isinstance(config, RLConfig) else None,
        specs=specs,
    )


def _specs(config: RLConfig) -> list[env_service_pb2.EnvSpec]:
    """Environments to train on, then those that are only evaluated."""
    settings = config.orchestrator
    specs = [env_spec(env.name, env.id, env.args) for env in settings.env]
    known = {spec.name for spec in specs}
    evaluated = [] if settings.eval is None else settings.eval.env
    return specs + [env_spec(env.name, env.id, env.args) for env in evaluated if env.name not in known]


def _fixed(config: EvalRunConfig, following: Mapping[str, Any]) -> FixedEndpoints:
    """The endpoints of an evaluation run."""
    policies = FixedEndpoints(**following)
    urls = [] if config.client is None else config.client.base_url
    policies.use(urls, model=config.model.name, max_concurrent=config.max_concurrent)
    return policies


def make_loop(parts: RunParts, *, is_stopping: Callable[[], bool]) -> RolloutLoop:
    """The loop of a run whose environments are open."""
    settings = parts.rl.orchestrator
    assert parts.dispatcher is not None, "a run that trains dispatches"
    opened = {spec.name: parts.envs.envs[spec.name] for spec in parts.specs}
    order = _task_order(parts.rl, opened)

    def make_group(ordinal: int, planned_step: int) -> Group:
        task = order.task(ordinal)
        return Group(
            task=task,
            group_size=settings.rollouts_per_example,
            planned_step=planned_step,
            is_scored_whole=opened[task.env].requires_group,
        )

    return RolloutLoop(
        max_steps=parts.max_steps,
        rule=AdmissionRule(
            groups_per_step=settings.batch_size // settings.rollouts_per_example,
            async_level=settings.async_level,
            max_off_policy_steps=settings.max_off_policy_steps,
            oversampling_factor=settings.oversampling_factor,
            max_steps=parts.rl.max_steps,
        ),
        make_group=make_group,
        tasks=order,
        table=parts.table,
        stream=parts.stream,
        dispatcher=parts.dispatcher,
        policies=parts.policies,
        ledger=parts.ledger,
        events=parts.events,
        meters=parts.events.meters,
        algorithm=ALGORITHMS[settings.algo.type].from_config(settings.algo),
        filter_zero_advantages=settings.filter_zero_advantages,
        seq_len=settings.seq_len,
        changed=parts.changed,
        is_stopping=is_stopping,
    )


def _task_order(config: RLConfig, opened: Mapping[str, OpenedEnv]) -> TaskOrder:
    """The order over the training tasks of every environment."""
    settings = config.orchestrator
    sources = [
        TaskSource(
            env=env.name,
            num_tasks=opened[env.name].num_train,
            digest=opened[env.name].train_digest,
            weight=env.weight,
        )
        for env in settings.env
    ]
    return TaskOrder(sources, seed=settings.seed)
