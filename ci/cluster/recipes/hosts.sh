#!/usr/bin/env bash
# hosts.sh FOLDER HOST... -- ARGS: run `specgate cluster ARGS` on hosts that ssh reaches.
# This machine is the head and runs no trials. FOLDER is the checkout on every host, with its
# environment in FOLDER/.venv. HEAD is this machine's address that the hosts reach, PORT a free port.
# Nodes end with the ssh that started them, and nothing else of Ray on a host is touched.
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
started=()
trap '[[ ${#started[@]} -eq 0 ]] || kill "${started[@]}" 2>/dev/null || true; wait' EXIT
# A port that is asked for twice is refused by Ray, so that a second run cannot join the first.
ray start --head --block --include-dashboard=false --num-cpus=0 --node-ip-address="$address" --port="$port" &
started+=($!)
node="cd '$folder' && . .venv/bin/activate && exec ray start --block --address='$address:$port'"
for host in "${hosts[@]}"; do
  # shellcheck disable=SC2016 # the host says what it offers
  ${SSH:-ssh} "$host" "$node ${NODE_OPTIONS:-} "'--resources="$(python -m ci.cluster.machine)"' &
  started+=($!)
done
until ray status --address "$address:$port" >/dev/null 2>&1; do
  kill -0 "${started[0]}" || { echo "hosts.sh: the head did not start" >&2; exit 1; }
  sleep 1
done
python -m ci.cluster --address "$address:$port" "$@"
