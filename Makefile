# make train: set up once, then train on Shakespeare.   make test: set up once, then every test.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: train test lint
train: .venv/run
	$(BIN)/python train.py configs/shakespeare.yaml $(ARGS)

test: .venv/dev
	$(BIN)/python -m pytest -n auto --dist loadfile $(ARGS)

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/tests.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/problem.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff

.venv/run: requirements.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -r requirements.txt
	touch $@

.venv/dev: requirements-dev.txt .venv/run
	$(BIN)/python -m pip install -r requirements-dev.txt
	touch $@
