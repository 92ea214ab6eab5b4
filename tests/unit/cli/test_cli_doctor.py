"""`millrace doctor` says of each part whether it is fit, and what to do if not."""

import json
import os

from millrace.cli.main import main
from millrace.local.ports import free_ports


def test_nobody_there_and_a_good_store(monkeypatch, capsys, tmp_path) -> None:
    (port,) = free_ports(1)
    monkeypatch.setenv("MILLRACE_STORE_URL", (tmp_path / "store").as_uri())
    (tmp_path / "store").mkdir()
    assert main(["doctor", "--server", f"127.0.0.1:{port}"]) == 5
    api, *rest = capsys.readouterr().out.splitlines()
    assert api.startswith("FAILED  API") and f"127.0.0.1:{port}" in api
    assert "MILLRACE_REDIS_URL is not set" in "\n".join(rest)
    assert [line for line in rest if line.startswith("ok") and "object store" in line]


def test_the_stack_that_listens_there_says_where_its_redis_and_store_are(redis_url, capsys, tmp_path) -> None:
    (port,) = free_ports(1)
    directory = tmp_path / "local"
    (directory / "store").mkdir(parents=True)
    (directory / "redis.url").write_text(redis_url)
    stack = {"address": f"127.0.0.1:{port}", "pid": os.getpid(), "redis_url_file": str(directory / "redis.url")}
    stack["store"] = (directory / "store").as_uri()
    (directory / "stack.json").write_text(json.dumps(stack))
    assert main(["doctor", "--server", f"127.0.0.1:{port}", "--dir", str(directory)]) == 5
    _, _, redis, store, gpus = capsys.readouterr().out.splitlines()
    assert redis.startswith("ok      Redis") and store.startswith("ok      object store")
    assert "GPUs" in gpus
    main(["doctor", "--server", f"localhost:{port}", "--dir", str(directory)])
    _, remedy, redis, store, _ = capsys.readouterr().out.splitlines()
    assert "a stack restarts what died" in remedy, "it is the stack of this directory that does not answer"
    assert redis.startswith("ok      Redis") and store.startswith("ok      object store")
    main(["doctor", "--server", "127.0.0.1:1", "--dir", str(directory)])
    assert f"no stack of {directory} has this address" in capsys.readouterr().out, "it is another one's"


def test_a_redis_that_evicts_is_refused(redis_url, monkeypatch, capsys) -> None:
    import redis

    client = redis.Redis.from_url(redis_url)
    before = client.config_get("maxmemory-policy")["maxmemory-policy"]
    client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        monkeypatch.setenv("MILLRACE_REDIS_URL", redis_url)
        assert main(["doctor", "--server", "127.0.0.1:1"]) == 5
    finally:
        client.config_set("maxmemory-policy", before)
    assert "evicts entries" in capsys.readouterr().out
    main(["doctor", "--server", "127.0.0.1:1"])
    assert "noeviction, append-only file off" in capsys.readouterr().out


def test_a_redis_that_does_not_say_how_it_keeps_its_data_keeps_nothing_else_from_being_asked(
    redis_url, monkeypatch, capsys, tmp_path
) -> None:
    import redis

    client = redis.Redis.from_url(redis_url)
    client.execute_command("ACL", "SETUSER", "app", "on", ">hunter2hunter2", "~*", "+@all", "-info")
    (tmp_path / "store").mkdir()
    monkeypatch.setenv("MILLRACE_STORE_URL", (tmp_path / "store").as_uri())
    monkeypatch.setenv(
        "MILLRACE_REDIS_URL", f"redis://app:hunter2hunter2@{redis_url.rpartition('@')[2].removeprefix('redis://')}"
    )
    try:
        main(["doctor", "--server", "127.0.0.1:1"])
    finally:
        client.execute_command("ACL", "DELUSER", "app")
    said = capsys.readouterr().out
    assert "does not say how it keeps its data" in said and "hunter2" not in said
    assert "ok      object store" in said
