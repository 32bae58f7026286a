"""Engine and trainer compute the same log-probs: `benchmarks/parity.py` says how nearly."""

from pathlib import Path

import pytest
import torch

from benchmarks import parity
from benchmarks.parity import gaps, make_requests, measure, statistics
from miles.config.sections import EngineConfig
from miles.model.load import load_model
from miles.quickstart import __file__ as quickstart
from miles.text.tokenizer import load_tokenizer
from miles.trainer.forward import Scorer

TINY = Path(quickstart).parent / "model"


def test_the_shipped_model_in_float32():
    found = measure(TINY, dtype=torch.float32, device="cpu", num=256, most_tokens=40)
    assert found["tokens"] > 256 * 15 and found["meets_goal"] and found["max"] < 1e-4


def test_retracted_requests_and_chunks_change_nothing_and_another_temperature_is_seen(monkeypatch):
    model, requests = load_model(TINY, dtype=torch.float32, device="cpu"), make_requests(load_tokenizer(TINY), 24, 40)
    small = EngineConfig(engine_max_total_tokens=256, engine_chunked_prefill_size=5, engine_max_running_requests=12)
    assert gaps(model, requests, small).max() < 1e-4
    monkeypatch.setattr(parity, "Scorer", lambda temperature, chunk_size: Scorer(1.01, chunk_size))
    assert gaps(model, requests, small).max() > 1e-3


def test_statistics():
    planted = torch.full((1000,), 0.01)
    planted[:20] = 1.0
    assert statistics(planted) == pytest.approx({"mean": 0.0298, "p99": 1.0, "max": 1.0, "tokens": 1000})


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_smollm2_in_float32(smollm2_dir):
    found = measure(smollm2_dir, dtype=torch.float32, device="cpu", num=64, most_tokens=32)
    assert found["max"] < 1e-4
