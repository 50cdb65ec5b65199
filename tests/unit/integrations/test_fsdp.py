"""FSDP2 around compressed layers, in two processes."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from comera.convert import BTT, TT, TTM, TensorizeConfig, tensorize_
from comera.errors import CheckpointError, ConversionError, RankError
from comera.fusion import fuse_
from comera.integrations.fsdp import clip_grad_norm_, fit_ranks_, replicate_
from comera.nn.size import model_size
from comera.nn.tensor_train import CompressedLayer, named_trains
from comera.optim.param_groups import param_groups
from comera.pretrained import load_pretrained, save_pretrained, stored
from comera.rank import LateStage, RankController, round_

from ...helpers.processes import in_processes

LATE = LateStage(target_size=0.5, start_step=4, steps=2)
TRAINS, BLOCKS = TT(order=4, rank=6), BTT(rank=2)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(32, 64), nn.Linear(64, 32), nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(self.up(x).relu()))


class Net(nn.Module):
    """A table, two blocks with layers of the same signature, and a dense head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(60, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(32, 60)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(seed: int = 0, linear: TT | BTT = TRAINS) -> Net:
    torch.manual_seed(seed)
    model = Net()
    tensorize_(model, TensorizeConfig(linear, TTM(order=2, rank=6), overrides={"head": None}))
    return model


def sharded(*, seed: int = 0, fused: bool = False, linear: TT | BTT = TRAINS, policy: Any = None) -> Net:
    model = build(seed, linear)
    if fused:
        fuse_(model)
    if dist.get_rank() > 0:
        nn.init.zeros_(model.blocks[0].up.tt.cores[0])  # type: ignore[union-attr]  # the first process's count
    kept = replicate_(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    # a compressed layer by itself, whose type changes by that: torch warns that its output is a view
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .FSDPTTLinear. returned a view")
    options: dict[str, Any] = {"mesh": mesh, "ignored_params": kept} | ({"mp_policy": policy} if policy else {})
    fully_shard(model.blocks[1].down, **options)
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def batch(step: int, part: int) -> Tensor:
    return torch.randint(60, (16,), generator=torch.Generator().manual_seed(2 * step + part))


def train(
    model: nn.Module, optimizer: Any, ranks: RankController | None, steps: range, parts: list[int], *, clip: Any
) -> list[float]:
    """Steps on the mean over the parts of each batch that this process has; returns the mean losses of all."""
    losses = []
    for step in steps:
        for part in parts:
            ids = batch(step, part)
            loss = nn.functional.cross_entropy(model(ids), (ids * 7 + 3) % 60) / len(parts)
            loss.backward()
            losses.append(loss.detach())
        total = torch.stack(losses[-len(parts) :]).sum()
        if dist.is_initialized():
            dist.all_reduce(total)
            total /= dist.get_world_size()
        losses[-len(parts) :] = [total]
        clip(model.parameters(), 0.5)
        if ranks:
            ranks.observe(total)
        optimizer.step()
        optimizer.zero_grad()
        if ranks and step == ranks.late.start_step + ranks.late.steps - 1:
            ranks.meet_target_()
    return [float(loss) for loss in losses]


def start(model: nn.Module, late: LateStage) -> tuple[Any, RankController]:
    optimizer = torch.optim.AdamW(param_groups(model, lr=1e-2, weight_decay=0.01))
    return optimizer, RankController(model, late=late)


def whole(model: nn.Module) -> dict[str, Tensor]:
    state = model.state_dict()
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}


def train_sharded(rank: int, fused: bool, late: LateStage, folder: str) -> list[float]:
    model = sharded(fused=fused)
    compressed = [module for module in model.modules() if isinstance(module, CompressedLayer)]
    assert not any(isinstance(p, DTensor) for layer in compressed for p in layer.parameters())
    assert isinstance(model.head.weight, DTensor)
    optimizer, ranks = start(model, late)
    ranks.attach(optimizer)
    losses = train(model, optimizer, ranks, range(14), [rank], clip=clip_grad_norm_)
    stored.SHARD = 4000 if fused else stored.SHARD  # in several files
    save_pretrained(model, folder)
    dist.barrier()
    state = whole(model)
    again = whole(load_pretrained(sharded(seed=9), folder))
    assert all(torch.equal(value, again[name]) for name, value in state.items())
    torch.save(state, f"{folder}-{rank}.pt")
    return losses


@pytest.mark.parametrize(("fused", "late"), [(False, replace(LATE, shrink="surrogate")), (True, LATE)])
def test_a_sharded_model_trains_as_one_that_is_whole(tmp_path: Path, fused: bool, late: LateStage) -> None:
    losses, other_losses = in_processes(train_sharded, fused, late, str(tmp_path / "model"))
    assert losses == other_losses
    state, other = (torch.load(tmp_path / f"model-{rank}.pt") for rank in range(2))
    assert all(torch.equal(value, other[name]) for name, value in state.items())

    model = build()
    optimizer, ranks = start(model, late)
    ranks.attach(optimizer)
    expected = train(model, optimizer, ranks, range(14), [0, 1], clip=nn.utils.clip_grad_norm_)
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)
    assert [p.shape for p in model.parameters()] == [state[name].shape for name, _ in model.named_parameters()]
    assert (tmp_path / "model" / "model.safetensors.index.json").exists() == fused
    loaded = load_pretrained(build(seed=3), tmp_path / "model")
    assert all(torch.equal(value, state[name]) for name, value in loaded.state_dict().items())


