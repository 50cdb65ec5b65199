"""LTE, "LoRA-the-Explorer": parallel low-rank heads beside a frozen weight (Huh et al., arXiv:2402.16828).

N heads, each with A_n (r, in) and B_n (out, r), train like N workers, each on its own part of the batch::

    y = W x + s B_n A_n x   for x in part n,   s = alpha / r

Every T steps their average is merged into the weight, and they start again::

    W ← W + s/N Σ_n B_n A_n,   B_n ← 0

Where the paper leaves a choice: a merge keeps A_n and the optimizer's moments; biases, norms and embeddings, which the
workers would average, train as usual. Evaluation uses the average, W + s/N Σ_n B_n A_n, so a merge never changes it.
If the batch has fewer examples than heads, several heads see each example and their mean counts: with one example this
is the paper's multi-head LoRA. If the sizes do not divide, parts differ by one. All heads take two batched products.
B examples (leading axis of the input), N heads, S slots for examples in a head's part, T remaining axes of the input
(tokens), P parts of the batch, I in, O out, R rank, F flattened axis."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comera.baselines.common import Applied, Baseline, adamw, convert_linear_, elements
from comera.convert import LayerRow
from comera.errors import check_fields, is_integer


@dataclass(frozen=True)
class LTE(Baseline):
    """LTE: parallel low-rank heads beside frozen weights, merged every few steps; core_lr is their learning rate.

    Example:
        >>> import torch
        >>> from comera.baselines import LTE
        >>> from comera.trainer import TrainConfig
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 16))
        >>> applied = LTE(heads=2, rank=4, merge_every=2).apply_(model)
        >>> optimizer = applied.optimizer(TrainConfig(steps=4, lr=1e-3))
        >>> before = model[0].weight.clone()
        >>> for step in (1, 2):
        ...     model(torch.randn(8, 64)).square().mean().backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        ...     applied.after_step(step)  # merges the heads after every second one
        >>> torch.equal(model[0].weight, before)
        False
    """

    rate = 0.1

    heads: int = 32
    """Heads per layer; each sees its own part of the batch."""
    rank: int = 32
    """Rank of a head, clipped to the layer's smaller dimension."""
    alpha: float = 4096.0
    """Heads are scaled by alpha / rank."""
    merge_every: int = 10
    """Steps between merges of the heads into the weight."""

    def __post_init__(self) -> None:
        checks = {
            name: (is_integer(getattr(self, name)), "an integer >= 1") for name in ("heads", "rank", "merge_every")
        }
        check_fields(self, "lte.", {**checks, "alpha": (0 < self.alpha < float("inf"), "a number > 0")})

    def apply_(self, model: nn.Module, skip: Sequence[str] = ()) -> Applied:
        dense_total = elements(model.parameters())
        rows = lte_(model, heads=self.heads, rank=self.rank, alpha=self.alpha, skip=skip)
        heads = [p for layer in model.modules() if isinstance(layer, LTELinear) for p in (layer.down, layer.up)]

        def after_step(step: int) -> None:
            if step % self.merge_every == 0:
                merge_(model)

        return Applied(rows, dense_total, adamw(model, heads, "heads"), after_step)


def lte_(
    model: nn.Module, heads: int = 32, rank: int = 32, alpha: float = 4096.0, skip: Sequence[str] = ()
) -> tuple[LayerRow, ...]:
    """Add heads to linear layers and freeze their weights, in place; returns what became of each layer. The model's
    outputs are unchanged at first. Call `merge_` every T steps. skip: glob patterns of names to leave as they are.
    Raises ConversionError if there is nothing to replace.

    Example:
        >>> import torch
        >>> from comera.baselines import lte_
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 16))
        >>> for row in lte_(model, heads=4, rank=8):
        ...     print(row.note)
        4 heads of rank 8 beside the weight, merged into it
        >>> [name for name, p in model.named_parameters() if p.requires_grad]
        ['0.bias', '0.down', '0.up']
    """
    return convert_linear_(
        model,
        skip,
        lambda layer: LTELinear(layer, heads, rank, alpha),
        lambda layer: f"{heads} heads of rank {layer.down.shape[1]} beside the weight, merged into it",
    )


def merge_(model: nn.Module) -> None:
    """Merge the average of every LTELinear's heads into its weight and reset the heads, in place.

    Example:
        >>> import torch
        >>> from comera.baselines import lte_, merge_
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 16))
        >>> _ = lte_(model, heads=4, rank=8, alpha=8.0)
        >>> _ = torch.nn.init.normal_(model[0].up)  # as if trained
        >>> x = torch.randn(3, 64)
        >>> before = model.eval()(x)
        >>> merge_(model)
        >>> torch.allclose(model(x), before, rtol=1e-4, atol=1e-4), model[0].up.any().item()
        (True, False)
    """
    for layer in model.modules():
        if isinstance(layer, LTELinear):
            layer.merge_()


