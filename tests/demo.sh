#!/bin/sh
# The session of docs/pack-and-ship.md, run for real. BIN is where moepack is installed.
set -eu
PATH="$(cd "$BIN" && pwd):$PATH"
model=fixtures/qwen3moe-Q4_K_M-ntfs-t6-00001-of-00006.gguf
rm -rf build/demo
mkdir -p build/demo

# run COMMAND [EXPECTED EXIT CODE]
run() {
    printf '$ %s\n' "$1"
    code=0
    sh -c "$1" 2>&1 || code=$?
    [ "$code" -eq 0 ] || printf '(exit code %d)\n' "$code"
    [ "$code" -eq "${2:-0}" ] || fail "expected exit code ${2:-0}"
}

fail() {
    printf 'The demo did not go as it should: %s.\n' "$1" >&2
    exit 1
}

run "moepack pack $model --hotness fixtures/qwen3moe-hotness.csv -o build/demo/qwen3.moepack"
run "moepack verify build/demo/qwen3.moepack --source $model"
run "moepack locate build/demo/qwen3.moepack --layer 1 --expert 3"
run "moepack restore build/demo/qwen3.moepack -o build/demo/shards"
run "for shard in build/demo/shards/*; do cmp \$shard fixtures/\${shard##*/} || exit; done"
run "printf X | dd of=build/demo/qwen3.moepack/experts-00001.bin bs=1 seek=372740 conv=notrunc status=none"
run "moepack verify build/demo/qwen3.moepack" 5
# What is left behind is a sound pack, to try other commands on.
rm -r build/demo/qwen3.moepack
moepack pack "$model" --hotness fixtures/qwen3moe-hotness.csv -o build/demo/qwen3.moepack -q \
    || fail "could not pack once more"
printf '%s\n' '# Everything went as expected: packed, verified, restored, and found the byte that was changed.'
