SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup test test-quick test-megatron-0.16 lint typecheck docs demo demo-megatron release-check clean

BIN := .venv/bin
ARGS ?=
# Files of tests that run at once: most wait for something most of the time. In alphabetical order, not by their number of
# tests, which would leave the longest for the end. One at a time where a GPU is shared.
JOBS ?= $$(nvidia-smi >/dev/null 2>&1 && echo 0 || echo 2)
PARALLEL = -n $(JOBS) --dist loadfile --no-loadscope-reorder
PYTEST = $(ACCEL) $(BIN)/python -m pytest $(PARALLEL)

# DeepSpeed is told to use the CPU only where no GPU answers.
ACCEL = env $$(nvidia-smi >/dev/null 2>&1 || echo "DS_ACCELERATOR=$${DS_ACCELERATOR:-cpu}")

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9.-]+:.*## / { printf "make %-19s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## Create .venv with everything needed (PYTHON=... picks the interpreter); skips when up to date
	@scripts/setup_env.sh

test: setup lint typecheck ## Lint, type-check and run the tests (ARGS="..." goes to pytest, JOBS=1 is one file at a time)
	@$(PYTEST) $(ARGS)

# Those of the core alone, that start no launcher and train no host's model.
QUICK := attention checkpoint config features kernels layering local_ranks modes pairwise projection schedule sharding structure sums

test-quick: setup ## Run the core's tests alone, in two minutes: no launcher, no host (ARGS="..." goes to pytest)
	@$(ACCEL) $(BIN)/python -m pytest $(QUICK:%=tests/test_%.py) $(ARGS)

# A release of its own (core only, Python 3.10 and 3.11), in an environment of its own.
test-megatron-0.16: ## Run Megatron's tests with megatron-core 0.16 (needs Python 3.11 or 3.10)
	@VENV=.venv-megatron-0.16 VERSIONS="3.11 3.10" EXTRAS=megatron,dev scripts/setup_env.sh
	@.venv-megatron-0.16/bin/python -m pytest $(PARALLEL) $(wildcard tests/test_megatron*.py) $(ARGS)

lint: setup ## Run ruff, the format check and the import contracts
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports --no-logo

typecheck: setup ## Run mypy on the core and the two plugins (the files are named in pyproject.toml)
	@$(BIN)/mypy

docs: setup ## Build the documentation into build/site; a broken link fails
	@$(BIN)/mkdocs build --strict

demo: setup ## Run the DeepSpeed demo (ARGS="..." goes to it)
	@$(ACCEL) $(BIN)/python -m examples.deepspeed.demo $(ARGS)

demo-megatron: setup ## Run the Megatron demo (ARGS="..." goes to it)
	@$(BIN)/python -W ignore -m examples.megatron.demo $(ARGS)

release-check: ## Build, look into the wheel, install it in a clean environment and run it (ARGS="..." goes to it)
	@scripts/release_check.sh $(ARGS)

clean: ## Remove the environments, build output and tool caches
	rm -rf .venv .venv-* build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
