# Every target sets up what it needs. PYTHON is the interpreter that .venv is made with (3.10 to 3.14).
PYTHON ?= $(shell for p in python3.11 python3.12 python3.10 python3.13 python3.14 python3; do \
	  $$p -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null && { echo $$p; break; }; done)
BIN := .venv/bin
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check
# An editable install maps the modules that it found, so a new module (a changed folder) calls for it again.
INSTALLED := $(shell find penstock/runtime/native -type f) $(shell find penstock -type d ! -name __pycache__) \
	CMakeLists.txt pyproject.toml
SEED ?= 1
JOBS ?= 4
SECONDS ?= 600
N ?=
ARGS ?=
# Tests and benchmarks start hundreds of Python processes: Python keeps what it has compiled, whatever the caller's
# environment says.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup run test test-slow test-all collected guests servers lint format bench bench-quick slow campaign-ring campaign-sim campaign-kill campaign-hosts campaign-switching-trees campaign-apps campaign-apps-on-hosts campaign-switch campaign-placement campaign-settling campaign-streams campaign-trees campaign-busy-roots campaign-relays campaign-heads campaign-bursts campaign-rdma campaign-properties campaign-planted stubs states status options lock clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: .venv/installed .venv/tools ## make .venv with all tools and Spark, pinned, and build the native core

.venv/packages: requirements/run.txt
	@test -n "$(PYTHON)" || { echo "Penstock needs Python 3.10 to 3.14 (Debian: apt-get install python3 python3-venv)"; exit 1; }
	@command -v c++ >/dev/null || { echo "Penstock needs a C++ compiler (Debian: apt-get install g++ python3-dev)"; exit 1; }
	@test -d .venv || $(PYTHON) -m venv .venv
	$(PIP) --no-compile -r requirements/run.txt
	@touch $@

.venv/installed: .venv/packages $(INSTALLED)
	$(PIP) --no-build-isolation --no-deps --config-settings=cmake.define.CMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -e .
	@$(BIN)/python -m compileall -q penstock  # else the first run makes folders, and a changed folder is installed again
	@touch $@

.venv/tools: .venv/packages requirements/dev.txt
	@command -v java >/dev/null || echo "note: no Java found; the Spark bridge will need Java 17 (Debian: apt-get install openjdk-17-jre-headless)"
	$(PIP) --no-compile -r requirements/dev.txt
	@touch $@

.venv/bench: .venv/installed .venv/tools requirements/bench.txt
	$(PIP) -r requirements/bench.txt
	@touch $@

# Flink's Java packages, for one benchmark; nothing imports them, and what they would pull in is left out.
.venv/flink: requirements/flink.txt .venv/packages
	$(PIP) --no-deps --require-hashes --target .venv/flink.new -r requirements/flink.txt
	rm -rf .venv/flink && mv .venv/flink.new .venv/flink
	@touch $@

run: .venv/installed ## count the words of a real text, with live progress
	$(BIN)/penstock run wordcount $(ARGS)

test: setup ## lint, types and the first tier of the tests, in JOBS processes (4, as they mostly wait; 0: in one, which stops at --pdb)
	@$(MAKE) --no-print-directory -j 2 lint collected
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(if $(ARGS),$(ARGS),--tier first)

test-slow: setup ## the second tier of the tests: guests, hosts, Spark, sanitizers, real time limits
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --tier second $(ARGS)

test-all: test test-slow ## both tiers of the tests

# Compiles the tests' assertions once, so that not each of the processes does. What is wrong with a test, the run says.
collected: setup
	@$(BIN)/python -m pytest --collect-only -qq >/dev/null || true

guests: setup ## download and unpack what guests with software RoCE are made of (apt; nothing is installed)
	$(BIN)/python -m tests.guests --fetch

servers: setup ## download the servers that tests of connectors need: Apache Kafka (54 MB, below build/servers)
	$(BIN)/python -m tests.servers

lint: setup ## ruff, who imports whom, and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy

format: setup ## let ruff rewrite the sources
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: .venv/bench ## all benchmarks: tables, JSON lines and plots in benchmarks/results
	$(BIN)/python -m benchmarks $(ARGS)

bench-quick: .venv/bench ## the same, short: to see that they run; fails with a list of those that fail twice
	$(BIN)/python -m benchmarks --quick $(ARGS)

slow: test-slow bench-quick ## what takes too long for `make test`: the second tier, and all benchmarks, short (CI runs both)

campaign-ring: setup ## torment the ring for SECONDS, starting from SEED
	$(BIN)/cmake -S . -B build/stress-plain -DCMAKE_BUILD_TYPE=Release -DPENSTOCK_SANITIZE= >/dev/null
	$(BIN)/cmake --build build/stress-plain
	build/stress-plain/penstock/runtime/native/stress/ring_torture --seconds $(SECONDS) --seed $(SEED) --producers 8

campaign-sim: setup ## run N (10000) simulated clusters with faults, starting from SEED
	$(BIN)/python -m tests.epochs.campaign --seeds $(or $(N),10000) --seed $(SEED) $(ARGS)

