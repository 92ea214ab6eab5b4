"""Two tenants of one deployment: each sees its own runs, and of the other nothing by any method or route.

The methods come from the service's descriptor and the routes from the dashboard's router: one that is new and finds
runs without asking who calls fails here, and so does one that this file cannot call.
"""

import asyncio
import json
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
from fastapi.routing import APIRoute
from google.protobuf.message import Message

from millrace.errors import AlreadyExistsError, InvalidSpecError, MillraceError, NotFoundError, PermissionDeniedError
from millrace.local.redis import free_port
from millrace.orchestrator.catalog import RunCatalog
from millrace.orchestrator.tenants import SeenRuns
from millrace.readers.dashboard import app as dashboard
from millrace.rpc.access import ClientAccess, ServerAccess, calling_tenant
from millrace.rpc.channel import call, open_channel, stream
from millrace.rpc.tokens import new_token, token_line
from millrace.runlog.names import Names
from millrace.runlog.records.revisions import list_headers
from millrace.runlog.records.run_record import RunRecord
from millrace.runlog.token_use import TokenUse
from millrace.storage.local import LocalStore
from millrace.telemetry.settings import Settings
from millrace.v1 import run_pb2, run_service_pb2
from millrace.v1.run_service_pb2_grpc import RunServiceStub
from millrace_testing.dashboard import KnownRuns, Served
from millrace_testing.orchestrator.runs import (
    archived_tokens,
    config_json,
    create,
    has_state,
    restart_orchestrator,
    states,
    submit,
    watch,
)
from millrace_testing.polling import until

if TYPE_CHECKING:
    from millrace.readers.dashboard.reading import ReaderClient

SERVICE = run_service_pb2.DESCRIPTOR.services_by_name["RunService"]
WHO = ("acme", "globex", "operator")
MARK = "globex-label"
"""In a label of the other tenant's run."""
OWN = {
    "DeleteRun": {"validate_only": True},
    "GetLineage": {"version": 1},
    "ForkRun": {"step": 1, "run_id": "own-fork"},
}
"""What a request needs beside the run to be of use to its owner."""
NAMES_NO_RUN = {"CreateRun", "ListRuns", "ListUsage"}


@pytest.fixture
async def shared(stack, tmp_path, monkeypatch):
    """Yield a stack with a client for each of `WHO`, where both tenants have an ended and a queued run."""
    tokens = {who: new_token() for who in WHO}
    lines = [token_line(tokens[who], f"{who}-1", tenant="" if who == "operator" else who) for who in WHO]
    (tmp_path / "tokens").write_text("\n".join(lines) + "\n")
    monkeypatch.setenv("MILLRACE_TOKENS_FILE", str(tmp_path / "tokens"))
    monkeypatch.setenv("MILLRACE_SCRATCH_DIR", str(tmp_path / "scratch"))
    stack.dashboard_listen = f"127.0.0.1:{free_port()}"
    port = int(stack.address.rpartition(":")[2])
    await stack.kill_orchestrator()
    await stack.start_orchestrator(port)
    clients = {}
    for who in WHO:
        access = ClientAccess(secret=lambda token=tokens[who]: token)
        channel = await stack.exit.enter_async_context(open_channel(stack.address, access=access))
        stack.channels.append(channel)
        clients[who] = SimpleNamespace(runs=RunServiceStub(channel), token=tokens[who], exit=stack.exit)
    _ = await stack.env_server(), await stack.inference(), await stack.trainer()
    runs = {}
    for who in ("acme", "globex"):
        runs[who, "done"] = await create(clients[who], run_id="done", max_steps=1)
        await watch(clients[who], runs[who, "done"])
    # It waits for more replicas than there are.
    large = json.dumps(json.loads(config_json()) | {"queue": {"min_replicas": 9}})
    for who in ("acme", "globex"):
        request = run_service_pb2.CreateRunRequest(
            kind=run_pb2.RUN_KIND_RL, config_json=large, run_id="waits", labels={"project": f"{who}-label"}
        )
        runs[who, "waits"] = (await call(clients[who].runs.CreateRun, request)).run
    yield SimpleNamespace(
        stack=stack, clients=clients, runs=runs, http=Served(int(stack.dashboard_listen[10:]), KnownRuns())
    )


