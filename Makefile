# make demo   three levels write code and prose, token for token what the target alone writes
# make test   the tests, 8 to 17 minutes on two cores; make test-slow has the others: notebooks, commands of the guide, fuzzing
# make fuzz   malformed inputs for every reader, MINUTES=5; make mutants has the tests kill what is made wrong on purpose
# make differential   random chains against their target alone and float64, and state machines, MINUTES=5
# make faults memory, numbers, interrupts and threads that fail inside; make sbom tells what an installation brings in
# make lint   ruff
# make docs   the site of the documentation, in site/; make docs-serve shows it while you write
# Each makes the virtual environment $(VENV) and installs what it needs; the only things asked of the machine are
# python3 (with venv) and make. A C++ compiler, where there is one, builds the kernels; without it all runs in plain torch.

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?= -n 2 --dist worksteal
MINUTES ?= 5

BIN := $(VENV)/bin
# Python compiles what it imports at the first import, a small part of what is installed, and keeps it in $(VENV): where
# it may not, every process compiles torch and transformers anew, 10 seconds each.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(BIN)/python -m pip --disable-pip-version-check --quiet install --no-compile
# A word of constraints.txt, "torch==2.13.0": installed before everything that depends on it, so that no other
# requirement gets to choose another build.
TORCH := $(shell grep '^torch==' constraints.txt)
# The extra "docs", without the package: the site reads the sources and imports nothing of them, so it waits for no torch.
DOCS := $(shell sed -n 's/^docs = \[\(.*\)\]/\1/p' pyproject.toml | tr , ' ')
# Never with --quiet: mkdocs then counts no warning, and a dead link passes.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs
TELL_KERNELS := ls hf_mlspec/_C.* > /dev/null 2>&1 || \
	echo "no kernels were compiled (a C++20 compiler is needed): everything runs in plain torch, slower"
INPUTS := pyproject.toml setup.py constraints.txt $(wildcard kernels_ext/*.* kernels_ext/*/*.* kernels_ext/*/*/*.*)

.PHONY: demo test test-slow fuzz differential mutants faults sbom lint docs docs-serve clean

demo: $(VENV)/.run
	$(BIN)/mlspec demo

test: $(VENV)/.dev
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-slow: $(VENV)/.dev
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

fuzz: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --minutes $(MINUTES)

differential: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.differential --minutes $(MINUTES)

mutants: $(VENV)/.dev
	$(BIN)/python -m tests.mutants

faults: $(VENV)/.dev
	$(BIN)/python -m tests.faults

sbom: $(VENV)/.run
	@$(BIN)/python .ci/sbom.py

lint: $(VENV)/.dev
	$(BIN)/ruff check .

docs: $(VENV)/.docs
	$(MKDOCS) build --strict

docs-serve: $(VENV)/.docs
	$(MKDOCS) serve

$(VENV)/.torch: constraints.txt
	@echo "making $(VENV) with $(TORCH): a minute or two, once"
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) "$(TORCH)"
	$(INSTALL) setuptools -c constraints.txt
	@touch $@

# No build isolation: the kernels are compiled against the torch installed above, and no second one is fetched.
$(VENV)/.run: $(VENV)/.torch $(INPUTS)
	$(INSTALL) --no-build-isolation -e . -c constraints.txt
	@$(TELL_KERNELS)
	@touch $@

$(VENV)/.dev: $(VENV)/.torch $(INPUTS)
	$(INSTALL) --no-build-isolation -e ".[dev]" -c constraints.txt
	@$(TELL_KERNELS)
	@touch $@ $(VENV)/.run

$(VENV)/.docs: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) $(DOCS) -c constraints.txt
	@touch $@

clean:
	rm -rf $(VENV) build site *.egg-info
