"""Operands that a kernel must refuse: each tensor in turn longer, shorter, of another dtype, dimension or device."""

import pytest
import torch


def longer(tensor):
    """One row more, or one element."""
    return torch.cat([tensor, tensor[:1]]) if tensor.dim() else tensor.repeat(2)


def shorter(tensor):
    return tensor[..., :-1]


CHANGES = [longer, shorter, torch.Tensor.double, lambda t: t.unsqueeze(0), lambda t: torch.empty_like(t, device="meta")]
CHANGE_IDS = ["longer", "shorter", "float64", "more dimensions", "not on the CPU"]


def replaced(operands, change):
    """The operands with one tensor changed, each in turn, tensors in lists too."""
    for k, operand in enumerate(operands):
        if isinstance(operand, torch.Tensor):
            yield [*operands[:k], change(operand), *operands[k + 1 :]]
        elif isinstance(operand, list):
            for each in replaced(operand, change):
                yield [*operands[:k], each, *operands[k + 1 :]]


def assert_all_refused(function, operands, change):
    function(*operands)
    for wrong in replaced(list(operands), change):
        with pytest.raises((RuntimeError, ValueError), match=r"expected|expand"):
            function(*wrong)
