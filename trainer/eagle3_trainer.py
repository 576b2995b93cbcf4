"""Eagle3Trainer: distils an EAGLE-3 draft from a frozen target.

    trainer = Eagle3Trainer(
        target=target, args=Eagle3Config(output_dir="draft"), train_dataset=rows, processing_class=tokenizer
    )
    trainer.train()

A step: the target reads the batch once without gradients (three captured states, and the last one); the draft unrolls
K steps over the captured ones; the loss compares every step with the target's distribution. The loss is a sum over
supervised tokens, divided by their number in the whole global batch, so neither accumulation nor the number of
processes changes it.
"""

import copy
import dataclasses
import logging
import re
import time
from collections import defaultdict
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from peft import PeftConfig, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from trl import pack_dataset
from trl.trainer.base_trainer import _BaseTrainer

from eagle3_llama.configuration_eagle3_llama import Eagle3LlamaConfig
from eagle3_llama.evaluation.acceptance import greedy_chain
from eagle3_llama.evaluation.replay import greedy_answers, replay, tau_of
from eagle3_llama.modeling_eagle3_llama import LlamaForCausalLMEagle3
from eagle3_llama.trainer.conversations import tokenize_rows
from eagle3_llama.trainer.draft_vocabulary import cached_draft_vocabulary, is_ready
from eagle3_llama.trainer.eagle3_config import TAU_METRICS, Eagle3Config
from eagle3_llama.trainer.frozen_target import capture, end_of_turn_ids
from eagle3_llama.trainer.hub import is_hub_name, push_draft, write_card
from eagle3_llama.trainer.initialise import initialise_from_target
from eagle3_llama.trainer.loss import ChainLoss, chain_loss, predicted_tokens
from eagle3_llama.trainer.records import ROWS, TOKENS, normalise_dataset
from eagle3_llama.trainer.spare_activations import spare_activations
from eagle3_llama.trainer.training_tau import StopWhenTauFalls, find_tau_prompts
from eagle3_llama.trainer.ttt_attention import choose_ttt_attention

logger = logging.getLogger(__name__)

DRAFT_OPTIONS = (
    "num_hidden_layers embed_fusion intermediate_size draft_vocab_size captured_layers fc_norm norm_output init_layers"
).split()


class Eagle3Trainer(_BaseTrainer):
    """Distils a draft from a frozen target.

    Args:
        target: the frozen target; moved to the training device.
        args: the configuration.
        train_dataset, eval_dataset: rows as `records.load_rows` returns them, or already tokenised
            (`input_ids`, `assistant_masks`).
        processing_class: the target's tokenizer.
        model: a draft to go on from; None makes one from `args`, with its vocabulary, head and norm.
        peft_config: trains an adapter on `model` instead of its weights.
        card: facts for the model card beside those the trainer knows, such as `datasets`.

    Raises:
        ValueError: a draft or tokenizer that does not fit the target, an adapter without a draft, no supervised token.
    """

    _tag_names = ["trl", "eagle3"]
    _name = "EAGLE-3"
    # The loss is divided by the supervised tokens of all accumulated batches, not averaged over them.
    loss_is_scaled_for_ga = True

    def __init__(
        self,
        target: PreTrainedModel,
        args: Eagle3Config,
        train_dataset: Dataset,
        eval_dataset: Dataset | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        model: LlamaForCausalLMEagle3 | None = None,
        peft_config: PeftConfig | None = None,
        card: dict[str, Any] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple = (None, None),
    ):
        if args.n_gpu > 1:
            raise ValueError(
                f"one process sees {args.n_gpu} GPUs, and a row is not split over them: start it by torchrun "
                "--nproc_per_node, or choose one by CUDA_VISIBLE_DEVICES"
            )
        if peft_config is not None and model is None:
            raise ValueError("an adapter needs a trained draft: give `model` (--draft_name_or_path) with peft_config")
        if processing_class is None or len(processing_class) > target.config.vocab_size:
            size = "none" if processing_class is None else f"one of {len(processing_class)} tokens"
            raise ValueError(
                f"processing_class is {size}, the target has {target.config.vocab_size}: give its own tokenizer"
            )
        train_dataset = self._prepare_dataset(train_dataset, processing_class, args)
        if isinstance(eval_dataset, dict):
            raise ValueError("several eval_dataset are not supported: concatenate them")
        if eval_dataset is not None:
            eval_dataset = self._prepare_dataset(eval_dataset, processing_class, args)
        if args.eval_tau_prompts:
            self.tau_prompts, self._tau_answers = find_tau_prompts(eval_dataset, args), None
            if (args.metric_for_best_model or "").removeprefix("eval_") in TAU_METRICS and args.eval_tau_patience:
                callbacks = [*(callbacks or []), StopWhenTauFalls(args.eval_tau_patience)]
        self.card = dict(card or {})
        if model is None:
            model = self._build_draft(target, args, train_dataset, processing_class)
        else:
            check_draft_options(model, args)
        self.draft = model.bind_target(target)
        if not args.checkpoint_steps:  # which keeps less by itself
            spare_activations(self.draft)
        if model.config.target_name is None and is_hub_name(target.config._name_or_path):
            model.config.target_name = target.config._name_or_path
        if peft_config is not None:
            peft_config.base_model_name_or_path = name = model.config._name_or_path
            if args.push_to_hub and not is_hub_name(name):
                raise ValueError(
                    f"the draft to adapt is {name!r}; a pushed adapter must name its draft on the Hub: push that first"
                )
            peft_config.task_type = None  # TRL's CAUSAL_LM expects a model that generates by itself
            torch.manual_seed(args.seed)
            model = get_peft_model(model, peft_config)
            if type(self.draft.lm_head) is not nn.Linear:
                raise ValueError("an adapter on lm_head is not possible: the loss and the engines read its weight")
        self._sums: dict[str, dict[str, Any]] = {"train": defaultdict(float), "eval": defaultdict(float)}
        self._last_log = time.perf_counter()
        super().__init__(
            model=model,
            args=args,
            data_collator=collate,
            train_dataset=pack(train_dataset, args.max_length) if args.packing else train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        # Moved only: accelerate's `prepare_model` would wrap its forward in the draft's autocast.
        self.target = target.to(self.accelerator.device)
        self.draft.ttt_attention = choose_ttt_attention(args.ttt_attention, self.accelerator.device)

    # ---- prepare ----

    @staticmethod
    def _prepare_dataset(dataset: Dataset, tokenizer: PreTrainedTokenizerBase, args: Eagle3Config) -> Dataset:
        if not isinstance(dataset, Dataset):
            raise ValueError(f"a {type(dataset).__name__} cannot be trained on: give a datasets.Dataset")
        if "seq_lengths" in dataset.column_names:
            raise ValueError("these rows are packed already: give the conversations themselves, and packing=True")
        if is_ready(dataset, args.max_document_length):
            return dataset
        if set(dataset.column_names) != set(ROWS):
            dataset, _ = normalise_dataset(dataset, "the data set", skip_malformed=False)
        dataset, dropped = tokenize_rows(dataset, tokenizer, args.max_document_length, args.dataset_num_proc)
        if dropped:
            reasons = ", ".join(f"{count} ({reason})" for reason, count in dropped.most_common())
            logger.warning("%d rows to train on, dropped: %s", len(dataset), reasons)
        return dataset

    def _build_draft(
        self, target: PreTrainedModel, args: Eagle3Config, dataset: Dataset, tokenizer: PreTrainedTokenizerBase
    ) -> LlamaForCausalLMEagle3:
        """A new draft: vocabulary from the supervised tokens, head rows and final norm from the target."""
        config = draft_config(target, args)
        torch.manual_seed(args.seed)
        draft = LlamaForCausalLMEagle3(config)
        if config.draft_vocab_size < config.vocab_size:
            d2t, t2d, self.card["coverage"] = cached_draft_vocabulary(
                dataset,
                tokenizer,
                config.draft_vocab_size,
                config.vocab_size,
                end_of_turn_ids(target),
                args.output_dir,
            )
            draft.set_draft_vocabulary(d2t, t2d)
        initialise_from_target(draft, target, layers=args.init_layers)
        return draft

    # ---- loss ----

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Tensor:
        """Loss of one batch over `num_items_in_batch` supervised tokens (all of this batch's when None)."""
        result = self._chain_loss(model, inputs)
        mode = "train" if model.training else "eval"
        self._add_metrics(mode, result, inputs)
        if num_items_in_batch is None:
            num_items_in_batch = result.supervised[0].clamp(min=1)
        if not torch.isfinite(result.loss):
            raise ValueError(
                f"the loss is {result.loss.item()} at step {self.state.global_step}; lower learning_rate, or go on "
                "from the last checkpoint with another seed"
            )
        # DDP averages gradients over processes, and the tokens were counted over all of them.
        return result.loss / num_items_in_batch * (self.accelerator.num_processes if mode == "train" else 1)

    def _chain_loss(self, model: nn.Module, inputs: dict[str, Any]) -> ChainLoss:
        ids, documents = inputs["input_ids"], inputs["documents"]
        layers = self.draft.config.eagle_aux_hidden_state_layer_ids
        features, target_states = capture(self.target, ids, documents, layers, self.args.target_tokens_at_once)
        output = model(
            input_ids=ids,
            hidden_states=features,
            documents=documents,
            ttt_steps=self.args.ttt_steps,
            checkpoint_steps=self.args.checkpoint_steps,
        )
        with self.accelerator.autocast():
            return chain_loss(
                output.hidden_states,
                self.draft.lm_head.weight,
                target_states,
                self.target.get_output_embeddings().weight,
                inputs["assistant_masks"],
                self.draft.kept_ids(),
                documents,
            )

    def _get_num_items_in_batch(self, batch_samples: list[dict[str, Tensor]], device: torch.device) -> Tensor | None:
        """Supervised tokens of the global batch: all accumulated batches of all processes."""
        if not batch_samples:
            return None
        count = sum(predicted_tokens(x["assistant_masks"], x["documents"]).sum() for x in batch_samples)
        return self.accelerator.gather(count.to(device)).sum().clamp(min=1)

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        with torch.no_grad():
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
        return loss, None, None

    # ---- log ----

    def _add_metrics(self, mode: str, result: ChainLoss, inputs: dict[str, Tensor]) -> None:
        sums = self._sums[mode]
        for name in ("loss", "correct", "supervised", "joint", "joint_supervised", "covered"):
            sums[name] = sums[name] + getattr(result, name).detach()
        sums["tokens"] = sums["tokens"] + torch.tensor(inputs["input_ids"].numel(), device=result.loss.device)

    def _take_metrics(self, mode: str) -> dict[str, float]:
        """Metrics since the last call, over all processes. tau: 1 + expected length of the accepted chain."""
        sums = {name: self.accelerator.reduce(value.double(), "sum") for name, value in self._sums[mode].items()}
        self._sums[mode].clear()
        accuracy = sums["correct"] / sums["supervised"].clamp(min=1)
        joint = sums["joint"] / sums["joint_supervised"].clamp(min=1)
        metrics = {f"accuracy/{k}": value for k, value in enumerate(accuracy.tolist())}
        metrics |= {f"joint_acceptance/{k}": value for k, value in enumerate(joint.tolist())}
        supervised = sums["supervised"][0].clamp(min=1)
        return metrics | {
            "estimated_tau": 1 + joint.sum().item(),
            "supervised_share": (sums["supervised"][0] / sums["tokens"]).item(),
            "vocabulary_coverage": (sums["covered"] / supervised).item(),
            "token_loss": (sums["loss"] / supervised).item(),
            "tokens": sums["tokens"].item(),
        }

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs and self._sums["train"]:
            metrics = self._take_metrics("train")
            now = time.perf_counter()
            metrics["tokens_per_second"] = metrics.pop("tokens") / (now - self._last_log)
            self._last_log = now
            logs = logs | {key: value for key, value in metrics.items() if key != "token_loss"}
        super().log({key: round(value, 6) for key, value in logs.items()}, start_time)

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any):
        self._sums["eval"].clear()
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        metrics = self._take_metrics("eval")
        # transformers averages batches; a token counts the same in every batch here.
        metrics["loss"] = metrics.pop("token_loss")
        del metrics["tokens"]
        if self.args.eval_tau_prompts:
            metrics |= self._measure_tau()
        output.metrics.update({f"{metric_key_prefix}_{key}": value for key, value in metrics.items()})
        self._last_log = time.perf_counter()
        return output

    def _measure_tau(self) -> dict[str, float]:
        """tau on the held-out prompts, decoded and replayed; each process takes its share, all get the same."""
        args, eos_ids, draft = self.args, end_of_turn_ids(self.target), self._draft_to_decode()
        prompts = self.tau_prompts[args.process_index :: args.world_size]
        if self._tau_answers is None:
            self._tau_answers = greedy_answers(self.target, prompts, args.eval_tau_new_tokens, eos_ids)
        options = args.eval_tau_draft_tokens, args.eval_tau_new_tokens, eos_ids
        chains = [greedy_chain(self.target, draft, prompt, *options) for prompt in prompts]
        decoded = [(chain.accepted, chain.tokens) for chain in chains]
        accepted = replay(self.target, draft, prompts, self._tau_answers, args.eval_tau_draft_tokens)
        replayed = list(zip(accepted, self._tau_answers, strict=True))
        decoded, replayed = (
            tau_of(*zip(*gather_object(pairs), strict=True), args.eval_tau_draft_tokens)
            for pairs in (decoded, replayed)
        )
        acceptance = {f"acceptance/{k}": share for k, share in enumerate(decoded["acceptance_per_position"])}
        return {"tau": decoded["tau"], "replayed_tau": replayed["tau"]} | acceptance

    def _draft_to_decode(self) -> LlamaForCausalLMEagle3:
        """A copy as it will be used: in the target's dtype, without the autocast of the training."""
        embeddings = self.draft.get_input_embeddings()
        draft = copy.deepcopy(self.draft, {id(embeddings): embeddings})  # these are the target's
        return self.accelerator.unwrap_model(draft, keep_fp32_wrapper=False).to(self.target.dtype).eval()

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Strict, where transformers warns: a checkpoint of another draft is a ValueError."""
        known = [re.compile(pattern) for pattern in self.draft._keys_to_ignore_on_load_unexpected]
        unexpected = [key for key in load_result.unexpected_keys if not any(x.search(key) for x in known)]
        if load_result.missing_keys or unexpected:
            raise ValueError(
                f"the checkpoint does not fit this draft: missing {load_result.missing_keys}, unexpected {unexpected}"
            )

    # ---- save and push ----

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        """Only what belongs to a draft: weights, configuration, code and card."""
        if not self.args.should_save:
            return
        output_dir = output_dir or self.args.output_dir
        self.model.save_pretrained(output_dir, state_dict=state_dict)
        write_card(self, output_dir)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write the card into the output folder."""
        if self.is_world_process_zero():
            write_card(self, self.args.output_dir)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push a checkpoint's draft while training goes on; transformers would push config.json without its code."""
        if not self.is_world_process_zero() or self.args.hub_strategy == "end":
            return
        push_draft(self, checkpoint_folder, f"Training in progress, step {self.state.global_step}", blocking=False)

    def push_to_hub(self, commit_message: str | None = "End of training", blocking: bool = True, **kwargs: Any):
        """Save the draft and push it. Raises RuntimeError, with the command to push again, when the Hub fails."""
        self.save_model(_internal_call=True)
        if self.is_world_process_zero():
            return push_draft(self, self.args.output_dir, commit_message, blocking=blocking)


