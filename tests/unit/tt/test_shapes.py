from math import prod

import pytest

from comera.errors import SpecError
from comera.tt.shapes import balanced_modes, btt_spec, tt_spec, ttm_spec
from comera.tt.spec import TTMSpec


@pytest.mark.parametrize(
    ("features", "count", "modes"),
    [
        (768, 3, (12, 8, 8)),
        (3072, 3, (16, 16, 12)),
        (768, 2, (32, 24)),
        (1000, 3, (10, 10, 10)),
        (768, 1, (768,)),
        (1, 3, (1, 1, 1)),
        (2, 4, (2, 1, 1, 1)),
        (3, 2, (3, 1)),
    ],
)
def test_features_with_good_factors_are_split_exactly(features, count, modes):
    assert balanced_modes(features, count) == modes


def test_alignment_is_not_traded_for_a_few_percent():
    assert balanced_modes(8192, 3) == (32, 16, 16)  # 21·20·20 has the smaller sum


@pytest.mark.parametrize(
    ("features", "count", "smallest", "largest"),
    [(50_265, 4, 14, 16), (30_522, 4, 12, 14), (50_257, 4, 14, 16), (8191, 3, 18, 24), (10_131_227, 4, 50, 60)],
)
def test_features_without_good_factors_are_padded(features, count, smallest, largest):
    modes = balanced_modes(features, count)
    assert features < prod(modes) <= 1.02 * features
    assert smallest <= min(modes)
    assert max(modes) <= largest


@pytest.mark.parametrize("features", [1, 7, 8191, 50_265, 30_522, 36_756_720, 39_999_983])
@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_modes_descend_and_hold_the_features_within_the_padding(features, count):
    for padding in (0.0, 0.1):
        modes = balanced_modes(features, count, max_padding=padding)
        assert len(modes) == count
        assert list(modes) == sorted(modes, reverse=True)
        assert features <= prod(modes) <= features * (1 + padding)


