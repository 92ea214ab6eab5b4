"""Adapters from an object store in the embedded engine: put on their base, replaced, taken away, refused."""

import asyncio
import json
import re
from collections.abc import AsyncIterator

import numpy as np
import pytest
import torch

from millrace.inference.embedded.engine import EmbeddedEngine
from millrace.inference.engine import GenerateRequest, InflightMode, SamplingParams
from millrace.inference.model_files import ModelSlot
from millrace.inference.updater import DesiredPolicy, PolicyUpdater, UpdateState
from millrace.policies.host_copy import HostCopy
from millrace.storage.local import LocalStore
from millrace_testing.inference.adapters import LAYERS, Run, half
from millrace_testing.inference.logprobs import prompt_logprobs


class Replica:
    """The embedded engine after an updater."""

    def __init__(self, store: LocalStore) -> None:
        self.engine, self.slot = EmbeddedEngine(max_num_seqs=4), ModelSlot()
        self.updater = PolicyUpdater(self.engine, self.slot, store, HostCopy(store))

    async def update(self, desired: DesiredPolicy) -> UpdateState:
        self.updater.desire(desired, mode=InflightMode.KEEP, epoch=1)
        await self.updater.wait(desired, timeout_s=30)
        return self.updater.status().state

    async def logprob_gap(self, twin: torch.nn.Module) -> float:
        """Return greatest difference between the engine's sampled log-probs and a forward pass of a fresh model."""
        params = SamplingParams(max_tokens=12, seed=3, ignore_eos=True)
        request = GenerateRequest(request_id="x", prompt_token_ids=(1, 2, 3), sampling=params)
        generation = await self.engine.generate(request)
        tokens = [1, 2, 3, *generation.token_ids.tolist()]
        expected = prompt_logprobs(twin, tokens)[2:]
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
        assert (status.digest, status.proof) == (desired.entry.digest, "readback+probe")
        for version, twin in run.twins.items():
            gap = await replica.logprob_gap(twin)
            assert (gap < 1e-5) == (version == desired.entry.version), (desired.entry.version, version, gap)
        if desired.entry.version:
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
        (half, r"q_proj has half an adapter"),
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
    manifest = json.loads(local_store.get(desired.entry.manifest_key))
    manifest["adapter"]["base_digest"] = "ab" * 32
    local_store.put(desired.entry.manifest_key, json.dumps(manifest).encode())
    desired.entry.ClearField("manifest_sha256")
    assert await replica.update(desired) is UpdateState.UPDATE_FAILED
    assert "the adapter is on a base of digest abab" in replica.updater.status().error


async def test_an_adapter_that_computes_otherwise_is_not_served(run: Run, replica: Replica) -> None:
    await replica.update(run.adapter(1))
    desired = run.adapter(2, damage=lambda tensors: tensors[f"{LAYERS[1]}.lora_B.weight"].mul_(1.5))
    assert await replica.update(desired) is UpdateState.BROKEN
    assert "probe" in replica.updater.status().error
    assert replica.updater.status().identity is None
    assert await replica.update(run.adapter(3)) is UpdateState.SERVING  # base and adapter anew
    assert await replica.logprob_gap(run.twins[3]) < 1e-5


async def test_a_base_without_the_adapter_that_failed_on_it_is_no_model_that_serves(run: Run, replica: Replica) -> None:
    await replica.update(run.adapter(1))
    await replica.engine.fail("its memory was found damaged")
    assert await replica.update(run.adapter(2, damage=half)) is UpdateState.UPDATE_FAILED  # the base is in, alone
    desired = run.adapter(3)
    assert await replica.update(desired) is UpdateState.SERVING, replica.updater.status().error
    assert replica.updater.serves(desired) and replica.slot.current is not None
    assert await replica.logprob_gap(run.twins[3]) < 1e-5
