"""Import paths of functions and classes of the user that replace or extend a part of a rollout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from miles.config.fields import ABOVE_ZERO, AT_LEAST_ONE, Bounds, flag

AGENT_TIME = Bounds("above 0, up to 3,500", low=0, low_open=True, high=3500)  # a hook is given up after 3,600 s


def path(help: str) -> Any:
    """The flag of a hook, which is an import path."""
    return flag(None, f"import path: {help}")


@dataclass(frozen=True)
class HookConfig:
    """Hooks (`miles hooks` lists all; docs/hooks.md has an example of each)"""

    custom_generate_function_path: str | None = path("f(input) or f(args, sample, sampling_params) writes one answer")
    generate_execute_tool_function_path: str | None = path("f(name, params) -> text runs a tool in a longer answer")
    generate_tool_specs_path: str | None = path("list of OpenAI tool specifications, for rows without their own")
    custom_agent_function_path: str | None = path(
        "f(base_url=, prompt=, request_kwargs=, metadata=), a program that asks the model by HTTP"
    )
    custom_agent_timeout: float = flag(
        3000.0, "longest time of such a program; then its sample is lost", unit="s", bounds=AGENT_TIME, resume=True
    )
    session_message_matcher: str | None = path("f(stored_message, replayed_message) -> whether it came back unchanged")
    session_sample_picker_path: str | None = path("f(samples, metadata) -> the conversations that are trained on")
    session_sample_postprocessor_path: str | None = path("f(samples, metadata) -> samples; edits what was chosen")
    generate_max_turns: int = flag(16, "most turns of an answer with tools", unit="turns", bounds=AT_LEAST_ONE)
    generate_tool_timeout: float = flag(
        30.0,
        "longest time of one tool call; then the model reads that it failed",
        unit="s",
        bounds=ABOVE_ZERO,
        resume=True,
    )
    data_source_path: str | None = path("class C(args) with get_samples(n) that gives prompts")
    buffer_filter_path: str | None = path("f(args, None, buffer, n) -> groups, taken out of the parked ones")
    rollout_function_path: str | None = path("what replaces the whole rollout")
    eval_function_path: str | None = path("what replaces the whole evaluation")
    rollout_sample_filter_path: str | None = path("f(args, groups) edits a full rollout; remove_sample=True masks one")
    rollout_all_samples_process_path: str | None = path("f(args, all_groups, data_source) sees the dropped groups too")
    custom_reward_post_process_path: str | None = path("f(args, samples) -> raw rewards, what replaces the advantages")
    custom_convert_samples_to_train_data_path: str | None = path("f(args, samples) -> dict of lists for the trainer")
    custom_rollout_log_function_path: str | None = path(
        "f(rollout_id, args, samples, extra_metrics, rollout_time) -> True leaves out our log line"
    )
    custom_eval_rollout_log_function_path: str | None = path(
        "f(rollout_id, args, data, extra_metrics) -> True leaves out our log line"
    )
