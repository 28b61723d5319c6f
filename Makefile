# Everything a contributor runs. Works with GNU make 3.81 (macOS) and newer; `make help` lists the targets.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.set-up
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check --no-deps
# pip takes a minute or more, in which a line every few seconds says how far it is: it unpacks once all is there.
DOWNLOADS := $(VENV)/downloads
INSTALL = mkdir -p $(DOWNLOADS); while sleep 3 && kill -0 $$$$ 2>/dev/null; do \
	echo "  $$(du -sm $(DOWNLOADS) 2>/dev/null | cut -f1) MB downloaded," \
		"$$(ls -d $(VENV)/lib/*/site-packages/*.dist-info | wc -l) packages installed"; done & \
	TMPDIR=$(DOWNLOADS) $(PIP)
APT := DEBIAN_FRONTEND=noninteractive apt-get install -y -q
COMPILE := $(BIN)/uv pip compile --universal --generate-hashes --no-emit-index-url --no-emit-find-links \
	--no-header --no-annotate --python-version 3.11 --override requirements/overrides.txt $(UPGRADE)

# Durations of the tests, and how much CPU time a file of them may take: the slowest ones take 50 s, on busy cores 80.
REPORT := dist/tests.xml
FILE_BUDGET_S := 120

# Tests start hundreds of Python processes.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup demo demo-cluster test durations soak campaigns simulate model mutants packaging generate lint type check bench tools site lock clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

setup: $(STAMP) ## Make .venv from the lock file (PYTHON=python3.12 chooses the interpreter)

demo: $(STAMP) ## Hold a conversation, and kill the worker in the middle of an answer
	@$(BIN)/turnkeep demo

demo-cluster: $(STAMP) ## The same with two workers: the other one continues the answer
	@$(BIN)/turnkeep demo --cluster

test: $(STAMP) ## Run the tests
	@# Tests wait for a quarter of their time, so that two cores have work for four processes.
	$(BIN)/python -m pytest -q --dist worksteal -n 4 --junitxml=$(REPORT)
	@$(BIN)/python -m tests.durations $(REPORT) --budget $(FILE_BUDGET_S)

durations: ## List the slowest folders, files and tests of the last `make test`
	@$(BIN)/python -m tests.durations $(REPORT)

soak: $(STAMP) ## Run the long tests, before a release: an hour or two
	$(BIN)/python -m pytest -q -n auto --maxprocesses 2 -m soak
	TURNKEEP_TEST_EXAMPLES=300 $(BIN)/python -m pytest -q -n 2 -m 'hypothesis and not soak'
	TURNKEEP_TEST_HISTORIES=3000 $(BIN)/python -m pytest -q tests/simulation/test_simulation.py -k new_histories
	TURNKEEP_TEST_EXAMPLES=1000 $(BIN)/python -m pytest -q tests/cache/test_cache_machine.py tests/cache/test_cache_crafted.py
	TURNKEEP_TEST_EXAMPLES=300 $(BIN)/python -m pytest -q tests/bench/test_bench_core.py

campaigns: $(STAMP) ## Run the campaigns of docs/benchmarks.md in full: a day or two (RESTORES, FORGETS, REQUESTS, TURNS, HISTORIES, IMAGES)
	$(BIN)/python tests/soak/restores.py --restores $(or $(RESTORES),1000000)
	TURNKEEP_TEST_FORGETS=$(or $(FORGETS),1000) $(BIN)/python -m pytest -q --timeout 0 tests/process/test_forgotten_sessions.py -k while_the_worker_is_killed
	$(BIN)/python -P -m tests.protocol_model
	$(BIN)/python -P -m tests.protocol_model --replay 0 --histories $(or $(HISTORIES),200)
	$(BIN)/python -P -m tests.simulation 7000 --workers 10 --histories $(or $(HISTORIES),200)
	$(BIN)/python tests/soak/cluster.py --nodes 3 --share
	$(BIN)/python tests/soak/cluster.py --workers 2 --images $(or $(IMAGES),500) --faults 150
	$(BIN)/python tests/soak/day.py --requests $(or $(REQUESTS),1000000)
	$(BIN)/python tests/soak/one_session.py --turns $(or $(TURNS),100000)

simulate: $(STAMP) ## Play histories of worker and client in a world in memory (SEED=7 HISTORIES=1000 WORKERS=10)
	$(BIN)/python -P -m tests.simulation $(or $(SEED),$$(date +%s)000) --histories $(or $(HISTORIES),1) \
		$(if $(WORKERS),--workers $(WORKERS))

model: $(STAMP) ## Explore all interleavings of the protocol's model (tests/protocol_model): a minute or two
	$(BIN)/python -P -m tests.protocol_model

