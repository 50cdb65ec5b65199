"""Memory for large tensors: the next ones take it whole, it never exceeds what was in use, and is like any other."""

import copy
import io
import pickle
import subprocess
import sys
import threading

import pytest
import torch

from comera.kernels import select
from comera.kernels.cpp import compiler, memory
from comera.kernels.cpp.memory import LARGE, empty
from comera.ops.linear import tt_linear
from comera.tt.init import init_cores
from comera.tt.spec import TTSpec

pytestmark = pytest.mark.skipif(compiler.find() is None, reason="no C++ compiler")
ROWS = LARGE // 1024  # of 256 float32: a large tensor


@pytest.fixture(autouse=True)
def nothing_in_use():
    """What a test takes it gives back."""
    assert select.unavailable_reason() is None
    before = memory.held().in_use
    yield
    assert memory.held().in_use == before


@pytest.mark.parametrize("shape", [(ROWS, 256), (ROWS * 256,), (ROWS, 4, 64), (2, ROWS // 2, 4, 64), (ROWS + 1, 257)])
def test_a_tensor_like_any_other(shape):
    before = memory.held().in_use
    x = empty(*shape)
    assert memory.held().in_use - before >= x.numel() * 4
    assert x.shape == shape
    assert x.dtype == torch.float32
    assert x.is_contiguous()
    assert not x._is_view()
    x.copy_(torch.arange(x.numel()).view(shape))
    assert float(x.double().sum()) == (x.numel() - 1) * x.numel() / 2


@pytest.mark.parametrize("shape", [(), (0, 5), (ROWS, 255), (1, 1, ROWS, 16, 16)])
def test_small_ones_and_those_of_more_dimensions_are_torchs(shape):
    before = memory.held()
    x = empty(*shape)
    assert x.shape == shape
    assert memory.held() == before


def test_declined_by_the_environment(monkeypatch):
    monkeypatch.setenv("COMERA_KERNELS", "residual_norm")
    before = memory.held()
    x = empty(ROWS, 256)
    assert x.shape == (ROWS, 256)
    assert memory.held() == before


def alone(program: str) -> None:
    """Run a test in a process of its own, whose blocks are those of this test alone."""
    subprocess.run([sys.executable, "-c", f"from comera.kernels.cpp.memory import empty, held\n{program}"], check=True)


def test_the_next_one_takes_it_once_no_view_is_left():
    alone(f"""if True:
        x = empty(3 * {ROWS}, 256)
        at, view = x.data_ptr(), x[1:].t()
        del x
        other = empty(3 * {ROWS}, 256)
        assert other.data_ptr() != at
        del view
        assert empty(3 * {ROWS} - 5, 256).data_ptr() == at
    """)


def test_a_block_is_not_wasted_on_a_much_smaller_tensor():
    alone(f"""if True:
        larger, x = empty(30 * {ROWS}, 256), empty(8 * {ROWS}, 256)
        at = x.data_ptr()
        del larger  # goes back to the system first
        del x
        assert empty(3 * {ROWS}, 256).data_ptr() != at
        assert empty(7 * {ROWS}, 256).data_ptr() == at
    """)


def test_a_shorter_batch_takes_the_blocks_of_a_longer_one_where_others_would_be_unmapped_for_it():
    alone(f"""if True:
        at_once = [empty(rows * {ROWS}, 256) for rows in (10, 10, 8)]
        blocks, held_before = {{x.data_ptr() for x in at_once}}, held().held
        at_once.clear()
        shorter = [empty(rows * {ROWS}, 256) for rows in (6, 6, 5)]
        assert {{x.data_ptr() for x in shorter}} == blocks
        shorter.clear()
        assert empty(3 * {ROWS}, 256).data_ptr() not in blocks  # less than half of any
        assert held().held <= held_before * 17 / 16
    """)


def test_tensors_of_several_sizes_in_turn_keep_their_blocks_where_a_sixteenth_more_holds_them():
    alone(f"""if True:
        at_once = [empty(rows * {ROWS}, 256) for rows in (30, 30)]
        at_once.clear()
        blocks = set()
        for turn in range(9):
            for rows in (30, 3, 30):
                x, y = empty(rows * {ROWS}, 256), empty(30 * {ROWS}, 256)
                blocks |= {{x.data_ptr(), y.data_ptr()}}
                del x, y
        assert len(blocks) == 3, blocks
    """)


def test_what_was_in_use_once_is_given_back_after_some_steps():
    """Steps of one tensor at a time, after an evaluation of many: of the same size and of others."""
    alone(f"""if True:
        many = [empty(rows * {ROWS}, 256) for rows in [4] * 20 + [30] * 20]
        most = held().held
        many.clear()
        for _ in range(9_000):
            empty(4 * {ROWS}, 256)
        assert held().held == most  # the next evaluation finds it
        for _ in range(2_000):
            empty(4 * {ROWS}, 256)
        assert held() == (0, 4 * 4 * {ROWS} * 256), held()
        many = [empty(30 * {ROWS}, 256) for _ in range(20)]
        many.clear()
        assert held().held <= 20 * 31 * 4 * {ROWS} * 256 * 17 / 16
    """)


def test_all_of_it_is_given_back_on_request():
    alone(f"""if True:
        from comera.kernels.cpp.memory import release
        kept, freed = empty(4 * {ROWS}, 256), empty(30 * {ROWS}, 256)
        del freed
        release()
        assert held() == (4 * 4 * {ROWS} * 256,) * 2
    """)


def test_little_more_is_held_than_was_in_use_at_once():
    at_once = [empty(rows * ROWS, 256) for rows in (50, 60, 70)]  # more than any other test
    most = memory.held().in_use
    at_once.clear()
    for rows in (54, 11, 90, 20, 130, 31, 41, 180):  # none of them fits into what another one has left
        x = empty(rows * ROWS, 256)
        assert memory.held().in_use <= memory.held().held <= max(most, memory.held().in_use) * 17 / 16
        del x


def test_without_memory_the_error_is_torchs():
    with pytest.raises(RuntimeError, match="allocate"):
        empty(2**44, 2**5)


def test_threads_get_memory_of_their_own():
    wrong = []

    def work(number):
        for turn in range(40):
            x = empty(ROWS + turn % 3, 256).fill_(number)
            if not bool((x == number).all()):
                wrong.append((number, turn))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_copied_pickled_saved_and_shared():
    x = empty(ROWS, 256).fill_(2.5)
    stored = io.BytesIO()
    torch.save(x, stored)
    stored.seek(0)
    for other in (copy.deepcopy(x), pickle.loads(pickle.dumps(x)), torch.load(stored), torch.from_numpy(x.numpy())):
        assert torch.equal(other, x)
    assert torch.equal(x.clone().share_memory_(), x)


@pytest.mark.parametrize("bias", [True, False])
def test_layers_in_it_to_the_bit(monkeypatch, bias):
    spec = TTSpec(256, 512, (16, 16), (32, 16), (1, 5, 7, 4, 1))
    torch.manual_seed(0)
    cores = [core.requires_grad_() for core in init_cores(spec, std=0.2)]
    bias = torch.randn(512, requires_grad=True) if bias else None
    x = torch.randn(ROWS, 256, requires_grad=True)
    results = []
    for setting in ("memory", "none"):
        monkeypatch.setenv("COMERA_KERNELS", setting)
        before = memory.held().in_use
        y = tt_linear(x, spec, cores, bias)
        assert (memory.held().in_use > before) == (setting == "memory")
        y += 1  # in place, where autograd looks for views
        wanted = [x, *cores, *([] if bias is None else [bias])]
        results.append([y.detach().clone(), *torch.autograd.grad(y.square().sum(), wanted)])
        del y
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    del results, one, other


def test_tensors_may_outlive_everything_else():
    code = "from comera.kernels.cpp.memory import empty; import builtins; builtins.kept = empty(512, 1024).zero_()"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
