"""The gate between vLLM's HTTP handlers and its engine, and the state of vLLM: generating, paused, or asleep.

vLLM's serving objects get `GatedClient` in place of the engine client, so that everything that generates goes through
here, whatever route it came by:

* A request begins only while a proved version serves. During an update it waits; without a version it is refused.
* Its prefix cache is that of the applied version alone: the salt names the application, not only the version, so
  neither a version that is applied twice nor a failed one leaves blocks that a later request could find. Salt and
  submission happen without a break in between, and the gate closes before the engine pauses: no request carries an old
  salt into a new version, except those that were in the engine already. These go on with the KV cache that they have
  (`keep`), or compute it anew (`recompute`). A request that has no token yet is requeued instead, and begins again with
  the new version and its salt: otherwise its tokens would claim the new version on a prompt cached by the old one.
* From the moment that new weights are written until they are proved no answer leaves. If the proof fails the answers
  are dropped, and their callers get an error that asks them to retry.
"""

import asyncio
import contextvars
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from millrace.errors import InvalidStateError, UnavailableError
from millrace.inference.vllm.handover import ask_restart
from millrace.telemetry import waits

_ABORT_DEADLINE_S = 10.0


@dataclass(slots=True)
class Calls:
    """The finished choices of one HTTP request's generations, by index, one table per call of the engine in their
    order.
    """

    outputs: list[dict[int, Any]] = field(default_factory=list)


CALLS: contextvars.ContextVar[Calls | None] = contextvars.ContextVar("millrace_calls", default=None)


@dataclass(slots=True, eq=False)
class Ticket:
    """One generation that has begun. `abort_reason` is why its answer must not leave.

    With `is_requeued` it begins again. With `has_answered` a part of its answer has left, so that it cannot.
    """

    request_id: str
    abort_reason: str = ""
    is_requeued: bool = False
    has_answered: bool = False


class GenerationGate:
    """Decides when requests begin and answers leave; refuses requests at first. Used by one event loop."""

    def __init__(self) -> None:
        """Make a gate that refuses all requests until `open`."""
        self.refusal = "no policy is loaded yet"
        self._is_open = asyncio.Event()
        self.may_leave = asyncio.Event()
        self.may_leave.set()
        self._salt = ""
        self.lora_request: Any = None
        """vLLM's LoRARequest for every generation that begins; None for none."""
        self._tickets: set[Ticket] = set()
        self._has_none = asyncio.Event()
        self._has_none.set()
        self.num_waiting = 0
        self.num_finished = 0

    @property
    def num_open(self) -> int:
        """Return the number of generations that have begun and not ended."""
        return len(self._tickets)

    def wait(self) -> None:
        """Make new requests wait until `open`, unless they are refused."""
        if not self.refusal:
            self._is_open.clear()

    def hold(self) -> None:
        """Keep every answer back until `open`, also of requests that have begun."""
        self.may_leave.clear()

    def open(self, salt: str) -> None:
        """Let requests begin, with this salt for their prefix cache, and let answers leave."""
        self._salt, self.refusal = salt, ""
        self.may_leave.set()
        self._is_open.set()

    def refuse(self, reason: str) -> None:
        """Refuse new and waiting requests with this reason; whether answers leave does not change."""
        self.refusal = reason
        self._is_open.set()  # those who wait hear it

    def abort_all(self, reason: str) -> list[str]:
        """Have the callers of all generations that have begun get an error with `reason` in place of an answer.

        Returns the ids of these requests, for the caller to abort in vLLM.
        """
        for ticket in self._tickets:
            ticket.abort_reason = reason
        # Callers whose answers are kept back get the error at once.
        self.may_leave.set()
        return [ticket.request_id for ticket in self._tickets]

    def requeue(self, request_ids: Collection[str]) -> list[str]:
        """Have those of these requests that have begun here begin again, and return their ids, for the caller to abort.

        A request of which a part has left cannot begin again, and fails.
        """
        # An aborted request gets its error, and does not begin again.
        found = [ticket for ticket in self._tickets if ticket.request_id in request_ids and not ticket.abort_reason]
        for ticket in found:
            if ticket.has_answered:  # some of its choices have begun, others not
                ticket.abort_reason = "a new policy came before all of its choices had begun"
            ticket.is_requeued = True
        return [ticket.request_id for ticket in found]

    async def drained(self) -> None:
        """Wait until no generation is in progress."""
        await self._has_none.wait()

    async def enter(self, request_id: str) -> tuple[Ticket, str]:
        """Wait until a request may begin, and return (its ticket, the salt for its prefix cache).

        Raises UnavailableError if requests are refused. `leave` must follow.
        """
        await self._admitted()
        ticket = Ticket(request_id)
        self._tickets.add(ticket)
        self._has_none.clear()
        return ticket, self._salt

    async def enter_again(self, ticket: Ticket) -> str:
        """Wait until a requeued request may begin again, and return its new salt.

        Raises UnavailableError if requests are refused, or it was aborted.
        """
        await self._admitted()
        _require_not_aborted(ticket)
        ticket.is_requeued = False
        return self._salt

    async def _admitted(self) -> None:
        """Wait until requests may begin; raise UnavailableError if they are refused."""
        # Again after each wake-up, because the gate may have been shut or refused since.
        while not (self._is_open.is_set() and not self.refusal):
            if self.refusal:
                raise UnavailableError(self.refusal, reason="NO_POLICY", remedy="retry in a few seconds")
            self.num_waiting += 1
            try:
                await self._is_open.wait()  # an update ends it: applied and proved, or failed
            finally:
                self.num_waiting -= 1

    async def pass_out(self, ticket: Ticket) -> None:
        """Wait until the answer of the ticket's request may leave; raise UnavailableError if it must not."""
        await self.may_leave.wait()
        _require_not_aborted(ticket)

    def leave(self, ticket: Ticket) -> None:
        """End the ticket's generation, and count it as finished."""
        self._tickets.discard(ticket)
        self.num_finished += 1
        if not self._tickets:
            self._has_none.set()