mutants: $(STAMP) ## Take guards away, one at a time: a test fails each time (K="part of a name"; GONE=FILE: without these tests)
	$(BIN)/python -P -m tests.mutants $(if $(K),"$(K)") $(if $(GONE),--gone $(GONE))

packaging: $(VENV)/tools/.set-up $(VENV)/docs/.set-up ## Test wheels, locks, site, deployment, pages and short benches; as root also full and failing disks
	$(BIN)/python -m pytest -q --dist worksteal -n 2 -m '(packaging or mounts or registry) and not soak'

generate: $(STAMP) ## Write docs/asyncapi.yaml and the TypeScript client's messages anew, after a change of the protocol
	$(BIN)/python -P -m turnkeep_client.asyncapi > docs/asyncapi.yaml
	$(BIN)/python -P -m turnkeep_client.typescript > protocol/typescript/src/messages.ts

lint: $(STAMP) ## Check style and format (ruff)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: $(STAMP) ## Check types (mypy, strict), also as macOS has them
	$(BIN)/mypy
	$(BIN)/mypy --platform darwin --cache-dir .mypy_cache/darwin

check: lint type test ## What CI runs: lint, type, test

bench: $(STAMP) ## Run the short session benchmark
	$(BIN)/turnkeep bench session --smoke

tools: $(VENV)/tools/.set-up ## Install what checks ops/deploy and .github, and what a release is made with

site: $(VENV)/docs/.set-up ## Build the documentation as a site, in dist/site
	$(BIN)/python docs/reference.py
	NO_MKDOCS_2_WARNING=1 $(VENV)/docs/bin/mkdocs build -q --strict

lock: $(STAMP) ## Resolve requirements/*.in again (UPGRADE=--upgrade takes newer versions)
	$(COMPILE) requirements/base.in -o requirements/base.lock
	$(COMPILE) requirements/dev.in -o requirements/dev.lock
	$(COMPILE) --no-deps requirements/corpora.in -o requirements/corpora.lock
	$(COMPILE) --no-deps requirements/vision.in -o requirements/vision.lock
	$(COMPILE) requirements/tools.in -o requirements/tools.lock
	$(COMPILE) requirements/docs.in -o requirements/docs.lock

clean: ## Remove caches and build output; `rm -rf .venv` starts over
	rm -rf dist protocol/typescript/dist docs/reference .demo .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# pip is the last thing that venv puts there: an interrupted run is made good by the next one.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "Turnkeep needs Python 3.11 or newer, and '$(PYTHON)' is not; try make setup PYTHON=python3.12" >&2; \
		exit 1; }
	@$(PYTHON) -c 'import platform as p, sys; mac = p.mac_ver()[0]; sys.exit(mac and ( \
		"MLX needs a Python for arm64, and this one is for Intel (or runs under Rosetta)" if p.machine() != "arm64" \
		else "MLX needs macOS 14 or newer, and this is " + mac if int(mac.split(".")[0]) < 14 else 0) or 0)'
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		package=$$($(PYTHON) -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])'); \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			$(APT) $$package || { apt-get update -q && $(APT) $$package; }; \
		else \
			echo "$(PYTHON) cannot make environments; install its venv module (Debian: apt-get install $$package)" >&2; \
			exit 1; \
		fi; }
	@echo "Making $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(STAMP): requirements/dev.lock requirements/corpora.lock requirements/vision.lock pyproject.toml protocol/turnkeep_client/__init__.py | $(BIN)/pip
	@echo "Installing packages into $(VENV): a minute or two"
	@$(INSTALL) --require-hashes -r requirements/dev.lock
	@$(INSTALL) --require-hashes -r requirements/corpora.lock
	@$(INSTALL) --require-hashes -r requirements/vision.lock
	@$(INSTALL) --no-build-isolation -e .
	@# Without OpenBLAS a Linux CPU computes correctly, but 15 times slower: advice, never a failure.
	@$(BIN)/python -c 'import sys; from worker.models.blas import preload; sys.exit(preload().advice or 0)' 2>/dev/null || { \
		package=libopenblas0-pthread; \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			$(APT) $$package || { apt-get update -q && $(APT) $$package; }; \
		fi; \
		$(BIN)/python -c 'import sys; from worker.models.blas import preload; sys.exit(preload().advice or 0)'; } || true
	@rm -rf $(DOWNLOADS)
	@touch $@
	@echo "Done. $(BIN)/turnkeep serve starts a worker, $(BIN)/turnkeep --help lists the commands"

$(VENV)/tools/.set-up $(VENV)/docs/.set-up: $(VENV)/%/.set-up: requirements/%.lock $(STAMP)
	$(BIN)/uv venv -q --allow-existing --python $(BIN)/python $(VENV)/$*
	$(BIN)/uv pip sync --require-hashes --python $(VENV)/$*/bin/python requirements/$*.lock
	@touch $@
