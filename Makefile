# `make demo` and `make test` do all of their own set-up, in build/ and nowhere else.
.DEFAULT_GOAL := help
SHELL := /bin/sh

# Python 3.11 is the one with a CPU-only PyTorch on every platform we know; newer ones work, with a larger download.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := build/venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SPEC ?= examples/local/cloud_run.json
SERVE ?= transformers
TARGET ?= cloud_run
COUNT ?= 100000
MINUTES ?= 30
FIRST ?= $(shell printf '%d' 0x$$(git rev-parse --short=7 HEAD 2> /dev/null || echo 0))
SUITE := $(BIN)/python -P tools/suite.py --numprocesses 5 --dist loadfile --durations 30
NOT_FAST := tests/stack tests/containers tests/emulators tests/platforms/gke tests/platforms/ray tests/platforms/tpu_vm \
	tests/contract tests/mutants tests/chaos/test_containers.py tests/chaos/test_endpoints.py tests/chaos/test_focus.py \
	tests/chaos/test_seeds.py

# Modules are compiled when they are first imported (tools/install.py), which must not be at each start of a process.
unexport PYTHONDONTWRITEBYTECODE

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(STAMP) ## create build/venv with everything that the targets below need

$(STAMP): pyproject.toml lock.txt tools/install.py
	@$(PYTHON) tools/install.py $(VENV)
	@touch $@

maxtext: $(STAMP) ## create build/maxtext, MaxText's own environment (Python 3.12), if it is not there
	@$(BIN)/python tools/maxtext_env.py

vllm: $(STAMP) ## create build/vllm, the environment of vLLM's CPU build, if it is not there (Linux, x86-64)
	@$(BIN)/python tools/vllm_env.py

demo: $(STAMP) ## drop SPEC in the local stack's bucket and follow it to a served model (SERVE=vllm: by vLLM; AGAIN=1: two models behind one URL)
	@$(BIN)/dropforge demo --serve $(SERVE) $(if $(AGAIN),--again) $(SPEC)

test: $(STAMP) ## the test suite, without the tests that need MaxText, Ray or vLLM
	@$(SUITE) -m "not engines"

test-engines: $(STAMP) ## the tests that need MaxText and Ray (Python 3.12), or vLLM
	@$(SUITE) -m engines

test-all: $(STAMP) ## both, in one run
	@$(SUITE)

test-fast: $(STAMP) ## the tests that start no stack, no emulator, no machine and no training (a minute)
	@$(BIN)/python -m pytest --numprocesses 2 --dist loadfile -m "not slow" $(NOT_FAST:%=--ignore=%)

check: $(STAMP) ## formatting, lint, types, imports, generated files
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo --cache-dir build/import_linter
	@$(BIN)/python tools/schemas.py --check
	@$(BIN)/python tools/lock.py --check
	@$(BIN)/python tools/tables.py --check
	@$(BIN)/python tools/spec_reference.py --check

format: $(STAMP) ## rewrite the code in the house's format
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

schemas: $(STAMP) ## regenerate schemas/ from the pydantic models
	@$(BIN)/python tools/schemas.py

bench: $(STAMP) ## measure; prints medians
	@$(BIN)/python -m bench

crash: $(STAMP) ## kill the local stack at every commit of runs on TARGET (an hour on two idle cores)
	@$(BIN)/python -m tests.stack.crash --target $(TARGET) --all --lanes 4

soak: $(STAMP) ## train on TARGET, or serve (TARGET=endpoint), for MINUTES (30) while tokens end and machines stop; prints what grows
	@$(BIN)/python -m bench._soak $(TARGET) --minutes $(MINUTES)

rollouts: $(STAMP) ## 50 rollouts and 20 rollbacks of a named endpoint under load; prints failed requests (some minutes)
	@$(BIN)/python -m tests.stack.rollouts load --rollouts 50 --rollbacks 20

mutants: $(STAMP) ## judge every mutant of the catalogue (an hour on two idle cores); see docs/mutants.md
	@$(BIN)/python -m tests.mutants --lanes 2

seeds: $(STAMP) ## simulations with new seeds for each commit (300, 264 focused, 100 repeated; two minutes); prints how to replay a broken one
	@broken=0; $(BIN)/dropforge chaos --seeds 300 --first $(FIRST) || broken=1; \
	$(BIN)/dropforge chaos --focused --seeds 264 --first $(FIRST) || broken=1; \
	$(BIN)/dropforge chaos --repeated --seeds 100 --first $(FIRST) || broken=1; exit $$broken

fuzz: $(STAMP) ## give COUNT random inputs (100,000) to the functions (some minutes)
	@$(BIN)/python -m tests.fuzz --count $(COUNT)

lock: $(STAMP) ## regenerate every lock with its hashes (functions/, containers/)
	@$(BIN)/python tools/lock.py

registry: ## first time: what images are built with (PROJECT_ID=… REGION=…); shows its plan and asks
	@tools/deploy.sh registry $(PROJECT_ID) $(REGION)

images: ## build the images with Cloud Build (PROJECT_ID=… REGION=…)
	@tools/deploy.sh images $(PROJECT_ID) $(REGION)

images-local: $(STAMP) ## build every image with buildah, without Docker, and start its entry point
	@$(BIN)/python tools/images_local.py $(ROLES)

deploy: ## deploy to Google Cloud (PROJECT_ID=… REGION=…); shows its plan and asks
	@tools/deploy.sh deploy $(PROJECT_ID) $(REGION)

destroy: ## remove a deployment (PROJECT_ID=… REGION=…); shows its plan and asks
	@tools/deploy.sh destroy $(PROJECT_ID) $(REGION)

tables: $(STAMP) ## regenerate the tables of permissions and of the spec's fields, and the messages, in docs/
	@$(BIN)/python tools/tables.py
	@$(BIN)/python tools/spec_reference.py

# Not --quiet: that hides the warnings that `strict` counts.
docs: $(STAMP) ## build the documentation as a site: build/site/index.html
	@$(BIN)/python tools/docs_env.py build/docs > /dev/null
	@NO_MKDOCS_2_WARNING=1 build/docs/bin/python -P -m mkdocs build 2> build/docs.log || { cat build/docs.log; exit 1; }
	@echo "build/site/index.html; with search: python3 -m http.server --bind 127.0.0.1 --directory build/site"

checkov: build/checkov/bin/checkov ## check terraform/ by Checkov's rules, in an environment of its own
	@build/checkov/bin/checkov --config-file .checkov.yaml

build/checkov/bin/checkov:
	@$(PYTHON) -m venv build/checkov
	@build/checkov/bin/pip install --quiet --disable-pip-version-check checkov==3.3.30

clean: ## remove everything that was generated
	rm -rf build

.PHONY: help setup maxtext vllm demo test test-engines test-all test-fast check format schemas bench crash soak rollouts seeds fuzz mutants lock registry images images-local deploy destroy tables docs checkov clean
