#!/bin/sh
# Numba's cache has to be writable, by nobody else. Where its volume is empty, as under a read-only root, it begins as
# the image's.
set -e
mkdir -p -m 700 "$NUMBA_CACHE_DIR"
if [ -z "$(ls -A "$NUMBA_CACHE_DIR")" ]; then
  cp -r /opt/kernels/. "$NUMBA_CACHE_DIR"
fi
exec "$@"