def brute_force_price(features, count, limit):
    def ascending(left, lowest, product):
        if left == 0:
            if product >= features:
                yield ()
            return
        for mode in range(lowest, limit // product + 1):
            for rest in ascending(left - 1, mode, product * mode):
                yield (mode, *rest)

    return min(price(modes, features) for modes in ascending(count, 1, 1))


def price(modes, features):
    padded = prod(modes) > features
    return sum(modes) * prod(modes) * (11 if padded else 10)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_no_choice_is_cheaper(count):
    for features in (1, 2, 11, 12, 31, 60, 97, 128):
        modes = balanced_modes(features, count, max_padding=0.25)
        assert price(modes, features) == brute_force_price(features, count, int(1.25 * features))


def test_padding_can_be_forbidden():
    assert balanced_modes(50_265, 4, max_padding=0) == (1117, 5, 3, 3)
    assert balanced_modes(8191, 3, max_padding=0) == (8191, 1, 1)


@pytest.mark.parametrize(
    ("features", "count", "padding"), [(0, 2, 0.1), (-3, 2, 0.1), (8, 0, 0.1), (8, 2, -0.1), (8, 2, float("nan"))]
)
def test_impossible_requests_are_refused(features, count, padding):
    with pytest.raises(SpecError, match=r"expected features|max_padding"):
        balanced_modes(features, count, max_padding=padding)


@pytest.mark.parametrize(
    ("shape", "modes", "ranks"),
    [
        ((768, 768), ((12, 8, 8), (8, 8, 12)), (12, 30, 30, 30, 12)),
        ((768, 3072), ((12, 8, 8), (12, 16, 16)), (12, 30, 30, 30, 16)),
        ((3072, 768), ((16, 16, 12), (8, 8, 12)), (16, 30, 30, 30, 12)),
    ],
)
def test_default_tt_specs_are_those_of_the_paper(shape, modes, ranks):
    spec = tt_spec(*shape)
    assert (spec.in_modes, spec.out_modes) == modes
    assert spec.inner_ranks == ranks


@pytest.mark.parametrize("order", range(2, 9))
def test_the_odd_core_goes_to_the_bigger_side(order):
    wide, tall = tt_spec(768, 3072, order=order), tt_spec(3072, 768, order=order)
    assert wide.order == tall.order == order
    assert len(wide.in_modes) == order // 2
    assert len(tall.in_modes) == (order + 1) // 2


def test_given_modes_are_kept_and_the_other_side_completed():
    spec = tt_spec(768, 3072, order=5, in_modes=(24, 32))
    assert (spec.in_modes, spec.out_modes) == ((24, 32), (12, 16, 16))
    assert tt_spec(768, 3072, order=5, out_modes=(64, 48)).in_modes == (12, 8, 8)
    assert tt_spec(768, 3072, order=3, in_modes=[768], out_modes=[64, 48]).modes == (768, 64, 48)


def test_a_full_list_of_ranks_is_kept():
    assert tt_spec(768, 768, order=4, rank=(1, 5, 7, 3, 1)).inner_ranks == (5, 7, 3)
    assert ttm_spec(1000, 64, order=3, rank=[1, 5, 7, 1]).inner_ranks == (5, 7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": 1}, "from 2 to 8, got 1"),
        ({"order": 9}, "from 2 to 8, got 9"),
        ({"order": 4, "in_modes": (32, 24), "out_modes": (12, 8, 8)}, "order 4 does not fit"),
        ({"order": 2, "in_modes": (32, 24)}, "order 2 does not fit"),
        ({"order": 4, "in_modes": ()}, "order 4 does not fit"),
        ({"in_modes": (12, 8, 7)}, "hold 672 entries but 768 are needed"),
        ({"order": 4, "rank": (1, 5, 5, 1)}, "order\\+1 = 5 entries"),
        ({"order": 2, "rank": (1, 1000, 1)}, r"rank 1000 at ranks\[1\] is above 768"),
        ({"rank": -1}, "rank must be >= 0"),
    ],
)
def test_tt_requests_that_do_not_fit_are_refused(options, message):
    with pytest.raises(SpecError, match=message):
        tt_spec(768, 768, **options)


def test_the_bert_embedding_stores_no_more_than_the_published_modes():
    published = TTMSpec(30_522, 768, (16, 20, 10, 10), (4, 4, 8, 6), (1, 30, 30, 30, 1))
    assert ttm_spec(30_522, 768, rank=30).numel <= published.numel


@pytest.mark.parametrize("shape", [(30_522, 768), (50_265, 768), (10_131_227, 128), (1460, 64)])
def test_big_modes_are_outside_and_both_parts_of_a_ttm_are_balanced(shape):
    spec = ttm_spec(*shape)
    for modes in (spec.row_modes, spec.col_modes):
        assert min(modes[0], modes[-1]) >= max(modes[1:-1])
    left, right = prod(spec.sizes[:2]), prod(spec.sizes[2:])
    assert max(left, right) <= 2 * min(left, right)


@pytest.mark.parametrize("order", range(1, 9))
def test_a_ttm_of_every_order_holds_its_table(order):
    spec = ttm_spec(50_265, 768, order=order)
    assert spec.order == order
    assert spec.padded_shape >= spec.shape == (50_265, 768)


