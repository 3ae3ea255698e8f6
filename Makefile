# All happens in .venv, made on first use with the first Python >= 3.11 found (or: make PYTHON=path).
SHELL := bash
.DEFAULT_GOAL := help
.PHONY: help env demo test test-wide test-null coverage lint format types gallery bench clean distclean

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TYPED := build/typed
# What a training step's program passes through, and what executes it: each part alone has to be covered.
COVERED := graphcomp/compiler.py graphcomp/losses.py 'passes/*' \
	$(patsubst %,'graphcomp/%/*',capture compat ir schedule collectives partition dataparallel backend runtime)
# Three workers for the two cores that this project plans for: real processes wait for each other much of the time. The
# tests of a file share what they start and compute.
# Files are dealt in the order that tests/conftest.py gives them, not by their numbers of tests.
PYTEST_ARGS ?= -n 3 --dist loadfile --no-loadscope-reorder

# One thread a process: ranks share the machine's cores, and sums come out in the same order every time.
export OMP_NUM_THREADS := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

env: $(STAMP) ## make .venv and install the package in it, with the versions of constraints.txt

$(STAMP): pyproject.toml setup.py constraints.txt
	@[ -n "$(PYTHON)" ] || { echo "Python 3.11 or newer is needed (make PYTHON=/path/to/python)"; exit 1; }
	@[ -x $(BIN)/pip ] || { echo "making $(VENV) with $(PYTHON)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing (the first time this downloads PyTorch; some minutes)"
	@$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev,hf,pretrained]'
	@touch $@

demo: $(STAMP) ## train a small GPT on real text: 2 processes, 2 pipeline stages, compiled
	@$(BIN)/python examples/01_train_gpt.py

test: lint types ## lint, types, then every test but those marked wide
	@$(BIN)/python -m pytest -m "not wide" $(PYTEST_ARGS)

test-wide: lint types ## lint, types, then every test: all of each matrix of which the others run a diagonal
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

test-null: $(STAMP) ## only the tests that need no process group, no compiler and no device
	@$(BIN)/python -m pytest -m "not wide and not gloo and not inductor and not cuda" $(PYTEST_ARGS)

coverage: $(STAMP) ## line coverage of each part of the compiler; fails where one is under 95 %
	@$(BIN)/coverage erase
	@$(BIN)/coverage run -m pytest -m "not wide" $(PYTEST_ARGS)
	@$(BIN)/coverage combine -q
	@failed=0; for part in $(COVERED); do echo "== $$part"; \
		$(BIN)/coverage report --include="$$part" --fail-under=95 || failed=1; done; exit $$failed

lint: $(STAMP) ## ruff: rules and format
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet . || { $(BIN)/ruff format --check . ; exit 1; }

format: $(STAMP) ## let ruff repair what it can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

# Types are checked on the installed form, for only there passes/ stands at graphcomp.passes. build/lib must go first:
# setuptools would ship files from it that the tree no longer has.
types: $(STAMP) ## mypy on the built package
	@rm -rf build/lib $(TYPED)
	@$(BIN)/python -m pip install -q --no-deps --no-build-isolation --target $(TYPED) .
	@set -o pipefail; cd $(TYPED) && $(CURDIR)/$(BIN)/python -m mypy --config-file $(CURDIR)/pyproject.toml \
		--cache-dir $(CURDIR)/.mypy_cache -p graphcomp | sed 's#^graphcomp/passes/#passes/#'

gallery: $(STAMP) ## capture and cut other people's models, compare with eager, write docs/gallery.md
	@$(BIN)/python -m tests.gallery docs/gallery.md

bench: $(STAMP) ## step time, memory and compile time against torch's own pipelining, DDP and FSDP
	@$(BIN)/python benchmarks/pipeline.py
	@$(BIN)/python benchmarks/data.py
	@$(BIN)/python benchmarks/overhead.py

clean: ## remove build outputs, caches and run folders
	@rm -rf build dist runs .coverage* *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## remove .venv too
	@rm -rf $(VENV)
