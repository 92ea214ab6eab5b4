"""One run's training, put together: log, model or checkpoint, gang, parts, loop."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from millrace.config.sections.rl import RLConfig, plays_conversations
from millrace.custom_code import CustomCode
from millrace.decoding import MAX_JSON_BYTES
from millrace.errors import CorruptObjectError, MillraceError, UnavailableError
from millrace.models.files import ADAPTER_CONFIG
from millrace.models.torch_support import shortage_named
from millrace.models.vocabulary import check_tokenizer
from millrace.policies.manifest import FileEntry
from millrace.policies.peft.config import base_model_name
from millrace.policies.publish import upload_files
from millrace.runlog import Names
from millrace.runlog.records.revisions import last_reopened
from millrace.runlog.records.run_record import RunOrigin, RunRecord, parse_origin
from millrace.storage import ObjectStore
from millrace.trainer.checkpoint.manifest import Author
from millrace.trainer.checkpoint.resume import Checkpointer, Resumed, describe, require_batches, resume
from millrace.trainer.checkpoint.store import CheckpointStore
from millrace.trainer.gang.agreement import agreed
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.learning.batch import BatchLayout
from millrace.trainer.learning.learner import Learner
from millrace.trainer.learning.plan import how_rows_are_made
from millrace.trainer.log.background import BackgroundLoop, StopRequested
from millrace.trainer.log.batches import POLL_S, Batches
from millrace.trainer.log.client import LogClient
from millrace.trainer.log.token_log import TokenLogWriter
from millrace.trainer.loop import train
from millrace.trainer.model.pretrained import (
    policy_files,
    resolve_model_directory,
    vocabulary_of,
    with_tokenizer,
    with_turn_stops,
)
from millrace.trainer.publish.executor import Executor
from millrace.trainer.publish.plan import (
    DamageReport,
    PublishPlan,
    PublishTarget,
    Republisher,
    first_of_lineage,
    newest_published,
    plan_publishing,
    published_anew,
)
from millrace.trainer.publish.publisher import AdapterBase, Publisher
from millrace.trainer.reporter import Reporter
from millrace.trainer.sft.data import open_dataset
from millrace.trainer.training import DeviceLender, DeviceTurn, Position, Training
from millrace.trainer.worker import SilenceReporter
from millrace.v1 import event_pb2

_PEER_OPENS_WITHIN_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobContext:
    """Where a run is trained: this process's connections and place in the gang, and the functions to report to."""

    background: BackgroundLoop
    store: ObjectStore
    redis_url: str
    prefix: str
    gang: Gang
    owner: str
    slot: str
    should_stop: Callable[[], bool]
    on_epoch: Callable[[int], None]
    on_progress: Callable[[int], None]
    why_stopped: Callable[[], str] = lambda: "it was asked to"
    """Why `should_stop` returned True, in words."""
    damage: Callable[[], DamageReport | None] = lambda: None
    lender: DeviceLender | None = None
    """Grants devices that the trainer shares with replicas; None: the devices are the trainer's alone."""
    silence: SilenceReporter = field(default_factory=SilenceReporter)
    custom_code: CustomCode = field(default_factory=CustomCode)
    store_url: str = ""
    """URL of the store, for child processes that open it as well; empty: none does."""
    executor: Executor = Executor.AUTO
    """Whether a thread or a process publishes policies beside the training."""
    train: Callable[[Training], None] | None = None
    """Replaces the training loop."""


def run_job(context: JobContext, uid: str) -> None:
    """Train the run `uid` to its end, and release its lease in any case.

    Raises StopRequested when asked to stop, and every error of the training. Why it ended is recorded for the trainer
    that goes on with the run.
    """
    names = Names(context.prefix, uid)
    record = context.store.get(names.run_json, max_bytes=MAX_JSON_BYTES)
    client = LogClient(
        context.background,
        redis_url=context.redis_url,
        store=context.store,
        names=names,
        owner=context.owner,
        slot=context.slot,
        gang=context.gang,
        should_stop=context.should_stop,
    )
    # Stays so for what is no Exception, such as an interrupt.
    why = "its training was broken off"
    try:
        # The log is opened and the lease taken in the background, while the model is loaded.
        client.begin()
        with context.silence.reporting_to(client.write), shortage_named("train the run"):
            (context.train or train)(prepare(context, names, client, record))
            # Without a limit, unlike `close`, which drops events that Redis does not take within seconds.
            client.flush()
        why = "it had trained the run to its end"
    except StopRequested:
        why = context.why_stopped()
        raise
    except Exception as error:  # notes it for the trainer that goes on, and raises it again
        why = f"{error.message} [{error.reason}]" if isinstance(error, MillraceError) else repr(error)
        raise
    finally:
        client.close(why)


