"""Every flag of Miles, one frozen dataclass per concern. The field `rollout_top_p` is the flag `--rollout-top-p`.

`None` means "resolved at start" (see `resolve.py`) or "off", as the help says.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from miles.config.fields import (
    ABOVE_ONE,
    ABOVE_ZERO,
    AT_LEAST_ONE,
    FRACTION,
    FRACTION_ABOVE_ZERO,
    FRACTION_BELOW_ONE,
    NOT_NEGATIVE,
    SATISFIED,
    TABLE_ROWS,
    Bounds,
    flag,
)
from miles.config.hook_section import HookConfig
from miles.config.lora_section import LoraConfig
from miles.config.memory_section import MemoryConfig
from miles.config.numerics_section import NumericsConfig
from miles.config.run_sections import DebugConfig, ProcessConfig, PublicLayoutConfig, RunDirConfig, TrackConfig

TOP_K = Bounds("-1 (keep all tokens) or at least 1", low=-1, gap=0)
SEED = Bounds("from 0 to 2^63 - 1", low=0, high=2**63 - 1)
ESTIMATORS = (
    *("grpo", "gspo", "dr_grpo", "rloo", "max_rl"),
    *("reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"),
)
CORRECTIONS = (
    *("none", "tis", "sequence_tis", "icepop", "masked_is", "sequence_masked_is"),
    *("geometric", "decoupled"),
)
PORTION_OF_GPU = Bounds("between 0 and 1", low=0, high=1, low_open=True, high_open=True)


@dataclass(frozen=True)
class ModelConfig:
    """Model and device"""

    hf_checkpoint: str | None = flag(None, "Hugging Face model folder, or a hub name when online")
    init_from: str | None = flag(
        None,
        "start from the weights, and nothing else, of this model folder or checkpoint; default: --hf-checkpoint",
    )
    ref_load: str | None = flag(None, "reference model for the KL terms; default: the start weights of this run")
    chat_template_path: str | None = flag(None, "Jinja file that replaces the tokenizer's chat template")
    device: str = flag("auto", "where to compute", choices=("auto", "cpu", "cuda"))
    dtype: str = flag(
        "auto",
        "weights: float32 on a CPU, bfloat16 with float32 masters on a GPU",
        choices=("auto", "float32", "bfloat16"),
    )
    num_threads: int | None = flag(
        None, "CPU threads of the worker; default by model size", unit="threads", bounds=AT_LEAST_ONE, resume=True
    )
    attn_implementation: str | None = flag(
        None,
        "public name of the trainer's attention; here all mean packed attention, by our Triton kernels on a GPU",
        choices=("flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention", "sdpa", "triton"),
        effect=SATISFIED,
    )
    train_backend: str = flag("fsdp", "public name of the trainer", choices=("fsdp",), effect=SATISFIED)


@dataclass(frozen=True)
class DataConfig:
    """Prompt data"""

    prompt_data: str | None = flag(
        None, "JSONL or parquet file of prompts, also hf://datasets/OWNER/NAME/FILE; FILE@[a:b] keeps rows a to b-1"
    )
    input_key: str = flag("input", "column of the prompt: a text, or a list of chat messages")
    label_key: str | None = flag(None, "column of the right answer")
    metadata_key: str = flag("metadata", "column of a mapping that rewards and hooks see")
    tool_key: str | None = flag(None, "column of tool specifications for the chat template")
    apply_chat_template: bool = flag(False, "render prompts through the chat template")
    apply_chat_template_kwargs: dict[str, Any] = flag({}, "JSON of extra arguments for the chat template")
    mix_prompt_data: tuple[str, ...] = flag(
        (), "pairs FILE WEIGHT: more prompt files, beside --prompt-data, whose weight is 1"
    )
    curriculum_pass_rates: tuple[float, ...] = flag(
        (),
        "LOW HIGH: prompts that were answered right less or more often than this sit out the next epoch; before the "
        "first answers pass_rate of the metadata counts",
        bounds=FRACTION,
    )
    rollout_shuffle: bool = flag(False, "shuffle prompts, anew each epoch")
    rollout_seed: int = flag(42, "seed of the prompt order and of every random draw of the engine", bounds=SEED)
    num_rollout: int | None = flag(
        None, "rollouts (steps of the loop) in all", unit="rollouts", bounds=AT_LEAST_ONE, resume=True
    )
    num_epoch: int | None = flag(
        None,
        "passes over the prompts; used when --num-rollout is not set",
        unit="epochs",
        bounds=AT_LEAST_ONE,
        resume=True,
    )


@dataclass(frozen=True)
class RolloutConfig:
    """Rollout"""

    rollout_batch_size: int = flag(32, "prompts in a rollout", unit="prompts", bounds=AT_LEAST_ONE)
    n_samples_per_prompt: int = flag(8, "answers of a prompt; they form one group", unit="answers", bounds=AT_LEAST_ONE)
    rollout_max_response_len: int = flag(1024, "longest answer", unit="tokens", bounds=AT_LEAST_ONE)
    rollout_max_prompt_len: int | None = flag(
        None, "longer prompts are left out, counted and reported", unit="tokens", bounds=AT_LEAST_ONE
    )
    rollout_max_context_len: int | None = flag(
        None, "prompt and answer together; default: the model's limit", unit="tokens", bounds=AT_LEAST_ONE
    )
    rollout_temperature: float = flag(
        1.0, "sampling temperature; the trainer divides its logits by it too", bounds=NOT_NEGATIVE
    )
    rollout_top_p: float = flag(
        1.0, "keep the smallest set of tokens with this probability; 1 keeps all", bounds=FRACTION_ABOVE_ZERO
    )
    rollout_top_k: int = flag(-1, "keep the k most likely tokens; -1 keeps all", bounds=TOP_K)
    rollout_min_p: float = flag(
        0.0, "keep tokens with at least this share of the top probability", bounds=FRACTION_BELOW_ONE
    )
    rollout_stop: tuple[str, ...] = flag((), "strings that end an answer")
    rollout_stop_token_ids: tuple[int, ...] = flag(
        (), "token ids that end an answer, besides the model's own", bounds=NOT_NEGATIVE
    )
    rollout_skip_special_tokens: bool = flag(True, "leave special tokens out of the answer text that rewards see")
    dynamic_sampling_filter_path: str | None = flag(
        None, "import path of a filter of scored groups: f(args, group) -> keep; dropped ones are replaced"
    )
    over_sampling_batch_size: int | None = flag(
        None,
        "prompts sent to the engine at a time; default auto: by the share of groups that the filter dropped lately",
        unit="prompts",
        bounds=AT_LEAST_ONE,
        resume=True,
    )
    partial_rollout: bool = flag(
        False, "a rollout takes the groups that finish first; later rollouts go on with the unfinished ones"
    )
    mask_offpolicy_in_partial_rollout: bool = flag(
        False, "do not train on tokens that older weights wrote before an answer went on"
    )


@dataclass(frozen=True)
class RewardConfig:
    """Reward"""

    rm_type: str | None = flag(
        None, "built-in reward, or a weighted sum such as math+0.1*format; metadata rm_type of a row goes before"
    )
    custom_rm_path: str | None = flag(
        None, "import path of a reward, plain or async: f(args, sample) -> number or dict"
    )
    reward_key: str | None = flag(None, "field of a reward that is a dict")
    reward_keys: tuple[str, ...] = flag(
        (), "several fields of a dict reward: advantages of each on its own, then summed (GDPO)"
    )
    group_rm: bool = flag(False, "call the custom reward once per group: f(args, samples) -> list")
    rm_timeout: float = flag(
        0.8, "longest time a built-in grader may take for one answer", unit="s", bounds=ABOVE_ZERO, resume=True
    )
    custom_rm_timeout: float = flag(
        60.0, "longest time of one call of a custom reward or of --rm-url", unit="s", bounds=ABOVE_ZERO, resume=True
    )
    rm_code_timeout: float = flag(
        6.0, "longest time of all tests of one program of --rm-type code", unit="s", bounds=ABOVE_ZERO, resume=True
    )
    rm_on_error: str = flag(
        "raise",
        "what a reward that fails does: stop the run, count as 0, or drop the answer; over 1 percent always stops",
        choices=("raise", "zero", "drop"),
    )
    rm_watch_type: str | None = flag(None, "second built-in reward that is only watched, never trained on")
    rm_url: str | None = flag(None, "service of --rm-type remote_rm", resume=True)
    rm_retries: int = flag(
        4, "further tries of a request to --rm-url, with growing pauses", unit="tries", bounds=NOT_NEGATIVE, resume=True
    )
    rm_concurrency: int = flag(
        64, "requests to --rm-url open at one time", unit="requests", bounds=AT_LEAST_ONE, resume=True
    )
    rm_num_workers: int = flag(2, "processes that grade answers", unit="processes", bounds=AT_LEAST_ONE, resume=True)


@dataclass(frozen=True)
class AlgorithmConfig:
    """Advantage and loss (every formula: docs/algorithms.md)"""

    advantage_estimator: str = flag("grpo", "how rewards become advantages", choices=ESTIMATORS)
    disable_grpo_std_normalization: bool = flag(False, "do not divide by the standard deviation of the group")
    disable_rewards_normalization: bool = flag(False, "use the rewards as advantages as they are")
    normalize_advantages: bool = flag(False, "standardise over all tokens of the rollout")
    gamma: float = flag(1.0, "discount of a token's return (ppo, reinforce_plus_plus)", bounds=FRACTION)
    lambd: float = flag(1.0, "lambda of the generalised advantage estimation (ppo)", bounds=FRACTION)
    kl_coef: float = flag(0.0, "weight of a KL penalty in the reward of each token", bounds=NOT_NEGATIVE)
    overlong_buffer_len: int | None = flag(
        None,
        "an answer loses reward over this many last tokens before --rollout-max-response-len (DAPO)",
        unit="tokens",
        bounds=AT_LEAST_ONE,
    )
    overlong_penalty_factor: float = flag(
        1.0, "what an answer of full length loses with --overlong-buffer-len", unit="reward", bounds=NOT_NEGATIVE
    )
    loss_type: str = flag("policy_loss", "what is minimised", choices=("policy_loss", "sft_loss", "custom_loss"))
    policy_objective: str = flag(
        "auto",
        "what policy_loss makes of the ratio; auto: gspo with that estimator, else clip",
        choices=("auto", "clip", "gspo", "cispo", "sapo"),
    )
    custom_loss_function_path: str | None = flag(
        None, "import path of the loss for custom_loss: f(args, log_probs, entropy, inputs) -> loss of each token"
    )
    custom_pg_loss_reducer_function_path: str | None = flag(
        None,
        "import path of what averages the tokens: f(total_lengths, response_lengths, loss_masks, "
        "calculate_per_token_loss) -> function of the values of all response tokens",
    )
    eps_clip: float = flag(
        0.2, "lower clip range of the ratio, and upper when --eps-clip-high is not set", bounds=ABOVE_ZERO
    )
    eps_clip_high: float | None = flag(None, "upper clip range of the ratio", bounds=ABOVE_ZERO)
    eps_clip_c: float | None = flag(
        None, "dual clip: most that a bad token may cost, as a multiple of its advantage", bounds=ABOVE_ONE
    )
    sapo_tau_pos: float = flag(1.0, "how fast sapo fades where the advantage is positive", bounds=ABOVE_ZERO)
    sapo_tau_neg: float = flag(1.05, "how fast sapo fades where the advantage is negative", bounds=ABOVE_ZERO)
    calculate_per_token_loss: bool = flag(False, "mean over all tokens of the step instead of a mean per answer first")
    loss_constant_length: int | None = flag(
        None,
        "divide the sum over the tokens of an answer by this; default with dr_grpo: --rollout-max-response-len",
        unit="tokens",
        bounds=AT_LEAST_ONE,
    )
    use_kl_loss: bool = flag(False, "add a KL term to the reference model")
    kl_loss_coef: float = flag(0.0, "weight of the KL term", bounds=NOT_NEGATIVE)
    kl_loss_type: str = flag("k1", "KL estimator", choices=("k1", "k2", "k3", "low_var_kl"))
    use_unbiased_kl: bool = flag(False, "multiply the KL term by the ratio, which gives it the gradient of the KL")
    entropy_coef: float = flag(0.0, "weight of the entropy bonus")
    use_rollout_logprobs: bool = flag(False, "the engine's log-probs are the old policy")
    off_policy_correction: str = flag(
        "auto",
        "weight of tokens that the engine or older weights drew; auto: tis once a sample is older than the weights",
        choices=("auto", *CORRECTIONS),
    )
    use_tis: bool = flag(False, "the same as --off-policy-correction tis")
    tis_clip: float | None = flag(None, "highest weight; default by correction, 2 for tis", bounds=ABOVE_ZERO)
    tis_clip_low: float | None = flag(None, "lowest weight; default by correction, 0 for tis", bounds=NOT_NEGATIVE)
    veto_threshold: float | None = flag(
        None, "drop an answer that has a token whose weight is below this, for example 1e-4", bounds=ABOVE_ZERO
    )
    custom_tis_function_path: str | None = flag(
        None, "import path of a correction: f(args, pg_loss, train_log_probs, ...) -> pg_loss, loss_masks, metrics"
    )
    use_opsm: bool = flag(False, "drop bad answers that the policy has moved away from")
    opsm_delta: float = flag(1e-4, "mean log-ratio beyond which --use-opsm drops", unit="nat", bounds=NOT_NEGATIVE)
    use_score_centering: bool = flag(False, "take the engine's mean score from the score of each token")
    score_centering_top_k: int = flag(
        64, "most likely tokens that the engine returns for it", unit="tokens", bounds=AT_LEAST_ONE
    )
    use_opd: bool = flag(False, "distil from a teacher on the policy's own answers")
    opd_teacher_load: str | None = flag(None, "model folder of the teacher, with the same vocabulary")
    opd_kl_coef: float = flag(1.0, "weight of the distance to the teacher", bounds=NOT_NEGATIVE)
    opd_log_prob_top_k: int = flag(
        0, "compare over the teacher's k most likely tokens; 0: by the drawn token alone", bounds=NOT_NEGATIVE
    )


@dataclass(frozen=True)
class CriticConfig:
    """Critic of --advantage-estimator ppo"""

    critic_load: str | None = flag(None, "model folder that the critic starts from; default: --hf-checkpoint")
    critic_lr: float | None = flag(None, "learning rate of the critic; default: --lr", bounds=NOT_NEGATIVE)
    critic_lr_warmup_iters: int = flag(0, "optimizer steps of linear warm-up", unit="steps", bounds=NOT_NEGATIVE)
    num_critic_only_steps: int = flag(
        0, "first rollouts that train the critic alone", unit="rollouts", bounds=NOT_NEGATIVE
    )
    value_clip: float = flag(0.2, "largest useful change of a value in one rollout", bounds=ABOVE_ZERO)
    critic_save: str | None = flag(
        None, "public name of a folder for the critic; it is part of every checkpoint", effect=SATISFIED
    )


@dataclass(frozen=True)
class CheckConfig:
    """Checks of the numbers while training"""

    max_logprob_gap: float = flag(
        1.0,
        "stop when trainer and engine differ by more than this on average; 0: never",
        unit="nat",
        bounds=NOT_NEGATIVE,
        resume=True,
    )
    on_not_finite: str = flag(
        "stop",
        "a loss or gradient that is nan or inf: stop the run, or skip the optimizer step (docs/trainer.md)",
        choices=("stop", "skip"),
        resume=True,
    )
    ci_test: bool = flag(False, "strict limits on ratio, clipping and gap in every rollout", resume=True)
    ci_disable_kl_checker: bool = flag(False, "no check of ratio and clipping, at the first step either", resume=True)


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer"""

    lr: float = flag(1e-6, "learning rate at its highest", bounds=NOT_NEGATIVE)
    min_lr: float = flag(0.0, "learning rate at the end of a decay", bounds=NOT_NEGATIVE)
    lr_decay_style: str = flag("constant", "schedule after the warm-up", choices=("constant", "linear", "cosine"))
    lr_warmup_iters: int = flag(0, "optimizer steps of linear warm-up", unit="steps", bounds=NOT_NEGATIVE)
    lr_warmup_fraction: float | None = flag(None, "warm-up as a share of all optimizer steps", bounds=FRACTION)
    lr_warmup_init: float = flag(0.0, "learning rate at the start of the warm-up", bounds=NOT_NEGATIVE)
    lr_decay_iters: int | None = flag(
        None, "optimizer steps until min-lr; default: all of the run", unit="steps", bounds=AT_LEAST_ONE
    )
    optimizer: str = flag("adam", "adam is AdamW: decoupled weight decay", choices=("adam",))
    weight_decay: float = flag(
        0.0, "decoupled weight decay of the matrices (norms and biases have none)", bounds=NOT_NEGATIVE
    )
    adam_beta1: float = flag(0.9, "decay of the first moment", bounds=FRACTION_BELOW_ONE)
    adam_beta2: float = flag(0.95, "decay of the second moment", bounds=FRACTION_BELOW_ONE)
    # Less would be 0 in float32, and 0 / 0 the update of a weight without a gradient.
    adam_eps: float = flag(1e-8, "added to the root of the second moment", bounds=Bounds("at least 1e-37", low=1e-37))
    adam_state: str = flag(
        "float32",
        "how the two moments of the matrices are kept; 8bit needs bitsandbytes (docs/trainer.md)",
        choices=("float32", "bfloat16", "8bit"),
    )
    optimizer_cpu_offload: bool = flag(
        False, "keep the moments in the memory of the machine; they pass through the GPU in every update", resume=True
    )
    clip_grad: float = flag(1.0, "largest L2 norm of the gradient; 0 switches clipping off", bounds=NOT_NEGATIVE)
    seed: int = flag(1234, "seed of the trainer", bounds=SEED)


