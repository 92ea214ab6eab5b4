"""The inference process: `python -m millrace.inference.main` or `millrace-inference`."""

import asyncio
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from millrace.errors import InvalidSpecError, MillraceError, Violation
from millrace.telemetry.logging import setup
from millrace.telemetry.settings import Settings
from millrace.telemetry.startup import without_gc


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

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> "InferenceSettings":
        """Reads the variables; InvalidSpecError lists everything that is malformed."""
        numbers = {
            "max_num_seqs": "MILLRACE_MAX_NUM_SEQS",
            "max_model_len": "MILLRACE_MAX_MODEL_LEN",
            "kv_cache_bytes": "MILLRACE_KV_CACHE_BYTES",
            "num_threads": "OMP_NUM_THREADS",
        }
        values: dict[str, int] = {}
        violations: list[Violation] = []
        for field, name in numbers.items():
            text = environ.get(name, "")
            if text.isdecimal() and int(text) > 0:
                values[field] = int(text)
            elif text:
                wrong = "must be a whole number above 0"
                violations.append(Violation(field=name, value=text, message=wrong, source="environment"))
        model = environ.get("MILLRACE_MODEL", "")
        if model and not (Path(model) / "config.json").is_file():
            wrong = "must be a directory with config.json, safetensors files and a tokenizer"
            violations.append(Violation(field="MILLRACE_MODEL", value=model, message=wrong, source="environment"))
        if violations:
            raise InvalidSpecError(violations, reason="SETTINGS_INVALID", remedy="set them right and start again")
        return cls(
            **values,
            model_dir=Path(model) if model else None,
            model_name=environ.get("MILLRACE_MODEL_NAME") or model or None,
        )


def main() -> None:
    """Serve until SIGTERM or SIGINT; exits with the code of the error that ended it."""
    try:
        own = InferenceSettings.from_env(os.environ)
        required = ["listen", "http_listen"] + ([] if own.model_dir else ["store_url", "orchestrator"])
        settings = Settings.from_env(os.environ, required=required)
        setup("inference", level=settings.log_level, json_lines=settings.log_json)
        asyncio.run(_run(settings, own))
    except MillraceError as error:
        print(f"millrace-inference: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


async def _run(settings: Settings, own: InferenceSettings) -> None:
    # torch and transformers take seconds to import: only after the settings are known to be good.
    with without_gc():
        from millrace.inference.replica import Replica

    replica = Replica(settings, own)
    await replica.run()


if __name__ == "__main__":
    main()
