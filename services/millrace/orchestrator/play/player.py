"""Sending plays out: choose an env-server and a replica, ask for the play, and notice when it is lost.

One player serves training and evaluation: it changes the state of the plays that it is given, wherever they are kept.
"""

import asyncio
import heapq
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from millrace.errors import first_error
from millrace.internal.v1.play_pb2 import PlayGroupRequest, PlayingGroup
from millrace.orchestrator.play.book import RolloutStream
from millrace.orchestrator.play.env_servers import EnvServers
from millrace.orchestrator.play.play import Play, PlayState
from millrace.orchestrator.play.routing import Choices, Policies, ReadyReplica, Router
from millrace.rollouts.types import Purpose
from millrace.rollouts.wire import purpose_to_wire
from millrace.telemetry import faults

logger = logging.getLogger(__name__)

ASK_TIMEOUT_S = 5.0
"""An env-server that does not say within it what it plays has lost what is late."""
MAX_PLACING = 32
"""Most calls at once that ask env-servers to play."""
STOP_TIMEOUT_S = 2.0
"""An env-server that does not stop a play within it may play on: what it sends late is a duplicate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    """What every request of a run's driver carries."""

    uid: str
    epoch: int
    generation: int


class Round:
    """One round of placements, up to `MAX_PLACING` at once. Each counts as work for the next ones once it is chosen.

    The round looks at replicas, env-servers and plays once, so that the cost of a placement does not grow with
    their number.
    """

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        place: Callable[[Play, "Round"], Awaitable[bool]],
        choices: Choices,
        envs: EnvServers,
        plays: Iterable[Play],
    ) -> None:
        """Make a round of placements over the replicas of `choices` and the env-servers of `envs`.

        Its calls are tasks of `tasks`. `place` asks an env-server to play one play, and returns False if nobody can
        take it now. `plays` are all plays, placed or not, that count as load of env-servers and for the bound on
        rollouts (`PlaySettings.max_playing`).
        """
        self._tasks, self._ask, self._choices, self._envs = tasks, place, choices, envs
        self._slots = asyncio.Semaphore(MAX_PLACING)
        self._num_playing, self._load = 0, Counter[str]()
        for play in plays:
            self._num_playing += play.num_playing
            # Plays that are over keep the name of their env-server, but are no load.
            self._load[play.env_server] += play.is_open
        self._servers: dict[str, list[tuple[int, str]]] = {}
        self._left_out = set[str]()
        self.refused = set[str]()
        """Environments that nobody can take now; others may have env-servers of their own (images)."""

    async def place(self, play: Play) -> None:
        """Begin to place a play in the background, unless nobody can take its environment now.

        Waits while `MAX_PLACING` others are in progress.
        """
        await self._slots.acquire()
        self._tasks.create_task(self._place(play))

    async def _place(self, play: Play) -> None:
        """Ask for a play that is still unplaced to be played, and free the slot that it took.

        If no replica or env-server can take it, its environment is added to `refused`, and no other play of it is
        placed.
        """
        try:
            is_wanted = play.state is PlayState.UNPLACED and play.task.env not in self.refused
            if is_wanted and not await self._ask(play, self):
                self.refused.add(play.task.env)
        finally:
            self._slots.release()

    def choose(self, play: Play) -> ReadyReplica | None:
        """Return the replica for a play, and count the play's rollouts there; None if no replica fits.

        None also if the bound on rollouts that are played at once would be exceeded (`PlaySettings.max_playing`). A
        play that is larger than the bound is played alone.
        """
        bound, size = play.settings.max_playing, len(play.missing)
        if bound is not None and self._num_playing and self._num_playing + size > bound:
            return None
        replica = self._choices.pick(min_version=play.min_version, home=play.home, is_pinned=play.is_pinned)
        if replica is not None:
            self._choices.add(replica.worker_id, size)
            self._num_playing += size
        return replica

    def server(self, env: str) -> str | None:
        """Choose the env-server with the fewest plays that has an environment, and count one play more there.

        None if all that have it were left out.
        """
        if env not in self._servers:
            self._servers[env] = sorted((self._load[each], each) for each in self._envs.servers_with(env))
        ranked = self._servers[env]
        while ranked:
            load, worker_id = ranked[0]
            if worker_id in self._left_out:
                heapq.heappop(ranked)
            else:
                # A sorted list is a heap, too; equal loads are decided by id.
                heapq.heapreplace(ranked, (load + 1, worker_id))
                return worker_id
        return None

    def leave_out(self, worker_id: str) -> None:
        """Leave an env-server out of the rest of the round, because it did not take a play."""
        self._left_out.add(worker_id)


