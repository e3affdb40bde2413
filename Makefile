# Everything is installed into .venv. Stamp files in it say what is there, so that nothing is installed twice.

PYTHON ?= $(shell python3.11 -c 'import sys; print(sys.executable)' 2>/dev/null || command -v python3)
DEVICE ?= auto
VENV := .venv
BIN := $(VENV)/bin
PLUGINS := $(wildcard plugins/*)
DEMO ?=
PYTEST ?=
# One of them runs the engines, one the rest: conftest.py. PYTEST='-n0' where one test is looked at.
WORKERS := -n 2 --no-loadscope-reorder
# A safety net, and no more: what fails is run again once, and conftest.py lists it at the end, as a finding.
RERUNS := --reruns 1
FUZZ ?= 60
SOAK ?= 600
SEED ?= 1

.DEFAULT_GOAL := help
.PHONY: help install system-packages compiler demo test test-slow test-gpu fuzz soak lint docs format bench clean \
        native native-tests native-asan native-ubsan native-tsan gpu-wheels bench-gpu

help:  ## Show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "PYTHON=…  the Python to use (3.11 or newer)    DEVICE=cpu|cuda  which vLLM, where auto is wrong"
	@echo "DEMO='--tokens 4000'  options of kvtier demo    PYTEST='-k disk'  options of pytest"
	@echo "FUZZ=600  how many seconds make fuzz takes for each of its programs"
	@echo "SOAK=7200  how many seconds make soak disturbs    SEED=2  which faults and requests, and when"

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvtier needs Python 3.11 or newer: make PYTHON=…")'
	$(PYTHON) -m venv $(VENV)
	@$(BIN)/python tools/pip_install.py "pip" --upgrade pip
	@touch $@

# Built anew where the native core's sources changed: `make test` must not pass with one of yesterday.
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

install: $(VENV)/.vllm $(VENV)/.kvtier  ## Install torch, a vLLM that fits this machine, and kvtier into .venv

# Asked anew each time, in milliseconds: a stamp would outlive the packages, and silence what is missing.
system-packages: $(VENV)/.python  ## Install what the tests need of the system, or say what to type
	@$(BIN)/python tools/system_packages.py

# In place, beside the sources, and only what changed: for working on csrc/. NATIVE_PYTHON needs nanobind.
NATIVE_PYTHON ?= $(BIN)/python
NATIVE_BUILD = build/native-$(shell $(NATIVE_PYTHON) -c 'import sys; print(sys.implementation.cache_tag)')
# Not as a make below this one: that would name every folder it enters.
NATIVE_COMPILE = env -u MAKEFLAGS -u MAKELEVEL flock build nice -n 10 cmake --build

native:  ## Build the native core in place, where NATIVE_PYTHON=… has nanobind
	@$(NATIVE_PYTHON) -c 'import nanobind' 2>/dev/null || $(NATIVE_PYTHON) -m pip install -q nanobind
	@mkdir -p build && cmake -S csrc -B $(NATIVE_BUILD) -DKVTIER_IN_PLACE=ON -DKVTIER_WERROR=ON \
	  -DPython_EXECUTABLE=$(shell command -v $(NATIVE_PYTHON)) \
	  -Dnanobind_DIR=$$($(NATIVE_PYTHON) -m nanobind --cmake_dir) >$(NATIVE_BUILD).log 2>&1 \
	  || { cat $(NATIVE_BUILD).log; exit 1; }
	@$(NATIVE_COMPILE) $(NATIVE_BUILD) -j1

# The C++ tests as they are, and watched by a sanitizer each.
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

# The native core is built while kvtier is installed: what builds it must be there before.
compiler: $(VENV)/.python
	@command -v c++ >/dev/null || $(BIN)/python tools/system_packages.py g++

demo: install  ## Serve one long prompt four times with a real vLLM: cold, from memory, after kill -9, from disk
	@$(BIN)/kvtier demo $(DEMO)

test: install $(VENV)/.pools system-packages  ## Run the tests, real vLLM engines included
	$(BIN)/pytest -m "not slow and not gpu" $(WORKERS) $(RERUNS) $(PYTEST)

test-slow: install $(VENV)/.pools system-packages  ## Run the tests that take minutes each
	$(BIN)/pytest -m "slow and not gpu" $(RERUNS) $(PYTEST)

# On a machine with a GPU, torch for it, nanobind, scikit-build-core, cmake and ninja, and nothing else: no vLLM,
# no network. What kvtier needs besides comes from build/gpu-wheels, where make gpu-wheels has put it elsewhere.
GPU_PYTHON ?= $(shell command -v python3)
GPU_VENV := build/gpu-venv
GPU_PACKAGES := pytest pytest-timeout pytest-xdist hypothesis
GPU_TAG = 3.12
OFFLINE = $(if $(wildcard build/gpu-wheels/*.whl),--no-index --find-links build/gpu-wheels)

gpu-wheels:  ## Fetch what test-gpu and bench-gpu need besides torch, for a machine without network (GPU_TAG=3.12)
	@python3 tools/gpu_wheels.py build/gpu-wheels $(GPU_TAG) $(GPU_PACKAGES)

$(GPU_VENV)/.kvtier: pyproject.toml $(shell find csrc -type f)
	@$(GPU_PYTHON) -m venv --system-site-packages $(GPU_VENV)
	@$(GPU_VENV)/bin/python -m pip install -q $(OFFLINE) --no-build-isolation -e . $(GPU_PACKAGES)
	@$(GPU_VENV)/bin/python -m kvtier.native
	@touch $@

test-gpu: $(GPU_VENV)/.kvtier  ## Run the tests that need a CUDA device, with torch of GPU_PYTHON=…
	$(GPU_VENV)/bin/python -m pytest -m gpu tests/native $(PYTEST)

bench-gpu: $(GPU_VENV)/.kvtier  ## Measure copies between a GPU and the arena
	$(GPU_VENV)/bin/python -m benchmarks.gpu

$(VENV)/.fuzz: $(VENV)/.kvtier pyproject.toml
	@$(BIN)/python tools/pip_install.py "the fuzzer" --group fuzz
	@touch $@

fuzz: $(VENV)/.fuzz  ## Tell the peers' protocol random things, for FUZZ=60 seconds each; what breaks it is left in fuzz/
	@for program in frames session; do \
	  mkdir -p fuzz/corpus/$$program && \
	  $(BIN)/python -m fuzz.fuzz_$$program -max_total_time=$(FUZZ) -artifact_prefix=fuzz/$$program- \
	    -print_final_stats=1 fuzz/corpus/$$program || exit 1; \
	done

soak: install $(VENV)/.pools system-packages  ## Disturb two instances with real engines for SOAK=600 seconds
	$(BIN)/python -m soak --seconds $(SOAK) --seed $(SEED)

lint: $(VENV)/.kvtier  ## Check style, types and dependencies
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/mypy $(PLUGINS:%=%/src)
	$(BIN)/deptry kvtier
	$(BIN)/deptry tests benchmarks soak fuzz --ignore DEP002,DEP004
	@set -e; for plugin in $(PLUGINS); do (cd $$plugin && ../../$(BIN)/deptry src); done

# Needs none of kvtier's own dependencies: docstrings are read from the sources.
$(VENV)/.docs: $(VENV)/.python pyproject.toml
	@$(BIN)/python tools/pip_install.py "what builds the documentation" --group docs
	@touch $@

docs: $(VENV)/.docs  ## Build the documentation into build/site; broken links and missing docstrings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo "open build/site/index.html"

format: $(VENV)/.kvtier  ## Put the code into shape
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: install $(VENV)/.pools system-packages  ## Measure; the figures are explained in benchmarks/README.md
	$(BIN)/kvtier bench
	$(BIN)/python -m benchmarks

clean:  ## Remove .venv and everything else that was made here
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist kvtier/_native*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
