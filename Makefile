# Two commands do all the set-up on a fresh machine: `make demo` and `make test`. Everything lives in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-slow test-second test-arm bench docs gpu-check lint clean
demo: $(STAMP)
	$(BIN)/pbkern demo

test: $(STAMP) lint
	$(BIN)/python -m pytest -q -n 2 --dist worksteal --timeout 900

# With JAX_CHECKOUT=folder, a clone of JAX's repository at the version that is installed, 600 of its tests run as well.
test-slow: $(STAMP)
	$(BIN)/python -m pytest -q -n 2 --timeout 1800 -m slow
	$(if $(JAX_CHECKOUT),$(BIN)/python scripts/jax_tests.py $(JAX_CHECKOUT))

# The default tests with the next Python and JAX, in a Debian system of their own below SECOND. Needs root and debootstrap.
SECOND ?= /var/tmp/pbkern-second
test-second: $(STAMP)
	$(BIN)/python scripts/second_environment.py $(SECOND)

# Conformance tests on AArch64, emulated, in a Debian system below ARM. Needs root, debootstrap and qemu-user-static.
ARM ?= /var/tmp/pbkern-arm
test-arm: $(STAMP)
	$(BIN)/python scripts/arm_environment.py $(ARM)

# The documentation as a site, in build/site; a warning is an error.
docs: $(STAMP)
	$(BIN)/python -m pip install --disable-pip-version-check -q -e '.[docs]'
	$(BIN)/python scripts/docs_site.py

bench: $(STAMP)
	$(BIN)/python -m benchmarks.run

# On a machine with an NVIDIA GPU and jax for CUDA 13: PYTHON names the environment that has them; nothing is downloaded.
gpu-check:
	$(PYTHON) scripts/gpu_check.py

lint: $(STAMP)
	$(BIN)/ruff format --check pbkern tests tutorials examples benchmarks scripts
	$(BIN)/ruff check pbkern tests tutorials examples benchmarks scripts
	$(BIN)/mypy -p pbkern

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q -e '.[test,demo]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) build *.egg-info demo_output
