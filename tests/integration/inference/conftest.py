"""The tiny model of the unit tests, published policies, and servers on loopback."""

import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.inference.embedded.engine import EmbeddedEngine
from millrace.inference.http.server import HttpApi, start_http
from millrace.inference.model_files import ModelSlot
from millrace.inference.updater import PolicyUpdater
from millrace.internal.v1.policy_pb2 import PolicyEntry
from millrace.policies.manifest import PolicyPlace
from millrace.policies.publish import PolicyContents, PublishedPolicy, publish_policy
from millrace.storage.base import ObjectStore
from millrace_testing.inference import tiny
from millrace_testing.inference.registry import Orchestrator, orchestrator
from millrace_testing.inference.tiny import make_model, model_dir, reference

__all__ = ["Orchestrator", "make_model", "model_dir", "orchestrator", "reference"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A server with everything behind it."""

    base_url: str
    engine: EmbeddedEngine
    slot: ModelSlot
    updater: PolicyUpdater
    api: HttpApi
    model: torch.nn.Module


@pytest.fixture
def publish(model_dir: Path) -> Callable[..., PolicyEntry]:
    """Return publishes a model as a version of a run, as a trainer does."""

    def run(store: ObjectStore, model: torch.nn.Module, version: int, *, uid: str = "run1", **more: Any) -> PolicyEntry:
        published: PublishedPolicy = publish_policy(
            store,
            PolicyPlace(prefix="test", uid=uid, lineage=0, version=version),
            PolicyContents(
                tensors=tiny.tensors_of(model).items(),
                files={path.name: path.read_bytes() for path in model_dir.iterdir()},
                **more,
            ),
            epoch=1,
        )
        return PolicyEntry(
            lineage=0,
            version=version,
            manifest_key=published.manifest_key,
            manifest_sha256=published.manifest_sha256,
            digest=published.manifest.digest,
        )

    return run


@pytest.fixture
def full_model_dir(tmp_path: Path) -> Path:
    """Return config, tokenizer and weights of the model with seed 0."""
    path = tmp_path / "model"
    tiny.tiny_model(0).save_pretrained(path)
    tiny.tiny_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
async def served(full_model_dir: Path) -> AsyncIterator[Served]:
    """Yield the HTTP API over the model with seed 0."""
    engine, slot = EmbeddedEngine(max_num_seqs=16), ModelSlot()
    updater = PolicyUpdater(engine, slot, None, None, extra_names=("my-model",))
    await updater.serve_fixed(full_model_dir)
    api = HttpApi(engine, slot)
    server = await start_http(api, "127.0.0.1", 0)
    yield Served(
        base_url=f"http://127.0.0.1:{server.port}",
        engine=engine,
        slot=slot,
        updater=updater,
        api=api,
        model=tiny.tiny_model(0),
    )
    await server.stop()
    await engine.close()


@pytest.fixture
def unused_port() -> Callable[[], int]:
    """Return finds ports that are free at the moment."""

    def find() -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return probe.getsockname()[1]

    return find
