# `make demo` and `make test` work on a fresh machine with Python >= 3.11 and make: each sets up .venv first if needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready

.PHONY: setup demo test test-fast lint types check format clean

setup: $(STAMP)

# The stamp is newer than everything it was made from, so that a second `make setup` does nothing.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Practicum needs Python 3.11 or newer; set PYTHON=... to one." >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: setup
	$(BIN)/practicum demo

test: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile

# Before each commit: what needs neither Ray nor a whole run.
test-fast: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

check: lint types test

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache
