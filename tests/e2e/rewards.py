"""Custom rewards for whole runs: cheap, and with differences between the answers of an untrained model."""

import asyncio
import json
import os
import time
import urllib.error
import urllib.request


def digits(args, sample):
    """Share of the answer's characters that are digits, and a bonus for the right sum. Slow while a file `slow` is
    in the working directory, so that a test can catch a run in a step."""
    if os.path.exists("slow"):
        time.sleep(0.05)
    text = sample.response or " "
    return sum(letter.isdigit() for letter in text) / len(text) + (str(sample.label) in text)


async def digits_async(args, sample):
    await asyncio.sleep(0)
    return digits(args, sample)


def digits_in_a_dict(args, sample):
    return {"score": digits(args, sample), "other": 1}


def digits_of_a_group(args, samples):
    return [digits(args, sample) for sample in samples]


def raises(args, sample):
    raise KeyError("no such thing")


def none(args, sample):
    return None


def nan(args, sample):
    return float("nan")


def string(args, sample):
    return "0.5"


def hangs(args, sample):
    time.sleep(600)


async def hangs_async(args, sample):
    await asyncio.sleep(600)


# The probe and the first rollout are scored well; then these misbehave.
FIRST_BAD_SAMPLE = 12


def late_raises(args, sample):
    return digits(args, sample) if sample.index < FIRST_BAD_SAMPLE else raises(args, sample)


def late_none(args, sample):
    return digits(args, sample) if sample.index < FIRST_BAD_SAMPLE else None


async def late_nan_async(args, sample):
    return digits(args, sample) if sample.index < FIRST_BAD_SAMPLE else float("nan")


def late_hangs(args, sample):
    return digits(args, sample) if sample.index < FIRST_BAD_SAMPLE else hangs(args, sample)


async def late_hangs_async(args, sample):
    return digits(args, sample) if sample.index < FIRST_BAD_SAMPLE else await hangs_async(args, sample)


def not_every_third(args, group):
    return group[0].group_index % 3 != 0


def quick_if_even(args, sample):
    """Groups with an even number are scored at once, others after the rollout has enough."""
    time.sleep(0.02 * (sample.group_index % 2))
    return digits(args, sample)


def tool(name, params):
    return f"{name} {params}"


def agent(base_url, prompt, request_kwargs, metadata):
    """Asks twice in one conversation."""
    messages = [{"role": "user", "content": prompt}]
    for text in ("?", None):
        body = json.dumps({**request_kwargs, "messages": messages, "max_tokens": 3}).encode()
        try:
            with urllib.request.urlopen(urllib.request.Request(f"{base_url}/chat/completions", body)) as answer:
                messages.append(json.loads(answer.read())["choices"][0]["message"])
        except urllib.error.HTTPError as error:
            assert json.loads(error.read())["error"]["code"] == "context_length_exceeded"
            break
        messages.append({"role": "user", "content": text})


async def slow_log(rollout_id, args, samples, extra_metrics, rollout_time):
    await asyncio.sleep(0.2)
    return False
