"""The gang: the processes that `torchrun` starts to train one model together, or this process alone.

With one process nothing here communicates. With several, parameters are sharded with FSDP2. Rank 0 alone holds the
run's lease, writes its log and sends the others its decisions, as plain data, never as pickles.
"""

import contextlib
import hashlib
import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Self, TypeVar

import psutil
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.rendezvous import rendezvous

from millrace.decoding import decode_object
from millrace.errors import CorruptObjectError, InvalidSpecError, InvalidStateError, Violation
from millrace.processes.table import start_ticks
from millrace.telemetry import waits
from millrace.trainer.gang import agreement
from millrace.trainer.gang.agreement import PEERS, STORE_S, OnFailure, RollCall
from millrace.trainer.model.context_parallel import cut_rows
from millrace.trainer.model.expert_parallel import cut_experts
from millrace.trainer.model.fit import cut_layers
from millrace.trainer.model.memory import Sharding, blocks_of, keep_unsharded
from millrace.trainer.model.mesh import EXPERT, TENSOR, RankLayout

# The device that a rank computes on: the GPU that was asked for, or an error that says why there is none.
#
# Nothing falls back to a CPU silently. `MILLRACE_TRAINER_DEVICE=cuda` requires a GPU; the local stack, the chart and
# compose set it if they give the trainer one. `auto`, the default, requires one if the machine has one and torch is
# built for CUDA: a laptop with a GPU and a CPU wheel trains on the CPU.

VARIABLE = "MILLRACE_TRAINER_DEVICE"
"""auto, cpu or cuda."""
CHOICES = ("auto", "cpu", "cuda")
_GPU = Path("/dev/nvidia0")
_DRIVER = Path("/sys/module/nvidia/version")


