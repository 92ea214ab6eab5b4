"""The launcher: starts vLLM for a replica, answers for it until it is up, and ends all of its processes.

    vLLM is imported  ──▶  flags are checked  ──▶  the model is known  ──▶  vLLM loads it  ──▶  vLLM serves
    └────────────────────── the front answers for the replica ─────────────────────┘        (launcher watches)
                                                        ▲                                        │
                                                        └──── a policy of another model ─────────┘

The model is that of MILLRACE_MODEL, whose directory is validated first (`ModelCheck`), or that of the first policy
which the orchestrator asks for: then vLLM starts on the policy's files with dummy weights, registers as the same
worker, and takes and proves the weights at the orchestrator's next request, as in any update. The launcher imports no
vLLM and no torch.
"""

import asyncio
import logging
import os
import signal
import tempfile
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from millrace.errors import InternalError, InvalidSpecError, MillraceError, UnavailableError, Violation
from millrace.inference import launch_env
from millrace.inference.front import Front, PolicyModel, describe, fetch_model
from millrace.inference.http.access import vllm_flags
from millrace.inference.launch_env import TYPED_FLAGS, is_given
from millrace.inference.model_files import POLICY_NAME
from millrace.inference.settings import InferenceSettings, http_address
from millrace.inference.vllm.handover import OWNED_DIRECTORY_VARIABLE, WORKER_ID_VARIABLE
from millrace.inference.vllm.lora import lora_argv
from millrace.inference.vllm.workers.node_copy import DIRECTORY_VARIABLE
from millrace.inference.vllm_server import VllmProcess
from millrace.internal.v1 import policy_service_pb2 as pb
from millrace.processes.channel import HelperDiedError, HelperProcess, Message
from millrace.race import first_of
from millrace.rpc.reach import bound_socket, keep_alive, listening_host, own_host
from millrace.rpc.status import from_text
from millrace.rpc.worker import new_worker_id
from millrace.storage import open_store
from millrace.storage.base import ObjectStore
from millrace.storage.scratch import owned_directory
from millrace.telemetry import progress, waits
from millrace.telemetry.progress import Activity
from millrace.telemetry.settings import Settings, join_address, parse_address

# Validation of a fixed model before vLLM loads it, in a process with torch, which the launcher does not import.

MODULE = "millrace.inference.look_main"
_SILENT_S = 300.0  # for its imports: seconds, or minutes on an overloaded machine; then it beats every two seconds
_LINKS = "model"


class ModelCheck:
    """A process that validates models; it imports what it needs while vLLM does so, too. `close` ends it."""

    def __init__(self, helper: HelperProcess) -> None:
        """Take the started process that validates models."""
        self._helper = helper

    @classmethod
    async def start(cls, environ: Mapping[str, str]) -> Self:
        """Start the process that validates models, with these variables; it begins with its imports."""
        return cls(await asyncio.to_thread(HelperProcess.start, MODULE, env=environ))

    async def look(
        self, directory: Path, *, scratch: Path, flags: Mapping[str, Any], needs_template: bool, deadline_s: float
    ) -> Path:
        """Validate a model that vLLM is to serve with `flags`; return the directory that vLLM is to load.

        The returned directory is `directory` itself, or one of links in `scratch` if `directory` has further files that
        vLLM would read. With `needs_template` a model without a chat template is refused, unless a flag gives one.
        Raises as `millrace.models.served.validate_served`, and InternalError if the process fails or takes longer than
        `deadline_s`.
        """
        question = {
            "directory": str(directory),
            "place": str(scratch / _LINKS),
            "needs_tokenizer": not is_given("skip_tokenizer_init", flags),
            "needs_template": needs_template and not is_given("chat_template", flags),
        }
        looking = progress.work(Activity.LOAD, f"model {directory.name}", waits_on="", deadline_s=deadline_s)
        try:
            with looking as work:
                async with asyncio.timeout(deadline_s):
                    answer = await asyncio.to_thread(self._ask, question, work)
        except TimeoutError as error:
            raise _failed(f"it took more than {deadline_s:g} s") from error
        except (HelperDiedError, OSError) as error:
            raise _failed(str(error)) from error
        if "error" in answer:
            raise from_text(answer["error"], what="what is wrong with the model", reason="MODEL_LOOK_FAILED")
        for note in answer["notes"]:
            logger.warning("about the model: %s", note, extra={"model": str(directory)})
        return Path(answer["directory"])

    async def close(self) -> None:
        """End the validating process; a pending `look` raises InternalError."""
        await asyncio.to_thread(self._helper.end)

    def _ask(self, question: Message, work: progress.LongWork) -> Message:
        """Ask the process (blocking) and return its answer; `work` shows how far it is."""

        def on_beat(beat: Message) -> None:
            work.detail(beat["how_far"])

        return self._helper.ask(question, silent_s=_SILENT_S, on_beat=on_beat)


