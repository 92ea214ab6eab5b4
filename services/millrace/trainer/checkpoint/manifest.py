"""The manifest of a checkpoint: the create-only object whose existence commits it. A stored format.

It carries the chain hash H(step - 1), so that a resumed trainer proves that the batches it reads next follow those that
the state was trained on, the conditions (threads, device, versions, how rows are made) that strict determinism needs,
the sha256 of every file, and a checksum over itself.
"""

import platform
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING

import millrace
from millrace.decoding import Fields, decode_object
from millrace.errors import CorruptObjectError, InvalidStateError
from millrace.storage.base import require_checksum, with_checksum

if TYPE_CHECKING:
    import torch

FORMAT = 2
MAX_MANIFEST_BYTES = 16 << 20
_MAX_OBJECTS = 1 << 16
_MAX_OBJECT_BYTES = 1 << 50
_REMEDY = "the run resumes from the checkpoint before; `millrace run audit` says what else is damaged"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointObject:
    """One file of a checkpoint: its name in the directory, where it is, and what its bytes are."""

    name: str
    key: str
    sha256: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Author:
    """Who writes checkpoints: the run's config, the fencing epoch, and what its manifests say of the trainer.

    `rows` is how its rows are made (`plan.how_rows_are_made`); empty where they may change from start to start.
    `dataset_digest` is that of the dataset whose rows it learns beside rollouts, if there is one.
    """

    run_hash: str
    epoch: int
    determinism: str
    base_digest: str = ""
    rows: str = ""
    dataset_digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointManifest:
    """What a checkpoint is: version `step` of lineage `lineage`, after the batches that `chain_hash` (hex) proves.

    `base_digest` is that of the start model where the state is that of adapters on it, or the loss compares with it.
    `num_skipped` are the steps in a row, up to this one, that changed nothing because they were not finite.
    `dataset_digest` is that of `Author`.
    """

    format: int
    run_uid: str
    run_hash: str
    step: int
    lineage: int
    chain_hash: str
    epoch: int
    world_size: int
    determinism: str
    conditions: dict[str, str]
    objects: tuple[CheckpointObject, ...]
    created: str
    base_digest: str = ""
    num_skipped: int = 0
    dataset_digest: str = ""

    @property
    def size_bytes(self) -> int:
        """Return the number of bytes of all files of the checkpoint."""
        return sum(item.size_bytes for item in self.objects)

    def to_bytes(self) -> bytes:
        """Encode the manifest as canonical JSON with a checksum."""
        return with_checksum(asdict(self))

    @classmethod
    def from_bytes(cls, data: bytes, *, source: str) -> "CheckpointManifest":
        """Parse a manifest; raise CorruptObjectError naming `source` if it is damaged or of another format."""
        what, reason = f"checkpoint manifest {source}", "CHECKPOINT_MANIFEST_INVALID"
        raw = decode_object(data, what=what, reason=reason, remedy=_REMEDY, max_bytes=MAX_MANIFEST_BYTES)
        try:
            require_checksum(raw)
            return _manifest(Fields(raw))
        except ValueError as error:
            raise CorruptObjectError(f"{what} is not readable: {error}", reason=reason, remedy=_REMEDY) from error


def _manifest(fields: Fields) -> CheckpointManifest:
    """Decode the fields of a manifest; raise ValueError if one is malformed or the format is another one."""
    if (found := fields.integer("format")) != FORMAT:
        raise ValueError(f"its format is {found} and this version reads {FORMAT}")
    objects = tuple(decode_checkpoint_object(item) for item in fields.objects("objects", most=_MAX_OBJECTS))
    if len({item.name for item in objects}) != len(objects):
        raise ValueError("a file is named twice")
    return CheckpointManifest(
        format=found,
        run_uid=fields.text("run_uid"),
        run_hash=fields.text("run_hash"),
        step=fields.integer("step"),
        lineage=fields.integer("lineage"),
        chain_hash=fields.hexadecimal("chain_hash", num_bytes=32),
        epoch=fields.integer("epoch"),
        world_size=fields.integer("world_size", least=1),
        determinism=fields.text("determinism"),
        conditions=fields.table("conditions", most=100),
        objects=objects,
        created=fields.text("created"),
        base_digest=fields.text("base_digest"),
        num_skipped=fields.integer("num_skipped") if fields.has("num_skipped") else 0,
        dataset_digest=fields.text("dataset_digest", most=64) if fields.has("dataset_digest") else "",
    )


