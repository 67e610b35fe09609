# Everything sets itself up: a virtual environment in .venv, then the work.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test test-real lint format clean
.DEFAULT_GOAL := test

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: $(INSTALLED)  ## train two small networks, guard them, show what they flag
	$(BIN)/gramwatch demo

test: lint  ## lint, types and the tests
	$(BIN)/python -m pytest -n 2 -m "not real"

test-real: $(INSTALLED)  ## the long checks on real networks and data
	$(BIN)/python -m pytest -m real

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build dist gramwatch-demo
