#!/usr/bin/env bash
# Learns one day of clicks after another with examples/daily.toml: each day begins with the model of the day
# before, ages its rows, lets the expired ones go, and leaves a checkpoint of its own.
#
#   examples/daily.sh 'clicks/2026-11-19/*' 'clicks/2026-11-20/*'     # a pattern of files for each day
#   MODELS=s3://models/clicks SERVERS=4 WORKERS=8 examples/daily.sh ...
#
# Safe to repeat, with more days as they come: one that is done is passed over, one that was killed goes on.
set -euo pipefail
models=${MODELS:-output/daily}
servers=${SERVERS:-2}
workers=${WORKERS:-2}
job=$(dirname "$0")/daily.toml

previous=""
for files in "$@"; do
    day=$(basename "${files%/*[*?[]*}") # of a pattern the folder, else the file
    day=${day%%.*}
    echo "== $day"
    ps-launch --server-num "$servers" --worker-num "$workers" --log-dir "log/$day" "$job" \
        --set "data.train=$files" --set "checkpoint.dir=$models/$day" --set "checkpoint.load=$previous"
    previous=$models/$day
done
