"""What env-servers answer that says nothing about the run."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from millrace.config import RLConfig
from millrace.config.load import validate_document
from millrace.config.sections.environments import NamedEnv
from millrace.errors import CapacityError, InvalidSpecError, InvalidStateError, UnauthenticatedError, Violation
from millrace.internal.v1 import env_service_pb2, play_pb2, rollout_pb2, worker_service_pb2
from millrace.internal.v1.play_pb2 import PlayGroupRequest, PlayingGroup, Sampling
from millrace.orchestrator.play import env_servers
from millrace.orchestrator.play.env_servers import EnvServers, env_spec
from millrace.orchestrator.worker_checks import check_environments
from millrace.orchestrator.workers import WorkerRegistry
from millrace.rollouts.requests import changed
from millrace.rollouts.types import OWN_SAMPLING
from millrace.telemetry import waits
from millrace.telemetry.waits import Refusal

SPEC = env_spec(NamedEnv(id="reverse-text"), is_text_only=True)
IMAGE = "registry.example.com/team/own-env:1.2"
IN_OWN_PYTHON = env_spec(NamedEnv(id="own-python", python="/v/bin/python"), is_text_only=True)
IN_IMAGE = env_spec(NamedEnv(id="own-env", image=IMAGE), is_text_only=True)


class Tokens:
    """Stands for the call of every method: env-servers in `stale` refuse our token."""

    def __init__(self, *stale: str) -> None:
        self.stale = set(stale)

    async def call(self, method: object, request: object, *, timeout_s: float, waits_on: str = "") -> object:
        if waits_on in self.stale:
            raise UnauthenticatedError("a valid bearer token is required")
        match request:
            case env_service_pb2.OpenEnvRequest():
                tasks = env_service_pb2.TaskSet(num_tasks=3, digest="d")
                return env_service_pb2.OpenEnvResponse(
                    state=env_service_pb2.ENV_STATE_READY, train=tasks, eval=tasks, api="v0"
                )
            case env_service_pb2.ListPlayingRequest():
                group = PlayingGroup(purpose=rollout_pb2.PURPOSE_TRAIN, ordinal=4)
                return env_service_pb2.ListPlayingResponse(groups=[group])
            case _:
                return env_service_pb2.PlayGroupResponse()


def env_server(name: str, *, image: str = "") -> worker_service_pb2.Worker:
    kind = worker_service_pb2.WORKER_KIND_ENV_SERVER
    return worker_service_pb2.Worker(worker_id=name, kind=kind, address="127.0.0.1:1", env_image=image)


@pytest.fixture
def registry() -> WorkerRegistry:
    made = WorkerRegistry()
    for name in ("a", "b"):
        made.register(env_server(name))
    return made


@pytest.fixture
async def pool(registry: WorkerRegistry) -> AsyncIterator[EnvServers]:
    made = EnvServers(run_uid="r1", epoch=1, registry=registry)
    yield made
    await made.close()


async def test_env_servers_that_have_other_tokens_are_asked_again(pool: EnvServers, monkeypatch) -> None:
    tokens = Tokens("a")
    monkeypatch.setattr(env_servers, "call", tokens.call)
    await pool.open_all([SPEC])
    assert pool.servers_with(SPEC.name) == ["b"]
    assert {name: len(groups) for name, groups in (await pool.playing("1.x")).items()} == {"b": 1}
    tokens.stale = {"b"}
    await pool.refresh([SPEC])
    request = PlayGroupRequest(
        run_uid="r1", purpose=rollout_pb2.PURPOSE_TRAIN, ordinal=0, members=[0], group_size=1, env=SPEC
    )
    assert not await pool.play("b", request), "it does not end the run"
    assert pool.servers_with(SPEC.name) == ["a"] and await pool.play("a", request), "the others go on meanwhile"
    tokens.stale = set()
    assert await pool.play("b", request)


async def test_how_an_environment_is_trained_is_told_when_it_is_opened_and_what_it_declares_refused(
    registry: WorkerRegistry, monkeypatch
) -> None:
    asked: dict[str, env_service_pb2.OpenEnvRequest] = {}

    async def answer(method: object, request: object, *, timeout_s: float, waits_on: str = "") -> object:
        assert isinstance(request, env_service_pb2.OpenEnvRequest)
        asked[request.env.name] = request
        if request.HasField("sampling"):
            return env_service_pb2.OpenEnvResponse(
                state=env_service_pb2.ENV_STATE_FAILED, error_type=OWN_SAMPLING, error_message="it declares `seed` = 7"
            )
        return await Tokens().call(method, request, timeout_s=timeout_s, waits_on=waits_on)

    monkeypatch.setattr(env_servers, "call", answer)
    trained = {SPEC.name: Sampling(temperature=0.5, top_k=3)}
    pool = EnvServers(run_uid="r1", epoch=1, registry=registry, trained=trained)
    evaluated = changed(SPEC, name="evaluated")
    await pool.open_all([evaluated])
    assert not asked["evaluated"].HasField("sampling"), "nothing of it is trained on"
    with pytest.raises(InvalidStateError, match="it declares `seed` = 7") as caught:
        await pool.open_all([SPEC])
    assert caught.value.reason == "ENV_SAMPLING_REFUSED" and "top_k" in str(caught.value.remedy)
    assert (asked[SPEC.name].sampling.temperature, asked[SPEC.name].sampling.top_k) == (0.5, 3)
    await pool.close()


async def test_a_run_that_no_env_server_lets_in_says_so_at_its_deadline(pool: EnvServers, monkeypatch) -> None:
    monkeypatch.setattr(env_servers, "call", Tokens("a", "b").call)
    monkeypatch.setattr(env_servers, "OPEN_TIMEOUT_S", 1.0)
    with pytest.raises(InvalidStateError, match="a valid bearer token is required") as caught:
        await pool.open_all([SPEC])
    assert caught.value.reason == "ENV_LOAD_TIMEOUT"


async def test_an_environment_that_kills_its_workers_ends_the_run_once_no_env_server_plays_it(
    pool: EnvServers, monkeypatch
) -> None:
    given_up: set[str] = set()

    async def answer(method: object, request: object, *, timeout_s: float, waits_on: str = "") -> object:
        if isinstance(request, play_pb2.PlayGroupRequest) and waits_on in given_up:
            raise InvalidStateError("it is FAILED", reason="ENV_FAILED")
        if waits_on in given_up:
            return env_service_pb2.OpenEnvResponse(
                state=env_service_pb2.ENV_STATE_FAILED,
                error_type="ENV_KILLS_WORKERS",
                error_message="8 of the last 9 tasks that were tried ended their worker (task t7: exit code 3)",
            )
        return await Tokens().call(method, request, timeout_s=timeout_s, waits_on=waits_on)

    monkeypatch.setattr(env_servers, "call", answer)
    await pool.open_all([SPEC])
    await pool.refresh([SPEC])
    request = PlayGroupRequest(
        run_uid="r1", purpose=rollout_pb2.PURPOSE_TRAIN, ordinal=0, members=[0], group_size=1, env=SPEC
    )
    given_up.add("a")
    assert not await pool.play("a", request) and await pool.play("b", request)
    await pool.refresh([SPEC])  # the other one still plays it
    given_up.add("b")
    assert not await pool.play("b", request)
    with pytest.raises(InvalidStateError, match=r"'reverse-text' is given up on b: .*task t7: exit code 3") as caught:
        await pool.refresh([SPEC])
    assert caught.value.reason == "ENV_KILLS_WORKERS"


async def test_an_environment_is_placed_on_the_env_servers_of_its_image_alone(
    pool: EnvServers, registry: WorkerRegistry, monkeypatch
) -> None:
    asked: list[tuple[str, str]] = []

    async def answer(method: object, request: object, *, timeout_s: float, waits_on: str = "") -> object:
        if isinstance(request, env_service_pb2.OpenEnvRequest):
            asked.append((request.env.id, waits_on))
        return await Tokens().call(method, request, timeout_s=timeout_s, waits_on=waits_on)

    monkeypatch.setattr(env_servers, "call", answer)
    registry.register(env_server("c", image=IMAGE))
    registry.register(env_server("d", image=f"{IMAGE}-other"))
    await pool.open_all([SPEC, IN_IMAGE])
    assert sorted(asked) == [("own-env", "c"), ("reverse-text", "a"), ("reverse-text", "b")]
    assert pool.servers_with(IN_IMAGE.name) == ["c"] and pool.servers_with(SPEC.name) == ["a", "b"]
    assert pool.is_complete([SPEC, IN_IMAGE]), "nothing is left to be opened on the others"
    registry.register(env_server("e", image=IMAGE))
    assert not pool.is_complete([SPEC, IN_IMAGE])
    await pool.refresh([SPEC, IN_IMAGE])
    assert pool.servers_with(IN_IMAGE.name) == ["c", "e"], "one that joins later plays it as well"


async def test_a_run_waits_for_its_image_by_name_and_then_says_what_to_start(pool: EnvServers, monkeypatch) -> None:
    monkeypatch.setattr(env_servers, "call", Tokens().call)
    opening = asyncio.create_task(pool.open_all([IN_IMAGE]))
    reasons: set[str] = set()
    async with asyncio.timeout(30):
        while not any(IMAGE in reason for reason in reasons):
            await asyncio.sleep(0)
            reasons |= {wait.reason for wait in waits.snapshot("test")}
    opening.cancel()
    await asyncio.gather(opening, return_exceptions=True)
    assert f"an env-server that announces image {IMAGE}; registered: 2 with none" in reasons

    monkeypatch.setattr(env_servers, "OPEN_TIMEOUT_S", 0.05)
    with pytest.raises(InvalidStateError, match=rf"MILLRACE_ENV_IMAGE={IMAGE}") as caught:
        await pool.open_all([IN_IMAGE])
    assert caught.value.reason == "ENV_IMAGE_MISSING" and "'own-env'" in str(caught.value)


async def test_where_every_env_server_has_an_image_a_run_without_one_says_so(
    monkeypatch,
) -> None:
    only = WorkerRegistry()
    only.register(env_server("c", image=IMAGE))
    monkeypatch.setattr(env_servers, "OPEN_TIMEOUT_S", 0.05)
    pool = EnvServers(run_uid="r1", epoch=1, registry=only)
    with pytest.raises(InvalidStateError, match=rf"registered: 1 with {IMAGE}.*without MILLRACE_ENV_IMAGE") as caught:
        await pool.open_all([SPEC])
    assert caught.value.reason == "ENV_IMAGE_MISSING"
    await pool.close()


async def test_what_one_env_server_refuses_another_may_play(pool: EnvServers, monkeypatch) -> None:
    refusing = {"a"}
    field = "orchestrator.env.python"

    async def answer(method: object, request: object, *, timeout_s: float, waits_on: str = "") -> object:
        if waits_on in refusing and isinstance(request, env_service_pb2.OpenEnvRequest):
            raise InvalidSpecError([Violation(field=field, message=f"is not there on {waits_on}")])
        return await Tokens().call(method, request, timeout_s=timeout_s, waits_on=waits_on)

    monkeypatch.setattr(env_servers, "call", answer)
    await pool.open_all([SPEC])
    assert pool.servers_with(SPEC.name) == ["b"]
    refusing.add("b")
    with pytest.raises(InvalidSpecError, match="is not there on"):  # at once: nobody else may play it
        await pool.open_all([IN_OWN_PYTHON])
    refusing.clear()
    field = "teacher_key_var"
    refusing.add("a")
    with pytest.raises(InvalidSpecError, match="is not there on a"):  # a key that every one of them must have
        await pool.open_all([IN_OWN_PYTHON])


async def test_an_environment_to_train_on_that_has_no_tasks_is_named_at_submission(
    registry: WorkerRegistry, monkeypatch
) -> None:
    async def answer(*args: object, **options: object) -> object:
        ready, held_out = env_service_pb2.ENV_STATE_READY, env_service_pb2.TaskSet(num_tasks=3, digest="d")
        return env_service_pb2.OpenEnvResponse(state=ready, train=env_service_pb2.TaskSet(), eval=held_out, api="v0")

    monkeypatch.setattr(env_servers, "call", answer)
    orchestrator = {"rollouts_per_example": 2, "env": [{"id": "reverse-text", "name": "text"}]}
    config = validate_document({"model": {"name": "m"}, "orchestrator": orchestrator})
    assert isinstance(config, RLConfig)
    with pytest.raises(InvalidStateError, match=r"'text' .* has no training tasks, and 3 held-out ones") as caught:
        await check_environments(config, registry)
    assert caught.value.reason == "ENV_WITHOUT_TASKS"


async def test_a_call_that_is_under_way_when_its_env_server_is_replaced_is_not_taken_for_a_cancellation(
    pool: EnvServers, registry: WorkerRegistry
) -> None:
    dead = env_server("a")  # nothing listens there: it is called again and again for some seconds
    dead.slot = "host/1"
    registry.register(dead)
    request = PlayGroupRequest(
        run_uid="r1", purpose=rollout_pb2.PURPOSE_TRAIN, ordinal=0, members=[0], group_size=1, env=SPEC
    )
    playing = asyncio.create_task(pool.play("a", request))
    await asyncio.sleep(0.2)
    successor = env_server("c")
    successor.slot = dead.slot
    registry.register(successor)
    await pool.refresh([])
    await asyncio.wait({playing}, timeout=10.0)
    assert not playing.cancelled() and playing.result() is False, "others are asked"


async def test_a_spool_that_the_run_alone_fills_is_known_until_a_group_is_taken(pool: EnvServers, monkeypatch) -> None:
    answers: list[Exception | None] = [
        CapacityError("the spool keeps 9", reason="SPOOL_FULL", remedy="raise it", metadata={"num_runs": "1"}),
        CapacityError("the spool keeps 9", reason="SPOOL_FULL", metadata={"num_runs": "2"}),
        CapacityError("the spool keeps 9", reason="SPOOL_FULL", remedy="raise it", metadata={"num_runs": "1"}),
        None,
        CapacityError("it plays 8", reason="ENV_SERVER_FULL"),
    ]

    async def answer(*args: object, **options: object) -> None:
        if error := answers.pop(0):
            raise error

    monkeypatch.setattr(env_servers, "call", answer)
    request = PlayGroupRequest(run_uid="r1", ordinal=0, members=[0], group_size=1, env=SPEC)
    full = Refusal(reason="SPOOL_FULL", message="the spool keeps 9", remedy="raise it")
    for is_taken, expected in [(False, full), (False, None), (False, full), (True, None), (False, None)]:
        assert await pool.play("a", request) is is_taken
        assert pool.full_spool == expected
