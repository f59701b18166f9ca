#!/usr/bin/env bash
# run.sh DIR OUT MODULE ARGUMENT...: runs a benchmark, such as bench.offloading, with the vLLM that collect.sh has collected in
# DIR. Logs of the server and of the engines go to OUT. Every 20 seconds each engine writes the Python stacks of its threads to its
# log, so that the log of an engine that hangs says where. PYTHON: the interpreter, python3 unless set.
set -euo pipefail

if [[ $# -lt 3 || $1 == -* ]]; then
  echo "usage: bench/gpu/vllm/run.sh DIR OUT MODULE [ARGUMENT...]" >&2
  exit 2
fi
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
python=${PYTHON:-python3} parts=$(realpath -- "$1") out=$(realpath -m -- "$2")
shift 2
mkdir -p "$out"
export HOTKV_FOLDER_TAG=vllm$$- VLLM_USE_FLASHINFER_SAMPLER=0 TOKENIZERS_PARALLELISM=false
site=$(mktemp -d) copier=""
clean() {
  [[ -z $copier ]] || kill "$copier" 2>/dev/null || true
  rm -rf "$site" /dev/shm/hotkv-"$HOTKV_FOLDER_TAG"*
}
trap clean EXIT
for wheel in "$parts"/*.whl; do "$python" -m zipfile -e "$wheel" "$site"; done
tar xJf "$parts/vllm.tar.xz" -C "$site"
# Without compiled files each process would compile vLLM's code anew, which takes half a minute.
"$python" -m compileall -q -j 0 "$site" >/dev/null || true
# Signal 35, because Triton has its own handlers of SIGUSR1 and SIGUSR2.
printf 'import faulthandler\nfaulthandler.register(35)\n' >"$site/sitecustomize.py"
keep_logs() { cp /dev/shm/hotkv-"$HOTKV_FOLDER_TAG"*/*.log "$out"/ 2>/dev/null || true; }
ask_stacks() { # signals the engines that this script has started: they have loaded packages of its folder
  local process
  for process in $(pgrep -f 'VLLM::EngineCore|demo.watched_process'); do
    if grep -q "$site" "/proc/$process/maps" 2>/dev/null; then kill -35 "$process" || true; fi
  done
}
(for ((second = 1; ; second++)); do
  sleep 1
  keep_logs
  ((second % 20)) || ask_stacks
done) &
copier=$!
cd "$root"
PYTHONPATH=$site:$root/proto:$root/sparse:$root/client:$root/server:$root/connector_vllm:$root \
  "$python" -m "$@" --json 2>&1 | tee "$out/benchmark.log"
