"""Stands in for vLLM's server process: does on the launcher's channel what `host.py` and the plugin do."""

import asyncio
import os
import subprocess
import sys
import time

from millrace.inference.vllm import handover
from millrace.inference.vllm.handover import PARENT_VARIABLE
from millrace.processes.sessions import die_with_parent

die_with_parent(parent=int(os.environ.pop(PARENT_VARIABLE)))
line = handover.line()
assert line is not None
flags = line.receive()["flags"]
wrong = [{"field": name, "value": "?", "message": "is no flag"} for name in flags if name != "good"]
line.send({"violations": wrong})
if wrong:
    sys.exit(2)
told = line.receive()
if "--die" in told["argv"]:
    print("ValueError: no such model", flush=True)
    sys.exit(3)
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])  # an engine core
print("child", child.pid, flush=True)
asyncio.run(handover.take_over())
handover.ask_restart("another model")
time.sleep(600)
