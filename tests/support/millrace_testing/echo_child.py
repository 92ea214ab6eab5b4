"""A child that sends back what it gets: `ChildLink.start("millrace_testing.echo_child", order)`."""

import os
import subprocess
import sys

from millrace.processes.channel import ParentLink


def main() -> None:
    parent = ParentLink()
    print("a library's own words")
    if parent.order.get("starts") == "another":
        started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        parent.send(str(started.pid).encode())
    if parent.order.get("starts") == "a reader":
        found = subprocess.run(
            [sys.executable, "-c", "import sys; print(len(sys.stdin.read()))"], stdout=subprocess.PIPE
        )
        parent.send(found.stdout)
    while (data := parent.receive(most=1 << 24)) is not None:
        parent.send(data)
    os._exit(int(parent.order.get("code", 0)))


if __name__ == "__main__":
    main()
