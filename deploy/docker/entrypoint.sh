#!/bin/sh
# Numba's cache has to be writable, by nobody else. Where its volume is empty, as under a read-only root, it begins as
# the image's.
set -e
mkdir -p -m 700 "$NUMBA_CACHE_DIR"
if [ -z "$(ls -A "$NUMBA_CACHE_DIR")" ]; then
  cp -r /opt/kernels/. "$NUMBA_CACHE_DIR"
fi
# A server above the NUM_SERVERS of a StatefulSet adds itself once it serves. It is told, too, how its last move ended,
# if it was away then. Its preStop (deploy/k8s/base/servers.yaml) ends this.
if [ "${POD_NAME##*-}" -ge "$NUM_SERVERS" ] 2>/dev/null; then
  own=$POD_IP:$PADDLE_PORT
  setsid sh -c 'until ps-cluster "$0,$1" add "$1"; do sleep 15; done' "$PADDLE_PSERVERS_IP_PORT_LIST" "$own" &
  echo $! >/tmp/adds
fi
exec "$@"
