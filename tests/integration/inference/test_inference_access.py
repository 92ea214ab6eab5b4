"""The HTTP API after TLS and tokens: the embedded engine, the gate of vLLM, env-servers' clients."""

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from openai import APIStatusError

from millrace.env_server.adapters import client_v0, renderer
from millrace.env_server.engine_access import EngineAccess, EngineToken, make_session
from millrace.errors import InvalidSpecError, InvalidStateError, UnauthenticatedError
from millrace.inference.http.access import TokenGate, http_scheme, vllm_flags
from millrace.inference.http.server import start_http
from millrace.rpc.access import ClientAccess, ServerAccess
from millrace.rpc.tokens import new_token, token_line
from millrace.telemetry.settings import Settings
from millrace_testing.certificates import Authority

ANSWER = {
    "id": "x",
    "object": "chat.completion",
    "created": 0,
    "model": "policy",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}],
}


class Api:
    """Stands for HttpApi: the gate is before whatever the application serves."""

    def __init__(self) -> None:
        self.calls = 0

    def make_app(self) -> FastAPI:
        app = FastAPI()

        @app.post("/v1/chat/completions")
        async def chat() -> JSONResponse:
            self.calls += 1
            return JSONResponse(ANSWER)

        @app.get("/health")
        async def health() -> JSONResponse:
            return JSONResponse({"error": {"message": "no policy of runs/secret-name is loaded yet"}}, status_code=503)

        return app


class Place:
    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.authority = Authority(directory / "ca")
        self.pair = self.authority.issue("server")
        self.workers = directory / "workers"
        self.token = new_token()
        self.workers.write_text(self.token)
        self.monkeypatch = monkeypatch
        monkeypatch.setenv("MILLRACE_TLS_CERT", str(self.pair.cert))
        monkeypatch.setenv("MILLRACE_TLS_KEY", str(self.pair.key))
        monkeypatch.setenv("MILLRACE_WORKER_TOKEN_FILE", str(self.workers))

    def engine_access(self, **settings) -> EngineAccess:
        base = {"tls_ca": str(self.authority.path), "worker_token_file": str(self.workers)}
        return EngineAccess(ClientAccess.internal(Settings(**{**base, **settings})))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return Place(tmp_path, monkeypatch)


@contextlib.asynccontextmanager
async def serving(api: Api, host: str = "127.0.0.1") -> AsyncIterator[str]:
    server = await start_http(api, host, 0)  # type: ignore[arg-type]
    try:
        yield f"{http_scheme()}://127.0.0.1:{server.port}"
    finally:
        await server.stop()


async def test_the_same_401_for_every_path_and_a_health_that_tells_only_its_status(place):
    api = Api()
    context = place.engine_access().context()
    async with serving(api) as url, aiohttp.ClientSession() as session:
        bodies = set()
        for headers in ({}, {"Authorization": f"Bearer {new_token()}"}, {"Authorization": place.token}):
            for path in ("/v1/chat/completions", "/v1/models", "/no/such/path", "/metrics", "/health/"):
                async with session.post(f"{url}{path}", data=b"x" * 1000, headers=headers, ssl=context) as reply:
                    bodies.add((reply.status, await reply.text(), reply.headers["WWW-Authenticate"]))
        assert len(bodies) == 1
        assert bodies.pop()[0] == 401
        assert api.calls == 0
        async with session.get(f"{url}/health", ssl=context) as reply:
            assert (reply.status, await reply.json()) == (503, {"status": "unavailable"})
        good = {"Authorization": f"Bearer {place.token}"}
        async with session.post(f"{url}/v1/chat/completions", headers=good, ssl=context) as reply:
            assert (reply.status, await reply.json()) == (200, ANSWER)


async def test_a_token_for_reading_has_nothing_generated_and_hears_why(place, tmp_path, monkeypatch):
    token, tokens = new_token(), tmp_path / "tokens"
    tokens.write_text(token_line(token, "guests", may_write=False))
    monkeypatch.setenv("MILLRACE_TOKENS_FILE", str(tokens))
    api, context, header = Api(), place.engine_access().context(), {"Authorization": f"Bearer {token}"}
    async with serving(api) as url, aiohttp.ClientSession() as session:
        async with session.post(f"{url}/v1/chat/completions", headers=header, ssl=context) as reply:
            assert reply.status == 403
            assert "may only read" in (await reply.json())["error"]["message"]
        async with session.get(f"{url}/v1/models", headers=header, ssl=context) as reply:
            assert reply.status == 404  # it was let in, and this application has no such route
        assert api.calls == 0


