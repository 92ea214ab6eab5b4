#!/usr/bin/env bash
# The compose tests with an engine of their own where none runs, which ends with them; skipped, with the reason, where none
# can be had. When MILLRACE_COMPOSE_LIMIT is over they are interrupted, which is a failure.
# usage: tests/compose/run.sh PYTHON [PYTEST-ARGUMENT...]
set -euo pipefail
cd "$(dirname "$0")/../.."
python=$1
shift

clean() { # what tests that were killed have left would start again with the engine
  local filter containers
  if docker info >/dev/null 2>&1; then
    for project in millracetest millraceprotected; do
      filter=label=com.docker.compose.project=$project
      containers=$(docker ps --all --quiet --filter "$filter")
      # shellcheck disable=SC2086 # ids are words
      [ -z "$containers" ] || docker rm --force --volumes $containers >/dev/null || true
      docker volume prune --force --filter "$filter" >/dev/null || true
      docker network prune --force --filter "$filter" >/dev/null || true
    done
  fi
  tests/compose/engine.sh stop
}

trap clean EXIT
tests/compose/engine.sh start || true # the tests say what is missing, and are skipped
timeout --signal=INT --kill-after=120 "${MILLRACE_COMPOSE_LIMIT:-60m}" \
  "$python" -m pytest tests/compose -m compose -s -rs --durations=12 "$@"
