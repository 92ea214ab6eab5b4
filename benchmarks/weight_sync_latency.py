"""From publish to serving: the trainer's committer, a local object store, a replica's host copy, and an engine.

Two runs side by side over the same versions of a bf16 model, one with `policy.delta` and one without, each with an
engine of its own; the versions alternate between the runs, so that both see the same machine. Beside them stands what
systems without deltas do: pause, read a safetensors file, write it into the model, go on, and prove nothing.
"""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import safetensors.torch
import torch
import transformers
from numpy.typing import NDArray
from report import progress, table
from weight_sync_data import nearest_bf16, step_size

from millrace.config.sections.trainer import PolicyConfig
from millrace.inference.embedded.engine import EmbeddedEngine
from millrace.inference.engine import InflightMode, PolicyIdentity
from millrace.policies.host_copy import HostCopy
from millrace.policies.manifest import StagedPolicy
from millrace.policies.publish import whole_parts
from millrace.policies.tensors import TensorBytes
from millrace.runlog.names import Names
from millrace.storage.local import LocalStore
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.publish.commit import Committer, VersionInput
from millrace.trainer.publish.plan import PublishTarget

DENSITY = 0.009
FULL, DELTA = "full copies", "deltas"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """Seconds in which an engine does not generate: writing the new weights, and proving that it holds them.

    `prepare_s` came before, while it generated.
    """

    prepare_s: float
    apply_s: float
    prove_s: float


class EngineUnderTest(Protocol):
    """An engine that is updated by staged policies; all calls block."""

    def load(self, model_dir: Path, staged: StagedPolicy) -> None:
        """Puts in the model with the weights of `staged`, whatever was held, and proves it."""
        ...

    def update(self, staged: StagedPolicy) -> Pause:
        """Brings the held model to `staged` while it is paused, and proves it."""
        ...

    def read_file(self, path: Path) -> float:
        """Seconds of a pause in which a safetensors file is read and written into the held model; unproved."""
        ...

    def close(self) -> None:
        """Ends it."""
        ...


