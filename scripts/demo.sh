#!/usr/bin/env bash
# The whole story on one machine without a GPU: tiny model, SFT warm-up, RL on reverse-text. `make demo` calls it.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
unset PYTHONDONTWRITEBYTECODE
[ -f outputs/reverse-text/base/config.json ] || .venv/bin/python examples/reverse_text/make_model.py
.venv/bin/millrace sft @ examples/reverse_text/sft.toml
exec .venv/bin/millrace rl @ examples/reverse_text/rl.toml "$@"
