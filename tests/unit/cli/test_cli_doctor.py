"""`millrace doctor` says of each part whether it is fit, and what to do if not."""

import json
from pathlib import Path

import pytest

from millrace.cli.doctor import FIGURES, figures_table
from millrace.cli.main import main
from millrace.local.directory import free_ports
from millrace_testing.local.stack_files import write_stack
from millrace_testing.nvidia import fake_gpus


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
    store_url = (directory / "store").as_uri()
    write_stack(directory, f"127.0.0.1:{port}", redis_url_file=str(directory / "redis.url"), store=store_url)
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


@pytest.fixture
def kernel(monkeypatch, tmp_path) -> Path:
    """Return a directory in which the kernel shows no GPU and no driver, until a test puts them there."""
    monkeypatch.setattr("millrace.local.gpus.DEVICE", tmp_path / "nvidia0")
    monkeypatch.setattr("millrace.local.gpus.DRIVER", tmp_path / "version")
    return tmp_path


def gpu_lines(capsys) -> list[str]:
    main(["doctor", "--server", "127.0.0.1:1"])
    lines = capsys.readouterr().out.splitlines()
    return lines[next(at for at, line in enumerate(lines) if line[8:].startswith("GPUs")) :]


def test_gpus_are_counted_and_their_driver_is_named(kernel, monkeypatch, capsys, tmp_path) -> None:
    (kernel / "nvidia0").touch()
    (kernel / "version").write_text("580.159.03\n")
    fake_gpus(monkeypatch, tmp_path, 8)
    [line] = gpu_lines(capsys)
    assert line.startswith("ok      GPUs")
    assert "8 of NVIDIA, driver 580.159.03, torch 2.13.0 (wheels of CUDA 13 need 580 or newer)" in line


@pytest.mark.parametrize(("driver", "named"), [("535.129.03\n", "driver 535.129.03"), (None, "driver unknown")])
def test_a_gpu_that_the_driver_does_not_list_is_a_failure_with_a_remedy(
    driver, named, kernel, monkeypatch, capsys, tmp_path
) -> None:
    (kernel / "nvidia0").touch()
    if driver is not None:
        (kernel / "version").write_text(driver)
    fake_gpus(monkeypatch, tmp_path, 0)
    assert main(["doctor", "--server", "127.0.0.1:1"]) == 5
    capsys.readouterr()
    line, remedy = gpu_lines(capsys)
    assert line.startswith("FAILED  GPUs") and f"the kernel shows a GPU ({named}), and nvidia-smi lists none" in line
    assert "fix the driver; wheels of CUDA 13 need 580 or newer" in remedy


@pytest.mark.parametrize("wheel", ["2.13.0", "2.13.0+cu130"])
def test_a_driver_that_is_too_old_for_the_wheel_is_a_failure(wheel, kernel, monkeypatch, capsys, tmp_path) -> None:
    (kernel / "version").write_text("575.51.03\n")
    fake_gpus(monkeypatch, tmp_path, 2, torch_version=wheel)
    line, remedy = gpu_lines(capsys)
    assert line.startswith("FAILED  GPUs") and f"2 of NVIDIA, and driver 575.51.03 is older than torch {wheel}" in line
    assert "install a newer driver (wheels of CUDA 13 need 580 or newer), or an older wheel of torch" in remedy


@pytest.mark.parametrize("wheel", ["2.13.0+cu126", "2.10.1"])
def test_an_old_driver_with_a_wheel_for_it_is_fit(wheel, kernel, monkeypatch, capsys, tmp_path) -> None:
    (kernel / "version").write_text("575.51.03\n")
    fake_gpus(monkeypatch, tmp_path, 2, torch_version=wheel)
    [line] = gpu_lines(capsys)
    assert line.startswith("ok      GPUs") and f"driver 575.51.03, torch {wheel}" in line


def test_a_wheel_for_cpus_beside_gpus_is_told(kernel, monkeypatch, capsys, tmp_path) -> None:
    (kernel / "version").write_text("580.159.03\n")
    fake_gpus(monkeypatch, tmp_path, 2, torch_version="2.13.0+cpu")
    [line] = gpu_lines(capsys)
    assert line.startswith("ok      GPUs") and "torch 2.13.0+cpu is made for CPUs: the trainer computes there" in line


def test_a_machine_without_gpus_is_fit(kernel, monkeypatch, capsys, tmp_path) -> None:
    fake_gpus(monkeypatch, tmp_path, 0)
    [line] = gpu_lines(capsys)
    assert line.startswith("ok      GPUs") and "the trainer computes on the CPU" in line


# What a run will take.

CONFIG = """
seq_len = 32000
[model]
name = "m"
[orchestrator]
batch_size = 8192
rollouts_per_example = 16
async_level = 1
[[orchestrator.env]]
id = "reverse-text"
"""
LOAD = ("--step-seconds", "600", "--replicas", "120", "--parameters", "1000")


@pytest.fixture
def planned(tmp_path, capsys):
    """Return a function that plans the config with options: exit code and what is printed."""
    (tmp_path / "rl.toml").write_text(CONFIG)

    def plan(*options: str) -> tuple[int, str]:
        code = main(["doctor", "--plan", "@", str(tmp_path / "rl.toml"), *options])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return plan


def test_a_plan_says_what_a_run_takes_and_what_breaks_first(planned) -> None:
    code, said = planned(*LOAD)
    assert code == 0 and said.startswith("8,192 rollouts of 32,000 tokens in a step of 600 s: 13.7 rollouts")
    assert "1.44 TB to 3.84 TB a step out of the store, 6.4 GB a second" in said
    assert "breaks first: policy fan-out, at 64.0% of one" in said
    code, said = planned(*LOAD, "--network-gbs", "5")
    assert code == 1 and "breaks first: policy fan-out, at 128.0% of one, it does not go" in said


def test_a_plan_as_data_follows_the_keys_of_the_config(planned) -> None:
    def ask(*options: str) -> dict[str, dict[str, float]]:
        code, said = planned(*LOAD, "--json", *options)
        assert code == 0
        return json.loads(said)["resources"]

    found = ask()
    tokens = 8192 * 32000
    assert found["store"]["bytes_per_step"] == FIGURES["store_token"].value * tokens
    assert found["store"]["bytes_per_day"] == FIGURES["store_token"].value * tokens * 144
    assert found["Redis memory"]["window_steps"] == 4
    assert ask("--orchestrator.async-level", "3")["Redis memory"]["window_steps"] == 6
    assert ask("--orchestrator.retain-batches", "8")["store"]["bytes_per_day"] < 1e6, "headers and records stay"
    slow = ask("--env-seconds", "30", "--cores", "16")["env-servers"]
    assert slow["count"] == 26 and slow["cpu_per_second"] == pytest.approx(8192 / 600 * 30.0023)


def test_what_a_plan_does_not_take_is_named(planned, capsys) -> None:
    code, said = planned("--step-seconds", "0")
    assert code != 0 and "--step-seconds must be a number above 0" in said
    code, said = planned("--orchestrator.no-such-key", "1")
    assert code != 0 and "no_such_key" in said
    assert main(["doctor", "--no-such-option"]) != 0
    assert "a config belongs to --plan" in capsys.readouterr().err
    assert main(["doctor", "--plan"]) != 0
    assert "name a config file" in capsys.readouterr().err


def test_the_docs_print_the_figures_of_plans() -> None:
    page = Path(__file__).parents[3] / "docs" / "scale.md"
    assert figures_table() in page.read_text(), "write `figures_table()` of millrace.cli.doctor into docs/scale.md"
