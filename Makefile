# Everything sets itself up: a virtual environment in .venv, then the work.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
# Python keeps what it compiles: the tests start many processes.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test quick test-real test-browser test-cuda test-triton test-ray fuzz stress bench docs pictures lint kernels format clean
.DEFAULT_GOAL := test

# pip says a line for each package: nobody waits for minutes without a word. The exit code is that of pip, not of awk.
define install
@rm -f .venv/.done
@{ $(BIN)/python -m pip install --progress-bar off --disable-pip-version-check --no-compile -c constraints.txt -e '.[$(EXTRAS)]' $(LAB) \
	&& touch .venv/.done; } | awk '/^(Collecting|Processing) /{n = split($$2, path, "/"); print "  " path[n]} \
	/^Installing collected/{print "unpacking " NF - 3 " packages"} {fflush()}'
@test -e .venv/.done
endef

$(INSTALLED): EXTRAS := dev
$(INSTALLED): LAB := -e ./lab
$(INSTALLED): pyproject.toml lab/pyproject.toml constraints.txt
	@echo "installing gramwatch and its lab with all that its tests need into .venv: about 100 packages, 2 GB or more with CUDA, some minutes"
	$(PYTHON) -m venv .venv
	$(install)
	@echo "compiling them"
	@$(BIN)/python -m compileall -qq -j 2 .venv/lib || true  # pip has one process; a file is for newer Pythons
	touch $@

# The demo needs half of that.
DEMO := .venv/.demo
$(DEMO): EXTRAS := cli,plot
$(DEMO): pyproject.toml constraints.txt
	@echo "installing gramwatch into .venv: about 40 packages, 1.3 GB or more with CUDA, a few minutes the first time"
	$(PYTHON) -m venv .venv
	$(install)
	touch $@

demo: $(if $(wildcard $(INSTALLED)),$(INSTALLED),$(DEMO))  ## train two small networks, guard them, show what they flag
	$(BIN)/gramwatch demo

# Two cores: the type checker takes one, the compiler of the kernels the other, then the tests take both.
test: $(INSTALLED)  ## lint, types and the tests
	$(MAKE) --jobs=2 lint kernels
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not real"

# One part of each package, and the contract for three detectors: under 90 seconds on two cores.
QUICK := tests/test_imports.py tests/test_package.py tests/test_contract.py tests/numerics/test_statistics.py \
	tests/numerics/test_bounds.py tests/numerics/test_deviation.py tests/watch/test_tap.py tests/detect/test_threshold.py \
	tests/detect/test_detector.py tests/guard/test_guard.py tests/files tests/cli/test_app.py tests/cli/test_info.py
quick: $(INSTALLED)  ## the tests that matter while working
	$(BIN)/ruff check .
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -q \
		-m "not real" -k "not test_contract or gram or guard or energy" $(QUICK)

test-real: $(INSTALLED)  ## the long checks on real networks and data
	$(BIN)/python -m pytest -m real

.venv/.browser: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[browser]'
	npm install --silent --no-save --prefix build/axe axe-core@4.14.0
	touch $@

test-browser: .venv/.browser  ## the report and the live page in headless Chromium (apt-get install chromium chromium-driver npm)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/report/test_page_browser.py tests/deploy/live/test_app_browser.py

test-cuda: $(INSTALLED)  ## the tests that need a GPU, on a GPU
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.on_gpu --write

fuzz: $(INSTALLED)  ## damaged and forged files of every kind, for four minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --seconds 240

.venv/.stress: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[stress]'
	touch $@

stress: .venv/.stress  ## kills, full disks, hostile requests, load, long runs, installs: about an hour on loopback
	OMP_NUM_THREADS=1 NUMBA_NUM_THREADS=1 $(BIN)/python -m tests.stress --write

# Triton's interpreter does not yet take the newest NumPy, so it has an environment of its own.
.venv-triton/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-triton
	.venv-triton/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-e '.[dev]' -e ./lab 'triton==3.6.0' 'numpy<2.4'
	touch $@

test-triton: .venv-triton/.installed  ## the CUDA kernels on CPU tensors, by Triton's interpreter
	TRITON_INTERPRET=1 .venv-triton/bin/python -m pytest -n 2 tests/numerics/kernels

# Ray is large, and a local cluster takes its time to start: it has an environment of its own.
.venv-ray/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-ray
	.venv-ray/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,ray]' -e ./lab
	touch $@

test-ray: .venv-ray/.installed  ## fit and score with Ray Data on a local cluster, in about a minute
	OMP_NUM_THREADS=1 .venv-ray/bin/python -m pytest tests/integrate/test_ray_data.py

.venv/.bench: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	touch $@

bench: .venv/.bench  ## what the detector costs on the CPU, in about 20 minutes (docs/performance.md)
	$(BIN)/python -m lab.benchmarks.overhead

.venv/.docs: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

docs: .venv/.docs  ## the site, in build/site; any warning or broken link within it is an error
	rm -rf build/site build/doctrees
	$(BIN)/python -m sphinx -q -W --keep-going -c docs -d build/doctrees -b html . build/site
	@echo "open build/site/index.html"

pictures: $(INSTALLED)  ## draw the pictures of docs/ anew from their tables (docs/images/demo.png: make demo)
	$(BIN)/python -m gramwatch_lab.figures.results docs/results/*.csv
	$(BIN)/python -m gramwatch_lab.figures.why docs/images/why.png docs/results/guard-resnet20.csv docs/results/guard-wrn40_2-new.csv
	$(BIN)/python -m gramwatch_lab.figures.schematic docs/images/schematic.png
	$(BIN)/python -m gramwatch_lab.figures.calibration docs/images
	$(BIN)/python -m lab.benchmarks.plots

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

kernels: $(INSTALLED)  # kept on disk, so that the processes of the tests do not compile them one by one
	$(BIN)/python -m tests.compile_kernels

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .venv-triton .venv-ray build dist gramwatch-demo gramwatch-evaluation