def foreign(shared) -> Iterator[tuple[str, str]]:
    """Yield names of the other tenant's runs as `acme` may write them, each with one like it that no run has."""
    for which in ("done", "waits"):
        run = shared.runs["globex", which]
        nobody = f"globey.{which}"
        yield run.name, f"runs/{nobody}"
        yield run.name.removeprefix("runs/"), nobody
        yield run.uid, f"{run.uid[:12]}{uuid.uuid4().hex[:16]}"


def secrets(shared) -> list[str]:
    """Return what tells of the other tenant: its name, and the uids and labels of its runs."""
    return ["globex", MARK, *(run.uid for (who, _), run in shared.runs.items() if who == "globex")]


def naming(method, name: str, **more) -> Message:
    """Return the request of a method for the run of this name."""
    request_type = getattr(run_service_pb2, method.input_type.name)
    fields = [field for field in ("name", "parent") if field in method.input_type.fields_by_name]
    assert fields, f"{method.name} names no run: say in this file how it is called"
    return request_type(**{fields[0]: name}, **more)


async def ask(client, method, request: Message) -> Message | MillraceError:
    """Return the answer, the first one of a stream, or the error."""
    stub = getattr(client.runs, method.name)
    try:
        if not method.server_streaming:
            return await call(stub, request, timeout_s=120)  # an audit is a process of its own
        async for answer in stream(stub, request):
            return answer
        return run_service_pb2.WatchRunResponse()
    except MillraceError as error:
        return error


def said(error: object, name: str) -> tuple:
    """Return all that an error says, with the run's name that was asked for left out."""
    assert isinstance(error, MillraceError), error
    text = (str(error), error.message, error.remedy, json.dumps(dict(error.metadata), sort_keys=True))
    shown = name.removeprefix("runs/")
    # The id of the request is its own.
    rest = [re.sub(r'"request_id": "[^"]*"', "", each or "").replace(shown, "NAME") for each in text]
    return (type(error).__name__, error.reason, *rest)


async def test_no_method_tells_a_tenant_of_anothers_run(shared) -> None:
    acme, told = shared.clients["acme"], []
    for method in SERVICE.methods:
        if method.name in NAMES_NO_RUN:
            continue
        for theirs, nobodys in foreign(shared):
            found = await ask(acme, method, naming(method, theirs, **OWN.get(method.name, {})))
            missing = await ask(acme, method, naming(method, nobodys, **OWN.get(method.name, {})))
            assert isinstance(found, NotFoundError), f"{method.name}({theirs}): {found}"
            assert said(found, theirs) == said(missing, nobodys), method.name
            told.append(str(said(found, theirs)))
    assert not [each for each in told for secret in secrets(shared) if secret in each]


async def test_every_method_finds_a_tenants_own_run(shared) -> None:
    acme, told = shared.clients["acme"], []
    run = shared.runs["acme", "done"]
    for method in SERVICE.methods:
        if method.name not in NAMES_NO_RUN:
            found = await ask(acme, method, naming(method, "done", **OWN.get(method.name, {})))
            assert not isinstance(found, NotFoundError), f"{method.name}: {found}"
            told.append(str(found))
    # A tenant may leave its prefix out, an operator names a run whole.
    for who, names in (("acme", (run.name, "acme.done", "runs/done", run.uid)), ("operator", (run.name, run.uid))):
        for name in names:
            found = await call(shared.clients[who].runs.GetRun, run_service_pb2.GetRunRequest(name=name))
            assert (found.run.uid, found.run.tenant) == (run.uid, "acme")
    assert not [each for each in told for secret in secrets(shared) if secret in each]


async def test_lists_show_a_tenant_its_own_and_an_operator_all(shared) -> None:
    async def listed(who: str, **asked) -> list[str]:
        request = run_service_pb2.ListRunsRequest(page_size=asked.pop("page_size", 100), **asked)
        answer = await call(shared.clients[who].runs.ListRuns, request)
        assert who == "operator" or "globex" not in str(answer) or who == "globex"
        return [run.name for run in answer.runs]

    mine = ["runs/acme.waits", "runs/acme.done"]
    assert await listed("acme") == mine
    assert await listed("acme", tenant="acme") == mine
    assert await listed("acme", tenant="globex") == await listed("acme", tenant="nobody") == []
    for wanted in ([run_pb2.RUN_STATE_QUEUED], [run_pb2.RUN_STATE_QUEUED, run_pb2.RUN_STATE_SUCCEEDED]):
        assert await listed("acme", states=wanted) == mine[: len(wanted)]
    everything = await listed("operator")
    assert everything == ["runs/globex.waits", "runs/acme.waits", "runs/globex.done", "runs/acme.done"]
    assert await listed("operator", tenant="globex") == ["runs/globex.waits", "runs/globex.done"]
    # A page that is full of one's own runs is the last one, whatever others have.
    answer = await call(shared.clients["acme"].runs.ListRuns, run_service_pb2.ListRunsRequest(page_size=2))
    assert len(answer.runs) == 2 and not answer.next_page_token
    assert {run.tenant for run in answer.runs} == {"acme"}


