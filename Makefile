# `make help` lists the targets. Everything is installed into .venv; a second run skips what is done.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
export FLWR_TELEMETRY_ENABLED = 0
export FLWR_DISABLE_UPDATE_CHECK = 1
export RAY_USAGE_STATS_ENABLED = 0

.PHONY: help setup demo docs screenshots test test-unit test-federation test-deploy test-compose test-faults test-portable test-mutants fuzz soak soak-short lint types tree check \
	bench-exchange bench-transport bench-bytes bench-methods bench-parameters bench-adapters bench-feddrs bench-atc bench-poison bench-membership bench-dp bench-secure bench-train bench-pipeline bench-peers bench-scale bench-path bench-models bench-features bench-defaults pretrain clean results-pages results-fedid results-adafd results-sinkhorn results-evenhand results-atc results-feddrs bench-first bench-start bench-wan bench-combine

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

setup: $(READY) ## make .venv with everything in it

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fedstill needs Python 3.11 or newer: make setup PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --upgrade pip setuptools -c constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check torch -c constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-build-isolation -c constraints.txt -e '.[dev]'
	$(BIN)/pip check
	@touch $(READY)

demo: $(READY) ## a federation of four sites on this machine, trained by Evenhand
	@$(BIN)/fedstill run experiments/demo.toml

test: $(READY) lint types ## lint, types and all tests, two files of tests at a time
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

test-unit: $(READY) ## tests without Flower and network
	$(BIN)/pytest tests/unit

test-federation: $(READY) ## whole federations in one process
	$(BIN)/pytest tests/federation

test-deploy: $(READY) ## real superlink and supernode processes on loopback
	$(BIN)/pytest tests/deploy

test-compose: $(READY) ## deploy/docker/demo.sh with podman: real images, TLS, keys, a site killed; needs root, podman and 30 GB; leaves images in build/compose
	$(BIN)/pip install --quiet --disable-pip-version-check podman-compose -c constraints.txt
	$(BIN)/pytest -m compose -s tests/deploy/test_compose.py

test-faults: $(READY) ## sites, ServerApp and SuperLink killed 20 times each in network namespaces; needs root
	$(BIN)/pytest -m faults -s tests/deploy/test_faults.py

test-portable: $(READY) ## unit and federation tests on other instruction sets and thread counts, as on other machines
	$(BIN)/python experiments/bench/portable.py

fuzz: $(READY) ## one site sends nonsense in whole runs of every method: 100,000 Replies, 700 runs, about ten minutes
	FEDSTILL_FUZZ=$${FEDSTILL_FUZZ:-4000} $(BIN)/pytest -q tests/federation/test_replies.py

test-mutants: $(READY) ## every guard taken out once, in a copy of the tree: its tests must fail; make test-mutants ONLY=ledger tries some
	$(BIN)/python tests/mutants/run.py --jobs 2 $(ONLY)

soak: $(READY) ## 2,000 tiny rounds under kills, cuts, slow sites, a lost coordinator and hostile frames; under an hour; writes experiments/bench/soak.json
	$(BIN)/python experiments/bench/soak.py

soak-short: $(READY) ## the same with 400 rounds, about ten minutes
	$(BIN)/python experiments/bench/soak.py --rounds 400

lint: $(READY) tree ## ruff, on form and content; import-linter, on the direction of the rooms
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	cd build/tree && PYTHONPATH=. $(CURDIR)/$(BIN)/lint-imports --config $(CURDIR)/pyproject.toml --no-cache --no-logo

types: $(READY) tree ## mypy --strict on what is shipped
	cd build/tree && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache -p fedstill

