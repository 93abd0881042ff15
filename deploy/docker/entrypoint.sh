#!/bin/sh
# Numba's cache has to be writable. Where it is an empty volume, as under a read-only root, it begins as the image's.
set -e
if [ -z "$(ls -A "$NUMBA_CACHE_DIR")" ]; then
  cp -r /opt/kernels/. "$NUMBA_CACHE_DIR"
fi
exec "$@"
