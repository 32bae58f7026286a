"""Every hook: how it is called and what it does. `miles hooks` prints this table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HookKind:
    """`name` is the field of the flag; `arguments` what the function is called with."""

    name: str
    arguments: tuple[str, ...]
    effect: str


HOOKS = tuple(
    HookKind(name, tuple(arguments.split()), effect)
    for name, arguments, effect in (
        ("data_source_path", "args", "class with get_samples(n), add_samples(groups), save(id) and load(id)"),
        ("buffer_filter_path", "args rollout_id buffer n", "takes up to n parked groups"),
        ("rollout_function_path", "input", "class or function that gives the groups of a rollout"),
        ("custom_generate_function_path", "input", "writes one answer, or several rows for one prompt"),
        ("generate_execute_tool_function_path", "name params", "runs a tool of multi_turn.generate"),
        ("custom_agent_function_path", "base_url prompt request_kwargs metadata", "asks by HTTP"),
        ("session_message_matcher", "stored_message replayed_message", "whether a message came back unchanged"),
        ("session_sample_picker_path", "samples metadata", "which conversations are trained on"),
        ("session_sample_postprocessor_path", "samples metadata", "edits the conversations of a program"),
        ("custom_rm_path", "args sample", "number or dict; with --group-rm a list for a list of samples"),
        ("dynamic_sampling_filter_path", "args group", "keeps or drops a scored group"),
        ("rollout_sample_filter_path", "args groups", "edits samples; remove_sample=True masks one"),
        ("rollout_all_samples_process_path", "args all_groups data_source", "sees dropped groups too"),
        ("custom_rollout_log_function_path", "rollout_id args samples extra_metrics rollout_time", "True: no default"),
        ("custom_convert_samples_to_train_data_path", "args samples", "dict of lists for the trainer"),
        ("custom_reward_post_process_path", "args samples", "raw rewards and what replaces the advantages"),
        ("custom_loss_function_path", "args log_probs entropy inputs", "loss of each token"),
        ("custom_tis_function_path", "args pg_loss ...", "off-policy correction"),
        ("custom_pg_loss_reducer_function_path", "total_lengths ...", "averages the tokens"),
        ("eval_function_path", "input", "class (or CheckpointEvalFn) or function that evaluates"),
        ("custom_eval_rollout_log_function_path", "rollout_id args data extra_metrics", "True: no default log"),
    )
)
ARGUMENTS = {kind.name: kind.arguments for kind in HOOKS}