campaign-kill: setup ## kill N (200) processes of real jobs at random instants, starting from SEED
	$(BIN)/python -m tests.e2e.kill_campaign --kills $(or $(N),200) --seed $(SEED) $(ARGS)

campaign-hosts: setup ## let N (60) faults happen to jobs over several hosts: processes, hosts, links; from SEED
	$(BIN)/python -m tests.namespaces.campaign --faults $(or $(N),60) --seed $(SEED) $(ARGS)

campaign-switching-trees: setup ## the same with N (40) faults of relays and links, while trees switch every second
	$(BIN)/python -m tests.namespaces.campaign --faults $(or $(N),40) --seed $(SEED) --hosts 4 --flow "to all" \
	  --trees toggle:1 --kinds relay,relay-stop,cut-relay,cut-0.2,cut-3 --rate 4000 --seconds 40 $(ARGS)

campaign-apps: setup ## run N (60) jobs of the applications that are killed, rescaled and moved, starting from SEED
	$(BIN)/python -m tests.apps.campaign --runs $(or $(N),60) --seed $(SEED) $(ARGS)

campaign-apps-on-hosts: setup ## the applications on 1, 2 and 4 hosts: YSB through Spark, ride-hailing through trees
	$(BIN)/python -m tests.namespaces.apps $(ARGS)

campaign-switch: setup ## run N (50) jobs that go to Spark and back while their processes are killed, from SEED
	$(BIN)/python -m tests.e2e.switch_campaign --runs $(or $(N),50) --seed $(SEED) $(ARGS)

campaign-placement: setup ## plans beside the best there is, on N (200) topologies and all small graphs
	$(BIN)/python -m tests.placement.campaign --topologies $(or $(N),200) --seed $(SEED) $(ARGS)

campaign-settling: setup ## N (200) random jobs that replan: at most one migration for each change of their traffic
	$(BIN)/python -m tests.placement.settling --series $(or $(N),200) --seed $(SEED) $(ARGS)

campaign-streams: setup ## run N (10000) streams between machines whose connections are cut at any byte, from SEED
	$(BIN)/python -m tests.transport.stream_model --seeds $(or $(N),10000) --seed $(SEED)

campaign-trees: setup ## run N (10000) simulated multicast trees with switches and faults, starting from SEED
	$(BIN)/python -m tests.multicast.campaign --seeds $(or $(N),10000) --seed $(SEED) $(ARGS)

campaign-busy-roots: setup ## trees of roots with other work beside the best fixed ones, N (225: all) stories, from SEED
	$(BIN)/python -m tests.multicast.busy_roots --cells $(or $(N),225) --seed $(SEED) $(ARGS)

campaign-heads: setup ## fuzz what reads the bytes of other machines for SECONDS, starting from SEED
	$(BIN)/python -m tests.heads.fuzz --seconds $(SECONDS) --seed $(SEED)

campaign-relays: setup ## run N (10000) simulated streams through relays with faults, starting from SEED
	$(BIN)/python -m tests.relaying.campaign --seeds $(or $(N),10000) --seed $(SEED) $(ARGS)

campaign-bursts: setup ## let the burst detector decide about N (200) random bursts, starting from SEED
	$(BIN)/python -m tests.bridge.simulated_range $(or $(N),200) $(SEED)

campaign-rdma: setup ## torment RDMA in guests with N (2000) messages a step from SEED, send a million messages, run jobs (PARTS)
	$(BIN)/python -m tests.guests --guests 2 --limit 3600 -- python3 -m tests.guests.torture $(or $(N),2000) $(SEED)
	$(BIN)/python -m tests.guests --guests 2 --limit 3600 -- python3 -m tests.guests.memory 1000000
	$(BIN)/python -m tests.guests --guests 3 --jobs --limit 3600 -- python3 -m tests.guests.job exact $(or $(PARTS),rdma tcp rdma tcp)

campaign-properties: setup ## try N (2000) examples of each property that the suite tries a few of
	PENSTOCK_EXAMPLES=$(or $(N),2000) $(BIN)/python -m pytest -n $(JOBS) -m hypothesis --timeout 0 $(ARGS)

campaign-planted: setup ## plant each fault of a table, which the command beside it must find
	$(BIN)/python -m tests.planted_campaign $(ARGS)

stubs: setup ## write the type stub of the native core anew
	$(BIN)/python -m nanobind.stubgen -m penstock.runtime._native -p penstock/runtime/native/stub.pat \
	  -o penstock/runtime/_native.pyi

states: setup ## write the diagrams of docs/states.md anew
	$(BIN)/python -m tests.docs.states_page

status: setup ## write docs/status.md anew
	$(BIN)/python -m tests.docs.status_page

options: setup ## write the tables of options in docs/running.md anew
	$(BIN)/python -m tests.docs.options_table

lock: ## pin requirements/*.in anew (needs uv)
	for f in run dev bench; do uv pip compile --universal --python-version 3.10 --no-emit-index-url --no-emit-find-links \
	  --generate-hashes --custom-compile-command "make lock" requirements/$$f.in -o requirements/$$f.txt; done

clean: ## remove .venv and everything built
	rm -rf .venv build dist benchmarks/results .mypy_cache .ruff_cache .import_linter_cache .pytest_cache .hypothesis
