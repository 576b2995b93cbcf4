"""Options of the distillation: what TRL's configurations have, and the draft's own."""

from dataclasses import dataclass, field

from trl.trainer.base_config import _BaseConfig

TAU_METRICS = ("tau", "replayed_tau")


@dataclass
class Eagle3Config(_BaseConfig):
    """Configuration of `Eagle3Trainer`: transformers' `TrainingArguments` with other defaults, and the fields below.

    Raises:
        ValueError: `ttt_steps` or `max_length` that leave nothing to learn.
    """

    # ---- the draft, when none is given ----
    num_hidden_layers: int = field(default=1, metadata={"help": "Layers of the draft, at least 1."})
    embed_fusion: str = field(
        default="first",
        metadata={"help": "Which layers read the token embeddings.", "choices": ["first", "all"]},
    )
    intermediate_size: int | None = field(
        default=None, metadata={"help": "MLP width of the draft. Default: the target's."}
    )
    draft_vocab_size: int | None = field(
        default=None, metadata={"help": "Rows of the draft's head. Default: min(32000, the target's vocabulary)."}
    )
    captured_layers: list[int] | None = field(
        default=None,
        metadata={
            "help": "Three entries of the target's hidden_states, ascending. Default: 2, n//2, n-3 of n layers."
        },
    )
    fc_norm: bool = field(default=False, metadata={"help": "Normalise each captured state (EAGLE-3.1)."})
    norm_output: bool = field(
        default=False, metadata={"help": "Hand the normed state to the next draft step (EAGLE-3.1)."}
    )
    init_layers: bool = field(
        default=False, metadata={"help": "Start fc and layers from the target's last layers, not at random."}
    )
    target_name: str | None = field(
        default=None,
        metadata={"help": "The target's name on the Hub, for the card, where the target is loaded from a folder."},
    )

    # ---- data and loss ----
    max_length: int = field(default=2048, metadata={"help": "Tokens of a row; longer conversations are cut."})
    max_document_length: int | None = field(
        default=None,
        metadata={"help": "Tokens of a conversation, where rows hold several of them (packing). Default: max_length."},
    )
    packing: bool = field(
        default=False,
        metadata={
            "help": "Pack conversations into rows of max_length, best fit, each seen apart. Without it a batch is its "
            "conversations one after the other: in both cases nothing is padded."
        },
    )
    dataset_num_proc: int | None = field(default=None, metadata={"help": "Processes that tokenise the data."})
    ttt_steps: int = field(default=7, metadata={"help": "Steps K of the training-time test."})

    # ---- speed and memory ----
    ttt_attention: str = field(
        default="auto",
        metadata={
            "help": "Attention of the TTT: flash (linear memory), eager (the dense reference), or auto.",
            "choices": ["auto", "flash", "eager"],
        },
    )
    checkpoint_steps: bool = field(
        default=False,
        metadata={"help": "Keep only the states of each TTT step and compute its activations again: less memory."},
    )
    target_tokens_at_once: int | None = field(
        default=None,
        metadata={"help": "The target reads at most so many tokens of a batch in one pass. Default: all of them."},
    )

    # ---- tau at each evaluation ----
    eval_tau_prompts: int = field(
        default=0,
        metadata={
            "help": "Decode so many held-out prompts at each evaluation: logs eval_tau, eval_acceptance/k, and "
            "eval_replayed_tau, an estimate by teacher forcing. With --metric_for_best_model tau and "
            "--load_best_model_at_end the best checkpoint by tau is kept. 0: none."
        },
    )
    eval_tau_draft_tokens: int = field(default=3, metadata={"help": "Draft tokens K of the chain that is decoded."})
    eval_tau_new_tokens: int = field(default=64, metadata={"help": "New tokens of each of these answers, at most."})
    eval_tau_prompt_length: int = field(default=256, metadata={"help": "Tokens of such a prompt, at most."})
    eval_tau_patience: int = field(
        default=3,
        metadata={
            "help": "With --metric_for_best_model tau, stop after so many evaluations in a row without a better tau. "
            "0: never."
        },
    )

    # ---- other defaults than TRL's ----
    learning_rate: float = field(default=1e-4, metadata={"help": "Peak learning rate of AdamW."})
    adam_beta2: float = field(default=0.95, metadata={"help": "Beta2 of AdamW."})
    max_grad_norm: float = field(default=0.5, metadata={"help": "Gradients are clipped to this norm."})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "Shape of the learning rate after warm-up."})
    warmup_steps: float = field(default=0.015, metadata={"help": "Warm-up: steps, or below 1 their share of all."})
    gradient_checkpointing: bool | None = field(default=None, metadata={"help": "Not here: see checkpoint_steps."})
    ddp_find_unused_parameters: bool | None = field(
        default=False,
        metadata={"help": "Keep it false: the loss reads the head outside of forward, unseen by DDP."},
    )
    remove_unused_columns: bool = field(default=False, metadata={"help": "The trainer prepares its own columns."})
    logging_nan_inf_filter: bool = field(
        default=False, metadata={"help": "Hide a non-finite loss. It stops the training here instead."}
    )

    def __post_init__(self):
        super().__post_init__()
        if self.ttt_steps < 1:
            raise ValueError(f"ttt_steps is {self.ttt_steps}; at least 1 step is trained")
        if self.max_document_length is None:
            self.max_document_length = self.max_length
        if self.max_document_length > self.max_length:
            raise ValueError(
                f"max_document_length {self.max_document_length} is more than a row holds: raise max_length "
                f"{self.max_length}"
            )
        if self.max_document_length < 2 + self.ttt_steps:
            raise ValueError(
                f"max_length {self.max_document_length} leaves no slot for {self.ttt_steps} steps; raise it to "
                f"{2 + self.ttt_steps} or more"
            )
        if self.hub_strategy not in ("every_save", "end"):
            raise ValueError(
                f"hub_strategy is {self.hub_strategy.value!r}; allowed are 'every_save' and 'end': drafts only"
            )
        self._check_tau()
        if self.gradient_checkpointing:
            raise ValueError("gradient_checkpointing is not available for the draft; take checkpoint_steps instead")
        if self.ttt_attention not in ("auto", "flash", "eager"):
            raise ValueError(f"ttt_attention is {self.ttt_attention!r}; allowed are 'auto', 'flash' and 'eager'")
        if self.target_tokens_at_once is not None and self.target_tokens_at_once < 1:
            raise ValueError(f"target_tokens_at_once is {self.target_tokens_at_once}; it must be at least 1")

    def _check_tau(self) -> None:
        """ValueError for options of tau that cannot work together."""
        if self.eval_tau_prompts and self.eval_strategy == "no":
            raise ValueError(
                f"eval_tau_prompts is {self.eval_tau_prompts}, but nothing is evaluated: set eval_strategy"
            )
        if (self.metric_for_best_model or "").removeprefix("eval_") not in TAU_METRICS:
            return
        if not self.eval_tau_prompts:
            raise ValueError(f"metric_for_best_model is {self.metric_for_best_model!r}: set eval_tau_prompts, say 16")
        if not self.greater_is_better:
            raise ValueError("greater_is_better is false, but a higher tau is better: remove it")
        together = self.save_strategy == self.eval_strategy
        if self.save_strategy == "steps":
            together = together and self.save_steps == self.eval_steps
        if not together and self.save_strategy != "best":
            raise ValueError(
                f"the best draft by tau must be on disk, but save_strategy is {self.save_strategy.value!r}, save_steps"
                f" {self.save_steps}; save when evaluating: {self.eval_strategy.value!r}, eval_steps {self.eval_steps}"
            )