class Embedded:
    """The embedded engine, in this process."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._engine = EmbeddedEngine(num_threads=2)

    def load(self, model_dir: Path, staged: StagedPolicy) -> None:
        self._runner.run(self._load(model_dir, staged))

    async def _load(self, model_dir: Path, staged: StagedPolicy) -> None:
        await self._engine.load(model_dir, staged, identity=_identity(staged))
        await self._engine.prove(staged)

    def update(self, staged: StagedPolicy) -> Pause:
        return self._runner.run(self._update(staged))

    async def _update(self, staged: StagedPolicy) -> Pause:
        began = time.perf_counter()
        await self._engine.check(staged)
        checked = time.perf_counter()
        await self._engine.apply_policy(staged, identity=_identity(staged), inflight_mode=InflightMode.KEEP)
        applied = time.perf_counter()
        await self._engine.prove(staged)
        return Pause(prepare_s=checked - began, apply_s=applied - checked, prove_s=time.perf_counter() - applied)

    def read_file(self, path: Path) -> float:
        held = self._engine._weights
        assert held is not None
        began = time.perf_counter()
        self._runner.run(self._engine._in_thread(lambda: _read_into(held._model, path)))
        return time.perf_counter() - began

    def close(self) -> None:
        self._runner.run(self._engine.close())
        self._runner.close()


@torch.no_grad()
def _read_into(model: torch.nn.Module, path: Path) -> None:
    held = model.state_dict()
    for name, tensor in safetensors.torch.load_file(path).items():
        held[name].copy_(tensor)


ENGINES: dict[str, Callable[[], EngineUnderTest] | None] = {"none": None, "embedded": Embedded}


def _identity(staged: StagedPolicy) -> PolicyIdentity:
    manifest = staged.manifest
    return PolicyIdentity(run_uid=manifest.run_uid, lineage=manifest.lineage, version=manifest.version)


@dataclass(slots=True, kw_only=True)
class Times:
    """Seconds of each version, and bytes that were read for it."""

    publish_s: list[float] = field(default_factory=list)
    stage_s: list[float] = field(default_factory=list)
    prepare_s: list[float] = field(default_factory=list)
    apply_s: list[float] = field(default_factory=list)
    prove_s: list[float] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)
    file_s: list[float] = field(default_factory=list)
    fetched_bytes: list[float] = field(default_factory=list)

    @property
    def staged_s(self) -> list[float]:
        return [sum(pair) for pair in zip(self.publish_s, self.stage_s, strict=True)]

    @property
    def pause_s(self) -> list[float]:
        return [sum(pair) for pair in zip(self.apply_s, self.prove_s, strict=True)]


class Model:
    """A small Qwen3 with random weights in bf16 and a master in fp32 that moves by steps of one density."""

    def __init__(self, directory: Path, *, quick: bool) -> None:
        width, layers, vocabulary = (128, 2, 1000) if quick else (768, 12, 32_000)
        config = transformers.Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=layers,
            num_attention_heads=width // 64,
            num_key_value_heads=width // 64,
            head_dim=64,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            architectures=["Qwen3ForCausalLM"],
            dtype="bfloat16",
        )
        config.save_pretrained(directory)
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        self.directory, self.config = directory, config
        self._masters = {name: value.detach().numpy() for name, value in model.named_parameters()}
        self._rng = np.random.default_rng(0)
        self._step = step_size(DENSITY)
        self.num_parameters = sum(master.size for master in self._masters.values())

    def published(self) -> list[tuple[str, TensorBytes]]:
        """A snapshot as bf16."""
        return [
            (name, TensorBytes.from_numpy(nearest_bf16(master), dtype="bfloat16"))
            for name, master in self._masters.items()
        ]

    def train(self) -> None:
        """One step of every weight."""
        for name, master in self._masters.items():
            if master.ndim > 1:
                step: NDArray[np.float32] = self._rng.standard_normal(master.shape, dtype=np.float32)
                step *= self._step
                self._masters[name] = master + step


class Run:
    """One run: its committer, and one replica with a host copy and maybe an engine."""

    def __init__(self, place: Path, name: str, engine: EngineUnderTest | None) -> None:
        uid = name.replace(" ", "-")
        store = LocalStore(place / "store")
        self._committer = Committer(
            PublishTarget(store=store, names=Names("benchmark", uid), gang=Gang(), epoch=1),
            config=PolicyConfig(delta=name == DELTA),
            lineage=0,
            files=(),
        )
        self._copy = HostCopy(store, directory=place / uid)
        self._engine = engine
        self.times = Times()

    def close(self) -> None:
        """Ends the engine."""
        if self._engine is not None:
            self._engine.close()

    def update(self, version: int, tensors: Sequence[tuple[str, TensorBytes]], model_dir: Path) -> None:
        """Publishes a version and brings the replica to it; the first one is not counted."""
        began = time.perf_counter()
        parts = whole_parts(tensors)
        published = self._committer.commit(VersionInput(version=version, parts=parts, probe=None)).published
        assert published is not None
        committed = time.perf_counter()
        staged = self._copy.stage(published.manifest_key, published.manifest_sha256)
        done = time.perf_counter()
        if version == 0:
            if self._engine is not None:
                self._engine.load(model_dir, staged)
            return
        self.times.publish_s.append(committed - began)
        self.times.stage_s.append(done - committed)
        self.times.fetched_bytes.append(staged.fetched_bytes)
        if self._engine is not None:
            pause = self._engine.update(staged)
            self.times.apply_s.append(pause.apply_s)
            self.times.prove_s.append(pause.prove_s)
            self.times.prepare_s.append(pause.prepare_s)
            if staged.changes is None:  # both write every byte, so the two stand side by side
                assert staged.path is not None
                self.times.file_s.append(self._engine.read_file(staged.path))
                began = time.perf_counter()
                self._engine.load(model_dir, staged)
                self.times.load_s.append(time.perf_counter() - began)


def latency_report(*, quick: bool, versions: int, engine: str) -> str:
    """The table as Markdown."""
    make = ENGINES[engine]
    runs: dict[str, Run] = {}
    with tempfile.TemporaryDirectory(prefix="weight-sync-") as directory:
        place = Path(directory)
        model = Model(place / "model", quick=quick)
        try:
            for name in (FULL, DELTA):
                runs[name] = Run(place, name, None if make is None else make())
            for version in range(versions + 1):
                progress(f"publish to serving: version {version} of {versions}")
                tensors = model.published()
                for name in sorted(runs, reverse=bool(version % 2)):
                    runs[name].update(version, tensors, model.directory)
                model.train()
        finally:
            for run in runs.values():
                run.close()
    full, delta = runs[FULL].times, runs[DELTA].times
    header = ["", "MB read", "publish", "stage", "publish to staged", "prepare", "apply", "prove", "pause"]
    return "\n\n".join(
        [
            f"## Publish to serving, engine: {engine}",
            f"{model.num_parameters:,} parameters in bf16, {100 * DENSITY:g} % of the weights change per version, "
            f"local object store. Seconds, medians of {versions} versions (and the slowest pause). The engine does not "
            "generate during `pause`, which is `apply` and `prove`; `prepare` comes before it.",
            table(header, [_row(name, run.times) for name, run in runs.items()]),
            "" if make is None else _reloads(full, delta),
        ]
    ).rstrip()


def _row(name: str, times: Times) -> list[str]:
    megabytes = [value / 1e6 for value in times.fetched_bytes]
    seconds = (times.publish_s, times.stage_s, times.staged_s, times.prepare_s, times.apply_s, times.prove_s)
    pause = f"{median(times.pause_s)} ({max(times.pause_s):.3f})" if times.pause_s else "-"
    return [name, median(megabytes, ".1f"), *map(median, seconds), pause]


def _reloads(full: Times, delta: Times) -> str:
    pause = statistics.median(delta.pause_s)
    ways = {
        "the model built anew and proved": full.load_s,
        "a full copy, staged, written in place and proved": full.pause_s,
        "a safetensors file, read and written in place, unproved": full.file_s,
    }
    rows = [[name, median(found), f"{100 * pause / statistics.median(found):.1f} %"] for name, found in ways.items()]
    return table(["full reload", "seconds", f"a delta's pause ({pause:.3f} s) of it"], rows)


def median(values: Sequence[float], form: str = ".3f") -> str:
    """The median as text; a dash if there are no values."""
    return format(statistics.median(values), form) if values else "-"
