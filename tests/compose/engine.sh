#!/usr/bin/env bash
# A Docker engine with compose for the tests of this folder: what is there is used; on a Debian machine where we are root
# and nothing is there, Debian's engine is installed and started. Exit code 3, with the reason, where this machine can have
# none: no root, no such package, a kernel that does not let it run. Every other failure is one: exit code 1.
# `stop` ends the daemon that `start` has started, and no other; before, it removes there images of Millrace
# without a name, and build caches beyond 12 GB: without that each change of the code would leave 1 GB and more for good.
# usage: tests/compose/engine.sh start|stop
set -euo pipefail
logs=/var/log/millrace-tests
pid_file=$logs/dockerd.pid

no_engine() {
  echo "no Docker engine: $1" >&2
  exit 3
}

fail() {
  echo "tests/compose/engine.sh: $1" >&2
  exit 1
}

offered() { # PACKAGE [OPTION...]: whether the mirrors have it
  apt-cache "${@:2}" show "$1" >/dev/null 2>&1
}

start_engine() {
  command -v dockerd >/dev/null || {
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || no_engine "docker info fails, and this is no Debian machine with root"
    echo "installing Debian's docker.io"
    apt-get update -qq || echo "apt-get update failed" >&2
    offered docker.io || no_engine "the package mirrors have no docker.io"
    apt-get install -o DPkg::Lock::Timeout=300 -y -qq docker.io iptables >/dev/null || fail "docker.io does not install"
  }
  [ "$(id -u)" = 0 ] || no_engine "dockerd is not running, and only root can start it"
  mkdir -p "$logs"
  setsid dockerd >"$logs/dockerd.log" 2>&1 </dev/null &
  local pid=$!
  echo "$pid" >"$pid_file"
  for _ in $(seq 120); do
    docker info >/dev/null 2>&1 && return
    kill -0 "$pid" 2>/dev/null || break
    sleep 0.5
  done
  tail -n 20 "$logs/dockerd.log" >&2
  kill -0 "$pid" 2>/dev/null && fail "dockerd runs, and does not answer within a minute"
  rm -f "$pid_file"
  # What a container or a hardened machine says, which has root and not its rights.
  local refused='not permitted|permission denied|not supported|read-only file system|cgroup mountpoint|need to insmod'
  if tail -n 1 "$logs/dockerd.log" | grep -qiE "$refused"; then
    no_engine "the kernel does not let dockerd run"
  fi
  fail "dockerd died"
}

stop_engine() {
  local pid
  pid=$(cat "$pid_file" 2>/dev/null) || return 0
  [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = dockerd ] || {
    rm -f "$pid_file"
    return 0
  }
  local title
  for title in orchestrator env-server inference trainer; do
    timeout 60 docker image prune --force --filter "label=org.opencontainers.image.title=millrace $title" >/dev/null ||
      echo "older images of $title could not be removed: see $logs/dockerd.log" >&2
  done
  timeout 300 docker builder prune --force --keep-storage 12GB >/dev/null ||
    echo "older build caches could not be removed: see $logs/dockerd.log" >&2
  kill "$pid"
  rm -f "$pid_file"
  for _ in $(seq 120); do
    [ -d "/proc/$pid" ] || return 0
    sleep 0.5
  done
  echo "dockerd ($pid) does not end" >&2
}

add_compose() { # compose v2 and buildx from Debian trixie, without touching the system's own package lists
  local work mirror options
  [ "$(id -u)" = 0 ] && [ -r /etc/apt/sources.list.d/debian.sources ] ||
    no_engine "docker compose is missing, and this is no Debian machine with root"
  echo "adding docker compose from Debian trixie"
  work=$(mktemp -d)
  mirror=$(awk '/^URIs:/ {print $2; exit}' /etc/apt/sources.list.d/debian.sources)
  mkdir -p "$work/lists/partial" "$work/cache/archives/partial"
  echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror trixie main" >"$work/sources.list"
  options="-qq -o Dir::Etc::sourcelist=$work/sources.list -o Dir::Etc::sourceparts=/dev/null
    -o Dir::Etc::preferencesparts=/dev/null -o Dir::State::lists=$work/lists -o Dir::Cache=$work/cache
    -o APT::Sandbox::User=root"
  # shellcheck disable=SC2086 # the options are words
  {
    apt-get $options update || echo "apt-get update failed" >&2
    offered docker-compose ${options#-qq} && offered docker-buildx ${options#-qq} ||
      no_engine "docker compose is missing, and the mirror $mirror has none of Debian trixie"
    (cd "$work" && apt-get $options download docker-compose docker-buildx &&
      for package in *.deb; do dpkg -x "$package" x || exit; done) || fail "docker compose does not download"
  }
  mkdir -p "$HOME/.docker/cli-plugins"
  cp "$work"/x/usr/libexec/docker/cli-plugins/* "$HOME/.docker/cli-plugins/"
  rm -rf "$work"
}

case "${1:-start}" in
  stop) stop_engine; exit ;;
  start) ;;
  *) echo "usage: tests/compose/engine.sh start|stop" >&2; exit 2 ;;
esac
docker info >/dev/null 2>&1 || start_engine
docker compose version >/dev/null 2>&1 && docker buildx version >/dev/null 2>&1 || add_compose
docker compose version >/dev/null || fail "docker compose does not run"
if ! docker image inspect debian:bookworm-slim >/dev/null 2>&1 && ! timeout 20 docker pull --quiet debian:bookworm-slim >/dev/null 2>&1; then
  if ! command -v mmdebstrap >/dev/null; then
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null && offered mmdebstrap ||
      no_engine "base images can neither be pulled nor made: mmdebstrap is missing and cannot be had"
    apt-get install -o DPkg::Lock::Timeout=300 -y -qq mmdebstrap >/dev/null || fail "mmdebstrap does not install"
  fi
fi
