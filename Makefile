# Everything runs in a virtual environment that this file makes; a stamp per extra is redone when pyproject.toml changes.
#   make test        every test                      (PYTEST_ARGS='-k parser' picks some)
#   make nightly     2,000 random networks under jax.jit and xla_fp8.jit, others each time; a failure names its seed
#   make lint        ruff, mypy --strict, import-linter
#   make demo        a real JAX program, dumped, rewritten and explained
#   make docs        the documentation as a site, in build/site; warnings are errors
#   make docs-check  links, anchors and code blocks of the documentation
#   make validate    tests/hopper on the GPU at hand, and their report: build/validation.md
#   make bench       the benchmark of the HLO reader and printer, against jaxlib's own

SHELL := /bin/bash
VENV ?= .venv
PYTEST_ARGS ?=

# The first Python of at least 3.11 that can make a virtual environment. Each one is really started: a pyenv shim is on
# PATH even where the version behind it is not installed.
PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$python && break; done)

BIN := $(VENV)/bin
# Where `make lint` installs the package from a wheel: neither mypy nor import-linter follows the mapping
# passes/ -> xla_fp8.passes of an editable install.
INSTALLED := build/installed
# Every editable install is warned of folders that are named as the package. Here that folder is what is to be imported.
EDITABLE := PYTHONWARNINGS='ignore:Editable installation' $(BIN)/pip install --quiet --editable

.PHONY: test nightly lint demo docs docs-check bench validate clean

test: $(VENV)/.stamp-test
	$(BIN)/pytest -n auto --maxprocesses=8 --dist=loadgroup $(PYTEST_ARGS)

nightly: $(VENV)/.stamp-test
	XLA_FP8_NIGHTLY=1 $(BIN)/pytest -n auto --maxprocesses=8 tests/jit/test_random_networks.py $(PYTEST_ARGS)

lint: $(VENV)/.stamp-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf $(INSTALLED) build/lib build/bdist.*
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --target $(INSTALLED) .
	cd $(INSTALLED) && $(abspath $(BIN))/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache -p xla_fp8
	cd $(INSTALLED) && $(abspath $(BIN))/lint-imports $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.import_linter_cache

demo: $(VENV)/.stamp-base
	$(BIN)/python examples/demo.py

docs: $(VENV)/.stamp-docs
	$(BIN)/mkdocs build --quiet --strict

docs-check: $(VENV)/.stamp-test
	$(BIN)/pytest tests/test_docs.py

validate: $(VENV)/.stamp-cuda13
	mkdir -p build/validation
	XLA_FP8_RESULTS=$(CURDIR)/build/validation/results.jsonl XLA_FP8_SEEDS=0:500 XLA_PYTHON_CLIENT_PREALLOCATE=false \
		$(BIN)/pytest tests/hopper -m hopper -p no:cacheprovider $(PYTEST_ARGS); \
		status=$$?; $(BIN)/python benchmarks/validation_report.py build/validation/results.jsonl > build/validation.md; exit $$status

bench: $(VENV)/.stamp-base
	$(BIN)/python benchmarks/hlo_io.py

clean:
	rm -rf build dist .venv .venv-newest *.egg-info

$(VENV)/.stamp-base: pyproject.toml setup.py
	@test -n "$(PYTHON)" || { echo "error: no Python >= 3.11 with venv and ensurepip on PATH; say make PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(EDITABLE) .
	touch $@

$(VENV)/.stamp-%: $(VENV)/.stamp-base
	$(EDITABLE) '.[test,$*]'
	touch $@
