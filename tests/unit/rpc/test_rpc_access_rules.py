"""Which settings belong together, and what counts as this machine."""

import pytest

from millrace.errors import InvalidSpecError, PermissionDeniedError, UnauthenticatedError
from millrace.rpc.access import PUBLIC, READING_METHODS, WORKER, ClientAccess, ServerAccess, is_loopback
from millrace.rpc.tokens import new_token, token_line
from millrace.telemetry.settings import Settings
from millrace.v1 import run_service_pb2


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "::1", "[::1]"])
def test_loopback(host):
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", "10.0.0.1", "localhost.example", "127.0.0.1.example", "a"])
def test_not_loopback(host):
    assert not is_loopback(host)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"tls_cert": "/c"}, "MILLRACE_TLS_KEY"),
        ({"tls_key": "/k"}, "MILLRACE_TLS_CERT"),
        ({"tls_client_ca": "/ca"}, "MILLRACE_TLS_CLIENT_CA"),
        ({"tokens_file": "/no/such/file"}, "MILLRACE_TOKENS_FILE"),
        ({"worker_token_file": "/no/such/file"}, "MILLRACE_WORKER_TOKEN_FILE"),
    ],
)
def test_halves_are_refused(settings, field):
    with pytest.raises(InvalidSpecError) as caught:
        ServerAccess.of(Settings(**settings))
    assert caught.value.violations[0].field == field


def test_clients_name_the_file_that_is_missing():
    with pytest.raises(InvalidSpecError, match="MILLRACE_TOKEN_FILE"):
        ClientAccess.public(Settings(token_file="/no/such/file"))
    with pytest.raises(InvalidSpecError, match="MILLRACE_TLS_CA"):
        ClientAccess.public(Settings(tls_ca="/no/such/file")).channel_credentials()


def test_on_loopback_nothing_is_demanded():
    ServerAccess().require_safe("127.0.0.1:0", {PUBLIC, WORKER})
    ServerAccess(is_insecure=True).require_safe("0.0.0.0:1", {PUBLIC, WORKER})


def test_a_stack_in_plain_text_does_not_care_whom_to_trust_elsewhere():
    settings = Settings(tls_ca="/ca", tls_server_name="n", token_file="/t", redis_url="redis://h:1")
    assert settings.of_stack() == Settings(token_file="/t")
    with pytest.raises(InvalidSpecError, match="MILLRACE_TLS_CA"):
        Settings(tls_cert="/c", tls_key="/k").of_stack()


def test_a_token_does_not_show():
    with pytest.raises(InvalidSpecError) as caught:
        Settings.from_env({"MILLRACE_TOKEN": "short-secret"})
    assert "short-secret" not in str(caught.value)
    assert "0123456789" not in repr(Settings(token="0123456789" * 4))


@pytest.fixture
def reader(tmp_path):
    """An access, a token that it accepts for reading, and the file that says so."""
    token, path, workers = new_token(), tmp_path / "tokens", tmp_path / "workers"
    path.write_text(token_line(token, "eve", may_write=False) + "\n")
    workers.write_text(new_token() + "\n")
    return ServerAccess.of(Settings(tokens_file=str(path), worker_token_file=str(workers))), token, path


WRITING = {"CreateRun", "CancelRun", "PauseRun", "ResumeRun", "ForkRun", "DeleteRun"}


def test_a_token_for_reading_calls_what_reads_and_nothing_else(reader):
    access, token, _ = reader
    header = [("authorization", f"Bearer {token}")]
    refused = set()
    service = run_service_pb2.DESCRIPTOR.services_by_name["RunService"]
    for method in service.methods:
        try:
            assert access.admit(f"/{service.full_name}/{method.name}", header).name == "eve"
        except PermissionDeniedError as error:
            assert error.reason == "READ_ONLY_TOKEN" and "access=read" in error.message
            refused.add(method.name)
    assert refused == WRITING
    assert {f"/{service.full_name}/{method.name}" for method in service.methods} >= READING_METHODS
    with pytest.raises(PermissionDeniedError):  # what is new writes until somebody says that it does not
        access.admit(f"/{service.full_name}/NotYetThere", header)
    with pytest.raises(UnauthenticatedError):
        access.admit("/millrace.internal.v1.WorkerService/Heartbeat", header)


def test_a_token_for_reading_makes_no_engine_work(reader):
    access, token, path = reader
    for route in ("/v1/models", "/metrics", "/health"):
        access.admit_http(route, f"Bearer {token}")
    for route in ("/v1/chat/completions", "/v1/completions", "/inference/v1/generate", "/tokenize"):
        with pytest.raises(PermissionDeniedError):
            access.admit_http(route, f"Bearer {token}")
    path.write_text(token_line(token, "eve") + "\n")
    access.admit_http("/v1/completions", f"Bearer {token}")


def test_a_grant_follows_what_the_line_says_now(reader):
    access, token, path = reader
    grant = access.admit("/millrace.v1.RunService/GetRun", [("authorization", f"Bearer {token}")])
    assert not grant.may_write()
    path.write_text(token_line(token, "eve") + "\n")
    assert grant.may_write()
    path.write_text(token_line(new_token(), "bob") + "\n")
    assert not grant.may_write() and not grant.holds()
