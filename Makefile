# The same three words here and in CI. PYTHON picks the environment: make check PYTHON=.venv/bin/python
PYTHON ?= python

.PHONY: format check test

format:
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix .

check:
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy

test:
	$(PYTHON) -m pytest
