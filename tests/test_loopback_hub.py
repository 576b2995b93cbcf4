"""The loopback Hub answers the real client as the Hub does."""

import json

import httpx2
import pytest
import torch
from huggingface_hub import CommitOperationDelete, HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors.torch import save_file

CONFIG_CODE = """
from transformers import PreTrainedConfig


class ToyConfig(PreTrainedConfig):
    model_type = "loopback_toy"
    width: int = 4
"""
MODEL_CODE = """
import torch
from transformers import PreTrainedModel

from .configuration_toy import ToyConfig


class ToyModel(PreTrainedModel):
    config_class = ToyConfig

    def __init__(self, config):
        super().__init__(config)
        self.proj = torch.nn.Linear(config.width, config.width)
        self.norm = torch.nn.LayerNorm(config.width)
        self.post_init()

    def forward(self, x):
        return self.norm(self.proj(x))
"""


def tiny_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def toy(tmp_path):
    """A folder with a model of its own code: proj is the identity, so the output is the layer norm of the input."""
    folder = tmp_path / "toy"
    folder.mkdir()
    (folder / "configuration_toy.py").write_text(CONFIG_CODE)
    (folder / "modeling_toy.py").write_text(MODEL_CODE)
    auto_map = {"AutoConfig": "configuration_toy.ToyConfig", "AutoModel": "modeling_toy.ToyModel"}
    config = {"model_type": "loopback_toy", "width": 4, "architectures": ["ToyModel"], "auto_map": auto_map}
    (folder / "config.json").write_text(json.dumps(config))
    weights = {"proj.weight": torch.eye(4), "proj.bias": torch.zeros(4)}
    weights |= {"norm.weight": torch.ones(4), "norm.bias": torch.zeros(4)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_push_and_pull_a_model(hub, run_clean):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).push_to_hub("tester/llama", revision="v2")
    model = tiny_llama()
    model.push_to_hub("tester/llama", revision="v2")
    assert {"config.json", "model.safetensors", "tokenizer.json"} < set(hub.files("tester/llama", "v2"))
    assert set(hub.files("tester/llama")) == {".gitattributes"}
    printed = run_clean(
        """
        import sys
        from transformers import AutoModelForCausalLM, AutoTokenizer
        repo, revision = sys.argv[1:]
        ids = AutoTokenizer.from_pretrained(repo, revision=revision)("c a b", return_tensors="pt").input_ids
        print(AutoModelForCausalLM.from_pretrained(repo, revision=revision)(ids).logits.double().sum().item())
        """,
        "tester/llama",
        "v2",
    )
    expected = model(torch.tensor([[2, 0, 1]])).logits.double().sum().item()
    assert float(printed) == pytest.approx(expected, abs=1e-5)


def test_custom_code_and_its_adapter_load_for_a_stranger(hub, toy, run_clean):
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModel

    api = HfApi()
    api.create_repo("tester/toy")
    api.upload_folder(repo_id="tester/toy", folder_path=toy)
    base = AutoModel.from_pretrained("tester/toy", trust_remote_code=True)
    tuned = get_peft_model(base, LoraConfig(r=2, target_modules=["proj"], modules_to_save=["norm"]))
    torch.manual_seed(0)
    for parameter in tuned.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter)
    tuned.push_to_hub("tester/toy-lora")
    assert set(hub.files("tester/toy-lora")) == {
        ".gitattributes",
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    x = torch.tensor([[1.0, 2.0, 4.0, 8.0]])
    expected = tuned(x)
    base = AutoModel.from_pretrained("tester/toy", trust_remote_code=True)
    torch.testing.assert_close(PeftModel.from_pretrained(base, "tester/toy-lora")(x), expected)

    printed = run_clean(
        """
        import torch
        from transformers import AutoModel
        x = torch.tensor([[1.0, 2.0, 4.0, 8.0]])
        for repo in "tester/toy", "tester/toy-lora":
            print(AutoModel.from_pretrained(repo, trust_remote_code=True)(x)[0].tolist())
        """
    )
    plain, adapted = (torch.tensor(json.loads(line)) for line in printed.splitlines())
    torch.testing.assert_close(plain, torch.nn.functional.layer_norm(x[0], (4,)))
    torch.testing.assert_close(adapted, expected[0])


def test_commits_branches_and_deletions(hub, tmp_path):
    api = HfApi()
    assert not api.repo_exists("tester/files")
    assert api.create_repo("files").repo_id == "tester/files"
    api.create_repo("tester/files", exist_ok=True)
    first = api.upload_file(path_or_fileobj=b"one", path_in_repo="a.txt", repo_id="tester/files")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "weights.bin").write_bytes(bytes(range(256)))
    (tmp_path / "empty.txt").write_bytes(b"")
    api.upload_folder(repo_id="tester/files", folder_path=tmp_path)
    assert api.list_repo_files("tester/files") == [".gitattributes", "a.txt", "empty.txt", "old/weights.bin"]
    assert api.file_exists("tester/files", "old/weights.bin")

    puts = sum(request.startswith("PUT") for request in hub.requests)
    commits = len(hub.repos["tester/files"])
    api.upload_folder(repo_id="tester/files", folder_path=tmp_path)
    assert puts == 1 == sum(request.startswith("PUT") for request in hub.requests)
    assert len(hub.repos["tester/files"]) == commits, "nothing changed: no commit"

    api.create_branch("tester/files", branch="side/one")
    api.create_branch("tester/files", branch="side/one", exist_ok=True)
    operations = [CommitOperationDelete("a.txt"), CommitOperationDelete("old/")]
    api.create_commit("tester/files", operations, commit_message="tidy", revision="side/one")
    assert set(hub.files("tester/files", "side/one")) == {".gitattributes", "empty.txt"}
    assert "a.txt" in hub.files("tester/files")
    api.delete_file("empty.txt", "tester/files")
    assert not api.file_exists("tester/files", "empty.txt")

    snapshot = snapshot_download("tester/files", revision=first.oid)
    with open(f"{snapshot}/a.txt") as file:
        assert file.read() == "one"


