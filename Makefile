# Everything is installed into .venv. Stamp files there record what is installed.

PYTHON ?= $(shell python3.11 -c 'import sys; print(sys.executable)' 2>/dev/null || command -v python3)
DEVICE ?= auto
VENV := .venv
BIN := $(VENV)/bin
PLUGINS := $(wildcard plugins/*)
DEMO ?=
PYTEST ?=
# One worker runs the engines, the others the rest, which mostly waits: conftest.py. PYTEST='-n0' for a single test.
WORKERS := -n 3 --no-loadscope-reorder
# A failed test is run once more, and conftest.py lists it at the end: it is a finding even if it passes then.
RERUNS := --reruns 1
FUZZ ?= 60
SOAK ?= 600
ABUSE ?= 600
SEED ?= 1
PART ?= 1/1
WHEELS ?=

# With it, each of the hundreds of processes that the tests start would compile kvtier anew.
unexport PYTHONDONTWRITEBYTECODE

# With ISA=avx2, torch, oneDNN and vLLM (tests/rigs/vllm/instruction_set.py) use no more of the processor.
ifdef ISA
export ATEN_CPU_CAPABILITY := $(ISA)
export ONEDNN_MAX_CPU_ISA := $(if $(filter avx512,$(ISA)),AVX512_CORE_VNNI,AVX2)
endif

.DEFAULT_GOAL := help
.PHONY: help install system-packages compiler demo test test-slow test-versions test-upstream test-ray test-gpu fuzz soak abuse lint docs format bench clean \
        native native-tests native-asan native-ubsan native-tsan gpu-wheels bench-gpu wheels

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "PYTHON=…  the Python to use (3.11 or newer)    DEVICE=cpu|cuda  the vLLM to install; default: auto"
	@echo "DEMO='--tokens 4000'  options of kvtier demo    PYTEST='-k disk'  options of pytest"
	@echo "ISA=avx2|avx512  the instruction set that torch and vLLM use in tests; default: all that the CPU has"
	@echo "PART=2/6  the second of six parts of the slow tests, which together are all"
	@echo "FUZZ=600  seconds that make fuzz runs each of its programs"
	@echo "SOAK=7200  seconds that make soak injects faults    SEED=2  seed of its faults and requests, or of make abuse"
	@echo "ABUSE=60  seconds that make abuse takes"

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvtier needs Python 3.11 or newer: make PYTHON=…")'
	$(PYTHON) -m venv $(VENV)
	@$(BIN)/python tools/pip_install.py "pip" --upgrade pip
	@touch $@

# Rebuilt if sources of the native core have changed, so that `make test` never tests an old one.
$(VENV)/.kvtier: $(VENV)/.python pyproject.toml $(shell find csrc -type f) | compiler
	@$(BIN)/python tools/pip_install.py "kvtier with its tests and tools" -e '.[demo]' --group test --group lint
	@$(BIN)/python -m kvtier.native
	@touch $@

$(VENV)/.vllm: $(VENV)/.python tools/install_vllm.py
	@$(BIN)/python tools/install_vllm.py $(DEVICE)
	@touch $@

$(VENV)/.pools: $(VENV)/.vllm $(VENV)/.kvtier pyproject.toml
	@$(BIN)/python tools/pip_install.py "clients and servers of the shared pools" --group pools $(PLUGINS:%=-e %)
	@touch $@

$(VENV)/.ray: $(VENV)/.vllm $(VENV)/.kvtier pyproject.toml
	@$(BIN)/python tools/pip_install.py "Ray Serve" --group ray
	@touch $@

$(VENV)/.helm: $(VENV)/.python tools/install_helm.py
	@$(BIN)/python tools/install_helm.py
	@touch $@

install: $(VENV)/.vllm $(VENV)/.kvtier  ## Install torch, a vLLM that fits this machine, and kvtier into .venv

# Checked each time, in milliseconds: a stamp would outlive the packages, and hide missing ones.
system-packages: $(VENV)/.python  ## Install the system packages that the tests need, or print the command
	@$(BIN)/python tools/system_packages.py

# Incremental build next to the sources, for work on csrc/. NATIVE_PYTHON needs nanobind.
NATIVE_PYTHON ?= $(BIN)/python
NATIVE_BUILD = build/native-$(shell $(NATIVE_PYTHON) -c 'import sys; print(sys.implementation.cache_tag)')
# Without MAKEFLAGS, so that it is no recursive make, which would print every directory.
NATIVE_COMPILE = env -u MAKEFLAGS -u MAKELEVEL flock build cmake --build

native:  ## Build the native core in place; NATIVE_PYTHON=… must have nanobind
	@$(NATIVE_PYTHON) -c 'import nanobind' 2>/dev/null || $(NATIVE_PYTHON) -m pip install -q nanobind
	@mkdir -p build && cmake -S csrc -B $(NATIVE_BUILD) -DKVTIER_IN_PLACE=ON -DKVTIER_WERROR=ON \
	  -DPython_EXECUTABLE=$(shell command -v $(NATIVE_PYTHON)) \
	  -Dnanobind_DIR=$$($(NATIVE_PYTHON) -m nanobind --cmake_dir) >$(NATIVE_BUILD).log 2>&1 \
	  || { cat $(NATIVE_BUILD).log; exit 1; }
	@$(NATIVE_COMPILE) $(NATIVE_BUILD) -j1

# The C++ tests, without and with each sanitizer.
NATIVE_TEST = cmake -S csrc -B build/$@ -DKVTIER_PYTHON=OFF -DKVTIER_TESTS=ON -DKVTIER_WERROR=ON
NATIVE_RUN = $(NATIVE_COMPILE) build/$@ -j1 && cd build/$@ && ctest --output-on-failure

native-tests:  ## Run the C++ tests
	@$(NATIVE_TEST) >/dev/null && $(NATIVE_RUN)

native-asan:  ## Run the C++ tests with AddressSanitizer
	@$(NATIVE_TEST) -DKVTIER_SANITIZE=address >/dev/null && $(NATIVE_RUN)

native-ubsan:  ## Run the C++ tests with UndefinedBehaviorSanitizer
	@$(NATIVE_TEST) -DKVTIER_SANITIZE=undefined >/dev/null && $(NATIVE_RUN)

native-tsan:  ## Run the C++ tests with ThreadSanitizer
	@$(NATIVE_TEST) -DKVTIER_SANITIZE=thread >/dev/null && $(NATIVE_RUN)

# kvtier's installation builds the native core, so the compiler must be installed before.
compiler: $(VENV)/.python
	@command -v c++ >/dev/null || $(BIN)/python tools/system_packages.py g++

demo: install  ## Serve one long prompt four times with a real vLLM: cold, from memory, after kill -9, from disk
	@$(BIN)/kvtier demo $(DEMO)

# Incremental, and without effect if there is no compiler.
.PHONY: cuda-stand-in
cuda-stand-in: $(VENV)/.kvtier
	@! command -v c++ >/dev/null || $(BIN)/python -m tests.rigs.cuda_stand_in.building

test: install $(VENV)/.pools $(VENV)/.helm system-packages cuda-stand-in  ## Run the tests, real vLLM engines included
	$(BIN)/python tools/run_tests.py -m "not slow and not gpu" $(WORKERS) $(RERUNS) $(PYTEST)

test-slow: install $(VENV)/.pools $(VENV)/.helm system-packages  ## Run the tests that take minutes each
	$(BIN)/pytest -m "slow and not gpu" --part $(PART) $(RERUNS) $(PYTEST)

# Other versions of vLLM than that of tools/install_vllm.py.
VERSIONS ?= 0.30.0 0.31.0 0.33.0

test-versions: install $(VENV)/.pools system-packages  ## Run the tests of the connector with other versions of vLLM (VERSIONS=…)
	$(BIN)/python tools/test_versions.py $(VERSIONS) -- $(WORKERS) $(RERUNS) $(PYTEST)

test-upstream: install  ## Run vLLM's own tests of connectors, which are downloaded, with kvtier in place of theirs
	$(BIN)/python tools/test_upstream.py $(PYTEST)

test-ray: install $(VENV)/.ray  ## Run examples/ray with Ray Serve, which needs 260 MB: replicas, autoscaling, kills
	$(BIN)/pytest tests/examples/test_ray.py $(PYTEST)

# For a machine with a GPU, torch for it, nanobind, scikit-build-core, cmake and ninja, without vLLM and network.
# All other requirements come from build/gpu-wheels, which make gpu-wheels has filled on another machine.
GPU_PYTHON ?= $(shell command -v python3)
GPU_VENV := build/gpu-venv
GPU_PACKAGES := pytest pytest-timeout pytest-xdist hypothesis
GPU_TAG = 3.12
OFFLINE = $(if $(wildcard build/gpu-wheels/*.whl),--no-index --find-links build/gpu-wheels)

gpu-wheels:  ## Download what test-gpu and bench-gpu need besides torch, for a machine without network (GPU_TAG=3.12)
	@python3 tools/gpu_wheels.py build/gpu-wheels $(GPU_TAG) $(GPU_PACKAGES)

$(GPU_VENV)/.kvtier: pyproject.toml $(shell find csrc -type f)
	@$(GPU_PYTHON) -m venv --system-site-packages $(GPU_VENV)
	@$(GPU_PYTHON) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  >$$($(GPU_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/gpu_python.pth
	@$(GPU_VENV)/bin/python -m pip install -q $(OFFLINE) --no-build-isolation -e . $(GPU_PACKAGES)
	@$(GPU_VENV)/bin/python -m kvtier.native
	@touch $@

test-gpu: $(GPU_VENV)/.kvtier  ## Run the tests that need a CUDA device, with torch of GPU_PYTHON=…
	$(GPU_VENV)/bin/python -m pytest -m gpu tests/native tests/staging $(PYTEST)

bench-gpu: $(GPU_VENV)/.kvtier  ## Measure copies between a GPU and the arena
	$(GPU_VENV)/bin/python -m benchmarks.gpu

$(VENV)/.fuzz: $(VENV)/.kvtier pyproject.toml
	@$(BIN)/python tools/pip_install.py "the fuzzer" --group fuzz
	@touch $@

fuzz: $(VENV)/.fuzz  ## Fuzz the peer protocol, for FUZZ=60 seconds each; inputs that break it are kept in fuzz/
	@for program in frames session; do \
	  mkdir -p fuzz/corpus/$$program && \
	  $(BIN)/python -m fuzz.fuzz_$$program -max_total_time=$(FUZZ) -artifact_prefix=fuzz/$$program- \
	    -print_final_stats=1 fuzz/corpus/$$program || exit 1; \
	done

soak: install $(VENV)/.pools system-packages  ## Inject faults into two instances with real engines for SOAK=600 seconds
	$(BIN)/python -m soak --seconds $(SOAK) --seed $(SEED)

abuse: $(VENV)/.kvtier  ## Hostile messages, floods, kills and damaged disks against real processes for ABUSE=600 seconds
	$(BIN)/python -m abuse --seconds $(ABUSE) --seed $(SEED)

$(VENV)/.wheels: $(VENV)/.python pyproject.toml
	@$(BIN)/python tools/pip_install.py "what builds the wheels" --group wheels
	@touch $@

# Needs Python 3.11, and 3.12 or newer. With nvcc, the wheels of this architecture contain the CUDA module.
wheels: $(VENV)/.wheels  ## Build the sdist and the wheels of a release into dist; WHEELS='--arch aarch64'
	$(BIN)/python tools/build_wheels.py $(WHEELS)

lint: $(VENV)/.kvtier  ## Check style, types, dependencies, workflows and containers
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/mypy benchmarks abuse soak
	$(BIN)/mypy $(PLUGINS:%=%/src)
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/pre-commit validate-config
	$(BIN)/hadolint deploy/Containerfile
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec deploy/compose.yaml
	$(BIN)/deptry kvtier
	$(BIN)/deptry tests abuse benchmarks soak fuzz --ignore DEP002,DEP004
	@set -e; for plugin in $(PLUGINS); do (cd $$plugin && ../../$(BIN)/deptry src); done

# Without kvtier's own dependencies: docstrings are read from the sources.
$(VENV)/.docs: $(VENV)/.python pyproject.toml
	@$(BIN)/python tools/pip_install.py "what builds the documentation" --group docs
	@touch $@

docs: $(VENV)/.docs  ## Build the documentation into build/site; broken links and missing docstrings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo "open build/site/index.html"

format: $(VENV)/.kvtier  ## Format the code
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: install $(VENV)/.pools system-packages  ## Run all benchmarks, and write their results into the pages that show them
	@$(BIN)/python -m benchmarks; status=$$?; $(BIN)/python -m benchmarks.render; exit $$status

clean:  ## Remove .venv and all build results
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist kvtier/_native*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
