#!/usr/bin/env bash
# Trains on one day of clicks after another with examples/daily.toml: each day starts from the model of the
# previous day, ages its rows, removes the expired ones, and writes a checkpoint of its own. Prints a table with
# a line a day: each click was predicted before it was learnt, so the figures are those of tomorrow's clicks.
#
#   examples/daily.sh 'clicks/2026-11-19/*' 'clicks/2026-11-20/*'     # a pattern of files for each day
#   examples/daily.sh 'clicks/2026-11-21/*'                           # starts from the newest day before
#   MODELS=s3://models/clicks PREVIOUS=s3://models/clicks/2026-11-20 SERVERS=4 WORKERS=8 examples/daily.sh ...
#
# URLs are not listed: set PREVIOUS to the model of the previous day.
# Safe to repeat with further days: a finished day is skipped, a killed one resumes.
set -euo pipefail
models=${MODELS:-output/daily}
servers=${SERVERS:-2}
workers=${WORKERS:-2}
job=$(dirname "$0")/daily.toml

line='%-16s %12s %9s %9s %9s %12s\n'
table=("$(printf "$line" day examples 'log loss' 'base rate' AUC calibration)")
previous=${PREVIOUS:-}
for files in "$@"; do
    day=$(basename "${files%/*[*?[]*}") # the folder of a pattern, or else the file
    day=${day%%.*}
    if [[ -z $previous ]]; then
        for model in "$models"/*/; do # in order of name
            [[ -d $model && $(basename "$model") < $day ]] && previous=$models/$(basename "$model")
        done
    fi
    echo "== $day, from ${previous:-nothing}"
    result=$(ps-launch --server-num "$servers" --worker-num "$workers" --log-dir "log/$day" --json "$job" \
        --set "data.train=$files" --set "checkpoint.dir=$models/$day" --set "checkpoint.load=$previous" | tail -n 1)
    figures=$(python3 -c '
import json, sys
names = ("log_loss", "base_log_loss", "auc", "calibration")
for each in json.loads(sys.argv[1])["passes"]:  # one, or none for a day that was finished before
    print(each["examples"], *("-" if each[name] is None else f"{each[name]:.4f}" for name in names))
' "$result")
    # shellcheck disable=SC2059,SC2086
    table+=("$(printf "$line" "$day" ${figures:-- - - - -})")
    previous=$models/$day
done
printf '%s\n' "${table[@]}"
