"""One run that cannot be read is shown as DAMAGED; the others are listed and driven as if it were not there."""

import pytest

from millrace.cli.offline.run_store import find_uid
from millrace.errors import CorruptObjectError, InvalidStateError, MillraceError
from millrace.rpc.channel import call
from millrace.runlog.index import read_index
from millrace.runlog.names import Deployment, Names
from millrace.v1 import run_pb2, run_service_pb2
from millrace_testing.lanes import by_default, one_by_default, pairs_by_default
from millrace_testing.orchestrator.runs import create, states, watch
from millrace_testing.polling import until

BAD = {
    "no JSON": b"{",
    "nested": b"[" * 100_000,
    "not UTF-8": b"\xff\xfe",
    "half a pair": b'{"name": "\\ud800"}',
    "empty": b"",
    "another form": b'{"uid": 7, "name": [], "config": 1}',
}


def overwrite(store, key: str, data: bytes) -> None:
    store.delete(key)
    store.create(key, data)


async def listed(stack) -> dict[str, run_pb2.Run]:
    response = await call(stack.runs.ListRuns, run_service_pb2.ListRunsRequest())
    return {run.name.removeprefix("runs/"): run for run in response.runs}


async def restart(stack) -> None:
    port = int(stack.address.rpartition(":")[2])
    await stack.kill_orchestrator()
    await stack.start_orchestrator(port)


async def wipe(stack) -> None:
    redis = stack.deps["redis"]
    keys = [key async for key in redis.scan_iter(match=f"{stack.prefix}:*", count=1000)]
    await redis.delete(*keys)


def damage_of(place: str, names: Names) -> str:
    """Return the key of the object that is damaged."""
    return {
        "run.json": names.run_json,
        "header": names.batch_header(0),
        "events": names.archived_events("1-0", "1-1"),
        "intent": names.intent(1),
        "epochs": f"{names.epochs('log')}garbage",
    }[place]


PLACES = ["run.json", "header", "events", "intent", "epochs"]


@pytest.mark.parametrize(("place", "bad"), pairs_by_default(PLACES, ["no JSON", "nested", "not UTF-8"]))
async def test_the_others_go_on(stack, place: str, bad: str) -> None:
    sick = await create(stack, run_id="sick")
    healthy = await create(stack, run_id="healthy")
    await stack.kill_orchestrator()
    key = damage_of(place, Names(stack.prefix, sick.uid))
    overwrite(stack.deps["store"], key, BAD[bad])
    await wipe(stack)  # what is in Redis cannot help
    await stack.start_orchestrator(int(stack.address.rpartition(":")[2]))
    await stack.env_server()
    await stack.inference()
    await stack.trainer()
    assert states(await watch(stack, healthy))[-1] == "SUCCEEDED"

    async def is_shown() -> bool:
        return (await listed(stack))["sick"].state == run_pb2.RUN_STATE_DAMAGED

    await until(is_shown, what="sick is DAMAGED")
    runs = await listed(stack)
    assert runs["healthy"].state == run_pb2.RUN_STATE_SUCCEEDED
    error = runs["sick"].error
    assert "millrace run repair sick" in error.message and key.removesuffix("garbage") in error.message, error.message
    shown = (await call(stack.runs.GetRun, run_service_pb2.GetRunRequest(name="sick"))).run
    assert shown.state == run_pb2.RUN_STATE_DAMAGED and shown.error.reason == error.reason
    why = await call(stack.runs.ExplainRun, run_service_pb2.ExplainRunRequest(name="sick"))
    assert "damaged" in why.summary and "millrace run repair sick" in why.summary
    if place in ("run.json", "events", "epochs"):  # else its events can be read, and followed until it is repaired
        with pytest.raises(MillraceError, match="millrace run repair sick"):
            await watch(stack, sick)


@pytest.mark.parametrize("bad", by_default(BAD, {"half a pair", "empty", "another form"}))
async def test_a_run_json_of_any_form_is_named(stack, bad: str) -> None:
    sick, other = await create(stack, run_id="sick"), await create(stack, run_id="other")
    await stack.kill_orchestrator()
    overwrite(stack.deps["store"], Names(stack.prefix, sick.uid).run_json, BAD[bad])
    await stack.start_orchestrator(int(stack.address.rpartition(":")[2]))
    runs = await listed(stack)
    assert runs["sick"].state == run_pb2.RUN_STATE_DAMAGED and runs["other"].state == run_pb2.RUN_STATE_QUEUED
    assert runs["sick"].uid == sick.uid and "run.json" in runs["sick"].error.message
    good = await call(stack.runs.GetRun, run_service_pb2.GetRunRequest(name=other.name))
    assert good.run.uid == other.uid
    with pytest.raises(
        InvalidStateError, match=r"DAMAGED, and nothing can come of it.*millrace run repair sick"
    ) as caught:
        await call(stack.runs.ResumeRun, run_service_pb2.ResumeRunRequest(name="sick"))
    assert caught.value.reason == "RUN_DAMAGED"
    assert list(stack.deps["store"].list(Names(stack.prefix, sick.uid).intents)) == [], "nobody could follow it"


def request_of(verb: str, name: str):
    """Return the stub's method and the request with which a user asks for an intent."""
    method = f"{verb.capitalize()}Run"
    return method, getattr(run_service_pb2, f"{method}Request")(name=name)