def collate(rows: list[dict[str, list[int]]]) -> dict[str, Any]:
    """All rows one after the other, without padding: `input_ids` and `assistant_masks` [1,S], `documents`' lengths."""
    documents = [length for row in rows for length in row.get("seq_lengths", [len(row["input_ids"])])]
    flat = {name: torch.tensor([x for row in rows for x in row[name]])[None] for name in TOKENS}
    return flat | {"documents": documents}


def pack(dataset: Dataset, max_length: int) -> Dataset:
    """Documents in rows of at most `max_length` tokens, best fit; their lengths are in the column `seq_lengths`."""
    return pack_dataset(dataset, max_length, map_kwargs={"load_from_cache_file": False, "desc": "Packing"})


def draft_config(target: PreTrainedModel, args: Eagle3Config) -> Eagle3LlamaConfig:
    """The configuration of a new draft of that target."""
    return Eagle3LlamaConfig.from_target(
        target.config,
        num_hidden_layers=args.num_hidden_layers,
        embed_fusion=args.embed_fusion,
        intermediate_size=args.intermediate_size,
        draft_vocab_size=args.draft_vocab_size,
        eagle_aux_hidden_state_layer_ids=args.captured_layers,
        fc_norm=args.fc_norm,
        norm_output=args.norm_output,
        target_name=args.target_name,
        dtype=torch.float32,
    )


def check_draft_options(draft: LlamaForCausalLMEagle3, args: Eagle3Config) -> None:
    """Raise ValueError for an option that shapes a new draft and contradicts the given one."""
    given = draft.config.to_dict() | {"captured_layers": draft.config.eagle_aux_hidden_state_layer_ids}
    default = {field.name: field.default for field in dataclasses.fields(args)}
    for key in DRAFT_OPTIONS:
        value = getattr(args, key)
        if value != default[key] and value != given.get(key):
            raise ValueError(f"{key} is {value!r}, but the given draft has {given.get(key)!r}; remove the option")
