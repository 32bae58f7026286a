from __future__ import annotations

import pytest
import torch

from miles.model.context import packed_context
from miles.model.load import load_model
from miles.ops.matmul import project_float32
from tests.unit.model.random_checkpoints import write_checkpoint

pytestmark = pytest.mark.gpu

LENGTHS = [7, 200, 31, 32, 9, 1, 31]


def run(folder, *, dtype, device):
    """Log-probs, and the gradient of a fixed projection of the hidden states for every parameter."""
    model = load_model(folder, dtype=dtype, device=device)
    ids_T = torch.randint(0, 211, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    hidden_TD = model(ids_T.to(device), packed_context(LENGTHS, device=device))
    with torch.no_grad():
        log_probs_TV = torch.log_softmax(project_float32(hidden_TD, model.head_weight), -1).cpu()
    direction = torch.randn(hidden_TD.shape, generator=torch.Generator().manual_seed(2)).to(device)
    (hidden_TD.float() * direction).sum().backward()
    gradients = {name: p.grad.float().cpu() for name, p in model.named_parameters() if p.grad is not None}
    return log_probs_TV, gradients


def difference(one, other):
    return ((one - other).norm() / other.norm()).item()


@pytest.mark.parametrize("case", ["llama-tied-llama3-rope", "qwen2", "qwen3"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_cuda_equals_float32_on_the_cpu(case, dtype, tolerance, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    write_checkpoint(case, tmp_path)
    expected, expected_gradients = run(tmp_path, dtype=torch.float32, device="cpu")
    actual, gradients = run(tmp_path, dtype=dtype, device="cuda")
    assert difference(actual, expected) < tolerance
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        assert difference(gradients[name], gradient) < 2 * tolerance, name