@pytest.mark.parametrize("places", [("run.json",), ("events",), ("events", "header")])
async def test_no_intent_comes_after_the_seal_of_a_damaged_run(stack, places: tuple[str, ...]) -> None:
    await stack.env_server(), await stack.inference(), await stack.trainer()
    sick = await create(stack, run_id="sick", max_steps=1)
    assert states(await watch(stack, sick))[-1] == "SUCCEEDED"
    store, names = stack.deps["store"], Names(stack.prefix, sick.uid)
    await until(lambda: store.head(names.seal(0)) is not None, what="the seal")
    await stack.kill_orchestrator()
    closing = max(info.key for info in store.list(names.batches))
    archived = next(info.key for info in store.list(names.event_archive))
    for place in places:
        overwrite(store, {"run.json": names.run_json, "header": closing, "events": archived}[place], b"{")
    await wipe(stack)
    await stack.start_orchestrator(int(stack.address.rpartition(":")[2]))
    assert (await listed(stack))["sick"].state == run_pb2.RUN_STATE_DAMAGED
    for verb in ("cancel", "pause", "resume"):
        method, request = request_of(verb, "sick")
        with pytest.raises(InvalidStateError, match=f"DAMAGED, and nothing can come of it to {verb} it") as caught:
            await call(getattr(stack.runs, method), request)
        assert caught.value.reason == "RUN_DAMAGED"
    assert list(store.list(names.intents)) == []


@pytest.mark.parametrize("verb", one_by_default(["cancel", "pause"]))
async def test_a_damaged_run_that_is_open_takes_an_intent_for_when_it_is_repaired(stack, verb: str) -> None:
    sick = await create(stack, run_id="sick")
    store, names = stack.deps["store"], Names(stack.prefix, sick.uid)
    await stack.kill_orchestrator()
    archived = damage_of("events", names)
    store.create(archived, b"{")
    await wipe(stack)
    await stack.start_orchestrator(int(stack.address.rpartition(":")[2]))
    assert (await listed(stack))["sick"].state == run_pb2.RUN_STATE_DAMAGED
    method, request = request_of(verb, "sick")
    await call(getattr(stack.runs, method), request)
    store.delete(archived)
    wanted = {"cancel": run_pb2.RUN_STATE_CANCELLED, "pause": run_pb2.RUN_STATE_PAUSED}[verb]

    async def is_followed() -> bool:
        return (await listed(stack))["sick"].state == wanted

    await until(is_followed, what=f"{verb} is followed")


async def test_a_run_whose_uid_is_unknown_takes_no_intent(stack) -> None:
    await create(stack, run_id="sick")
    store = stack.deps["store"]
    await stack.kill_orchestrator()
    overwrite(store, Deployment(stack.prefix).name_object("sick"), b"\xff")
    await wipe(stack)
    await stack.start_orchestrator(int(stack.address.rpartition(":")[2]))
    for verb in ("cancel", "pause", "resume"):
        method, request = request_of(verb, "sick")
        with pytest.raises(InvalidStateError, match="DAMAGED, and nothing can come of it") as caught:
            await call(getattr(stack.runs, method), request)
        assert caught.value.reason == "RUN_DAMAGED"


async def test_it_goes_on_when_the_object_is_back(stack) -> None:
    sick = await create(stack, run_id="sick")
    store, key = stack.deps["store"], Names(stack.prefix, sick.uid).run_json
    good = store.get(key)
    await stack.kill_orchestrator()
    overwrite(store, key, b"{")
    await stack.start_orchestrator(int(stack.address.rpartition(":")[2]))
    assert (await listed(stack))["sick"].state == run_pb2.RUN_STATE_DAMAGED
    overwrite(store, key, good)
    await stack.env_server()
    await stack.inference()
    await stack.trainer()

    async def is_back() -> bool:
        return (await listed(stack))["sick"].state != run_pb2.RUN_STATE_DAMAGED

    await until(is_back)
    assert states(await watch(stack, sick))[-1] == "SUCCEEDED"


async def test_a_damaged_index_hides_nobody_else(stack) -> None:
    redis, store, prefix = stack.deps["redis"], stack.deps["store"], stack.prefix
    run = await create(stack, run_id="good")
    broken = await create(stack, run_id="broken")
    deployment = Deployment(prefix)
    overwrite(store, deployment.name_object("broken"), b"\xff")
    store.create(f"{deployment.names_prefix}folder/foreign", b"x")
    store.create(f"{prefix}/runs/folder/foreign", b"x")
    for field, value in ((b"\xff", b"\xff"), (b"../x", run.uid.encode()), (b"name", b"../../x"), (b"?x", b"\xff")):
        await redis.hset(deployment.runs_key, field, value)
    assert set(await listed(stack)) == {"good", "broken"}
    assert find_uid(store, prefix, "good") == run.uid and find_uid(store, prefix, "-") == run.uid
    await redis.delete(deployment.runs_key)
    await redis.set(deployment.runs_key, "text")
    assert (await read_index(redis, store, prefix)).runs == {"good": run.uid}
    for _ in range(2):  # when the index is made anew, and from then on, also by an orchestrator that starts later
        found = await listed(stack)
        assert set(found) == {"good", "broken"}, "a run whose name object is damaged is there, and says so"
        assert found["broken"].state == run_pb2.RUN_STATE_DAMAGED and found["broken"].error.reason == "INDEX_CORRUPT"
        assert deployment.name_object("broken") in found["broken"].error.message
        shown = await call(stack.runs.GetRun, run_service_pb2.GetRunRequest(name="runs/broken"))
        assert shown.run.state == run_pb2.RUN_STATE_DAMAGED
        await restart(stack)
    with pytest.raises(CorruptObjectError, match="names/broken"):
        find_uid(store, prefix, "broken")
    overwrite(store, deployment.name_object("broken"), broken.uid.encode())
    found = await listed(stack)
    assert found["broken"].uid == broken.uid and found["broken"].state != run_pb2.RUN_STATE_DAMAGED
    assert len(found) == 2 and not await redis.hexists(deployment.runs_key, "!broken")
