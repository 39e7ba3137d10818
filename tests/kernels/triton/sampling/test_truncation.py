"""Thresholds on the device keep what `truncate_by_sorting` keeps, token for token."""

import pytest
import torch

from kernels.triton import device_limits
from kernels.triton.sampling import truncation as module
from kernels.triton.sampling.row_maxima import (
    TILE,
    find_split_maxima,
    find_split_maxima_reference,
    num_splits,
)
from kernels.triton.sampling.truncation import find_thresholds, truncate_reference
from kernels.triton.sampling.truncation_measure import Truncation
from tests.kernels.triton.columns import columns_of

NONE = (0, 1.0, 0.0)
LIMITS = [
    NONE,
    (1, 1.0, 0.0),
    (5, 1.0, 0.0),
    (0, 0.7, 0.0),
    (0, 0.0001, 0.0),
    (0, 0.9999999, 0.0),
    (0, 1.0, 0.1),
    (0, 1.0, 1.0),
    (50, 0.9, 0.0),
    (50, 0.9, 0.05),
    (0, 0.95, 0.01),
    (10**6, 0.5, 0.0),
]


def maxima(logits, num_rows=None):
    rows, vocab_size = logits.shape
    best = torch.full((rows, num_splits(vocab_size)), torch.nan)
    ids = torch.full(best.shape, -7, dtype=torch.int32)
    number = torch.tensor([rows if num_rows is None else num_rows], dtype=torch.int32)
    find_split_maxima(logits, num_rows_1=number, best_RS=best, best_id_RS=ids)
    return best, ids


def columns(limits, **values):
    top_k, top_p, min_p = zip(*limits, strict=True)
    return columns_of(
        len(limits),
        top_k_N=torch.tensor(top_k),
        top_p_N=torch.tensor(top_p, dtype=torch.float32),
        min_p_N=torch.tensor(min_p, dtype=torch.float32),
        **values,
    )


def poisoned(rows):
    truncation = Truncation.allocate(rows, torch.device("cpu"))
    for name in Truncation.__slots__:
        tensor = getattr(truncation, name)
        tensor.fill_(torch.nan if tensor.is_floating_point() else -77)
    return truncation


def check(logits, limits, temperature=None):
    rows, vocab_size = logits.shape
    temperature = torch.ones(rows) if temperature is None else temperature
    asked = columns(limits, temperature_N=temperature)
    truncation = poisoned(rows)
    before = logits.clone()
    find_thresholds(logits, asked, best_RS=maxima(logits)[0], truncation=truncation)
    assert torch.equal(logits, before)
    x = logits / temperature[:, None]
    threshold = truncation.threshold_R[:, None]
    is_tie = (x == threshold) & (torch.arange(vocab_size) <= truncation.last_tie_R[:, None])
    kept = ((x > threshold) | is_tie) & (x > -torch.inf)
    clamped = torch.where(asked.top_k_N < vocab_size, asked.top_k_N, 0)
    scaled = (logits, temperature, clamped, asked.top_p_N, asked.min_p_N)
    expected = truncate_reference(*scaled) > -torch.inf
    for row in range(rows):
        assert torch.equal(kept[row], expected[row]), (row, limits[row], kept[row].sum())


@pytest.fixture
def float32_weights(monkeypatch):
    """As on a GPU with few units for float64."""
    monkeypatch.setattr(module, "has_fast_float64", lambda device: False)


def random_logits(rows, vocab_size, spread, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab_size, generator=generator) * spread


@pytest.mark.parametrize("vocab_size", [1, 2, 63, 1000])
def test_random_rows_with_every_kind_of_limit(vocab_size):
    logits = random_logits(len(LIMITS), vocab_size, 3.0, vocab_size)
    check(logits, LIMITS, torch.linspace(0.3, 2.5, len(LIMITS)))


@pytest.mark.parametrize("vocab_size", [TILE - 1, TILE, TILE + 1])
def test_vocabularies_about_the_edge_of_a_split(vocab_size):
    limits = [LIMITS[3], LIMITS[6], LIMITS[9]]
    check(random_logits(3, vocab_size, 3.0, vocab_size), limits)


@pytest.mark.parametrize("spread", [0.0, 1e-3, 30.0, 1e30])
def test_flat_and_steep_rows(spread):
    check(random_logits(len(LIMITS), 700, spread, 5), LIMITS)


def test_rows_of_more_candidates_than_the_list_holds_are_narrowed_once_more(monkeypatch):
    """Ten thousand logits within 0.01: two rounds leave most of them in one interval."""
    lengths = []
    finish = module.finish_kernel

    class Watching:
        def __getitem__(self, grid):
            def launch(*arguments, **options):
                lengths.extend(arguments[9][:, module.NUM_ROUNDS * module.NUM_PIVOTS :].tolist())
                finish[grid](*arguments, **options)

            return launch

    monkeypatch.setattr(module, "finish_kernel", Watching())
    logits = torch.rand(3, 10_000, generator=torch.Generator().manual_seed(1)) * 0.01
    check(logits, [(3000, 1.0, 0.0), (0, 0.4, 0.0), (700, 0.5, 0.0)])
    for first, second in lengths:
        assert first > module.LIST_SIZE >= second > 0


def test_ties_stay_at_top_k_and_go_by_id_at_top_p():
    limits = [(3, 1.0, 0.0), (0, 0.5, 0.0), (0, 0.9, 0.0), (4, 0.6, 0.0), (0, 0.75, 0.2)]
    logits = random_logits(5, 400, 1.0, 2).round()  # a few values, each many times
    check(logits, limits)
    check(torch.zeros(5, 1000), limits)
    check(torch.cat([torch.zeros(5, 100), -torch.zeros(5, 100)], dim=1), limits)
    across = torch.full((5, TILE + 200), -3.0)
    across[:, TILE - 10 : TILE + 10] = 2.0
    check(across, limits)


