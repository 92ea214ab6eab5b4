"""Steps of a run computed again from its log."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from transformers.utils.logging import disable_progress_bar

from millrace.config.sections.rl import RLConfig
from millrace.custom_code import EVERYTHING
from millrace.decoding import MAX_JSON_BYTES
from millrace.errors import CorruptObjectError, InvalidStateError, NotFoundError
from millrace.models.torch_support import shortage_named
from millrace.policies.digest import digest_hex, policy_digest, tensor_digest
from millrace.policies.host_copy import download_hf, pull_tensors, read_manifest
from millrace.policies.manifest import PolicyManifest
from millrace.policies.tensors import TensorBytes
from millrace.readers.replay_report import ReplayReport, TensorDifference
from millrace.runlog import Names
from millrace.runlog.records.retirement import require_policy
from millrace.runlog.records.run_record import RunOrigin, RunRecord, list_policies, parse_origin
from millrace.storage.base import ObjectStore
from millrace.storage.scratch import owned_directory
from millrace.trainer.checkpoint.manifest import CheckpointManifest, conditions, require_same_dataset
from millrace.trainer.checkpoint.resume import describe, first_whole, restore
from millrace.trainer.checkpoint.store import CheckpointStore
from millrace.trainer.gang.distributed import Gang, RandomState
from millrace.trainer.job import parse_config
from millrace.trainer.learning.batch import BatchLayout
from millrace.trainer.learning.learner import Learner
from millrace.trainer.learning.metrics import StepMetrics
from millrace.trainer.learning.optimizer import norm_of
from millrace.trainer.learning.plan import how_rows_are_made
from millrace.trainer.log.batches import Batch, Batches, StoreLog
from millrace.trainer.loop import forward_backward, learn
from millrace.trainer.losses import LossFunction, load_custom_loss, regularized
from millrace.trainer.model.pretrained import resolve_model_directory
from millrace.trainer.model.published import policy_tensors
from millrace.trainer.sft.data import open_dataset

# Recomputes steps of a run from its log: the newest kept checkpoint before them, then batch after batch.
#
# Needs the object store only, writes nothing into it, and runs in this process alone.

OnStep = Callable[[int, int], None]
"""Hears (steps done, steps to do)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """Where a replay begins; `conditions_of` is the checkpoint that says under which conditions the run was trained."""

    version: int
    chain_hash: bytes
    conditions_of: CheckpointManifest | None
    notes: tuple[str, ...] = ()


