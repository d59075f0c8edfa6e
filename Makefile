# What is missing is installed into .venv on first use (.ci/setup), from pyproject.toml; a second call installs nothing.
#
# PYTHON=python3.12   which Python makes .venv (3.11 or later; default python3)
# TORCH_ARGS=...      options to pip for PyTorch alone (default: its CPU build, which is all that the notebooks need, where
#                     PyTorch's index of CPU builds answers within seconds; elsewhere the default package index, whose
#                     build may be CUDA's, of gigabytes; the set-up says which)
# JOBS=2              notebooks that run at a time (default 1)
# PAPER=diaa ARGS=...  the paper whose records are made, and arguments to its recorder
# MACHINE=name        all that this machine decides is recorded, under that name; MACHINE= finds one (docs/machines.md)
# IN_PLACE=1          JupyterLab on notebooks/ itself, where saving changes tracked files (default: on copies in runs/lab/)
# FORCE=1             repeat what is up to date (notebook runs in reproduce, notebook checks in test, tests in test-long)
# PART=breaks         the one part of test-long that is run (default: all of them; docs/testing.md has the list)
# SEED=0              of the edits that test-long draws

export PYTHON ?= python3
export SEED ?= 0
JOBS ?= 1
BIN := .venv/bin
READY := .venv/.ready
SCOREBOARD := notebooks/scoreboard.ipynb
NOTEBOOKS := $(filter-out $(SCOREBOARD),$(wildcard notebooks/*.ipynb)) $(wildcard $(SCOREBOARD))
STATIC := $(addprefix tests/notebooks/test_,hygiene.py pictures.py published.py source_cells.py)
GATE := $(BIN)/python -m pytest -q -n 2 --dist loadgroup --no-loadscope-reorder -m 'not long'
LONG := $(BIN)/python -m pytest -q -n 2 --dist loadgroup --no-loadscope-reorder --durations=20 $(if $(FORCE),,--resume)
ROOT_FLAG := $(if $(filter 0,$(shell id -u)),--allow-root)

.DEFAULT_GOAL := help
.PHONY: help reproduce publish check-figures check test test-long caches lint lab notebooks record record-check bench site clean

help:
	@echo "make reproduce   run every notebook in its quick form; a table of verdicts, exhibits in runs/"
	@echo "make publish     put the exhibits of the finished quick runs into figures/"
	@echo "make check-figures  compare figures/ with the finished quick runs; those that are missing are made"
	@echo "make check       style, layers and unit tests, in a few minutes"
	@echo "make test        what CI runs: lint, unit and property tests, one test a program, the notebooks by nbval"
	@echo "make test-long   what takes a process, a minute, a machine or luck, in parts (PART=breaks); hours"
	@echo "make lint        ruff, import layers, types"
	@echo "make lab         open copies of the notebooks in JupyterLab (runs/lab/; IN_PLACE=1: the notebooks themselves)"
	@echo "make notebooks   fill source cells, run the notebooks in place, and publish what they made"
	@echo "make record      long runs: data/records of one paper (PAPER=diaa) or machine (MACHINE=name); resumable"
	@echo "make record-check  compare records that other code made with today's, by a part (PAPER=diaa)"
	@echo "make bench       the measured numbers (tests/benchmarks)"
	@echo "make site        the site of README, notebooks, cards and API in runs/site"
	@echo "make clean       remove runs/ and caches (not runs/lab/, not .venv, not the cache of corpus and tables)"
	@echo "Variables: see the head of the Makefile."

$(READY): pyproject.toml requirements.lock .ci/setup
	@bash .ci/setup $(TORCH_ARGS)
	@touch $@

# The corpus of installed packages, in the user's cache.
caches: $(READY)
	@echo "== Caches that the notebooks read"
	@OMP_NUM_THREADS=1 $(BIN)/python -m ondevice_studies.prepare  # beside other work two threads wait for each other

$(READY)-long: $(READY)
	@LONG=1 bash .ci/setup $(TORCH_ARGS)
	@touch $@

reproduce: caches
	@echo "== Running the notebooks in their quick form (--jobs $(JOBS)); finished runs are kept"
	@$(BIN)/python -m ondevice.run --jobs $(JOBS) --timeout 1800 $(if $(FORCE),--force)

# PAPER=disco publishes one paper.
publish: $(READY)
	@$(BIN)/python -m ondevice.run publish $(PAPER)
	@$(BIN)/python -m ondevice_studies.readme

# In make test, nbval's run of each notebook is compared in the same way.
check-figures: $(READY)
	@$(BIN)/python -m ondevice_studies.published $(PAPER)

lint: $(READY)
	@echo "== Style (ruff)"
	@$(BIN)/ruff check lib tests notebooks
	@echo "== Import layers (import-linter)"
	@$(BIN)/lint-imports
	@echo "== Types (mypy)"
	@$(BIN)/mypy

check: $(READY)
	@$(BIN)/ruff check -q lib tests notebooks
	@$(BIN)/lint-imports
	@$(BIN)/python -m pytest -q -m 'not long' -n 2 --dist loadfile tests/unit $(STATIC)

test: lint caches
	@echo "== Unit and property tests, one test a program (pytest), in two processes of one thread each"
	@$(GATE) tests/unit tests/properties tests/systems $(STATIC)
	@echo "== Notebooks (nbval), in two such processes; one is skipped while nothing that it uses changes"
	@OMP_NUM_THREADS=1 ONDEVICE_RECHECK=$(FORCE) $(GATE) --durations=7 tests/notebooks/test_stored_outputs.py

# Each part is run, whatever became of the others; the exit code is of them all.
test-long: $(READY)-long caches
	@failed=; for part in $(or $(PART),units properties systems elsewhere edits breaks); do \
		echo "== Long tests: $$part"; began=$$(date +%s); \
		case $$part in \
			units) run="-m long tests/unit tests/properties" ;; \
			properties) run="--hypothesis-profile=random tests/properties" ;; \
			systems) run="-m long tests/systems" ;; \
			elsewhere) run="-m long tests/notebooks/test_stored_outputs.py" ;; \
			edits) run="tests/notebooks/test_edits.py tests/notebooks/test_own_models.py" ;; \
			breaks) run="tests/breaks" ;; \
			*) echo "There is no part $$part."; exit 2 ;; \
		esac; \
		OMP_NUM_THREADS=1 $(LONG) $$run || failed="$$failed $$part"; \
		echo "== $$part: $$(( ($$(date +%s) - began + 30) / 60 )) minutes"; \
	done; if [ -n "$$failed" ]; then echo "Red:$$failed"; exit 1; fi

# Copies that were edited stay, and are named; the others follow their notebooks.
lab: LAB := $(if $(IN_PLACE),notebooks,runs/lab)
lab: $(READY)
	@$(if $(IN_PLACE),,$(BIN)/python -m ondevice.run.lab)
	@echo "== JupyterLab on $(LAB)/; Ctrl-C ends it"
	@$(BIN)/jupyter lab --notebook-dir=$(LAB) $(ROOT_FLAG)

# The maintainers' command: stored outputs and published exhibits come from one run, so it writes to figures/, too.
# record_timing=False and TQDM_DISABLE keep times and progress bars out of the stored notebooks.
notebooks: $(READY)
	@$(BIN)/python -m ondevice.run.sources
	@set -e; for notebook in $(NOTEBOOKS); do \
		echo "== Running $$notebook in place"; \
		env -u MPLBACKEND ONDEVICE_FIGURES=$(CURDIR)/figures TQDM_DISABLE=1 $(BIN)/jupyter nbconvert --to notebook \
			--execute --inplace --ExecutePreprocessor.record_timing=False --ExecutePreprocessor.kernel_name=python3 \
			$$notebook; \
	done
	@$(BIN)/python -m ondevice_studies.readme

# A part of each record that other code made is made again and compared: PAPER=diaa ARGS="--seed 1".
record-check: $(READY)
	@OMP_NUM_THREADS=1 $(BIN)/python -m ondevice_studies.recheck $(PAPER) $(ARGS)

record: $(READY)
	@$(BIN)/python -m ondevice_studies.record $(if $(filter command,$(origin MACHINE)),machine $(MACHINE:%=--name %),$(PAPER)) $(ARGS)

bench: $(READY)
	@set -e; for script in $(wildcard tests/benchmarks/bench_*.py); do \
		echo "== $$script"; $(BIN)/python $$script; \
	done

# Pages are gathered from the repository below runs/site-source; -W: a link that leads nowhere fails.
site: $(READY)
	@echo "== Building runs/site"
	@rm -rf runs/site && mkdir -p runs/site-source
	@$(BIN)/python -m sphinx -qEW --keep-going -c docs -d runs/site-doctrees runs/site-source runs/site
	@echo "Open runs/site/index.html"

clean:
	@echo "== Removing runs/ and caches; notebooks in runs/lab/ stay"
	@if [ -d runs ]; then find runs -mindepth 1 -maxdepth 1 ! -name lab -exec rm -rf {} +; fi
	@rm -rf build .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis
	@find lib tests notebooks -name __pycache__ -prune -exec rm -rf {} +