class GatedClient:
    """vLLM's engine client with the gate before `generate`; all else is passed on to the client."""

    def __init__(self, client: Any, gate: GenerationGate) -> None:
        """Put `gate` before the generations of vLLM's engine client."""
        self._client = client
        self._gate = gate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def generate(self, prompt: Any, sampling_params: Any, request_id: str, **options: Any) -> AsyncIterator[Any]:
        """Generate as vLLM's `EngineClient.generate` does, but begin and answer only when the gate allows it.

        The prompt must be rendered, as vLLM's handlers do. Finished choices are also noted in the HTTP request's CALLS.
        """
        # Read before the stream is iterated: a streamed answer is sent after its handler has reset the variable.
        calls = CALLS.get()
        finished: dict[int, Any] = {}
        if calls is not None:
            calls.outputs.append(finished)
        return self._generate(prompt, sampling_params, request_id, options, finished)

    async def _generate(
        self, prompt: Any, sampling_params: Any, request_id: str, options: dict[str, Any], finished: dict[int, Any]
    ) -> AsyncIterator[Any]:
        """Yield the outputs of one generation, again from its beginning if it is requeued; note ended choices in
        `finished`.

        `options` are further arguments of the client's `generate`.
        """
        ticket, salt = await self._gate.enter(request_id)
        try:
            while True:
                # Nothing between `enter` and the submission inside `generate` waits: the salt is that of the version.
                if self._gate.lora_request is not None:
                    options = {**options, "lora_request": self._gate.lora_request}
                stream = self._client.generate(_salted(prompt, salt), sampling_params, request_id, **options)
                # Closed when the caller goes away, upon which vLLM aborts the request.
                async with aclosing(stream):
                    async for output in stream:
                        if ticket.is_requeued:
                            break  # what comes is the end of the aborted one
                        await self._gate.pass_out(ticket)
                        if ticket.is_requeued:
                            break  # while this was kept back: another choice had not begun
                        ticket.has_answered = True
                        for choice in output.outputs:
                            if choice.finish_reason is not None:
                                finished[choice.index] = choice
                        yield output
                if not ticket.is_requeued:
                    return
                salt = await self._gate.enter_again(ticket)
        finally:
            self._gate.leave(ticket)


def unbegun(client: Any) -> set[str]:
    """Return the ids of the requests in vLLM of which a choice has no token yet."""
    states = client.output_processor.request_states.values()
    return {_name_of(state) for state in states if state.is_prefilling}


def _name_of(state: Any) -> str:
    """Return the id that the caller of `generate` gave the request of this state."""
    return state.external_req_id if state.parent_req is None else state.parent_req.external_req_id


def _require_not_aborted(ticket: Ticket) -> None:
    """Raise UnavailableError if the ticket's generation was aborted."""
    if ticket.abort_reason:
        raise UnavailableError(
            f"the generation was aborted: {ticket.abort_reason}", reason="GENERATION_ABORTED", remedy="retry"
        )


