#!/usr/bin/env bash
# Learns one day of clicks after another with examples/daily.toml: each day begins with the model of the day
# before, ages its rows, lets the expired ones go, and leaves a checkpoint of its own.
#
#   examples/daily.sh 'clicks/2026-11-19/*' 'clicks/2026-11-20/*'     # a pattern of files for each day
#   examples/daily.sh 'clicks/2026-11-21/*'                           # goes on from the newest day before
#   MODELS=s3://models/clicks PREVIOUS=s3://models/clicks/2026-11-20 SERVERS=4 WORKERS=8 examples/daily.sh ...
#
# A URL is not listed: name the model of the day before as PREVIOUS.
# Safe to repeat, with more days as they come: one that is done is passed over, one that was killed goes on.
set -euo pipefail
models=${MODELS:-output/daily}
servers=${SERVERS:-2}
workers=${WORKERS:-2}
job=$(dirname "$0")/daily.toml

previous=${PREVIOUS:-}
for files in "$@"; do
    day=$(basename "${files%/*[*?[]*}") # of a pattern the folder, else the file
    day=${day%%.*}
    if [[ -z $previous ]]; then
        for model in "$models"/*/; do # in the order of their names
            [[ -d $model && $(basename "$model") < $day ]] && previous=$models/$(basename "$model")
        done
    fi
    echo "== $day, from ${previous:-nothing}"
    ps-launch --server-num "$servers" --worker-num "$workers" --log-dir "log/$day" "$job" \
        --set "data.train=$files" --set "checkpoint.dir=$models/$day" --set "checkpoint.load=$previous"
    previous=$models/$day
done