async def test_env_workers_get_a_token_that_opens_the_models_and_nothing_else(place, monkeypatch):
    """What the env-server hands down follows its file, opens no admin route, and no gRPC service."""
    handed = EngineToken()
    environ = handed.environ()
    assert set(environ) == {"MILLRACE_ENGINE_TOKEN_FILE"}  # neither the workers' token nor our key
    theirs = Path(environ["MILLRACE_ENGINE_TOKEN_FILE"])
    assert theirs.stat().st_mode & 0o077 == 0
    assert place.token not in theirs.read_text()
    monkeypatch.setenv("MILLRACE_TLS_CLIENT_CA", str(place.authority.path))
    assert {"MILLRACE_TLS_CERT", "MILLRACE_TLS_KEY"} <= set(EngineToken().environ())
    monkeypatch.delenv("MILLRACE_TLS_CLIENT_CA")
    access = EngineAccess(
        ClientAccess.engine(Settings(tls_ca=str(place.authority.path), engine_token_file=str(theirs)))
    )
    api = Api()
    async with serving(api) as url, aiohttp.ClientSession() as session:

        async def post(path: str) -> int:
            headers = access.headers(url)
            async with session.post(f"{url}{path}", headers=headers, ssl=access.context()) as reply:
                return reply.status

        assert await post("/v1/chat/completions") == 200
        for path in ("/update_weights", "/v1/load_lora_adapter", "/v1/chat/completions/../../update_weights", "/"):
            assert await post(path) == 401
        grpc = ServerAccess.from_environ()
        with pytest.raises(UnauthenticatedError):
            grpc.admit(
                "/millrace.internal.v1.PolicyService/UpdatePolicy",
                [("authorization", access.headers(url)["Authorization"])],
            )
        place.workers.write_text(new_token())
        assert await post("/v1/chat/completions") == 401
        handed.refresh()
        assert await post("/v1/chat/completions") == 200


async def test_the_v0_client_shows_the_token_and_trusts_the_ca_of_ours_only(place, monkeypatch):
    api = Api()
    ours = place.engine_access()
    monkeypatch.setattr(client_v0, "engine_access", lambda: ours)
    async with serving(api) as url, make_session() as session:
        client = client_v0.LeanClient(f"{url}/v1", session)
        assert (await client.get_native_response([], "policy", {}))["id"] == "x"
        fresh = new_token()
        place.workers.write_text(fresh)  # both sides read it again
        assert (await client.get_native_response([], "policy", {}))["id"] == "x"
        assert api.calls == 2
        external = client_v0.LeanClient(f"{url}/v1", session, is_external=True, api_key="theirs" * 8)
        monkeypatch.setattr(client_v0, "EXTERNAL_MAX_ATTEMPTS", 1)
        with pytest.raises(client_v0.EngineLostError, match=r"(?i)certificate"):  # the system does not know our CA
            await external.get_native_response([], "policy", {})
        assert api.calls == 2


async def test_the_client_of_renderers_shows_the_token_and_trusts_our_ca(place, monkeypatch):
    api = Api()

    def client(access: EngineAccess) -> renderer.GenerateClient:
        monkeypatch.setattr(renderer, "engine_access", lambda: access)
        return renderer.GenerateClient(f"{url}/v1/")

    async with serving(api) as url:
        ask = f"{url}/v1/chat/completions"
        for access, status in ((place.engine_access(), 200), (place.engine_access(worker_token_file=None), 401)):
            try:
                if status == 200:
                    assert json.loads((await client(access).post(ask, body={})).content) == ANSWER
                else:
                    with pytest.raises(renderer.EngineLostReplyError, match=f"engine lost: Error code: {status}"):
                        await client(access).post(ask, body={})
                    with pytest.raises(APIStatusError, match=f"Error code: {status}"):
                        await client(access).get("/models")
            finally:
                await access.close()
        stranger = EngineAccess(ClientAccess.plain())
        monkeypatch.setattr(renderer, "MAX_ATTEMPTS", 1)
        with pytest.raises(renderer.EngineLostReplyError, match=r"(?i)certificate"):
            await client(stranger).post(ask, body={})
        await stranger.close()
    assert api.calls == 1


