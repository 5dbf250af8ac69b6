# The same three words here and in CI. PYTHON picks the environment: make check PYTHON=.venv/bin/python
PYTHON ?= python

.PHONY: format check test test-full test-cuda-stub golden pictures docs dist

format:
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix .

check:
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy

test:
	$(PYTHON) -m pytest

# tests that compare times run alone
test-full:
	$(PYTHON) -m pytest -m "full and not measures" -n 2 --dist loadfile
	$(PYTHON) -m pytest -m "full and measures"

# torch's CUDA build on a stub, without a GPU; the first time it makes an environment of 1.7 GB
test-cuda-stub:
	$(PYTHON) -m pytest -m cuda_stub tests/fake_cuda

# the README's pictures, of a run: make pictures RUN=runs/latest
pictures:
	$(PYTHON) -m tests.studies.pictures $(RUN)

golden:
	$(PYTHON) -m tests.support.golden

# the sdist and the wheel, which is installed in a fresh environment and measures in an empty folder
dist:
	.ci/check-dist $(PYTHON)

# the documentation site, in site/
docs:
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict -q
