#!/usr/bin/env bash
# Fetches Criteo's click logs of the Display Advertising Challenge, 45.8 million rows, for the other examples.
# They go to FOLDER/train/part-* and FOLDER/test/part-*, where the jobs in examples/ expect them. Needs 4.3 GB
# for the archive and 25 GB to unpack.
#
#   examples/get_criteo.sh                 to data/criteo
#   examples/get_criteo.sh FOLDER
#
# Calling it again resumes an interrupted download. CRITEO_URL names another archive, such as
# file:///tmp/dac.tar.gz. CRITEO_SHA256 is checked if set; no checksum has been published.
#
# Criteo offers the data for non-commercial use only: CC BY-NC-SA 4.0.
set -euo pipefail

# The archive of Paddle's tutorials: raw_data/part-* and test_data/part-*. The tutorials give its size.
tutorial=https://fleet.bj.bcebos.com/ctr_data.tar.gz
tutorial_bytes=4041125592
# Criteo's own archive: train.txt, and test.txt, which has no labels and is not used.
criteo=https://go.criteo.net/criteo-research-kaggle-display-advertising-challenge-dataset.tar.gz
criteo_rows=45840617

folder=${1:-data/criteo}
unpacked=$folder/.unpacked

main() {
    if [[ -e $folder/train && -e $folder/test ]]; then
        say "$folder/train and $folder/test are there already"
        return
    fi
    [[ ! -e $folder/train && ! -e $folder/test ]] || fail "one of $folder/train and $folder/test is there: move it away"
    local program urls=("$tutorial" "$criteo")
    for program in curl tar gzip ps-data; do
        command -v "$program" >/dev/null || fail "$program is not on the PATH"
    done
    [[ -z ${CRITEO_URL:-} ]] || urls=("$CRITEO_URL")
    mkdir -p "$folder"
    local url archive
    for url in "${urls[@]}"; do
        archive=$folder/${url##*/}
        [[ -e $archive ]] || download "$url" "$archive" || continue
        check "$url" "$archive"
        unpack "$url" "$archive"
        say "training rows are in $folder/train, test rows in $folder/test; $archive can be removed"
        return
    done
    fail "could not download the archive. It is also available at
    https://ailab.criteo.com/ressources/                  (Kaggle Display Advertising Challenge dataset)
    https://www.kaggle.com/c/criteo-display-ad-challenge
Put it on this machine and call: CRITEO_URL=file:///path/of/dac.tar.gz $0 $folder
Or generate data from a known model: ps-data generate data/planted"
}

# download URL ARCHIVE: fetches, resuming a partial download; gives up on a connection that stalls.
download() {
    say "downloading $1"
    curl --fail --location --continue-at - --connect-timeout 20 --speed-limit 1000 --speed-time 60 \
        --retry 5 --output "$2.partial" "$1" || return
    mv "$2.partial" "$2"
}

# check URL ARCHIVE: the archive has the expected size and checksum, where they are known.
check() {
    local bytes
    bytes=$(wc -c <"$2")
    if [[ $1 == "$tutorial" ]] && ((bytes != tutorial_bytes)); then
        fail "$2 has $bytes bytes, expected $tutorial_bytes: remove it and try again"
    fi
    if [[ -n ${CRITEO_SHA256:-} ]]; then
        echo "$CRITEO_SHA256  $2" | sha256sum --check --quiet || fail "$2 has another SHA-256: remove it and try again"
    fi
}

# unpack URL ARCHIVE: moves rows to train/ and test/, which appear only when complete.
unpack() {
    say "unpacking $2"
    rm -rf "$unpacked"
    trap 'rm -rf "$unpacked"' EXIT
    mkdir "$unpacked"
    tar -xzf "$2" -C "$unpacked" || fail "$2 is not a sound archive: remove it and try again"
    local train test
    train=$(find "$unpacked" -name train.txt -print -quit)
    if [[ -n $train ]]; then
        check_rows "$1" "$train"
        say "splitting the rows 9:1 into training and test data"
        ps-data split "$train" --out "$unpacked/sets" --ratio 9:1 --seed 1 --rows-per-file 200000
        train=$unpacked/sets/train test=$unpacked/sets/validation
    else
        train=$(find "$unpacked" -type d -name raw_data -print -quit)
        test=$(find "$unpacked" -type d -name test_data -print -quit)
        [[ -n $train && -n $test ]] || fail "$2 has neither train.txt nor raw_data/ and test_data/"
    fi
    check_columns "$train"
    check_columns "$test"
    mv "$train" "$folder/train"
    mv "$test" "$folder/test"
}

# check_rows URL FILE: checks that Criteo's file has all of its rows.
check_rows() {
    [[ $1 == "$criteo" ]] || return 0
    local rows
    rows=$(wc -l <"$2")
    ((rows == criteo_rows)) || fail "train.txt has $rows rows, expected $criteo_rows: remove the archive, try again"
}

# check_columns FOLDER: checks that the first rows are a label, 13 numbers and 26 values.
check_columns() {
    find "$1" -name 'part-*' -print -quit | grep -q . || fail "the archive has no part-* in ${1##*/}"
    find "$1" -name 'part-*' -exec head -q -n 100 {} + |
        awk -F '\t' 'NF != 40 { exit 1 }' || fail "the rows of ${1##*/} do not have 40 columns"
}

say() { echo "== $*"; }

fail() {
    echo "get_criteo.sh: $*" >&2
    exit 1
}

main
