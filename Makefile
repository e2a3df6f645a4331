# `make demo` and `make test` each set up their own .venv, install pinned dependencies, and do their job.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-long test-gpu test-matrix test-vllm test-titan docs docs-serve release-check lint bench bench-gpu clean

.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: .venv/.ready  ## train a model that learns what to forget, and show it (about two minutes)
	$(BIN)/expire-span demo

test: export PYTHONDONTWRITEBYTECODE =  # compiling all modules and tests anew takes each process seconds
test: .venv/.ready  ## the whole test suite
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-long: .venv/.ready  ## the checks that take minutes each; every one has a short twin in `make test`
	$(BIN)/python -m pytest -n 2 --dist worksteal -m long

test-gpu: .venv/.ready  ## the tests that need a GPU, on all cores
	$(BIN)/python -m pytest -n auto --dist worksteal -m 'gpu and not long' tests

test-matrix: .venv/.ready  ## kernels and Hugging Face tests under several versions of Triton, transformers and Python, each in an environment of its own
	$(BIN)/python -m tests.matrix

test-vllm: .venv/.ready  ## the plugin for vLLM, with its build for the CPU, in an environment of its own (about 2 GB)
	$(BIN)/python -m tests.vllm_environment

test-titan: .venv/.ready  ## the example for torchtitan, on CPU processes, in an environment of its own (about 2 GB)
	$(BIN)/python -m tests.titan_environment

docs: .venv/.ready  ## the guide and the API reference as a site, in site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

docs-serve: .venv/.ready  ## the same site with search, on this machine, at http://127.0.0.1:8000
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --quiet

release-check: .venv/.ready  ## build the source archive and the wheel, install each in an empty environment, try the demo and every --help
	$(BIN)/python -m tests.release

lint: .venv/.ready  ## style, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: .venv/.ready  ## the operator on the CPU against dense attention, and the grid worlds
	$(BIN)/python -m benchmarks.cpu
	$(BIN)/python -m benchmarks.gridworlds

bench-gpu: .venv/.ready  ## the operator, training steps and decoding on a GPU, and the pictures (about ten minutes)
	$(BIN)/python -m benchmarks.attention
	$(BIN)/python -m benchmarks.plots benchmarks/out/attention.json
	$(BIN)/python -m benchmarks.training
	$(BIN)/python -m benchmarks.decode
	$(BIN)/python -m benchmarks.decode_picture benchmarks/out/decode.json

clean:
	rm -rf .venv .matrix site build dist *.egg-info
