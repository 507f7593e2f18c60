#!/usr/bin/env bash
# A worker with curl: claims by HTTP with long poll, prints each body, and acks.
#
#   examples/server/worker.sh http://localhost:8420 orders [COUNT]
#
# MILLPOND_TOKEN is the token, if the server needs one.
set -euo pipefail
url=$1 queue=$2 left=${3:-1000000000}
call() { # PATH JSON
  curl --silent --show-error --fail-with-body --retry 5 --retry-connrefused --max-time 90 \
    -H 'content-type: application/json' ${MILLPOND_TOKEN:+-H "authorization: Bearer $MILLPOND_TOKEN"} \
    --data "$2" "$url/api/v1/$1"
}
field() { python3 -c 'import json, sys; print(*(json.dumps(c.get(sys.argv[1])) for c in json.load(sys.stdin)["claims"]), sep="\n")' "$1"; }

while [ "$left" -gt 0 ]; do
  claims=$(call claims "{\"queues\": [\"$queue\"], \"limit\": 10, \"lease\": 30, \"wait\": 20}")
  receipts=$(field receipt <<<"$claims" | paste -sd, -)
  [ -n "$receipts" ] || continue
  field body <<<"$claims"
  call claims/ack "{\"receipts\": [$receipts]}" >/dev/null
  left=$((left - $(field id <<<"$claims" | wc -l)))
done
