#!/usr/bin/env bash
# hosts.sh FOLDER HOST... -- ARGS: run `specgate cluster ARGS` on hosts that ssh reaches.
# This machine is the head and runs no trials. FOLDER is the checkout on every host, with its
# environment in FOLDER/.venv. HEAD is this machine's address that the hosts reach, PORT a free one below 10000.
# Nodes end with this script, and nothing else of Ray on a host is touched. Each run has a token of its
# own, without which nobody joins.
set -euo pipefail
folder=${1:?usage: hosts.sh FOLDER HOST... -- ARGS}
shift
hosts=()
while [[ $# -gt 0 && $1 != -- ]]; do
  hosts+=("$1")
  shift
done
[[ $# -gt 0 && ${#hosts[@]} -gt 0 ]] || { echo "usage: hosts.sh FOLDER HOST... -- ARGS" >&2; exit 2; }
shift
address="${HEAD:-$(hostname --ip-address)}"
port="${PORT:-6379}"
log=$(mktemp)
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN RAY_USAGE_STATS_ENABLED=0
RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')
ray start --head --block --include-dashboard=false --num-cpus=0 --node-ip-address="$address" --port="$port" >"$log" 2>&1 &
head=$! nodes=()
# Nodes first: each takes its leave of the head.
trap 'kill "${nodes[@]}" 2>/dev/null || true; wait "${nodes[@]}" || true; kill "$head" 2>/dev/null || true; wait || true; rm "$log"' EXIT
# A host gets the token by its standard input, and ends its node when that closes.
# shellcheck disable=SC2016 # the host says what it offers
node='read -r RAY_AUTH_TOKEN && export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
  { cat >/dev/null; kill "$$"; } <&0 & . .venv/bin/activate && exec ray start --block --resources="$(python -m ci.cluster.machine)"'
for host in "${hosts[@]}"; do
  ${SSH:-ssh} "$host" "cd '$folder' && $node --address='$address:$port' ${NODE_OPTIONS:-}" \
    < <(echo "$RAY_AUTH_TOKEN"; exec tail --pid=$$ -f /dev/null) >>"$log" 2>&1 &
  nodes+=($!)
done
until ray status --address "$address:$port" >/dev/null 2>&1; do
  kill -0 "$head" || { cat "$log" >&2; echo "hosts.sh: the head did not start" >&2; exit 1; }
  sleep 1
done
python -m ci.cluster --address "$address:$port" "$@"