def _failed(problem: str) -> InternalError:
    """Make the error for a model that could not be validated because of `problem`."""
    return InternalError(
        f"the model could not be looked at before vLLM loads it: {problem}",
        reason="MODEL_LOOK_FAILED",
        remedy="if it was killed for memory, give this machine more; if the files are slow, set MILLRACE_VLLM_START_S",
    )


# A replica over several nodes: what the launcher does on each of them.
#
# The head (node rank 0) serves and registers as any replica does. On the other nodes the launcher starts vLLM's
# headless workers with the same flags, serves nothing, and ends when the head's vLLM has ended: the whole replica is
# started again.

_RETRY_S = 1.0
_CONNECT_S = 5.0
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_DEFAULT_PORT = 29501  # vLLM's for --master-port


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """This node's rank in its replica. `master` is the (host, port) at which the workers of all nodes connect."""

    rank: int
    count: int
    master: tuple[str, int]

    @classmethod
    def of(cls, flags: Mapping[str, Any]) -> "Node":
        """Read this node's rank, the number of nodes and the master's address from vLLM's flags.

        Raises InvalidSpecError if they are wrong.
        """
        named = {TYPED_FLAGS.get(key) or key.rpartition(".")[2].replace("-", "_"): key for key in flags}
        violations: list[Violation] = []

        def number(name: str, default: int) -> int:
            """Return the flag as a whole number; `default` if it is missing or wrong, which is noted as a violation."""
            value = flags.get(named.get(name, ""))
            text = str(default if value is None else value)
            if text.isdecimal():
                return int(text)
            violations.append(_wrong(named[name], text, "must be a whole number from 0 on"))
            return default

        rank, count, port = number("node_rank", 0), number("nnodes", 1), number("master_port", _DEFAULT_PORT)
        host = str(flags.get(named.get("master_addr", "")) or _LOOPBACK[0])
        if not violations and rank >= max(count, 1):
            violations.append(_wrong(named["node_rank"], str(rank), f"must be below nnodes, which is {count}"))
        if violations:
            raise InvalidSpecError(violations, reason="VLLM_FLAGS_INVALID", remedy="set nnodes and node_rank right")
        return cls(rank=rank, count=count, master=(host, port))

    @property
    def is_head(self) -> bool:
        """Return whether this node, with rank 0, serves for its replica."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        """Return whether this node is the whole replica."""
        return self.count == 1

    @property
    def is_on_one_machine(self) -> bool:
        """Return whether the nodes of the replica connect over loopback."""
        return self.is_alone or self.master[0] in _LOOPBACK

    def require_model(self, model: str | None, store_url: str | None) -> None:
        """Raise InvalidSpecError if the replica is over several nodes and has no fixed model or no object store.

        `model` and `store_url` are the settings of these, None or "" where one is not set.
        """
        if self.is_alone:
            return
        given = {"MILLRACE_MODEL": model, "MILLRACE_STORE_URL": store_url}
        why = {
            "MILLRACE_MODEL": "is not set, and a replica over several nodes needs it: nodes that do not serve are not "
            "told which model the run's policy is",
            "MILLRACE_STORE_URL": "is not set: each node pulls policies by itself",
        }
        violations = [Violation(field=name, message=why[name]) for name, value in given.items() if not value]
        if violations:
            raise InvalidSpecError(violations, reason="SETTINGS_INVALID", remedy="set it on every node of the replica")

    async def until_head_ends(self) -> None:
        """Connect to the head's master port, wait until the connection ends, and raise UnavailableError. Never returns.

        Workers that wait for the head's next step would not notice its end themselves.
        """
        host, port = self.master
        with waits.waiting(f"the head of the replica at {host}:{port}", waits_on="inference"):
            while True:
                try:
                    async with asyncio.timeout(_CONNECT_S):
                        reader, writer = await asyncio.open_connection(host, port)
                    break
                except (OSError, TimeoutError):
                    await asyncio.sleep(_RETRY_S)
        # A head whose machine is gone does not close the connection.
        keep_alive(writer.get_extra_info("socket"))
        logger.info("the head of the replica is there", extra={"master": f"{host}:{port}"})
        try:
            await reader.read(1)  # it sends nothing until its end
        except OSError as error:
            logger.warning("the connection to the head broke", extra={"error": str(error)})
        finally:
            writer.close()
        raise UnavailableError(
            f"the head of the replica at {host}:{port} has ended",
            reason="HEAD_GONE",
            remedy="start this node again with it, as a LeaderWorkerSet does",
        )


def _wrong(field: str, value: str, message: str) -> Violation:
    """Make the violation of a flag of vLLM."""
    return Violation(field=field, value=value, message=message, source="vLLM's flags")


logger = logging.getLogger(__name__)

# A rollout ends where its policy or its sampling says, not at the `max_new_tokens` of the model's generation config.
_NO_LIMIT = '--override-generation-config={"max_new_tokens": null}'
WORKER_EXTENSION = "millrace.inference.vllm.workers.extension.PolicyExtension"
_Job = Callable[[VllmProcess], Coroutine[Any, Any, None]]

_MAX_SOCKET_PLACE = 103 - len("/") - 36
"""The path of a socket has at most 103 characters, and vLLM names them by UUIDs."""
_LOOK_S = 1.0
"""Seconds between two reads of vLLM's stage."""
_PORT_POLL_S = 2.0
_LEAVE_S = 5.0
"""Seconds beyond drain and grace that vLLM has to end by itself."""