async def abort(client: Any, request_ids: list[str]) -> None:
    """Abort these requests in vLLM; after a deadline give up, because the gate refuses their answers anyway."""
    if request_ids:
        with suppress(TimeoutError):
            async with asyncio.timeout(_ABORT_DEADLINE_S):
                # unregistered wait: a request of vLLM's engine, with a deadline
                await client.abort(request_ids)


def _salted(prompt: Any, salt: str) -> dict[str, Any]:
    """Return the rendered prompt with `salt` as its cache salt, joined with the caller's own if it has one.

    Raises UnavailableError for a prompt that is not rendered.
    """
    if not isinstance(prompt, Mapping) or "type" not in prompt:
        raise UnavailableError("this route gives the engine an unrendered prompt", reason="ROUTE_NOT_SUPPORTED")
    own = prompt.get("cache_salt")
    return {**prompt, "cache_salt": f"{salt}/{own}" if own else salt}


# The state of vLLM: it generates, its scheduler is paused, or it also sleeps, with its memory on the device freed.

logger = logging.getLogger(__name__)

WAKES_WITHIN_S = 60.0
_RETRY_S = 1.0


class Degree(Enum):
    """The state that vLLM was last put into."""

    NONE = "generates"
    PAUSED = "generates nothing"
    ASLEEP = "generates nothing, and has no memory on the device"


class Rest:
    """Puts vLLM from one state into another; one call at a time. `bounded` gives a call of the client its deadline."""

    def __init__(self, client: Any, bounded: Callable[[Any], Awaitable[Any]]) -> None:
        """Take vLLM's client, which generates now, and `bounded`, which awaits a call of it with a deadline."""
        self._client = client
        self._bounded = bounded
        self._degree: Degree | None = Degree.NONE  # None: unknown, because a call of vLLM failed
        self._problem = ""
        self.has_memory = True
        """Whether the weights are on the device; False from before a sleep until the end of a successful waking."""
        self.is_moving = False
        """Whether the engine is moving its weights, and answers no call meanwhile."""

    async def become(self, degree: Degree) -> None:
        """Put vLLM into the state `degree`: generating, paused or asleep; do nothing if it is in it.

        Requests in flight stay, with their KV cache, which vLLM computes again after a sleep. Raises what vLLM raises.
        """
        if degree is self._degree:
            return
        self._degree = None
        match degree:
            case Degree.ASLEEP:
                await self._wake()  # vLLM would not free now what it has not taken back since its last sleep
                self.has_memory = False
                try:
                    with self._moving():
                        await self._bounded(self._client.sleep(level=1, mode="keep"))
                except BaseException as error:  # it is unknown what is where; then raises
                    self._give_up(f"vLLM did not fall asleep: {type(error).__name__}: {error}")
                    raise
            case Degree.PAUSED:
                await self._wake()  # which lets it generate for some steps
                # Of level 0: the scheduler's pause alone, as `pause_generation` has it before it sleeps for 20 ms so
                # that what was computed has been answered. What still comes is kept back by the gate.
                await self._bounded(self._client.sleep(level=0, mode="keep"))
            case Degree.NONE:
                if not await self._wake():
                    await self._bounded(self._client.wake_up(tags=["scheduling"]))
        self._degree = degree

    async def _wake(self) -> bool:
        """Have vLLM take its memory on the device back, after which it generates; return False if it had its memory.

        The memory may come late: from a trainer that was killed, or is about to free it. If one process has all of
        vLLM's memory, this tries again for `WAKES_WITHIN_S`. Else one rank may have what another lacks, and a restart
        of vLLM is asked for. Raises what vLLM raised, and UnavailableError after an earlier failure.
        """
        if self.has_memory:
            return False
        if self._problem:
            raise UnavailableError(self._problem, reason="ENGINE_FAILED", remedy="start the replica again")
        began = time.monotonic()
        with waits.waiting("its memory on the device", waits_on="trainer", deadline_s=WAKES_WITHIN_S):
            while not self.has_memory:
                try:
                    with self._moving():
                        # vLLM answers False if a part of its memory did not come back.
                        if not await self._bounded(self._client.wake_up(tags=None)):
                            raise UnavailableError("it says that some is not there", reason="ENGINE_ASLEEP")
                    self.has_memory = True
                except Exception as error:  # whatever vLLM raises, then raises
                    problem = f"vLLM does not get its memory on the device again: {type(error).__name__}: {error}"
                    logger.warning(problem)
                    if not self._is_alone or time.monotonic() - began >= WAKES_WITHIN_S:
                        self._give_up(problem)
                        raise
                    await asyncio.sleep(_RETRY_S)
        return True

    def _give_up(self, problem: str) -> None:
        """Remember the problem and ask for a restart of vLLM, because nothing else helps."""
        self._problem = problem
        logger.critical("vLLM has to be started again", extra={"error": problem, "is_asked": ask_restart(problem)})

    @property
    def _is_alone(self) -> bool:
        """Return whether one process has all of vLLM's memory on the device."""
        parallel = self._client.vllm_config.parallel_config
        return parallel.world_size == parallel.data_parallel_size == 1

    @contextmanager
    def _moving(self) -> Iterator[None]:
        """Set `is_moving` during the block."""
        self.is_moving = True
        try:
            yield
        finally:
            self.is_moving = False

    def require_sleep(self) -> None:
        """Raise InvalidStateError if vLLM was started so that it cannot free its memory. On a CPU it never frees
        it, and passes.
        """
        config = self._client.vllm_config
        if not config.model_config.enable_sleep_mode and config.device_config.device_type != "cpu":
            raise InvalidStateError(
                "this replica cannot sleep: vLLM was started without its sleep mode",
                reason="SLEEP_NOT_ENABLED",
                remedy='start it with {"inference.sleep_while_training": true} in MILLRACE_VLLM_FLAGS, or leave that '
                "key out of the run",
            )


