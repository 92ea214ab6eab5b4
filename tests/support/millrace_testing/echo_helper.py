"""A helper process that answers what it is asked for: `python -m millrace_testing.echo_helper`."""

import os
import time

from millrace.processes.channel import Message, serve
from millrace.processes.shared_memory import map_read_only


def answer(question: Message, files: list[int]) -> Message:
    match question["do"]:
        case "echo":
            return {"echo": question["text"]}
        case "read":
            memory = map_read_only(files[0], question["size_bytes"])
            return {"echo": bytes(memory[question["at"] : question["at"] + question["length"]]).decode()}
        case "sleep":
            time.sleep(question["seconds"])
            return {"pid": os.getpid()}
        case "exit":
            os._exit(question["code"])
    raise ValueError(question)


if __name__ == "__main__":
    serve(answer, beat=lambda: {"busy": True}, beat_s=0.2)
