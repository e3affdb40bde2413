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
# Real engines and servers on a busy machine: what fails once is run again, and named at the end if it then passes.
RERUNS := --reruns 1
FUZZ ?= 60

.DEFAULT_GOAL := help
.PHONY: help install system-packages demo test test-slow test-gpu fuzz lint format bench clean

help:  ## Show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "PYTHON=…  the Python to use (3.11 or newer)    DEVICE=cpu|cuda  which vLLM, where auto is wrong"
	@echo "DEMO='--tokens 4000'  options of kvtier demo    PYTEST='-k disk'  options of pytest"
	@echo "FUZZ=600  how many seconds make fuzz takes for each of its programs"

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvtier needs Python 3.11 or newer: make PYTHON=…")'
	$(PYTHON) -m venv $(VENV)
	@$(BIN)/python tools/pip_install.py "pip" --upgrade pip
	@touch $@

$(VENV)/.kvtier: $(VENV)/.python pyproject.toml
	@$(BIN)/python tools/pip_install.py "kvtier with its tests and tools" -e '.[demo]' --group test --group lint
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

demo: install  ## Serve one long prompt four times with a real vLLM: cold, from memory, after kill -9, from disk
	@$(BIN)/kvtier demo $(DEMO)

test: install $(VENV)/.pools system-packages  ## Run the tests, real vLLM engines included
	$(BIN)/pytest -m "not slow and not gpu" $(WORKERS) $(RERUNS) $(PYTEST)

test-slow: install $(VENV)/.pools system-packages  ## Run the tests that take minutes each
	$(BIN)/pytest -m "slow and not gpu" $(RERUNS) $(PYTEST)

test-gpu: install  ## Run the tests that need a CUDA device
	$(BIN)/pytest -m gpu $(PYTEST)

$(VENV)/.fuzz: $(VENV)/.kvtier pyproject.toml
	@$(BIN)/python tools/pip_install.py "the fuzzer" --group fuzz
	@touch $@

fuzz: $(VENV)/.fuzz  ## Tell the peers' protocol random things, for FUZZ=60 seconds each; what breaks it is left in fuzz/
	@for program in frames session; do \
	  mkdir -p fuzz/corpus/$$program && \
	  $(BIN)/python -m fuzz.fuzz_$$program -max_total_time=$(FUZZ) -artifact_prefix=fuzz/$$program- \
	    -print_final_stats=1 fuzz/corpus/$$program || exit 1; \
	done

lint: $(VENV)/.kvtier  ## Check style and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/mypy $(PLUGINS:%=%/src)

format: $(VENV)/.kvtier  ## Put the code into shape
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: install $(VENV)/.pools system-packages  ## Measure; the figures are explained in benchmarks/README.md
	$(BIN)/python -m benchmarks

clean:  ## Remove .venv and everything else that was made here
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
