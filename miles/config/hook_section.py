"""Import paths of functions and classes of the user that replace or extend a part of a rollout."""

from __future__ import annotations

from dataclasses import dataclass

from miles.config.fields import ABOVE_ZERO, AT_LEAST_ONE, flag


@dataclass(frozen=True)
class HookConfig:
    """Hooks (`miles hooks` lists all; docs/hooks.md has an example of each)"""

    custom_generate_function_path: str | None = flag(
        None, "import path that writes one answer: f(input) or f(args, sample, sampling_params)"
    )
    generate_execute_tool_function_path: str | None = flag(
        None, "import path of what runs a tool in an answer of several turns: f(name, params) -> text"
    )
    generate_tool_specs_path: str | None = flag(
        None, "import path of a list of OpenAI tool specifications for the chat template, for rows without their own"
    )
    custom_agent_function_path: str | None = flag(
        None,
        "import path of a program that asks the model by HTTP: f(base_url=, prompt=, request_kwargs=, metadata=)",
    )
    session_message_matcher: str | None = flag(
        None, "import path that says whether a message came back unchanged: f(stored_message, replayed_message) -> bool"
    )
    session_sample_picker_path: str | None = flag(
        None, "import path that chooses which conversations of a program are trained on: f(samples, metadata) -> some"
    )
    session_sample_postprocessor_path: str | None = flag(
        None, "import path that edits the chosen conversations: f(samples, metadata) -> samples"
    )
    generate_max_turns: int = flag(16, "most turns of an answer with tools", unit="turns", bounds=AT_LEAST_ONE)
    generate_tool_timeout: float = flag(
        30.0,
        "longest time of one tool call; then the model reads that it failed",
        unit="s",
        bounds=ABOVE_ZERO,
        resume=True,
    )
    data_source_path: str | None = flag(None, "import path of a class that gives prompts: C(args).get_samples(n)")
    buffer_filter_path: str | None = flag(
        None, "import path that takes parked groups out of the buffer: f(args, None, buffer, n) -> groups"
    )
    rollout_function_path: str | None = flag(None, "import path of what replaces the whole rollout")
    eval_function_path: str | None = flag(None, "import path of what replaces the whole evaluation")
    rollout_sample_filter_path: str | None = flag(
        None, "import path: f(args, groups) edits the samples of a full rollout, remove_sample=True masks one"
    )
    rollout_all_samples_process_path: str | None = flag(
        None, "import path: f(args, all_groups, data_source) sees the dropped groups too"
    )
    custom_reward_post_process_path: str | None = flag(
        None, "import path: f(args, samples) -> raw rewards, advantages; replaces the normalisation of groups"
    )
    custom_convert_samples_to_train_data_path: str | None = flag(
        None, "import path: f(args, samples) -> dict of lists that the trainer gets"
    )
    custom_rollout_log_function_path: str | None = flag(
        None, "import path: f(rollout_id, args, samples, extra_metrics, rollout_time) -> True leaves out our log line"
    )
    custom_eval_rollout_log_function_path: str | None = flag(
        None, "import path: f(rollout_id, args, data, extra_metrics) -> True leaves out our log line"
    )
