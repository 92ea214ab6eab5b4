"""The run's environments on the registered env-servers: opening them, and playing groups there."""

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import grpc

from millrace.backoff import Backoff
from millrace.config.sections.environments import NamedEnv
from millrace.errors import (
    CapacityError,
    InternalError,
    InvalidSpecError,
    InvalidStateError,
    MillraceError,
    UnauthenticatedError,
    UnavailableError,
)
from millrace.internal.v1 import env_service_pb2, env_service_pb2_grpc
from millrace.internal.v1.play_pb2 import EnvSpec, PlayGroupRequest, PlayingGroup, Sampling
from millrace.orchestrator.play.failures import OWN_SAMPLING_REMEDY
from millrace.orchestrator.workers import WorkerKind, WorkerRecord, WorkerRegistry
from millrace.rollouts.requests import NUM_RUNS
from millrace.rollouts.types import OWN_SAMPLING
from millrace.rpc.channel import call, open_channel
from millrace.telemetry import waits
from millrace.telemetry.waits import Refusal

logger = logging.getLogger(__name__)

RPC_TIMEOUT_S = 10.0
MAX_OPENING = 32
"""Most calls at once that ask env-servers to open an environment."""
PLAY_TIMEOUT_S = 5.0
"""PlayGroup answers at once. An env-server that does not delays the groups of the others."""
LIST_TIMEOUT_S = 30.0
"""ListPlaying answers only once the log has all that the env-server finished, which is much after a wipe of Redis."""
OPEN_POLL = Backoff(0.02, 0.25, factor=1.3)
"""Between two looks at an environment that loads: what loads in a tenth of a second is there at once."""
OPEN_TIMEOUT_S = 300.0
"""Longest time for an environment to load: imports of `verifiers` alone cost 7 CPU-seconds."""
RETURN_PAUSE_S, RETURN_LIMIT_S = 1.0, 10.0
"""After a takeover: how long after the last env-server came back no other one is expected, and the longest wait."""
SILENCE_S = 3.0
"""How long an env-server that did not answer gets no new groups, so that it does not delay those of the others."""
IMAGE_REMEDY = (
    "start an env-server from that image with MILLRACE_ENV_IMAGE={image} (with the chart: a pool of envServer.pools), "
    "or correct orchestrator.env.image"
)
NO_IMAGE_REMEDY = "start an env-server without MILLRACE_ENV_IMAGE, or set orchestrator.env.image to what one announces"
KILLS_WORKERS = "ENV_KILLS_WORKERS"
"""What an env-server answers of an environment that it has given up, and the reason for which its run fails."""
_KEY_FIELDS = ("api_key_var", "teacher_key_var")
"""Of OpenEnv: keys that every env-server must have, because each may be asked to play."""
# INTERNAL: it died in the middle of its answer. UNAUTHENTICATED: tokens are being changed, and not every machine has
# the new ones yet. None of them says anything about the run: others are asked, and this one again.
_AWAY = (UnavailableError, InternalError, UnauthenticatedError)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedEnv:
    """An environment that is ready on at least one env-server."""

    spec: EnvSpec
    num_train: int
    train_digest: str
    num_eval: int
    requires_group: bool
    played_in: str = ""
    """The interpreter that an env-server chose for it, and why; empty where that is its own, or named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyVariables:
    """Variables of the env-servers that must hold keys; "" where none is needed."""

    endpoint: str = ""
    teacher: str = ""


class EnvServers:
    """Connections to every env-server; knows which of them has which environment ready."""

    def __init__(
        self, *, run_uid: str, epoch: int, registry: WorkerRegistry, trained: Mapping[str, Sampling] | None = None
    ) -> None:
        """Make connections for one drive of a run, under `epoch`, to the env-servers of `registry`.

        `trained` says how each environment that is trained on is sampled, by name; None if none is.
        """
        self._trained = trained or {}
        self._run_uid = run_uid
        self._epoch = epoch
        self._registry = registry
        self.full_spool: Refusal | None = None
        """Why the last group was not taken, if that is a spool which the rollouts of one run fill; else None."""
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._ready: dict[str, set[str]] = {}
        self._silent_until: dict[str, float] = {}
        self._problems: dict[str, str] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self.envs: dict[str, OpenedEnv] = {}

    def alive(self) -> list[str]:
        """Return the worker ids of the env-servers whose lease holds."""
        return [record.worker_id for record in self._registry.alive(WorkerKind.ENV_SERVER)]

    def places_of(self, spec: EnvSpec) -> list[str]:
        """Return the worker ids of the living env-servers that may play an environment.

        They run the image that `spec` names; if it names none, they announce none.
        """
        records = self._registry.alive(WorkerKind.ENV_SERVER)
        return [record.worker_id for record in records if record.worker.env_image == spec.image]

    def servers_with(self, env: str) -> list[str]:
        """Return the worker ids of env-servers on which environment `env` is ready and that take work, least busy
        first.

        One that did not answer is left out for `SILENCE_S`.
        """
        ready = self._ready.get(env, set())
        records = self._registry.accepting(WorkerKind.ENV_SERVER)
        found = [r.worker_id for r in sorted(records, key=lambda r: r.num_playing) if r.worker_id in ready]
        return [worker_id for worker_id in found if self._silent_until.get(worker_id, 0.0) <= time.monotonic()]

    async def open_all(self, specs: Sequence[EnvSpec], *, keys: KeyVariables = KeyVariables()) -> None:
        """Wait until every environment is loaded on at least one env-server that may play it.

        The env-servers must have the variables `keys`. Raises InvalidSpecError if a key is not set, and
        InvalidStateError naming the environment if it cannot be loaded, or not within `OPEN_TIMEOUT_S`.
        """
        for spec in specs:
            try:
                with waits.waiting(_to_load(spec), waits_on="env-server", deadline_s=OPEN_TIMEOUT_S) as wait:
                    async with asyncio.timeout(OPEN_TIMEOUT_S):
                        num_looks = 0
                        while not await self._open_somewhere(spec, keys):
                            num_looks += 1
                            wait.update(reason=_to_load(spec) if self.places_of(spec) else self._no_place(spec))
                            await asyncio.sleep(OPEN_POLL.after(num_looks))
            except TimeoutError as error:
                raise self._not_opened(spec) from error

    def chosen(self) -> str:
        """Return the environments that are played in interpreters which env-servers chose, as the end of a sentence.

        It begins with `; `, and says of each environment what was chosen and why. Empty if there are none.
        """
        return "".join(f"; {name} is {env.played_in}" for name, env in sorted(self.envs.items()) if env.played_in)

    def is_complete(self, specs: Sequence[EnvSpec]) -> bool:
        """Return whether each of `specs` is ready on every living env-server that may play it."""
        return all(self._ready.get(spec.name, set()).issuperset(self.places_of(spec)) for spec in specs)

    async def refresh(self, specs: Sequence[EnvSpec]) -> None:
        """Open the environments on env-servers that joined since; what fails there is logged and tried again.

        Raises InvalidStateError if an environment ends its workers again and again and no env-server plays it any more.
        """
        self._forget_dead()
        for spec in specs:
            try:
                await self._open_somewhere(spec)
            except MillraceError as error:
                if error.reason == KILLS_WORKERS:
                    raise
                logger.warning("environment not ready on an env-server", extra={"env": spec.name, "error": str(error)})

    def _not_opened(self, spec: EnvSpec) -> InvalidStateError:
        """Return the error for an environment that was not ready in time: no env-server for its image, or none has
        loaded it.
        """
        which = f"environment {spec.name!r} (id {spec.id!r})"
        if not self.places_of(spec) and (spec.image or self.alive()):
            return InvalidStateError(
                f"{which} waited {OPEN_TIMEOUT_S:.0f} s for {self._no_place(spec)}",
                reason="ENV_IMAGE_MISSING",
                remedy=IMAGE_REMEDY.format(image=spec.image) if spec.image else NO_IMAGE_REMEDY,
                metadata={"env": spec.name, "image": spec.image},
            )
        return InvalidStateError(
            f"{which} was not ready on any env-server within {OPEN_TIMEOUT_S:.0f} s; env-servers registered: "
            f"{self._describe_alive()}",
            reason="ENV_LOAD_TIMEOUT",
            remedy="start an env-server, or look at its log",
        )

    def _no_place(self, spec: EnvSpec) -> str:
        """Return in words what is missing for an environment that no env-server may play."""
        records = self._registry.alive(WorkerKind.ENV_SERVER)
        wanted = f"an env-server that announces image {spec.image}" if spec.image else "an env-server without an image"
        return f"{wanted}; registered: {images_in_words(records)}"

    def _describe_alive(self) -> str:
        """Return the ids of the living env-servers in words, each with the error of its last answer.

        "none" without any.
        """
        alive = self.alive()
        return (
            ", ".join(f"{each} ({self._problems[each]})" if each in self._problems else each for each in alive)
            or "none"
        )

    def _forget_dead(self) -> None:
        """Forget what is known of env-servers whose lease has ended, and close their channels in the background."""
        alive = set(self.alive())
        for ready in self._ready.values():
            ready &= alive
        self._silent_until = {worker_id: until for worker_id, until in self._silent_until.items() if worker_id in alive}
        self._problems = {worker_id: text for worker_id, text in self._problems.items() if worker_id in alive}
        for worker_id in self._channels.keys() - alive:
            channel = self._channels.pop(worker_id)
            # In the background, because a channel to a dead machine takes long to close.
            closing = asyncio.get_running_loop().create_task(channel.close())
            # The event loop holds tasks weakly: without a reference the task could vanish.
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def _open_somewhere(self, spec: EnvSpec, keys: KeyVariables = KeyVariables()) -> bool:
        """Ask every env-server that may play an environment, and does not have it ready, to open it, with the variables
        `keys`.

        Returns whether it is ready on at least one. Raises InvalidSpecError if a key is missing or all refuse it, and
        InvalidStateError if it cannot be loaded or has other tasks than elsewhere.
        """
        failure: InvalidStateError | None = None
        refusal: InvalidSpecError | None = None
        others_may = False
        asked = [each for each in self.places_of(spec) if each not in self._ready.get(spec.name, set())]
        slots = asyncio.Semaphore(MAX_OPENING)
        answers = await asyncio.gather(*(self._ask_to_open(spec, keys, each, slots) for each in asked))
        for worker_id, answer in zip(asked, answers, strict=True):
            if isinstance(answer, _AWAY):
                logger.warning("env-server does not answer", extra={"worker": worker_id, "error": str(answer)})
                self._problems[worker_id] = str(answer)
                others_may = True
                continue
            if isinstance(answer, InvalidSpecError):
                # Each env-server may be asked to play, so that a key has to be on all of them: the first that lacks it
                # decides.
                if any(each.field in _KEY_FIELDS for each in answer.violations):
                    raise answer
                # It lacks the interpreter or the judge's key; others may have them.
                logger.warning("env-server refuses an environment", extra={"worker": worker_id, "error": str(answer)})
                self._problems[worker_id] = str(answer)
                refusal = answer
                continue
            self._problems.pop(worker_id, None)
            if answer.state == env_service_pb2.ENV_STATE_FAILED:
                # Not raised yet: another env-server may have it ready.
                failure = _failure(spec, worker_id, answer)
            others_may |= answer.state == env_service_pb2.ENV_STATE_LOADING
            if answer.state == env_service_pb2.ENV_STATE_READY:
                self._admit(spec, worker_id, answer)
        # One env-server is enough to begin; `refresh` asks the others again.
        if self._ready.get(spec.name):
            return True
        if failure is not None:
            raise failure
        if refusal is not None and not others_may:
            raise refusal
        return False

    async def _ask_to_open(
        self, spec: EnvSpec, keys: KeyVariables, worker_id: str, slots: asyncio.Semaphore
    ) -> env_service_pb2.OpenEnvResponse | UnavailableError | InternalError | UnauthenticatedError | InvalidSpecError:
        """Ask an env-server to open an environment; return its answer, or the error for which others are asked, too.

        `slots` limits the calls in progress.
        """
        request = env_service_pb2.OpenEnvRequest(env=spec, api_key_var=keys.endpoint, teacher_key_var=keys.teacher)
        if sampling := self._trained.get(spec.name):
            # So that an environment whose own sampling cannot be trained on is refused before anything is played.
            request.sampling.CopyFrom(sampling)
        async with slots:
            try:
                return await call(self._stub(worker_id).OpenEnv, request, timeout_s=RPC_TIMEOUT_S, waits_on=worker_id)
            except (*_AWAY, InvalidSpecError) as error:
                return error

    def _admit(self, spec: EnvSpec, worker_id: str, answer: env_service_pb2.OpenEnvResponse) -> None:
        """Note that an environment is ready on an env-server.

        InvalidStateError if its tasks are not those of the others.
        """
        known = self.envs.get(spec.name)
        # An ordinal is an index into the task set: with two task sets one ordinal would be two tasks.
        if known is not None and known.train_digest != answer.train.digest:
            raise InvalidStateError(
                f"environment {spec.name!r} has other tasks on {worker_id} (digest {answer.train.digest[:12]}) than on "
                f"the first env-server (digest {known.train_digest[:12]})",
                reason="TASK_SET_DIFFERS",
                remedy="install the same environment version on every env-server",
            )
        self.envs[spec.name] = OpenedEnv(
            spec=spec,
            num_train=answer.train.num_tasks,
            train_digest=answer.train.digest,
            num_eval=answer.eval.num_tasks,
            requires_group=answer.requires_group,
            played_in=answer.played_in,
        )
        self._ready.setdefault(spec.name, set()).add(worker_id)

    async def play(self, worker_id: str, request: PlayGroupRequest) -> bool:
        """Ask an env-server to play a group; return whether the env-server took the group.

        It refuses if it is full, gone, draining, or has another token. An env-server that did not answer gets no groups
        for `SILENCE_S`. One whose environment failed gets no group of the environment until the environment is ready
        there again.
        """
        try:
            await call(self._stub(worker_id).PlayGroup, request, timeout_s=PLAY_TIMEOUT_S, waits_on=worker_id)
        except (CapacityError, *_AWAY) as error:
            is_ours = error.reason == "SPOOL_FULL" and error.metadata.get(NUM_RUNS) == "1"
            self.full_spool = Refusal.of(error) if is_ours else None
            level = logging.WARNING if isinstance(error, UnauthenticatedError) else logging.INFO
            fields = {"worker": worker_id, "ordinal": request.ordinal, "error": str(error)}
            logger.log(level, "group not taken", extra=fields)
            if not isinstance(error, CapacityError):
                self._silent_until[worker_id] = time.monotonic() + SILENCE_S
            return False
        except InvalidStateError as error:
            # Its environment failed after it was ready: others may play it; `refresh` asks this one again.
            logger.warning("environment lost on an env-server", extra={"worker": worker_id, "error": str(error)})
            self._ready.get(request.env.name, set()).discard(worker_id)
            return False
        self.full_spool = None
        return True

    async def wait_for_return(self) -> None:
        """Wait for the predecessor's env-servers after a takeover, `RETURN_LIMIT_S` at most.

        It ends when no further one has registered for `RETURN_PAUSE_S`. What those play that have not
        registered by then is played a second time.
        """
        ends = time.monotonic() + RETURN_LIMIT_S
        with waits.waiting("env-servers to come back", waits_on="env-server", deadline_s=RETURN_LIMIT_S):
            while (now := time.monotonic()) < ends:
                records = self._registry.alive(WorkerKind.ENV_SERVER)
                newest = max((record.registered for record in records), default=0.0)
                if now - newest >= RETURN_PAUSE_S:
                    return
                await asyncio.sleep(min(newest + RETURN_PAUSE_S, ends) - now)

    async def playing(
        self, log_instance: str, *, workers: Collection[str] | None = None, timeout_s: float = LIST_TIMEOUT_S
    ) -> dict[str, list[PlayingGroup]]:
        """Return by env-server the groups that it plays for the run.

        Those that do not answer within `timeout_s` are left out.

        All living env-servers are asked, or those of `workers`. Each first appends the finished rollouts that the copy
        `log_instance` of the log lacks; "" means the copy that it knows.
        """
        request = env_service_pb2.ListPlayingRequest(
            run_uid=self._run_uid, epoch=self._epoch, log_instance=log_instance
        )

        async def ask(worker_id: str) -> Sequence[PlayingGroup] | None:
            """Return the groups that one env-server plays for the run; None if it does not answer."""
            try:
                method = self._stub(worker_id).ListPlaying
                answer = await call(method, request, timeout_s=timeout_s, waits_on=worker_id)
            except _AWAY as error:
                logger.warning("env-server does not answer", extra={"worker": worker_id, "error": str(error)})
                return None
            return list(answer.groups)

        asked = [worker_id for worker_id in self.alive() if workers is None or worker_id in workers]
        with waits.waiting(
            f"what {len(asked)} env-servers play and the log lacks", waits_on="env-server", deadline_s=timeout_s
        ):
            answers = await asyncio.gather(*(ask(worker_id) for worker_id in asked))
        return {worker_id: list(found) for worker_id, found in zip(asked, answers, strict=True) if found is not None}

    async def cancel(self, groups: Sequence[PlayingGroup], *, timeout_s: float = RPC_TIMEOUT_S) -> None:
        """Ask every living env-server to stop these groups, or all of the run if `groups` is empty.

        One that does not answer within `timeout_s` seconds is only logged: its late rollouts are discarded.
        """
        request = env_service_pb2.CancelGroupsRequest(run_uid=self._run_uid, groups=groups, epoch=self._epoch)

        async def cancel_on(worker_id: str) -> None:
            """Ask one env-server to stop the groups; log an error that it answers."""
            try:
                await call(self._stub(worker_id).CancelGroups, request, timeout_s=timeout_s, waits_on=worker_id)
            except MillraceError as error:
                logger.warning("could not cancel groups", extra={"worker": worker_id, "error": str(error)})

        await asyncio.gather(*(cancel_on(worker_id) for worker_id in self.alive()))

    async def stop_all(self, log_instance: str) -> None:
        """Stop all plays of the run on all env-servers, before a pause; finished rollouts are appended first, and kept.

        `log_instance` is the copy of the log that must have them.
        """
        playing = [group for groups in (await self.playing(log_instance)).values() for group in groups]
        # An empty list would stop everything of the run, which is not what was asked for here.
        if playing:
            await self.cancel(playing)

    async def close(self) -> None:
        """Close the connections to all env-servers."""
        for channel in self._channels.values():
            await channel.close()

    def _stub(self, worker_id: str) -> env_service_pb2_grpc.EnvServiceStub:
        """Return the client of an env-server, connected if need be; UnavailableError if its lease has ended."""
        if worker_id not in self._channels:
            records = self._registry.alive(WorkerKind.ENV_SERVER)
            address = next((r.worker.address for r in records if r.worker_id == worker_id), None)
            if address is None:
                raise UnavailableError(
                    f"env-server {worker_id} has no lease any more", reason="WORKER_LOST", remedy="start another one"
                )
            self._channels[worker_id] = open_channel(address)
        return env_service_pb2_grpc.EnvServiceStub(self._channels[worker_id])


def images_in_words(records: Sequence[WorkerRecord]) -> str:
    """Return how many of these env-servers announce each image, in words; "none" without env-servers."""
    counts = Counter(record.worker.env_image for record in records)
    return ", ".join(f"{count} with {image or 'none'}" for image, count in sorted(counts.items())) or "none"


def _to_load(spec: EnvSpec) -> str:
    """Return what is waited for, in words, while an environment loads."""
    return f"environment {spec.name} to load"


def env_spec(
    env: NamedEnv, *, takes_several_traces: bool = False, is_text_only: bool, select_json: str = "", demo_key: str = ""
) -> EnvSpec:
    """Return an environment of the run's config as the message that env-servers load it by.

    `takes_several_traces` says that a rollout may have several trained agents, `is_text_only` that the model gets text
    alone. `select_json` selects tasks, "" for all; `demo_key` names the task's field with a teacher's demonstration.
    """
    return EnvSpec(
        name=env.name,
        id=env.id,
        args_json=json.dumps(env.args, sort_keys=True),
        takes_several_traces=takes_several_traces,
        is_text_only=is_text_only,
        judge_max_concurrent=env.judge.max_concurrent,
        judge_timeout_s=env.judge.timeout_s,
        judge_key_var=env.judge.api_key_var or "",
        python=env.python or "",
        image=env.image or "",
        select_json=select_json,
        demo_key=demo_key,
        agent_json=env.agent.to_wire(),
    )


def _failure(spec: EnvSpec, worker_id: str, answer: env_service_pb2.OpenEnvResponse) -> InvalidStateError:
    """Return the error for an environment that the env-server `worker_id` could not load, made of its answer."""
    metadata = {"env": spec.name, "error_type": answer.error_type}
    if answer.error_type == OWN_SAMPLING:
        return InvalidStateError(
            answer.error_message, reason="ENV_SAMPLING_REFUSED", remedy=OWN_SAMPLING_REMEDY, metadata=metadata
        )
    is_killing = answer.error_type == KILLS_WORKERS
    named = "" if spec.name == spec.id else f" (id {spec.id!r})"
    what = "is given up" if is_killing else "could not be loaded"
    reason = answer.error_type if answer.error_type.startswith("ENV_") else "ENV_LOAD_FAILED"
    return InvalidStateError(
        f"environment {spec.name!r}{named} {what} on {worker_id}: {answer.error_type}: {answer.error_message}",
        reason=reason,
        remedy=answer.error_remedy or "fix that, then submit the run again",
        metadata=metadata,
    )
