"""The batch that trainers are measured on, and the shares that their seconds are."""

import argparse

import torch

from benchmarks.recipe import spec_of
from benchmarks.train_step import batch, facts_of, fastest, summary


def arguments(**given):
    return argparse.Namespace(**{"sequence": None, "prompts": None, "share": 1.0, **given})


def test_batch_is_the_recipe():
    sequences = batch(arguments())
    assert len(sequences) == 256
    assert sum(len(one["prompt"]) + len(one["answer"]) for one in sequences) == 215_303
    assert sequences[0]["prompt"] == sequences[7]["prompt"] != sequences[8]["prompt"]


def test_batch_of_long_sequences_has_about_as_many_tokens():
    sequences = batch(arguments(sequence=16_384))
    assert {len(one["prompt"]) + len(one["answer"]) for one in sequences} == {16_384}
    assert len(sequences) % 8 == 0 and 0.7 < len(sequences) * 16_384 / 215_303 < 1.3


def test_facts_count_six_operations_a_parameter_and_token():
    spec, sequences = spec_of("tiny"), [{"prompt": [1, 2], "answer": [3, 4, 5]}, {"prompt": [1], "answer": [2]}]
    facts = facts_of(spec, sequences, torch.device("cpu"), torch.float32)
    assert facts["num_tokens"] == 7 and facts["num_answer_tokens"] == 4
    seconds = facts["limit_seconds"] * facts["matrix_tflops_short"] * 1e12
    assert abs(seconds / (6 * spec.num_parameters * 7) - 1) < 1e-9
    assert abs(facts["limit_seconds"] / facts["log_prob_limit_seconds"] - 3) < 1e-9


def test_shares_are_of_work_done_in_the_median_second():
    facts = {
        "training_flops": 3e14,
        "forward_flops": 1e14,
        "matrix_tflops_short": 600.0,
        "matrix_tflops_sustained": 500.0,
        "limit_seconds": 0.4,
    }
    findings = [
        {"version": "1"},
        {"variant": "16", "log_prob_all_seconds": [9.0, 0.5, 0.5]},
        {"variant": "16", "step_all_seconds": [9.0, 1.0, 1.0], "update_all_seconds": [8.0, 0.75, 0.75]},
        {"variant": "32r", "error": "out of memory"},
    ]
    found = summary(findings, "not done", facts)
    one = found["variants"]["16"]
    assert one["mfu_short"] == 0.5 and one["mfu_sustained"] == 0.6 and one["share_of_limit"] == 0.4
    assert one["host_seconds"] == 0.25
    assert abs(one["mfu_989"] - 300 / 989) < 1e-9
    assert abs(one["log_prob_mfu_short"] - 1 / 3) < 1e-9
    assert found["error"] == "not done" and found["version"] == "1"
    assert fastest(found) == 1.0 and fastest({"variants": {"32r": {"error": "out of memory"}}}) is None
