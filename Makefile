# Two commands for a newcomer: `make run` and `make test`. Everything else is what CI adds.
PYTHON ?= python3
CONFIG ?= configs/quick.yaml
REQUIREMENTS ?= requirements.txt
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: run test lint bench report page figures clean

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

$(VENV)/run.done: $(REQUIREMENTS) requirements.txt constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"Python 3.11 or newer is needed, this is {v.major}.{v.minor}: make run PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) -r $(REQUIREMENTS)
	@touch $@

$(VENV)/dev.done: $(VENV)/run.done requirements-dev.txt
	$(PIP) -r requirements-dev.txt
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