def resume_sharded(rank: int, folder: str, linear: TT | BTT, saved: int, late: LateStage) -> bool:
    model = sharded(linear=linear)
    optimizer, ranks = start(model, late)
    end = saved + 7
    ranks.attach(optimizer)
    train(model, optimizer, ranks, range(saved), [rank], clip=clip_grad_norm_)
    assert ranks.stage == "late"
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments, "ranks": ranks}, checkpoint_id=folder)
    expected = train(model, optimizer, ranks, range(saved, end), [rank], clip=clip_grad_norm_)

    again = sharded(seed=5, linear=linear)
    optimizer, ranks = start(again, late)
    fit_ranks_(again, folder, optimizers=[optimizer])
    weights, moments = get_state_dict(again, optimizer)
    dcp.load({"model": weights, "optimizer": moments, "ranks": ranks}, checkpoint_id=folder)
    set_state_dict(again, optimizer, model_state_dict=weights, optim_state_dict=moments)
    ranks.attach(optimizer)
    assert train(again, optimizer, ranks, range(saved, end), [rank], clip=clip_grad_norm_) == expected
    assert [t.spec for _, t in named_trains(again)] == [t.spec for _, t in named_trains(model)]
    return True


@pytest.mark.parametrize("linear", [TRAINS, BLOCKS], ids=["tt", "btt"])
@pytest.mark.parametrize("saved", [4, 7], ids=["where the late stage begins", "after a cut"])
def test_a_distributed_checkpoint_resumes_to_the_bit(linear: TT | BTT, saved: int, tmp_path: Path) -> None:
    assert in_processes(resume_sharded, str(tmp_path), linear, saved, LATE) == [True, True]


def test_importances_resume_to_the_bit(tmp_path: Path) -> None:
    late = replace(LATE, steps=40)  # gates are zeroed after 20 of them, by what was measured from the first
    assert in_processes(resume_sharded, str(tmp_path), TRAINS, 22, late) == [True, True]


def go_on(rank: int, folder: str, start_step: int, save_step: int) -> tuple[int, list[float]]:
    """Train from the checkpoint of `start_step`, if it is not 0, to that of `save_step`, and on, as one that is killed
    later; returns the parameters in tensor trains at the end, and the losses."""
    model = sharded(seed=start_step)
    optimizer, ranks = start(model, LateStage(target_size=0.4, start_step=4, steps=8))
    parts = [rank] if dist.get_world_size() == 2 else [0, 1]
    saved, gathered = f"{folder}/{start_step}", StateDictOptions(full_state_dict=True)
    if start_step:
        fit_ranks_(model, saved, optimizers=[optimizer])
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": moments, "ranks": ranks}, checkpoint_id=saved)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        for loaded, was in zip(
            get_state_dict(model, optimizer, options=gathered), torch.load(f"{saved}.pt"), strict=True
        ):
            assert loaded.get("param_groups") == was.get("param_groups")
            torch.testing.assert_close(loaded.get("state", loaded), was.get("state", was), rtol=0, atol=0)
    ranks.attach(optimizer)
    losses = train(model, optimizer, ranks, range(start_step, save_step), parts, clip=clip_grad_norm_)
    ranks.prune_()
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments, "ranks": ranks}, checkpoint_id=f"{folder}/{save_step}")
    whole_state = get_state_dict(model, optimizer, options=gathered)
    if rank == 0:
        torch.save(whole_state, f"{folder}/{save_step}.pt")
    dist.barrier()
    size = model_size(model).tensorized
    train(model, optimizer, ranks, range(save_step, save_step + 1), parts, clip=clip_grad_norm_)  # lost by the kill
    return size, losses


