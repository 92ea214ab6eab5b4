"""Versions of several ranks, committed as a trainer's ranks do: deltas, skip deltas and anchors."""

import json
import threading
from collections.abc import Callable

import numpy as np

from millrace.config.sections.trainer import PolicyConfig
from millrace.errors import UnavailableError
from millrace.policies.host_copy import HostCopy, read_manifest
from millrace.policies.manifest import PolicyManifest
from millrace.policies.publish import TensorPart
from millrace.policies.share import ShareWriter
from millrace.processes.shared_memory import SharedMemory, SharedPlace
from millrace.runlog import Names
from millrace.storage.local import LocalStore
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.publish.commit import Committer, VersionInput
from millrace.trainer.publish.plan import PublishTarget

SHAPES = {"embed": (1000, 8), "empty": (0, 4), "norm": (7,), "odd": (5, 3), "scalar": ()}
NAMES = Names("p", "u")


class ThreadGang(Gang):
    """Ranks that are threads of one process."""

    def __init__(self, rank: int, world_size: int, board: "Board") -> None:
        super().__init__(rank=rank, world_size=world_size)
        self._board = board

    def gather(self, data: bytes) -> list[bytes]:
        return self._board.exchange(self.rank, data)

    def broadcast(self, data: bytes | None) -> bytes:
        return self.gather(data or b"")[0]

    def sum(self, values) -> list[float]:
        rows = [json.loads(row) for row in self.gather(json.dumps(list(values)).encode())]
        return [float(sum(column)) for column in zip(*rows, strict=True)]


class Board:
    def __init__(self, size: int) -> None:
        self._rows: list[bytes] = [b""] * size
        self._barrier = threading.Barrier(size)

    def exchange(self, rank: int, data: bytes) -> list[bytes]:
        self._rows[rank] = data
        self._barrier.wait(20)
        rows = list(self._rows)
        self._barrier.wait(20)
        return rows


class Trainer:
    """Publishes versions whose weights move a little at each step, with `world_size` ranks."""

    def __init__(
        self,
        store: LocalStore,
        *,
        world_size: int = 1,
        share: float = 0.01,
        lineage: int = 0,
        is_strict: bool = True,
        is_process: bool = False,
        **config,
    ) -> None:
        """Take `is_process`: each rank's share is written by a process of its own; call `close` at the end."""
        board = Board(world_size)
        self.store = store
        self.lineage = lineage
        self.config = config
        self.share = share
        self.rng = np.random.default_rng(5)
        self.world_size = world_size
        self.weights = {n: self.rng.integers(0, 2**16, s).astype(np.uint16) for n, s in SHAPES.items()}
        self.history: dict[int, dict[str, bytes]] = {}
        self.is_process = is_process
        self.deaths: list[list[UnavailableError]] = [[] for _ in range(world_size)]
        self.shares: list[ShareWriter] = []
        self.committers: list[Committer] = []
        for rank in range(world_size):
            gang, url = ThreadGang(rank, world_size, board), store.uri("x").removesuffix("/x")
            target = PublishTarget(store=store, names=NAMES, gang=gang, epoch=1, lineage=lineage, store_url=url)
            policy = PolicyConfig.model_validate(config)
            self.shares.append(target.share_writer(policy, is_process=is_process))
            self.committers.append(
                Committer(
                    target,
                    config=policy,
                    files=(),
                    is_strict=is_strict,
                    share=self.shares[rank],
                )
            )
            self.committers[rank].on_death = self.deaths[rank].append

    def close(self) -> None:
        for share in self.shares:
            share.close()

    def parts(self, rank: int) -> list[TensorPart]:
        self._memory = SharedMemory() if self.is_process else None
        found = []
        for name, array in self.weights.items():
            if array.ndim == 0:
                if rank == 0:
                    found.append(self._part(name, array, 0, array.reshape(-1)))
                continue
            chunk = -(-array.shape[0] // self.world_size)
            rows = array[rank * chunk : (rank + 1) * chunk]
            start = min(rank * chunk, array.shape[0]) * int(np.prod(array.shape[1:]))
            found.append(self._part(name, array, start, rows.reshape(-1)))
        return found

    def _part(self, name: str, array: np.ndarray, start: int, bits: np.ndarray) -> TensorPart:
        if self._memory is None:
            return TensorPart(name=name, dtype="bfloat16", shape=array.shape, start=start, bits=bits.copy())
        offset, view = self._memory.allocate(bits.nbytes)
        shared = np.frombuffer(view, np.uint16)
        shared[:] = bits
        place = SharedPlace(self._memory, offset)
        return TensorPart(name=name, dtype="bfloat16", shape=array.shape, start=start, bits=shared, place=place)

    def move(self) -> None:
        for name, array in self.weights.items():
            chosen = self.rng.random(array.shape) < self.share
            self.weights[name] = np.where(chosen, array + 1, array).astype(np.uint16)

    def commit(self, version: int) -> list:
        """Commit a version at every rank, and return each rank's result or exception."""
        return self.at_every_rank(
            lambda rank, parts: self.committers[rank].commit(VersionInput(version=version, parts=parts, probe=None))
        )

    def restart(self, *, world_size: int) -> "Trainer":
        """Return a trainer with other ranks that goes on from the last version of this one."""
        other = Trainer(self.store, world_size=world_size, lineage=self.lineage, **self.config)
        other.weights, other.history, other.rng = dict(self.weights), self.history, self.rng
        assert (
            other.at_every_rank(lambda rank, parts: other.committers[rank].adopt(len(self.history) - 1, parts))
            == [None] * world_size
        )
        return other

    def at_every_rank(self, act: Callable[[int, list[TensorPart]], object]) -> list:
        """Call `act` at every rank at the same time, and return each rank's result or exception."""
        parts = [self.parts(rank) for rank in range(self.world_size)]
        done: list = [None] * self.world_size

        def run(rank: int) -> None:
            try:
                done[rank] = act(rank, parts[rank])
            except Exception as error:  # noqa: BLE001 - a thread's edge: compared by the test
                done[rank] = error

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return done

    def publish(self, version: int) -> PolicyManifest:
        done = self.commit(version)
        for each in done:
            if isinstance(each, Exception):
                raise each
        assert [published is None for published in done] == [rank > 0 for rank in range(self.world_size)]
        self.history[version] = {name: array.tobytes() for name, array in self.weights.items()}
        return done[0].manifest

    def publish_to(self, last: int) -> "Trainer":
        for version in range(len(self.history), last + 1):
            if version:
                self.move()
            self.publish(version)
        return self

    def manifest(self, version: int) -> PolicyManifest:
        return read_manifest(self.store, NAMES.policy_manifest(self.lineage, version))

    def require(self, copy: HostCopy, version: int):
        staged = copy.stage(NAMES.policy_manifest(self.lineage, version))
        assert {name: bytes(tensor.data) for name, tensor in staged.tensors.items()} == self.history[version]
        return staged
