# Needs Python 3.11 or newer with its venv module, and a package index; everything else goes into .venv.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
CONSTRAINTS := $(if $(shell command -v nvidia-smi 2>/dev/null),,--constraint constraints-cpu.txt)

.PHONY: venv demo test lint bench attack vllm-venv openvino-venv llamacpp-venv trainers-venv lmeval-venv test-engines
ENGINE_VENVS := .venv-vllm .venv-openvino .venv-llamacpp

venv: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints-cpu.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(CONSTRAINTS) --editable '.[data,report,openvino,serve,dev]'
	touch $@

demo: venv
	$(BIN)/tercel demo

lint: venv
	$(BIN)/ruff check
	$(BIN)/mypy

# Files go whole to the next free core, those first that take longest (`tests/conftest.py`).
test: lint
	$(BIN)/pytest --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

bench: venv
	$(BIN)/tercel bench smollm2-135m --tasks demo --json out/bench.json --plot out/bench.png

# Thousands of hostile inputs, half an hour on two cores; the table goes to docs/reliability.md. Linux only.
attack: venv
	$(BIN)/python -m attack --jobs $$(nproc) --json out/attack.json --write docs/reliability.md

# The engines that heads are exported for, each in an environment of its own.
vllm-venv: .venv-vllm/.ready
openvino-venv: .venv-openvino/.ready
llamacpp-venv: .venv-llamacpp/.ready
# The other trainers of heads, for bench/training.py.
trainers-venv: .venv-trainers/.ready
# The harness that bench/lmeval.py lets ask a server.
lmeval-venv: .venv-lmeval/.ready

.venv-%/.ready: engines/make_venv.py
	$(PYTHON) engines/make_venv.py $* .venv-$*

# Exports the shipped head, serves it in every engine and compares text and acceptance; writes docs/engines.json.
test-engines: venv $(ENGINE_VENVS:%=%/.ready)
	$(BIN)/python engines/prove.py
