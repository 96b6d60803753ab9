# Two commands: `make run` does the main job, `make test` passes the tests. Both set up what they need.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
GOAL ?= What is in this folder, and what does its README say?
WORKSPACE ?= .

.DEFAULT_GOAL := help

.PHONY: help
help:  ## Show this list
	@grep -hE '^[a-z-]+:.*?## ' $(MAKEFILE_LIST) | awk -F ':.*?## ' '{printf "  make %-13s %s\n", $$1, $$2}'

# The marker is newer than what it was made from; set-up runs again only when that changes.
$(VENV)/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; name one with: make PYTHON=python3.12 ..."; exit 1; }
	@echo "Setting up $(VENV) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

.PHONY: setup
setup: $(VENV)/ready  ## Make the virtual environment

.PHONY: run
run: $(VENV)/ready  ## Run the main job; GOAL="..." and WORKSPACE=folder change it
	@CELERIAC_AGENTS=examples.workspace \
		$(BIN)/celeriac run --agent workspace "$$GOAL"
run: export GOAL := $(GOAL)
run: export WORKSPACE := $(WORKSPACE)

# Wheels ship no browser, and Playwright's own download needs a server that not everybody reaches.
.PHONY: browser
browser:  ## Install Chromium for the tests of the run page, where it is missing
	@for name in chromium chromium-browser google-chrome; do \
		command -v $$name >/dev/null && exit 0; \
	done; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "Setting up Chromium ..."; \
		apt-get -qq update && DEBIAN_FRONTEND=noninteractive \
			apt-get -qq install -y --no-install-recommends chromium fonts-dejavu-core >/dev/null; \
	else \
		echo "The run page is tested in Chromium: install it (as root: apt-get install chromium)"; \
		exit 1; \
	fi

# Most tests wait for workers and servers of theirs, so there may be more of them than cores.
JOBS ?= 3
# Workers start faster where what they import is compiled once.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: test
test: $(VENV)/ready browser lint  ## Pass the linters, the type checker and the tests
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup --no-loadscope-reorder

.PHONY: pictures
pictures: $(VENV)/ready browser  ## Make the pictures in docs/images anew
	@PYTHONPATH=.:tests $(BIN)/python -m support.pictures

.PHONY: lint
lint: $(VENV)/ready  ## Check style and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy

.PHONY: soak
soak: $(VENV)/ready  ## Run what takes minutes; CELERIAC_SOAK_SCALE=0.04 makes it one
	@$(BIN)/python -m pytest -m soak -rA

.PHONY: chaos
chaos: $(VENV)/ready  ## Kill, freeze, lose and double all that can be; CELERIAC_CHAOS_SEED=7 repeats one
	@$(BIN)/python -m pytest -m chaos -s

.PHONY: bench
bench: $(VENV)/ready  ## Measure, and write docs/benchmarks.md again; PART=fanout measures one part
	@PYTHONPATH=.:tests $(BIN)/python -m benchmarks $(PART)

# Others' packages have an environment of their own; what can't be installed here is said and skipped.
.venv-bench/ready: benchmarks/requirements.txt
	@$(PYTHON) -m venv .venv-bench
	@.venv-bench/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@mkdir -p .venv-bench/restate
	@npm install --prefix .venv-bench/restate --no-audit --no-fund --silent @restatedev/restate-server \
		|| echo "npm can't install restate-server; it is left out"
	@touch $@

.PHONY: bench-peers
bench-peers: $(VENV)/ready .venv-bench/ready  ## Measure LangGraph, DBOS and Restate beside ours
	@PYTHONPATH=.:tests $(BIN)/python -m benchmarks peers

.PHONY: chaos-obvious
chaos-obvious: $(VENV)/ready  ## The chaos on the obvious design, and ours beside it
	@PYTHONPATH=.:tests $(BIN)/python -m benchmarks fire

.PHONY: test-all
test-all:  ## Pass the tests on every Python from 3.11 up that is found
	@found=0; for minor in 11 12 13 14 15; do \
		python=$$(command -v python3.$$minor) || continue; found=1; \
		echo "== $$python"; \
		$(MAKE) --no-print-directory test PYTHON=$$python VENV=.venv-3.$$minor || exit 1; \
	done; test $$found = 1 || { echo "no Python from 3.11 up was found"; exit 1; }

.PHONY: clean
clean:  ## Remove what set-up and tests made
	@rm -rf .venv .venv-3.* .venv-bench .pytest_cache .mypy_cache .ruff_cache .hypothesis dist
