"""The variables of an engine's process, from its config, and the interpreter that runs it."""

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from millrace.config.sections.inference import InferenceConfig
from millrace.errors import NotFoundError

PYTHON_VARIABLE = "MILLRACE_VLLM_PYTHON"
DEFAULT_PYTHON = Path(".venv-vllm/bin/python")
PLUGIN_NAME = "millrace"
_GPUS = ("/dev/nvidia0", "/dev/kfd")

TYPED_FLAGS: Mapping[str, str] = {
    "inference.model.max_model_len": "max_model_len",
    "inference.model.dtype": "dtype",
    "inference.model.enforce_eager": "enforce_eager",
    "inference.model.trust_remote_code": "trust_remote_code",
    "inference.model.chat_template": "chat_template",
    "inference.model.tool_call_parser": "tool_call_parser",
    "inference.model.reasoning_parser": "reasoning_parser",
    "inference.model.enable_auto_tool_choice": "enable_auto_tool_choice",
    "inference.parallel.tp": "tensor_parallel_size",
    "inference.parallel.dp": "data_parallel_size",
    "inference.max_num_seqs": "max_num_seqs",
    "inference.gpu_memory_utilization": "gpu_memory_utilization",
    "inference.sleep_while_training": "enable_sleep_mode",
    "inference.return_routed_experts": "enable_return_routed_experts",
}
"""Keys of the config that are flags of vLLM under another name."""


def is_given(flag: str, flags: Mapping[str, Any]) -> bool:
    """Return whether a flag of vLLM, such as `max_num_seqs`, is set among `flags`, which have the config's keys.

    Names with dashes and with underscores are equal; a false value counts as not set.
    """
    names = (TYPED_FLAGS.get(key) or key.rpartition(".")[2].replace("-", "_") for key, value in flags.items() if value)
    return flag in names


def vllm_flags(config: InferenceConfig, *, max_model_len: int | None = None) -> dict[str, Any]:
    """Return vLLM's flags for the config, by key of the config; a key with its default is left out, so that vLLM's
    default applies.

    `max_model_len` in tokens is used if the config has none.
    """
    model = config.model
    named = {name.replace("-", "_"): value for name, value in config.vllm.items()}
    if model.max_model_len is not None or "max_model_len" in named:
        max_model_len = model.max_model_len
    typed: dict[str, Any] = {
        "inference.model.max_model_len": max_model_len,
        "inference.model.dtype": None if model.dtype == "auto" else model.dtype,
        "inference.model.enforce_eager": model.enforce_eager or None,
        "inference.model.trust_remote_code": model.trust_remote_code or None,
        "inference.model.chat_template": model.chat_template,
        "inference.model.tool_call_parser": model.tool_call_parser,
        "inference.model.reasoning_parser": model.reasoning_parser,
        "inference.model.enable_auto_tool_choice": model.enable_auto_tool_choice,
        "inference.parallel.tp": config.parallel.tp if config.parallel.tp > 1 else None,
        "inference.parallel.dp": config.parallel.dp if config.parallel.dp > 1 else None,
        "inference.gpu_memory_utilization": config.gpu_memory_utilization,
        "inference.sleep_while_training": config.sleep_while_training or None,
        "inference.return_routed_experts": config.return_routed_experts or None,
    }
    flags = {key: value for key, value in typed.items() if value is not None}
    if "max_num_seqs" not in named:
        flags["inference.max_num_seqs"] = config.max_num_seqs
    is_chosen = model.enable_auto_tool_choice is not None or "enable_auto_tool_choice" in named
    if model.tool_call_parser is not None and not is_chosen:
        flags["inference.model.enable_auto_tool_choice"] = True
    return flags | {f"inference.vllm.{name}": value for name, value in named.items()}


