"""Two tenants of one server: each has its own, and another's ids are ids of nothing."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from millrace.rpc.access import ServerAccess
from millrace.rpc.http_server import HttpServer
from millrace.rpc.tokens import TokensFile, new_token, token_line
from millrace.storage.local import LocalStore
from millrace.tinker.api import TinkerApi
from millrace.tinker.app import AppSettings, TinkerApp
from millrace.tinker.serve import BOUNDS
from millrace.tinker.workers import WorkerOrder, Workers
from millrace_testing.tinker import Client, datum, loss_request, sample_request

ADAM = {"adam_params": {"learning_rate": 0.01}}


class Listening:
    """The API without workers: what is asked is stored, and nothing is executed."""

    def __init__(self, store: LocalStore, tokens: Path | None, *, session_s: float = 3600.0) -> None:
        order = WorkerOrder(model="none", max_tokens=None, num_threads=1, snapshot_verbs=1)
        self.workers = Workers(order, store=store, prefix="test")
        access = ServerAccess(tokens=None if tokens is None else TokensFile(tokens, field="TOKENS"))
        api = TinkerApi(store, prefix="test", base_names=("tiny",))
        bounds = AppSettings(hold_s=0.1, session_s=session_s)
        self.app = TinkerApp(api, self.workers, access=access, settings=bounds)
        self.port = 0


async def listen(served: Listening) -> HttpServer:
    app = served.app.make_app()
    server = await HttpServer.start(app, "127.0.0.1", 0, tls=None, bounds=BOUNDS, field="TEST")
    served.port = server.port
    return server


@pytest.fixture
async def tenants(tmp_path: Path) -> AsyncIterator[dict[str, Client]]:
    made = {name: new_token() for name in ("alice", "bob", "reader", "operator")}
    tenants = {"alice": "alice", "bob": "bob", "reader": "alice", "operator": ""}
    lines = [token_line(token, name, tenant=tenants[name], may_write=name != "reader") for name, token in made.items()]
    file = tmp_path / "tokens"
    file.write_text("\n".join(lines) + "\n")
    served = Listening(LocalStore(tmp_path / "store"), file)
    server = await listen(served)
    yield {name: Client(served, key=token) for name, token in made.items()}
    await server.stop()


def own(client: Client) -> dict[str, str]:
    """Make a session, a model with a request, and a sampling session with a request; return their ids."""
    session = client.json("create_session", {"tags": []})["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 2}}
    future = client.json("create_model", body)["request_id"]
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
    sampler = client.json("create_sampling_session", body)["sampling_session_id"]
    sampled = client.json("asample", sample_request(sampler, 0, [1]))["request_id"]
    return {"session": session, "model": f"{session}:train:0", "future": future, "sampler": sampler, "sampled": sampled}


def calls(ids: dict[str, str]) -> dict[str, dict | bytes | None]:
    """Return a call of every route that names something, by path."""
    model, session = ids["model"], ids["session"]
    verbs = {kind: {"model_id": model, "seq_id": 1, **ADAM} for kind in ("optim_step", "save_weights", "load_weights")}
    return {
        **verbs,
        "save_weights_for_sampler": {"model_id": model, "seq_id": 1, "path": "x"},
        "forward_backward": loss_request(model, 1, [datum([1, 2, 3])]),
        "get_info": {"model_id": model},
        "weights_info": {"tinker_path": f"tinker://{model}/weights/x"},
        "create_model": {"session_id": session, "model_seq_id": 1, "base_model": "tiny", "lora_config": {"rank": 2}},
        "create_sampling_session": {"session_id": session, "sampling_session_seq_id": 1, "base_model": "tiny"},
        "session_heartbeat": {"session_id": session},
        "asample": sample_request(ids["sampler"], 1, [1]),
        "retrieve_future": {"request_id": ids["future"]},
        f"sessions/{session}/finish": {},
        f"sessions/{session}": None,
        f"samplers/{ids['sampler']}": None,
        f"training_runs/{model}": None,
        f"training_runs/{model}/checkpoints": None,
        f"training_runs/{model}/checkpoints/weights/x/archive": None,
    }


NAMES_NOTHING = {
    "client/config",
    "client/dynamic_config",
    "telemetry",
    "cancel_future",
    "create_session",
    "healthz",
    "get_server_capabilities",
    "training_runs",
    "checkpoints",
}


async def test_another_tenants_ids_are_ids_of_nothing_at_every_route(
    tenants: dict[str, Client], tmp_path: Path
) -> None:
    def ask() -> None:
        ids = own(tenants["alice"])
        nothing = {name: each.replace(ids["session"], f"s-{'0' * 32}") for name, each in ids.items()}
        for who in ("bob", "operator"):
            for path, body in calls(ids).items():
                found = tenants[who].refused(path, body)
                never = dict(zip(calls(ids), calls(nothing).items(), strict=True))[path]
                expected = tenants[who].refused(*never)
                assert found[0] == expected[0] == 404, path
                assert found[1] == expected[1].replace("0" * 32, ids["session"].removeprefix("s-")), path
            assert tenants[who].json("training_runs")["training_runs"] == []
            assert tenants[who].json("checkpoints")["checkpoints"] == []
        assert [r["training_run_id"] for r in tenants["alice"].json("training_runs")["training_runs"]] == [ids["model"]]

    await asyncio.to_thread(ask)


def test_every_route_is_asked(tmp_path: Path) -> None:
    served = Listening(LocalStore(tmp_path), None)
    paths = {route.path.removeprefix("/api/v1/") for route in served.app.make_app().routes}  # type: ignore[attr-defined]
    ids = {"session": "{session}", "model": "{model}", "future": "", "sampler": "{sampler}"}
    asked = {path.replace("/weights/x/", "/{folder}/{name}/") for path in calls(ids)}
    assert {each for each in paths if not each.startswith("/")} == asked | NAMES_NOTHING


async def test_who_shows_no_token_or_may_only_read(tenants: dict[str, Client]) -> None:
    def ask() -> None:
        ids = own(tenants["alice"])
        reader = tenants["reader"]
        assert reader.json("get_info", {"model_id": ids["model"]})["lora_rank"] == 2
        assert reader.json("retrieve_future", {"request_id": ids["sampled"]})["type"] == "try_again"
        status, message = reader.refused("create_session", {"tags": []})
        assert status == 403 and "may only read" in message
        for key in (None, "mrt_" + "x" * 40):
            stranger = Client(reader.server, key=key)
            assert stranger.refused("get_info", {"model_id": ids["model"]})[0] == 401
        assert stranger.json("healthz") == {"status": "ok"}

    await asyncio.to_thread(ask)


async def test_a_session_without_heartbeats_has_ended(tmp_path: Path) -> None:
    served = Listening(LocalStore(tmp_path), None, session_s=0.0)
    server = await listen(served)
    try:
        client = Client(served)

        def ask() -> tuple[int, str]:
            session = client.json("create_session", {"tags": []})["session_id"]
            assert client.json("session_heartbeat", {"session_id": session}) == {"type": "session_heartbeat"}
            return client.refused("session_heartbeat", {"session_id": session})

        status, message = await asyncio.to_thread(ask)
        assert status == 410 and "had no heartbeat for 0 s" in message
    finally:
        await server.stop()
