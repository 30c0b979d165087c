# make demo   set up, then watch PPO learn        make check   ruff, vulture, pyright
# make demo-jax   the same with training and sampling by JAX
# make test   set up, then the tests            make bench   benchmarks, one JSON line each
# make test-fast  short tests without a cluster     make test-slow  what make test leaves out
# make chaos  kill processes of a service while an SDK client trains (about 25 minutes)
# make simulate  10,000 seeds of the simulated controller (about 10 minutes)
# make gpu-check  what can be proved of the GPU paths without a GPU (the first time installs 9 GB)
# make models  measure the table of families in docs/reference/models.md (about 40 minutes)
# make sdk-matrix  every call of twelve versions of the tinker SDK (about 3 minutes)

# The first of these that runs. A name on PATH can be an empty shim.
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do "$$p" -c '' 2>/dev/null && command -v "$$p" && break; done)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
GPU_VENV := .venv-gpu
GPU_READY := $(GPU_VENV)/.ready
# A machine with a GPU gets the CUDA builds, and any other the CPU builds.
ENGINE := $(shell command -v nvidia-smi >/dev/null 2>&1 && echo gpu || echo cpu)
# Two processes: one for the tests that start Ray, which keeps its address in one file of the machine,
# and one for the others.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder
# Tests start hundreds of processes, and without kept bytecode each compiles this package again.
export PYTHONDONTWRITEBYTECODE :=
TORCH := $(shell sed -n 's/^ *"torch==\(.*\)",/\1/p' pyproject.toml)

.PHONY: demo demo-jax test test-slow test-fast check bench chaos simulate models sdk-matrix gpu-check setup clean

setup: $(READY)

$(READY): pyproject.toml conformance/pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 12) else "Python 3.11 or 3.12 is needed, %s.%s was found; set PYTHON=/path/to/python3.11" % v)'
	@echo "setting up $(VENV) for $(ENGINE) (a few minutes, about 4 GB)"
	$(PYTHON) -m venv $(VENV)
ifeq ($(ENGINE),cpu)
	# torch must be first, because vLLM for CPU needs its CPU build. If the configured index lacks it,
	# it comes from PyTorch's own index.
	$(BIN)/python -m pip install -q --no-compile "torch==$(TORCH)+cpu" || $(BIN)/python -m pip install -q --no-compile --no-deps --index-url https://download.pytorch.org/whl/cpu "torch==$(TORCH)+cpu"
endif
	# Bytecode is written when a module is first imported: most modules never are.
	$(BIN)/python -m pip install -q --no-compile -e ".[$(ENGINE),deepspeed,adamw8bit,jax,dev]"
	$(BIN)/python -m pip install -q --no-deps -e conformance
ifeq ($(ENGINE),cpu)
	# The default builds of these are for CUDA and break imports with a CPU build of torch. The last
	# line mends torchvision, which engines need for images. This project does not need the others.
	$(BIN)/python -m pip uninstall -q -y torchaudio torchcodec
	$(BIN)/python -c "from skyrl_actors import torchvision_cpu; torchvision_cpu.write_hook()"
endif
	@touch $@

demo: $(READY)
	$(BIN)/skyrl-actors demo

demo-jax: $(READY)
	$(BIN)/skyrl-actors train configs/jobs/ppo_tiny_jax.yaml

test: $(READY)
	$(PYTEST) -m "not slow"

# Some slow tests take four minutes on two busy cores, which is near the limit of other tests.
test-slow: $(READY)
	$(PYTEST) -m slow --timeout 900

test-fast: $(READY)
	$(PYTEST) -m "not slow and not cluster and not long"

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/vulture
	$(BIN)/pyright

bench: $(READY)
	@for name in latency sdk storm training sampling transfer phases placement durability hostile; do $(BIN)/python -m bench.$$name || exit 1; done

chaos: $(READY)
	$(BIN)/python -m bench.chaos --kills 100

simulate: $(READY)
	$(BIN)/python -m tests.simulation.world --count 10000

models: $(READY)
	$(BIN)/python -m bench.models --write

sdk-matrix: $(READY)
	$(BIN)/python -m tests.matrix.run

# The CUDA builds of torch and vLLM, beside the CPU builds that the other targets use. `===` does not
# accept a build with a local version such as +cpu.
$(GPU_READY): pyproject.toml
	@echo "setting up $(GPU_VENV) with the CUDA builds (about 10 minutes, 9 GB)"
	$(PYTHON) -m venv $(GPU_VENV)
	$(GPU_VENV)/bin/python -m pip install -q "torch===$(TORCH)"
	$(GPU_VENV)/bin/python -m pip install -q -e ".[gpu,deepspeed,adamw8bit,jax]" "pytest<9.2"
	@touch $@

gpu-check: $(GPU_READY)
	$(GPU_VENV)/bin/python -m tests.gpu_check

clean:
	rm -rf $(VENV) $(GPU_VENV) build *.egg-info .pytest_cache .ruff_cache .hypothesis
