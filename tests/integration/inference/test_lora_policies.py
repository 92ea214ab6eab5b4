"""Adapters from an object store in the embedded engine: put on their base, replaced, taken away, refused."""

import asyncio
import copy
import json
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from millrace.inference.embedded import weights
from millrace.inference.embedded.engine import EmbeddedEngine
from millrace.inference.engine import GenerateRequest, InflightMode, SamplingParams
from millrace.inference.model_files import ModelSlot
from millrace.inference.updater import DesiredPolicy, PolicyUpdater, UpdateState
from millrace.policies.adapter import ADAPTER_CONFIG, AdapterSpec
from millrace.policies.host_copy import HostCopy
from millrace.policies.manifest import AdapterEntry, PolicyPlace, Probe
from millrace.policies.publishing.publish import PolicyContents, publish_policy
from millrace.policies.tensors import TensorBytes
from millrace.storage.local import LocalStore

SPEC = AdapterSpec(rank=4, alpha=6.0, target_modules=("q_proj", "down_proj"), modules_to_save=("norm",))
LAYERS = [f"model.layers.{layer}.{name}" for layer in range(2) for name in ("self_attn.q_proj", "mlp.down_proj")]


class Run:
    """A run that trains adapters on `base`; every adapter's merged twin is a fresh model."""

    def __init__(
        self, store: LocalStore, base: torch.nn.Module, files: dict[str, bytes], spec: AdapterSpec = SPEC
    ) -> None:
        self.store, self.base, self.spec = store, base, spec
        self.files = {**files, ADAPTER_CONFIG: spec.to_config()}
        tensors = {n: t for n, t in base.state_dict().items() if n != "lm_head.weight"}
        self.base_manifest, self.base_desired = self._publish(0, tensors, base)
        self.twins = {0: base}

    def adapter(self, version: int, *, damage: Callable[[dict[str, torch.Tensor]], Any] | None = None) -> DesiredPolicy:
        generator = torch.Generator().manual_seed(version)
        twin = copy.deepcopy(self.base)
        tensors: dict[str, torch.Tensor] = {}
        for layer in LAYERS:
            weight = twin.get_submodule(layer).weight
            low = torch.randn(self.spec.rank, weight.shape[1], generator=generator) * 0.1
            high = torch.randn(weight.shape[0], self.spec.rank, generator=generator) * 0.1
            tensors |= {f"{layer}.lora_A.weight": low, f"{layer}.lora_B.weight": high}
            weight += self.spec.scaling * high @ low
        if self.spec.modules_to_save:
            norm = twin.get_parameter("model.norm.weight")
            norm += 0.1 * version
            tensors["model.norm.weight"] = norm.clone()
        if damage is not None:
            damage(tensors)
        self.twins[version] = twin
        named = {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}
        return self._publish(version, named, twin, is_adapter=True)[1]

    def _publish(self, version: int, tensors: dict[str, torch.Tensor], twin: torch.nn.Module, *, is_adapter=False):
        entry = None
        if is_adapter:
            manifest = self.base_manifest
            entry = AdapterEntry(
                rank=self.spec.rank,
                alpha=self.spec.alpha,
                target_modules=self.spec.target_modules,
                modules_to_save=self.spec.modules_to_save,
                base_key=manifest.key,
                base_digest=manifest.digest,
                base_bytes=manifest.full_bytes,
            )
        tokens = tuple(range(1, 17))
        published = publish_policy(
            self.store,
            PolicyPlace(prefix="test", uid="run1", lineage=0, version=version),
            PolicyContents(
                tensors=[(name, TensorBytes.from_numpy(tensor.numpy())) for name, tensor in tensors.items()],
                files=self.files,
                probe=Probe(token_ids=tokens, logprobs=tuple(weights.prompt_logprobs(twin, tokens))),
                adapter=entry,
            ),
            epoch=1,
        )
        desired = DesiredPolicy(
            run_uid="run1",
            lineage=0,
            version=version,
            manifest_key=published.manifest_key,
            manifest_sha256=published.manifest_sha256,
            digest=published.manifest.digest,
        )
        return published.manifest, desired


