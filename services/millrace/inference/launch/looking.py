"""A look at a fixed model before vLLM loads it, by a process with torch that ends behind it: the launcher has none."""

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from millrace.errors import InternalError
from millrace.inference.launch_env import is_given
from millrace.processes.channel import Message
from millrace.processes.helper import HelperDiedError, HelperProcess
from millrace.rpc.status import from_text
from millrace.telemetry import progress
from millrace.telemetry.progress import Doing

logger = logging.getLogger(__name__)

MODULE = "millrace.inference.launch.look_main"
_SILENT_S = 300.0  # its imports: seconds, on a machine that stands still minutes; then it beats every two seconds
_LINKS = "model"


class ModelLook:
    """A started process, which imports what it needs while vLLM does so, too. `close` ends it."""

    def __init__(self, helper: HelperProcess) -> None:
        self._helper = helper

    @classmethod
    async def start(cls, environ: Mapping[str, str]) -> Self:
        """Start it with this environment."""
        return cls(await asyncio.to_thread(HelperProcess.start, MODULE, env=environ))

    async def look(
        self, directory: Path, *, scratch: Path, flags: Mapping[str, Any], needs_template: bool, deadline_s: float
    ) -> Path:
        """Look at a model that is to be served with these flags of vLLM; the directory that vLLM shall load.

        That is one of links in `scratch`, where files lie beside the model's that vLLM would read. Raises as
        `millrace.models.served.look_at_served`, and InternalError if the look fails.
        """
        question = {
            "directory": str(directory),
            "place": str(scratch / _LINKS),
            "needs_tokenizer": not is_given("skip_tokenizer_init", flags),
            "needs_template": needs_template and not is_given("chat_template", flags),
        }
        looking = progress.work(Doing.LOAD, f"model {directory.name}", waits_on="", deadline_s=deadline_s)
        try:
            with looking as work:
                async with asyncio.timeout(deadline_s):
                    answer = await asyncio.to_thread(self._ask, question, work)
        except TimeoutError as error:
            raise _failed(f"it took more than {deadline_s:g} s") from error
        except (HelperDiedError, OSError) as error:
            raise _failed(str(error)) from error
        if "error" in answer:
            raise from_text(answer["error"], what="what is wrong with the model", reason="MODEL_LOOK_FAILED")
        for note in answer["notes"]:
            logger.warning("about the model: %s", note, extra={"model": str(directory)})
        return Path(answer["directory"])

    async def close(self) -> None:
        """End it; who waits for its answer hears that it died."""
        await asyncio.to_thread(self._helper.end)

    def _ask(self, question: Message, work: progress.LongWork) -> Message:
        def on_beat(beat: Message) -> None:
            work.detail(beat["how_far"])

        return self._helper.ask(question, silent_s=_SILENT_S, on_beat=on_beat)


def _failed(problem: str) -> InternalError:
    return InternalError(
        f"the model could not be looked at before vLLM loads it: {problem}",
        reason="MODEL_LOOK_FAILED",
        remedy="if it was killed for memory, give this machine more; if the files are slow, set MILLRACE_VLLM_START_S",
    )
