"""The kernels of losses touch no memory that their operands do not have: wrong lengths and labels raise."""

import pytest
import torch

from comera.kernels.cpp import compiler, cross_entropy, low_rank_cross_entropy

from ...helpers.refused import CHANGE_IDS, CHANGES, assert_all_refused, shorter

pytestmark = pytest.mark.skipif(compiler.find() is None, reason="no C++ compiler")


@pytest.mark.parametrize("change", CHANGES, ids=CHANGE_IDS)
def test_wrong_operands_of_cross_entropy_are_refused(change):
    logits, labels = torch.randn(4, 9), torch.tensor([0, 8, -100, 3])
    entropy = lambda *given: cross_entropy.cross_entropy(*given, -100)  # noqa: E731
    assert_all_refused(lambda labels: entropy(logits, labels), [labels], change)
    if change is not shorter:  # fewer classes: the labels may do
        assert_all_refused(lambda logits: entropy(logits, labels), [logits], change)
    for wrong in (9, -1, 2**40, -(2**40)):
        with pytest.raises(RuntimeError, match=f"expected labels from 0 to 8 or -100, got {wrong}"):
            entropy(logits, labels.where(labels != 3, wrong))


@pytest.mark.parametrize("change", CHANGES, ids=CHANGE_IDS)
def test_wrong_operands_of_low_rank_cross_entropy_are_refused(change):
    p, b, labels = torch.randn(4, 3), torch.randn(4, 9), torch.tensor([0, 8, -100, 3])
    entropy = lambda *given: low_rank_cross_entropy.low_rank_cross_entropy(*given, -100, True)  # noqa: E731
    assert_all_refused(lambda p, labels: entropy(p, b, labels), [p, labels], change)
    for wrong in (torch.randn(5, 9), torch.randn(2, 9), torch.randn(4), b.double()):
        with pytest.raises(RuntimeError, match="expected"):
            entropy(p, wrong, labels)
    for wrong in (9, -1, 2**40, -(2**40)):
        with pytest.raises(RuntimeError, match=f"expected labels from 0 to 8 or -100, got {wrong}"):
            entropy(p, b, labels.where(labels != 3, wrong))


@pytest.mark.parametrize("change", CHANGES, ids=CHANGE_IDS)
def test_wrong_operands_of_linear_cross_entropy_are_refused(change):
    operands = torch.randn(4, 3), torch.randn(9, 3), torch.randn(9), torch.tensor([0, 8, -100, 3])
    assert_all_refused(lambda *given: low_rank_cross_entropy.linear_cross_entropy(*given, -100, True), operands, change)
    with pytest.raises(RuntimeError, match="expected labels from 0 to 8 or -100, got 9"):
        low_rank_cross_entropy.linear_cross_entropy(*operands[:3], torch.tensor([0, 9, 1, 2]), -100, True)
