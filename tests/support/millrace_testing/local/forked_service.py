"""A service whose process is forked: says who it is, then does what WHAT says."""

import atexit
import ctypes
import json
import os
import random
import sys
import threading
import time


def main() -> int:
    seen = {"pid": os.getpid(), "argv": sys.argv, "who": os.environ.get("WHO"), "dice": random.random()}
    seen |= {"session": os.getsid(0), "left": "OF_SERVER" in os.environ, "has_wave": "wave" in sys.modules}
    print(json.dumps(seen), flush=True)
    match os.environ["WHAT"].split():
        case ["exit", code]:
            return int(code)
        case ["goodbyes"]:
            atexit.register(print, "of an exit handler")
            threading.Timer(0.2, print, ["of a thread"]).start()
            ctypes.CDLL(None).printf(b"of a library\n")
            return 0
        case ["raise"]:
            raise RuntimeError("as asked")
    time.sleep(600)
    return 0
