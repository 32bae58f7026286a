"""`miles plan`: what it prints, its exit code, and what it says to bad input."""

from __future__ import annotations

import json

import pytest

from miles.cli.main import main

MACHINE = ["--gpu", "H200", "--host-memory", "128", "--disk", "500"]


def plan(capsys, *argv: str) -> tuple[int, str, str]:
    code = main(["plan", *argv])
    return code, *capsys.readouterr()


def test_json_has_what_the_tables_have(capsys):
    code, out, _ = plan(capsys, "--hf-checkpoint", "Qwen/Qwen3-0.6B", *MACHINE, "--json")
    report = json.loads(out)
    assert code == 0 and report["fits"] and report["parameters"] == 596_049_920
    assert report["process_bytes"] == sum(report["memory"]["device"].values())
    seconds = report["seconds"]
    assert seconds["step"] == pytest.approx(seconds["generate"] + seconds["log_probs"] + seconds["update"])
    code, out, _ = plan(capsys, "--hf-checkpoint", "Qwen3-0.6B", *MACHINE)
    assert code == 0 and "it fits" in out
    assert f"{report['memory']['device']['KV cache'] / 2**30:.2f}  KV cache" in out


def test_a_run_that_does_not_fit_ends_with_the_flags_that_help(capsys):
    flags = ["--hf-checkpoint", "Qwen3-4B", *MACHINE, "--engine-max-total-tokens", "600000", "--disk", "50"]
    code, out, _ = plan(capsys, *flags)
    assert code == 1 and "it does not fit" in out
    advice = next(line for line in out.splitlines() if line.startswith("change"))
    first = advice.partition(": ")[2].split("; or ")[0].split()
    assert plan(capsys, *flags, *first)[0] == 0
    flags = ["--hf-checkpoint", "Qwen3-4B", "--device", "cpu", "--host-memory", "0.5"]
    assert "largest known model: none with these flags, none at best" in plan(capsys, *flags)[1]


def test_too_little_room_on_disk_is_told_from_too_little_memory(capsys):
    flags = ["--hf-checkpoint", "Qwen3-0.6B", *MACHINE, "--disk"]
    code, out, _ = plan(capsys, *flags, "5")
    assert code == 1 and "disk: not one fits; free space" in out and "no setting is enough" not in out
    code, out, _ = plan(capsys, *flags, "20", "--num-rollout", "9", "--save-interval", "1")
    assert code == 0 and "9 checkpoints of 6.7, 9 at one time" in out and "disk: it will be full" in out


def test_longer_answers_take_longer(capsys):
    def seconds(*flags: str) -> float:
        _, out, _ = plan(capsys, "--hf-checkpoint", "Qwen3-0.6B", *MACHINE, "--json", *flags)
        return json.loads(out)["seconds"]["step"]

    assert seconds("--answer-len", "200") < 0.4 * seconds() < 0.4 * seconds("--rollout-max-response-len", "4096")
    fills = ("--prompt-len", "40000", "--answer-len")
    assert seconds(*fills, "960") == seconds(*fills, "40960")  # an answer ends where the context is full


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--hf-checkpoint", "Qwen3-5B", *MACHINE], "no shape is known by this name (did you mean"),
        (["--hf-checkpoint", "Qwen3-4B", "--gpu", "Voodoo 2"], "not a known GPU; give --gpu-memory"),
        (MACHINE, "--hf-checkpoint is missing"),
        (["--hf-checkpoint", "Qwen3-4B", *MACHINE, "--max-token-per-gpu", "5"], "did you mean --max-tokens-per-gpu"),
        (["--hf-checkpoint", "Qwen3-4B", *MACHINE, "--rollout-batch-size", "0"], "--rollout-batch-size must be"),
        (["--hf-checkpoint", "Qwen3-4B", "--gpu", ""], "not a known GPU; give --gpu-memory"),
        (["--hf-checkpoint", "Qwen3-4B", "--unified-memory"], "not a known GPU; give --gpu-memory"),
        (["--hf-checkpoint", "Qwen3-4B", *MACHINE, "--device", "cpu"], "--device cpu computes on no GPU"),
        (
            ["--hf-checkpoint", "Qwen3-4B", *MACHINE, "--prompt-len", "40960"],
            "--prompt-len 40960 leaves no room for an answer in a context of 40960 tokens",
        ),
        (["--hf-checkpoint", "Qwen3-4B", *MACHINE, "--measure"], "--measure: PyTorch sees no GPU here; leave out"),
        (
            ["--hf-checkpoint", "Qwen3-4B", *MACHINE, "--lora-rank", "8", "--target-modules", "layers.99.*"],
            "--target-modules layers.99.*, without --exclude-modules (none), names no module of this model",
        ),
    ],
)
def test_bad_input_is_one_sentence(capsys, monkeypatch, argv, message):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, _, err = plan(capsys, *argv)
    assert code == 2 and message in err


@pytest.mark.parametrize("flag", ["--gpu-memory", "--host-memory", "--disk", "--prompt-len", "--answer-len"])
@pytest.mark.parametrize("value", ["-3", "0", "1e-9", "nan", "inf", "1e300", "much"])
def test_sizes_that_no_machine_and_no_sample_has_are_refused(capsys, flag, value):
    with pytest.raises(SystemExit):
        plan(capsys, "--hf-checkpoint", "Qwen3-4B", flag, value)
    assert f"{flag}: must be a number from 1e-06 to below" in capsys.readouterr().err
