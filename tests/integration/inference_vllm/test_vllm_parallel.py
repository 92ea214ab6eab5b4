"""Replicas with several workers on real vLLM: tensor parallel, data parallel, pipeline parallel, over two nodes.

A node is a process tree with a directory of its own. Where the kernel lets us, the second one runs in a mount namespace
in which the first one's directory is empty.
"""

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from millrace.internal.v1 import policy_service_pb2 as pb
from millrace.local.redis import free_port
from millrace.storage.local import LocalStore
from millrace.telemetry.faults import Action, Fault, Point
from millrace_testing.inference import published, vllm_server

GAP = 1e-5  # of float32 log-probs between vLLM and a forward pass of Hugging Face's model; 1e-6 was measured
FLAGS = {"enforce_eager": True, "max_model_len": 256, "max_num_seqs": 4}
PROMPT = [1, 2, 3]
FIRST_OF_TWO, SECOND_OF_TWO = {"ranks_after": 1}, {"rank": 1}
START_S, END_S = 480.0, 60.0  # twice as many processes to start as a replica of one worker has
pytestmark = pytest.mark.timeout(900)


class Run:
    """Versions of one run of a model whose vocabulary of 272 is padded to 320 rows, 160 for each of two ranks."""

    def __init__(self, directory: Path, *, is_tied: bool) -> None:
        self.publisher = published.Publisher(LocalStore(directory / "store"), directory, "run1")
        self.models = [published.model(0, tie_word_embeddings=is_tied)]

    def first(self) -> Any:
        return self.publisher.full(self.models[0], 0)

    def next(self) -> Any:
        version = len(self.models)
        self.models.append(published.nudged(self.models[-1], version))
        return self.publisher.delta(self.models[-1], version, base=version - 1)

    async def assert_newest_computes(self, client: Any, *, times: int = 1) -> None:
        """What is sampled now has the log-probs of a new HF model with the newest weights, and of no older one."""
        for _ in range(times):
            found = await client.generate(PROMPT)
            gaps = [
                float(np.abs(published.logprobs(model, PROMPT, found.token_ids) - found.logprobs).max())
                for model in self.models
            ]
            print(f"greatest gap by version: {', '.join(f'{gap:.1e}' for gap in gaps)}")
            assert set(found.version_of()) == {len(self.models) - 1}
            assert gaps.pop() <= GAP
            assert all(gap > 100 * GAP for gap in gaps), "versions that compute the same prove nothing"


def start(python: str, directory: Path, flags: dict[str, Any], *, is_tied: bool, **options: Any) -> Any:
    """Return a replica of a fixed model."""
    model = published.model(99, tie_word_embeddings=is_tied)
    published.files(model, directory / "model")
    model.save_pretrained(directory / "model")
    return vllm_server.Server.start(python, directory / "model", directory, FLAGS | flags, start_s=START_S, **options)


@contextmanager
def running(server: Any) -> Iterator[Any]:
    """A server that has to end well."""
    try:
        yield server
        if server.process.poll() is None:
            assert server.stop()[0] == 0, server.log()
    finally:
        server.kill()


async def settled(client: Any, entry: Any) -> Any:
    """Return updates until the version serves or has failed.

    A first forward pass takes long where many share two cores.
    """
    async with asyncio.timeout(300):
        while True:
            status = await client.update(entry)
            if status.state in (pb.POLICY_STATE_BROKEN, pb.POLICY_STATE_UPDATE_FAILED):
                return status
            if status.state == pb.POLICY_STATE_SERVING and status.digest == entry.digest:
                return status


async def serve(client: Any, entry: Any) -> Any:
    status = await settled(client, entry)
    assert status.state == pb.POLICY_STATE_SERVING, (status.error, client.server.log())
    return status


async def goes_through_versions(client: Any, run: Run, *, times: int = 1) -> None:
    """A whole policy, then deltas."""
    await serve(client, run.first())
    await run.assert_newest_computes(client, times=times)
    for _ in range(2):
        status = await serve(client, run.next())
        assert 0 < status.fetched_bytes < status.full_bytes / 5
        await run.assert_newest_computes(client, times=times)


