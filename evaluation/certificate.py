"""A certificate that a draft changes nothing: the target's outputs with and without it.

    python evaluation/certificate.py --target HuggingFaceTB/SmolLM2-135M-Instruct --draft outputs/smollm2-eagle3 \
        --prompts 40 --dtype float32

Greedy: the same prompts by `target.generate` with and without the draft, alone and in batches, chain and tree; where
an output differs, the position and the margin between the target's two best logits there. Sampled: sequences with the
draft against the exact distribution of the target (top-k 4, three tokens: 64 sequences), by a chi-square test.
Writes certificate.json beside the draft, and prints the line for its card. Exit status 1 when a greedy output in
float32 differs.
"""

import argparse
import itertools
import json
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from tqdm.auto import tqdm
from transformers import AutoModel, AutoTokenizer, PreTrainedTokenizerBase

from eagle3_llama.trainer.frozen_target import end_of_turn_ids, load_target

PROMPTS = Path(__file__).with_name("prompts.txt")
TREE = {"top_k": 4, "depth": 4, "total_tokens": 16}
TOP_K, LENGTH = 4, 3  # of the sampled sequences


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare a target's outputs with and without its draft.")
    parser.add_argument("--target", required=True, help="Hub name or folder")
    parser.add_argument("--target_gguf_file", help="GGUF file in that folder")
    parser.add_argument("--draft", required=True, help="Hub name or folder")
    parser.add_argument("--prompts", type=int, default=40, help="how many (default 40)")
    parser.add_argument("--prompts_file", default=str(PROMPTS), help="a text file, one prompt a line")
    parser.add_argument("--dtype", default="float32", help="of target and draft (default float32)")
    parser.add_argument("--max_new_tokens", type=int, default=48)
    parser.add_argument("--num_draft_tokens", type=int, default=3, help="length of the chain (default 3)")
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--samples", type=int, default=400, help="sampled sequences a prompt (default 400)")
    parser.add_argument("--sampled_prompts", type=int, default=2, help="prompts of the sampled test (default 2)")
    parser.add_argument("--output", help="JSON file (default certificate.json in the draft's folder, or here)")
    return parser.parse_args()


def load_all(target: str, gguf_file: str | None, draft: str, dtype: str):
    """Tokenizer (padding on the left), target, and draft bound to it."""
    options = {"gguf_file": gguf_file} if gguf_file else {}
    tokenizer = AutoTokenizer.from_pretrained(target, padding_side="left", **options)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = load_target(target, gguf_file=gguf_file, dtype=dtype)
    if torch.cuda.is_available():
        model = model.cuda()
    loaded = AutoModel.from_pretrained(draft, trust_remote_code=True, dtype=model.dtype)
    return tokenizer, model, loaded.to(model.device).bind_target(model).eval()


def chat_inputs(tokenizer: PreTrainedTokenizerBase, prompts: list[str]) -> dict[str, Tensor]:
    messages = [[{"role": "user", "content": prompt}] for prompt in prompts]
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )


def greedy(target, draft, draft_name, tokenizer, prompts, batch_size, max_new_tokens, **options) -> list[list[int]]:
    """New tokens of every prompt, up to the end of its answer; without the draft when `draft` is None."""
    answers, eos = [], set(end_of_turn_ids(target))
    if draft is not None:
        options |= dict(custom_generate=draft_name, trust_remote_code=True, assistant_model=draft)
    for start in range(0, len(prompts), batch_size):
        inputs = chat_inputs(tokenizer, prompts[start : start + batch_size]).to(target.device)
        output = target.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens, **options)
        for row in output[:, inputs["input_ids"].shape[1] :].tolist():
            stop = next((i + 1 for i, token in enumerate(row) if token in eos), len(row))
            answers.append(row[:stop])
    return answers


@torch.no_grad()
def first_differences(target, tokenizer, prompts, plain, drafted) -> list[dict]:
    """Prompt, position and margin of the target's two best logits, for every output that differs."""
    found = []
    for prompt, a, b in zip(prompts, plain, drafted, strict=True):
        if a != b:
            position = next(
                (i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), min(len(a), len(b))
            )
            ids = chat_inputs(tokenizer, [prompt])["input_ids"].to(target.device)
            ids = torch.cat([ids, torch.tensor([a[:position]], dtype=ids.dtype, device=ids.device)], dim=1)
            best = target(ids).logits[0, -1].float().topk(2).values
            found.append({"prompt": prompt, "position": position, "margin": (best[0] - best[1]).item()})
    return found


