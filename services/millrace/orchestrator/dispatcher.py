"""Sending groups out: choose an env-server and a replica, ask for the play, and notice when a play is lost."""

import json
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from millrace.config.schema import OrchestratorConfig
from millrace.internal.v1 import env_service_pb2, rollout_pb2
from millrace.orchestrator.env_pool import EnvPool
from millrace.orchestrator.groups import Group, GroupTable
from millrace.orchestrator.policy_driver import PolicyDriver, Replica
from millrace.orchestrator.rollout_stream import RolloutStream
from millrace.orchestrator.routing import Router
from millrace.telemetry import faults

log = logging.getLogger(__name__)

PLAY_SLACK_S = 30.0
"""Beyond the rollout deadline that the env-server enforces itself, before a play counts as lost."""
REPLICA_GRACE_S = 5.0
"""Time for an env-server to notice that a lost replica's connections are dead, before its group is taken from it."""
STOP_TIMEOUT_S = 2.0
"""An env-server that does not stop a lost group within it may play on: what it brings late is a duplicate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    """What every request of a run's driver carries."""

    uid: str
    epoch: int
    generation: int


def sampling_message(
    *, temperature: float, max_tokens: int | None, top_p: float, extra_body: Mapping[str, object]
) -> env_service_pb2.Sampling:
    """The wire form of sampling parameters."""
    return env_service_pb2.Sampling(
        temperature=temperature,
        max_tokens=max_tokens or 0,
        top_p=top_p,
        extra_body_json=json.dumps(extra_body, sort_keys=True) if extra_body else "",
    )


class Dispatcher:
    """Places groups on env-servers and replicas."""

    def __init__(
        self,
        *,
        run: RunIdentity,
        config: OrchestratorConfig,
        envs: EnvPool,
        policies: PolicyDriver,
        stream: RolloutStream,
        router: Router,
    ) -> None:
        self._run = run
        self._stream = stream
        self._router = router
        self._orphaned: dict[str, float] = {}
        self._config = config
        self._envs = envs
        self._policies = policies
        self.timeout_s = config.rollout_timeout_s + PLAY_SLACK_S
        """Seconds after which a play counts as lost."""
        self._sampling = sampling_message(
            temperature=config.sampling.temperature,
            max_tokens=config.sampling.max_tokens,
            top_p=config.sampling.top_p,
            extra_body=config.sampling.extra_body,
        )

    async def dispatch(self, group: Group, table: GroupTable, *, min_version: int) -> bool:
        """Play the missing members of a group; False if no env-server or replica can take it now.

        Only replicas at `min_version` or newer are asked. After a lost answer the group stays unplaced although an
        env-server may play it: asking again is harmless there, and its rollouts count whoever asked. A group that is
        scored as a whole and has come in part is never asked for again: it is left to the env-server that plays it.
        """
        if group.source:
            # The members of such a group end together: the others are on their way, unless `lost` says otherwise.
            self._placed(group, group.source, replica="", timeout_s=PLAY_SLACK_S)
            return True
        replica = self._router.pick(self._policies.ready(), min_version=min_version, home=group.home)
        if replica is None:
            return False
        request = self._request(group, replica)
        for worker_id in self._servers(group.task.env, table):
            if group.ordinal not in table.open or group.missing != list(request.members):
                return True  # members came while another env-server was asked: what is still missing is asked for anew
            if await self._envs.play(worker_id, request):
                if group.attempt == request.attempt:  # else it failed already, before the answer came: place it again
                    self._placed(group, group.source or worker_id, replica=replica.worker_id, timeout_s=self.timeout_s)
                faults.reach(faults.Point.ORCHESTRATOR_AFTER_DISPATCH, step=group.planned_step)
                return True
        return False

    def lost(self, table: GroupTable) -> list[Group]:
        """Open groups whose env-server or replica is gone, or whose deadline passed."""
        now = time.monotonic()
        env_servers, replicas = set(self._envs.alive()), self._policies.known()
        used = {group.replica for group in table.open.values() if group.env_server and group.replica}
        self._orphaned = {replica: self._orphaned.get(replica, now) for replica in used - replicas}
        lost = []
        for group in table.open.values():
            if not group.env_server:
                continue
            if (group.source or group.env_server) not in env_servers:
                why = "its env-server is gone"
            elif now - self._orphaned.get(group.replica, now) > REPLICA_GRACE_S:
                why = "its replica is gone"
            elif now > group.deadline:
                why = "its deadline passed"
            else:
                continue
            fields = {"ordinal": group.ordinal, "attempt": group.attempt, "env_server": group.env_server}
            log.warning("group lost, playing it again: %s", why, extra=fields | {"replica": group.replica})
            lost.append(group)
        return lost

    async def stop(self, groups: Sequence[Group]) -> None:
        """Ask the env-servers that still live to stop what is played again elsewhere; best effort."""
        alive = set(self._envs.alive())
        playing = [
            env_service_pb2.PlayingGroup(purpose=rollout_pb2.PURPOSE_TRAIN, ordinal=group.ordinal)
            for group in groups
            if group.env_server in alive
        ]
        if playing:
            await self._envs.cancel(playing, timeout_s=STOP_TIMEOUT_S)

    def _placed(self, group: Group, worker_id: str, *, replica: str, timeout_s: float) -> None:
        group.env_server, group.replica = worker_id, replica
        group.deadline = time.monotonic() + timeout_s

    def _servers(self, env: str, table: GroupTable) -> list[str]:
        load = Counter(group.env_server for group in table.open.values())
        return sorted(self._envs.servers_with(env), key=lambda worker_id: (load[worker_id], worker_id))

    def _request(self, group: Group, replica: Replica) -> env_service_pb2.PlayGroupRequest:
        policy = self._policies.desired
        return env_service_pb2.PlayGroupRequest(
            run_uid=self._run.uid,
            purpose=rollout_pb2.PURPOSE_TRAIN,
            ordinal=group.ordinal,
            attempt=group.attempt,
            members=group.missing,
            group_size=group.group_size,
            env=self._envs.envs[group.task.env].spec,
            use_train_tasks=True,
            task_index=group.task.task_index,
            base_url=replica.http_url,
            model=replica.model,
            sampling=self._sampling,
            rollout_timeout_seconds=self._config.rollout_timeout_s,
            epoch=self._run.epoch,
            generation=self._run.generation,
            planned_step=group.planned_step,
            tokenizer_manifest_key=policy.manifest_key if policy is not None else "",
            dispatched_after=self._stream.newest,
        )
