import pytest
from orchestrator_builders import make_rollout

from millrace.config.load import validate_document
from millrace.internal.v1 import env_service_pb2, rollout_pb2
from millrace.orchestrator.dispatcher import Dispatcher, RunIdentity
from millrace.orchestrator.env_pool import OpenedEnv
from millrace.orchestrator.eval_settings import of_training
from millrace.orchestrator.evals import Evaluator
from millrace.orchestrator.groups import Group, GroupTable
from millrace.orchestrator.policy_driver import Replica
from millrace.orchestrator.routing import Router
from millrace.orchestrator.tasks import TaskRef
from millrace.rollouts.types import Purpose, Rollout, RolloutStatus

CONFIG = validate_document(
    {
        "model": {"name": "m"},
        "orchestrator": {
            "batch_size": 4,
            "rollouts_per_example": 2,
            "env": [{"id": "reverse-text"}],
            "eval": {"num_examples": 1, "rollouts_per_example": 2},
        },
    }
).orchestrator
RUN = RunIdentity(uid="r1", epoch=1, generation=1)


class OneReplica:
    desired = None

    def __init__(self) -> None:
        self.suspected: list[str] = []

    def known(self) -> set[str]:
        return {"inference-0"}

    def suspect(self, worker_id: str) -> None:
        self.suspected.append(worker_id)

    def ready(self) -> list[Replica]:
        return [Replica(worker_id="inference-0", http_url="http://x/v1", model="policy", version=0)]


class ReadStream:
    """A stream that has been read to its end."""

    def __init__(self) -> None:
        self.newest = "7-1"
        self.num_catch_ups = 0

    async def catch_up(self) -> None:
        self.num_catch_ups += 1


class HastyEnvs:
    """An env-server whose rollouts arrive before the answer to PlayGroup, the first attempt's failed."""

    def __init__(self) -> None:
        spec = env_service_pb2.EnvSpec(name="reverse-text", id="reverse-text", args_json="{}")
        opened = OpenedEnv(spec=spec, num_train=4, train_digest="d", num_eval=1, requires_group=False)
        self.envs = {"reverse-text": opened}
        self.attempts: list[int] = []
        self.deliver = None

    def alive(self) -> list[str]:
        return ["env-server-0"]

    def servers_with(self, env: str) -> list[str]:
        return ["env-server-0"]

    async def play(self, worker_id: str, request: env_service_pb2.PlayGroupRequest) -> bool:
        self.attempts.append(request.attempt)
        status = RolloutStatus.ENV_ERROR if request.attempt == 0 else RolloutStatus.OK
        for member in request.members:
            rollout = make_rollout(
                request.ordinal, member, attempt=request.attempt, group_size=request.group_size, status=status
            )
            self.deliver(rollout, request)
        return True


@pytest.mark.timeout(20)
async def test_an_evaluation_whose_failures_outrun_the_answer_is_played_again() -> None:
    envs = HastyEnvs()
    evaluator = Evaluator(
        run=RUN, settings=of_training(CONFIG), envs=envs, policies=OneReplica(), stream=ReadStream(), router=Router()
    )

    def deliver(rollout: Rollout, request) -> None:
        fields = {name: getattr(rollout, name) for name in rollout.__slots__}
        evaluator.add(Rollout(**fields | {"purpose": Purpose.EVAL, "eval_id": request.eval_id}))

    envs.deliver = deliver
    report, good = await evaluator.evaluate("reverse-text", step=0, min_version=0)
    assert envs.attempts == [0, 1] and len(good) == 2 and report.num_failed == 0


async def test_a_group_whose_failures_outrun_the_answer_is_not_taken_for_placed() -> None:
    envs, table = HastyEnvs(), GroupTable()
    group = Group(task=TaskRef(ordinal=0, env="reverse-text", task_index=0), group_size=2, planned_step=0)
    table.open[0] = group

    def deliver(rollout: Rollout, request) -> None:
        assert request.purpose == rollout_pb2.PURPOSE_TRAIN
        if table.add(rollout) == "retry":
            group.next_attempt()

    envs.deliver = deliver
    dispatcher = Dispatcher(
        run=RUN, config=CONFIG, envs=envs, policies=OneReplica(), stream=ReadStream(), router=Router()
    )
    assert await dispatcher.dispatch(group, table, min_version=0)
    assert (group.attempt, group.env_server) == (1, ""), "attempt 1 is placed by nobody yet"
    assert await dispatcher.dispatch(group, table, min_version=0)
    assert 0 in table.finished
