# `make demo` and `make test` do everything on a machine that has python3 (3.11 to 3.13) and make.
PYTHON ?= python3
PY := .venv/bin/python
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(PY) -m pip install -qq

.PHONY: demo test lint bench clean help

help:  ## what can be made
	@grep -hE '^[a-z]+:.*##' Makefile | sed 's/:.*## /\t/'

.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("bism needs Python 3.11 to 3.13; try make PYTHON=python3.12") if not (3, 11) <= sys.version_info[:2] <= (3, 13) else None'
	@echo "Setting up .venv (a minute, once)"
	@$(PYTHON) -m venv .venv || (echo "python3 has no venv module: install your system's python3-venv package" && false)
	@$(PIP) -c constraints.txt -e '.[dev]'
	@touch $@

demo: .venv/ready  ## the paper's checkerboard experiment in small, with its report
	@.venv/bin/bism reproduce checkerboard --quick --out runs/demo

test: .venv/ready  ## all tests
	@$(PY) -m pytest -n 2

lint: .venv/ready  ## style and types
	@.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/pyright

bench: .venv/ready  ## time an iteration, method by method, beside the recorded peers
	@$(PY) benchmarks/throughput.py

clean:  ## forget the set-up and the caches; runs/ stays
	rm -rf .venv .pytest_cache .ruff_cache
