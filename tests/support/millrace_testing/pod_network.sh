#!/bin/sh
# Runs a command in a network namespace like that of a pod in a cluster with IPv6 only: loopback of both families, and one
# other address, fd00::1. Exits with 77 where this machine gives no namespace, or no IPv6.
#   pod_network.sh COMMAND...
unshare --map-root-user --net true 2>/dev/null || exit 77
exec unshare --map-root-user --net sh -c '
  { ip link set lo up && ip -6 addr add fd00::1/64 dev lo nodad; } 2>/dev/null || exit 77
  exec "$@"' pod "$@"