async def test_mtls_over_http(place, monkeypatch):
    monkeypatch.setenv("MILLRACE_TLS_CLIENT_CA", str(place.authority.path))
    monkeypatch.delenv("MILLRACE_WORKER_TOKEN_FILE")
    api = Api()
    mine = place.authority.issue("client")
    showing = place.engine_access(worker_token_file=None, tls_cert=str(mine.cert), tls_key=str(mine.key)).context()
    bare = place.engine_access(worker_token_file=None).context()
    async with serving(api) as url, aiohttp.ClientSession() as session:
        async with session.post(f"{url}/v1/chat/completions", ssl=showing) as reply:
            assert reply.status == 200
        with pytest.raises(aiohttp.ClientError):
            await session.post(f"{url}/v1/chat/completions", ssl=bare)
    assert api.calls == 1


async def test_a_new_certificate_is_served_without_a_restart(place):
    new = Authority(place.workers.parent / "new", "new-ca")
    fresh = new.issue("fresh")
    good = {"Authorization": f"Bearer {place.token}"}
    async with serving(Api()) as url:
        for authority in (place.authority, new):
            context = place.engine_access(tls_ca=str(authority.path)).context()
            async with (
                aiohttp.ClientSession() as session,
                session.post(f"{url}/v1/chat/completions", headers=good, ssl=context) as reply,
            ):
                assert reply.status == 200
            place.pair.key.write_bytes(fresh.key.read_bytes())
            place.pair.cert.write_bytes(fresh.cert.read_bytes())


async def test_an_unprotected_http_server_beyond_loopback_does_not_start(place, monkeypatch):
    for name in ("MILLRACE_TLS_CERT", "MILLRACE_TLS_KEY", "MILLRACE_WORKER_TOKEN_FILE"):
        monkeypatch.delenv(name)
    with pytest.raises(InvalidSpecError) as caught:
        async with serving(Api(), "0.0.0.0"):
            pytest.fail("it started")
    fields = [violation.field for violation in caught.value.violations]
    assert fields == ["MILLRACE_HTTP_LISTEN", "MILLRACE_WORKER_TOKEN_FILE"]
    with pytest.raises(InvalidSpecError):
        vllm_flags("0.0.0.0", 8000)
    monkeypatch.setenv("MILLRACE_INSECURE", "1")
    async with serving(Api(), "0.0.0.0"):
        pass


def test_a_token_goes_to_no_engine_in_plain_text_beyond_this_machine(place):
    access = place.engine_access()
    assert access.headers("https://engine.example/v1")
    assert access.headers("http://127.0.0.1:8000/v1")
    with pytest.raises(InvalidStateError):
        access.headers("http://engine.example:8000/v1")


def test_the_flags_of_vllm(place, monkeypatch):
    gate = "--middleware=millrace.inference.http.access.TokenGate"
    tls = [f"--ssl-certfile={place.pair.cert}", f"--ssl-keyfile={place.pair.key}", "--enable-ssl-refresh"]
    assert vllm_flags("0.0.0.0", 8000) == [gate, *tls]
    monkeypatch.setenv("MILLRACE_TLS_CLIENT_CA", str(place.authority.path))
    mtls = [f"--ssl-ca-certs={place.authority.path}", "--ssl-cert-reqs=2"]
    assert vllm_flags("0.0.0.0", 8000) == [gate, *tls, *mtls]
    monkeypatch.setenv("MILLRACE_TLS_KEY", str(place.authority.path))
    with pytest.raises(InvalidSpecError, match="MILLRACE_TLS_CERT"):
        vllm_flags("0.0.0.0", 8000)


async def test_the_gate_for_vllm_refuses_before_it_reads(place):
    seen: list[str] = []

    async def app(scope, receive, send):
        seen.append(scope["path"])

    gate = TokenGate(app, access=ServerAccess.from_environ())
    sent: list[dict] = []

    async def send(message):
        sent.append(message)

    async def receive():
        raise AssertionError("the request was read")

    def scope(path: str, *tokens: str, kind: str = "http"):
        headers = [(b"authorization", f"Bearer {token}".encode()) for token in tokens]
        return {"type": kind, "path": path, "headers": headers}

    await gate(scope("/v1/models"), receive, send)
    await gate(scope("/v1/models", place.token, place.token), receive, send)
    await gate(scope("/v1/realtime", kind="websocket"), receive, send)
    assert [message.get("status") or message.get("code") for message in sent if "body" not in message] == [
        401,
        401,
        1008,
    ]
    assert seen == []
    await gate(scope("/v1/models", place.token), receive, send)
    await gate(scope("/health"), receive, send)
    assert seen == ["/v1/models", "/health"]
