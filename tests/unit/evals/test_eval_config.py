from __future__ import annotations

import json
from pathlib import Path

import pytest

from miles.config.flags import with_values
from miles.errors import ConfigError
from miles.evals.eval_config import read_eval_config
from miles.evals.suites import load_suites
from miles.text.tokenizer import load_tokenizer
from tests.unit.evals.test_run import CONFIG
from tests.unit.text.tiny_tokenizer import write_tokenizer

GOOD = """
eval:
  defaults: {temperature: 0.5, n_samples_per_eval_prompt: 4, label_key: answer, stop: }
  datasets:
    - {name: easy, path: DATA, rm_type: exact, top_k: 1, custom_generate_function_path: os.path.join}
    - {name: hard, path: DATA, temperature: 1e-1, stop: ["x"], max_response_len: 7, metadata_overrides: {level: 3}}
"""


def test_a_set_goes_before_the_defaults_and_these_before_the_flags(tmp_path: Path) -> None:
    data = tmp_path / "a.jsonl"
    data.write_text(json.dumps({"input": "ab", "answer": "7"}) + "\n")
    file = tmp_path / "eval.yaml"
    file.write_text(GOOD.replace("DATA", str(data)))
    config = with_values(CONFIG, {"eval_config": str(file), "eval_prompt_data": ("flags", str(data))})
    config = with_values(config, {"eval_label_key": "answer"})
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "tokenizer"))
    flags, easy, hard = load_suites(config, tokenizer, max_context_len=50, check_label=None)
    assert easy.sampling.stop == ()  # an empty value is what the flags say
    assert (flags.sampling.temperature, flags.num_answers, flags.sampling.max_new_tokens) == (0.0, 2, 99)
    assert (easy.sampling.temperature, easy.sampling.top_k, easy.sampling.top_p, easy.num_answers) == (0.5, 1, 0.5, 4)
    assert easy.data.prompts[0].metadata == {"rm_type": "exact"} and easy.data.prompts[0].label == "7"
    assert (hard.sampling.temperature, hard.sampling.stop, hard.sampling.max_new_tokens) == (0.1, ("x",), 7)
    assert hard.data.prompts[0].metadata == {"level": 3}
    assert (easy.data.prompts[0].generate_function_path, hard.data.prompts[0].generate_function_path) == (
        "os.path.join",
        None,
    )
    file.write_text(GOOD.replace("DATA", str(data)).replace("hard", "easy"))
    with pytest.raises(ConfigError, match="two sets the same name: flags easy easy"):
        load_suites(config, tokenizer, max_context_len=50, check_label=None)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "datasets: [{name: a, path: b, temprature: 1}]",
            r"unknown key 'temprature' \(did you mean temperature",
        ),
        ("datasets: [{name: a}]", "set a: path is missing"),
        ("datasets: [{name: a, path: b, top_k: x}]", "top_k cannot be 'x'"),
        ("datasets: [{name: a, path: b, top_k: 0}]", r"cannot be 0 \(must be -1 \(keep all tokens\) or at least 1"),
        ("datasets: [{name: a, path: b, temperature: -1}]", r"temperature cannot be -1 \(must be at least 0"),
        ("datasets: [{name: a, path: b, temperature: .nan}]", r"temperature cannot be nan \(must be a finite number"),
        ("datasets: [{name: a, path: b, n_samples_per_eval_prompt: 0}]", r"prompt cannot be 0 \(must be at least 1"),
        ("datasets: [{name: a, path: b, n_samples_per_eval_prompt: 2.5}]", r"prompt cannot be 2.5"),
        ("datasets: [{name: a, path: }]", "set a: path is missing"),
        ("datasets: [a]", "each set must be a mapping"),
        ("datasets: {a: }", "each set must be a mapping"),
        ("defaults: 1\ndatasets: [{name: a, path: b}]", "each set must be a mapping"),
        ("datasets: {a: {path: b}, c: {path: d, min_new_tokens: 3}}", "set c: unknown key 'min_new_tokens'"),
        ("defaults: {}", "needs a mapping with datasets"),
        ("datasets: [{name: a, path: b}]\nother: 1", "unknown key 'other'"),
        ("a: [", "cannot be read as YAML"),
    ],
)
def test_what_is_wrong_with_a_file(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "eval.yaml").write_text(text)
    with pytest.raises(ConfigError, match=problem):
        read_eval_config(str(tmp_path / "eval.yaml"))