class Player:
    """Places plays on env-servers and replicas."""

    def __init__(
        self, *, run: RunIdentity, envs: EnvServers, policies: Policies, stream: RolloutStream, router: Router
    ) -> None:
        """Make the player of a run, which places plays on `envs` with the replicas of `policies`.

        `stream` is read before anything is played again; `router` knows the load of all replicas.
        """
        self._run = run
        self._envs = envs
        self._policies = policies
        self._stream = stream
        self._router = router
        # Bounded by the replicas that were lost with work of the run.
        self._orphaned: dict[str, float] = {}

    async def place_open(self, plays: Collection[Play]) -> None:
        """Give lost plays up, and place all that are unplaced and whose pause is over, as far as env-servers take them.

        Before anything is played again, the stream is read to its end: what the log holds is never generated twice.
        `plays` are those of `round`.
        """
        # Before `lost`: what is late and still being played must not be played a second time.
        await self._keep_on(plays)
        if lost := [(play, play.attempt) for play in self.lost(plays)]:
            # A dead env-server plays nothing, and asking it would only cost the timeout.
            alive = self._envs.alive()
            await self.stop([play for play, _ in lost if play.env_server in alive])
            # A new attempt of a task that is scored whole drops the members that came, so what the log holds is read
            # first.
            await self._stream.catch_up()
            for play, attempt in lost:
                if play.state is PlayState.PLACED and play.attempt == attempt:
                    # Not a play that became whole, was dropped or failed while the stream was read.
                    play.lose()
        now = time.monotonic()
        unplaced = [play for play in plays if play.state is PlayState.UNPLACED and play.not_before <= now]
        if any(play.attempt for play in unplaced):
            await self._stream.catch_up()
        if unplaced:
            async with self.round(plays) as placing:
                for play in unplaced:
                    await placing.place(play)

    @asynccontextmanager
    async def round(self, plays: Collection[Play]) -> AsyncIterator["Round"]:
        """Yield a round of placements; at the end of the block all of them have been answered.

        `plays` are all plays, placed or not, that count in it as load (`Round`).
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                choices = self._router.choices(self._policies.ready())
                yield Round(tasks, self._place, choices, self._envs, plays)
        except BaseExceptionGroup as group:
            raise first_error(group) from group

    async def place(self, play: Play, plays: Collection[Play]) -> bool:
        """Place one play; return False if nobody can take it now. `plays` are those of `round`."""
        async with self.round(plays) as placing:
            await placing.place(play)
        return not placing.refused

    async def _place(self, play: Play, placing: "Round") -> bool:
        """Ask an env-server to play the missing members of an unplaced play.

        Return False if no replica or env-server can take it now. After a lost answer the play stays unplaced although
        an env-server may play it: asking again is harmless there, and its rollouts count whatever was asked. A task
        that is scored as a whole and has come in part is never asked for again: it is left to the env-server that plays
        it.
        """
        if play.source:
            # The members of such a task end together: the others are on their way, unless `lost` says otherwise.
            play.place(play.source, replica="", timeout_s=play.settings.rest_timeout_s)
            return True
        replica = placing.choose(play)
        if replica is None:
            return False
        request = self._request(play, replica)
        while (worker_id := placing.server(play.task.env)) is not None:
            if not _is_asked_for(play, request):
                # Members came while another env-server was asked: what is still missing is asked for anew.
                return True
            if await self._envs.play(worker_id, request):
                if play.state is PlayState.UNPLACED and play.attempt == request.attempt:
                    # else it failed already, before the answer came: place it again
                    timeout_s = play.settings.timeout_s
                    source = play.source or worker_id
                    play.place(source, replica=replica.worker_id, timeout_s=timeout_s, version=replica.version)
                if play.settings.purpose is Purpose.TRAIN:
                    faults.reach(faults.Point.ORCHESTRATOR_AFTER_DISPATCH, step=play.planned_step)
                return True
            placing.leave_out(worker_id)
        return False

    async def _keep_on(self, plays: Collection[Play]) -> None:
        """Extend the deadline of plays that are past it if their env-server reports them as being played.

        The env-server enforces the deadline itself, by each rollout's own time, without the time that others take of a
        worker.
        """
        now = time.monotonic()
        late = [play for play in plays if play.state is PlayState.PLACED and now > play.deadline and play.may_go_on]
        if not late:
            return
        servers = {play.source or play.env_server for play in late}
        playing = await self._envs.playing("", workers=servers, timeout_s=ASK_TIMEOUT_S)
        known = {
            (worker_id, group.purpose, group.eval_id, group.ordinal, group.attempt)
            for worker_id, groups in playing.items()
            for group in groups
        }
        for play in late:
            # With the attempt: the env-server may still play an earlier one of the same task.
            key = (purpose_to_wire(play.settings.purpose), play.settings.eval_id, play.ordinal, play.attempt)
            if play.state is PlayState.PLACED and (play.source or play.env_server, *key) in known:
                play.go_on()

    def lost(self, plays: Iterable[Play]) -> list[Play]:
        """Return the placed plays whose env-server is gone, or whose deadline has passed, and log each.

        A play whose replica is gone is among them after its grace period (`PlaySettings.replica_grace_s`).
        """
        now = time.monotonic()
        env_servers, replicas = set(self._envs.alive()), self._policies.known()
        placed = [play for play in plays if play.state is PlayState.PLACED]
        # Since when a replica is missed is kept, so that its plays are lost only after their grace period.
        gone = {play.replica for play in placed if play.replica} | self._orphaned.keys()
        self._orphaned = {replica: self._orphaned.get(replica, now) for replica in gone - replicas}
        lost = []
        for play in placed:
            orphaned = self._orphaned.get(play.replica)
            if (play.source or play.env_server) not in env_servers:
                why = "its env-server is gone"
            elif orphaned is not None and now - orphaned >= play.settings.replica_grace_s:
                why = "its replica is gone"
            elif now > play.deadline:
                why = "its deadline passed"
            else:
                continue
            fields = {"env": play.task.env, "ordinal": play.ordinal, "attempt": play.attempt}
            fields |= {"env_server": play.env_server, "replica": play.replica}
            logger.warning("%s lost, playing it again: %s", _name(play), why, extra=fields)
            lost.append(play)
        return lost

    async def stop(self, plays: Sequence[Play]) -> None:
        """Ask the env-servers to stop plays that are over, or are played again elsewhere.

        One that does not answer is ignored.
        """
        if plays:
            playing = [
                PlayingGroup(
                    purpose=purpose_to_wire(play.settings.purpose), eval_id=play.settings.eval_id, ordinal=play.ordinal
                )
                for play in plays
            ]
            await self._envs.cancel(playing, timeout_s=STOP_TIMEOUT_S)

    def _request(self, play: Play, replica: ReadyReplica) -> PlayGroupRequest:
        """Return the request to play the missing members of a play with the engine of `replica`."""
        policy, settings = self._policies.desired, play.settings
        return PlayGroupRequest(
            run_uid=self._run.uid,
            purpose=purpose_to_wire(settings.purpose),
            eval_id=settings.eval_id,
            ordinal=play.ordinal,
            attempt=play.attempt,
            members=play.missing,
            group_size=play.group_size,
            env=self._envs.envs[play.task.env].spec,
            use_train_tasks=settings.use_train_tasks,
            task_index=play.task.task_index,
            base_url=replica.http_url,
            model=replica.model,
            sampling=settings.sampling_at(play.planned_step),
            rollout_timeout_seconds=settings.rollout_timeout_s,
            epoch=self._run.epoch,
            generation=self._run.generation,
            planned_step=play.planned_step,
            tokenizer_manifest_key=policy.manifest_key if policy is not None else "",
            # By it an audit sees that nothing was asked for again that the log held.
            dispatched_after=self._stream.newest,
            is_external=settings.is_external,
            api_key_var=settings.api_key_var,
            demo_key=settings.demo_key,
        )


def _is_asked_for(play: Play, request: PlayGroupRequest) -> bool:
    """Return whether the request still names exactly the missing members of the play."""
    return play.is_open and play.attempt == request.attempt and play.missing == list(request.members)


def _name(play: Play) -> str:
    """Return the word for a play in messages, by its purpose."""
    return "group" if play.settings.purpose is Purpose.TRAIN else "evaluation task"