def test_given_ttm_modes_are_kept_and_the_other_side_completed():
    rows, cols = (16, 20, 10, 10), (4, 4, 8, 6)
    assert ttm_spec(30_522, 768, row_modes=rows).row_modes == rows
    assert ttm_spec(30_522, 768, col_modes=cols).col_modes == cols
    spec = ttm_spec(30_522, 768, row_modes=rows, col_modes=cols)
    assert (spec.row_modes, spec.col_modes) == (rows, cols)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": 0}, "from 1 to 8, got 0"),
        ({"order": 9}, "from 1 to 8, got 9"),
        ({"order": 3, "row_modes": (10, 10)}, "pass order=2, or 3 modes"),
        ({"order": 3, "col_modes": (4, 4, 2, 2)}, "pass order=4, or 3 modes"),
        ({"order": 2, "row_modes": (10, 9)}, "row_modes .* hold 90 entries but 100 are needed"),
    ],
)
def test_ttm_requests_that_do_not_fit_are_refused(options, message):
    with pytest.raises(SpecError, match=message):
        ttm_spec(100, 64, **options)


@pytest.mark.parametrize(
    ("shape", "modes"),
    [
        ((768, 3072), ((24, 32), (64, 48))),
        ((1, 1), ((1, 1), (1, 1))),
        ((2, 3), ((1, 2), (3, 1))),
        ((7, 7), ((1, 7), (7, 1))),
        ((97, 61), ((9, 11), (9, 7))),  # primes are padded
        ((50_257, 768), ((217, 232), (32, 24))),
        ((39_999_983, 2), ((6322, 6328), (2, 1))),
    ],
)
def test_blocks_are_about_as_many_as_features_in_each(shape, modes):
    spec = btt_spec(*shape)
    assert (spec.in_modes, spec.out_modes) == modes
    assert all(padded < 2 * features for padded, features in zip(spec.padded_shape, spec.shape, strict=True))


def test_blocks_of_any_features_are_near_square_with_little_padding():
    for features in (*range(1, 400), 8191, 10_131_227):
        (a, b), padded = btt_spec(features, features).in_modes, btt_spec(features, features).padded_shape[0]
        assert a <= b <= 4 * a + 9
        assert features <= padded < features + b


def test_given_blocks_are_kept_and_ranks_clipped():
    spec = btt_spec(768, 3072, rank=99, blocks=(7, 3))
    assert (spec.in_modes, spec.out_modes, spec.block_ranks) == ((7, 110), (3, 1024), 99)
    assert btt_spec(768, 3072, rank=99).block_ranks == 32
    assert btt_spec(3, 4, blocks=(3, 4)).sizes == (1, 1)


@pytest.mark.parametrize(
    ("features", "options", "message"),
    [
        ((0, 8), {}, "features >= 1, got 0 and 8"),
        ((8, 8), {"rank": -1}, "rank must be >= 0"),
        ((8, 8), {"blocks": (0, 2)}, r"two integers >= 1, got \(0, 2\)"),
        ((8, 8), {"blocks": (2,)}, "two integers >= 1"),
        ((8, 8), {"blocks": (9, 2)}, r"at most one block per feature.*got \(9, 2\)"),
    ],
)
def test_btt_requests_that_do_not_fit_are_refused(features, options, message):
    with pytest.raises(SpecError, match=message):
        btt_spec(*features, **options)


@pytest.mark.parametrize(
    ("channels", "kernel", "order", "modes"),
    [
        (64, (3, 3), 2, (576,)),
        (64, (3, 3), 4, (64, 9)),
        (64, (3, 3), 6, (8, 8, 9)),
        (64, (1, 1), 6, (4, 4, 4)),
        (3, (16, 16), 6, (3, 16, 16)),  # a core for each size has the smaller sum
        (67, (5,), 6, (10, 7, 5)),  # 67 channels in 70: what is padded comes last
    ],
)
def test_the_last_input_cores_of_a_convolution_are_its_kernel(
    channels: int, kernel: tuple[int, ...], order: int, modes: tuple[int, ...]
) -> None:
    spec = tt_spec(channels * prod(kernel), 256, order=order, rank=4, kernel_size=kernel)
    assert spec.in_modes == modes


def test_a_kernel_divides_the_input_features() -> None:
    with pytest.raises(SpecError, match=r"positions divide 64 input features, got \(3, 3\)"):
        tt_spec(64, 64, kernel_size=(3, 3))
