"""Who gets into the dashboard: tokens, codes, cookies, hosts, and what only our own pages may do."""

import asyncio
import http.client
import json
from pathlib import Path

import pytest

from millrace.errors import InvalidSpecError
from millrace.readers.dashboard import app as module
from millrace.readers.dashboard.reading import ReaderClient
from millrace.rpc.access import ServerAccess
from millrace.rpc.tokens import new_token, token_line
from millrace.storage.local import LocalStore
from millrace.telemetry.settings import Settings
from millrace_testing.dashboard import RUN, KnownRuns, Served, known_run, serving


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def protected(tmp_path: Path) -> tuple[ServerAccess, str, Path]:
    """Return an access that demands a token, the token, and the file that holds its hash."""
    token, path = new_token(), tmp_path / "tokens"
    path.write_text(token_line(token, "ada") + "\n")
    return ServerAccess.of(Settings(tokens_file=str(path))), token, path


async def ask(served: Served, path: str, **options):
    return await asyncio.to_thread(served.ask, path, **options)


async def log_in(served: Served, token: str) -> str:
    """Return the cookie of a new session, as a header."""
    status, _, body = await ask(served, "/api/login-codes", method="POST", body={}, Authorization=f"Bearer {token}")
    assert status == 200
    status, headers, page = await ask(served, json.loads(body)["path"])
    assert status == 200 and b"url=/" in page
    return headers["set-cookie"].partition(";")[0]


async def csrf_of(served: Served, cookie: str) -> str:
    status, _, body = await ask(served, "/api/session", Cookie=cookie)
    assert status == 200
    return json.loads(body)["csrf"]


async def test_without_a_token_there_is_nothing_but_the_door(store, tmp_path):
    access, token, _ = protected(tmp_path)
    async with serving(store, tmp_path / "i", access=access) as served:
        for path in ("/api/runs", f"/api/runs/{RUN}", f"/api/runs/{RUN}/samples", "/api/session"):
            status, headers, body = await ask(served, path)
            assert (status, headers["www-authenticate"]) == (401, "Bearer") and RUN.encode() not in body
            assert (await ask(served, path, Authorization="Bearer " + "x" * 40))[0] == 401
            assert (await ask(served, path, Cookie=f"millrace_session_{served.port}=made-up"))[0] == 401
        status, headers, body = await ask(served, "/")
        assert status == 401 and b"Log in" in body and "set-cookie" not in headers
        assert (await ask(served, "/api/login-codes", method="POST", body={}))[0] == 401
        assert (await ask(served, "/api/runs", Authorization=f"Bearer {token}"))[0] == 200


async def test_a_code_logs_in_once(store, tmp_path):
    access, token, _ = protected(tmp_path)
    async with serving(store, tmp_path / "i", access=access) as served:
        _, _, body = await ask(served, "/api/login-codes", method="POST", body={}, Authorization=f"Bearer {token}")
        path = json.loads(body)["path"]
        status, headers, _ = await ask(served, path)
        assert status == 200
        cookie = headers["set-cookie"]
        assert "HttpOnly" in cookie and "SameSite=strict" in cookie and "Path=/" in cookie
        assert token not in cookie
        assert (await ask(served, path))[0] == 403
        status, _, body = await ask(served, "/api/runs", Cookie=cookie.partition(";")[0])
        assert status == 200 and json.loads(body)["runs"][0]["name"] == RUN
        assert (await ask(served, "/", Cookie=cookie.partition(";")[0]))[0] == 200


async def test_a_token_may_be_typed_instead(store, tmp_path):
    access, token, _ = protected(tmp_path)
    async with serving(store, tmp_path / "i", access=access) as served:
        assert (await ask(served, "/api/login", method="POST", body={"token": "x" * 40}))[0] == 401
        status, headers, _ = await ask(served, "/api/login", method="POST", body={"token": token})
        assert status == 200
        cookie = headers["set-cookie"].partition(";")[0]
        assert (await ask(served, "/api/runs", Cookie=cookie))[0] == 200
        csrf = await csrf_of(served, cookie)
        out = await ask(served, "/api/logout", method="POST", body={}, Cookie=cookie, X_Millrace_CSRF=csrf)
        assert out[0] == 200
        assert (await ask(served, "/api/runs", Cookie=cookie))[0] == 401