@dataclass(frozen=True)
class BatchConfig:
    """Batch"""

    global_batch_size: int | None = flag(
        None, "samples of an optimizer step; default: the whole rollout", unit="samples", bounds=AT_LEAST_ONE
    )
    num_steps_per_rollout: int | None = flag(
        None, "optimizer steps of a rollout; sets --global-batch-size", unit="steps", bounds=AT_LEAST_ONE
    )
    max_tokens_per_gpu: int | None = flag(
        None,
        "tokens packed into a micro-batch; default by model and device",
        unit="tokens",
        bounds=AT_LEAST_ONE,
        resume=True,
    )
    micro_batch_size: int | None = flag(
        None, "largest number of samples in a micro-batch", unit="samples", bounds=AT_LEAST_ONE
    )
    log_probs_chunk_size: int | None = flag(
        None,
        "tokens whose logits exist at one time in the output head; default by device",
        unit="tokens",
        bounds=AT_LEAST_ONE,
    )
    share_prompts_in_training: bool = flag(
        False, "compute the prompt of a group once for its answers in a micro-batch, forward and backward", resume=True
    )
    balance_by_flops: bool = flag(
        False, "balance micro-batches by their operations, attention included, instead of their tokens", resume=True
    )
    use_dynamic_batch_size: bool = flag(True, "pack by tokens", effect=SATISFIED)


