# make train: set up once, then train on Shakespeare.   make test: set up once, then every test.
PYTHON ?= python3
BIN := .venv/bin
INSTALL ?= $(BIN)/python -m pip install

.PHONY: train test lint
train: .venv/run
	@# 130 is Ctrl-C, when train.py has stopped and saved; the trap lets the shell wait for that
	@trap : INT; $(BIN)/python train.py configs/shakespeare.yaml $(ARGS) || [ $$? = 130 ]

test: .venv/dev
	$(BIN)/python -m pytest -n auto --dist loadfile $(ARGS)

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/tests.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/problem.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff

.venv/run: requirements.txt
	@# one that is half made may be of another Python
	[ -e $@ ] || [ "$$($(BIN)/python -V 2>&1)" = "$$($(PYTHON) -V)" ] || rm -rf .venv
	[ -e $@ ] || $(PYTHON) -m venv .venv
ifeq ($(origin INSTALL),file)
	@[ "$$(uname)" != Linux ] || command -v nvidia-smi > /dev/null || { \
	  echo "pip installs more than 5 GB, most of it CUDA, which nothing here can use; 1 GB is enough:"; \
	  echo '  make train INSTALL="uv pip install --python .venv --torch-backend=auto"'; \
	  [ -n "$$CI" ] || { echo "going on in 5 seconds; Ctrl-C stops"; sleep 5; }; }
endif
	$(INSTALL) -r requirements.txt
	touch $@

.venv/dev: requirements-dev.txt .venv/run
	$(INSTALL) -r requirements-dev.txt
	touch $@