def hold_run(context: JobContext, client: LogClient) -> None:
    """Wait, with the whole gang, until rank 0 holds the run's lease and every rank has opened its log.

    Reports the epoch at rank 0. Raises StopRequested at every rank if rank 0 is asked to stop, and UnavailableError if
    a rank cannot open the log within 120 s. Collective in a gang.
    """
    gang = context.gang

    def look() -> str:
        return "hold" if client.poll_ready(timeout_s=POLL_S) else "stop" if context.should_stop() else "wait"

    # One short collective for each poll: no rank waits in one for as long as the lease takes.
    while (order := gang.from_leader(look)) != "hold":
        if order == "stop":
            raise StopRequested
    if gang.is_leader:
        context.on_epoch(client.epoch)
    with agreed(gang):
        if not client.poll_ready(timeout_s=_PEER_OPENS_WITHIN_S):
            raise UnavailableError(
                f"rank {gang.rank} could not open the log of the run within {_PEER_OPENS_WITHIN_S:g} s",
                reason="REDIS_UNREACHABLE",
                remedy="see whether this rank reaches MILLRACE_REDIS_URL as rank 0 does",
            )


def prepare(context: JobContext, names: Names, client: LogClient, record: bytes) -> Training:
    """Load the model, wait for the run's lease, resume the newest checkpoint, and make the parts of the training.

    `record` is the content of `run.json`. Reports a resumed run and damaged checkpoints. Checkpoints are read only once
    the run's lease is held. Collective in a gang.
    """
    gang, config = context.gang, parse_config(record, uid=names.uid)
    with agreed(gang):  # one machine may lack the model: all ranks fail then, and none waits for the others
        directory = resolve_model_directory(config.trainer.model.name)
    with agreed(gang):
        if gang.is_leader:
            name = config.trainer.tokenizer.name
            source = directory if name is None else resolve_model_directory(name)
            check_tokenizer(source, model=directory, needs_template=plays_conversations(config))
    dataset = open_dataset(config.trainer, directory, gang=gang)
    learner = Learner.of_start_model(
        config, gang=gang, directory=directory, start_directory=directory, code=context.custom_code, dataset=dataset
    )
    # Only with the lease are checkpoints read: a predecessor could still write one before.
    hold_run(context, client)
    checkpoints = CheckpointStore(context.store, names, gang=gang)
    found = resume(
        checkpoints,
        learner.model,
        learner.optimizer,
        gang=gang,
        author=make_author(client, learner),
    )
    reporter = Reporter(client if gang.is_leader else None, world_size=gang.world_size, utilization=learner.utilization)
    position, lineage = begin(context, names, record, found, reporter)
    skips_from = gang.from_leader(lambda: last_reopened(context.store, names))
    # Steps that were skipped before the run was reopened do not count towards the limit again.
    position.num_skipped = min(position.num_skipped, max(position.version - skips_from, 0))
    plan = plan_versions(context, names, learner, found, position, lineage=lineage, reporter=reporter)
    report_resumed(context, names, client, found, reporter)
    publisher = make_publisher(context, names, client, learner, directory=directory, plan=plan)
    republisher = Republisher(publisher.republish, context.damage, publisher.raise_failure)
    return Training(
        config=learner.config,
        gang=gang,
        model=learner.model,
        optimizer=learner.optimizer,
        is_strict=learner.is_strict,
        loss_of=learner.loss_of,
        reference=learner.reference,
        packing=learner.packing,
        expert_load=learner.expert_load,
        adapter=learner.adapter,
        base_digest=learner.base_digest,
        dataset=learner.dataset,
        routing=learner.routing,
        batches=make_batches(context, names, client, learner, republisher=republisher, chain_hash=position.chain_hash),
        publisher=publisher,
        checkpointer=make_checkpointer(checkpoints, client, learner, reporter),
        token_logs=make_token_logs(context, names, learner, plan=plan, reporter=reporter),
        reporter=reporter,
        position=position,
        skips_from=skips_from,
        on_progress=context.on_progress,
        turn=DeviceTurn(
            gang, context.lender if config.inference.sleep_while_training else None, republisher=republisher
        ),
    )


