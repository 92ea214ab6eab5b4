"""What an update does to a vLLM whose graphs are captured: where weights are, how long it stands still, adapters."""

import asyncio
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.errors import UnavailableError
from millrace.inference.launch_env import vllm_environ
from millrace.inference.updater import DesiredPolicy
from millrace.inference.vllm.ranks import write_order
from millrace.internal.v1 import policy_service_pb2 as pb
from millrace.policies.host_copy import HostCopy
from millrace.policies.peft.config import AdapterSpec
from millrace.storage.local import LocalStore
from millrace_testing.inference import adapters, published, vllm_server
from millrace_testing.inference.gpu_replicas import (
    FLAGS,
    ROUNDING,
    START_S,
    dense,
    generated,
    made,
    rounded,
    serving,
)
from millrace_testing.repository import REPOSITORY
from millrace_testing.trainer.sizes import config_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]

ADDRESSES = REPOSITORY / "tests" / "support" / "millrace_testing" / "inference" / "vllm_addresses.py"
VERSIONS = 50
APPLIED = "policy applied and proved"
SHARES = {1: 0.01, 2: 0.01, 3: 0.06, 4: 1.0}
"""Of the weights, by version that changes them. The first delta pays for what is done once, and is not counted."""
ADAPTER = AdapterSpec(rank=4, alpha=6.0, target_modules=("q_proj", "down_proj"))


def test_weights_stay_where_graphs_were_captured(gpu: torch.device, cuda_vllm: str, tmp_path: Path) -> None:
    """10 of the list, the engine's half: a whole load and 50 deltas, in place."""
    model = made(dense(is_tied=False), 0)
    first = rounded(model)
    published.files(first, tmp_path / "model")
    first.save_pretrained(tmp_path / "model")  # pyright: ignore[reportCallIssue]
    orders = orders_of(tmp_path, model, VERSIONS)
    asked, out = tmp_path / "orders.json", tmp_path / "found.json"
    asked.write_text(json.dumps(orders))
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MILLRACE_", "VLLM_"))}
    environ |= vllm_environ(environ) | {"PYTHONPATH": str(REPOSITORY / "services"), "VLLM_PLUGINS": ""}
    flags = {name: FLAGS[name] for name in ("dtype", "kv_cache_memory_bytes", "gpu_memory_utilization")}
    command = [cuda_vllm, str(ADDRESSES), str(tmp_path / "model"), str(asked), str(out), json.dumps(flags)]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=START_S)
    assert ended.returncode == 0, ended.stderr[-6000:] + ended.stdout[-3000:]
    found = json.loads(out.read_text())
    assert found["tensors"] >= 10 and not found["moved"]


def orders_of(directory: Path, model: torch.nn.Module, count: int) -> list[dict[str, Any]]:
    """Return what a replica tells its workers of version 0, whole, and of so many deltas, each as its copy was then."""
    publisher = published.Publisher(LocalStore(directory / "store"), directory, "run1")
    place = directory / "copy"
    place.mkdir()
    copy, found = HostCopy(LocalStore(directory / "store"), directory=place), list[dict[str, Any]]()
    for version in range(count + 1):
        if version:
            model = published.nudged(model, version)
            entry = publisher.delta(rounded(model), version, base=version - 1)
        else:
            entry = publisher.full(rounded(model), 0)
        order = write_order(copy.stage(entry.manifest_key, entry.manifest_sha256), place)
        assert (order["changed"] is not None) == bool(version)
        kept = directory / f"order-{version}"
        shutil.copytree(place, kept)
        found.append(json.loads(json.dumps(order).replace(str(place), str(kept))))
    return found


