# make demo    the main job on a small real model           (sets up .venv itself)
# make test    lint, types, import rules, then the tests     (sets up .venv itself)
#
# Python: the first of $(CANDIDATES) that is at least 3.11; `make PYTHON=/path/to/python3 ...` names
# another one. ARGS goes to the program behind the target: make demo ARGS=--help.

VENV := .venv
BIN := $(VENV)/bin
# Two processes, each with whole files of tests; `make test JOBS=0` runs them one after the other.
JOBS := 2
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadfile
CANDIDATES := python3.11 python3.12 python3.13 python3.14 python3
SPEC := setup.cfg pyproject.toml constraints.txt
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --no-input -q -c constraints.txt
USABLE := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
IDENTITY := import sys; print(sys.base_prefix, sys.version)

# Another tree's packages must not shadow the environment's.
unexport PYTHONPATH PYTHONHOME PIP_USER

.PHONY: help demo test test-all truths lint format clean FORCE
.DELETE_ON_ERROR:

help:
	@echo 'make demo      run the main job on a small real model'
	@echo 'make test      lint, types, import rules, then the tests without the slow ones'
	@echo 'make test-all  the same with the slow tests'
	@echo 'make truths    the samplers on all cases with a known value: a table (most of an hour)'
	@echo 'make lint      ruff, mypy, import rules'
	@echo 'make format    let ruff rewrite the sources'
	@echo 'make clean     remove .venv and the caches'

demo: $(VENV)/.demo
	@$(BIN)/devsample demo $(ARGS)

test: lint
	$(PYTEST) -m "not slow" $(ARGS)

test-all: lint
	$(PYTEST) $(ARGS)

truths: $(VENV)/.test
	$(BIN)/devsample truths --jobs 2 $(ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict devsample
	$(BIN)/lint-imports --no-logo

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) devsample.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find devsample tests benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# ---- set-up -----------------------------------------------------------------------------------
# .made   the environment exists; holds the folder it was made in, for it cannot be moved
# .demo   what the demo needs is installed
# .test   what tests and lint need is installed on top
# .busy   the process that is changing the environment; left behind when that was cut short

STATE := $(shell \
	busy=$$(cat $(VENV)/.busy 2>/dev/null); \
	if [ -n "$$busy" ] && kill -0 "$$busy" 2>/dev/null \
	    && ! grep -q '^State:.*zombie' "/proc/$$busy/status" 2>/dev/null; then echo "busy $$busy"; \
	elif [ -e $(VENV)/.busy ]; then echo stale; \
	elif [ "$$(cat $(VENV)/.made 2>/dev/null)" != "$$(pwd -P)" ]; then echo stale; \
	elif ! here=$$($(BIN)/python -c '$(IDENTITY)' 2>/dev/null); then echo stale; \
	elif [ -n "$(PYTHON)" ] && [ "$$("$(PYTHON)" -c '$(IDENTITY)' 2>/dev/null)" != "$$here" ]; then echo stale; \
	else echo good; fi)

ifeq ($(firstword $(STATE)),busy)
ALONE := echo 'Another make (process $(lastword $(STATE))) is setting up $(VENV): wait for it.' >&2; exit 1
else
ALONE := set -e
endif

ifeq ($(firstword $(STATE)),stale)
$(VENV)/.made: FORCE
endif

$(VENV)/.made:
	@$(ALONE); \
	python=; for p in $(or $(PYTHON),$(CANDIDATES)); do \
	    if "$$p" -c '$(USABLE)' 2>/dev/null; then python=$$p; break; fi; done; \
	if [ -z "$$python" ]; then \
	    echo 'No Python >= 3.11 with venv and ensurepip (tried: $(or $(PYTHON),$(CANDIDATES))).' >&2; \
	    echo 'Install one (Debian: apt install python3 python3-venv) or name it: make PYTHON=/path/to/python3' >&2; \
	    exit 1; fi; \
	echo "Making $(VENV) with $$("$$python" -c 'import sys; print(sys.executable, sys.version.split()[0])')"; \
	rm -rf $(VENV); mkdir $(VENV); echo $$$$ > $(VENV)/.busy; \
	"$$python" -m venv $(VENV); \
	pwd -P > $@; rm $(VENV)/.busy

# setuptools first: without build isolation its version is the pinned one, too.
$(VENV)/.demo: $(VENV)/.made $(SPEC)
	@echo 'Installing what the demo needs (the first time takes minutes: PyTorch is large)'
	@$(ALONE); echo $$$$ > $(VENV)/.busy; rm -f $@ $(VENV)/.test; \
	$(PIP_INSTALL) setuptools; \
	$(PIP_INSTALL) --no-build-isolation -e '.[demo]'; \
	touch $@; rm $(VENV)/.busy

# The installed devsample satisfies the name, so only what the extras add is installed.
$(VENV)/.test: $(VENV)/.demo
	@echo 'Installing what the tests need'
	@$(ALONE); echo $$$$ > $(VENV)/.busy; rm -f $@; \
	$(PIP_INSTALL) 'devsample[test,dev]'; \
	touch $@; rm $(VENV)/.busy
