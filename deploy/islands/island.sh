#!/bin/bash
# Train one island on this machine: a laptop, or a rented node. The same command on every machine, with its own name:
#
#     bash deploy/islands/island.sh oslo deploy/islands/config.toml
#     bash deploy/islands/island.sh turin deploy/islands/config.toml --set parallel.ranks=1 --set parallel.intra=1
#
# The secret is made once and copied:
#
#     (umask 077 && openssl rand -hex 32 > secret) && scp -p secret turin.example.org:
#
# The address of an island in federation.islands is one of this machine, on a public network or a VPN. If it is that of a
# gateway that forwards its port, add --set federation.listen=0.0.0.0:29600, and give the island one rank: only the first
# one has a known port.
#
# Ctrl-C, or SIGTERM before a spot node is taken away: the island hands over what it has learned, saves and leaves; the
# others train on. The same command brings it back, after that and after a reboot. Ranks that fail start again by
# themselves.

set -euo pipefail

usage="usage: island.sh ISLAND CONFIG [--set key=value ...]"
island=${1:?$usage}
config=${2:?$usage}
shift 2

secret=${SECRET:-secret}
if [[ "$(stat -Lc %a "$secret" 2>&1)" != [46]00 ]]; then
    echo "error: $secret must be a file of mode 600, the same on all islands: openssl rand -hex 32 > $secret" >&2
    exit 2
fi

# In the place of this shell: signals reach the island once, and a second one would kill it.
exec "${PYTHON:-python}" -m atoll train "$config" --set "federation.island=$island" --set "federation.secret=$secret" \
    --set "run.folder=runs/$island" "$@"
