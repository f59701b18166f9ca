#!/usr/bin/env bash
# Checks hotkv on a GPU: runs the tests of tests/gpu, then the benchmarks of bench/gpu, and at last prints a table of all figures with
# their targets.
#
#   bench/gpu/check.sh [--part tests|speed] [--wheels DIR] [--out DIR] [--quick] [--made-up]
#
# --part PART   tests: the tests and the benchmark `first`; speed: all other benchmarks. Default: both.
# --wheels DIR  Python wheels that this machine lacks (tools/gpu_wheels.sh collects them); they go to a temporary folder.
# --out DIR     where reports.txt (each benchmark's JSON), summary.json and check.log go. Default: $OUT, or a temporary folder.
# --quick       runs a short form of each benchmark.
# --made-up     runs on a simulated device, without a GPU. Parts that need a real GPU are left out, and times are meaningless.
#
# The first two minutes show whether bytes are right and copies are fast; the rest measures details. The whole check takes at most 12
# minutes: each test file and benchmark has a time limit, so a part that hangs is ended and the next part runs. The exit status is 0
# unless a test failed or a benchmark crashed; figures that miss their targets do not change it. PYTHON: the interpreter; by default
# python3.
set -euo pipefail

ALL_SECONDS=705
MADE_UP_PATIENCE=5   # a made-up device is slow: each part gets 5 times as long, all parts together twice as long
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON:-python3}
wheels="" out=${OUT:-} quick="" made_up="" part=""

usage() { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; }

value_of() { # prints the value of option $1: the argument that follows it
  if [[ $# -lt 2 || -z $2 ]]; then
    echo "check.sh: $1 needs a folder" >&2
    exit 2
  fi
  realpath -m -- "$2"
}

while (($#)); do
  case $1 in
    --wheels) wheels=$(value_of "$@"); shift ;;
    --out) out=$(value_of "$@"); shift ;;
    --part)
      part=${2:-}
      if [[ $part != tests && $part != speed ]]; then
        echo "check.sh: --part needs tests or speed" >&2
        exit 2
      fi
      shift ;;
    --quick) quick=--quick ;;
    --made-up) made_up=--made-up ;;
    -h | --help) usage; exit 0 ;;
    *) echo "check.sh: unknown argument $1; --help lists all" >&2; exit 2 ;;
  esac
  shift
done

scratch=$(mktemp -d)
export HOTKV_FOLDER_TAG=check$$-
clear_shm() { rm -rf /dev/shm/hotkv-"$HOTKV_FOLDER_TAG"*; } # arenas of parts that were killed: the next ones need the room
trap 'rm -rf "$scratch"; clear_shm' EXIT
[[ -n $out ]] || out=$(mktemp -d -t hotkv-gpu-XXXXXX)
mkdir -p "$out"
rm -f "$out"/{reports.txt,summary.json,check.log}
cd "$root"
export PYTHONUNBUFFERED=1 PYTHONPYCACHEPREFIX=$scratch/compiled PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
export PYTHONPATH=$scratch/site:$root/proto:$root/sparse:$root/client:$root/server:$root/connector_vllm:$root
all_seconds=$ALL_SECONDS patience=1
if [[ -n $made_up ]]; then
  export HOTKV_MADE_UP_GPU=1
  all_seconds=$((2 * ALL_SECONDS)) patience=$MADE_UP_PATIENCE
fi
results=()
failed=0

say() { printf '%s\n' "$*" | tee -a "$out/check.log"; }

install_wheels() { # installs the wheels that fit this interpreter, and names the others
  local wheel
  local -a pip=("$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --no-cache-dir)
  pip+=(--root-user-action=ignore --target "$scratch/site")
  if ! "${pip[@]}" "$wheels"/*.whl >"$scratch/pip.log" 2>&1; then
    for wheel in "$wheels"/*.whl; do
      "${pip[@]}" --upgrade "$wheel" >"$scratch/pip.log" 2>&1 || say "wheel not used: ${wheel##*/}: $(tail -n 1 "$scratch/pip.log")"
    done
  fi
}

