#!/usr/bin/env bash
# Start two bundled workers and a router. If a step fails, the script stops everything it started: a router must never
# start in front of workers whose caches were not cleared.
#   usage: examples/launch_fleet.sh MODEL_DIR [ROUTER_PORT]
set -euo pipefail

model=${1:?usage: $0 MODEL_DIR [ROUTER_PORT]}
router_port=${2:-30000}
worker_ports=("$((router_port + 1))" "$((router_port + 2))")
start_timeout_s=120

trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT
trap 'exit 0' INT TERM

http() { # http METHOD URL: succeeds if the status is 2xx
  python3 -c 'import sys, urllib.request as r; r.urlopen(r.Request(sys.argv[2], method=sys.argv[1]), timeout=5)' "$@" \
    2>/dev/null
}

worker_urls=()
for port in "${worker_ports[@]}"; do
  kvist serve --model "$model" --port "$port" &
  worker_urls+=("http://127.0.0.1:$port")
done

for url in "${worker_urls[@]}"; do
  deadline=$((SECONDS + start_timeout_s))
  until http GET "$url/health"; do
    ((SECONDS < deadline)) || { echo "launch_fleet: $url is not healthy after $start_timeout_s s" >&2; exit 1; }
    sleep 0.2
  done
  http POST "$url/flush_cache" || { echo "launch_fleet: $url did not clear its cache" >&2; exit 1; }
done

kvist route --worker-urls "${worker_urls[@]}" --model-path "$model" --port "$router_port" &
wait -n # when one process ends, stop all