def test_a_run_goes_on_in_another_number_of_processes_while_ranks_fall(tmp_path: Path) -> None:
    (first, losses), _ = in_processes(go_on, str(tmp_path), 0, 7)
    ((second, more),) = in_processes(go_on, str(tmp_path), 7, 10, world=1)
    (third, last), (other, others) = in_processes(go_on, str(tmp_path), 10, 14)
    assert first > second >= third == other
    assert last == others

    # one process over all of it, which prunes at the same steps
    model = build()
    optimizer, ranks = start(model, LateStage(target_size=0.4, start_step=4, steps=8))
    ranks.attach(optimizer)
    expected = []
    for steps in (range(7), range(7, 10), range(10, 14)):
        expected += train(model, optimizer, ranks, steps, [0, 1], clip=nn.utils.clip_grad_norm_)
        ranks.prune_()
    torch.testing.assert_close(losses + more + last, expected, rtol=1e-4, atol=1e-5)
    assert model_size(model).tensorized == third


def resume_alone(rank: int, folder: str) -> None:
    """Every parameter is a core or a gate, so that the late stage leaves the optimizer no state at all."""

    def build(seed: int) -> tuple[nn.Module, Any, RankController]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False))
        tensorize_(model, TensorizeConfig(BLOCKS))
        return model, *start(model, LATE)

    def step(model: nn.Module, optimizer: Any, ranks: RankController) -> Tensor:
        loss = (model(torch.eye(32)) - 1).square().mean()
        loss.backward()
        ranks.observe(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    model, optimizer, ranks = build(0)
    ranks.attach(optimizer)
    for _ in range(4):
        step(model, optimizer, ranks)
    before = ranks.state_dict()
    weights, moments = get_state_dict(model, optimizer)
    assert ranks.state_dict() == before
    dcp.save({"model": weights, "optimizer": moments, "ranks": ranks}, checkpoint_id=folder)
    again, resumed, more = build(1)
    fit_ranks_(again, folder, optimizers=[resumed])
    weights, moments = get_state_dict(again, resumed)
    dcp.load({"model": weights, "optimizer": moments, "ranks": more}, checkpoint_id=folder)
    set_state_dict(again, resumed, model_state_dict=weights, optim_state_dict=moments)
    more.attach(resumed)
    for _ in range(3):
        assert torch.equal(step(again, resumed, more), step(model, optimizer, ranks))


def test_an_optimizer_that_a_late_stage_has_left_no_state_resumes_to_the_bit(tmp_path: Path) -> None:
    in_processes(resume_alone, str(tmp_path), world=1)


def load_in_place(rank: int, folder: str) -> None:
    model, other = build(linear=BLOCKS), build(seed=1, linear=BLOCKS)
    round_(model, 0.6)
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder)
    fit_ranks_(other, folder)
    assert [t.spec for _, t in named_trains(other)] == [t.spec for _, t in named_trains(model)]
    weights = get_model_state_dict(other)
    dcp.load({"model": weights}, checkpoint_id=folder)
    for _ in range(2):  # in place, and once more through load_state_dict
        assert torch.equal(other(torch.arange(60)), model(torch.arange(60)))
        set_model_state_dict(other, weights)
    damaged = {"model": get_model_state_dict(model)}
    next(value for key, value in damaged["model"].items() if key.endswith("block_ranks"))[0, 0] += 1
    dcp.save(damaged, checkpoint_id=f"{folder}-damaged")
    specs = [t.spec for _, t in named_trains(other)]
    with pytest.raises(CheckpointError, match="the weights are damaged"):
        fit_ranks_(other, f"{folder}-damaged")
    assert [t.spec for _, t in named_trains(other)] == specs


def test_the_ranks_of_blocks_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    in_processes(load_in_place, str(tmp_path / "saved"), world=1)