def engine_environ(config: InferenceConfig, *, max_model_len: int | None = None) -> dict[str, str]:
    """Return the variables that pass `[inference]` to the engine's process, without its addresses and model.

    `max_model_len` in tokens is used if the config has none.
    """
    if config.engine == "vllm":
        flags = vllm_flags(config, max_model_len=max_model_len)
        return {"MILLRACE_ENGINE": "vllm", "MILLRACE_VLLM_FLAGS": json.dumps(flags)}
    model, auto = config.model, config.model.enable_auto_tool_choice
    given = {
        "MILLRACE_MAX_NUM_SEQS": config.max_num_seqs,
        "MILLRACE_MAX_MODEL_LEN": model.max_model_len or max_model_len,
        "MILLRACE_TOOL_CALL_PARSER": model.tool_call_parser,
        "MILLRACE_REASONING_PARSER": model.reasoning_parser,
        "MILLRACE_ENABLE_AUTO_TOOL_CHOICE": None if auto is None else int(auto),
        "MILLRACE_RETURN_ROUTED_EXPERTS": 1 if config.return_routed_experts else None,
    }
    texts = {variable: str(value) for variable, value in given.items() if value is not None}
    return {"MILLRACE_ENGINE": "embedded", **texts}


def with_engine(config: InferenceConfig, environ: Mapping[str, str]) -> InferenceConfig:
    """Return the config with the engine `auto` replaced by the one for this machine.

    vLLM is chosen if a key needs it, or if there are a GPU and an interpreter with vLLM (by `environ`); else the
    embedded engine.
    """
    if config.engine != "auto":
        return config
    is_vllm = config.needs_vllm
    if not is_vllm and any(Path(device).exists() for device in _GPUS):
        with contextlib.suppress(NotFoundError):
            is_vllm = bool(engine_python("vllm", environ))
    return config.model_copy(update={"engine": "vllm" if is_vllm else "embedded"})


def engine_python(engine: str, environ: Mapping[str, str]) -> str:
    """Return the path of the interpreter for the process of `engine` ("vllm" or "embedded"), by the variables
    `environ`.

    Raises NotFoundError with a remedy if there is none that has vLLM.
    """
    if engine != "vllm":
        return sys.executable
    named = environ.get(PYTHON_VARIABLE, "")
    if named:
        if os.access(named, os.X_OK) and not Path(named).is_dir():
            return str(Path(named).absolute())
        raise NotFoundError(
            f"{PYTHON_VARIABLE} is {named}, which is no program",
            reason="VLLM_PYTHON_NOT_FOUND",
            remedy="name the python of the environment that vLLM is installed in",
        )
    if DEFAULT_PYTHON.exists():
        return str(DEFAULT_PYTHON.absolute())  # not resolved: the link's place is what makes it an environment
    if importlib.util.find_spec("vllm") is not None:
        return sys.executable
    raise NotFoundError(
        f"there is no vLLM: {PYTHON_VARIABLE} is not set, {DEFAULT_PYTHON} does not exist in {Path.cwd()}, and "
        f"{sys.executable} cannot import vllm",
        reason="VLLM_NOT_INSTALLED",
        remedy=f"run scripts/setup_vllm.sh (CPU), or install millrace[vllm] into an environment and name its python in "
        f"{PYTHON_VARIABLE}",
    )


def vllm_environ(environ: Mapping[str, str], *, is_on_one_machine: bool = True) -> dict[str, str]:
    """Return the variables that vLLM's own processes need, beside those in `environ`; called in the interpreter with
    vLLM.

    `is_on_one_machine` sets vLLM's address to loopback, in the build for CPUs.
    """
    plugins = [name for name in environ.get("VLLM_PLUGINS", "").split(",") if name]
    own = {
        "VLLM_PLUGINS": ",".join(dict.fromkeys([*plugins, PLUGIN_NAME])),
        "VLLM_NO_USAGE_STATS": environ.get("VLLM_NO_USAGE_STATS", "1"),
    }
    if _is_cpu_build():
        # It looks for the machine's address otherwise; and two threads per process collapse throughput on shared cores.
        if is_on_one_machine:
            own["VLLM_HOST_IP"] = environ.get("VLLM_HOST_IP", "127.0.0.1")
        own["OMP_NUM_THREADS"] = environ.get("OMP_NUM_THREADS", "1")
        own["VLLM_CPU_OMP_THREADS_BIND"] = environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    return own


def _is_cpu_build() -> bool:
    """Return whether this interpreter has the build of vLLM for CPUs."""
    try:
        importlib.metadata.distribution("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
