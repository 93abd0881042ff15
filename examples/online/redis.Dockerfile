# Redis from Debian; its append-only file is the stream on disk.
FROM python:3.11-slim
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends redis-server && rm -rf /var/lib/apt/lists/* \
    && install --directory --owner=10001 --group=10001 /data
USER 10001:10001
WORKDIR /data
CMD ["redis-server", "--bind", "0.0.0.0", "--protected-mode", "no", "--appendonly", "yes", "--dir", "/data"]
