#!/usr/bin/env bash
# The compose tests with an engine of their own where none runs, which ends with them; skipped, with the reason, where none
# can be had. They are interrupted, and so clean up, when MILLRACE_COMPOSE_LIMIT is over: that is a failure.
# usage: tests/compose/run.sh PYTHON [PYTEST-ARGUMENT...]
set -euo pipefail
cd "$(dirname "$0")/../.."
python=$1
shift
trap 'tests/compose/engine.sh stop' EXIT
tests/compose/engine.sh start || true # the tests say what is missing, and are skipped
timeout --signal=INT --kill-after=120 "${MILLRACE_COMPOSE_LIMIT:-60m}" \
  "$python" -m pytest tests/compose -m compose -s -rs --durations=12 "$@"