def test_missing_things_have_the_client_s_errors(hub):
    hub.add("tester/files", {"a.txt": b"one"})
    with pytest.raises(RemoteEntryNotFoundError):
        hf_hub_download("tester/files", "b.txt")
    with pytest.raises(RevisionNotFoundError):
        hf_hub_download("tester/files", "a.txt", revision="nowhere")
    with pytest.raises(RepositoryNotFoundError):
        HfApi().model_info("tester/nothing")
    with pytest.raises(RevisionNotFoundError):  # as on the Hub, a commit does not make its branch
        HfApi().upload_file(path_or_fileobj=b"", path_in_repo="b", repo_id="tester/files", revision="nowhere")


def test_refused_token(hub):
    hub.token = "hf_test"
    assert HfApi().whoami()["name"] == "tester"
    tiny_llama().push_to_hub("tester/llama")
    hub.token = "hf_another"
    with pytest.raises(HfHubHTTPError, match="Invalid credentials"):
        tiny_llama().push_to_hub("tester/llama")
    with pytest.raises(HfHubHTTPError, match="401"):
        tiny_llama().push_to_hub("tester/llama", token=False)
    assert HfApi(token=False).model_info("tester/llama").sha == hub.files("tester/llama").sha


@pytest.mark.parametrize("uploads, error", [(0, RuntimeError), (1, httpx2.RemoteProtocolError)])
def test_network_loss_in_the_middle_of_a_push(hub, uploads, error):
    """The weights are lost, or they arrive and the commit is lost. The same push works once the network is back."""
    hub.fail_uploads_after(uploads)
    with pytest.raises(error):
        tiny_llama().push_to_hub("tester/llama")
    assert len(hub.objects) == uploads
    assert "config.json" not in hub.files("tester/llama")
    hub.fail_uploads_after(9)
    tiny_llama().push_to_hub("tester/llama")
    assert "config.json" in hub.files("tester/llama")


def test_a_card_must_name_models_and_data_of_the_hub(hub):
    hub.add("tester/card", {})

    def push(metadata):
        card = f"---\nlibrary_name: transformers\n{metadata}\ntags: [eagle3]\n---\n# Draft\n".encode()
        HfApi().upload_file(path_or_fileobj=card, path_in_repo="README.md", repo_id="tester/card")

    push("base_model: tester/llama\ndatasets:\n- tester/chat")
    push("base_model:\n- tester/llama")
    with pytest.raises(ValueError, match='"base_model" with value "/data/llama"'):
        push("base_model: /data/llama")
    with pytest.raises(ValueError, match='"datasets" with value "./chat.jsonl"'):
        push("datasets:\n- tester/chat\n- ./chat.jsonl")


def test_trainer_pushes_while_it_trains(hub, tmp_path):
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=tmp_path / "run",
        push_to_hub=True,
        hub_model_id="tester/trained",
        hub_always_push=True,
        max_steps=2,
        save_steps=1,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    rows = [{"input_ids": list(range(8)), "labels": list(range(8))}] * 16
    trainer = Trainer(tiny_llama(), arguments, train_dataset=rows)
    trainer.train()
    trainer.push_to_hub()
    assert {"model.safetensors", "training_args.bin", "README.md"} < set(hub.files("tester/trained"))
    assert len(hub.repos["tester/trained"]) > 2


def test_data_set_loads(hub, tmp_path):
    from datasets import load_dataset

    rows = [{"messages": [{"role": "user", "content": f"question {i}"}]} for i in range(3)]
    hub.add("datasets/tester/chat", {"data/train.jsonl": "\n".join(map(json.dumps, rows)).encode()})
    assert load_dataset("tester/chat", split="train", cache_dir=tmp_path).to_list() == rows
