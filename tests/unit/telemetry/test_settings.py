"""Placement variables: parsing, all violations at once, misspellings, and no secret in a message."""

from pathlib import Path

import pytest

from millrace.errors import InvalidSpecError
from millrace.telemetry import logging as redaction
from millrace.telemetry.logging import redact
from millrace.telemetry.settings import Settings, parse_address


def violations(environ: dict[str, str], required: tuple[str, ...] = ()) -> dict[str, str]:
    with pytest.raises(InvalidSpecError) as caught:
        Settings.from_env(environ, required=required)
    assert caught.value.exit_code == 2
    return {violation.field: str(violation) for violation in caught.value.violations}


def test_defaults() -> None:
    settings = Settings.from_env({})
    assert (settings.prefix, settings.log_level, settings.log_json, settings.redis_url) == (
        "millrace",
        "INFO",
        False,
        None,
    )


def test_every_variable_is_read() -> None:
    environ = {
        "MILLRACE_REDIS_URL": "redis://:pw@cache:6379/0",
        "MILLRACE_STORE_URL": "s3://bucket/prefix?endpoint=http://127.0.0.1:9000",
        "MILLRACE_PREFIX": "team-a",
        "MILLRACE_ORCHESTRATOR": "orchestrator:50051",
        "MILLRACE_SERVER": "[::1]:50051",
        "MILLRACE_LISTEN": "0.0.0.0:0",
        "MILLRACE_HTTP_LISTEN": "127.0.0.1:8000",
        "MILLRACE_ADVERTISE": "host-3:50051",
        "MILLRACE_LOG_LEVEL": "debug",
        "MILLRACE_LOG_JSON": "1",
        "MILLRACE_DRAIN_S": "0",
        "MILLRACE_GRACE_S": "2.5",
    }
    settings = Settings.from_env(environ)
    assert settings == Settings(
        redis_url="redis://:pw@cache:6379/0",
        store_url="s3://bucket/prefix?endpoint=http://127.0.0.1:9000",
        prefix="team-a",
        orchestrator="orchestrator:50051",
        server="[::1]:50051",
        listen="0.0.0.0:0",
        http_listen="127.0.0.1:8000",
        advertise="host-3:50051",
        log_level="DEBUG",
        log_json=True,
        drain_s=0.0,
        grace_s=2.5,
    )


def test_all_violations_come_at_once() -> None:
    found = violations(
        {
            "MILLRACE_LISTEN": "50051",
            "MILLRACE_STORE_URL": "/tmp/store",
            "MILLRACE_PREFIX": "a{b}",
            "MILLRACE_LOG_LEVEL": "LOUD",
            "MILLRACE_LOG_JSON": "maybe",
            "MILLRACE_DRAIN_S": "-1",
        },
        required=("redis_url", "MILLRACE_ORCHESTRATOR"),
    )
    assert set(found) == {
        "MILLRACE_LISTEN",
        "MILLRACE_STORE_URL",
        "MILLRACE_PREFIX",
        "MILLRACE_LOG_LEVEL",
        "MILLRACE_LOG_JSON",
        "MILLRACE_DRAIN_S",
        "MILLRACE_REDIS_URL",
        "MILLRACE_ORCHESTRATOR",
    }
    assert "must be host:port" in found["MILLRACE_LISTEN"]
    assert "(got 50051)" in found["MILLRACE_LISTEN"]
    assert "file:// or s3://" in found["MILLRACE_STORE_URL"]
    assert "is not set" in found["MILLRACE_REDIS_URL"]


def test_a_violation_does_not_show_a_password() -> None:
    found = violations({"MILLRACE_REDIS_URL": "rediss+tls://user:hunter2hunter2@cache:6379"})
    assert "hunter2" not in found["MILLRACE_REDIS_URL"]
    assert "user:***@cache" in found["MILLRACE_REDIS_URL"]


def test_the_password_is_not_in_the_repr() -> None:
    assert "hunter2" not in repr(Settings.from_env({"MILLRACE_REDIS_URL": "redis://u:hunter2@h:1"}))


def test_the_url_of_redis_comes_from_a_file(tmp_path: Path) -> None:
    secret = tmp_path / "redis.url"
    secret.write_text("redis://:hunter2@cache:6379/0\n")
    settings = Settings.from_env({"MILLRACE_REDIS_URL_FILE": str(secret)}, required=["redis_url"])
    assert settings.redis_url == "redis://:hunter2@cache:6379/0"
    assert "hunter2" not in str(settings.to_environ()), "a child reads the file itself"
    assert Settings.from_env(settings.to_environ()) == settings