class Replica:
    """The embedded engine behind an updater."""

    def __init__(self, store: LocalStore) -> None:
        self.engine, self.slot = EmbeddedEngine(max_num_seqs=4), ModelSlot()
        self.updater = PolicyUpdater(self.engine, self.slot, store, HostCopy(store))

    async def update(self, desired: DesiredPolicy) -> UpdateState:
        self.updater.desire(desired, mode=InflightMode.KEEP, epoch=1)
        await self.updater.wait(desired, timeout_s=30)
        return self.updater.status().state

    async def logprob_gap(self, twin: torch.nn.Module) -> float:
        """Greatest difference between the engine's sampled log-probs and a forward pass of a fresh model."""
        params = SamplingParams(max_tokens=12, seed=3, ignore_eos=True)
        request = GenerateRequest(request_id="x", prompt_token_ids=(1, 2, 3), sampling=params)
        generation = await self.engine.generate(request)
        tokens = [1, 2, 3, *generation.token_ids.tolist()]
        expected = weights.prompt_logprobs(twin, tokens)[2:]
        return float(np.abs(np.asarray(expected) - generation.logprobs).max())


@pytest.fixture
def run(local_store: LocalStore, model_dir, make_model) -> Run:
    return Run(local_store, make_model(0), {path.name: path.read_bytes() for path in model_dir.iterdir()})


@pytest.fixture
async def replica(local_store: LocalStore) -> AsyncIterator[Replica]:
    replica = Replica(local_store)
    updating = asyncio.create_task(replica.updater.run())
    yield replica
    updating.cancel()
    await replica.engine.close()


async def test_an_adapter_is_loaded_replaced_and_unloaded(run: Run, replica: Replica) -> None:
    for desired in (run.base_desired, run.adapter(1), run.adapter(2), run.base_desired):
        assert await replica.update(desired) is UpdateState.SERVING, replica.updater.status().error
        status = replica.updater.status()
        assert (status.digest, status.proof) == (desired.digest, "readback+probe")
        for version, twin in run.twins.items():
            gap = await replica.logprob_gap(twin)
            assert (gap < 1e-5) == (version == desired.version), (desired.version, version, gap)
        if desired.version:
            assert status.fetched_bytes < status.full_bytes / 4


async def test_a_replica_that_joins_late_loads_the_base_first(run: Run, replica: Replica) -> None:
    desired = run.adapter(3)
    assert await replica.update(desired) is UpdateState.SERVING, replica.updater.status().error
    assert await replica.logprob_gap(run.twins[3]) < 1e-5
    status = replica.updater.status()
    assert status.identity is not None and status.identity.version == 3
    assert status.fetched_bytes > run.base_manifest.full_bytes


def _wrong_shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{LAYERS[0]}.lora_A.weight"] = torch.zeros(4, 3)


def _half(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[f"{LAYERS[0]}.lora_A.weight"]


def _unknown(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.7.mlp.up_proj.lora_A.weight"] = torch.zeros(4, 64)
    tensors["model.layers.7.mlp.up_proj.lora_B.weight"] = torch.zeros(192, 4)


def _other_dtype(tensors: dict[str, torch.Tensor]) -> None:
    name = f"{LAYERS[0]}.lora_B.weight"
    tensors[name] = tensors[name].double()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_wrong_shape, r"q_proj\.lora_A\.weight is float32\[4, 3\], the model takes float32\[4, 64\]"),
        (_half, r"q_proj has half an adapter"),
        (_unknown, r"model\.layers\.7\.mlp\.up_proj\.lora_A\.weight belongs to no layer"),
        (_other_dtype, r"lora_B\.weight is float64"),
    ],
)
async def test_an_adapter_that_does_not_fit_leaves_the_old_one(run: Run, replica: Replica, damage, message) -> None:
    await replica.update(run.adapter(1))
    assert await replica.update(run.adapter(2, damage=damage)) is UpdateState.UPDATE_FAILED
    assert re.search(message, replica.updater.status().error), replica.updater.status().error
    assert await replica.logprob_gap(run.twins[1]) < 1e-5


async def test_an_adapter_on_another_base_is_refused(run: Run, replica: Replica, local_store: LocalStore) -> None:
    desired = run.adapter(1)
    manifest = json.loads(local_store.get(desired.manifest_key))
    manifest["adapter"]["base_digest"] = "ab" * 32
    local_store.put(desired.manifest_key, json.dumps(manifest).encode())
    assert await replica.update(replace(desired, manifest_sha256=b"")) is UpdateState.UPDATE_FAILED
    assert "the adapter is on a base of digest abab" in replica.updater.status().error


async def test_an_adapter_that_computes_otherwise_is_not_served(run: Run, replica: Replica) -> None:
    await replica.update(run.adapter(1))
    desired = run.adapter(2, damage=lambda tensors: tensors[f"{LAYERS[1]}.lora_B.weight"].mul_(1.5))
    assert await replica.update(desired) is UpdateState.BROKEN
    assert "probe" in replica.updater.status().error
    assert replica.updater.status().identity is None
    assert await replica.update(run.adapter(3)) is UpdateState.SERVING  # base and adapter anew
    assert await replica.logprob_gap(run.twins[3]) < 1e-5