class LTELinear(nn.Module):
    """A linear layer with parallel low-rank heads; see the top of this file. Keeps the weight (frozen) and the bias of
    `layer`. down: A (N, R, I) with orthogonal rows of length √(I/R), as in the published code; up: B (N, O, R), zero.
    Input (B, ..., I) -> output (B, ..., O); an input (I,) is one example."""

    bias: nn.Parameter | None

    def __init__(self, layer: nn.Linear, heads: int, rank: int, alpha: float) -> None:
        super().__init__()
        self.weight = layer.weight.requires_grad_(False)
        self.register_parameter("bias", layer.bias)
        rows, cols = layer.weight.shape
        rank = min(rank, rows, cols)
        self.scale = alpha / rank
        directions_NIR = torch.linalg.qr(torch.randn(heads, cols, rank, device=layer.weight.device))[0]
        down_NRI = directions_NIR.mT.to(layer.weight.dtype) * math.sqrt(cols / rank)
        self.down = nn.Parameter(down_NRI.contiguous())
        self.up = nn.Parameter(layer.weight.new_zeros(heads, rows, rank))

    @property
    def heads(self) -> int:
        """Number of heads."""
        return self.down.shape[0]

    def forward(self, input: Tensor) -> Tensor:
        x, y = input, F.linear(input, self.weight, self.bias)
        examples = x.shape[0] if x.ndim > 1 else 1
        if not x.numel():
            return y
        if not self.training:
            return self._add(y, x, 1)
        if examples % self.heads == 0 or self.heads % examples == 0:
            return self._add(y, x, min(examples, self.heads))
        example_NS, weight_NS = parts(examples, self.heads, x.device)
        x_NFI = x.reshape(examples, -1, x.shape[-1])[example_NS].flatten(1, 2)  # slots, tokens
        delta_NFO = torch.bmm(torch.bmm(x_NFI, self.down.mT), self.up.mT)
        delta_FTO = delta_NFO.reshape(example_NS.numel(), -1, y.shape[-1])  # heads, slots
        delta_FTO = delta_FTO * (self.scale * weight_NS).to(delta_FTO.dtype).reshape(-1, 1, 1)
        return y.view(examples, -1, y.shape[-1]).index_add(0, example_NS.flatten(), delta_FTO).view_as(y)

    def _add(self, y: Tensor, x: Tensor, parts: int) -> Tensor:
        """y plus the mean over the heads of each part; parts: divides both the examples and the heads."""
        down_PFI, up_POF = self._concatenated(parts)
        hidden = torch.bmm(x.reshape(parts, -1, x.shape[-1]), down_PFI.mT)
        scale = self.scale * parts / self.heads
        return torch.baddbmm(y.view(parts, -1, y.shape[-1]), hidden, up_POF.mT, alpha=scale).view_as(y)

    def _concatenated(self, parts: int) -> tuple[Tensor, Tensor]:
        """The heads of each of the P parts, concatenated along their ranks, F."""
        up_PKOR = self.up.unflatten(0, (parts, -1))
        return self.down.unflatten(0, (parts, -1)).flatten(1, 2), up_PKOR.transpose(1, 2).flatten(2)

    @torch.no_grad()
    def delta(self) -> Tensor:
        """s/N Σ_n B_n A_n, (O, I): what a merge adds to the weight."""
        down_1FI, up_1OF = self._concatenated(1)
        return up_1OF[0] @ down_1FI[0] * (self.scale / self.heads)

    @torch.no_grad()
    def merge_(self) -> None:
        """W ← W + s/N Σ_n B_n A_n, B_n ← 0."""
        self.weight.add_(self.delta())
        self.up.zero_()

    def extra_repr(self) -> str:
        heads, rank, cols = self.down.shape
        return f"in_features={cols}, out_features={self.up.shape[1]}, heads={heads}, rank={rank}, scale={self.scale:g}"


def parts(examples: int, heads: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """The example in each slot of each head (N, S), and its weight there (N, S). Parts are contiguous and as equal as
    possible. The weights of an example sum to 1 over the heads that see it; empty slots have weight 0. Needs at least
    one example."""
    head_N1 = torch.arange(heads, device=device)[:, None]
    start_N1, end_N1 = head_N1 * examples // heads, (head_N1 + 1) * examples // heads
    slot_S = torch.arange(-(-examples // heads), device=device)
    filled_NS = (slot_S < (end_N1 - start_N1).clamp(min=1)).float()
    example_NS = (start_N1 + slot_S).clamp(max=examples - 1)
    seen_B = torch.zeros(examples, device=device).index_add(0, example_NS.flatten(), filled_NS.flatten())
    return example_NS, filled_NS / seen_B[example_NS]