tree: # the package as a wheel has it: on an editable install these tools would see one folder only
	@rm -rf build/tree && mkdir -p build/tree/fedstill
	@ln -s $(CURDIR)/fedstill/* $(addprefix $(CURDIR)/,client common deploy experiments server strategies) build/tree/fedstill/

check: lint types ## lint and types

docs: $(READY) ## build the documentation, strictly and offline
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

RUN ?= runs/latest
screenshots: $(READY) ## pictures of a run's live page and report into docs/pictures, with Chromium: make screenshots RUN=runs/NAME
	$(BIN)/python docs/screenshots.py $(RUN)

bench-exchange: $(READY) ## how fast Asks travel, beside raw gRPC and Flower's messages; writes experiments/bench/exchange.json
	$(BIN)/python experiments/bench/exchange.py
	$(BIN)/python experiments/bench/interactive.py

bench-first: $(READY) ## from pip install to the first federation on a csv file, in an empty folder; writes experiments/bench/first.json
	$(BIN)/python experiments/bench/first.py

bench-start: $(READY) ## seconds from the command to the first training step, by phase; writes experiments/bench/start.json
	$(BIN)/python experiments/bench/start.py

bench-wan: $(READY) ## seconds a round on slow lines, beside what latency and rate allow; needs root; writes experiments/bench/wan.json
	$(BIN)/python experiments/bench/wan.py

bench-transport: $(READY) ## optimal transport: how near and how fast the solvers are; writes experiments/bench/transport.json
	$(BIN)/python experiments/bench/transport.py

bench-bytes: $(READY) ## bytes of every method beside its paper's arithmetic; writes experiments/bench/bytes.json
	$(BIN)/python experiments/bench/bytes.py

bench-methods: $(READY) ## every method beside the isolated sites, 3 seeds, about an hour; writes experiments/bench/methods.json
	$(BIN)/python experiments/bench/methods.py

bench-parameters: $(READY) ## a BERT-base state to the sites and back, seconds and memory; writes experiments/bench/parameters.json
	$(BIN)/python experiments/bench/parameters.py

bench-adapters: $(READY) ## all parameters against LoRA adapters, bytes and accuracy; writes experiments/bench/adapters.json
	$(BIN)/python experiments/bench/adapters.py

bench-feddrs: $(READY) ## FedDRS beside FedAvg where a site has one class; an hour, resumes; writes experiments/bench/feddrs.json
	$(BIN)/python experiments/bench/feddrs.py

bench-atc: $(READY) ## ATC's course in small, with texts from ../shared/data; table and pictures in runs/atc; writes experiments/bench/atc.json
	$(BIN)/python experiments/bench/atc.py

bench-poison: $(READY) ## liars among ten sites, by attack, share and rule; resumes; writes experiments/bench/poison.json
	$(BIN)/python experiments/bench/poison.py

bench-membership: $(READY) ## membership inference through predictions, with and without noise; writes experiments/bench/membership.json
	$(BIN)/python experiments/bench/membership.py

bench-dp: $(READY) ## DP-SGD beside noise on predictions: accuracy and membership AUC by epsilon, 5 seeds; ten minutes, resumes; writes experiments/bench/dp.json
	$(BIN)/python experiments/bench/dp.py

bench-secure: $(READY) ## bytes and seconds of secure sums beside plain runs; writes experiments/bench/secure_sum.json
	$(BIN)/python experiments/bench/secure_sum.py

bench-path: $(READY) ## our functions and files that one FedID batch passes; writes experiments/bench/path.json
	$(BIN)/python experiments/bench/path.py

bench-pipeline: $(READY) ## FedID and DS-FL plain and overlapped: wall time under 10, 50 and 200 ms, accuracy over 20 seeds; writes experiments/bench/pipeline.json
	$(BIN)/python experiments/bench/pipeline.py

bench-peers: $(READY) ## FedAvg beside Flower's own, local training beside HF's Trainer and a plain loop; writes experiments/bench/peers.json
	$(BIN)/python experiments/bench/peers.py

bench-scale: $(READY) ## 8 to 512 sites in one process and in Flower's simulation: seconds and memory; writes experiments/bench/scale.json and a picture
	$(BIN)/python experiments/bench/scale.py

bench-combine: $(READY) ## what the server computes of 512 sites' predictions, rule by rule; writes experiments/bench/combine.json
	$(BIN)/python experiments/bench/combine.py

bench-train: $(READY) ## one FedID round in CPU seconds beside a lean loop of plain torch; writes experiments/bench/train.json
	$(BIN)/python experiments/bench/train.py

bench-models: $(READY) ## the small trained models beside random twins, probe and fine-tuning; resumes; writes experiments/bench/small_models.json
	$(BIN)/python experiments/bench/small_models.py

bench-features: $(READY) ## a FedID round on cached features beside whole models; writes experiments/bench/features.json
	$(BIN)/python experiments/bench/features.py

bench-defaults: $(READY) ## default settings on 4 families x 6 tasks x 3 methods, with texts from ../shared/data; resumes; writes experiments/bench/defaults.json
	$(BIN)/python experiments/bench/defaults.py

# One command a page of docs/results: it runs what is missing (hours; it resumes) and writes tables, claims and pictures to runs/compare.
COMPARE = FEDSTILL_DATA=$${FEDSTILL_DATA:-../shared/data} $(BIN)/fedstill compare
results-pages: $(READY) ## write the evidence of docs/results anew from published scores, with its pictures
	$(BIN)/python -m fedstill.experiments.compare.pages

results-fedid: $(READY) ## the tables of docs/results/fedid.md: 20 paired seeds on cached features, all methods that exchange predictions
	$(COMPARE) experiments/screen/methods.toml
	$(COMPARE) experiments/screen/constant.toml

results-adafd: results-fedid ## those of docs/results/adafd.md: the same tables

results-sinkhorn: $(READY) ## those of docs/results/sinkhorn.md
	$(COMPARE) experiments/screen/sinkhorn.toml

results-evenhand: results-fedid ## those of docs/results/evenhand.md: the same tables, and whole models
	$(COMPARE) experiments/screen/confirm.toml

results-atc: bench-atc ## those of docs/results/atc.md

results-feddrs: $(READY) ## those of docs/results/feddrs.md
	$(COMPARE) experiments/feddrs/small

pretrain: $(READY) ## distil MiniLM into the four small models of common/models/weights, with texts from ../shared/data; hours
	$(BIN)/python experiments/pretraining/distil.py
	$(BIN)/python experiments/pretraining/cards.py

clean: ## remove .venv, caches and build leftovers (runs/ stays)
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
