"""The two processes that work for a server, and who waits for their results.

A process that ends is started again, later after each death. All that was asked of it is asked again then: it finds in
the store what it had done. A request at which a trainer died `MAX_DEATHS` times gets an error as its result, so that
the model goes on without it. So do the open requests of a sampling session at which a sampler died as often.
"""

import asyncio
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from millrace.backoff import Backoff
from millrace.decoding import Fields, decode_object
from millrace.errors import MillraceError
from millrace.internal.v1.tinker_pb2 import VerbError, VerbResult
from millrace.processes.channel import ChildLink
from millrace.storage.base import ObjectStore
from millrace.tinker.api import Future
from millrace.tinker.log import SERVER, ModelLog
from millrace.tinker.names import ModelName, SamplerName

logger = logging.getLogger(__name__)

MODULE = "millrace.tinker.worker"
"""What a process runs; it imports torch, which this module does not."""
MAX_FRAME_BYTES = 1 << 16
TRAINER, SAMPLER = "trainer", "sampler"
SNAPSHOT_VERBS = 16
"""Requests between two states of a model: as many are executed again at most after a death."""
MAX_DEATHS = 5
"""Deaths of trainers at one request, after which it is an error."""
_RESTART = Backoff(0.2, 30.0)
_LIVED_S = 60.0  # after as long a life a death is the first of its row again


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOrder:
    """What the processes are started with."""

    model: str
    """Directory of the base model."""
    max_tokens: int | None
    num_threads: int
    snapshot_verbs: int


