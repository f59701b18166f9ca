#!/usr/bin/env bash
# Checks hotkv on a GPU, in calls of at most nine minutes each, and prints a table of all figures
# and steps last.
#
#   bench/gpu/check.sh CALL [--bundle DIR] [--out DIR] [--rehearse] [--only STEP...] [--seconds N]
#
# CALL          1: transfers and kernels, without vLLM. 2: vLLM with its own kernels, in all
#               connectors and beside rivals; 2-small: the most valuable part of 2 alone. 3:
#               contexts in host memory, and kills. bench/gpu/calls.py has the steps.
# --bundle DIR  what this machine lacks (bench/gpu/vllm/collect.sh collects it). If DIR comes in
#               several calls, those before the last only keep their part.
# --out DIR     where check.log, reports.txt (each benchmark's JSON), summary.json and stages.json
#               go. Default: $OUT, or a temporary folder.
# --rehearse    without a GPU: a simulated device, tiny models on the CPU. Times are meaningless.
# --only STEP   those steps; --seconds N: for N seconds at most.
#
# The exit status is 0 unless a step failed; figures that miss their targets do not change it.
# PYTHON: the interpreter; by default python3. HOTKV_COMMIT: the commit, for a copy of the tree
# without its history.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON:-python3}
bundle="" out=${OUT:-}
rest=()
while (($#)); do
  case $1 in
    --bundle | --out)
      if [[ $# -lt 2 || -z $2 ]]; then
        echo "check.sh: $1 needs a folder" >&2
        exit 2
      fi
      folder=$(realpath -m -- "$2")
      if [[ $1 == --bundle ]]; then bundle=$folder; else out=$folder; fi
      shift ;;
    -h | --help) sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) rest+=("$1") ;;
  esac
  shift
done
[[ -n $out ]] || out=$(mktemp -d -t hotkv-gpu-XXXXXX)
site=${TMPDIR:-/tmp}/hotkv-bundle/site

# Once for the same bundle. Its packages are compiled: each process would else compile them anew.
unpack() {
  local parts=${site%/site}/parts number sum
  mkdir -p "$parts"
  for number in "$bundle"/[0-9]*; do
    [[ ! -e $number/part ]] || cp "$number/part" "$parts/${number##*/}"
    [[ ! -e $number/count ]] || cp "$number/count" "$parts/count"
  done
  if [[ $(find "$parts" -name '[0-9]*' | wc -l) -lt $(cat "$parts/count") ]]; then
    echo "check.sh: $(cat "$parts/count") parts of the bundle, not all here yet"
    exit 0
  fi
  sum=$(find "$parts" -name '[0-9]*' | sort -V | xargs cat | sha256sum)
  [[ ! -e $site/sum || $(cat "$site/sum") != "$sum" ]] || return 0
  rm -rf "$site"
  mkdir -p "$site"
  find "$parts" -name '[0-9]*' | sort -V | xargs cat | tar xJf - -C "$site"
  "$python" -m compileall -q -j 0 "$site" >/dev/null || true
  echo "$sum" >"$site/sum"
}

paths=$root/proto:$root/sparse:$root/client:$root/server:$root/connector_vllm:$root
if [[ -n $bundle ]]; then
  unpack
  paths=$site:$paths
fi
cd "$root"
export PATH=$PATH:/usr/local/cuda/bin # ncu and compute-sanitizer
export PYTHONPATH=$paths PYTHONUNBUFFERED=1 PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
# Of the plugins that the bundle brings, an engine loads only what a step names.
export VLLM_PLUGINS=${VLLM_PLUGINS-hotkv}
export VLLM_USE_FLASHINFER_SAMPLER=0 TOKENIZERS_PARALLELISM=false
exec "$python" -m bench.gpu.calls --out "$out" "${rest[@]}"
