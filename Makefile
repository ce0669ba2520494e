# Two commands: `make up` serves real requests, `make test` runs everything CI runs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# A folder named like an installed library (kernels/) must never shadow it.
export PYTHONSAFEPATH := 1
# Every process that the tests start would else compile what it imports anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: up test check test-gpu bench-gpu engines dashboard clean
.DELETE_ON_ERROR:

up: $(VENV)/bin/kvist
	$(BIN)/kvist up $(ARGS)

# The index is compiled first, and kept: every process that the tests start side by side would else compile it, too.
# Tests wait for processes of theirs: two cores are busy with three of them at a time.
test: check
	$(BIN)/kvist compile
	$(BIN)/pytest -n 3 --dist loadgroup $(ARGS)

check: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# What needs a CUDA device: kernels, captured decode steps, transfers out of its memory. With `VENV=` nothing is installed:
# $(PYTHON) needs torch, Triton, NumPy, pytest, msgspec and xxhash of its own, and runs what these are enough for; where it
# has pytest-benchmark, that would refuse `ARGS="-n 8"`.
BARE_PYTEST := $(PYTHON) -m pytest -c /dev/null --rootdir . --import-mode=importlib -m gpu -p no:benchmark
test-gpu bench-gpu: export PYTHONPATH := $(if $(VENV),,$(CURDIR):)$(CURDIR)/benchmarks
test-gpu: $(VENV:%=%/.installed)
ifneq ($(VENV),)
	$(BIN)/pytest -m gpu -n 0 $(ARGS)
else
	$(BARE_PYTEST) --confcutdir tests/kernels tests/kernels $(ARGS)
	$(BARE_PYTEST) --noconftest tests/transfer/test_gpu.py $(ARGS)
endif

bench-gpu: $(VENV:%=%/.installed)
	$(if $(VENV),$(BIN)/python,$(PYTHON)) benchmarks/bench_paged_attention.py $(ARGS)
	$(if $(VENV),$(BIN)/python benchmarks/bench_gpu_engine.py $(ARGS))

# What benchmarks/verify_engines.py drives, and a few tests: the Python files of real engines. They are fetched once.
engines: $(VENV)/.installed
	$(BIN)/python benchmarks/_engine_files.py

# What Grafana and Prometheus show and watch of routers.
dashboard: $(VENV)/.installed
	$(BIN)/python deploy/grafana/make.py

# What `make up` takes. torch goes first: resolved on its own it is the small CPU build, and nothing after it asks for
# another. Python compiles what it imports when it does, which is a small part of what is installed. setuptools would warn
# of a folder that is named like the package.
PIP_INSTALL := PYTHONWARNINGS=ignore $(BIN)/pip install --quiet --no-compile --constraint constraints.txt
$(VENV)/bin/kvist: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(PIP_INSTALL) torch numpy
	$(PIP_INSTALL) --editable '.[engine]'
	touch $@

# xds-protos brings an older copy of OpenTelemetry's protocol, which has to be the one that is written over.
$(VENV)/.installed: $(VENV)/bin/kvist
	$(PIP_INSTALL) xds-protos
	$(PIP_INSTALL) --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
