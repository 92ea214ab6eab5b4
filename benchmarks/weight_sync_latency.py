"""From publish to serving: the trainer's committer, a local object store, a replica's host copy, and an engine.

Two runs side by side over the same versions of a bf16 model, one with `policy.delta` and one without; the versions
alternate between the runs, so that both see the same machine. An engine is anything that implements `EngineUnderTest`.
"""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from report import progress, table
from weight_sync_data import nearest_bf16, step_size

from millrace.config.trainer import PolicyConfig
from millrace.inference.embedded import EmbeddedEngine
from millrace.inference.engine import InflightMode, PolicyIdentity
from millrace.policies.host_copy import HostCopy
from millrace.policies.parts import whole_parts
from millrace.policies.staged import StagedPolicy
from millrace.policies.tensors import TensorBytes
from millrace.runlog.names import Names
from millrace.storage.local import LocalStore
from millrace.trainer.commit import Committer, VersionInput
from millrace.trainer.distributed import Gang

DENSITY = 0.009
FULL, DELTA = "full copies", "deltas"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """Seconds in which an engine does not generate: writing the new weights, and proving that it holds them."""

    apply_s: float
    prove_s: float


class EngineUnderTest(Protocol):
    """An engine that is updated by staged policies; all calls block."""

    def load(self, model_dir: Path, staged: StagedPolicy) -> None:
        """Puts in the model with the weights of `staged`, whatever was held."""
        ...

    def update(self, staged: StagedPolicy) -> Pause:
        """Brings the held model to `staged` while it is paused, and proves it."""
        ...


class Embedded:
    """The embedded engine, in this process."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self._runner = runner
        self._engine = EmbeddedEngine()

    def load(self, model_dir: Path, staged: StagedPolicy) -> None:
        self._runner.run(self._engine.load(model_dir, staged, identity=_identity(staged)))

    def update(self, staged: StagedPolicy) -> Pause:
        return self._runner.run(self._update(staged))

    async def _update(self, staged: StagedPolicy) -> Pause:
        await self._engine.check(staged)
        began = time.perf_counter()
        await self._engine.apply_policy(staged, identity=_identity(staged), inflight_mode=InflightMode.KEEP)
        applied = time.perf_counter()
        await self._engine.prove(staged)
        return Pause(apply_s=applied - began, prove_s=time.perf_counter() - applied)

    def close(self) -> None:
        self._runner.run(self._engine.close())


@contextmanager
def embedded() -> Iterator[EngineUnderTest]:
    with asyncio.Runner() as runner:
        engine = Embedded(runner)
        try:
            yield engine
        finally:
            engine.close()


@contextmanager
def no_engine() -> Iterator[None]:
    yield None


ENGINES: dict[str, Callable[[], AbstractContextManager[EngineUnderTest | None]]] = {
    "none": no_engine,
    "embedded": embedded,
}


def _identity(staged: StagedPolicy) -> PolicyIdentity:
    manifest = staged.manifest
    return PolicyIdentity(run_uid=manifest.run_uid, lineage=manifest.lineage, version=manifest.version)


@dataclass(slots=True, kw_only=True)
class Times:
    """Seconds of each version, and bytes that were read for it."""

    publish_s: list[float] = field(default_factory=list)
    stage_s: list[float] = field(default_factory=list)
    apply_s: list[float] = field(default_factory=list)
    prove_s: list[float] = field(default_factory=list)
    reload_s: list[float] = field(default_factory=list)
    fetched_bytes: list[float] = field(default_factory=list)

    @property
    def staged_s(self) -> list[float]:
        return [sum(pair) for pair in zip(self.publish_s, self.stage_s, strict=True)]


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
            max_position_embeddings=512,
            tie_word_embeddings=True,
        )
        config.save_pretrained(directory)
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        self.directory = directory
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
            store=store,
            names=Names("benchmark", uid),
            gang=Gang(),
            config=PolicyConfig(delta=name == DELTA),
            lineage=0,
            epoch=1,
            files=(),
        )
        self._copy = HostCopy(store, directory=place / uid)
        self._engine = engine
        self.times = Times()

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
            if version <= 3:  # a reload takes long, and is the same every time
                began = time.perf_counter()
                self._engine.load(model_dir, staged)
                self.times.reload_s.append(time.perf_counter() - began)


def latency_report(*, quick: bool, versions: int, engine: str) -> str:
    """The table as Markdown."""
    with tempfile.TemporaryDirectory(prefix="weight-sync-") as directory, ENGINES[engine]() as under_test:
        place = Path(directory)
        model = Model(place / "model", quick=quick)
        runs = {name: Run(place, name, under_test) for name in (FULL, DELTA)}
        for version in range(versions + 1):
            progress(f"publish to serving: version {version} of {versions}")
            tensors = model.published()
            for name in sorted(runs, reverse=bool(version % 2)):
                # Both runs share the engine: their versions have the same bits, and to write them twice is as long.
                runs[name].update(version, tensors, model.directory)
            model.train()
        rows = [_row(name, run.times) for name, run in runs.items()]
        size = model.num_parameters
    header = ["", "MB read", "publish", "stage", "publish to staged", "apply", "prove", "full reload"]
    return (
        f"## Publish to serving\n\n{size:,} parameters in bf16, {100 * DENSITY:g} % of the weights change per version, "
        f"local object store, engine: {engine}. Seconds, medians of {versions} versions.\n\n{table(header, rows)}"
    )


def _row(name: str, times: Times) -> list[str]:
    def median(values: Sequence[float], form: str = ".3f") -> str:
        return format(statistics.median(values), form) if values else "-"

    megabytes = [value / 1e6 for value in times.fetched_bytes]
    seconds = (times.publish_s, times.stage_s, times.staged_s, times.apply_s, times.prove_s, times.reload_s)
    return [name, median(megabytes, ".1f"), *map(median, seconds)]
