# make lab     set up what is missing, then open JupyterLab on the course     make lab PORT=9999 BROWSER=no   only serve it
# make test    lint, built files, unit tests, every notebook, JupyterLab in a real browser
# make setup   only set up .venv: pinned packages, kernel, JupyterLab settings (again when a pin or a dependency changes)
# make build   rebuild the notebooks and exercises whose sources changed
# make clean   remove .venv and everything else that make made

PYTHON  ?= python3
BIN     := .venv/bin
READY   := .venv/ready
# Lectures run once: in JupyterLab, as a reader runs them (tests/browser), or without a browser under nbval.
CHROMIUM ?= $(shell command -v chromium || command -v chromium-browser)
LECTURES := $(if $(CHROMIUM),notebooks/00_start_here.ipynb,notebooks)
export HERE := $(CURDIR)

.PHONY: help setup lab test build clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# make/make/p' Makefile

# .venv/ready holds the folder that was set up: a moved or copied checkout is set up again, as venvs do not move.
ifneq ($(shell cat $(READY) 2>/dev/null),$(CURDIR))
.PHONY: $(READY)
AFRESH  := --clear
endif

setup: $(READY)

$(READY): pyproject.toml constraints.txt workbench/jupyter/__init__.py workbench/jupyter/overrides.json
	@{ $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "make setup: Python 3.11 or newer is needed, '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." \
	         "Try: make setup PYTHON=python3.12"; exit 1; }; } >&2
	@echo "make setup: installing the pinned packages into .venv (minutes the first time)" >&2
	@{ $(PYTHON) -m venv $(AFRESH) .venv || \
	  { echo "make setup: no virtual environment from '$(PYTHON)'. On Debian and Ubuntu: apt-get install python3-venv"; exit 1; }; } >&2
	@$(BIN)/python -m pip install --disable-pip-version-check -e '.[dev]' -c constraints.txt >&2
	@$(BIN)/python -m workbench.jupyter >&2
	@printf '%s' "$$HERE" > $@

lab: setup
	@$(BIN)/workbench lab$(if $(PORT), --port $(PORT))$(if $(filter no,$(BROWSER)), --no-browser)

test: export HF_HUB_OFFLINE = 1
# Three files run at a time, as some wait; threads of one would only wait for those of the others.
test: export OMP_NUM_THREADS = 1
# A hundred processes import the same modules: they are compiled once, whatever the shell around says.
test: export PYTHONDONTWRITEBYTECODE =
test: setup
	@failed=; part() { echo "== $$1"; shift; "$$@" || failed="$$failed, $$name"; }; \
	name=lint;          part "ruff check" $(BIN)/ruff check .; \
	name=format;        part "ruff format --check" $(BIN)/ruff format --check .; \
	name="built files"; part "workbench build --check" $(BIN)/workbench build --check; \
	name=tests;         part "pytest: claims about the code, three files at a time" $(BIN)/python -m pytest --durations=5 \
	  -n 3 --dist loadfile --no-loadscope-reorder --ignore=tests/browser tests; \
	name=notebooks;     part "pytest: every cell of every notebook (measurements cut short), JupyterLab in a real browser, three files at a time" \
	  env WORKBENCH_BRIEF=1 $(BIN)/python -m pytest --durations=5 -n 3 --dist loadfile --no-loadscope-reorder \
	  --nbval-lax --nbval-current-env --nbval-cell-timeout=180 tests/browser $(LECTURES) solutions; \
	if [ -n "$$failed" ]; then echo "make test: FAILED: $${failed#, }"; exit 1; fi; \
	echo "make test: everything passed"

build: setup
	@$(BIN)/workbench build

clean:
	rm -rf .venv artifacts build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