async def test_usage_is_by_tenant_and_exact_over_the_death_of_an_orchestrator(shared) -> None:
    async def used(who: str, **asked) -> dict[str, run_service_pb2.TenantUsage]:
        request = run_service_pb2.ListUsageRequest(**asked)
        answer = await call(shared.clients[who].runs.ListUsage, request, timeout_s=60)
        return {each.tenant: each for each in answer.tenants}

    stack, acme = shared.stack, shared.clients["acme"]
    run = await create(acme, run_id="killed", max_steps=3)

    async def has_committed() -> bool:
        return bool(list_headers(stack.deps["store"], Names(stack.prefix, run.uid)))

    await until(has_committed)
    await restart_orchestrator(stack)
    await until(lambda: has_state(acme, run, run_pb2.RUN_STATE_SUCCEEDED))
    expected = TokenUse()
    for uid in (run.uid, shared.runs["acme", "done"].uid):
        more = archived_tokens(stack.deps["store"], Names(stack.prefix, uid))
        expected = TokenUse(prompt=expected.prompt + more.prompt, sampled=expected.sampled + more.sampled)
    found = await used("acme")
    assert list(found) == ["acme"] and found["acme"].num_runs == 3
    assert (found["acme"].prompt_tokens, found["acme"].sampled_tokens) == (expected.prompt, expected.sampled)
    assert expected.sampled > 0 and found["acme"].stored_bytes > 0 and found["acme"].accelerator_seconds > 0
    assert await used("acme", tenant="globex") == await used("acme", tenant="nobody") == {}
    everything = await used("operator")
    assert list(everything) == ["acme", "globex"] and everything["globex"].num_runs == 2
    assert list(await used("operator", tenant="globex")) == ["globex"]


async def test_a_name_and_a_request_are_free_for_every_tenant(shared) -> None:
    acme, globex, operator = (shared.clients[who] for who in WHO)
    request_id = str(uuid.uuid4())
    first = await create(acme, run_id="same", request_id=request_id)
    second = await create(globex, run_id="same", request_id=request_id, max_steps=2)
    third = await create(operator, run_id="same", request_id=request_id, max_steps=1)
    assert [run.name for run in (first, second, third)] == ["runs/acme.same", "runs/globex.same", "runs/same"]
    assert len({run.uid for run in (first, second, third)}) == 3
    assert (await create(acme, run_id="same", request_id=request_id)).uid == first.uid
    with pytest.raises(AlreadyExistsError) as caught:
        await create(acme, run_id="same", request_id=request_id, max_steps=2)
    assert request_id in caught.value.message and "globex" not in str(said(caught.value, ""))
    with pytest.raises(AlreadyExistsError) as caught:
        await create(acme, run_id="same")
    assert caught.value.metadata["uid"] == first.uid
    # Neither a name nor a request of another tenant can be written.
    for wrong in ("globex.same", "acme.other"):
        with pytest.raises(InvalidSpecError):
            await create(acme, run_id=wrong)
    with pytest.raises(InvalidSpecError, match="may have 58 characters"):
        await create(acme, run_id="a" * 59)
    made = await create(acme)
    assert re.fullmatch(r"runs/acme\.reverse-text-[0-9a-f]{6}", made.name)


async def test_the_record_has_the_tokens_tenant_and_a_fork_its_parents(shared) -> None:
    store = shared.stack.deps["store"]

    def tenant(run: run_pb2.Run) -> str:
        key = Names(shared.stack.prefix, run.uid).run_json
        return RunRecord.decode(store.get(key), where=key).tenant

    assert [tenant(shared.runs[who, "done"]) for who in ("acme", "globex")] == ["acme", "globex"]
    own = await create(shared.clients["operator"], run_id="own")
    assert tenant(own) == "" and b"tenant" not in store.get(Names(shared.stack.prefix, own.uid).run_json)
    # The fake trainer writes no checkpoints: what a fork begins with is not there, but who has it is decided before.
    method = SERVICE.methods_by_name["ForkRun"]
    request = naming(method, "acme.done", step=0, request_id=str(uuid.uuid4()))
    forked = await ask(shared.clients["operator"], method, request)
    if isinstance(forked, run_service_pb2.ForkRunResponse):
        assert (tenant(forked.run), forked.run.name.partition(".")[0]) == ("acme", "runs/acme")
    else:
        assert isinstance(forked, MillraceError) and not isinstance(forked, NotFoundError), forked