@pytest.mark.parametrize("size", ["0.6B"])
async def test_a_small_delta_stands_still_shorter_than_a_whole_version(
    gpu: torch.device, cuda_vllm: str, tmp_path: Path, size: str
) -> None:
    """12 of the list: of a delta of 1 %, one of 6 %, and all weights, in place, while a request is in flight."""
    model = made(config_of(size), 0)
    flags = {"gpu_memory_utilization": 0.3, "max_model_len": 2048}
    rows: dict[str, dict[str, float]] = {}
    with serving(cuda_vllm, tmp_path / "replica", rounded(model), flags) as server:
        store = published.Publisher(LocalStore(server.directory / "store"), tmp_path, "run1")
        async with server.client() as client:
            await client.serve(store.full(rounded(model), 0))
            for version, share in SHARES.items():
                model = published.nudged(model, version, share=min(share, 0.06))
                held = rounded(model)
                entry = store.delta(held, version, base=version - 1) if share < 1 else store.full(held, version)
                playing = asyncio.create_task(client.generate([1, 2, 3], 1500, seed=version))
                await client.open_requests(1)
                status = await client.serve(entry)
                said = await applied(server, version)
                rows[f"{share:.0%}"] = {"pause_s": status.pause_seconds} | {
                    name: said[name] for name in ("standstill_s", "held_s", "busy_s", "longest_busy_s")
                }
                await playing
    print(f"{size}: " + "; ".join(f"{share} {figures}" for share, figures in rows.items()))
    assert rows["1%"]["pause_s"] < rows["100%"]["pause_s"]
    assert all(figures["pause_s"] <= figures["held_s"] + 0.001 for figures in rows.values())


async def applied(server: vllm_server.Server, version: int) -> dict[str, float]:
    """Return the replica's own account of an update, which its launcher passes on a little later."""
    log, wanted = server.directory / "replica.log", f"{APPLIED} run=run1 version={version} "
    async with asyncio.timeout(30):
        while not (lines := [line for line in log.read_text().splitlines() if wanted in line]):
            await asyncio.sleep(0.1)  # a file has no event for it
    return {name: float(value) for name, value in re.findall(r"(\w+_s)=([\d.e-]+)", lines[-1])}


async def test_adapters_on_captured_graphs_are_the_merged_model(
    gpu: torch.device, cuda_vllm: str, orchestrator: Any, tmp_path: Path
) -> None:
    """9 of the list: an adapter, replaced in place by the next, says what a fresh load of the sum says."""
    base, directory = rounded(made(dense(is_tied=True), 0)), tmp_path / "replica"
    (directory / "store").mkdir(parents=True)
    files = dict(published.files(base, tmp_path / "files"))
    run = adapters.Run(LocalStore(directory / "store"), base, files, ADAPTER)
    server = await started_by(cuda_vllm, directory, run.adapter(1), f"127.0.0.1:{orchestrator[1]}")
    try:
        async with server.client() as client:
            first = await generated(server)
            await client.serve(run.adapter(2).entry)
            second = await generated(server)
            await client.serve(run.base_desired.entry)
            without = await generated(server)
        assert server.stop()[0] == 0, server.log()
    finally:
        server.kill()
    for version, said in ((0, without), (1, first), (2, second)):
        with serving(cuda_vllm, tmp_path / f"merged-{version}", run.twins[version], {}) as fresh:
            wanted = await generated(fresh)
        assert begin(said) == pytest.approx(begin(wanted), abs=ROUNDING), f"version {version}"
    assert begin(second) != pytest.approx(begin(first), abs=ROUNDING), "adapters that say the same"
    assert begin(second) != pytest.approx(begin(without), abs=ROUNDING), "an adapter that says nothing"


async def started_by(python: str, directory: Path, desired: DesiredPolicy, registry: str) -> vllm_server.Server:
    """Return a replica that begins without a model: with the files of the policy that it is asked for first."""
    loop = asyncio.get_running_loop()
    began = loop.create_future()
    starting = asyncio.create_task(
        asyncio.to_thread(
            vllm_server.Server.start,
            python,
            directory,
            directory,
            FLAGS,
            beside=lambda server: loop.call_soon_threadsafe(began.set_result, server),
            start_s=START_S,
            MILLRACE_MODEL="",
            MILLRACE_ORCHESTRATOR=registry,
        )
    )
    server = await began
    async with server.client() as client, asyncio.timeout(START_S):
        while True:
            try:
                status = await client.update(desired.entry)
            except UnavailableError:  # not up yet, or the moment of the hand-over
                if starting.done():
                    await starting  # which says why
                await asyncio.sleep(0.2)
                continue
            if status.state == pb.POLICY_STATE_SERVING and status.version == desired.entry.version:
                break
            assert status.state not in (pb.POLICY_STATE_UPDATE_FAILED, pb.POLICY_STATE_BROKEN), status.error
    return await starting


def begin(said: list[tuple[list[int], list[float]]]) -> list[float]:
    """Return the log-prob of the first token after each prompt."""
    return [logprobs[0] for _, logprobs in said]
