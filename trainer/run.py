"""Distil an EAGLE-3 draft, measure it, and push it.

    python trainer/run.py --config trainer/recipes/smollm2_135m.yaml
    python trainer/run.py --config trainer/recipes/llama3_8b.yaml --push_to_hub --hub_model_id you/llama3-8b-eagle3
    torchrun --nproc_per_node 4 trainer/run.py --config trainer/recipes/llama3_8b.yaml

Started again with the same command it resumes from the last checkpoint. `--preview 3` only shows the data.
"""

import json
import logging
import re
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer
from trl import TrlParser

from eagle3_llama.evaluation.acceptance import DEFINITION, measure
from eagle3_llama.modeling_eagle3_llama import LlamaForCausalLMEagle3
from eagle3_llama.trainer.conversations import format_preview, held_out_prompts, tokenize_rows
from eagle3_llama.trainer.eagle3_config import Eagle3Config
from eagle3_llama.trainer.eagle3_trainer import DRAFT_OPTIONS, Eagle3Trainer
from eagle3_llama.trainer.frozen_target import end_of_turn_ids, load_target
from eagle3_llama.trainer.hub import RECIPE, provenance, push_draft, write_card
from eagle3_llama.trainer.records import load_rows

# What else changes the weights, if only by rounding.
ROUNDING = "data_seed adam_epsilon fp16 ttt_attention target_tokens_at_once world_size".split()
PROJECTIONS = ["fc", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass
class ScriptArguments:
    """Target, data and measurement of one run; the trainer's options are `Eagle3Config`'s."""

    target_name_or_path: str = field(metadata={"help": "The frozen target: Hub name or folder."})
    target_revision: str | None = field(default=None, metadata={"help": "Branch, tag or commit of the target."})
    target_gguf_file: str | None = field(default=None, metadata={"help": "GGUF file in that folder, dequantised."})
    target_adapter: str | None = field(default=None, metadata={"help": "PEFT adapter to merge into the target."})
    target_dtype: str = field(default="bfloat16", metadata={"help": "dtype of the target while training."})
    target_attn_implementation: str | None = field(
        default=None, metadata={"help": "sdpa or flash_attention_2; in training eager runs as sdpa."}
    )
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code from the target's repository."})

    draft_name_or_path: str | None = field(default=None, metadata={"help": "A draft to go on from or to adapt."})
    use_peft: bool = field(default=False, metadata={"help": "Train a LoRA on that draft instead of its weights."})
    lora_r: int = field(default=16, metadata={"help": "Rank of the LoRA."})
    lora_alpha: int = field(default=32, metadata={"help": "Scale of the LoRA: alpha / r."})
    lora_dropout: float = field(default=0.0, metadata={"help": "Dropout on the LoRA's input."})
    lora_target_modules: list[str] = field(
        default_factory=lambda: list(PROJECTIONS), metadata={"help": "Modules with a LoRA: fc and the projections."}
    )

    dataset_name: list[str] = field(
        default_factory=list,
        metadata={"help": "Hub data sets (user/name or user/name:config), .json, .jsonl, .parquet files, or folders."},
    )
    dataset_weights: list[float] | None = field(default=None, metadata={"help": "Share of rows from each of them."})
    dataset_split: str = field(default="train", metadata={"help": "Split of Hub data sets."})
    skip_malformed: bool = field(default=False, metadata={"help": "Go on with the good records, count the bad."})
    max_samples: int | None = field(default=None, metadata={"help": "Random sample of this many conversations."})
    eval_samples: int = field(default=64, metadata={"help": "Conversations held out for evaluation and measuring."})
    preview: int = field(default=0, metadata={"help": "Print this many rows, supervised tokens marked, and stop."})

    measure_prompts: int = field(default=16, metadata={"help": "Held-out prompts to decode after training; 0: none."})
    measure_draft_tokens: int = field(default=3, metadata={"help": "Draft tokens of the measured chain."})
    measure_new_tokens: int = field(default=64, metadata={"help": "New tokens of each measured answer, at most."})
    measure_dtype: str | None = field(default=None, metadata={"help": "dtype while measuring; default target_dtype."})
    max_prompt_length: int = field(default=256, metadata={"help": "Tokens of a measured prompt, at most."})

    def __post_init__(self):
        if not self.dataset_name:
            raise ValueError("--dataset_name is missing: name a Hub data set, a file or a folder")
        if self.measure_prompts and not self.eval_samples:
            raise ValueError("--measure_prompts needs held-out conversations: raise --eval_samples")
        if self.use_peft and self.draft_name_or_path is None:
            raise ValueError("--use_peft adapts a trained draft: name it with --draft_name_or_path")


def load_data(script: ScriptArguments, args: Eagle3Config, tokenizer) -> tuple[Dataset, Dataset | None]:
    """Tokenised rows to train on, and the held-out ones. Says how many were left out, and why."""
    print("reading and tokenising the conversations (a minute for some ten thousand)", flush=True)
    rows, report = load_rows(
        script.dataset_name,
        split=script.dataset_split,
        weights=script.dataset_weights,
        skip_malformed=script.skip_malformed,
        max_samples=script.max_samples,
        seed=args.seed,
    )
    dataset, dropped = tokenize_rows(rows, tokenizer, args.max_document_length, args.dataset_num_proc)
    reasons = "".join(f", {count} dropped ({reason})" for reason, count in dropped.most_common())
    print(f"{len(dataset)} conversations, {report.malformed} malformed records skipped{reasons}")
    if not script.eval_samples or script.preview:
        return dataset, None
    if script.eval_samples >= len(dataset):
        raise ValueError(
            f"--eval_samples {script.eval_samples} leaves nothing of {len(dataset)} conversations to train on"
        )
    split = dataset.train_test_split(test_size=script.eval_samples, seed=args.seed)
    return split["train"], split["test"]


def last_checkpoint(output_dir: str) -> str | None:
    """The newest complete checkpoint: its trainer_state.json is written last."""
    found = {
        int(path.parent.name.split("-")[1]): path.parent
        for path in Path(output_dir).glob("checkpoint-*/trainer_state.json")
    }
    return str(found[max(found)]) if found else None


def check_recipe(script: ScriptArguments, args: Eagle3Config) -> None:
    """Remember the recipe in the output folder; a ValueError if it holds a run of another one."""
    ignored = re.compile("preview|measure_.*|max_prompt_length|trust_remote_code")
    recipe = {key: value for key, value in asdict(script).items() if not ignored.fullmatch(key)}
    recipe |= {key: getattr(args, key) for key in (*DRAFT_OPTIONS, *RECIPE, *ROUNDING)}
    recipe = json.loads(json.dumps(recipe, default=str))
    path = Path(args.output_dir) / "recipe.json"
    if path.exists() and last_checkpoint(args.output_dir):
        before = json.loads(path.read_text())
        if changed := [key for key in recipe if before.get(key) != recipe[key]]:
            changes = ", ".join(f"{key}: {before.get(key)} -> {recipe[key]}" for key in changed)
            raise ValueError(
                f"{args.output_dir} holds a run of another recipe ({changes}); remove it or take another --output_dir"
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(recipe, indent=1))


def measure_draft(script: ScriptArguments, trainer: Eagle3Trainer, prompts: list[list[int]]) -> dict:
    """Decode held-out prompts with and without the draft; the figures also go into acceptance.json and the card."""
    # Without the wrapper that runs forward in the training's autocast.
    trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
    target, draft = trainer.target, trainer.draft.eval()
    if script.measure_dtype is not None:
        target = target.to(getattr(torch, script.measure_dtype))
    figures = measure(
        target,
        draft.to(target.dtype),
        prompts,
        script.measure_draft_tokens,
        script.measure_new_tokens,
        end_of_turn_ids(target),
    )
    figures |= {"seed": trainer.args.seed, "definition": DEFINITION, **provenance()}
    folder = Path(trainer.args.output_dir)
    (folder / "acceptance.json").write_text(json.dumps(figures, indent=1))
    trainer.card["measured"] = figures
    write_card(trainer, str(folder))
    return figures


def print_figures(figures: dict) -> None:
    table = Table(title=f"held-out prompts, {figures['mode']}, {figures['dtype']}", title_justify="left")
    for name in ("", "without draft", "with draft"):
        table.add_column(name, justify="left" if not name else "right")
    positions = " ".join(f"{share:.3f}" for share in figures["acceptance_per_position"])
    plain, fast = figures["tokens_per_second_without_draft"], figures["tokens_per_second"]
    table.add_row("acceptance length (tau, with the target's own token)", "1.000", f"{figures['tau']:.3f}")
    table.add_row("accepted per position", "", positions)
    table.add_row("tokens per second", f"{plain:.1f}", f"{fast:.1f} ({figures['speedup']:.2f} x)")
    table.add_row("same output", "", f"{figures['identical_outputs']} of {figures['prompts']}")
    Console(width=110).print(table)


def main() -> None:
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    script, args = TrlParser((ScriptArguments, Eagle3Config)).parse_args_and_config()
    tokenizer = AutoTokenizer.from_pretrained(
        script.target_name_or_path,
        revision=script.target_revision,
        trust_remote_code=script.trust_remote_code,
        **({"gguf_file": script.target_gguf_file} if script.target_gguf_file else {}),
    )
    train_dataset, eval_dataset = load_data(script, args, tokenizer)
    if script.preview:
        print(format_preview(train_dataset, tokenizer, script.preview))
        return
    check_recipe(script, args)
    print("loading the target", flush=True)
    target = load_target(
        script.target_name_or_path,
        revision=script.target_revision,
        gguf_file=script.target_gguf_file,
        adapter=script.target_adapter,
        dtype=script.target_dtype,
        attn_implementation=script.target_attn_implementation,
        trust_remote_code=script.trust_remote_code,
    )
    draft = None
    if script.draft_name_or_path is not None:
        draft = LlamaForCausalLMEagle3.from_pretrained(script.draft_name_or_path, dtype=torch.float32)
    peft_config = None
    if script.use_peft:
        peft_config = LoraConfig(
            r=script.lora_r,
            lora_alpha=script.lora_alpha,
            lora_dropout=script.lora_dropout,
            target_modules=script.lora_target_modules,
        )
    trainer = Eagle3Trainer(
        target=target,
        args=args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        model=draft,
        peft_config=peft_config,
        card={
            "datasets": script.dataset_name,
            "target_revision": script.target_revision,
            "target_gguf_file": script.target_gguf_file,
            "target_adapter": script.target_adapter,
        },
    )
    resume = last_checkpoint(args.output_dir)
    if resume:
        print(f"resuming from {resume}", flush=True)
    prompts = []
    if script.measure_prompts:  # before the training: it would be a pity to find none after it
        prompts = held_out_prompts(trainer.eval_dataset, script.measure_prompts, script.max_prompt_length)
        if not prompts:
            raise ValueError(
                f"no held-out prompt has at most --max_prompt_length {script.max_prompt_length} tokens: raise it"
            )
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(_internal_call=True)  # only saves; it is pushed with its figures
    if eval_dataset is not None and args.eval_strategy != "no":
        trainer.evaluate()
    if prompts and trainer.is_world_process_zero():
        print_figures(measure_draft(script, trainer, prompts))
    if args.push_to_hub and trainer.is_world_process_zero():
        push_draft(trainer, args.output_dir, "End of training", blocking=True)
    trainer.accelerator.end_training()
    if not trainer.is_world_process_zero():
        return
    where = trainer.hub_model_id if args.push_to_hub else args.output_dir
    print(
        "Load the draft:\n"
        "    from transformers import AutoModel\n"
        f'    draft = AutoModel.from_pretrained("{where}", trust_remote_code=True)\n'
        "    draft.bind_target(target)"
    )


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on from the last checkpoint", file=sys.stderr)
        sys.exit(130)