@torch.no_grad()
def exact_distribution(target, ids: Tensor) -> dict[tuple[int, ...], float]:
    """Probability of every sequence of LENGTH tokens after ids [1,P] when the target samples with top-k."""
    sequences = {(): 1.0}
    for _ in range(LENGTH):
        prefixes = torch.tensor([list(sequence) for sequence in sequences], dtype=ids.dtype, device=ids.device)
        rows = torch.cat([ids.expand(len(sequences), -1), prefixes.view(len(sequences), -1)], dim=1)
        logits = target(rows, logits_to_keep=1).logits[:, -1].float()
        logits[:, end_of_turn_ids(target)] = float("-inf")  # as min_new_tokens has it
        values, tokens = logits.topk(TOP_K)
        longer = {}
        for (prefix, p), q, nexts in zip(sequences.items(), values.softmax(-1).tolist(), tokens.tolist(), strict=True):
            longer |= {(*prefix, token): p * share for token, share in zip(nexts, q, strict=True)}
        sequences = longer
    return sequences


def chi_square(observed: dict, expected: dict[tuple[int, ...], float], total: int) -> float:
    """p-value of the counts against the probabilities; outcomes expected less than five times are put together."""
    impossible = [sequence for sequence in observed if sequence not in expected]
    if impossible:
        return 0.0
    frequent = [sequence for sequence, p in expected.items() if p * total >= 5]
    pairs = [(observed.get(sequence, 0), expected[sequence] * total) for sequence in frequent]
    rest = total - sum(count for count, _ in pairs), total - sum(mean for _, mean in pairs)
    pairs += [rest] if rest[1] > 1 else []
    statistic = sum((count - mean) ** 2 / mean for count, mean in pairs)
    freedom = torch.tensor((len(pairs) - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)).item()


def sampled_test(target, draft, draft_name, tokenizer, prompt, samples, options) -> float:
    """p-value of sequences sampled with the draft against the target's exact distribution."""
    inputs = chat_inputs(tokenizer, [prompt]).to(target.device)
    expected, counts = exact_distribution(target, inputs["input_ids"]), {}
    for size in [100] * (samples // 100) + [samples % 100] * (samples % 100 > 0):
        output = target.generate(
            **inputs,
            do_sample=True,
            temperature=1.0,
            top_p=1.0,
            top_k=TOP_K,
            num_return_sequences=size,
            max_new_tokens=LENGTH,
            min_new_tokens=LENGTH,
            custom_generate=draft_name,
            trust_remote_code=True,
            assistant_model=draft,
            **options,
        )
        for row in output[:, -LENGTH:].tolist():
            counts[tuple(row)] = counts.get(tuple(row), 0) + 1
    return chi_square(counts, expected, samples)


def main() -> None:
    args = parse_arguments()
    prompts = [line.strip() for line in Path(args.prompts_file).read_text().splitlines() if line.strip()]
    if not 1 <= args.prompts <= len(prompts):
        raise SystemExit(f"--prompts is {args.prompts}; {args.prompts_file} has {len(prompts)}")
    prompts = prompts[: args.prompts]
    tokenizer, target, draft = load_all(args.target, args.target_gguf_file, args.draft, args.dtype)
    proposals = {"chain": {"num_draft_tokens": args.num_draft_tokens}, "tree": {"tree": TREE}}
    table, runs = Table("proposal", "batch", "identical", "first differences (position: margin)"), []
    for size in args.batch_sizes:
        plain = greedy(target, None, None, tokenizer, prompts, size, args.max_new_tokens)
        for name, options in tqdm(proposals.items(), desc=f"greedy, batch {size}", leave=False):
            drafted = greedy(target, draft, args.draft, tokenizer, prompts, size, args.max_new_tokens, **options)
            different = first_differences(target, tokenizer, prompts, plain, drafted)
            same = len(prompts) - len(different)
            runs.append({"proposal": name, "batch": size, "identical": same, "different": different})
            where = ", ".join(f"{item['position']}: {item['margin']:.2g}" for item in different)
            table.add_row(name, str(size), f"{same}/{len(prompts)}", where)
    torch.manual_seed(0)
    sampled = [
        {
            "proposal": name,
            "prompt": prompt,
            "p_value": sampled_test(target, draft, args.draft, tokenizer, prompt, args.samples, options),
        }
        for (name, options), prompt in itertools.product(proposals.items(), prompts[: args.sampled_prompts])
    ]
    Console().print(table)
    identical, lowest = min(run["identical"] for run in runs), min((test["p_value"] for test in sampled), default=1.0)
    line = (
        f"greedy {args.dtype}: {identical}/{len(prompts)} identical (chain and tree, batch {args.batch_sizes}); "
        f"sampled: lowest p-value {lowest:.3f} of {len(sampled)} chi-square tests with {args.samples} samples"
    )
    print(line)
    folder = Path(args.draft) if Path(args.draft).is_dir() else Path()
    path = Path(args.output) if args.output else folder / "certificate.json"
    path.write_text(json.dumps({"line": line, "arguments": vars(args), "greedy": runs, "sampled": sampled}, indent=1))
    if args.dtype == "float32" and identical < len(prompts):
        sys.exit(1)


if __name__ == "__main__":
    main()