async def survives_a_failure(client: Any, run: Run, when: dict[str, int], rank: str, *, times: int = 1) -> None:
    """One rank that fails makes the replica serve nothing, until all ranks have loaded the anchor."""
    fired = client.server.arm(Fault(point=Point.INFERENCE_MID_APPLY, action=Action.RAISE, when=when))
    entry = run.next()
    status = await settled(client, entry)
    assert status.state == pb.POLICY_STATE_BROKEN and not status.has_version, status
    assert rank in status.error and "fault injected" in status.error, status.error
    where = json.loads(fired.read_text())["where"]
    assert all(where[name] == number for name, number in when.items()), where
    code, _, _ = await client.post(
        "/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": {"max_tokens": 2}}
    )
    assert code == 503
    healed = await serve(client, entry)
    assert healed.fetched_bytes > healed.full_bytes, "the anchor, and the deltas on it"
    await run.assert_newest_computes(client, times=times)


def plain_linears(directory: Path) -> dict[str, str]:
    """Return the environment in which vLLM's CPU build computes with plain weights, as on a GPU, by a vLLM plugin."""
    (directory / "plain_linears.py").write_text(
        "def register():\n    import vllm._custom_ops as ops\n    ops._supports_onednn = False\n"
    )
    about = directory / "plain_linears-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: plain-linears\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[vllm.general_plugins]\nplain_linears = plain_linears:register\n")
    return {"VLLM_PLUGINS": "plain_linears", "PYTHONPATH": str(directory)}


async def test_two_ranks_hold_prove_and_fail_as_one(vllm_python: str, tmp_path: Path) -> None:
    """Plain weights: shards of fused projections are written in place, and every box is read back on its rank."""
    environ = plain_linears(tmp_path)
    with running(start(vllm_python, tmp_path, {"tensor_parallel_size": 2}, is_tied=True, **environ)) as server:
        async with server.client() as client:
            run = Run(tmp_path, is_tied=True)
            assert (await serve(client, run.first())).proof == "readback+probe"
            await run.assert_newest_computes(client)
            status = await serve(client, run.next())
            assert status.proof == "readback+probe" and 0 < status.fetched_bytes < status.full_bytes / 5
            await run.assert_newest_computes(client)
            await survives_a_failure(client, run, FIRST_OF_TWO, "rank 0 of 2")


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        {"tensor_parallel_size": 2},
        pytest.param(
            {"pipeline_parallel_size": 2},
            marks=pytest.mark.xfail(
                strict=True,
                reason="vLLM 0.32 on CPUs: a second rank has intermediate tensors only after a dummy run, which an "
                "eager engine never has: its first request dies in sync_and_gather_intermediate_tensors",
            ),
        ),
    ],
    ids=["tensor", "pipeline"],
)
async def test_two_ranks_with_packed_weights(vllm_python: str, tmp_path: Path, flags: dict[str, Any]) -> None:
    with running(start(vllm_python, tmp_path, flags, is_tied=False)) as server:
        async with server.client() as client:
            run = Run(tmp_path, is_tied=False)
            await goes_through_versions(client, run)
            await survives_a_failure(client, run, FIRST_OF_TWO, "rank 0 of 2")
            await survives_a_failure(client, run, SECOND_OF_TWO, "rank 1 of 2")


@pytest.mark.slow
async def test_two_engine_cores_change_together(vllm_python: str, tmp_path: Path) -> None:
    """Data parallel: requests go to either core, so that several show both."""
    with running(start(vllm_python, tmp_path, {"data_parallel_size": 2}, is_tied=False)) as server:
        async with server.client() as client:
            run = Run(tmp_path, is_tied=False)
            await goes_through_versions(client, run, times=4)
            async with client.session.get("/metrics") as response:
                lines = [
                    line for line in (await response.text()).splitlines() if "vllm:generation_tokens_total{" in line
                ]
            tokens = {
                engine: sum(float(line.split()[-1]) for line in lines if f'engine="{engine}"' in line)
                for engine in "01"
            }
            assert all(number > 16 for number in tokens.values()), f"both cores have generated: {tokens}"
            await survives_a_failure(client, run, {}, "of 2", times=4)