class Replayer:
    """A run's learner, brought forward step by step from its log. Make it by `open`."""

    def __init__(
        self, learner: Learner, batches: Batches, *, run_name: str, start: _Start, notes: tuple[str, ...]
    ) -> None:
        """Take a learner with the weights of `start`; `batches` reads the batches from there on. Prefer `open`."""
        self.run_name = run_name
        self._learner = learner
        self._batches = batches
        self.start = start.version
        self.version = start.version
        self.notes = notes

    @classmethod
    @contextlib.contextmanager
    def open(cls, store: ObjectStore, names: Names, *, step: int) -> Iterator["Replayer"]:
        """Provide the replay of a run at the newest whole checkpoint at or before `step`, or at the run's start.

        InvalidStateError (STEP_NOT_KEPT) naming the range that can be recomputed if `step` is not in it, NotFoundError
        if there is no such run.
        """
        try:
            run_json = store.get(names.run_json, max_bytes=MAX_JSON_BYTES)
        except NotFoundError as error:
            raise _no_run(store, names.uid) from error
        config = _alone(parse_config(run_json, uid=names.uid))
        origin = parse_origin(run_json, where=store.uri(names.run_json))
        log = StoreLog(store, names, base_step=origin.base_step)
        kept = log.kept()
        if not kept.first <= step <= kept.last:
            raise log.not_kept(step)
        record = RunRecord.parse(run_json, where=store.uri(names.run_json), needs=["run_hash"])
        learner, start = _learner_at(store, names, config, step, origin=origin)
        try:
            batches = Batches(
                log,
                gang=learner.gang,
                run_uid=names.uid,
                run_hash=record.run_hash,
                previous_chain_hash=start.chain_hash,
                layout=BatchLayout.of(config.trainer, learner.packing, routing=learner.routing),
                dataset=learner.dataset,
            )
            yield cls(
                learner,
                batches,
                run_name=record.name or names.uid,
                start=start,
                notes=(*start.notes, *_notes(start.conditions_of, rows=how_rows_are_made(learner.packing))),
            )
        finally:
            learner.gang.leave()

    def read(self) -> Batch:
        """Return the batch that the next step is trained on; InvalidStateError if it is not kept."""
        return self._batches.read(self.version)

    def advance(self, batch: Batch) -> dict[str, float]:
        """Train on the batch of the next step as the run did, which makes the next version.

        Return the step's metrics by name.
        """
        learned = learn(self._learner, batch)
        report = learned.report
        self.version = batch.step + 1
        return learned.metrics.values() | {"optim/lr": report.lr, "optim/grad_norm": report.grad_norm}

    def try_loss(self, batch: Batch, loss_of: LossFunction) -> dict[str, float]:
        """Return the metrics that the next step would have under another loss; the weights stay as they are.

        Of several minibatches, each is computed with the weights before the batch.
        """
        drawn = RandomState.of(self._learner.gang.device)
        metrics, norms = list[StepMetrics](), list[float]()
        for minibatch in batch.minibatches:
            metrics.append(forward_backward(self._learner, batch, minibatch, loss_of=loss_of)[0])
            gradients = [p.grad for p in self._learner.model.parameters() if p.grad is not None]
            norms.append(norm_of(gradients))
            # The run's own loss computes its gradients next, and they must not be added to these.
            self._learner.model.zero_grad(set_to_none=True)
        drawn.restore()  # the run's own loss sees the same dropout
        return StepMetrics.merged(metrics).values() | {"optim/grad_norm": fmean(norms)}

    def tensors(self) -> dict[str, TensorBytes]:
        """Return the weights of `version` by name as they would be published; views of the live ones on a CPU."""
        return dict(policy_tensors(self._learner.model, dtype=self._learner.publish_dtype, version=self.version))


def replay(
    store: ObjectStore, names: Names, *, step: int, loss: str = "", on_step: OnStep = lambda done, total: None
) -> ReplayReport:
    """Recompute step `step` with the run's own loss, and compare version `step + 1` with the published one.

    `loss` (`my.module:fn`, or empty) only adds to the report the metrics that the step has under it. `on_step` is
    called with steps done and steps to do. InvalidStateError if the step is not kept, or if its version is not
    published and no loss is given.
    """
    disable_progress_bar()  # the bar of loading the model would be between the lines of the steps
    loss_of = partial(regularized, load_custom_loss(loss, EVERYTHING, field="--loss")) if loss else None
    with shortage_named("replay the step"), Replayer.open(store, names, step=step) as replayer:
        published = _published(store, names, version=step + 1)
        if published is None and loss_of is None:
            raise InvalidStateError(
                f"version {step + 1} of run {names.uid} is not published, so there is nothing to compare with",
                reason="VERSION_NOT_PUBLISHED",
                remedy="wait until the trainer has taken that step, or choose an earlier one",
            )
        total = step + 1 - replayer.start
        for done in range(total - 1):
            on_step(done, total)
            replayer.advance(replayer.read())
        on_step(total - 1, total)
        batch = replayer.read()
        other = replayer.try_loss(batch, loss_of) if loss_of is not None else {}
        metrics = replayer.advance(batch)
        on_step(total, total)
        computed = replayer.tensors()
        digests = _digests(computed)
        digest = policy_digest({name: (t.dtype, t.shape, digests[name]) for name, t in computed.items()})
        differences: tuple[TensorDifference, ...] = ()
        if published is not None and published.digest != digest:
            differences = tuple(_differences(store, published, computed, digests))
        return ReplayReport(
            run_uid=names.uid,
            run_name=replayer.run_name,
            step=step,
            start=replayer.start,
            computed_digest=digest,
            published_digest="" if published is None else published.digest,
            lineage=0 if published is None else published.lineage,
            differences=differences,
            metrics=metrics,
            other_loss=loss,
            other_metrics=other,
            notes=replayer.notes,
        )


