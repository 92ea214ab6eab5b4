"""Settings of the inference service alone, beside those of every service (`telemetry.settings`)."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from millrace.config.sections.inference import EMBEDDED_PARSERS
from millrace.errors import InvalidSpecError, Violation
from millrace.inference.http.access import http_scheme
from millrace.internal.v1.worker_service_pb2 import WORKER_KIND_INFERENCE, Worker
from millrace.rpc.reach import is_wildcard
from millrace.runlog.redis.log import FORMAT_MAJOR
from millrace.telemetry.settings import join_address

_SWITCH = {"1": True, "0": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceSettings:
    """Settings of the inference service alone."""

    max_num_seqs: int = 256
    """`MILLRACE_MAX_NUM_SEQS`: requests that generate at once."""
    max_model_len: int | None = None
    """`MILLRACE_MAX_MODEL_LEN`: longest context in tokens; that of the model if not set."""
    kv_cache_bytes: int = 4 << 30
    """`MILLRACE_KV_CACHE_BYTES`: bound of the KV cache; requests wait when theirs would not fit."""
    num_threads: int = 1
    """`OMP_NUM_THREADS`: threads of torch's operators."""
    model_dir: Path | None = None
    """`MILLRACE_MODEL`: a Hugging Face directory to serve as version 0 until a run's policy replaces it."""
    model_name: str | None = None
    """`MILLRACE_MODEL_NAME`: a model name that the HTTP API answers to besides `policy`; by default MILLRACE_MODEL."""
    tool_call_parser: str | None = None
    """`MILLRACE_TOOL_CALL_PARSER`: vLLM's name of the parser of tool calls in the model's text."""
    reasoning_parser: str | None = None
    """`MILLRACE_REASONING_PARSER`: vLLM's name of the parser of reasoning in the model's text."""
    enable_auto_tool_choice: bool | None = None
    """`MILLRACE_ENABLE_AUTO_TOOL_CHOICE`: 1 or 0, whether the model may choose to call the tools of a request."""
    needs_chat_template: bool = False
    """`MILLRACE_NEEDS_CHAT_TEMPLATE`: 1 or 0, whether MILLRACE_MODEL is refused without a chat template."""
    return_routed_experts: bool = False
    """`MILLRACE_RETURN_ROUTED_EXPERTS`: 1 or 0, whether answers have the experts of their tokens."""
    engine: str = "embedded"
    """`MILLRACE_ENGINE`: embedded or vllm."""
    vllm_flags: Mapping[str, Any] = field(default_factory=dict)
    """`MILLRACE_VLLM_FLAGS`: JSON object of vLLM's flags, by their names or by keys of the config."""
    vllm_model: str | None = None
    """`MILLRACE_MODEL` where the engine is vLLM, which takes Hub ids as well."""
    vllm_start_s: float = 1800.0
    """`MILLRACE_VLLM_START_S`: seconds that vLLM has to load a model; big ones are compiled for long."""

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> "InferenceSettings":
        """Read the settings of the inference service from the variables `environ`; unset ones have their defaults.

        Raises one InvalidSpecError with all that is malformed.
        """
        numbers = {
            "max_num_seqs": "MILLRACE_MAX_NUM_SEQS",
            "max_model_len": "MILLRACE_MAX_MODEL_LEN",
            "kv_cache_bytes": "MILLRACE_KV_CACHE_BYTES",
            "num_threads": "OMP_NUM_THREADS",
            "vllm_start_s": "MILLRACE_VLLM_START_S",
        }
        values: dict[str, Any] = {}
        violations: list[Violation] = []
        for name, variable in numbers.items():
            text = environ.get(variable, "")
            if text.isdecimal() and int(text) > 0:
                values[name] = int(text)
            elif text:
                violations.append(_wrong(variable, text, "must be a whole number above 0"))
        engine = environ.get("MILLRACE_ENGINE") or "embedded"
        if engine not in ("embedded", "vllm"):
            violations.append(_wrong("MILLRACE_ENGINE", engine, "must be embedded or vllm"))
        values |= _parsers(environ, violations, engine=engine) | _switches(environ, violations)
        model = environ.get("MILLRACE_MODEL", "")
        is_path = engine != "vllm" or model.startswith((".", "/", "~")) or Path(model).is_dir()  # else a Hub id
        if model and is_path and not (Path(model) / "config.json").is_file():
            wrong = "must be a directory with config.json, safetensors files and a tokenizer"
            violations.append(_wrong("MILLRACE_MODEL", model, wrong))
        flags = _json_table(environ.get("MILLRACE_VLLM_FLAGS", ""), violations)
        if violations:
            raise InvalidSpecError(violations, reason="SETTINGS_INVALID", remedy="set them right and start again")
        return cls(
            **values,
            engine=engine,
            vllm_flags=_with_shared(flags, values),
            model_dir=Path(model) if model and engine == "embedded" else None,
            vllm_model=model if model and engine == "vllm" else None,
            model_name=environ.get("MILLRACE_MODEL_NAME") or model or None,
        )


