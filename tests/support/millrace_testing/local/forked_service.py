"""A service whose process is forked: says who it is, then does what WHAT says."""

import json
import os
import random
import sys
import time


def main() -> int:
    seen = {"pid": os.getpid(), "argv": sys.argv, "who": os.environ.get("WHO"), "dice": random.random()}
    seen |= {"session": os.getsid(0), "left": "OF_SERVER" in os.environ, "has_wave": "wave" in sys.modules}
    print(json.dumps(seen), flush=True)
    match os.environ["WHAT"].split():
        case ["exit", code]:
            return int(code)
        case ["raise"]:
            raise RuntimeError("as asked")
    time.sleep(600)
    return 0
