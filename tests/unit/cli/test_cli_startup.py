"""`millrace --help` is quick because it imports nothing heavy, and says what there is."""

import resource
import subprocess
import sys

import pytest

HEAVY = ("torch", "grpc", "pydantic", "rich", "google.protobuf", "numpy", "transformers", "redis")
PROBE = """
import sys
from millrace.cli.main import main
code = main(["--help"])
loaded = sorted(name for name in {heavy!r} if name in sys.modules)
print("LOADED", loaded, "CODE", code, file=sys.stderr)
"""


def test_help_imports_nothing_heavy():
    done = subprocess.run(
        [sys.executable, "-c", PROBE.format(heavy=HEAVY)], capture_output=True, text=True, timeout=60, check=True
    )
    assert "LOADED [] CODE 0" in done.stderr
    for command in ("rl", "sft", "up", "run", "version"):
        assert f"\n  {command} " in done.stdout


def test_help_is_quick():
    # CPU seconds, which other tests at the same time change little; 0.15 on an idle machine.
    times_s = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "millrace.cli", "--help"], capture_output=True, timeout=60, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times_s.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    print(f"millrace --help: best of 3 {min(times_s) * 1000:.0f} ms of CPU")
    assert min(times_s) < 0.6


def run(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "millrace.cli", *arguments], capture_output=True, text=True, timeout=60, **options
    )


def test_unknown_command_suggests():
    done = run("rnu")
    assert done.returncode == 2
    assert "no command 'rnu'; did you mean 'run'?" in done.stderr


def test_unknown_option_of_a_command():
    done = run("run", "list", "--colour")
    assert done.returncode == 2
    assert "--colour" in done.stderr and "millrace run list --help" in done.stderr


def test_help_of_rl_names_its_options():
    done = run("rl", "--help")
    assert done.returncode == 0
    for option in ("--server", "--dry-run", "--plain", "@ FILE"):
        assert option in done.stdout


def test_version():
    done = run("version")
    assert done.returncode == 0 and done.stdout.startswith("millrace 0.")


@pytest.mark.computes
def test_nobody_at_the_server_names_address_origin_and_remedy():
    done = run("run", "list", "--server", "127.0.0.1:1")
    assert done.returncode == 5
    assert "cannot reach the orchestrator at 127.0.0.1:1" in done.stderr
    assert "(the address is from --server)" in done.stderr and "millrace up" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.computes
def test_debug_shows_the_traceback():
    done = run("run", "list", "--server", "127.0.0.1:1", "--debug")
    assert done.returncode == 5
    assert "Traceback" in done.stderr and "reason: " in done.stderr


@pytest.mark.computes
def test_malformed_server_is_a_usage_error():
    done = run("run", "list", "--server", "nowhere")
    assert done.returncode == 2
    assert "--server: must be host:port" in done.stderr and "(got nowhere)" in done.stderr
    done = run("up", "--listen", "nowhere")
    assert done.returncode == 2 and "--listen: must be host:port" in done.stderr


def test_group_without_a_command_shows_its_help():
    done = run("run")
    assert done.returncode == 2 and "Commands:" in done.stderr and "Error" not in done.stderr


def test_rl_without_anything_says_what_to_name():
    done = run("rl")
    assert done.returncode == 2 and "@ examples/reverse_text/rl.toml" in done.stderr