def _wrong(variable: str, value: str, message: str) -> Violation:
    """Make the violation of a variable with that value."""
    return Violation(field=variable, value=value, message=message, source="environment")


def _parsers(environ: Mapping[str, str], violations: list[Violation], *, engine: str) -> dict[str, Any]:
    """Return the names of the parsers of the model's text that are set, by setting.

    Those that the embedded `engine` does not have are added to `violations`.
    """
    found: dict[str, Any] = {}
    for name, known in EMBEDDED_PARSERS.items():
        variable = f"MILLRACE_{name.upper()}"
        if not (text := environ.get(variable, "")):
            continue
        if engine == "embedded" and text not in known:
            violations.append(_wrong(variable, text, f"the embedded engine has {', '.join(known)}"))
        found[name] = text
    return found


def _switches(environ: Mapping[str, str], violations: list[Violation]) -> dict[str, Any]:
    """Return the switches that are set, as bools by setting; add values other than 1 and 0 to `violations`."""
    found: dict[str, Any] = {}
    for name in ("enable_auto_tool_choice", "needs_chat_template", "return_routed_experts"):
        variable = f"MILLRACE_{name.upper()}"
        if text := environ.get(variable, ""):
            if text not in _SWITCH:
                violations.append(_wrong(variable, text, "must be 1 or 0"))
            found[name] = _SWITCH.get(text)
    return found


def _json_table(text: str, violations: list[Violation]) -> dict[str, Any]:
    """Return the JSON object that is the text of MILLRACE_VLLM_FLAGS; {} for "".

    If it is none, add that to `violations` and return {}.
    """
    if not text:
        return {}
    try:
        table = json.loads(text)
    except json.JSONDecodeError as error:
        violations.append(_wrong("MILLRACE_VLLM_FLAGS", text, f"is no JSON: {error}"))
        return {}
    if not isinstance(table, dict):
        violations.append(_wrong("MILLRACE_VLLM_FLAGS", text, 'must be a JSON object, such as {"enforce_eager": true}'))
        return {}
    return table


def _with_shared(flags: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return vLLM's flags with the settings in `values` that both engines have, where no flag sets the same."""
    names = {key.rpartition(".")[2].replace("-", "_") for key in flags}
    same = ("max_num_seqs", "max_model_len", *EMBEDDED_PARSERS, "enable_auto_tool_choice")
    shared = {**{name: name for name in same}, "return_routed_experts": "enable_return_routed_experts"}
    return {flag: values[name] for name, flag in shared.items() if name in values and flag not in names} | dict(flags)


# The registration of a replica, whichever of its processes registers.


def inference_worker(worker_id: str) -> Worker:
    """Return the registration of a replica with that id, without its address."""
    return Worker(
        worker_id=worker_id,
        kind=WORKER_KIND_INFERENCE,
        min_log_format=FORMAT_MAJOR,
        max_log_format=FORMAT_MAJOR,
    )


def http_address(host: str, port: int) -> Callable[[str], str]:
    """Return a function that makes the URL of the replica's HTTP API, which ends with `/v1`, from a host.

    The URL has `host` in it, or if that is a wildcard the function's argument, the host under which others reach this
    process.
    """
    return lambda reachable: f"{http_scheme()}://{join_address(reachable if is_wildcard(host) else host, port)}/v1"
