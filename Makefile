# Two commands for a newcomer: `make run` and `make test`. Everything else is what CI adds.
#
# Each requirements file has an environment of its own (.venv, .venv-ascend for requirements-ascend.txt), with
# a stamp of what is installed. It is made anew where PYTHON is given and is another interpreter than its own.
CONFIG ?= configs/quick.yaml
REQUIREMENTS ?= requirements.txt
VENV ?= .venv$(patsubst requirements%.txt,%,$(notdir $(REQUIREMENTS)))
BIN := $(VENV)/bin
INSTALLED := $(VENV)/$(notdir $(REQUIREMENTS)).done
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
ASKED := $(PYTHON)
PYTHON ?= python3
# triton-ascend brings a package `triton` of its own; the tests' Triton would be unpacked over it.
DEV := $(if $(findstring triton-ascend,$(REQUIREMENTS)),requirements-test.txt,requirements-dev.txt)
INTERPRETER := import sys; print(sys.base_prefix, sys.version.split()[0])
WORKING := import pip; $(INTERPRETER)
NEW_ENOUGH := import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"Python 3.11 or newer is needed, this is {v.major}.{v.minor}: make run PYTHON=python3.12")

.PHONY: run test lint bench report page figures clean FORCE

run: $(VENV)/run.done
	$(BIN)/python runner.py run $(CONFIG)

test: $(VENV)/dev.done
	$(BIN)/python -m pytest

lint: $(VENV)/dev.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/dev.done
	$(BIN)/python -m pytest bench/tools/benchmarks --benchmark-json results/speed.json

report: $(VENV)/run.done
	$(BIN)/python runner.py report $$(git ls-files 'results/*.json') --format markdown -o results/REPORT.md

page: $(VENV)/run.done
	$(BIN)/python runner.py report $$(git ls-files 'results/*.json') --format html -o site/index.html

figures: $(VENV)/dev.done
	$(BIN)/python runner.py plot $$(git ls-files 'results/*/ladder-*.json') -o docs/figures

# Written only where an environment is made, or taken over, so that its age is the environment's.
$(VENV)/interpreter: FORCE
	@have=$$($(BIN)/python -c '$(WORKING)' 2>/dev/null); \
	if [ -n "$$have" ] && { [ -z '$(ASKED)' ] || [ "$$have" = "$$($(PYTHON) -c '$(INTERPRETER)')" ]; }; then \
		[ -f $@ ] || echo "$$have" > $@; \
		exit 0; \
	fi; \
	$(PYTHON) -c '$(NEW_ENOUGH)' && \
	echo "$(PYTHON) -m venv --clear $(VENV)" && \
	$(PYTHON) -m venv --clear $(VENV) && \
	$(BIN)/python -c '$(INTERPRETER)' > $@

$(INSTALLED): $(VENV)/interpreter $(REQUIREMENTS) requirements.txt requirements-ascend.txt constraints.txt
	$(PIP) -r $(REQUIREMENTS)
	@touch $@

$(VENV)/run.done: $(INSTALLED)
	@touch $@

$(VENV)/dev.done: $(VENV)/run.done requirements-test.txt requirements-data.txt $(DEV)
	$(PIP) -r $(DEV)
	@touch $@

clean:
	rm -rf .venv .venv-* .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
