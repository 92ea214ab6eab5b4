"""Which settings belong together, and what counts as this machine."""

import pytest

from millrace.errors import InvalidSpecError
from millrace.rpc.access import PUBLIC, WORKER, ClientAccess, ServerAccess, is_loopback
from millrace.telemetry.settings import Settings


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