def begin(context: JobContext, names: Names, record: bytes, found: Resumed, reporter: Reporter) -> tuple[Position, int]:
    """Return the position and the lineage at which training begins, and report damaged checkpoints.

    `record` is the content of `run.json`, and `found` what `resume` returned. Raises CorruptObjectError if a fork has
    no checkpoint, or batches up to damaged checkpoints are missing. Collective in a gang.
    """
    for each in found.damaged:
        reporter.warning(
            "CHECKPOINT_DAMAGED",
            f"checkpoint {each.step} cannot be used: {each.why}; the run goes on from {found.start}",
        )
    if found.manifest is None:
        origin = parse_origin(record, where=context.store.uri(names.run_json))
        require_whole_history(names, origin, found)
        position, lineage = Position(0, origin.chain_hash), 0
    else:
        position = Position(found.manifest.step, bytes.fromhex(found.manifest.chain_hash), found.manifest.num_skipped)
        lineage = found.manifest.lineage
    require_batches(context.store, names, found, first=position.version, gang=context.gang)
    return position, lineage


def report_resumed(context: JobContext, names: Names, client: LogClient, found: Resumed, reporter: Reporter) -> None:
    """Report at rank 0 from which step a run goes on, and why it was interrupted; do nothing for a new run.

    `found` is what `resume` returned. Collective in a gang.
    """
    with agreed(context.gang):
        if not context.gang.is_leader or not client.before:
            return
        step = 0 if found.manifest is None else found.manifest.step
        _, published = newest_published(context.store, names) or (0, step)
        body = event_pb2.TrainingResumed(
            step=step, start=found.start, reason=client.before, published=max(published, step), epoch=client.epoch
        )
        reporter.resumed(body)


def require_whole_history(names: Names, origin: RunOrigin, found: Resumed) -> None:
    """Raise CorruptObjectError if the run is a fork, which needs a checkpoint; call it if no checkpoint can be used.

    `found` has the damaged ones, for the message.
    """
    if origin.base_step:
        damage = f": {describe(found)}" if found.damaged else ""
        raise CorruptObjectError(
            f"run {names.uid} is a fork that begins at step {origin.base_step}, and has no checkpoint that can be used"
            + damage,
            reason="CHECKPOINT_MISSING",
            remedy="restore its checkpoint from a replica of the bucket, or fork again",
        )


def make_batches(
    context: JobContext,
    names: Names,
    client: LogClient,
    learner: Learner,
    *,
    republisher: Republisher,
    chain_hash: bytes,
) -> Batches:
    """Make the reader of the run's batches after the one whose chain hash is `chain_hash`.

    `republisher` publishes damaged policy versions again between batches.
    """
    return Batches(
        client,
        gang=context.gang,
        run_uid=names.uid,
        run_hash=client.run_hash,
        previous_chain_hash=chain_hash,
        layout=BatchLayout.of(learner.config, learner.packing, routing=learner.routing),
        republisher=republisher,
        dataset=learner.dataset,
    )


def make_author(client: LogClient, learner: Learner) -> Author:
    """Make the record of who writes a checkpoint: run, epoch (0 at other ranks than 0), determinism, digests."""
    return Author(
        run_hash=client.run_hash,
        epoch=client.epoch if learner.gang.is_leader else 0,
        determinism="strict" if learner.is_strict else "best_effort",
        base_digest=learner.base_digest,
        rows=how_rows_are_made(learner.packing),
        dataset_digest="" if learner.dataset is None else learner.dataset.digest,
    )


def make_checkpointer(
    checkpoints: CheckpointStore, client: LogClient, learner: Learner, reporter: Reporter
) -> Checkpointer:
    """Make the object that saves this trainer's checkpoints, and reports saved and undeleted ones."""
    return Checkpointer(
        checkpoints,
        learner.config.ckpt,
        gang=learner.gang,
        author=make_author(client, learner),
        on_saved=reporter.checkpoint_saved,
        on_left=lambda message: reporter.warning("CHECKPOINT_NOT_DELETED", message),
    )


def make_token_logs(
    context: JobContext, names: Names, learner: Learner, *, plan: PublishPlan, reporter: Reporter
) -> TokenLogWriter:
    """Make the writer of the steps' token logs; their keys have the lineage of the policies that `plan` publishes."""
    return TokenLogWriter(
        context.store,
        names,
        share=learner.config.token_log.share,
        lineage=plan.lineage,
        gang=context.gang,
        on_stored=reporter.token_log_stored,
        on_problem=lambda message: reporter.warning("TOKEN_LOG_NOT_STORED", message),
    )


