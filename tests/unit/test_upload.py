import numpy as np
import torch

from libraspec_sglang import upload


def test_values_arrive_whole_and_of_their_type():
    there = upload.upload(np.array([3, 1, 2]), "cpu")
    assert there.dtype is torch.int64 and there.tolist() == [3, 1, 2]
    first, none, second = upload.upload_together(
        [np.array([0.5, 2.0]), np.zeros(0), torch.tensor([7.0], dtype=torch.float64)], "cpu"
    )
    assert (first.tolist(), none.tolist(), second.tolist()) == ([0.5, 2.0], [], [7.0])
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def test_a_gpu_is_sent_pinned_memory_and_not_waited_for(monkeypatch):
    """There is none here: what is asked of PyTorch is what it documents for such a copy."""
    asked = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: asked.append("pinned") or self)
    monkeypatch.setattr(
        torch.Tensor, "to", lambda self, device, **how: asked.append((device, how)) or self
    )
    upload.upload(torch.ones(2), "cuda:0")
    assert asked == ["pinned", ("cuda:0", {"non_blocking": True})]