class Worker:
    """One process, started again whenever it ends, and the requests that are under way in it."""

    def __init__(self, role: str, order: WorkerOrder, *, store: ObjectStore, prefix: str) -> None:
        """Make a worker of a role, `trainer` or `sampler`; `run` starts its process."""
        self._role = role
        self._order = {
            "role": role,
            "model": order.model,
            "max_tokens": order.max_tokens,
            "num_threads": order.num_threads,
            "snapshot_verbs": order.snapshot_verbs,
        }
        self._store, self._prefix = store, prefix
        self._link: ChildLink | None = None
        self._open: dict[Future, asyncio.Event] = {}
        """Requests without a result, as far as is known, with the event of their results."""
        self.executed: dict[ModelName, int] = {}
        """The next request of each model, as far as is known."""
        self.broken: dict[ModelName, str] = {}
        """Why a model cannot go on."""
        self._given_up: set[ModelName] = set()
        """Models of which the process is told nothing more, because it dies of them."""
        self._begun: tuple[ModelName | SamplerName, int] | None = None
        """Where the process is: at a request of a model, or at requests of a sampling session (with 0)."""
        self._deaths: dict[tuple[ModelName | SamplerName, int], int] = {}
        self.ready = asyncio.Event()
        """Set while a process has its model."""
        self.max_tokens = 0
        """Longest sequence, once a process has said it."""

    @property
    def pid(self) -> int | None:
        """Return the process id; None while there is no process."""
        return None if self._link is None or self._link.is_ended else self._link.pid

    def ask(self, future: Future) -> asyncio.Event:
        """Tell the process of a request that is stored, and return the event that is set once it has a result."""
        event = self._open.get(future)
        if event is None:
            event = self._open[future] = asyncio.Event()
            self._hint(future)
        return event

    def forget(self, future: Future) -> None:
        """Note that the result of a request was found."""
        if (event := self._open.pop(future, None)) is not None:
            event.set()

    def _hint(self, future: Future) -> None:
        """Send the process a hint; one that does not live gets it when it is started."""
        name = future.name
        if self._link is None or name in self._given_up:
            return
        hint: dict[str, Any] = {"tenant": name.home.tenant}
        hint |= {"model": name.id} if isinstance(name, ModelName) else {"sampler": name.id, "seq_id": future.seq_id}
        self._link.post(json.dumps(hint).encode())

    async def run(self) -> None:
        """Keep a process alive until this task is cancelled, which ends it."""
        deaths, loop = 0, asyncio.get_running_loop()
        # unregistered wait: a pause between two lives of a process, which is logged
        while True:
            started = loop.time()
            try:
                await self._life()
            except Exception:  # what could not be started or said what cannot be read: the next life may be better
                logger.exception("a worker failed", extra={"role": self._role})
            finally:
                self.ready.clear()
                if self._link is not None:
                    await self._link.end()
                self._link = None
            deaths = 1 if loop.time() - started > _LIVED_S else deaths + 1
            delay_s = _RESTART.after(deaths)
            logger.warning(
                "a worker has ended, and is started again",
                extra={"role": self._role, "deaths": deaths, "delay_s": round(delay_s, 1)},
            )
            await self._count_death()
            await asyncio.sleep(delay_s)

    async def _life(self) -> None:
        """Start the process, ask it all that is open, and read what it says until it ends."""
        self._link = await ChildLink.start(MODULE, self._order)
        logger.info("a worker was started", extra={"role": self._role, "worker_pid": self._link.pid})
        for future in self._open:
            self._hint(future)
        while (data := await self._link.receive(most=MAX_FRAME_BYTES)) is not None:
            self._heard(decode_object(data, what="a worker's message", reason="FRAME_UNREADABLE"))

    def _heard(self, message: Mapping[str, Any]) -> None:
        """Take note of a message of the process."""
        said = Fields(dict(message), what="a worker's message")
        match said.text("kind"):
            case "ready":
                self.max_tokens = said.integer("max_tokens")
                self.ready.set()
            case "begin" if "model" in message:
                self._begun = self._model(said), said.integer("seq_id")
            case "begin":
                self._begun = self._sampler(said), 0
            case "end":
                self._begun = None
                self._deaths.pop((self._sampler(said), 0), None)
            case "broken":
                self.broken[self._model(said)] = said.text("error", most=MAX_FRAME_BYTES)
                self._wake(self._model(said))
            case "done" if "model" in message:
                name, seq_id = self._model(said), said.integer("seq_id")
                self.broken.pop(name, None)
                self.executed[name] = max(self.executed.get(name, 0), seq_id + 1)
                self._begun = None
                self._deaths.pop((name, seq_id), None)
                self.forget(Future(name, seq_id))
            case "done":
                self.forget(Future(self._sampler(said), said.integer("seq_id", most=(1 << 63) - 1)))
            case kind:
                logger.warning("a worker said something unknown", extra={"said": kind[:100]})

    def _model(self, said: Fields) -> ModelName:
        """Return the model that a message names."""
        return ModelName.parse(self._prefix, said.text("tenant"), said.text("model"))

    def _sampler(self, said: Fields) -> SamplerName:
        """Return the sampling session that a message names."""
        return SamplerName.parse(self._prefix, said.text("tenant"), said.text("sampler"))

    def _wake(self, name: ModelName) -> None:
        """Wake all that wait for results of a model."""
        for future in [each for each in self._open if each.name == name]:
            self.forget(future)

    async def _count_death(self) -> None:
        """Count the death for the request that was being executed, and give it up after `MAX_DEATHS`."""
        if self._begun is None:
            return
        begun, self._begun = self._begun, None
        self._deaths[begun] = self._deaths.get(begun, 0) + 1
        if self._deaths[begun] < MAX_DEATHS:
            return
        name, seq_id = begun
        logger.error("a request is given up", extra={"name": name.id, "seq_id": seq_id, "deaths": MAX_DEATHS})
        try:
            if isinstance(name, ModelName):
                await self._give_up(name, seq_id)
            else:
                await self._give_up_samples(name)
        except MillraceError as failure:  # it is counted again at the next death
            logger.warning("the error could not be stored", extra={"name": name.id, "error": str(failure)})

    async def _give_up(self, name: ModelName, seq_id: int) -> None:
        """Store an error as the result of a request; where it has a result already its model cannot go on."""
        message = f"the trainer died {MAX_DEATHS} times at this request, which was left out; the model is as before it"
        error = VerbError(message=message, category=SERVER)
        if not await asyncio.to_thread(ModelLog(self._store, name).create_error, seq_id, error):
            # Executed again, or stored in a state: without it the model would be another one.
            self._given_up.add(name)
            self.broken[name] = (
                f"the trainer died {MAX_DEATHS} times after request {seq_id}, which has a result; restart the server "
                "with more memory"
            )
            self._wake(name)

    async def _give_up_samples(self, name: SamplerName) -> None:
        """Store an error as the result of each open request of a sampling session that has none."""
        message = f"the sampler died {MAX_DEATHS} times while it answered requests of this sampling session"
        data = VerbResult(error=VerbError(message=message, category=SERVER)).SerializeToString(deterministic=True)
        for future in [each for each in self._open if each.name == name]:
            await asyncio.to_thread(self._store.create, name.result(future.seq_id), data)
            self.forget(future)
        self._deaths.pop((name, 0), None)


class Workers:
    """The trainer and the sampler of a server."""

    def __init__(self, order: WorkerOrder, *, store: ObjectStore, prefix: str) -> None:
        self.trainer = Worker(TRAINER, order, store=store, prefix=prefix)
        self.sampler = Worker(SAMPLER, order, store=store, prefix=prefix)
        self._tasks: list[asyncio.Task[None]] = []

    def of(self, future: Future) -> Worker:
        """Return the worker that a request is for."""
        return self.trainer if isinstance(future.name, ModelName) else self.sampler

    def start(self) -> None:
        """Start both processes, in the background."""
        self._tasks = [asyncio.create_task(each.run()) for each in (self.trainer, self.sampler)]

    async def stop(self) -> None:
        """End both processes."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
