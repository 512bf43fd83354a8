# Everything builds its own virtual environment from pyproject.toml and constraints.txt.
PYTHON ?= python3
# The newest Python and JAX, for `make test-latest`.
LATEST ?= PYENV_VERSION=3.13.0 python3.13
RUN = .venv/bin/python
PYTEST = $(RUN) -m pytest --numprocesses 2 --dist worksteal
# Nearly all of a test's time is compilation; without optimisation it is half. In one piece: cut into 32 for
# as many threads, what is compiled takes a fifth longer, and to run as well. JAX 0.12 no longer knows the last
# flag of QUICK and ends the process without a word that pytest shows; `test-latest` compiles as users do.
QUICK_LATEST = XLA_FLAGS="--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
QUICK = XLA_FLAGS="--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1 --xla_cpu_use_fusion_emitters=false"

# The files that have such tests: each worker imports every file that it is given.
OPTIMISED = $(shell grep -rl mark.optimised --include='test_*.py' tests)

.PHONY: install docs test-docs demo demo-fast example test test-types test-thorough coverage lint bench bench-quick test-latest test-latest-quick
.PHONY: clean

install: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(RUN) -m pip install --quiet --constraint constraints.txt --editable ".[test]"
	touch $@

.venv/.bench: .venv/.installed
	$(RUN) -m pip install --quiet --constraint constraints.txt --editable ".[bench]"
	touch $@

.venv/.lint: .venv/.installed
	$(RUN) -m pip install --quiet --constraint constraints.txt --editable ".[lint]"
	touch $@

.venv/.coverage: .venv/.installed
	$(RUN) -m pip install --quiet --constraint constraints.txt --editable ".[coverage]"
	touch $@

# The site alone: what the tests need, PyMC among it, is not installed for it.
.venv/.docs: pyproject.toml constraints.txt
	test -d .venv || $(PYTHON) -m venv .venv
	$(RUN) -m pip install --quiet --constraint constraints.txt --editable ".[docs]"
	touch $@

docs: .venv/.docs
	$(QUICK) $(RUN) -m sphinx --jobs 2 --fresh-env --fail-on-warning --keep-going --quiet docs docs/_build/html
	@echo "The site: docs/_build/html/index.html"

# The built site in a browser.
test-docs: install docs
	$(PYTEST) tests/test_site.py

demo: install
	.venv/bin/diffmh reproduce

demo-fast: install
	.venv/bin/diffmh reproduce --fast

example: install
	$(RUN) examples/mixture.py

test: install
	$(QUICK) $(PYTEST) -m "not optimised"
	$(PYTEST) -m optimised $(OPTIMISED)

# Every annotation of a shape or type is checked while the suite runs.
test-types: install
	$(QUICK) $(PYTEST) -m "not optimised" --jaxtyping-packages=diffmh,beartype.beartype

test-thorough: install
	$(PYTEST) --thorough

# Lines and branches of the analysis and of sad, where an untested branch is a wrong number or a wrong refusal.
coverage: .venv/.coverage
	$(QUICK) $(PYTEST) -m "not optimised" tests/analysis tests/continuity tests/test_audit.py tests/sad src/diffmh/sad src/diffmh/analysis \
		--cov=diffmh.analysis --cov=diffmh.sad --cov-branch --cov-report=term:skip-covered --cov-fail-under=90

lint: .venv/.lint
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m pyright
	.venv/bin/lint-imports --no-logo

bench: .venv/.bench
	$(RUN) benchmarks/large.py
	$(RUN) benchmarks/large.py --small-loops normal
	$(RUN) benchmarks/sizes.py
	$(RUN) benchmarks/landscape.py
	$(RUN) benchmarks/slots.py
	$(RUN) benchmarks/core.py
	$(RUN) benchmarks/ising.py
	$(RUN) benchmarks/gibbs.py
	$(RUN) benchmarks/sad.py
	$(RUN) benchmarks/coverage.py
	$(RUN) benchmarks/compare.py
	$(RUN) benchmarks/control.py

bench-quick: .venv/.bench
	$(RUN) benchmarks/large.py --quick

.venv-latest/.installed: pyproject.toml
	$(LATEST) -m venv .venv-latest
	.venv-latest/bin/python -m pip install --quiet --upgrade --editable ".[test]"
	touch $@

LATEST_PYTEST = .venv-latest/bin/python -m pytest --numprocesses 2 --dist worksteal
# Where a new JAX has gone wrong without a word: what is refused, what is continuous, and some of every combination.
LATEST_FILES = tests/analysis tests/continuity tests/test_audit.py tests/sad/test_sad_audit.py \
	$(shell find tests -name 'test_*refusals.py')

test-latest: .venv-latest/.installed
	$(LATEST_PYTEST)

test-latest-quick: .venv-latest/.installed
	$(QUICK_LATEST) $(LATEST_PYTEST) $(LATEST_FILES)
	$(QUICK_LATEST) $(LATEST_PYTEST) tests/covering/test_covering.py tests/covering/test_tools.py --part 1/6

clean:
	rm -rf .venv .venv-latest
