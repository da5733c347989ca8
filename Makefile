# make lab     set up what is missing, then open JupyterLab on the course     make lab PORT=9999 BROWSER=no   only serve it
# make test    lint, types, built files, unit tests, every notebook, JupyterLab in a real browser
# make test LAB=05   what concerns one lab (2 minutes)     make test FAST=1   what the engine claims (3 minutes)
# make test COVERAGE=1   any of these, slower, and then what no test ran: shares by folder, lines by file
# make setup   only set up .venv: pinned packages, kernel, JupyterLab settings (again when a pin or a dependency changes)
# make build   rebuild the notebooks and exercises whose sources changed
# make clean   remove .venv and everything else that make made

PYTHON  ?= python3
BIN     := .venv/bin
READY   := .venv/ready
# Lectures run once: in JupyterLab, as a reader runs them (tests/browser), or without a browser under nbval.
CHROMIUM ?= $(shell command -v chromium || command -v chromium-browser)
LECTURES := $(if $(CHROMIUM),$(addprefix notebooks/,00_start_here.ipynb 90_reading_list_checked.ipynb),notebooks)
export HERE := $(CURDIR)
# These are said to make, and never taken from the shell around it, where others use the same names.
$(foreach name,LAB FAST COVERAGE PORT BROWSER,$(if $(filter environment%,$(origin $(name))),$(eval override undefine $(name))))

# Measurements in notebooks are cut short: WORKBENCH_BRIEF=1 (claims about the code choose their own settings).
PYTEST   := env WORKBENCH_BRIEF=1 $(BIN)/python $(if $(COVERAGE),-m coverage run )-m pytest --durations=5 -n 3 --dist loadfile --no-loadscope-reorder \
            --nbval-lax --nbval-current-env --nbval-cell-timeout=180
# Everything, and once more alone what failed beside others, if that is little; it is said (tests/tools/once_more.py).
ONCE_MORE := $(BIN)/python tests/tools/once_more.py
LINT     := name=lint;   part "ruff check" $(BIN)/ruff check .; \
            name=format; part "ruff format --check" $(BIN)/ruff format --check .;
TYPES    := name=types;  part "mypy" $(BIN)/python tests/tools/type_check.py;
# What `make test` runs: everything, one lab, or the engine alone. One pool of files, the longest first.
ifdef LAB
LABS     := $(foreach f,$(wildcard notebooks/source/*.py),$(firstword $(subst _, ,$(notdir $f))))
TWO      := $(filter $(LAB) 0$(LAB),$(LABS))
ifneq ($(words $(TWO)),1)
$(error make test LAB=$(LAB): there is no such lab. The labs are $(LABS))
endif
NAME     := $(notdir $(basename $(wildcard notebooks/source/$(TWO)_*.py)))
PARTS     = $(LINT) \
	name="built files"; part "workbench build --check $(NAME)" $(BIN)/workbench build --check $(NAME); \
	name=tests;         part "pytest: what lab $(TWO) lacks; its experiments, panels, checks, exercises and notebooks" \
	  $(PYTEST) tests/house/test_rooms.py $(wildcard tests/labs/lab$(TWO)) \
	  notebooks/$(NAME).ipynb $(wildcard solutions/$(NAME).ipynb);
else ifneq ($(filter-out 0 no,$(FAST)),)
PARTS     = $(LINT) \
	name=tests;         part "pytest: claims about the engine that take little time" \
	  $(PYTEST) -m "not slow" tests/engine;
else
PARTS     = $(LINT) $(TYPES) \
	name="built files"; part "workbench build --check" $(BIN)/workbench build --check; \
	name=tests;         part "pytest: claims about the code, every cell of every notebook, JupyterLab in a real browser" \
	  $(ONCE_MORE) tests $(LECTURES) solutions -- $(PYTEST);
endif

ifdef COVERAGE
override PARTS += name=coverage; part "coverage: what no test ran" $(BIN)/python tests/tools/coverage_report.py;
endif

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
	$(PARTS) \
	if [ -n "$$failed" ]; then echo "make test: FAILED: $${failed#, }"; exit 1; fi; \
	echo "make test: everything$(if $(LAB), of lab $(TWO),$(if $(FAST), that FAST=1 runs)) passed"

build: setup
	@$(BIN)/workbench build

clean:
	rm -rf .venv artifacts build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .coverage .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
