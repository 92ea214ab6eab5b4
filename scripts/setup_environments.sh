#!/usr/bin/env bash
# Makes what the tests of environments need beside .venv: public task packages in .venv-environments, a directory for
# PYTHONPATH, virtual environments with public agents, .venv-agents, and other releases of verifiers, .venv-verifiers-*,
# .venv-openenv, and .venv-nemo-gym, if there is a Python 3.12. Idempotent and quick when nothing changed; 2 GB and four minutes the first time. pycosat needs a C compiler.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${MILLRACE_VENV:-.venv}/bin/python
unset PYTHONDONTWRITEBYTECODE

is_done() { # TARGET PINS
  wanted=$({ cat "$2" scripts/setup_environments.sh; "$python" --version; } | sha256sum | cut -d' ' -f1)
  [ "$(cat "$1/.millrace-setup" 2>/dev/null || true)" = "$wanted" ]
}

setup() { # TARGET PINS OPTION...
  local target=$1 pins=$2
  shift 2
  echo "Setting up $target: $(grep -c '==' "$pins") packages"
  if ! "$python" -m uv pip install --quiet "$@" --no-deps --requirement "$pins"; then
    echo "Error: the packages of $pins did not install; the messages of uv above say why (pycosat needs a C compiler)" >&2
    exit 5
  fi
  echo "$wanted" > "$target/.millrace-setup"
}

if ! is_done .venv-environments requirements/environments.txt; then
  rm -rf .venv-environments
  setup .venv-environments requirements/environments.txt --python "$python" --target .venv-environments
  "$python" -W ignore -m compileall -qq -j 0 .venv-environments || true # a file for a newer Python may refuse
fi
if ! is_done .venv-agents requirements/agents.txt; then
  rm -rf .venv-agents
  "$python" -m uv venv --quiet --python "$python" .venv-agents
  setup .venv-agents requirements/agents.txt --python .venv-agents/bin/python
fi
for release in 0.1 0.4; do
  target=.venv-verifiers-$release
  if ! is_done "$target" "requirements/verifiers-$release.txt"; then
    rm -rf "$target"
    "$python" -m uv venv --quiet --python "$python" "$target"
    setup "$target" "requirements/verifiers-$release.txt" --python "$target/bin/python"
  fi
done
if ! is_done .venv-openenv requirements/openenv.txt; then
  rm -rf .venv-openenv
  "$python" -m uv venv --quiet --python "$python" .venv-openenv
  setup .venv-openenv requirements/openenv.txt --python .venv-openenv/bin/python
fi
# 0.3.1 as a user's new environment has it: with the newest of everything else, and what the refusal of a run prints.
needed='from millrace.env_server.interpreters import needed_with; print(*(n + b for n, b in needed_with("0.3.1").items()))'
if [ ! -f .venv-verifiers-0.3/.millrace-setup ] || [ -n "$(find .venv-verifiers-0.3/.millrace-setup -mtime +0)" ]; then
  echo "Setting up .venv-verifiers-0.3: verifiers 0.3.1 and openenv with the newest of everything else"
  rm -rf .venv-verifiers-0.3
  "$python" -m uv venv --quiet --python "$python" .venv-verifiers-0.3
  # shellcheck disable=SC2046 # one word for each package
  "$python" -m uv pip install --quiet --python .venv-verifiers-0.3/bin/python 'verifiers[openenv]==0.3.1' $("$python" -c "$needed")
  touch .venv-verifiers-0.3/.millrace-setup
fi
if ! newer=$(scripts/find_python.sh 3.12); then
  echo "Left out: nemo-gym needs Python 3.12, which is not on this machine"
elif ! is_done .venv-nemo-gym requirements/nemo-gym.txt; then
  rm -rf .venv-nemo-gym
  "$python" -m uv venv --quiet --python "$newer" .venv-nemo-gym
  setup .venv-nemo-gym requirements/nemo-gym.txt --python .venv-nemo-gym/bin/python
fi