async def test_a_waiting_run_hears_nothing_of_others_in_the_queue(shared) -> None:
    acme, globex, operator = (shared.clients[who] for who in WHO)

    async def why(client, run) -> str:
        answer = await call(client.runs.ExplainRun, run_service_pb2.ExplainRunRequest(name=run.uid))
        shown = await call(client.runs.GetRun, run_service_pb2.GetRunRequest(name=run.uid))
        return f"{answer} {shown.run.queue_place}"

    async def hears(client, run, text: str) -> bool:
        return text in await why(client, run)

    long = await create(acme, run_id="long", max_steps=100_000)
    await until(lambda: has_state(acme, long, run_pb2.RUN_STATE_RUNNING))
    small = await create(globex, run_id="small")
    await until(lambda: hears(operator, small, "place 3 of 3"))
    for run in (small, shared.runs["globex", "waits"]):
        told = await why(globex, run)
        assert "queued" in told and "place" not in told, told
        assert "acme" not in told and long.uid not in told, told
    assert "trainer-fake has another run" in await why(globex, small)
    assert "trainer-fake has run acme.long" in await why(operator, small)


async def test_who_is_preempted_hears_no_name_of_another_tenants_run(shared) -> None:
    acme, globex, _ = (shared.clients[who] for who in WHO)
    long = await submit(acme, "long", max_steps=100_000, preemptible=True)
    await until(lambda: has_state(acme, long, run_pb2.RUN_STATE_RUNNING))
    small = await submit(globex, "small", priority=5)
    assert states(await watch(globex, small))[-1] == "SUCCEEDED"
    async for answer in stream(acme.runs.WatchRun, run_service_pb2.WatchRunRequest(name=long.uid)):
        change = answer.event.state_changed
        if change.new_state == run_pb2.RUN_STATE_QUEUED:
            break
    assert change.reason.startswith("preempted for another run of higher priority: no step is lost")
    assert "globex" not in change.reason and small.uid not in change.reason


async def test_no_route_of_the_dashboard_tells_a_tenant_of_anothers_run(shared) -> None:
    acme = shared.clients["acme"]
    paths = list(_requests("RUN"))
    for method, path in paths:
        if "RUN" not in path:
            status, body = await _http(shared, acme, method, path)
            assert status < 500, (path, body)
            assert not [secret for secret in secrets(shared) if secret in body], path
            continue
        for theirs, nobodys in foreign(shared):
            if theirs.startswith("runs/"):
                continue
            found = await _http(shared, acme, method, path.replace("RUN", theirs))
            missing = await _http(shared, acme, method, path.replace("RUN", nobodys))
            assert found[0] == missing[0] and found[1].replace(theirs, "NAME") == missing[1].replace(nobodys, "NAME")
            # A page is the same document for every address.
            assert found[0] == 404 or not path.startswith("/api/"), (path, found)
            assert not [each for each in secrets(shared) if each in found[1].replace(theirs, "NAME")], path


async def test_the_dashboard_shows_a_tenant_its_own_runs(shared) -> None:
    acme = shared.clients["acme"]
    _, body = await _http(shared, acme, "GET", "/api/session")
    assert json.loads(body)["tenant"] == "acme"

    async def names(client) -> list[str]:
        return [run["name"] for run in json.loads((await _http(shared, client, "GET", "/api/runs"))[1])["runs"]]

    await until(lambda: _is(names(acme), ["acme.waits", "acme.done"]))
    await until(
        lambda: _is(names(shared.clients["operator"]), ["globex.waits", "acme.waits", "globex.done", "acme.done"])
    )
    for method, path in _requests("acme.done"):
        if path.startswith("/api/") and "acme.done" in path:
            status, body = await _http(shared, acme, method, path)
            # There is no sample of that id, and nothing is left to pause of a run that has ended.
            assert status in (200, 202, 409) or "samples/" in path or "lineage" in path or "/nothing" in path, body
            assert not [secret for secret in secrets(shared) if secret in body], path


