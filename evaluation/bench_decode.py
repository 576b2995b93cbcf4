"""What a draft gains in `target.generate`, and how much of the possible that is.

    python evaluation/bench_decode.py --target HuggingFaceTB/SmolLM2-135M-Instruct --draft outputs/smollm2-eagle3

For each dtype, batch size and proposal: wall-clock ratio to plain `generate` on the same prompts (the median over
rounds in which both take turns), tau, and the ideal ratio at that tau, from forward times measured on their own:

    ideal = tau * target(1) / (target(nodes + 1) + draft(round(tau)) + (depth - 1) * draft(top_k))

where f(w) is the time of one cached pass over w new tokens a row. Efficiency is ratio / ideal: what the loop around
the two models leaves of it. Writes a Markdown table and a JSON file.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from tqdm.auto import tqdm
from transformers import DynamicCache

from eagle3_llama.evaluation.certificate import PROMPTS, chat_inputs, load_all
from eagle3_llama.trainer.hub import machine

CHAINS = {f"chain {k}": {"num_draft_tokens": k} for k in range(1, 8)}
TREES = {
    f"tree {k} x {depth}, {total} nodes": {"tree": {"top_k": k, "depth": depth, "total_tokens": total}}
    for k, depth, total in ((2, 3, 6), (4, 4, 16))
}
CONTEXT = 96  # tokens in the caches while passes are timed


def seconds(function: Callable, repeats: int = 7) -> float:
    """Median time of a call, after one that warms up."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        function()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


@torch.no_grad()
def pass_times(target, draft, batch: int, widths: set[int]) -> tuple[dict[int, float], dict[int, float]]:
    """Seconds of one cached pass of target and draft over w new tokens a row, for every width w."""
    layers, times = draft.config.eagle_aux_hidden_state_layer_ids, ({}, {})
    for width in sorted(widths):
        ids = torch.randint(10, 1000, (batch, CONTEXT), device=target.device)
        caches = DynamicCache(), DynamicCache()
        features = torch.randn(batch, CONTEXT, 3 * target.config.hidden_size, device=target.device, dtype=target.dtype)
        target(ids, cache=caches[0], use_cache=True)
        draft(ids, features, cache=caches[1], use_cache=True)

        def target_pass(ids=ids, cache=caches[0], width=width):
            target(ids[:, :width], cache=cache, use_cache=True, output_hidden_states=layers)
            cache.crop(-width)

        def draft_pass(ids=ids, features=features, cache=caches[1], width=width):
            draft(ids[:, :width], features[:, :width], cache=cache, use_cache=True)
            cache.crop(-width)

        times[0][width], times[1][width] = seconds(target_pass), seconds(draft_pass)
    return times


def shape(options: dict) -> tuple[int, int, int]:
    """(proposed nodes, depth, nodes of a level) of a proposal."""
    tree = options.get("tree")
    k = options.get("num_draft_tokens")
    return (tree["total_tokens"], tree["depth"], tree["top_k"]) if tree else (k, k, 1)


def generate(target, draft, draft_name, inputs, new_tokens, options):
    """One `generate` over the batch, exactly `new_tokens` long; options None is without the draft."""
    common = dict(do_sample=False, max_new_tokens=new_tokens, min_new_tokens=new_tokens)
    if options is None:
        return target.generate(**inputs, **common)
    return target.generate(
        **inputs,
        **common,
        **options,
        custom_generate=draft_name,
        trust_remote_code=True,
        assistant_model=draft,
        return_dict_in_generate=True,
    )


def bench(target, draft, draft_name, batches, new_tokens, rounds) -> list[dict]:
    """One entry a proposal."""
    proposals = CHAINS | TREES
    widths = {1, *range(2, 9)} | {shape(options)[0] + 1 for options in proposals.values()}
    of_target, of_draft = pass_times(target, draft, batches[0]["input_ids"].shape[0], widths)
    entries = []
    for name, options in tqdm(proposals.items(), leave=False):
        ratios, accepted, steps = [], 0, 0
        for inputs in batches:
            for _ in range(rounds):
                start = time.perf_counter()
                plain = generate(target, draft, draft_name, inputs, new_tokens, None)
                middle = time.perf_counter()
                drafted = generate(target, draft, draft_name, inputs, new_tokens, options)
                ratios.append((middle - start) / (time.perf_counter() - middle))
            assert target.dtype != torch.float32 or torch.equal(plain, drafted.sequences), "the draft changed the text"
            rows = drafted.acceptance["accepted"]
            accepted, steps = accepted + sum(map(sum, rows)) + sum(map(len, rows)), steps + sum(map(len, rows))
        tau = accepted / steps
        nodes, depth, level = shape(options)
        step = of_target[nodes + 1] + of_draft[max(1, round(tau))] + (depth - 1) * of_draft[level]
        ideal, ratio = tau * of_target[1] / step, statistics.median(ratios)
        entries.append({"proposal": name, "tau": tau, "ratio": ratio, "ideal": ideal, "efficiency": ratio / ideal})
    return entries


def markdown(results: list[dict]) -> str:
    lines = ["| dtype | batch | proposal | tau | ratio | ideal | efficiency |", "|---|---|---|---|---|---|---|"]
    for run in results:
        for entry in run["entries"]:
            figures = " | ".join(f"{entry[key]:.2f}" for key in ("tau", "ratio", "ideal", "efficiency"))
            lines.append(f"| {run['dtype']} | {run['batch']} | {entry['proposal']} | {figures} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Time generate with a draft against generate without it.")
    parser.add_argument("--target", required=True, help="Hub name or folder")
    parser.add_argument("--target_gguf_file", help="GGUF file in that folder")
    parser.add_argument("--draft", required=True, help="Hub name or folder")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompts", type=int, default=4, help="prompts at batch 1 (default 4); one batch otherwise")
    parser.add_argument("--new_tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=1, help="times each prompt is decoded (default 1)")
    parser.add_argument("--output", default="outputs/bench-decode", help="writes this .md and .json")
    args = parser.parse_args()
    prompts, results = PROMPTS.read_text().splitlines(), []
    for dtype in args.dtypes:
        tokenizer, target, draft = load_all(args.target, args.target_gguf_file, args.draft, dtype)
        for size in args.batch_sizes:
            groups = [prompts[i : i + 1] for i in range(args.prompts)] if size == 1 else [prompts[:size]]
            batches = [chat_inputs(tokenizer, group).to(target.device) for group in groups]
            entries = bench(target, draft, args.draft, batches, args.new_tokens, args.rounds)
            results.append({"dtype": dtype, "batch": size, "entries": entries})
    where = f"{machine()}, transformers {transformers.__version__}, torch {torch.__version__}"
    path = Path(args.output)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json").write_text(
        json.dumps({"machine": where, "arguments": vars(args), "results": results}, indent=1)
    )
    path.with_suffix(".md").write_text(f"{where}\n\n{markdown(results)}")
    print(where, markdown(results), sep="\n\n")


if __name__ == "__main__":
    main()
