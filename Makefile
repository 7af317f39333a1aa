SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup test lint typecheck demo demo-megatron clean

BIN := .venv/bin
ARGS ?=

# DeepSpeed is told to use the CPU only where no GPU answers.
ACCEL = env $$(nvidia-smi >/dev/null 2>&1 || echo "DS_ACCELERATOR=$${DS_ACCELERATOR:-cpu}")

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## Create .venv with everything needed (PYTHON=... picks the interpreter); skips when up to date
	@scripts/setup_env.sh

test: setup lint typecheck ## Lint, type-check and run the tests (ARGS="..." goes to pytest)
	@$(ACCEL) $(BIN)/python -m pytest $(ARGS)

lint: setup ## Run ruff, the format check and the import contracts
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports --no-logo

typecheck: setup ## Run mypy on the core package
	@$(BIN)/mypy upipe_integrations

demo: setup ## Run the DeepSpeed demo (ARGS="..." goes to it)
	@$(ACCEL) $(BIN)/python -m examples.deepspeed.demo $(ARGS)

demo-megatron: setup ## Run the Megatron demo (ARGS="..." goes to it)
	@$(BIN)/python -W ignore -m examples.megatron.demo $(ARGS)

clean: ## Remove .venv, build output and tool caches
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