class Launcher:
    """Runs one replica's vLLM until SIGTERM or SIGINT; a second signal kills it at once."""

    def __init__(self, settings: Settings, own: InferenceSettings, *, stopping: asyncio.Event | None = None) -> None:
        """Read this node's place from the flags, and take free ports for port 0; raise InvalidSpecError if settings are
        wrong.

        `stopping` ends the launcher as SIGTERM does.
        """
        self._own = own
        self._node = Node.of(own.vllm_flags)
        self._node.require_model(own.vllm_model, settings.store_url)
        self._stopping = stopping or asyncio.Event()
        self._hurry = asyncio.Event()
        # Ports are taken here and not by vLLM: front and server must register the same address.
        self._settings = replace(
            settings,
            listen=_with_port(settings.require("listen")),
            http_listen=_with_port(settings.require("http_listen")),
        )
        self._store: ObjectStore | None = open_store(settings.store_url) if settings.store_url else None
        self._worker_id = new_worker_id("inference")
        self._model: PolicyModel | None = None

    async def run(self) -> None:
        """Run the replica's vLLM until SIGTERM or SIGINT, started again for each policy of another model.

        Raises the error of a vLLM that ends by itself.
        """
        handled = self._take_signals()
        try:
            while not self._stopping.is_set():
                await self._life()
        finally:
            for number in handled:
                asyncio.get_running_loop().remove_signal_handler(number)
            self._forget_model()

    async def _life(self) -> None:
        """Run one vLLM from start to end, in directories that are deleted after it."""
        is_head = self._node.is_head
        # Both outlive all processes of vLLM, which does not remove its sockets where it is killed.
        sockets = owned_directory("ipc", parent=Path(tempfile.gettempdir()))
        with owned_directory("policy" if is_head else "node") as directory, sockets as place:
            # A longer path would make vLLM fail, so it then keeps its own place for sockets.
            ours = {"VLLM_RPC_BASE_PATH": str(place)} if len(str(place)) <= _MAX_SOCKET_PLACE else {}
            own = {OWNED_DIRECTORY_VARIABLE if is_head else DIRECTORY_VARIABLE: str(directory)}
            job = self._work if is_head else self._follow
            await self._run_vllm({**ours, **self._environ(), **own}, partial(job, scratch=directory))

    async def _run_vllm(self, environ: Mapping[str, str], job: _Job) -> None:
        """Start vLLM with these variables and run `job` with it, until the job or the launcher is to end; then end
        vLLM.

        Raises the job's error.
        """
        vllm = await VllmProcess.start(environ)
        logger.info("started vLLM", extra={"pid": vllm.pid})
        work = asyncio.create_task(job(vllm), name="life of vLLM")
        try:
            ended, _ = await first_of(work, self._stopping.wait())
            if ended is None:
                await self._let_drain(vllm)
            else:
                ended.result()
        finally:
            # The job first, which would otherwise report the end of vLLM as its death.
            work.cancel()
            await vllm.end()
            await asyncio.gather(work, return_exceptions=True)

    async def _follow(self, vllm: VllmProcess, *, scratch: Path) -> None:
        """Run a node's workers for the head elsewhere, until the head or vLLM ends; both raise.

        `scratch` is a directory for files of this vLLM.
        """
        model = await self._check(vllm, scratch)
        vllm.send({"argv": [f"--model={model}", *self._own_argv()], "is_headless": True})
        head, _ = await first_of(self._node.until_head_ends(), vllm.exited)
        if head is not None:
            head.result()
        raise await vllm.death()

    async def _check(self, vllm: VllmProcess, scratch: Path) -> str | None:
        """Have vLLM check the flags, and validate the fixed model if it is a directory; return what vLLM is to load.

        None without a fixed model. `scratch` is where a directory of links to the model's files is made, if one is
        needed. Raises InvalidSpecError for wrong flags, and the errors of the validation.
        """
        model, flags = self._own.vllm_model, self._own.vllm_flags
        if model is None or not self._is_directory:
            await vllm.check(flags)
            return model
        # Started before the flags are checked, so that its imports run while vLLM is imported.
        looking = await ModelCheck.start(os.environ)
        try:
            await vllm.check(flags)
            found = await looking.look(
                Path(model),
                scratch=scratch,
                flags=flags,
                needs_template=self._own.needs_chat_template,
                deadline_s=self._own.vllm_start_s,
            )
        finally:
            await looking.close()
        return str(found)

    async def _work(self, vllm: VllmProcess, *, scratch: Path) -> None:
        """Run the head's vLLM: answer for the replica until it is up, then hand it the address and wait until it asks
        for a restart.

        `scratch` is a directory for files of this vLLM. Raises the error of a vLLM that ends.
        """
        front = Front()
        http_url = http_address(*parse_address(self._settings.require("http_listen")))
        serving = asyncio.create_task(front.run(self._settings, self._worker_id, http_url), name="front of vLLM")
        try:
            started, _ = await first_of(self._start_engine(vllm, front, scratch), serving)
            if started is None:
                serving.result()  # the address is taken, or the orchestrator refuses the replica
                raise UnavailableError("the replica's gRPC server ended by itself", reason="SERVER_ENDED")
            started.result()
        finally:
            if not serving.done():
                await front.close()
            await asyncio.gather(serving, return_exceptions=True)
        # The front has closed the address, so that vLLM can bind it.
        vllm.send({"event": "take_address"})
        await self._watch(vllm)

    async def _start_engine(self, vllm: VllmProcess, front: Front, scratch: Path) -> None:
        """Have vLLM load its model, the fixed one or that of the first policy; return once it asks for the replica's
        address.

        `front` shows the state meanwhile, and `scratch` is a directory for files of this vLLM. Raises InternalError if
        vLLM serves without Millrace's plugin, or ends.
        """
        fixed = await self._check(vllm, scratch)
        front.set_status(pb.POLICY_STATE_EMPTY)
        model_argv = await self._policy_argv(vllm, front) if fixed is None else [f"--model={fixed}"]
        vllm.send({"argv": [*model_argv, *self._own_argv()]})
        began = time.monotonic()
        front.set_status(pb.POLICY_STATE_APPLYING)
        bound_s = self._own.vllm_start_s
        loading = progress.work(Activity.LOAD, "the model in vLLM", waits_on="inference", deadline_s=bound_s)
        showing = asyncio.create_task(_show_stages(vllm, loading), name="progress of vLLM")
        try:
            with loading:
                message, alone = await first_of(
                    vllm.hear(deadline_s=bound_s, purpose="load the model"), self._until_it_serves_alone()
                )
            if message is None:
                assert alone is not None
                alone.result()
                raise InternalError(
                    "vLLM serves without Millrace's plugin; its output says why the plugin did not start",
                    reason="VLLM_PLUGIN_MISSING",
                    remedy="read its output above for `Failed to`",
                )
            message.result()
        finally:
            showing.cancel()
        logger.info("vLLM is up", extra={"pid": vllm.pid, "load_s": round(time.monotonic() - began, 2)})

    async def _until_it_serves_alone(self) -> None:
        """Return when vLLM answers on its HTTP port, which it opens after its plugins have started."""
        host, port = parse_address(self._settings.require("http_listen"))
        # unregistered wait: `_until_up` around it is the registered wait
        while True:
            await asyncio.sleep(_PORT_POLL_S)
            try:
                async with asyncio.timeout(_PORT_POLL_S):
                    _, writer = await asyncio.open_connection(own_host(host), port)
            except (OSError, TimeoutError):
                continue
            writer.close()
            await asyncio.sleep(_PORT_POLL_S)  # the plugin's message was sent before, and is perhaps not read yet
            return

    async def _policy_argv(self, vllm: VllmProcess, front: Front) -> list[str]:
        """Wait for a requested policy whose files can be fetched, and return the arguments with which vLLM serves its
        model.

        A policy that cannot be fetched is reported in the status, and the next one awaited. Raises when vLLM ends, and
        InvalidSpecError without an object store.
        """
        self._forget_model()
        store = self._store
        if store is None:
            missing = Violation(field="MILLRACE_STORE_URL", message="is not set", source="environment")
            raise InvalidSpecError([missing], reason="SETTINGS_INVALID", remedy="set it, or MILLRACE_MODEL")
        while self._model is None:
            with waits.waiting("the first policy of a run", waits_on="orchestrator"):
                requested, _ = await first_of(front.wanted(), vllm.exited)
                if requested is None:
                    raise await vllm.death()
            front.set_status(pb.POLICY_STATE_FETCHING)
            try:
                with progress.work(Activity.DOWNLOAD, "the files of a policy", waits_on="object store"):
                    self._model = await fetch_model(store, requested.result())
            except Exception as error:  # whatever a bad policy causes: the replica stays, says why, and is asked again
                is_ours = isinstance(error, MillraceError)
                logger.error(
                    "the policy cannot be started with", extra={"error": describe(error)}, exc_info=not is_ours
                )
                front.set_status(pb.POLICY_STATE_UPDATE_FAILED, error=describe(error))
        logger.info("starting vLLM on the files of the run's policy", extra={"policy": self._model.name})
        return [
            f"--model={self._model.directory}",
            "--load-format=dummy",
            *([] if "inference.model.dtype" in self._own.vllm_flags else [f"--dtype={self._model.dtype}"]),
            *lora_argv(self._model.directory),
        ]

    async def _watch(self, vllm: VllmProcess) -> None:
        """Wait until vLLM asks to be started again, for a policy of another model; raise when it dies."""
        message, _ = await first_of(vllm.messages.get(), vllm.exited)
        if message is None:
            raise await vllm.death()
        logger.warning("vLLM is started again", extra={"reason": message.result().get("reason", "")})

    async def _let_drain(self, vllm: VllmProcess) -> None:
        """Send SIGTERM to vLLM and wait until it has ended: at most its time to drain, or until the second signal."""
        bound_s = self._settings.drain_s + self._settings.grace_s + _LEAVE_S
        vllm.ask_to_end()
        with waits.waiting("vLLM to end", waits_on="inference", deadline_s=bound_s):
            await first_of(vllm.exited, self._hurry.wait(), timeout_s=bound_s)
        if not vllm.exited.done():
            logger.warning("vLLM did not end by itself: killing it", extra={"pid": vllm.pid})

    def _own_argv(self) -> list[str]:
        """Return the arguments of vLLM's server that Millrace sets itself."""
        host, port = parse_address(self._settings.require("http_listen"))
        name = self._own.model_name
        is_scheduled = launch_env.is_given("scheduling_policy", self._own.vllm_flags)
        has_limits = launch_env.is_given("override_generation_config", self._own.vllm_flags)
        others = [name] if name and name != POLICY_NAME else []
        return [
            f"--host={listening_host(host)}",
            f"--port={port}",
            *vllm_flags(host, port),
            "--served-model-name",
            POLICY_NAME,
            *others,
            "--enable-scale-out",
            "--logprobs-mode=processed_logprobs",
            "--tool-strict-level=auto",  # in vLLM 0.33 some parsers of tools force calls into a grammar by default
            *([] if has_limits else [_NO_LIMIT]),
            f"--worker-extension-cls={WORKER_EXTENSION}",
            *([] if is_scheduled else ["--scheduling-policy=priority"]),  # a policy's probe goes before all that waits
        ]

    def _environ(self) -> Mapping[str, str]:
        """Return vLLM's variables: this process's, vLLM's own, Millrace's settings, and the worker's id.

        The settings have the ports that were taken. HF_HUB_OFFLINE is 1, unless set, if no model of the Hub is fixed.
        """
        environ = dict(os.environ)
        is_offline = self._own.vllm_model is None or self._is_directory
        offline = {"HF_HUB_OFFLINE": "1"} if is_offline else {}
        # The environment's own HF_HUB_OFFLINE wins; Millrace's variables win over the environment.
        return offline | {
            **environ,
            **launch_env.vllm_environ(environ, is_on_one_machine=self._node.is_on_one_machine),
            **self._settings.to_environ(),
            WORKER_ID_VARIABLE: self._worker_id,
        }

    @property
    def _is_directory(self) -> bool:
        """Return whether the fixed model is a directory of this machine, rather than an id of the Hub."""
        return self._own.vllm_model is not None and Path(self._own.vllm_model).is_dir()

    def _forget_model(self) -> None:
        """Delete the files of the policy with which vLLM was started, if there are any."""
        if self._model is not None:
            self._model.owner.cleanup()
            self._model = None

    def _take_signals(self) -> list[signal.Signals]:
        """Have SIGTERM, SIGINT and SIGHUP stop the launcher, and a second one kill vLLM; return the signals that
        are handled.
        """

        def receive(number: signal.Signals) -> None:
            """Stop the launcher; at the second signal have vLLM killed."""
            if self._stopping.is_set():
                self._hurry.set()
            logger.info("stopping on signal; another one kills vLLM at once", extra={"signal": number.name})
            self._stopping.set()

        numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
        for number in numbers:
            asyncio.get_running_loop().add_signal_handler(number, receive, number)
        return numbers


async def _show_stages(vllm: VllmProcess, loading: progress.LongWork) -> None:
    """Show vLLM's stage as the detail of `loading`, every second until cancelled.

    Weights, compilation and CUDA graphs take minutes.
    """
    # unregistered wait: a periodic look; what it awaits is registered where it is awaited
    while True:
        await asyncio.sleep(_LOOK_S)
        loading.detail(vllm.stage)


def _with_port(address: str) -> str:
    """Return the address `HOST:PORT` with a free port in place of port 0.

    Two processes listen there, one after the other.
    """
    host, port = parse_address(address)
    if port:
        return address
    with bound_socket(host, 0) as probe:
        return join_address(host, probe.getsockname()[1])
