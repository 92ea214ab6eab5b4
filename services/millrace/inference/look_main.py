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
        """Validate a model directory; return the directory to serve and notes about it, or the error that refuses it.

        `files` is not used.
        """
        try:
            found = validate_served(
                Path(question["directory"]),
                place=Path(question["place"]),
                needs_tokenizer=question["needs_tokenizer"],
                needs_template=question["needs_template"],
                tell=self._tell,
            )
        except MillraceError as error:
            return {"error": to_text(error)}
        except Exception as error:  # the process edge: the launcher raises it
            logger.exception("looking at the model failed with an unexpected error")
            failure = InternalError(f"looking at the model failed: {type(error).__name__}: {error}")
            return {"error": to_text(failure)}
        return {"directory": str(found.directory), "notes": list(found.notes)}

    def beat(self) -> Message:
        """Return the progress of the present validation, as text."""
        return {"how_far": self._how_far}

    def _tell(self, how_far: str) -> None:
        self._how_far = how_far


def _serve() -> NoReturn:
    settings = Settings.from_env(os.environ)
    setup("inference", level=settings.log_level, json_lines=settings.log_json)
    torch.set_num_threads(1)  # each tensor is looked at by one of several threads
    looker = ModelChecker()
    channel.serve(looker.answer, beat=looker.beat)


def main() -> NoReturn:
    """Answer requests until the launcher is gone."""
    run_service(_serve)


if __name__ == "__main__":
    main()