# Which policy made which token of an answer: vLLM's spans, added to the bodies and streams of its own handlers.
#
# A streamed choice has its spans in its last chunk, the one with the finish reason. Token ids and log-probs come with
# the chunks, as vLLM sends them; joined they are those of the answer in one piece, over which the spans' indexes count.

_DATA = "data: "


def add_spans(body: dict[str, Any], calls: Calls) -> None:
    """Add `policy_spans` to every choice of a whole answer, `body`, in place.

    The choices are those of the engine's `calls`, in order. Raises UnavailableError if they do not correspond.
    """
    outputs = [found[index] for found in calls.outputs for index in sorted(found)]
    if len(outputs) != len(body["choices"]):
        raise UnavailableError("a choice has no end", reason="GENERATION_ABORTED", remedy="retry")
    for choice, output in zip(body["choices"], outputs, strict=True):
        choice["policy_spans"] = spans_of(output)
        if choice.get("token_ids") is not None and len(choice["token_ids"]) != len(output.token_ids):
            raise UnavailableError("a choice is not that of its spans", reason="GENERATION_ABORTED", remedy="retry")


def add_last_spans(chunk: dict[str, Any], calls: Calls, *, per_call: int) -> None:
    """Add `policy_spans` to every choice that ends in this chunk of a stream, in place.

    The choices are those of the engine's `calls`, `per_call` of each.
    """
    for choice in chunk.get("choices") or []:
        if choice.get("finish_reason") is not None:
            number, index = divmod(choice["index"], per_call)
            choice["policy_spans"] = spans_of(calls.outputs[number][index])


def name_tokens(body: dict[str, Any]) -> None:
    """Set the names of tokens in the log-probs of `/inference/v1/generate` to `token_id:N`, in place.

    Entries without a `token_id`, in answers that are asked for as text, keep the tokens' texts.
    """
    for choice in body.get("choices") or []:
        for entry in (choice.get("logprobs") or {}).get("content") or []:
            if "token_id" in entry:
                entry["token"] = f"token_id:{entry['token_id']}"


async def rewritten(events: AsyncGenerator[str, None], change: Callable[[dict[str, Any]], None]) -> AsyncIterator[str]:
    """Yield vLLM's server-sent events, the JSON object of each changed in place by `change`.

    Other events, such as [DONE], pass unchanged.
    """
    async with aclosing(events):
        async for event in events:
            text = event.strip().removeprefix(_DATA)
            if not event.startswith(_DATA) or not text.startswith("{"):
                yield event
                continue
            chunk = json.loads(text)
            change(chunk)
            yield f"{_DATA}{json.dumps(chunk, separators=(',', ':'), ensure_ascii=False)}\n\n"


def spans_of(output: Any) -> list[dict[str, int]]:
    """Return which policy generated which tokens of a finished choice, [start, end) in order; [] if vLLM reports
    none.
    """
    return [_span(span) for span in output.weight_versions or ()]


def _span(span: Any) -> dict[str, int]:
    """Return one of vLLM's spans, whose version is `LINEAGE-VERSION`, as a JSON object."""
    lineage, _, version = str(span.version).partition("-")
    return {"lineage": int(lineage), "version": int(version), "start": span.start, "end": span.end}
