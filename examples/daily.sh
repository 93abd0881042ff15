#!/usr/bin/env bash
# Trains on one day of clicks after another with examples/daily.toml: each day loads the model of the day before,
# decays its statistics, removes expired rows, and saves its own checkpoint.
#
#   examples/daily.sh 'clicks/2026-11-19/*' 'clicks/2026-11-20/*'     # a file pattern per day
#   examples/daily.sh 'clicks/2026-11-21/*'                           # starts from the newest earlier day
#   MODELS=s3://models/clicks PREVIOUS=s3://models/clicks/2026-11-20 SERVERS=4 WORKERS=8 examples/daily.sh ...
#
# URLs are not listed: name the model of the day before as PREVIOUS.
# Safe to repeat, with more days as they come: finished days are skipped, interrupted ones resumed.
set -euo pipefail
models=${MODELS:-output/daily}
servers=${SERVERS:-2}
workers=${WORKERS:-2}
job=$(dirname "$0")/daily.toml

previous=${PREVIOUS:-}
for files in "$@"; do
    day=$(basename "${files%/*[*?[]*}") # the folder of a pattern, or else the file
    day=${day%%.*}
    if [[ -z $previous ]]; then
        for model in "$models"/*/; do # ordered by name
            [[ -d $model && $(basename "$model") < $day ]] && previous=$models/$(basename "$model")
        done
    fi
    echo "== $day, from ${previous:-nothing}"
    ps-launch --server-num "$servers" --worker-num "$workers" --log-dir "log/$day" "$job" \
        --set "data.train=$files" --set "checkpoint.dir=$models/$day" --set "checkpoint.load=$previous"
    previous=$models/$day
done
