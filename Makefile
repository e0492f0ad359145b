# The whole set-up is two commands: `make demo` and `make test`.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
MINDSPORE := mindspore/.venv

# Real data beside the clone, for the tests that use it; unpacked once.
SHARED := $(CURDIR)/../shared/data
ifneq ($(wildcard $(SHARED)/unpack),)
DATA := $(CURDIR)/.data
export SOFTMAXFREE_DATA ?= $(DATA)
endif

.PHONY: help setup setup-train data demo test test-all test-long fuzz setup-mindspore test-mindspore embedded lint docs clean

help: ## what there is
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 16

# pip says nothing but errors; a line before each long step says what is done. Python compiles what is
# imported when it is imported first: compiling all of torch takes a minute.
PIP = -m pip install -qq --no-compile --disable-pip-version-check --no-input
INSTALL = $(BIN)/python $(PIP) --constraint constraints.txt

setup-train: $(VENV)/.train ## build .venv with what training needs: what `make demo` does first

$(VENV)/.train: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "softmaxfree needs Python 3.11 or later; call make with PYTHON=/path/to/python3.11"; exit 1; }
	@echo "Installing torch, timm and Lightning into $(VENV): 3 minutes, 6 GB ..."
	@$(PYTHON) -m venv $(VENV)
	@$(INSTALL) --editable '.[train]'
	@touch $@

setup: $(VENV)/.dev ## add what tests, docs and the linter need

$(VENV)/.dev: $(VENV)/.train
	@echo "Adding the tools of tests and docs to $(VENV): 2 minutes, 0.8 GB ..."
	@$(INSTALL) --editable '.[dev]'
	@touch $@

data: $(if $(DATA),$(DATA)/.unpacked)

$(CURDIR)/.data/.unpacked: $(wildcard $(SHARED)/SHA256SUMS)
	@echo "Unpacking data sets for the tests: half a minute ..."
	@$(SHARED)/unpack $(DATA) > /dev/null
	@touch $@

demo: setup-train ## train SOFT++ on handwritten digits, score it, draw what it attends to
	@echo "Training on handwritten digits: 2 minutes on two idle cores ..."
	@$(BIN)/softmaxfree fit

PYTEST = OMP_WAIT_POLICY=$${OMP_WAIT_POLICY:-passive} $(BIN)/python -m pytest -q -n auto --dist worksteal

test: setup data ## every behaviour: 4 minutes on two cores
	@echo "Running the tests: 4 minutes on two idle cores ..."
	@$(PYTEST) -m 'not slow'

test-all: test-long test-mindspore ## all tests: also compilers, exports, killed processes, browsers, MindSpore

# In a random order, so that no test comes to depend on another; the same order again with SEED=...
SEED := $(shell date +%s)

test-long: setup data
	@echo "Running all tests but MindSpore's, 11 minutes on two idle cores, in the order SEED=$(SEED) ..."
	@$(PYTEST) -p randomly -p no:cacheprovider --randomly-seed=$(SEED) --randomly-dont-reset-seed
ifneq ($(shell command -v g++),)
	@SOFTMAXFREE_NATIVE=1 XDG_CACHE_HOME=$(CURDIR)/.pytest_cache $(PYTEST) -m 'not slow' tests/ops tests/layers/test_attention_layer.py tests/layers/test_activations.py tests/layers/test_mlp.py
endif

fuzz: setup ## 100,000 random and hostile inputs, with a report in results/fuzz.md: an hour
	@$(BIN)/python -m tests.fuzz.report

setup-mindspore: $(MINDSPORE)/.installed

$(MINDSPORE)/.installed: mindspore/pyproject.toml mindspore/constraints.txt
	@echo "Installing MindSpore into $(MINDSPORE): 2 minutes ..."
	@$(PYTHON) -m venv $(MINDSPORE)
	@$(MINDSPORE)/bin/python $(PIP) --constraint mindspore/constraints.txt --editable './mindspore[dev]'
	@touch $@

test-mindspore: setup setup-mindspore ## the tests of mindspore/, in an environment of its own
	@echo "Running MindSpore's tests: 4 minutes ..."
	@$(BIN)/python mindspore/tests/exchange.py write
	@cd mindspore && .venv/bin/python -m pytest -q
	@$(BIN)/python mindspore/tests/exchange.py check

embedded: setup ## train the digit models of the figures anew: 15 minutes
	for name in softpp soft softmax performer nystromformer; do \
		$(BIN)/softmaxfree fit --model.attention $$name --out runs/embedded/$$name && \
		$(BIN)/python scripts/embed.py runs/embedded/$$name || exit 1; \
	done

lint: setup ## linter, formatter, type checker
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: setup ## make tables and pictures from results, and build the site into site/, links checked
	$(BIN)/softmaxfree reproduce --page docs/reproduction.md
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean: ## remove what the other commands made
	rm -rf $(VENV) $(MINDSPORE) mindspore/build .data runs site .pytest_cache .ruff_cache .mypy_cache .hypothesis