def make_publisher(
    context: JobContext,
    names: Names,
    client: LogClient,
    learner: Learner,
    *,
    directory: Path,
    plan: PublishPlan,
) -> Publisher:
    """Make the publisher of policies.

    Rank 0 uploads the files that all versions share (config, tokenizer, adapter config). `directory` has the start
    model. Collective in a gang.
    """
    with agreed(context.gang):
        shared, source = policy_files(learner.model, directory, dtype=learner.publish_dtype), directory
        if (tokenizer := learner.config.tokenizer.name) is not None:
            shared = with_tokenizer(shared, source := resolve_model_directory(tokenizer))
        shared = with_turn_stops(shared, directory, tokenizer=source)
    if learner.adapter is not None:
        # With the base, too: engines see at once what will come.
        base_model = base_model_name(learner.config.model.name)
        shared[ADAPTER_CONFIG] = learner.adapter.to_config(base_model=base_model)

    def upload() -> tuple[FileEntry, ...]:
        """Upload the shared files, and return their entries for manifests."""
        return upload_files(context.store, prefix=names.prefix, uid=names.uid, epoch=client.epoch, files=shared)

    files: tuple[FileEntry, ...] = ()
    if context.gang.is_leader:
        files = upload()
    gang = context.gang
    epoch = client.epoch if gang.is_leader else None
    target = PublishTarget(
        store=context.store,
        names=names,
        gang=gang,
        epoch=epoch,
        store_url=context.store_url,
        executor=context.executor,
    )
    base: AdapterBase | None = None
    if learner.adapter is not None:
        base = AdapterBase(
            learner,
            learner.adapter,
            target,
            upload_files=upload,
            on_republished=lambda damage, uri: client.write_event(published_anew("0-0", damage=damage, uri=uri)),
        )
    return Publisher(
        learner,
        target,
        log_client=client if gang.is_leader else None,
        files=files,
        upload_files=upload,
        vocabulary=vocabulary_of(learner.model),
        plan=plan,
        base=base,
    )


def parse_config(run_json: bytes, *, uid: str) -> RLConfig:
    """Return the resolved config in the content of a `run.json`.

    Raises CorruptObjectError if the record is damaged or its config is not readable by this version.
    """
    what, reason = f"run.json of run {uid}", "RUN_CONFIG_INVALID"
    remedy = "run trainer and orchestrator of the same release"
    record = RunRecord.parse(run_json, where=what)
    try:
        return RLConfig.model_validate_json(record.config_json)
    except ValueError as error:
        raise CorruptObjectError(
            f"{what} has no config that this version reads: {error}", reason=reason, remedy=remedy
        ) from error


def plan_versions(
    context: JobContext,
    names: Names,
    learner: Learner,
    found: Resumed,
    position: Position,
    *,
    lineage: int,
    reporter: Reporter,
) -> PublishPlan:
    """Return what to publish from `position` on, and report if that begins a new lineage.

    `found` is what `resume` returned, and `lineage` that of the checkpoint. A strict run with another number of ranks
    than saved its checkpoint begins a lineage. Collective in a gang.
    """
    gang, is_strict = context.gang, learner.is_strict
    num_ranks = gang.world_size if found.manifest is None else found.manifest.world_size
    is_relaid = is_strict and num_ranks != gang.world_size
    start = position.version
    plan = agree_on_plan(context, names, start_step=start, lineage=lineage, strict=is_strict, is_relaid=is_relaid)
    if is_relaid and plan.lineage > lineage:
        reporter.warning(
            "NEW_LINEAGE",
            f"the run goes on from {found.start} with other ranks than those that saved it, {gang.world_size} instead "
            f"of {num_ranks}, and may not be bit-exact: version {plan.first_version} begins lineage {plan.lineage}",
        )
    else:
        warn_of_new_lineage(plan, position, lineage=lineage, reporter=reporter)
    return plan


def warn_of_new_lineage(plan: PublishPlan, position: Position, *, lineage: int, reporter: Reporter) -> None:
    """Warn that published versions are trained again and begin a new lineage.

    Do nothing if the plan has no such versions. `lineage` is that of the state that the run resumed.
    """
    if plan.lineage > lineage and plan.first_version > position.version:
        reporter.warning(
            "NEW_LINEAGE",
            f"steps {position.version} to {plan.first_version - 1} are replayed and may not be bit-exact: version "
            f"{plan.first_version} begins lineage {plan.lineage}",
        )


def agree_on_plan(
    context: JobContext, names: Names, *, start_step: int, lineage: int, strict: bool, is_relaid: bool
) -> PublishPlan:
    """Return at every rank the plan that rank 0 makes from what is published. Collective in a gang.

    The state to start from has made `start_step` steps in `lineage`. `strict` says whether equal steps give equal bits,
    `is_relaid` whether the number of ranks has changed.
    """

    def plan() -> dict[str, Any]:
        """Return the fields of the plan, made from the policies in the store."""
        published = newest_published(context.store, names)
        return asdict(
            plan_publishing(
                start_step=start_step,
                start_lineage=lineage,
                published=published,
                is_strict=strict,
                is_relaid=is_relaid,
                lineage_begins=first_of_lineage(context.store, names, lineage),
            )
        )

    return PublishPlan(**context.gang.from_leader(plan))