def _learner_at(
    store: ObjectStore, names: Names, config: RLConfig, step: int, *, origin: RunOrigin
) -> tuple[Learner, _Start]:
    """Return the learner at the newest whole checkpoint at or before a step, else with the start model; and where that
    is.

    CorruptObjectError if there is no such checkpoint and the log begins after the start model.
    """
    checkpoints, learners = CheckpointStore(store, names, gang=Gang()), list[Learner]()

    def use(manifest: CheckpointManifest) -> None:
        """Make a learner with the state of a checkpoint, and keep it in `learners`.

        Raises if the checkpoint is damaged.
        """
        learner = _new_learner(store, names, config, manifest, conditions_of=manifest)
        gang, base_digest = learner.gang, learner.base_digest
        restore(checkpoints, manifest, learner.model, learner.optimizer, gang=gang, base_digest=base_digest)
        learners.append(learner)

    found = first_whole(checkpoints, use, gang=Gang(), at_most=step)
    notes = (f"damaged checkpoints are left aside: {describe(found)}",) if found.damaged else ()
    if found.manifest is None and origin.base_step:
        raise CorruptObjectError(
            f"batch {step} of run {names.uid} cannot be recomputed: {describe(found)}",
            reason="CHECKPOINTS_DAMAGED",
            remedy="restore the checkpoint from a replica of the bucket, or replay the parent of this fork",
        )
    if found.manifest is None:
        first = _first_manifest(checkpoints)
        start = _Start(version=0, chain_hash=origin.chain_hash, conditions_of=first, notes=notes)
        return _new_learner(store, names, config, None, conditions_of=first), start
    chain_hash = bytes.fromhex(found.manifest.chain_hash)
    return learners[0], _Start(
        version=found.manifest.step, chain_hash=chain_hash, conditions_of=found.manifest, notes=notes
    )


def _first_manifest(checkpoints: CheckpointStore) -> CheckpointManifest | None:
    """Return the oldest manifest of a checkpoint that can be read; None without one.

    It says under which conditions the steps before it were trained, as far as is known.
    """
    for step in checkpoints.steps():
        with contextlib.suppress(CorruptObjectError):  # an audit reports it; the next manifest has the same conditions
            return checkpoints.read(step)
    return None


def _new_learner(
    store: ObjectStore,
    names: Names,
    config: RLConfig,
    checkpoint: CheckpointManifest | None,
    *,
    conditions_of: CheckpointManifest | None,
) -> Learner:
    """Return a learner with the model of a checkpoint, or of the run's start (None), on the kind of device it had.

    `conditions_of` is the checkpoint that says how the run was trained; InvalidStateError if its data set is another
    one. Sets torch's number of threads to that of the training.
    """
    gang, version = Gang(device=_device_of(conditions_of)), 0 if checkpoint is None else checkpoint.step
    # What is compared with the start model begins there: the checkpoint says which one it needs.
    is_start = checkpoint is None or config.trainer.loss.kl is not None
    with _model_directory(store, names, config, 0 if is_start else version, is_start=is_start) as directory:
        dataset = open_dataset(config.trainer, directory, gang=gang)
        learner = Learner.of_start_model(
            config, gang=gang, directory=directory, start_directory=directory, code=EVERYTHING, dataset=dataset
        )
    if conditions_of is not None:
        require_same_dataset(conditions_of, dataset_digest="" if learner.dataset is None else learner.dataset.digest)
        torch.set_num_threads(int(conditions_of.conditions.get("num_threads", torch.get_num_threads())))
    return learner


@contextlib.contextmanager
def _model_directory(
    store: ObjectStore, names: Names, config: RLConfig, version: int, *, is_start: bool
) -> Iterator[Path]:
    """Provide a directory with the model of a version, which the replay begins with.

    It is the published version itself, so that the replay needs nothing but the store. Where that is not kept, or was
    rounded and the model itself counts (`is_start`), it is the directory that the run began with.
    """
    lora = config.trainer.model.lora is not None
    published = _published(store, names, version=version)
    if published is not None and published.adapter is not None:
        published = read_manifest(store, published.adapter.base_key)
    # The base of adapters is computed with as it is published, rounded or not.
    is_rounded = not lora and published is not None and any(entry.dtype != "float32" for entry in published.tensors)
    if published is None or (is_rounded and is_start):
        yield resolve_model_directory(config.trainer.model.name)
        return
    with owned_directory("replay") as directory:
        yield download_hf(store, published, directory)


