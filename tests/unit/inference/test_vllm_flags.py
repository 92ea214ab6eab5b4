"""The config's keys as vLLM's flags, and the interpreter that has vLLM. vLLM's own parser: integration tests."""

import argparse
import json
import sys

import pytest

from millrace.config.sections.inference import InferenceConfig
from millrace.errors import InvalidSpecError, NotFoundError
from millrace.inference import launch_env
from millrace.inference.settings import InferenceSettings
from millrace.inference.vllm.server.host import to_argv


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    """Return a parser with one flag of each kind that vLLM's has."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--tensor-parallel-size", "-tp", type=int)
    parser.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction)
    parser.add_argument("--disable-log-stats", action="store_true")
    parser.add_argument("--enable-sleep-mode", action="store_true")
    parser.add_argument("--enable-return-routed-experts", action="store_true")
    parser.add_argument("--middleware", action="append")
    parser.add_argument("--hf-overrides", type=json.loads)
    parser.add_argument("--lora-modules", nargs="+")
    parser.add_argument("--block-size", type=int, choices=[8, 16])
    parser.add_argument("--logprobs-mode", choices=["raw_logprobs", "processed_logprobs"])
    return parser


def test_a_replica_that_shall_sleep_does_where_vllm_can(parser):
    given = {"inference.sleep_while_training": True, "inference.parallel.tp": 2}
    assert to_argv(parser, given) == (["--enable-sleep-mode", "--tensor-parallel-size=2"], [])
    assert to_argv(parser, given, can_sleep=False) == (["--tensor-parallel-size=2"], [])
    twice = {**given, "inference.vllm.enable_sleep_mode": True}
    assert "keep one of them" in to_argv(parser, twice)[1][0].message


def test_keys_become_flags(parser):
    argv, violations = to_argv(
        parser,
        {
            "inference.parallel.tp": 2,
            "inference.vllm.enable_prefix_caching": False,
            "inference.vllm.disable-log-stats": True,
            "inference.vllm.hf_overrides": {"rope_theta": 1},
            "inference.vllm.lora_modules": ["a=-1", "b=c"],
            "max_model_len": 64,
            "inference.vllm.block_size": None,
            "inference.vllm.logprobs_mode": "processed_logprobs",
        },
    )
    assert violations == []
    assert argv == [
        "--tensor-parallel-size=2",
        "--no-enable-prefix-caching",
        "--disable-log-stats",
        '--hf-overrides={"rope_theta": 1}',
        "--lora-modules",
        "a=-1",
        "b=c",
        "--max-model-len=64",
    ]
    parsed = parser.parse_args(argv)
    assert (parsed.tensor_parallel_size, parsed.enable_prefix_caching, parsed.max_model_len) == (2, False, 64)
    assert (parsed.hf_overrides, parsed.lora_modules) == ({"rope_theta": 1}, ["a=-1", "b=c"])


def test_everything_that_is_wrong_is_said_at_once(parser):
    _, violations = to_argv(
        parser,
        {
            "inference.vllm.enable_prefix_cachin": True,
            "inference.vllm.nothing_like_it_at_all": 1,
            "inference.model.max_model_len": "long",
            "inference.vllm.block_size": 7,
            "inference.vllm.host": "0.0.0.0",
            "inference.vllm.logprobs_mode": "raw_logprobs",
            "inference.vllm.tensor_parallel_size": 2,
            "inference.parallel.tp": 4,
        },
    )
    said = {violation.field: violation.message for violation in violations}
    assert list(said) == [
        "inference.vllm.enable_prefix_cachin",
        "inference.vllm.nothing_like_it_at_all",
        "inference.model.max_model_len",
        "inference.vllm.block_size",
        "inference.vllm.host",
        "inference.vllm.logprobs_mode",
        "inference.parallel.tp",
    ]
    assert said["inference.vllm.enable_prefix_cachin"].endswith("did you mean `enable_prefix_caching`?")
    assert "no such flag" in said["inference.vllm.nothing_like_it_at_all"]
    assert "invalid int value: 'long'" in said["inference.model.max_model_len"]
    assert "invalid choice: 7" in said["inference.vllm.block_size"]
    assert "set by Millrace" in said["inference.vllm.host"] and "inference.server.host" in said["inference.vllm.host"]
    assert 'only "processed_logprobs"' in said["inference.vllm.logprobs_mode"]
    assert said["inference.parallel.tp"] == "says the same as `inference.vllm.tensor_parallel_size`; keep one of them"


def test_defaults_of_the_config_leave_vllm_its_own():
    assert launch_env.vllm_flags(InferenceConfig(engine="vllm")) == {"inference.max_num_seqs": 256}
    sleeping = launch_env.vllm_flags(InferenceConfig(engine="vllm", sleep_while_training=True))
    assert sleeping == {"inference.max_num_seqs": 256, "inference.sleep_while_training": True}
    config = InferenceConfig(engine="vllm", vllm={"max-num-seqs": 8, "max_model_len": 32})
    assert launch_env.vllm_flags(config, max_model_len=64) == {
        "inference.vllm.max_num_seqs": 8,
        "inference.vllm.max_model_len": 32,
    }


def test_what_the_config_says_of_a_flag_is_found_under_every_name():
    for key in ("inference.vllm.scheduling-policy", "scheduling_policy", "inference.vllm.scheduling_policy"):
        assert launch_env.is_given("scheduling_policy", {key: "fcfs"})
    assert launch_env.is_given("tensor_parallel_size", {"inference.parallel.tp": 2})
    assert not launch_env.is_given("scheduling_policy", {"inference.vllm.scheduling_policy": None, "max_num_seqs": 2})


def test_a_tool_parser_switches_tool_choice_on():
    config = InferenceConfig.model_validate({"engine": "vllm", "model": {"tool_call_parser": "hermes"}})
    flags = launch_env.vllm_flags(config)
    assert flags["inference.model.tool_call_parser"] == "hermes"
    assert flags["inference.model.enable_auto_tool_choice"] is True
    for more in (
        {"model": {**config.model.model_dump(), "enable_auto_tool_choice": False}},
        {"vllm": {"enable-auto-tool-choice": False}},
    ):
        flags = launch_env.vllm_flags(config.model_validate({**config.model_dump(), **more}))
        assert [value for key, value in flags.items() if key.replace("-", "_").endswith("auto_tool_choice")] == [False]


def test_experts_are_recorded_by_either_engine_and_not_by_vllm_on_cpus(parser):
    flags = launch_env.vllm_flags(InferenceConfig(engine="vllm", return_routed_experts=True))
    given = {"inference.return_routed_experts": flags["inference.return_routed_experts"]}
    assert to_argv(parser, given) == (["--enable-return-routed-experts"], [])
    for asked in (given, {"inference.vllm.enable_return_routed_experts": True}, {"enable_return_routed_experts": True}):
        _, [violation] = to_argv(parser, asked, can_record=False)
        assert violation.field == next(iter(asked)) and "on CUDA only" in violation.message
    plain = launch_env.vllm_flags(InferenceConfig(engine="vllm"))
    assert "inference.return_routed_experts" not in plain
    environ = launch_env.engine_environ(InferenceConfig(engine="embedded", return_routed_experts=True))
    assert InferenceSettings.from_env(environ).return_routed_experts
    assert not InferenceSettings.from_env(
        launch_env.engine_environ(InferenceConfig(engine="embedded"))
    ).return_routed_experts
    of_variable = InferenceSettings.from_env({"MILLRACE_ENGINE": "vllm", "MILLRACE_RETURN_ROUTED_EXPERTS": "1"})
    assert of_variable.vllm_flags == {"enable_return_routed_experts": True}


def test_parsers_reach_the_embedded_engine():
    keys = {"tool_call_parser": "qwen3_xml", "reasoning_parser": "qwen3", "enable_auto_tool_choice": False}
    environ = launch_env.engine_environ(InferenceConfig.model_validate({"engine": "embedded", "model": keys}))
    own = InferenceSettings.from_env(environ)
    assert {key: getattr(own, key) for key in keys} == keys
    plain = InferenceSettings.from_env(launch_env.engine_environ(InferenceConfig(engine="embedded")))
    assert {getattr(plain, key) for key in keys} == {None}


def test_parsers_that_the_embedded_engine_has_not_are_named():
    environ = {
        "MILLRACE_TOOL_CALL_PARSER": "hermse",
        "MILLRACE_REASONING_PARSER": "kimi_k2",
        "MILLRACE_ENABLE_AUTO_TOOL_CHOICE": "maybe",
    }
    with pytest.raises(InvalidSpecError) as caught:
        InferenceSettings.from_env(environ)
    said = {one.field: one.message for one in caught.value.violations}
    assert list(said) == list(environ)
    assert (
        "hermes, llama3_json" in said["MILLRACE_TOOL_CALL_PARSER"]
        and "1 or 0" in said["MILLRACE_ENABLE_AUTO_TOOL_CHOICE"]
    )
    vllm = {**environ, "MILLRACE_ENGINE": "vllm", "MILLRACE_ENABLE_AUTO_TOOL_CHOICE": "1"}
    assert InferenceSettings.from_env(vllm).vllm_flags == {
        "tool_call_parser": "hermse",  # vLLM's own parser of flags knows its names
        "reasoning_parser": "kimi_k2",
        "enable_auto_tool_choice": True,
    }


def test_settings_of_a_vllm_replica(tmp_path):
    environ = {"MILLRACE_ENGINE": "vllm", "MILLRACE_VLLM_FLAGS": '{"max-num-seqs": 3}', "MILLRACE_MODEL": "org/name"}
    own = InferenceSettings.from_env({**environ, "MILLRACE_MAX_NUM_SEQS": "7", "MILLRACE_MAX_MODEL_LEN": "64"})
    assert (own.vllm_model, own.model_dir, own.model_name) == ("org/name", None, "org/name")
    assert own.vllm_flags == {"max-num-seqs": 3, "max_model_len": 64}, "a flag counts more than the variable"
    with pytest.raises(InvalidSpecError) as caught:
        InferenceSettings.from_env(
            {"MILLRACE_ENGINE": "vlm", "MILLRACE_VLLM_FLAGS": "[1]", "MILLRACE_MODEL": str(tmp_path)}
        )
    assert [one.field for one in caught.value.violations] == [
        "MILLRACE_ENGINE",
        "MILLRACE_MODEL",
        "MILLRACE_VLLM_FLAGS",
    ]


def test_the_interpreter_that_has_vllm(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert launch_env.engine_python("embedded", {}) == sys.executable
    with pytest.raises(NotFoundError, match=r"scripts/setup_vllm.sh"):
        launch_env.engine_python("vllm", {})
    with pytest.raises(NotFoundError, match=r"no program"):
        launch_env.engine_python("vllm", {"MILLRACE_VLLM_PYTHON": str(tmp_path)})
    python = tmp_path / ".venv-vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    assert launch_env.engine_python("vllm", {}) == str(python), "the link itself: it makes the environment"
    assert launch_env.engine_python("vllm", {"MILLRACE_VLLM_PYTHON": sys.executable}) == sys.executable


def test_what_moves_weights_behind_a_version_is_refused(parser):
    parser.add_argument("--enable-eplb", action=argparse.BooleanOptionalAction)
    parser.add_argument("--offload-backend")
    parser.add_argument("--offload-group-size", type=int)
    assert to_argv(parser, {"enable_eplb": False, "offload_backend": "uva", "offload_group_size": 0}) == ([], [])
    wrong = {"enable-eplb": True, "inference.vllm.offload_backend": "prefetch", "offload_group_size": 4}
    assert [one.field for one in to_argv(parser, wrong)[1]] == list(wrong)


def test_what_would_leave_workers_without_the_policy_is_refused(parser):
    for name in ("nnodes", "data-parallel-size", "data-parallel-rank"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--enable-lora", action=argparse.BooleanOptionalAction)
    parser.add_argument("--distributed-executor-backend")
    assert to_argv(parser, {"inference.parallel.dp": 2, "enable_lora": True, "nnodes": 1})[1] == []
    spread = {"nnodes": "2", "inference.parallel.dp": 2, "inference.vllm.enable-lora": True}
    _, violations = to_argv(parser, spread | {"distributed_executor_backend": "mp"})
    assert [(one.field, "several nodes" in one.message) for one in violations] == [
        ("inference.parallel.dp", True),
        ("inference.vllm.enable-lora", True),
    ]
    for alone in ({"distributed_executor_backend": "ray"}, {"data_parallel_rank": 1}):
        [violation] = to_argv(parser, alone)[1]
        assert violation.field in alone