has() { # succeeds if all these modules can be imported; else says which can't, and why
  "$python" - "$@" <<'PY'
import importlib
import sys

WHEELS = {
    "torch": "torch, of the machine", "numba": "numba and llvmlite, of the machine", "cupy": "cupy-cuda12x or -cuda13x, of the machine", "grpc": "grpcio", "google.protobuf": "protobuf",
    "hotkv_proto.v1.cache_pb2": "protobuf, 5.29 or newer", "grpc_health.v1.health": "grpcio-health-checking",
    "grpc_reflection.v1alpha.reflection": "grpcio-reflection", "grpc_channelz.v1.channelz": "grpcio-channelz",
    "prometheus_client": "prometheus-client", "h11": "h11", "pydantic_settings": "pydantic-settings", "hotkv_server.daemon": "see above",
}
missing = 0
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except Exception as error:
        print(f"missing: {name} (wheel: {WHEELS.get(name, name)}): {type(error).__name__}: {str(error).splitlines()[:1]}")
        missing = 1
sys.exit(missing)
PY
}

seconds_for() { # prints the seconds that are left of the whole time, $1 at most
  local left=$((all_seconds - SECONDS)) most=$(($1 * patience))
  echo $((left < most ? (left > 1 ? left : 1) : most))
}

limited() { # runs $2... for $1 seconds at most; its output goes to the terminal and the log, its last line to last_line where it is JSON
  local limit status
  limit=$(seconds_for "$1") && shift
  set +e
  timeout --kill-after=10 "$limit" "$@" 2>&1 | tee "$scratch/output" | grep --line-buffered -v '^{'
  status=${PIPESTATUS[0]}
  set -e
  clear_shm
  cat "$scratch/output" >>"$out/check.log"
  last_line=$(tail -n 1 "$scratch/output" | grep '^{' || true)
  return "$status"
}

note() { # records result $2 of part $1, and what its exit status $3 means
  results+=("$(printf '%-32s %s' "$1" "$2")")
  [[ $3 == 0 ]] || failed=1
}

run_tests() { # runs tests/gpu/test_$1.py within $2 seconds; if there is a $3, only the tests that fit it
  local status=0 name=$1
  local -a chosen=()
  if [[ -n ${3:-} ]]; then
    chosen=(-k "$3")
    name+=", ${4:-part}"
  fi
  say "== tests/gpu/test_$1.py ($SECONDS s)"
  limited "$2" "$python" -m pytest -c /dev/null --rootdir=. --confcutdir=tests/gpu -q -ra -p no:cacheprovider --tb=short --maxfail=5 \
    -W ignore::pytest.PytestUnknownMarkWarning "${chosen[@]}" "tests/gpu/test_$1.py" || status=$?
  if ((status == 124 || status == 137)); then
    note "tests: $name" "NOT ENDED in time" "$status"
  else
    note "tests: $name" "$(tail -n 1 "$scratch/output")" "$status"
  fi
}

run_bench() { # runs bench.gpu.$1 within $2 seconds, with the arguments that follow
  local name=$1 limit=$2 status=0 begin=$SECONDS
  shift 2
  if ((all_seconds - SECONDS < 15)); then
    note "bench: $name" "left out: no time" 0
    return
  fi
  say "== bench/gpu/$name.py ($SECONDS s)"
  limited "$limit" "$python" -m "bench.gpu.$name" --json "$@" || status=$?
  # All go to one file: a lent machine may return only a few files.
  [[ -z $last_line ]] || printf '%s %s\n' "$name" "$last_line" >>"$out/reports.txt"
  case $status in
    0) note "bench: $name" "ended in $((SECONDS - begin)) s" 0 ;;
    124 | 137) note "bench: $name" "NOT ENDED in $((SECONDS - begin)) s" "$status" ;;
    *) note "bench: $name" "CRASHED with status $status: $(grep -v '^{' "$scratch/output" | tail -n 1)" "$status" ;;
  esac
}

skip() { note "$1" "left out: $2" 0; }

about() { "$python" -c "$1" 2>&1 | tail -n 1 || true; }

say "hotkv on $(uname -srm), $(date -u +%FT%TZ)"
if [[ -n $wheels ]]; then
  if compgen -G "$wheels/*.whl" >/dev/null; then install_wheels; else say "no wheels in $wheels"; fi
