"""Sending plays out: choose an env-server and a replica, ask for the play, and notice when it is lost.

One player serves training and evaluation: it changes the state of the plays that it is given, wherever they are kept.
"""

import logging
import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from millrace.internal.v1.play_pb2 import PlayGroupRequest, PlayingGroup
from millrace.orchestrator.play.book import RolloutStream
from millrace.orchestrator.play.env_servers import EnvServers
from millrace.orchestrator.play.play import Play, PlayState
from millrace.orchestrator.play.routing import Policies, ReadyReplica, Router
from millrace.rollouts.types import Purpose
from millrace.rollouts.wire import purpose_to_wire
from millrace.telemetry import faults

logger = logging.getLogger(__name__)

ASK_TIMEOUT_S = 5.0
"""An env-server that does not say within it what it plays has lost what is late."""
STOP_TIMEOUT_S = 2.0
"""An env-server that does not stop a play within it may play on: what it sends late is a duplicate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    """What every request of a run's driver carries."""

    uid: str
    epoch: int
    generation: int


class Player:
    """Places plays on env-servers and replicas."""

    def __init__(
        self, *, run: RunIdentity, envs: EnvServers, policies: Policies, stream: RolloutStream, router: Router
    ) -> None:
        self._run = run
        self._envs = envs
        self._policies = policies
        self._stream = stream
        self._router = router
        self._orphaned: dict[str, float] = {}  # as many as replicas were lost with work of the run

    async def place_open(self, plays: Collection[Play]) -> None:
        """Give lost plays up, and place all that nobody plays and whose pause is over, as far as env-servers take them.

        Before anything is played again, the stream is read to its end: what the log holds is never generated
        twice.
        """
        await self._keep_on(plays)
        if lost := [(play, play.attempt) for play in self.lost(plays)]:
            alive = self._envs.alive()
            await self.stop([play for play, _ in lost if play.env_server in alive])
            await self._stream.catch_up()  # a new attempt of a task that is scored whole begins from nothing
            for play, attempt in lost:
                if play.state is PlayState.PLACED and play.attempt == attempt:
                    play.lose()  # else it became whole, was dropped, or failed meanwhile
        now = time.monotonic()
        unplaced = [play for play in plays if play.state is PlayState.UNPLACED and play.not_before <= now]
        if any(play.attempt for play in unplaced):
            await self._stream.catch_up()
        refused = set[str]()  # environments that nobody can take now: others may have env-servers of their own (images)
        for play in unplaced:
            if play.state is not PlayState.UNPLACED or play.task.env in refused:
                continue
            if not await self.place(play, plays):
                refused.add(play.task.env)

    async def place(self, play: Play, plays: Collection[Play]) -> bool:
        """Ask an env-server to play the missing members of an unplaced play.

        Return False if there is no room for it now. `plays` are all that share the room. After a lost answer
        the play stays unplaced although an env-server may play it: asking again is harmless there, and its
        rollouts count whatever was asked. A task that is scored as a whole and has come in part is never asked
        for again: it is left to the env-server that plays it.
        """
        if play.source:
            # The members of such a task end together: the others are on their way, unless `lost` says otherwise.
            play.place(play.source, replica="", timeout_s=play.settings.rest_timeout_s)
            return True
        replica = self._router.pick(
            self._policies.ready(), min_version=play.min_version, home=play.home, is_pinned=play.is_pinned
        )
        if replica is None or not _has_room(play, plays):
            return False
        request = self._request(play, replica)
        for worker_id in self._servers(play.task.env, plays):
            if not _is_asked_for(play, request):
                return True  # members came while another env-server was asked: what is still missing is asked for anew
            if await self._envs.play(worker_id, request):
                if play.state is PlayState.UNPLACED and play.attempt == request.attempt:
                    # else it failed already, before the answer came: place it again
                    timeout_s = play.settings.timeout_s
                    source = play.source or worker_id
                    play.place(source, replica=replica.worker_id, timeout_s=timeout_s, version=replica.version)
                if play.settings.purpose is Purpose.TRAIN:
                    faults.reach(faults.Point.ORCHESTRATOR_AFTER_DISPATCH, step=play.planned_step)
                return True
        return False

    async def _keep_on(self, plays: Collection[Play]) -> None:
        """Give plays past their deadline more time if their env-server reports them as being played.

        It enforces the deadline itself, by each rollout's own time: what others take of a worker does not count there.
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
            key = (purpose_to_wire(play.settings.purpose), play.settings.eval_id, play.ordinal, play.attempt)
            if play.state is PlayState.PLACED and (play.source or play.env_server, *key) in known:
                play.go_on()

    def lost(self, plays: Iterable[Play]) -> list[Play]:
        """Return the placed plays whose env-server or replica is gone, or whose deadline passed, and log each."""
        now = time.monotonic()
        env_servers, replicas = self._envs.alive(), self._policies.known()
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
        """Ask the env-servers to stop plays that are over, or are played again elsewhere; best effort."""
        if plays:
            playing = [
                PlayingGroup(
                    purpose=purpose_to_wire(play.settings.purpose), eval_id=play.settings.eval_id, ordinal=play.ordinal
                )
                for play in plays
            ]
            await self._envs.cancel(playing, timeout_s=STOP_TIMEOUT_S)

    def _servers(self, env: str, plays: Iterable[Play]) -> list[str]:
        load = Counter(play.env_server for play in plays if play.is_open)
        return sorted(self._envs.servers_with(env), key=lambda worker_id: (load[worker_id], worker_id))

    def _request(self, play: Play, replica: ReadyReplica) -> PlayGroupRequest:
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
            dispatched_after=self._stream.newest,
            is_external=settings.is_external,
            api_key_var=settings.api_key_var,
            demo_key=settings.demo_key,
        )


def _has_room(play: Play, plays: Iterable[Play]) -> bool:
    """Return whether the play's `max_playing` leaves room for it beside `plays`; a larger play is played alone."""
    bound = play.settings.max_playing
    playing = sum(other.num_playing for other in plays) if bound is not None else 0
    return bound is None or not playing or playing + len(play.missing) <= bound


def _is_asked_for(play: Play, request: PlayGroupRequest) -> bool:
    """Return whether the request still names exactly the missing members of the play."""
    return play.is_open and play.attempt == request.attempt and play.missing == list(request.members)


def _name(play: Play) -> str:
    return "group" if play.settings.purpose is Purpose.TRAIN else "evaluation task"
