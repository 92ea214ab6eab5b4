#!/usr/bin/env bash
# The distribution's Prometheus, for the test of the Grafana dashboard; without it that part is skipped.
set -euo pipefail
command -v prometheus >/dev/null && exit 0
if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
  # Only the program: no service is started.
  apt-get update -qq && DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -qq -y --no-install-recommends prometheus ||
    echo "no prometheus: the queries of the Grafana dashboard are not tried" >&2
else
  echo "no prometheus: the queries of the Grafana dashboard are not tried (Debian: apt-get install prometheus)" >&2
fi
