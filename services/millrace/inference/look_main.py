"""The process, with torch, that validates a fixed model before vLLM loads it; `launcher.ModelCheck` starts it.

It answers requests for directories until its launcher is gone.
"""

import logging
import os
from pathlib import Path
from typing import NoReturn

import torch

from millrace.errors import InternalError, MillraceError
from millrace.models.served import validate_served
from millrace.processes import channel
from millrace.processes.channel import Message
from millrace.processes.lifeline import run_service
from millrace.rpc.status import to_text
from millrace.telemetry.logging import setup
from millrace.telemetry.settings import Settings

logger = logging.getLogger(__name__)


class ModelChecker:
    """Validates models, one request after the other; `beat` returns the progress of the present one."""

    def __init__(self) -> None:
        self._how_far = ""

    def answer(self, question: Message, files: list[int]) -> Message:
        """Validate the model directory that the question names; return the directory to serve and notes about it, or an
        error.

        `files` is not used.
        """
        try:
            found = validate_served(
                Path(question["directory"]),
                place=Path(question["place"]),
                needs_tokenizer=question["needs_tokenizer"],
                needs_template=question["needs_template"],
                report=self._report,
            )
        except MillraceError as error:
            return {"error": to_text(error)}
        except Exception as error:  # the process edge: the launcher raises it
            logger.exception("looking at the model failed with an unexpected error")
            failure = InternalError(f"looking at the model failed: {type(error).__name__}: {error}")
            return {"error": to_text(failure)}
        return {"directory": str(found.directory), "notes": list(found.notes)}

    def beat(self) -> Message:
        """Return how far the present validation is, as a message for the launcher."""
        return {"how_far": self._how_far}

    def _report(self, how_far: str) -> None:
        """Keep how far the present validation is, for the next `beat`."""
        self._how_far = how_far


def _serve() -> NoReturn:
    """Answer the launcher's questions about models until the launcher is gone."""
    settings = Settings.from_env(os.environ)
    setup("inference", level=settings.log_level, json_lines=settings.log_json)
    torch.set_num_threads(1)  # each tensor is looked at by one of several threads
    looker = ModelChecker()
    channel.serve(looker.answer, beat=looker.beat)


def main() -> NoReturn:
    """Run the process that validates models for the launcher, until the launcher is gone."""
    run_service(_serve)


if __name__ == "__main__":
    main()