fi
{
  nvidia-smi --query-gpu=name,driver_version,memory.total,pcie.link.gen.max,pcie.link.width.max --format=csv,noheader 2>/dev/null || echo "no nvidia-smi"
  "$python" --version
  about 'import numpy, torch; print("numpy", numpy.__version__, "torch", torch.__version__, "for CUDA", torch.version.cuda)'
  about 'import cupy; print("cupy", cupy.__version__, "for CUDA", cupy.cuda.runtime.runtimeGetVersion())'
  echo "processors $(nproc), locked memory $(ulimit -l), $(df -h --output=size,avail,target /dev/shm | tail -n 1)"
} | tee -a "$out/check.log"

can_test="" can_serve="" has_gpu="" can_compute=""   # pytest; a server; a GPU and CuPy; the kernels of sparse decode, here or on the CPU
if has pytest | tee -a "$out/check.log"; then can_test=1; fi
if has numba grpc google.protobuf hotkv_proto.v1.cache_pb2 grpc_health.v1.health grpc_reflection.v1alpha.reflection grpc_channelz.v1.channelz \
  prometheus_client pydantic_settings uvloop h11 hotkv_server.daemon torch | tee -a "$out/check.log"; then can_serve=1; fi
if [[ -n $made_up ]]; then
  if [[ -n $can_test ]] && command -v g++ >/dev/null; then can_compute=1; fi
elif ! has cupy | tee -a "$out/check.log"; then
  can_serve=""
elif [[ $(about 'import cupy; print(cupy.cuda.runtime.getDeviceCount())') != [1-9]* ]]; then
  say "missing: a GPU that CUDA can use: $(about 'import cupy; cupy.cuda.runtime.getDeviceCount()')"
  can_serve=""
else
  has_gpu=1 can_compute=1
fi
has_torch=""
if [[ -n $can_compute ]] && has torch | tee -a "$out/check.log"; then has_torch=1; fi

wanted() { [[ -z $part || $part == "$1" ]]; }

test_if() { # runs the tests $2... if this machine has all that $1 names
  local name=$2
  wanted tests || return 0
  if [[ -n $can_test && $1 != *x* ]]; then run_tests "${@:2}"; else skip "tests: $name${5:+, $5}" "something is missing"; fi
}

bench_if() { # runs the benchmark $2... if this machine has all that $1 names
  if [[ $2 == first ]]; then wanted tests || return 0; else wanted speed || return 0; fi
  if [[ $1 != *x* ]]; then run_bench "${@:2}"; else skip "bench: $2" "something is missing"; fi
}

gpu=${has_gpu:-x} serve=${can_serve:-x} compute=${can_compute:-x} torch=${has_torch:-x}
layouts="kernel and (layouts_there_and_back or method_that_was_asked_for)"

# Limits in seconds, from what parts took on an H100 and an H200; tests/gpu/test_check.py adds them up. The first three are the first two minutes.
test_if "$gpu" semantics 35
test_if "$serve" server 40 "$layouts" "layouts"
bench_if "$serve" first 45 $quick $made_up

test_if "$gpu" runtime 20
test_if "$gpu" sparse 65
test_if "$serve" server 60 "not killed and not ($layouts)" "the rest"
test_if "$serve" server 85 "killed" "kills"

bench_if "$compute" arena 10 $quick $made_up
bench_if "$compute" sparse 20 $quick $made_up
bench_if "$torch" decode 60 $quick $made_up
bench_if "$torch" million 45 $quick $made_up
bench_if "$serve" transfer 45 --quick $made_up
bench_if "$serve" latency 35 $quick $made_up
bench_if "$compute" residency 15 $quick $made_up
bench_if "$serve" methods 45 --seconds 12 $quick $made_up
bench_if "$torch" per_token 80 $quick $made_up

say ""
say "== after $SECONDS s; reports.txt, summary.json and check.log in $out"
[[ -z $made_up ]] || say "MADE-UP DEVICE: no line below is a figure"
for result in "${results[@]}"; do say "$result"; done
"$python" -m bench.gpu.figures "$out" 2>&1 | tee -a "$out/check.log" || say "no table of figures"
exit "$failed"
