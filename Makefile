# Needs Python 3.10 or newer with its venv module, and a package index; everything else goes into .venv.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
CONSTRAINTS := $(if $(shell command -v nvidia-smi 2>/dev/null),,--constraint constraints-cpu.txt)

.PHONY: venv demo test lint bench

venv: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints-cpu.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(CONSTRAINTS) --editable '.[data,report,dev]'
	touch $@

demo: venv
	$(BIN)/tercel demo

lint: venv
	$(BIN)/ruff check
	$(BIN)/mypy

test: lint
	$(BIN)/pytest

bench: venv
	$(BIN)/tercel bench smollm2-135m --tasks demo --json out/bench.json --plot out/bench.png