class Node:
    """A launcher that serves nothing, with its vLLM workers, in a directory of its own."""

    def __init__(self, head: Any, rank: int) -> None:
        self.directory = head.directory / f"node-{rank}"
        self.directory.mkdir()
        environ = dict(head.environ) | {"MILLRACE_SCRATCH_DIR": str(self.directory)}
        flags = json.loads(environ["MILLRACE_VLLM_FLAGS"]) | {"node_rank": rank}
        environ["MILLRACE_VLLM_FLAGS"] = json.dumps(flags)
        environ["MILLRACE_LISTEN"], environ["MILLRACE_HTTP_LISTEN"] = (f"127.0.0.1:{free_port()}" for _ in range(2))
        command = [sys.executable, "-m", "millrace.inference.main"]
        self.is_apart = can_hide()
        if self.is_apart:
            hide = f'mount -t tmpfs none "{head.environ["MILLRACE_SCRATCH_DIR"]}" && exec "$@"'
            command = ["unshare", "-rm", "sh", "-c", hide, "sh", *command]
        with (self.directory / "node.log").open("wb") as sink:
            self.process = subprocess.Popen(command, env=environ, stdout=sink, stderr=subprocess.STDOUT)

    def log(self) -> str:
        return (self.directory / "node.log").read_text()[-6000:]


def can_hide() -> bool:
    """Return whether this machine lets a process mount over a directory for itself alone."""
    if shutil.which("unshare") is None:
        return False
    tried = subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=False)
    return tried.returncode == 0


def maps_of(root: int) -> set[Path]:
    """Return the policy files that a process and those below it map."""
    found: set[Path] = set()
    top = psutil.Process(root)
    for process in (top, *top.children(recursive=True)):
        try:
            found |= {Path(one.path) for one in process.memory_maps() if one.path.endswith("policy.safetensors")}
        except psutil.Error:
            continue  # it has ended
    return found


@pytest.mark.slow
async def test_a_node_that_cannot_read_the_heads_files_pulls_by_itself(vllm_python: str, tmp_path: Path) -> None:
    flags = {"tensor_parallel_size": 2, "nnodes": 2, "node_rank": 0, "master_addr": "127.0.0.1"}
    nodes: list[Node] = []
    head_dir = tmp_path / "head"
    head_dir.mkdir()
    server = start(
        vllm_python,
        tmp_path,
        flags | {"master_port": free_port()},
        is_tied=True,
        beside=lambda head: nodes.append(Node(head, 1)),
        MILLRACE_SCRATCH_DIR=str(head_dir),
    )
    [node] = nodes
    with running(server):
        async with server.client() as client:
            run = Run(tmp_path, is_tied=True)
            await goes_through_versions(client, run)
            [copy] = node.directory.glob("millrace-node-*")
            [heads] = head_dir.glob("*/policy.safetensors")
            assert (copy / "policy.safetensors").read_bytes() == heads.read_bytes()
            assert not any(path.is_relative_to(head_dir) for path in maps_of(node.process.pid))
            await survives_a_failure(client, run, FIRST_OF_TWO, "rank 0 of 2")
            await survives_a_failure(client, run, SECOND_OF_TWO, "rank 1 of 2")
            lost = run.publisher.delta(published.nudged(run.models[-1], 99), 99, base=len(run.models) - 1)
            (copy / "changes.bin").unlink()
            (copy / "changes.bin").mkdir()  # this node's disk fails, the head's does not
            status = await settled(client, lost)
            assert status.state == pb.POLICY_STATE_UPDATE_FAILED and status.has_version, status
            assert "rank 1 of 2" in status.error and "could not fetch" in status.error, status.error
            await run.assert_newest_computes(client)
            (copy / "changes.bin").rmdir()
            await serve(client, run.next())
            await run.assert_newest_computes(client)
        assert server.stop()[0] == 0, server.log()
        assert node.process.wait(END_S) == 5, node.log()
        assert "has ended" in node.log()
        assert not server.tree(), "nothing is left on any node"
    print(f"the other node ran in a mount namespace of its own: {node.is_apart}")


@pytest.mark.slow
async def test_no_process_of_two_engine_cores_outlives_a_killed_launcher(vllm_python: str, tmp_path: Path) -> None:
    """Also not the coordinator of the cores, which loads none of vLLM's plugins."""
    with running(start(vllm_python, tmp_path, {"data_parallel_size": 2}, is_tied=False)) as server:
        assert any("VLLM::DPCoordinator" in process.cmdline() for process in server.tree())
        server.process.kill()
        server.process.wait(END_S)
        async with asyncio.timeout(END_S):
            while server.tree():
                await asyncio.sleep(0.1)  # other people's processes have no event