async def test_a_session_ends_with_its_token(store, tmp_path):
    access, token, path = protected(tmp_path)
    async with serving(store, tmp_path / "i", access=access) as served:
        cookie = await log_in(served, token)
        path.write_text(token_line(new_token(), "bob") + "\n")
        assert (await ask(served, "/api/runs", Cookie=cookie))[0] == 401


async def test_writes_need_what_only_our_pages_know(store, tmp_path):
    access, token, _ = protected(tmp_path)
    source = KnownRuns([known_run()])
    async with serving(store, tmp_path / "i", access=access, source=source) as served:
        cookie = await log_in(served, token)
        csrf = await csrf_of(served, cookie)
        path = f"/api/runs/{RUN}/pause"
        refused = [
            {"Cookie": cookie},
            {"Cookie": cookie, "X_Millrace_CSRF": "guess"},
            {"Cookie": cookie, "X_Millrace_CSRF": csrf, "Sec_Fetch_Site": "cross-site"},
            {"Cookie": cookie, "X_Millrace_CSRF": csrf, "Sec_Fetch_Site": "same-site"},
        ]
        for headers in refused:
            assert (await ask(served, path, method="POST", body={}, **headers))[0] == 403
        form = {"Cookie": cookie, "X_Millrace_CSRF": csrf, "Content_Type": "text/plain"}
        assert (await ask(served, path, method="POST", body=b"{}", **form))[0] == 400
        assert source.done == []
        whole = {"Cookie": cookie, "X_Millrace_CSRF": csrf, "Sec_Fetch_Site": "same-origin"}
        assert (await ask(served, path, method="POST", body={}, **whole))[0] == 200
        bearer = {"Authorization": f"Bearer {token}"}
        body = {"reason": "enough"}
        assert (await ask(served, f"/api/runs/{RUN}/cancel", method="POST", body=body, **bearer))[0] == 200
        assert (await ask(served, f"/api/runs/{RUN}/delete", method="POST", body={}, **bearer))[0] == 404
        assert source.done == [(RUN, "pause", "from the dashboard by ada"), (RUN, "cancel", "enough")]


async def test_a_token_for_reading_looks_and_changes_nothing(store, tmp_path):
    access, token, path = protected(tmp_path)
    path.write_text(token_line(token, "eve", may_write=False) + "\n")
    source = KnownRuns([known_run()])
    async with serving(store, tmp_path / "i", access=access, source=source) as served:
        cookie = await log_in(served, token)
        _, _, body = await ask(served, "/api/session", Cookie=cookie)
        said = json.loads(body)
        assert (said["name"], said["may_write"]) == ("eve", False)
        assert (await ask(served, "/api/runs", Cookie=cookie))[0] == 200
        ours = {"Cookie": cookie, "X_Millrace_CSRF": said["csrf"], "Sec_Fetch_Site": "same-origin"}
        for action in ("pause", "resume", "cancel"):
            for headers in (ours, {"Authorization": f"Bearer {token}"}):
                status, _, body = await ask(served, f"/api/runs/{RUN}/{action}", method="POST", body={}, **headers)
                error = json.loads(body)["error"]
                assert (status, error["reason"]) == (403, "READ_ONLY_TOKEN") and "may only read" in error["message"]
        assert source.done == []
        assert (await ask(served, f"/api/runs/{RUN}/audit", method="POST", body={}, **ours))[0] == 200  # it reads
        assert (await ask(served, f"/api/runs/{RUN}/audit", method="POST", body={}, Cookie=cookie))[0] == 403
        path.write_text(token_line(token, "eve") + "\n")  # the session follows the line
        assert json.loads((await ask(served, "/api/session", Cookie=cookie))[2])["may_write"] is True
        assert (await ask(served, f"/api/runs/{RUN}/pause", method="POST", body={}, **ours))[0] == 200
        path.write_text(token_line(token, "eve", may_write=False) + "\n")
        assert (await ask(served, "/api/logout", method="POST", body={}, **ours))[0] == 200


async def test_where_no_token_is_demanded_a_browser_gets_a_session(store, tmp_path):
    source = KnownRuns([known_run()])
    async with serving(store, tmp_path / "i", source=source) as served:
        status, headers, _ = await ask(served, "/")
        assert status == 200
        cookie = headers["set-cookie"].partition(";")[0]
        csrf = await csrf_of(served, cookie)
        path = f"/api/runs/{RUN}/resume"
        assert (await ask(served, path, method="POST", body={}, Cookie=cookie))[0] == 403
        assert (await ask(served, path, method="POST", body={}, Sec_Fetch_Site="cross-site"))[0] == 403
        assert source.done == []
        assert (await ask(served, path, method="POST", body={}, Cookie=cookie, X_Millrace_CSRF=csrf))[0] == 200
        assert (await ask(served, path, method="POST", body={}))[0] == 200  # a program, as with the public API
        assert len(source.done) == 2