def choose_device(environ: Mapping[str, str] = os.environ, *, gpu: Path = _GPU, driver: Path = _DRIVER) -> torch.device:
    """Choose the device of this rank from MILLRACE_TRAINER_DEVICE, LOCAL_RANK and CUDA_VISIBLE_DEVICES in `environ`.

    `gpu` and `driver` are the kernel's files that show a GPU and its driver's version. Raises InvalidStateError
    (GPU_UNUSABLE) if a GPU is required and cannot be used, and InvalidSpecError for an unknown choice.
    """
    choice = environ.get(VARIABLE) or "auto"
    if choice not in CHOICES:
        message = f"must be one of {', '.join(CHOICES)}"
        raise InvalidSpecError([Violation(field=VARIABLE, value=choice, message=message, source="environment")])
    if choice == "cpu" or (choice == "auto" and environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")):
        return torch.device("cpu")
    local_rank = int(environ.get("LOCAL_RANK", "0"))
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if local_rank < found:
        return torch.device("cuda", local_rank)
    # Where the kernel has a GPU and torch was built for CUDA, the driver is broken: training for hours on the CPU
    # instead would hide that.
    if choice == "auto" and not found and not (gpu.exists() and torch.version.cuda):
        return torch.device("cpu")
    raise _unusable(environ, local_rank=local_rank, found=found, driver=driver)


def release_unused(device: torch.device) -> None:
    """Give the allocator's unused memory back to the GPU, after all queued work; do nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def release_after_failure(device: torch.device) -> None:
    """Give unused memory back after a failed job; only log an error of the device, which may be broken itself."""
    try:
        release_unused(device)
    except RuntimeError:
        logger.warning("the device's memory cannot be given back", exc_info=True)


def _unusable(environ: Mapping[str, str], *, local_rank: int, found: int, driver: Path) -> InvalidStateError:
    """Make the error that no GPU can be used.

    `found` is how many torch sees, `driver` the file of the driver's version.
    """
    version = driver.read_text().strip() if driver.exists() else "none that the kernel shows"
    wheel = f"torch {torch.__version__}, " + (f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA")
    seen = environ.get("CUDA_VISIBLE_DEVICES")
    visible = f"; CUDA_VISIBLE_DEVICES is {seen!r}" if seen is not None else ""
    if found:
        what = f"rank {local_rank} of this machine has no GPU: torch sees {found}"
        remedy = f"start at most {found} ranks here, or make more GPUs visible"
    elif not torch.version.cuda:
        what = "a GPU is asked for or there, and this torch cannot use it"
        remedy = "install a CUDA wheel of torch (an image with the tag -cuda)"
    else:
        what = "a GPU is asked for or there, and CUDA does not start"
        remedy = "install a driver that the wheel works with (CUDA 13: 580 or newer), or an older wheel"
    return InvalidStateError(
        f"{what} (driver: {version}; wheel: {wheel}{visible})",
        reason="GPU_UNUSABLE",
        remedy=f"{remedy}; to train on the CPU set {VARIABLE}=cpu",
    )


# Makes torch repeat itself bit for bit.


def resolve_determinism(choice: str, *, is_compiled: bool) -> str:
    """Return "best_effort" for `auto` if blocks are compiled, else `choice` as it is.

    Compiled kernels depend on which shapes came first, and on whether the compiler worked at all, which may differ at
    another start. The config refuses `strict` together with compiled blocks.
    """
    return "best_effort" if is_compiled and choice == "auto" else choice


def set_determinism(choice: str, *, seed: int, device: torch.device) -> bool:
    """Make torch deterministic for "strict", or for "auto" on a CPU; seed it in any case.

    Return whether it is deterministic. Sets the number of threads on a CPU, because it decides the order of sums:
    OMP_NUM_THREADS, else 1.
    """
    is_strict = choice == "strict" or (choice == "auto" and device.type == "cpu")
    if device.type == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))
    if is_strict and device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats itself only with a fixed workspace
    torch.use_deterministic_algorithms(is_strict)
    # Costs a few per cent of a step on a CPU, and serves operations that read what nobody wrote: no model has any.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue] - it is set
    torch.manual_seed(seed)
    return is_strict


def seed_rank(seed: int, *, rank: int) -> None:
    """Set torch's seed from `seed` and `rank`, so that ranks draw different random numbers.

    Call it after the model is made, for which all ranks need the same seed.
    """
    torch.manual_seed(int.from_bytes(hashlib.sha256(f"{seed}/{rank}".encode()).digest()[:8]))


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomState:
    """The states of the random generators that a computation on a device draws from: the host's, and that of a GPU."""

    device: torch.device
    host: torch.Tensor
    gpu: torch.Tensor | None

    @classmethod
    def of(cls, device: torch.device) -> Self:
        """Read the state of the random generators for `device`: the host's, and the GPU's if it is one."""
        gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(device=device, host=torch.get_rng_state(), gpu=gpu)

    def restore(self) -> None:
        """Restore the random state, so that the same numbers are drawn again."""
        torch.set_rng_state(self.host)
        if self.gpu is not None:
            torch.cuda.set_rng_state(self.gpu, self.device)


T = TypeVar("T")

# Rank 0 broadcasts at least every few seconds while it waits, so a silent peer is dead long before this.
_COLLECTIVE_TIMEOUT = timedelta(minutes=10)
_QUIET_S = 5.0  # a collective that lasts longer is reported as a wait


class Gang:
    """This process's place among the processes of the gang, and what they exchange."""

    def __init__(self, *, rank: int = 0, world_size: int = 1, device: torch.device | None = None) -> None:
        """Be rank `rank` of `world_size` processes; make no connections, which `join` does.

        `device` None is the CPU.
        """
        self.rank = rank
        self.world_size = world_size
        self.device = device or torch.device("cpu")
        self.layout = RankLayout(dp_shard=world_size)
        """How the ranks share the model that they train; `lay_out` changes it."""
        self._group: dist.ProcessGroup | None = None
        self._beside: dict[str, Gang] = {}
        self._meshes: dict[tuple[RankLayout, str], DeviceMesh] = {}
        self._roll_call: RollCall | None = None
        self._watch: PeerWatch | None = None
        self._has_group = world_size > 1
        """Whether the process group is ended with this gang; a process alone makes one when FSDP needs it."""

    def lay_out(self, layout: RankLayout) -> None:
        """Set how the ranks share the models that `shard` is called with from now on."""
        for gang in (self, *self._beside.values()):
            gang.layout = layout

    def beside(self, purpose: str) -> "Gang":
        """Return a gang of the same ranks with connections of its own, for a thread beside the main one.

        Cached by `purpose`. The first call for a purpose is collective. Threads need separate connections because the
        collectives of one group must come in the same order at every rank.
        """
        if self.is_alone:
            return self
        if purpose not in self._beside:
            group = dist.new_group(backend="gloo", timeout=_COLLECTIVE_TIMEOUT)
            assert isinstance(group, dist.ProcessGroup)  # every rank is in it
            self._beside[purpose] = Gang(rank=self.rank, world_size=self.world_size, device=self.device)
            self._beside[purpose]._group = group
            self._beside[purpose].layout = self.layout
        return self._beside[purpose]

    @classmethod
    def join(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """Join the gang that torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK) describe; without them, be alone.

        Chooses this rank's device, makes the process group, and starts the roll call and the watch over other ranks.
        """
        device = choose_device(environ)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        world_size = int(environ.get("WORLD_SIZE", "1"))
        if world_size == 1:
            return cls(device=device)
        rank = int(environ["RANK"])
        store = _store_of_this_start(environ)
        _init_group(device, store, rank=rank, world_size=world_size)
        gang = cls(rank=rank, world_size=world_size, device=device)
        # Requests over one connection wait for each other: each thread has a connection of its own.
        own: Store = store.clone()  # pyright: ignore[reportAttributeAccessIssue] - not in torch's stubs
        gang._roll_call = RollCall(own, rank=rank, world_size=world_size)
        gang._roll_call.start()
        gang._watch = PeerWatch(store.clone(), rank=rank, world_size=world_size)  # pyright: ignore[reportAttributeAccessIssue]
        gang._watch.start()
        return gang

    @property
    def data_rank(self) -> int:
        """Return the index of this rank's part of the samples; ranks that share samples have the same index."""
        return self.layout.data_rank(self.rank)

    @property
    def is_leader(self) -> bool:
        """Return whether this process is rank 0."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        """Return whether the gang is this process only."""
        return self.world_size == 1

    def agree(self, work: Callable[[], T]) -> list[T]:
        """Run `work`, which has no collectives, at every rank, and return the results of all ranks in order.

        Collective. T is plain data: bytes, or what JSON has. If `work` raises at any rank, every rank raises the error
        of the lowest such rank; an error that is no MillraceError is UnavailableError at the others.
        """
        mine, failure = agreement.encode_result(work, rank=self.rank)
        if failure is not None and self.is_alone:
            raise failure
        rows = self.gather(mine)
        first = next((rank for rank, row in enumerate(rows) if agreement.is_error(row)), None)
        # What ends this process (an interrupt, an exit) is raised here, whatever failed at a lower rank.
        if failure is not None and (first == self.rank or not isinstance(failure, Exception)):
            raise failure
        if first is not None:
            agreement.decode_result(rows[first])
        return [agreement.decode_result(row) for row in rows]

    def from_leader(self, work: Callable[[], T]) -> T:
        """Run `work` at rank 0 only, and return its result at every rank; raise at all ranks if it raises. Collective.

        T is plain data: bytes, or what JSON has.
        """
        mine, failure = agreement.encode_result(work, rank=self.rank) if self.is_leader else (None, None)
        row = self.broadcast(mine) if failure is None or not self.is_alone else b""
        if failure is not None:
            raise failure
        return agreement.decode_result(row)

    def broadcast(self, data: bytes | None) -> bytes:
        """Return at every rank the bytes that rank 0 passes; the other ranks pass None. Collective."""
        return self._broadcast_from(0, data or b"")

    def gather(self, data: bytes) -> list[bytes]:
        """Return the bytes of all ranks in order of rank, at every rank. Collective."""
        return [self._broadcast_from(source, data) for source in range(self.world_size)]

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the element-wise sums of `values` over the ranks, in float64, at every rank. Collective."""
        return self._reduce(values, dist.ReduceOp.SUM) if not self.is_alone else list(values)

    def sum_of_data(self, values: Sequence[float]) -> list[float]:
        """Return the element-wise sums over the ranks of `values`, which each computed over its samples. Collective.

        Of ranks that share samples only the values of the first one count.
        """
        return self.sum(values if self.layout.is_first_of_samples(self.rank) else [0.0] * len(values))

    def max(self, values: Sequence[float]) -> list[float]:
        """Return the element-wise maxima of `values` over the ranks, at every rank. Collective."""
        return self._reduce(values, dist.ReduceOp.MAX) if not self.is_alone else list(values)

    def barrier(self) -> None:
        """Wait until every rank of the gang has called this."""
        self.sum([0.0])

    def shard(self, model: nn.Module, sharding: Sharding) -> nn.Module:
        """Move the model to this rank's device, shard it as the gang's layout says, in place, and return it.

        Collective. Layers, experts and rows are split, and each block is one unit of FSDP2. Gradients are summed over
        the ranks. A process alone uses FSDP only if `sharding` needs it, for instance to compute in another format than
        float32, since FSDP does the casts. FSDP moves block after block and keeps its share: unless layers are split, a
        GPU never holds more than the shares and one whole block.
        """
        arguments = sharding.arguments(self.device)
        if self.is_alone:
            if not sharding.is_needed(self.device):
                return model.to(self.device)
            self._has_group |= _require_group(self.device)
            arguments["mesh"] = self._mesh(_alone)  # FSDP's own one would be of the machine's GPU, wanted or not
        else:
            mesh = self._mesh(self.layout.mesh)
            arguments["mesh"] = self.layout.data_mesh(mesh)
            if self.layout.tp > 1:
                _move_unless_empty(model, self.device)
                cut_layers(model, mesh[TENSOR])
            if self.layout.cp > 1:
                cut_rows(model, self._mesh(self.layout.piece_mesh))
            if self.layout.ep > 1:
                self._shard_experts(model, sharding)
        is_whole = self.is_alone and sharding.keeps_unsharded(model)
        reshards = not is_whole if sharding.reshards_after_forward is None else sharding.reshards_after_forward
        for block in blocks_of(model):
            fully_shard(block, reshard_after_forward=reshards, **arguments)
        fully_shard(model, **arguments)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # Losses are divided by counts of the whole batch already: gradients must be summed, and FSDP would take
                # the mean.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo knows no other reduction with a factor
        if is_whole:
            keep_unsharded(model)
        return model

    def _shard_experts(self, model: nn.Module, sharding: Sharding) -> None:
        """Split the experts over the ranks of ep, and shard each rank's experts over the other sharding ranks."""
        mesh = self._mesh(self.layout.expert_mesh)
        arguments = {**sharding.arguments(self.device), "mesh": self.layout.expert_data_mesh(mesh)}
        for experts in cut_experts(model, mesh[EXPERT]):
            fully_shard(experts, reshard_after_forward=sharding.reshards_after_forward is not False, **arguments)

    def _mesh(self, make: Callable[[torch.device], DeviceMesh]) -> DeviceMesh:
        """Return the mesh that `make` makes for the layout, made once per layout and function.

        Meshes are never dropped: each has process groups with threads, and torch caches by mesh what it computed.
        """
        key = (self.layout, make.__name__)
        if key not in self._meshes:
            self._meshes[key] = make(self.device)
        return self._meshes[key]

    def show_failure(self, *, reason: str, message: str) -> None:
        """Report to rank 0 why this rank gives up the run.

        It is no collective, because the other ranks may be waiting in one.
        """
        if self._roll_call is not None:
            self._roll_call.show_failure(reason=reason, message=message)

    def watch_failures(self, on_failure: OnFailure) -> None:
        """Set the function that rank 0 calls, in another thread and repeatedly, with each failure of another rank."""
        if self._roll_call is not None:
            self._roll_call.watch_failures(on_failure)

    def leave(self) -> None:
        """Stop the roll call and the watch over other ranks, and end the process group if this gang made it."""
        if self._roll_call is not None:
            self._roll_call.stop()
        if self._watch is not None:
            self._watch.leave()
        if self._has_group and dist.is_initialized():
            dist.destroy_process_group()
        self._has_group = False

    def _broadcast_from(self, source: int, data: bytes) -> bytes:
        """Return at every rank the `data` of rank `source`, of any length; what others pass is ignored. Collective."""
        if self.is_alone:
            return data
        with _waiting_for_peers():
            # Tensors on the CPU, which gloo carries whatever the ranks compute on.
            length = torch.tensor([len(data)], dtype=torch.int64)
            dist.broadcast(length, src=source, group=self._group)
            buffer = torch.zeros(max(int(length), 1), dtype=torch.uint8)
            if self.rank == source and data:
                buffer[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            dist.broadcast(buffer, src=source, group=self._group)
        return buffer[: int(length)].numpy().tobytes()

    def _reduce(self, values: Sequence[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
        """Return the element-wise reduction of `values` by `operation` over the ranks, in float64."""
        tensor = torch.tensor(values, dtype=torch.float64)
        with _waiting_for_peers():
            dist.all_reduce(tensor, op=operation, group=self._group)
        return tensor.tolist()


def _init_group(device: torch.device, store: Store, *, rank: int, world_size: int) -> None:
    """Make torch's default process group: gloo on CPUs, NCCL as well if `device` is a GPU."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    bound = device if device.type == "cuda" else None  # NCCL connects at once, to this rank's GPU
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=_COLLECTIVE_TIMEOUT, device_id=bound
    )


def _move_unless_empty(model: nn.Module, device: torch.device) -> None:
    """Move a model to `device`, unless some parameter is on the meta device: that model is filled there later."""
    if not any(parameter.is_meta for parameter in model.parameters()):
        model.to(device)


def _require_group(device: torch.device) -> bool:
    """Make a process group of this process alone, unless there is one; return whether one was made.

    FSDP needs it, and sends nothing over it.
    """
    if dist.is_initialized():
        return False
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage] - documented, and not in torch's stubs
    _init_group(device, store, rank=0, world_size=1)
    return True


def _store_of_this_start(environ: Mapping[str, str]) -> Store:
    """Return the rendezvous store, under a prefix for this start if all ranks are on this machine.

    torchrun (2.13) keeps one store over its restarts, in which a new rank finds the address of the dead one, and waits.
    Its count of restarts is the prefix. Several machines count separately: there
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 makes torchrun take a new store for every start.
    """
    store, _, _ = next(rendezvous("env://", timeout=_COLLECTIVE_TIMEOUT))
    if environ.get("LOCAL_WORLD_SIZE") != environ["WORLD_SIZE"]:
        return store
    return PrefixStore(f"start-{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _waiting_for_peers() -> waits.Waiting:
    """Register a wait for the other ranks: a collective returns when every rank has joined."""
    return waits.waiting(PEERS, deadline_s=_COLLECTIVE_TIMEOUT.total_seconds() / 10, quiet_s=_QUIET_S)


def _alone(device: torch.device) -> DeviceMesh:
    """Return a mesh of this process alone."""
    return init_device_mesh(device.type, (1,))


# Ends a rank whose peer has died, even if it is blocked in C and handles no signal.
#
# A collective of NCCL does not notice that a peer was killed: it spins, and Python runs no signal handler meanwhile. So
# each rank writes its process id into the gang's store, and a thread of each rank checks whether the processes on its
# machine are alive. When one is gone without having left in order, this rank has `GRACE_S` to fail by itself; then its
# communicators are aborted, which makes the collective raise; if that does not help, the process ends. What started the
# gang restarts it. The death of a rank on another machine is noticed by torchrun's agents, which end all ranks.
#
# A rank that is stopped (SIGSTOP) is alive; the roll call names it. While the store does not answer no rank is taken
# for dead: if a rank hosts the store, and not torchrun, what started the ranks sees the death of that rank.

logger = logging.getLogger(__name__)

PERIOD_S = 1.0
GRACE_S = 10.0
"""How long a rank may take to fail by itself, and report why, once a peer is dead."""
ABORT_S = 5.0
"""How long it may take from the abort of its communicators to its end."""
EXIT_CODE = 1
_MAX_BYTES = 1000
_Process = tuple[int, int]
"""Its id, and when it began in ticks since boot: jumps of the clock do not change it."""


def abort_communicators() -> None:
    """Abort the process group, so that NCCL's collectives raise; do nothing without a GPU, as gloo raises by itself."""
    if dist.is_initialized() and torch.cuda.is_available():
        dist.distributed_c10d._abort_process_group()  # documented nowhere, and what torch's own restarts use


class PeerWatch:
    """A thread that ends this process if a rank on its machine died and this one is stuck. One per process."""

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        world_size: int,
        abort: Callable[[], None] = abort_communicators,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        """Prepare to watch the other ranks' processes; `store` must be used by nothing else.

        If a rank is dead and this process is stuck, its thread calls `abort`, and then `end` with the exit code.
        """
        store.set_timeout(timedelta(seconds=STORE_S))
        self._store = store
        self._rank = rank
        self._unknown = set(range(world_size)) - {rank}
        self._here: dict[int, _Process] = {}
        self._abort = abort
        self._end = end
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._run, name="peer-watch", daemon=True)

    def start(self) -> None:
        """Write this rank's process into the store, and start the thread that watches the others."""
        own = {"pid": os.getpid(), "began": start_ticks(os.getpid()), "host": _machine()}
        self._store.set(_key(self._rank), json.dumps(own))
        self._thread.start()

    def leave(self) -> None:
        """Write into the store that this rank ends in order, and wait for the thread's end (see `RollCall.stop`)."""
        if not self._left.is_set():
            self._left.set()
            with contextlib.suppress(dist.DistError):  # the store ends with the rank that made it
                self._store.set(_key(self._rank) + "/left", "1")
            self._thread.join(STORE_S)

    def _run(self) -> None:
        """Check once a second whether a rank's process on this machine is dead, until this rank leaves."""
        while not self._left.wait(PERIOD_S):
            try:
                self._learn()
                dead = next((rank for rank, process in self._here.items() if self._is_dead(rank, process)), None)
            except dist.DistError:  # the roll call reports it
                continue
            if dead is not None:
                self._fail(dead)
                return

    def _learn(self) -> None:
        """Read from the store which ranks' processes are on this machine, as far as they are written.

        Skip damaged entries.
        """
        for rank in sorted(self._unknown):
            if not self._store.check([_key(rank)]):
                continue
            self._unknown.discard(rank)
            with contextlib.suppress(CorruptObjectError, KeyError, TypeError, ValueError):
                data = self._store.get(_key(rank))
                sign = decode_object(data, what="a rank", reason="SIGN_DAMAGED", max_bytes=_MAX_BYTES)
                if sign["host"] == _machine():
                    self._here[rank] = (int(sign["pid"]), int(sign["began"]))

    def _is_dead(self, rank: int, process: _Process) -> bool:
        """Return whether a rank's process has ended without leaving in order.

        A process that reuses its id is another one.
        """
        pid, began = process
        try:
            started = start_ticks(pid)  # 0 where it cannot be read, which says nothing of the process
            is_same = psutil.pid_exists(pid) if started == 0 else started == began
            is_alive = is_same and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            is_alive = False
        return not is_alive and not self._store.check([_key(rank) + "/left"])

    def _fail(self, dead: int) -> None:
        """Wait `GRACE_S` for this process to leave; else abort its communicators and end it: rank `dead` has died."""
        pid = self._here[dead][0]
        if self._left.wait(GRACE_S):
            return
        logger.error("a rank of the gang is dead and this one is stuck: it ends", extra={"dead": dead, "pid": pid})
        # A thread of its own: an abort that hangs must not keep the process alive.
        threading.Thread(target=self._abort, name="abort of the communicators", daemon=True).start()
        if not self._left.wait(ABORT_S):
            self._end(EXIT_CODE)


def _key(rank: int) -> str:
    return f"process/{rank}"


def _machine() -> str:
    """Return an identifier of host and pid namespace, equal for ranks that see each other's processes."""
    return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid') if os.path.exists('/proc/self/ns/pid') else ''}"
