"""A chat in the terminal with a target through its draft.

    python evaluation/chat.py --target HuggingFaceTB/SmolLM2-135M-Instruct --draft outputs/smollm2-eagle3

Text appears as it is accepted: what the draft guessed is green, what the target added itself is plain. An answer ends
with its tau and tokens per second. `/new` starts over, `/exit` or Ctrl-D ends, Ctrl-C stops an answer.
"""

import argparse
import contextlib
import time

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from eagle3_llama.evaluation.certificate import load_all

with contextlib.suppress(ImportError):  # line editing, where the platform has it
    import readline  # noqa: F401

GREEN, GREY, PLAIN = "\033[32m", "\033[90m", "\033[0m"


class ColourStreamer(BaseStreamer):
    """Prints the tokens of each step: all but the last are the draft's, the last is the target's own."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer, self.ids, self.shown, self.prompt_seen = tokenizer, [], "", False

    def put(self, value: Tensor) -> None:
        if not self.prompt_seen:
            self.prompt_seen = True
            return
        tokens = value.flatten().tolist()
        self.ids += tokens[:-1]
        self.print_new(GREEN)
        self.ids += tokens[-1:]
        self.print_new(PLAIN)

    def print_new(self, colour: str) -> None:
        text = self.tokenizer.decode(self.ids, skip_special_tokens=True)
        if not text.endswith("\ufffd"):  # a character whose bytes are not all there yet
            print(f"{colour}{text[len(self.shown) :]}{PLAIN}", end="", flush=True)
            self.shown = text

    def end(self) -> None:
        print()


def answer(tokenizer, target, draft, draft_name: str, messages: list[dict], args: argparse.Namespace) -> str:
    """Stream the answer to `messages`, print its figures, return its text."""
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).to(target.device)
    streamer, start = ColourStreamer(tokenizer), time.perf_counter()
    sampling = {"do_sample": True, "temperature": args.temperature} if args.temperature else {"do_sample": False}
    try:
        output = target.generate(
            **inputs,
            **sampling,
            max_new_tokens=args.max_new_tokens,
            num_draft_tokens=args.num_draft_tokens,
            custom_generate=draft_name,
            trust_remote_code=True,
            assistant_model=draft,
            streamer=streamer,
            return_dict_in_generate=True,
        )
        seconds, tau = time.perf_counter() - start, output.acceptance["tau"]
        print(f"{GREY}tau {tau:.2f}, {len(streamer.ids) / seconds:.1f} tokens/s, {len(streamer.ids)} tokens{PLAIN}")
    except KeyboardInterrupt:
        print(f"{PLAIN}\n{GREY}stopped{PLAIN}")
    return streamer.shown


def main() -> None:
    parser = argparse.ArgumentParser(description="Chat with a target through its draft.")
    parser.add_argument("--target", required=True, help="Hub name or folder")
    parser.add_argument("--target_gguf_file", help="GGUF file in that folder")
    parser.add_argument("--draft", required=True, help="Hub name or folder")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--max_new_tokens", type=int, default=512)
    parser.add_argument("--num_draft_tokens", type=int, default=3)
    args = parser.parse_args()
    tokenizer, target, draft = load_all(args.target, args.target_gguf_file, args.draft, args.dtype)
    torch.manual_seed(0)
    print(f"{GREEN}green{PLAIN}: guessed by the draft; plain: the target's own. /new starts over, /exit ends.")
    messages: list[dict] = []
    while True:
        try:
            question = input("\n> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if question == "/exit":
            return
        if question == "/new":
            messages = []
        elif question:
            messages.append({"role": "user", "content": question})
            text = answer(tokenizer, target, draft, args.draft, messages, args)
            messages.append({"role": "assistant", "content": text})


if __name__ == "__main__":
    main()
