"""Nodes of a replica: the place of each in it, and the copy of the policy that a node pulls by itself."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.errors import InternalError, InvalidSpecError, UnavailableError
from millrace.inference.launcher import Node
from millrace.inference.vllm.ranks import OrderFiles, write_order
from millrace.inference.vllm.workers.node_copy import NodeCopy
from millrace.policies.host_copy import HostCopy
from millrace.policies.manifest import PolicyPlace
from millrace.policies.publish import PolicyContents, publish_policy
from millrace.policies.tensors import TensorBytes
from millrace.storage.local import LocalStore


def test_the_place_of_a_node() -> None:
    assert Node.of({"inference.parallel.tp": 2}) == Node(rank=0, count=1, master=("127.0.0.1", 29501))
    given = {"inference.vllm.nnodes": 2, "node-rank": "1", "master_addr": "head", "inference.vllm.master-port": 7}
    node = Node.of(given)
    assert node == Node(rank=1, count=2, master=("head", 7))
    assert (node.is_head, node.is_alone, node.is_on_one_machine) == (False, False, False)
    for wrong, word in (({"node_rank": 1}, "below nnodes"), ({"nnodes": 2, "node_rank": "$(X)"}, "whole number")):
        with pytest.raises(InvalidSpecError, match=word):
            Node.of(wrong)
    with pytest.raises(InvalidSpecError, match=r"(?s)MILLRACE_MODEL.*MILLRACE_STORE_URL"):
        node.require_model(None, None)
    Node.of({}).require_model(None, None)


async def test_a_node_ends_with_its_head() -> None:
    met = asyncio.Event()
    held: list[asyncio.StreamWriter] = []

    def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held.append(writer)
        met.set()

    server = await asyncio.start_server(meet, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    watching = asyncio.create_task(Node(rank=1, count=2, master=("127.0.0.1", port)).until_head_ends())
    async with asyncio.timeout(20):
        await met.wait()
        assert not watching.done()
        held[0].close()
        with pytest.raises(UnavailableError, match="has ended"):
            await watching
    server.close()


class Run:
    """Published versions, and the head's copy of them with its orders."""

    def __init__(self, root: Path) -> None:
        self.store = LocalStore(root / "store")
        self.head = root / "head"
        self.head.mkdir()
        self.copy = HostCopy(self.store, directory=self.head)
        self.keys: list[str] = []

    def publish(self, bits: list[int]) -> None:
        data = np.array(bits, "<u2")
        tensor = TensorBytes(dtype="bfloat16", shape=(data.size,), data=data.view(np.uint8).data)
        published = publish_policy(
            self.store,
            PolicyPlace(prefix="t", uid="u", lineage=0, version=len(self.keys)),
            PolicyContents(tensors=[("w", tensor)], files={}),
            epoch=1,
        )
        self.keys.append(published.manifest_key)

    def order(self, version: int) -> dict[str, Any]:
        """As the head gives it, with no file of the head that could be read."""
        staged = self.copy.stage(self.keys[version])
        order = write_order(staged, self.head)
        base = None if staged.changes is None or staged.base is None else list(staged.base)
        policy = {"manifest_key": self.keys[version], "digest": staged.manifest.digest, "base": base}
        shutil.rmtree(self.head)
        self.head.mkdir()
        return order | {"number": f"n{version}", "policy": policy}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def node(run: Run, directory: Path) -> NodeCopy:
    directory.mkdir(exist_ok=True)
    return NodeCopy(directory, HostCopy(run.store, directory=directory))


async def fetched(copy: NodeCopy, order: dict[str, Any]) -> None:
    async with asyncio.timeout(30):
        while not copy.is_there(order["number"]):
            await asyncio.sleep(0.01)  # another process would be polled, too


async def test_one_rank_pulls_for_all_of_its_node(run: Run, tmp_path: Path) -> None:
    first, second = node(run, tmp_path / "node"), node(run, tmp_path / "node")
    run.publish([1, 2, 3])
    order = run.order(0)
    with pytest.raises(InternalError, match="not fetched"):
        second.here(order)
    second.begin(order)
    first.begin(order)
    assert second.is_puller and not first.is_puller
    await fetched(first, order)
    for copy in (first, second):
        files = OrderFiles(copy.here(order))
        assert files.raw("w").view("<u2").tolist() == [1, 2, 3]
        assert str(run.head) not in str(copy.here(order))


async def test_a_failure_reaches_every_rank_and_the_next_order_may_succeed(run: Run, tmp_path: Path) -> None:
    first, second = node(run, tmp_path / "node"), node(run, tmp_path / "node")
    run.publish([1, 2, 3])
    good = run.order(0)
    bad = good | {"number": "bad", "policy": good["policy"] | {"digest": "other"}}
    for copy in (first, second):
        copy.begin(bad)
    for copy in (first, second):
        with pytest.raises(InternalError, match="has digest"):
            await fetched(copy, bad)
    gone = good | {"number": "gone", "policy": good["policy"] | {"manifest_key": "t/nowhere"}}
    first.begin(gone)
    with pytest.raises(InternalError, match="nowhere"):
        await fetched(second, gone)
    first.begin(good)
    await fetched(second, good)
    assert OrderFiles(second.here(good)).raw("w").view("<u2").tolist() == [1, 2, 3]


async def test_a_failure_that_cannot_even_be_written_is_answered(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = node(run, tmp_path / "node")
    run.publish([1, 2, 3])
    order = run.order(0)

    def full(*_: Any, **__: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        copy.begin(order)
        with pytest.raises(InternalError, match="No space left"):
            await fetched(copy, order)
    copy.begin(order)
    await fetched(copy, order)


async def test_changes_count_only_against_what_the_head_means(run: Run, tmp_path: Path) -> None:
    for bits in ([1] * 100, [1] * 99 + [2], [1] * 98 + [3, 2]):
        run.publish(bits)
    orders = [run.order(version) for version in range(3)]
    behind = node(run, tmp_path / "node")
    for order in (orders[0], orders[2]):  # it missed one, as after an update that was refused on the head
        behind.begin(order)
        await fetched(behind, order)
    found = behind.here(orders[2])
    assert found["changed"] is None, "everything is written anew"
    assert OrderFiles(found).raw("w").view("<u2").tolist() == [1] * 98 + [3, 2]
