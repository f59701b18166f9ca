#!/usr/bin/env bash
# Collects in DIR the wheels that bench/gpu/check.sh needs on a machine without a network: CPython 3.12, Linux, x86-64.
# Leaves out torch, CuPy, numpy and numba, because the machine must have these already. The environment variable PIP
# names the pip to use; by default the pip of python3.
set -euo pipefail

LIMIT_MIB=40   # often only some MiB can be copied to such a machine, and the source code must be copied too
PACKAGES=(
  "grpcio>=1.71.2" "protobuf>=5.29" "grpcio-health-checking>=1.71.2" "grpcio-reflection>=1.71.2" "grpcio-channelz>=1.71.2"
  "prometheus-client>=0.20" "pydantic>=2.8" "pydantic-settings>=2.6" "uvloop>=0.20" "h11>=0.14" "orjson>=3.10" "rich>=13.7"
  "pytest>=8.0"
)

if [[ $# -ne 1 || $1 == -* ]]; then
  echo "usage: tools/gpu_wheels.sh DIR" >&2
  exit 2
fi
read -r -a pip <<<"${PIP:-python3 -m pip}"
platforms=()
for tag in manylinux_2_{39,38,37,36,35,34,31,28,27,24,17}_x86_64 manylinux2014_x86_64 manylinux1_x86_64; do
  platforms+=(--platform "$tag")
done
mkdir -p "$1"
# Removes wheels of an earlier run: DIR must not have two versions of a package.
rm -f "$1"/*.whl
"${pip[@]}" download --quiet --only-binary=:all: --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none \
  "${platforms[@]}" --dest "$1" "${PACKAGES[@]}"
du --apparent-size -ch "$1"/*.whl
total_bytes=$(cat "$1"/*.whl | wc -c)
if ((total_bytes > LIMIT_MIB << 20)); then
  echo "gpu_wheels: more than $LIMIT_MIB MiB: some machines take no more" >&2
  exit 1
fi