async def _is(found, expected) -> bool:
    return await found == expected


def _requests(run: str) -> Iterator[tuple[str, str]]:
    """Yield method and path of every route, with each of its questions and actions."""
    sessions, reader = dashboard.Sessions(), cast("ReaderClient", None)  # no request comes to this one
    guard = dashboard.Guard(ServerAccess(), sessions, host="")
    app = dashboard.Dashboard(KnownRuns(), reader, guard, sessions, port=0, is_tls=False).app()
    values = {
        "run": [run], "sample": ["0-0"], "code": ["nocode"], "name": ["app.js"], "path": ["", f"runs/{run}", "compare"],
        "question": [*dashboard.QUESTIONS, "checkpoints", "why", "nothing"],
        "action": [*dashboard.ACTIONS, "audit", "nothing"],
    }  # fmt: skip
    routes = [route for route in app.routes if isinstance(route, APIRoute)]
    assert len(routes) == len(app.routes) > 10, "a route of another kind: say in this file how it is asked"
    for route in routes:
        paths = [route.path.replace("{path:path}", "{path}")]
        for name in re.findall(r"{(\w+)}", paths[0]):
            assert name in values, f"{route.path} has a new parameter: say in this file what it may be"
            paths = [path.replace("{" + name + "}", value) for path in paths for value in values[name]]
        for method in route.methods or ():
            yield from ((method, path) for path in paths if "logout" not in path)


async def _http(shared, client, method: str, path: str) -> tuple[int, str]:
    """Return status and text of an answer to a program with the client's token."""
    body = {} if method == "POST" else None
    asked = asyncio.to_thread(shared.http.ask, path, method=method, body=body, Authorization=f"Bearer {client.token}")
    status, _, answer = await asked
    return status, answer.decode()


async def test_looking_for_anothers_run_costs_what_a_missing_one_costs(shared) -> None:
    """By the same reads of the store: how long the answer takes says nothing."""
    reads: list[str] = []

    class Counting(LocalStore):
        def get(self, key: str, *args, **options) -> bytes:
            reads.append("get")
            return super().get(key, *args, **options)

        def head(self, key: str, *args, **options):
            reads.append("head")
            return super().head(key, *args, **options)

    stack = shared.stack
    store = Counting(Path(stack.store_url.removeprefix("file://")))
    catalog = RunCatalog(redis=stack.deps["redis"], store=store, prefix=stack.prefix, owner="t")
    await SeenRuns(catalog, "globex").find("waits")
    seen = SeenRuns(catalog, "acme")
    for theirs, nobodys in foreign(shared):
        costs = []
        for name in (theirs, nobodys):
            reads.clear()
            with pytest.raises(NotFoundError):
                await seen.find(name)
            costs.append(list(reads))
            assert seen.known(name) is None
        assert costs[0] == costs[1], (theirs, costs)


async def test_what_was_admitted_by_nobody_sees_nothing() -> None:
    with pytest.raises(MillraceError) as caught:
        await asyncio.create_task(_tenant())
    assert caught.value.reason == "CALLER_UNKNOWN"


async def _tenant() -> str:
    return calling_tenant()


def test_a_tenants_token_opens_neither_engines_nor_metrics(tmp_path) -> None:
    token, own = new_token(), new_token()
    (tmp_path / "tokens").write_text(f"{token_line(token, 'a', tenant='acme')}\n{token_line(own, 'o')}\n")
    access = ServerAccess.of(Settings(tokens_file=str(tmp_path / "tokens")))
    for path in ("/v1/models", "/v1/chat/completions", "/metrics", "/tokenize"):
        with pytest.raises(PermissionDeniedError) as caught:
            access.admit_http(path, f"Bearer {token}")
        assert caught.value.reason == "TENANT_TOKEN"
        access.admit_http(path, f"Bearer {own}")
    with pytest.raises(MillraceError):
        access.admit_metrics(f"Bearer {token}")
    access.admit_metrics(f"Bearer {own}")
    # A line that gets another tenant ends what was granted by it.
    grant = access.admit("/millrace.v1.RunService/WatchRun", [("authorization", f"Bearer {token}")])
    assert (grant.tenant, grant.holds()) == ("acme", True)
    (tmp_path / "tokens").write_text(f"{token_line(token, 'a', tenant='globex')}\n")
    assert not grant.holds()
