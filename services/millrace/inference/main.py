"""The inference process: `python -m millrace.inference.main` or `millrace-inference`.

MILLRACE_ENGINE chooses the engine. `embedded` runs in this process; `vllm` makes this process the launcher of a vLLM
server (`launcher.py`), in the interpreter that has vLLM, which may be another one than that it was started with.
"""

import asyncio
import importlib.util
import logging
import os
import sys
from typing import NoReturn

from millrace.errors import NotFoundError
from millrace.inference import launch_env
from millrace.inference.settings import InferenceSettings
from millrace.inference.vllm import releases
from millrace.processes.installed import may_be_untried, require_tried
from millrace.processes.lifeline import run_service
from millrace.telemetry.logging import setup
from millrace.telemetry.settings import Settings
from millrace.telemetry.startup import without_gc

logger = logging.getLogger(__name__)

_ENTERED = "MILLRACE_VLLM_ENTERED"
"""Variable with the interpreter that this program was started in again: a wrapper is not its own `sys.executable`."""


def main() -> NoReturn:
    """Serve a replica until SIGTERM or SIGINT, then exit with 0, or with the code of the error that ended it.

    With vLLM the process is first replaced by the same program in the interpreter that has vLLM.
    """
    run_service(_run, before=_choose_interpreter)


def _choose_interpreter() -> None:
    """Replace this process by one in vLLM's interpreter, if the engine is vLLM."""
    if InferenceSettings.from_env(os.environ).engine == "vllm":
        _enter_vllm_interpreter()


def _enter_vllm_interpreter() -> None:
    """Replace this process by the same program in the interpreter that has vLLM, unless this is that one.

    Raises NotFoundError if there is none.
    """
    if importlib.util.find_spec("vllm") is not None and not os.environ.get(launch_env.PYTHON_VARIABLE):
        return
    python = launch_env.engine_python("vllm", os.environ)
    # Not twice: an interpreter that does not find vLLM would replace itself for ever.
    if os.environ.pop(_ENTERED, None) != python and python != sys.executable:
        os.execve(python, [python, "-m", "millrace.inference.main"], os.environ | {_ENTERED: python})
    if importlib.util.find_spec("vllm") is None:
        raise NotFoundError(
            f"{python} cannot import vllm",
            reason="VLLM_NOT_INSTALLED",
            remedy=f"install millrace[vllm] there, or name another python in {launch_env.PYTHON_VARIABLE}",
        )


def _run() -> None:
    """Read the settings, set up the log, and serve the replica."""
    own = InferenceSettings.from_env(os.environ)
    has_model = own.model_dir or own.vllm_model
    required = ["listen", "http_listen"] + ([] if has_model else ["store_url", "orchestrator"])
    settings = Settings.from_env(os.environ, required=required)
    setup("inference", level=settings.log_level, json_lines=settings.log_json)
    asyncio.run(_serve(settings, own))


async def _serve(settings: Settings, own: InferenceSettings) -> None:
    """Run the launcher of vLLM, or the embedded engine's replica, until it is asked to end."""
    if own.engine == "vllm":
        if warning := releases.require_tried(releases.installed(), may_be_untried=may_be_untried(os.environ)):
            logger.warning(warning)
        from millrace.inference.launcher import Launcher

        await Launcher(settings, own).run()
        return
    require_tried("inference")
    # torch and transformers take seconds to import: only after the settings are known to be good.
    with without_gc():
        from millrace.inference.embedded.replica import EmbeddedReplica

    replica = EmbeddedReplica(settings, own)
    await replica.run()


if __name__ == "__main__":
    main()