def refuse(rank: int, folder: str) -> list[str]:
    """The messages of what is not supported."""
    messages = []

    def message(kind: type[Exception], work: Any) -> None:
        with pytest.raises(kind) as caught:
            work()
        messages.append(str(caught.value))

    message(ConversionError, lambda: replicate_(Net()))
    with torch.device("meta"):
        message(ConversionError, lambda: replicate_(build()))
    model = build()
    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    message(ConversionError, lambda: replicate_(model))
    message(RankError, lambda: RankController(model))
    model = sharded()
    dcp.save({"model": {"other": torch.zeros(3)}}, checkpoint_id=folder)
    message(CheckpointError, lambda: fit_ranks_(model, folder))
    optimizer = start(model, LATE)[0]
    dcp.save({"model": model.state_dict(), "moments": {"step": 1}}, checkpoint_id=f"{folder}-moments")
    message(CheckpointError, lambda: fit_ranks_(model, f"{folder}-moments", optimizers=[optimizer]))
    cast = sharded(policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    message(ConversionError, lambda: cast(torch.arange(60)))
    for original in (True, False):
        wrapped = FullyShardedDataParallel(build(), device_id=torch.device("cpu"), use_orig_params=original)
        message(RankError, lambda wrapped=wrapped: param_groups(wrapped, lr=1e-3))
        message(RankError, lambda wrapped=wrapped: RankController(wrapped))
    return messages


def compute_in_bfloat16(rank: int) -> None:
    ids = torch.arange(60)
    expected = build()(ids)
    expected.logsumexp(-1).sum().backward()
    for policy in (None, MixedPrecisionPolicy(param_dtype=torch.bfloat16)):
        model = sharded(policy=policy)
        with torch.autocast("cpu", torch.bfloat16):
            found = model(ids)
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.float(), expected, rtol=0.03, atol=0.03)
        found.float().logsumexp(-1).sum().backward()
        assert model.blocks[1].down.tt.cores[0].grad.dtype == torch.float32  # type: ignore[union-attr]


def test_mixed_precision_of_sharded_layers_beside_autocast() -> None:
    in_processes(compute_in_bfloat16)


def test_what_is_not_supported_says_what_to_do(tmp_path: Path) -> None:
    found, _ = in_processes(refuse, str(tmp_path / "saved"))
    for message, part in zip(
        found,
        (
            "expected a model with compressed layers, got Net: tensorize_ it first",
            "call replicate_ once the model has been loaded or initialized",
            "call replicate_ first, then fully_shard with what it returns as ignored_params",
            "call comera.integrations.fsdp.replicate_ first, then fully_shard with what it returns as ignored_params",
            "expected the tensor train table.tt with the modes of .*, got nothing under 'model.table.tt.'",
            "expected the state of optimizers, got nothing under 'optimizer.'",
            "run each forward under torch.autocast('cpu', torch.bfloat16), which casts them too",
            *["got some that FullyShardedDataParallel, or a wrapper like it, has spread: call .*fsdp.replicate_"] * 4,
        ),
        strict=True,
    ):
        assert part.split(".*")[0] in message, message
        assert part.split(".*")[-1] in message, message


def average_unused(rank: int) -> list[float]:
    """A layer that only the first process uses, one that none uses, and a backward that fails midway."""
    model = build()
    replicate_(model)
    first, second = model.blocks
    x = torch.ones(3, 32) * (rank + 1)
    (first(x) if rank == 0 else model.table(torch.arange(3))).sum().backward()
    grads = [first.up.tt.cores[0].grad, second.up.tt.cores[0].grad, model.table.tt.cores[0].grad]
    alone = build()
    alone.blocks[0](torch.ones(3, 32)).sum().backward()
    torch.testing.assert_close(grads[0], alone.blocks[0].up.tt.cores[0].grad / 2)
    assert grads[1] is None
    assert grads[2] is not None

    class Fail(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:
            raise KeyboardInterrupt

    for p in model.parameters():
        p.grad = None
    with pytest.raises(KeyboardInterrupt):
        second(Fail.apply(model.table(torch.arange(3)))).sum().backward()
    for p in model.parameters():
        p.grad = None
    second(x).sum().backward()
    return list(second.up.tt.cores[0].grad.flatten().tolist())


def test_gradients_are_averaged_whoever_has_them() -> None:
    grad, other = in_processes(average_unused)
    assert grad == other
