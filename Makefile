# Everything runs from a fresh clone with python3.11 and pip; each target installs what it needs into
# .venv once (stamp files), so `make run` never downloads torch.
PYTHON ?= python3.11
VENV   ?= .venv
JOBS   ?= 0
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest -n $(JOBS)

.PHONY: run test test-slow lint bench install install-run image-user compose-check clean

run: $(VENV)/.run
	$(BIN)/sluice serve -c configs/local.yaml

test: $(VENV)/.dev
	$(PYTEST) -m "not slow and not gpu"

test-slow: $(VENV)/.dev
	$(PYTEST) -m "slow and not gpu"

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy tests

bench: $(VENV)/.dev
	$(PYTEST) tests/benchmarks -o python_files='bench_*.py' -s

install: $(VENV)/.dev

install-run: $(VENV)/.run

# The image's own user and the folder of its volume (deploy/Dockerfile).
image-user:
	useradd --system --uid 10001 --no-create-home sluice
	install -d -o sluice -g sluice /var/cache/sluice

# Debian's docker-compose reads compose.yaml; the test looks at what it cannot see. No engine needed.
compose-check: $(VENV)/.dev
	docker-compose -f compose.yaml config --quiet
	$(BIN)/python -m pytest -q tests/architecture/test_deploy.py

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# The gateway and its local fleet.
$(VENV)/.run: $(VENV)/bin/python pyproject.toml constraints.txt requirements-local.txt
	@echo "Installing gateway and local fleet into $(VENV): 220 MB, once."
	$(PIP) install -q -c constraints.txt -e .
	$(PIP) install -q --no-deps -r requirements-local.txt
	touch $@

# The same, with training, tests and linters.
$(VENV)/.dev: $(VENV)/bin/python pyproject.toml constraints.txt requirements-local.txt
	@echo "Installing everything the tests need into $(VENV), torch among it: once."
	$(PIP) install -q -c constraints.txt -e '.[dev,train]'
	$(PIP) install -q --no-deps -r requirements-local.txt
	touch $@ $(VENV)/.run