def test_impossible_tokens_and_single_possible_ones():
    logits = random_logits(len(LIMITS), 300, 2.0, 9)
    logits[:, 10:] = -torch.inf
    check(logits, LIMITS)
    logits[:, 1:] = -torch.inf
    check(logits, LIMITS)
    one_hot = torch.full((len(LIMITS), 300), -1000.0)
    one_hot[:, 123] = 1000.0
    check(one_hot, LIMITS)


def test_sets_that_outgrow_the_list_are_cut_in_the_row(monkeypatch):
    monkeypatch.setattr(module, "_LIST_SIZE", module.tl.constexpr(8))
    logits = random_logits(4, 500, 0.5, 4)
    logits[3] = logits[3].round()
    check(logits, [(40, 1.0, 0.0), (0, 0.8, 0.0), (300, 0.5, 0.0), (0, 0.6, 0.0)])


def test_a_real_vocabulary():
    check(random_logits(1, 49152, 2.5, 49152), [(20, 0.95, 0.0)])


def test_rows_beyond_the_count_and_rows_not_finite_are_left_alone():
    logits = random_logits(4, 100, 1.0)
    logits[0, 3], logits[1, 4] = torch.nan, torch.inf
    best, ids = maxima(logits, 3)
    assert best[3].isnan().all()
    assert ids[3].tolist() == [-7]
    assert best[:2].isinf().all()
    truncation = poisoned(4)
    asked = columns(
        [(5, 0.5, 0.0)] * 4,
        num_rows=3,
        is_greedy_N=torch.tensor([False, False, True, False]),
        temperature_N=torch.tensor([1.0, 1.0, 0.0, 1.0]),
    )
    find_thresholds(logits, asked, best_RS=best, truncation=truncation)
    assert truncation.threshold_R[:3].tolist() == [-torch.inf] * 3
    assert truncation.threshold_R[3].isnan()
    assert truncation.last_tie_R[3] == -77


def test_maxima_take_the_lowest_id_and_see_every_split():
    logits = random_logits(3, 2 * TILE + 5, 1.0).round()
    best, ids = maxima(logits)
    expected, expected_ids = find_split_maxima_reference(logits)
    assert torch.equal(best, expected)
    assert torch.equal(ids, expected_ids)


def test_a_threshold_does_not_depend_on_the_batch():
    logits = random_logits(3, 600, 2.0, 8)
    limits = [(0, 0.9, 0.0), (7, 0.5, 0.0), (0, 0.3, 0.01)]

    def thresholds(rows):
        temperature = torch.full((len(rows),), 0.7)
        asked = columns([limits[row] for row in rows], temperature_N=temperature)
        part = logits[rows].contiguous()
        truncation = poisoned(len(rows))
        find_thresholds(part, asked, best_RS=maxima(part)[0], truncation=truncation)
        return truncation.threshold_R

    together = thresholds([0, 1, 2])
    for row in range(3):
        assert torch.equal(thresholds([row])[0], together[row])


def test_too_little_memory_is_refused():
    logits = torch.zeros(2, 8)
    asked, best = columns([NONE, NONE]), torch.zeros(2, 1)
    with pytest.raises(ValueError, match="the truncation has 1 rows"):
        find_thresholds(logits, asked, best_RS=best, truncation=poisoned(1))


@pytest.mark.parametrize("spread", [0.5, 30.0])
def test_float32_weights_cut_within_a_millionth_of_the_edge(float32_weights, spread):
    limits = [limit for limit in LIMITS if limit[1] < 1 and not limit[0] and not limit[2]]
    rows = 3 * len(limits)
    logits, temperature = random_logits(rows, 700, spread, 3), torch.linspace(0.3, 2.0, rows)
    truncation = poisoned(rows)
    asked = columns(limits * 3, temperature_N=temperature)
    find_thresholds(logits, asked, best_RS=maxima(logits)[0], truncation=truncation)
    x = logits / temperature[:, None]
    is_tie = (x == truncation.threshold_R[:, None]) & (
        torch.arange(700) <= truncation.last_tie_R[:, None]
    )
    kept = (x > truncation.threshold_R[:, None]) | is_tie
    shares = torch.softmax(x.double(), dim=1)
    for row, (_, top_p, _) in enumerate(limits * 3):
        assert kept[row].any()
        mass, least = shares[row][kept[row]].sum(), shares[row][kept[row]].min()
        assert not (shares[row][~kept[row]] > least).any()
        assert mass >= top_p - 1e-6
        assert mass - least < top_p + 1e-6


def test_float32_weights_keep_what_the_specification_keeps_away_from_edges(float32_weights):
    check(
        random_logits(len(LIMITS), 1000, 3.0, 1000), LIMITS, torch.linspace(0.3, 2.5, len(LIMITS))
    )
    check(torch.zeros(5, 1000), [(3, 1.0, 0.0), (0, 0.5, 0.0), (0, 0.9, 0.0), NONE, (4, 0.6, 0.0)])


@pytest.mark.parametrize(
    ("capability", "is_fast"),
    [((8, 0), True), ((9, 0), True), ((10, 0), True), ((8, 6), False), ((8, 9), False),
     ((10, 3), False), ((12, 0), False)],
)  # fmt: skip
def test_float64_is_used_where_there_are_units_for_it(monkeypatch, capability, is_fast):
    device_limits.has_fast_float64.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert device_limits.has_fast_float64(torch.device("cuda", 0)) is is_fast
    device_limits.has_fast_float64.cache_clear()