def _published(store: ObjectStore, names: Names, *, version: int) -> PolicyManifest | None:
    """Return the manifest of a version's newest lineage; None if the version is not published."""
    for number, lineage in reversed(list_policies(store, names)):
        key = names.policy_manifest(lineage, version)
        if number == version and store.head(key) is not None:
            return read_manifest(store, key)
    return None


def _alone(config: RLConfig) -> RLConfig:
    """Return a run's config as one process computes it, without data, context, tensor or expert parallelism."""
    model = config.trainer.model.model_copy(update={"dp_replicate": 1, "cp": 1, "tp": 1, "ep": 1})
    return config.model_copy(update={"trainer": config.trainer.model_copy(update={"model": model})})


def _device_of(checkpoint: CheckpointManifest | None) -> torch.device:
    """Return the device to replay on: a GPU where there is one, unless the run was trained on a CPU."""
    trained_on_cpu = checkpoint is not None and checkpoint.conditions.get("device") == "cpu"
    return torch.device("cuda", 0) if torch.cuda.is_available() and not trained_on_cpu else torch.device("cpu")


def _notes(checkpoint: CheckpointManifest | None, *, rows: str) -> tuple[str, ...]:
    """Return a note if conditions differ from those of a checkpoint's training, such as torch's version; else nothing.

    `rows` says how rows of the batch are made now.
    """
    if checkpoint is None:
        return ()
    now = {**conditions(_device_of(checkpoint), rows=rows), "world_size": "1"}
    then = {**checkpoint.conditions, "world_size": str(checkpoint.world_size)}
    differing = [f"{name} was {then[name]}, is {now.get(name)}" for name in then if then[name] != now.get(name)]
    return (f"last bits may differ, because {'; '.join(differing)}",) if differing else ()


def _digests(tensors: Mapping[str, TensorBytes]) -> dict[str, str]:
    """Return the digest (hex) of each tensor by its name."""
    return {name: digest_hex(tensor_digest(tensor)) for name, tensor in tensors.items()}


def _differences(
    store: ObjectStore, published: PolicyManifest, computed: Mapping[str, TensorBytes], digests: Mapping[str, str]
) -> Iterator[TensorDifference]:
    """Yield every tensor that is not bit for bit the published one, in order of name.

    `computed` are the recomputed tensors by name, `digests` theirs (hex).
    """
    require_policy(store, published.key)
    theirs = pull_tensors(store, published)
    their_digests = {entry.name: entry.digest for entry in published.tensors}
    for name in sorted({*computed, *theirs}):
        if digests.get(name) == their_digests.get(name):
            continue
        one, other = computed.get(name), theirs.get(name)
        if one is None or other is None or (one.dtype, one.shape) != (other.dtype, other.shape):
            where = "recomputed" if one is None else "published"
            yield TensorDifference(name=name, num_elements=0, num_differing=0, max_abs_difference=0.0, missing_in=where)
            continue
        ours, published_bits = one.bits(), other.bits()
        yield TensorDifference(
            name=name,
            num_elements=int(ours.size),
            num_differing=int((ours != published_bits).sum()),
            max_abs_difference=float(np.abs(_float64(one) - _float64(other)).max(initial=0.0)),
        )


def _float64(tensor: TensorBytes) -> np.ndarray:
    """Return the values of a tensor, flat; numpy has no bfloat16, whose bits are the upper half of a float32's."""
    if tensor.dtype == "bfloat16":
        return (tensor.bits().astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return tensor.numpy().ravel().astype(np.float64)


def _no_run(store: ObjectStore, uid: str) -> NotFoundError:
    """Make the error for a run that the store does not have."""
    return NotFoundError(
        f"{store.describe()} holds no run {uid}", reason="RUN_NOT_FOUND", remedy="check --store, --prefix and the name"
    )