@pytest.mark.parametrize(
    "host",
    ["evil.example", "localhost.evil.example:80", "127.0.0.1.evil.example", "", "127.0.0.1:x", "[::1", "a@127.0.0.1"],
)
async def test_a_name_that_was_pointed_at_this_machine_gets_nothing(store, tmp_path, host):
    access, token, _ = protected(tmp_path)
    for given in (access, ServerAccess()):
        async with serving(store, tmp_path / "i", access=given) as served:
            status, headers, body = await ask(served, "/api/runs", host=host, Authorization=f"Bearer {token}")
            assert status == 400 and RUN.encode() not in body and "set-cookie" not in headers
            assert (await ask(served, "/", host=host))[0] == 400


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8080", "127.0.0.1", "[::1]:80", "10.1.2.3:8080"])
async def test_addresses_of_this_machine_are_its_own(store, tmp_path, host):
    async with serving(store, tmp_path / "i") as served:
        assert (await ask(served, "/api/runs", host=host))[0] == 200


async def test_every_answer_forbids_what_pages_do_not_need(store, tmp_path):
    async with serving(store, tmp_path / "i") as served:
        for path in ("/", "/api/runs", "/static/app.js", "/nothing", "/api/runs/nobody", "/login"):
            _, headers, _ = await ask(served, path)
            policy = headers["content-security-policy"]
            assert policy.startswith("default-src 'self';") and "unsafe" not in policy and "http" not in policy
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["referrer-policy"] == "no-referrer"
            assert "access-control-allow-origin" not in headers
            if not path.startswith("/static"):
                assert headers["cache-control"] in ("no-store", "no-cache")


async def test_a_large_body_and_a_broken_one_are_refused(store, tmp_path):
    async with serving(store, tmp_path / "i") as served:
        path = f"/api/runs/{RUN}/pause"
        for body in (b"not json", b"[1]", b'{"reason": NaN}', b"\xff\xfe"):
            assert (await ask(served, path, method="POST", body=body))[0] == 400
        with pytest.raises((OSError, http.client.HTTPException)):  # it is cut off
            await ask(served, path, method="POST", body=b'{"reason": "' + b"x" * (1 << 20) + b'"}')
        assert served.source.done == []


def nobody(directory) -> ReaderClient:
    """Return a reader that is never asked."""
    return ReaderClient(store_url="file:///s", prefix="p", directory=directory)


async def test_beyond_loopback_it_needs_tls_and_tokens(store, tmp_path):
    from millrace.readers.beside import dashboard_server

    with pytest.raises(InvalidSpecError, match="MILLRACE_DASHBOARD_LISTEN") as caught:
        async with dashboard_server("0.0.0.0:0", KnownRuns(), nobody(tmp_path), access=ServerAccess()):
            pass
    assert "MILLRACE_TOKENS_FILE" in str(caught.value)


async def test_without_an_address_nothing_is_served(tmp_path):
    from millrace.readers.beside import dashboard_server

    async with dashboard_server(None, KnownRuns(), nobody(tmp_path)) as port:
        assert port == 0


def test_codes_and_sessions_end_by_themselves(monkeypatch):
    from millrace.errors import CapacityError
    from millrace.rpc.access import Grant

    now = [0.0]
    found = module.Sessions(clock=lambda: now[0])
    grant = Grant(name="ada", tenant="", holds=lambda: True)
    old = found.new_code(grant)
    now[0] = module.CODE_S + 1
    assert found.redeem(old) is None
    secret = found.redeem(found.new_code(grant))
    assert secret is not None and found.find(secret) is not None
    now[0] += module.SESSION_S + 1
    assert found.find(secret) is None
    for _ in range(module.MAX_CODES):
        found.new_code(grant)
    with pytest.raises(CapacityError):
        found.new_code(grant)
    monkeypatch.setattr(module, "MAX_SESSIONS", 2)
    kept = [found.open(grant) for _ in range(3)]
    assert [found.find(each) is not None for each in kept] == [False, True, True]