def decode_checkpoint_object(fields: Fields) -> CheckpointObject:
    """Decode one entry of a manifest; raise ValueError if it is malformed or its name is not a plain file name."""
    name = fields.text("name", most=200)
    if not name or "/" in name or "\\" in name or "\0" in name or name.startswith("."):
        raise ValueError(f"file name {name!r} is not a plain name")
    return CheckpointObject(
        name=name,
        key=fields.key("key"),
        sha256=fields.hexadecimal("sha256", num_bytes=32),
        size_bytes=fields.integer("size_bytes", most=_MAX_OBJECT_BYTES),
    )


def conditions(device: "torch.device", *, rows: str) -> dict[str, str]:
    """Return by name what bit-exactness depends on besides the log: versions, threads, instruction set, device.

    `rows` describes how rows are made (`Author.rows`); it is left out if empty.
    """
    import torch  # readers of manifests do without

    found = {
        "millrace": millrace.__version__,
        "torch": torch.__version__,
        "transformers": version("transformers"),  # the code of the models
        "python": platform.python_version(),
        "machine": platform.machine(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "num_threads": str(torch.get_num_threads()),
    }
    return found | ({"rows": rows} if rows else {})


def require_same_conditions(manifest: CheckpointManifest, *, run_hash: str, device: "torch.device", rows: str) -> None:
    """Raise InvalidStateError if a strict resume would not be bit-exact, naming every condition that differs.

    `run_hash` is that of the run's config, and `rows` describes how rows are made now. The number of ranks is not
    compared: with another one a strict run goes on in a new lineage. Neither are `rows` if the checkpoint does not have
    them.
    """
    now = {**conditions(device, rows=rows), "run_hash": run_hash}
    then = {**manifest.conditions, "run_hash": manifest.run_hash}
    if "rows" not in then:
        now.pop("rows", None)
    differing = [f"{name} was {then.get(name)}, is {value}" for name, value in now.items() if then.get(name) != value]
    if differing:
        raise InvalidStateError(
            f"checkpoint {manifest.step} of run {manifest.run_uid} cannot be continued bit for bit: "
            + "; ".join(differing),
            reason="CHECKPOINT_CONDITIONS_DIFFER",
            remedy='resume under the same conditions, or set trainer.determinism = "best_effort" in a new run',
        )


def require_same_base(manifest: CheckpointManifest, *, base_digest: str) -> None:
    """Raise InvalidStateError unless the checkpoint needs the same start model as this trainer's state.

    `base_digest` is the digest of the start model that the state needs besides itself (adapters on it, or a loss that
    compares with it); "" if it needs none.
    """
    if manifest.base_digest == base_digest:
        return
    then, now = (
        f"weights that need a start model of digest {d}" if d else "all weights"
        for d in (manifest.base_digest, base_digest)
    )
    raise InvalidStateError(
        f"checkpoint {manifest.step} of run {manifest.run_uid} holds {then}, and this trainer trains {now}",
        reason="CHECKPOINT_BASE_DIFFERS",
        remedy="give the model that the run began with (`model.name` of the config), in the same formats",
    )


def require_same_dataset(manifest: CheckpointManifest, *, dataset_digest: str) -> None:
    """Raise InvalidStateError if the rows of `[trainer.dataset]`, or the chat template, changed since the checkpoint.

    A checkpoint without a digest, such as the one that a fork begins with, is accepted.
    """
    if manifest.dataset_digest and manifest.dataset_digest != dataset_digest:
        raise InvalidStateError(
            f"checkpoint {manifest.step} of run {manifest.run_uid} was trained on other rows of trainer.dataset, or "
            f"under another chat template, than are there now (digest {manifest.dataset_digest or 'none'}, now "
            f"{dataset_digest or 'none'}): the next steps would take some rows twice, and some never",
            reason="CHECKPOINT_DATASET_DIFFERS",
            remedy="restore the files of trainer.dataset.name and the chat template, then `millrace run resume` the "
            "run; to go on with other rows fork it (`millrace run fork`)",
        )