@dataclass(frozen=True)
class EngineConfig:
    """Rollout engine (every --engine-X is also accepted as --sglang-X)"""

    engine_mem_fraction_static: float | None = flag(
        None, "share of GPU memory for weights and KV cache; default: what the trainer leaves", bounds=PORTION_OF_GPU
    )
    engine_max_total_tokens: int | None = flag(
        None, "tokens the KV cache holds; default by memory", unit="tokens", bounds=AT_LEAST_ONE
    )
    engine_max_running_requests: int | None = flag(
        None, "answers written at one time; default by device", unit="answers", bounds=TABLE_ROWS
    )
    engine_chunked_prefill_size: int | None = flag(
        None, "prompt tokens of one engine step; default by device", unit="tokens", bounds=AT_LEAST_ONE
    )
    engine_page_size: int = flag(16, "tokens of a KV cache block", unit="tokens", bounds=AT_LEAST_ONE)
    engine_disable_radix_cache: bool = flag(False, "do not share the blocks of equal prompt beginnings")
    engine_disable_cuda_graph: bool = flag(False, "launch the kernels of a decode step one by one")
    offload_rollout: bool | None = flag(
        None, "release memory of the engine while the trainer works; default: with --offload-rollout-level", resume=True
    )
    offload_rollout_level: tuple[str, ...] = flag(
        (),
        "what --offload-rollout releases; default: both. The weights are the trainer's own tensors and stay anyway",
        choices=("kv_cache", "weight"),
        resume=True,
    )
    engine_enable_deterministic_inference: bool = flag(False, "a request gets the same bits in any batch")
    engine_attention_backend: str | None = flag(
        None,
        "public name of the engine's attention; here all mean paged attention, by our Triton kernels on a GPU",
        choices=("fa3", "fa4", "flashinfer", "triton", "torch_native", "flex_attention", "trtllm_mha"),
        effect=SATISFIED,
    )


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation"""

    # Evaluation never changes the training samples, so all of it may differ when a run is resumed.

    eval_interval: int | None = flag(
        None,
        "rollouts between evaluations; also before the first and after the last",
        unit="rollouts",
        bounds=AT_LEAST_ONE,
        resume=True,
    )
    eval_prompt_data: tuple[str, ...] = flag((), "pairs NAME FILE of evaluation sets", resume=True)
    eval_config: str | None = flag(
        None, "YAML file of evaluation sets with their own settings (docs/sampling.md)", resume=True
    )
    skip_eval_before_train: bool = flag(False, "no evaluation before the first rollout", resume=True)
    n_samples_per_eval_prompt: int = flag(
        1, "answers of an evaluation prompt", unit="answers", bounds=AT_LEAST_ONE, resume=True
    )
    eval_reward_key: str | None = flag(
        None, "field of a dict reward that evaluation reports; default: --reward-key", resume=True
    )
    eval_input_key: str | None = flag(None, "default: --input-key", resume=True)
    eval_label_key: str | None = flag(None, "default: --label-key", resume=True)
    eval_temperature: float | None = flag(
        None, "default: --rollout-temperature; 0 is greedy", bounds=NOT_NEGATIVE, resume=True
    )
    eval_top_p: float | None = flag(None, "default: --rollout-top-p", bounds=FRACTION_ABOVE_ZERO, resume=True)
    eval_top_k: int | None = flag(None, "default: --rollout-top-k", bounds=TOP_K, resume=True)
    eval_max_response_len: int | None = flag(
        None, "default: --rollout-max-response-len", unit="tokens", bounds=AT_LEAST_ONE
    )


@dataclass(frozen=True)
class RunConfig:
    """All sections. Frozen after `resolve()`; what is discovered later lives on the object that found it."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    hooks: HookConfig = field(default_factory=HookConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    checks: CheckConfig = field(default_factory=CheckConfig)
    numerics: NumericsConfig = field(default_factory=NumericsConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    run_dir: RunDirConfig = field(default_factory=RunDirConfig)
    track: TrackConfig = field(default_factory=TrackConfig)
    process: ProcessConfig = field(default_factory=ProcessConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
    layout: PublicLayoutConfig = field(default_factory=PublicLayoutConfig)
