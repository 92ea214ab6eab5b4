"""A recipe of the public tinker-cookbook, offline. Run in .venv-tinker, in a directory with its tokenizer and data.

argv: the server's URL, `sl` or `rl`, a directory for its logs.
"""

import os
import sys

MODEL = "Qwen/Qwen3-8B"


def main(url: str, kind: str, log_path: str) -> None:
    common = {"base_url": url, "log_path": log_path, "model_name": MODEL, "save_every": 1}
    if kind == "rl":
        from tinker_cookbook.recipes import rl_loop

        loss = {"loss_fn": "importance_sampling", "batch_size": 2, "group_size": 4, "max_tokens": 16, "max_steps": 3}
        rl_loop.main(rl_loop.Config(**common, **loss))
    else:
        from tinker_cookbook.recipes import sl_loop

        sl_loop.main(sl_loop.Config(**common, batch_size=2, max_steps=4, learning_rate=3e-3))


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # the SDK's threads would go on
