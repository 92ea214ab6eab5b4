"""`millrace inference`: where its keys may be written, and what it needs before a process is started."""

import os
import sys

import pytest

from millrace.cli.errors import CliError
from millrace.cli.session import service_start
from millrace.errors import InvalidSpecError
from millrace.inference.launch_env import with_engine

BARE = 'engine = "vllm"\nmax_num_seqs = 8\n[vllm]\nenable_prefix_caching = false\n'
NAMED = '[log]\nlevel = "debug"\n[inference]\n' + BARE.replace("[vllm]", "[inference.vllm]")


@pytest.mark.parametrize("text", [BARE, NAMED])
def test_the_section_stands_alone_or_under_its_name(text, tmp_path):
    path = tmp_path / "infer.toml"
    path.write_text(text)
    flags = ["--parallel.tp", "2", "--inference.model.max-model-len=64", "--no-model.enforce-eager"]
    config = service_start.load_replica(["@", str(path), *flags], environ={}).config.inference
    assert (config.engine, config.max_num_seqs, config.vllm) == ("vllm", 8, {"enable_prefix_caching": False})
    assert (config.parallel.tp, config.model.max_model_len) == (2, 64)


def test_errors_name_the_key_and_the_place(tmp_path):
    path = tmp_path / "infer.toml"
    path.write_text("max_num_seq = 8\n")
    with pytest.raises(InvalidSpecError) as caught:
        service_start.load_replica(["@", str(path), "--parallel.tp", "0"], environ={})
    said = {one.field: (one.message, one.source) for one in caught.value.violations}
    assert "did you mean `inference.max_num_seqs`" in said["inference.max_num_seq"][0]
    assert said["inference.max_num_seq"][1] == f"{path}:1"
    assert "at least 1" in said["inference.parallel.tp"][0]


def test_vllm_keys_mean_nothing_to_the_embedded_engine():
    with pytest.raises(InvalidSpecError, match=r"inference.parallel.tp: means nothing to the embedded engine"):
        service_start.load_replica(["--engine", "embedded", "--parallel.tp", "2"], environ={})


def test_parsers_of_both_engines_and_of_vllm_alone():
    said = service_start.load_replica(
        ["--model.tool-call-parser", "qwen3_xml", "--model.reasoning-parser", "qwen3"], environ={}
    )
    assert not said.config.inference.needs_vllm, "the embedded engine has them"
    foreign = service_start.load_replica(["--model.tool-call-parser", "kimi_k2"], environ={}).config.inference
    assert foreign.needs_vllm and with_engine(foreign, {}).engine == "vllm"
    with pytest.raises(
        InvalidSpecError, match=r"inference.model.tool_call_parser: is no parser of the embedded engine"
    ):
        service_start.load_replica(["--engine", "embedded", "--model.tool-call-parser", "kimi_k2"], environ={})


def test_flags_of_vllm_serve_go_to_vllm():
    argv = ["--tensor-parallel-size", "4", "--headless", "--data-parallel-rpc-port", "13345"]
    config = service_start.load_replica(argv, environ={}).config.inference
    assert config.vllm == {"tensor-parallel-size": 4, "headless": True, "data-parallel-rpc-port": 13345}
    assert config.needs_vllm and with_engine(config, {}).engine == "vllm"
    with pytest.raises(InvalidSpecError, match=r"did you mean"):
        service_start.load_replica(["--max-num-seq", "4"], environ={})
    with pytest.raises(InvalidSpecError, match=r"keys are never in a config"):
        service_start.load_replica(["--api-key", "x"], environ={})


def test_something_to_serve_is_required():
    with pytest.raises(CliError, match=r"neither a model nor an orchestrator"):
        service_start.start_replica(service_start.load_replica(["--engine", "embedded"], environ={}), environ={})
    with pytest.raises(InvalidSpecError, match=r"does not exist"):
        named = service_start.load_replica(["--model.name", "./nowhere"], environ={})
        service_start.start_replica(named, environ={})


def test_the_process_is_replaced_by_the_service(monkeypatch, tmp_path):
    started: list[tuple[str, list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execve", lambda *arguments: started.append(arguments))
    (tmp_path / "config.json").write_text("{}")
    loaded = service_start.load_replica(["--model.name", str(tmp_path), "--server.port", "8123"], environ={})
    service_start.start_replica(loaded, environ={"MILLRACE_LISTEN": "127.0.0.1:7", "KEPT": "1"})
    [(python, argv, environ)] = started
    assert python == sys.executable and argv[1:] == ["-m", "millrace.inference.main"]
    assert environ["MILLRACE_MODEL"] == str(tmp_path) and environ["MILLRACE_ENGINE"] == "embedded"
    assert environ["MILLRACE_HTTP_LISTEN"] == "127.0.0.1:8123" and environ["MILLRACE_LISTEN"] == "127.0.0.1:7"
    assert environ["KEPT"] == "1"
