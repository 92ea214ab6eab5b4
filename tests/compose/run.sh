#!/usr/bin/env bash
# The compose tests with an engine of their own where none runs, which ends with them; skipped, with the reason, where this
# machine gives none, or no base images. MILLRACE_COMPOSE_REQUIRED=1, for machines that are known to, makes that a failure. When MILLRACE_COMPOSE_LIMIT is over they are interrupted, which is a failure.
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
    containers=$(docker ps --all --quiet --filter label=millrace.test) # of millrace_testing/containers.py
    # shellcheck disable=SC2086
    [ -z "$containers" ] || docker rm --force --volumes $containers >/dev/null || true
    docker volume prune --force --filter label=millrace.test >/dev/null || true
  fi
  tests/compose/engine.sh stop # which keeps the images of this run
}

trap clean EXIT
said=$(mktemp)
engine=0
tests/compose/engine.sh start 2>"$said" || engine=$?
cat "$said" >&2
MILLRACE_NO_ENGINE=$(cat "$said")
rm "$said"
case $engine in
  0) MILLRACE_NO_ENGINE= ;; # from now on a test that has no engine fails
  *) # the reason with which the tests are skipped
    [ -z "${MILLRACE_COMPOSE_REQUIRED:-}" ] || exit "$engine"
    MILLRACE_NO_ENGINE=${MILLRACE_NO_ENGINE:-tests/compose/engine.sh ended with $engine}
    ;;
esac
export MILLRACE_NO_ENGINE
# In the foreground Ctrl-C reaches pytest, which ends its own commands as it does when the time is over.
timeout --foreground --signal=INT --kill-after=120 "${MILLRACE_COMPOSE_LIMIT:-60m}" \
  "$python" -m pytest tests/compose -m compose -s -rs --durations=12 "$@"
