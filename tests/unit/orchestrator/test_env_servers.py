"""What env-servers answer that says nothing about the run."""

import pytest

from millrace.errors import InvalidStateError, UnauthenticatedError
from millrace.internal.v1 import env_service_pb2, worker_service_pb2
from millrace.orchestrator.play import env_servers
from millrace.orchestrator.play.env_servers import EnvServers, env_spec
from millrace.orchestrator.workers import WorkerRegistry

SPEC = env_spec("reverse-text", "reverse-text", {})


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
                return env_service_pb2.ListPlayingResponse(groups=[env_service_pb2.PlayingGroup(ordinal=4)])
            case _:
                return env_service_pb2.PlayGroupResponse()


@pytest.fixture
async def pool() -> EnvServers:
    registry = WorkerRegistry()
    for name in ("a", "b"):
        kind = worker_service_pb2.WORKER_KIND_ENV_SERVER
        registry.register(worker_service_pb2.Worker(worker_id=name, kind=kind, address="127.0.0.1:1"))
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
    request = env_service_pb2.PlayGroupRequest(env=SPEC)
    assert not await pool.play("b", request), "it does not end the run"
    assert pool.servers_with(SPEC.name) == ["a"] and await pool.play("a", request), "the others go on meanwhile"
    tokens.stale = set()
    assert await pool.play("b", request)


async def test_a_run_that_no_env_server_lets_in_says_so_at_its_deadline(pool: EnvServers, monkeypatch) -> None:
    monkeypatch.setattr(env_servers, "call", Tokens("a", "b").call)
    monkeypatch.setattr(env_servers, "OPEN_TIMEOUT_S", 0.05)
    with pytest.raises(InvalidStateError, match="a valid bearer token is required") as caught:
        await pool.open_all([SPEC])
    assert caught.value.reason == "ENV_LOAD_TIMEOUT"


async def test_an_environment_that_kills_its_workers_ends_the_run_once_no_env_server_plays_it(
    pool: EnvServers, monkeypatch
) -> None:
    given_up: set[str] = set()

    async def answer(method: object, request: object, *, timeout_s: float, waits_on: str = "") -> object:
        if isinstance(request, env_service_pb2.PlayGroupRequest) and waits_on in given_up:
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
    request = env_service_pb2.PlayGroupRequest(env=SPEC)
    given_up.add("a")
    assert not await pool.play("a", request) and await pool.play("b", request)
    await pool.refresh([SPEC])  # the other one still plays it
    given_up.add("b")
    assert not await pool.play("b", request)
    with pytest.raises(InvalidStateError, match=r"'reverse-text' is given up on b: .*task t7: exit code 3") as caught:
        await pool.refresh([SPEC])
    assert caught.value.reason == "ENV_KILLS_WORKERS"