def test_what_a_file_says_is_kept_out_of_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "known_secrets", ())
    secret = tmp_path / "redis.url"
    secret.write_text("redis://user:a%2Flong%2Fpassword@cache:6379/0\n")
    Settings.from_env({"MILLRACE_REDIS_URL_FILE": str(secret)})
    said = "AUTH a/long/password failed at redis://cache:6379/0, not a%2Flong%2Fpassword"
    assert redact(said) == redact(said, secrets=()) == "AUTH *** failed at redis://cache:6379/0, not ***"


def test_a_url_of_redis_and_a_file_are_refused_together(tmp_path: Path) -> None:
    (tmp_path / "redis.url").write_text("redis://cache:6379/0")
    environ = {"MILLRACE_REDIS_URL": "redis://:hunter2@own:6379/0", "MILLRACE_REDIS_URL_FILE": f"{tmp_path}/redis.url"}
    found = violations(environ)
    assert "MILLRACE_REDIS_URL_FILE as well" in found["MILLRACE_REDIS_URL"] and "hunter2" not in str(found)


@pytest.mark.parametrize("url", ["redis://u:hunter2@[cache:6379", "redis://u:hunter2\u2100@cache:6379"])
def test_a_url_that_does_not_parse_shows_nothing_of_itself(tmp_path: Path, url: str) -> None:
    (tmp_path / "bad").write_text(url)
    assert "hunter2" not in str(violations({"MILLRACE_REDIS_URL_FILE": f"{tmp_path}/bad"}))


def test_a_file_without_a_url_of_redis_is_named(tmp_path: Path) -> None:
    missing = violations({"MILLRACE_REDIS_URL_FILE": str(tmp_path / "none")}, ("redis_url",))
    assert "No such file" in missing["MILLRACE_REDIS_URL_FILE"]
    (tmp_path / "bad").write_text("redis-password-hunter2")
    bad = violations({"MILLRACE_REDIS_URL_FILE": str(tmp_path / "bad")})
    assert "must be a URL" in bad["MILLRACE_REDIS_URL"] and "hunter2" not in bad["MILLRACE_REDIS_URL"]


def test_a_near_miss_is_an_error_with_the_right_name() -> None:
    assert "did you mean MILLRACE_PREFIX?" in violations({"MILLRACE_PREFX": "a"})["MILLRACE_PREFX"]


def test_other_variables_of_tests_and_kubernetes_are_left_alone() -> None:
    others = {
        "MILLRACE_TEST_S3_URL": "s3://x",
        "MILLRACE_CONFIG__trainer__optim__lr": "1",
        "MILLRACE_ORCHESTRATOR_PORT": "tcp://10.0.0.1:50051",
        "MILLRACE_ORCHESTRATOR_SERVICE_HOST": "10.0.0.1",
        "MILLRACE_REDIS_PORT_6379_TCP_ADDR": "10.0.0.2",
    }
    assert Settings.from_env(others) == Settings.from_env({})


def test_an_empty_variable_counts_as_absent() -> None:
    assert Settings.from_env({"MILLRACE_REDIS_URL": ""}).redis_url is None
    assert "is not set" in violations({"MILLRACE_REDIS_URL": ""}, ("redis_url",))["MILLRACE_REDIS_URL"]


def test_required_must_name_a_setting() -> None:
    with pytest.raises(ValueError, match="MILLRACE_RADIS_URL"):
        Settings.from_env({}, required=["radis_url"])


def test_require_names_the_variable() -> None:
    assert Settings(listen="h:1").require("listen") == "h:1"
    with pytest.raises(InvalidSpecError, match="MILLRACE_STORE_URL: is not set"):
        Settings().require("store_url")


def test_to_environ_gives_a_child_the_same_settings() -> None:
    settings = Settings(redis_url="redis://h:1", listen="127.0.0.1:0", log_json=True, drain_s=0.0)
    assert Settings.from_env(settings.to_environ()) == settings


@pytest.mark.parametrize("text", ["", "host", "host:", ":1", "host:70000", "http://h:1", "::1:50051", "a b:1", "h:1/"])
def test_parse_address_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        parse_address(text)


def test_parse_address_splits() -> None:
    assert parse_address("[::1]:50051") == ("[::1]", 50051)
    assert parse_address("cache-0.cache:6379") == ("cache-0.cache", 6379)
