# The same three words here and in CI. PYTHON picks the environment: make check PYTHON=.venv/bin/python
PYTHON ?= python

.PHONY: format check test test-full golden

format:
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix .

check:
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy

test:
	$(PYTHON) -m pytest

test-full:
	$(PYTHON) -m pytest -m full

golden:
	PYTHONPATH=tests/support $(PYTHON) -m golden
