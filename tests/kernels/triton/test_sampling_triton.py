"""The device's tokens are those of the torch backend, row for row, in any mix and any batch."""

import pytest
import torch

from kernels.interface.sampling import SamplingLimits
from kernels.torch import sampling as torch_sampling
from kernels.triton.sampling.row_maxima import TILE
from kernels.triton.sampling.sample import SamplingMemory, sample, sample_reference
from tests.gpu.device import on_gpu
from tests.kernels.triton.columns import columns_of

LIMITS = [
    (0, 1.0, 0.0),
    (1, 1.0, 0.0),
    (20, 0.95, 0.0),
    (0, 0.8, 0.0),
    (0, 1.0, 0.1),
    (40, 1.0, 0.02),
]


class Batch:
    """Parameters of some rows, mixed; every third is greedy."""

    def __init__(self, rows, *, limits=True, seed=0):
        generator = torch.Generator().manual_seed(seed)
        chosen = [LIMITS[row % len(LIMITS)] if limits else LIMITS[0] for row in range(rows)]
        top_k, top_p, min_p = zip(*chosen, strict=True)
        self.rows = {
            "seeds_R": torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator),
            "positions_R": torch.randint(0, 2**34, (rows,), generator=generator),
            "is_greedy_R": torch.arange(rows) % 3 == 2,
            "temperature_R": torch.rand(rows, generator=generator) * 2 + 0.1,
            "top_k_R": torch.tensor(top_k),
            "top_p_R": torch.tensor(top_p, dtype=torch.float32),
            "min_p_R": torch.tensor(min_p, dtype=torch.float32),
        }
        self.rows["temperature_R"][self.rows["is_greedy_R"]] = 0.0

    def part(self, indices):
        part = Batch.__new__(Batch)
        part.rows = {name: tensor[indices] for name, tensor in self.rows.items()}
        return part


def draw(logits, batch, *, num_rows=None, any_truncated=True):
    rows, vocab_size = logits.shape
    memory = SamplingMemory.allocate(rows + 1, vocab_size, logits.device)
    for tensor in (memory.best_RS, memory.noisy_RS, memory.truncation.threshold_R):
        tensor.fill_(torch.nan)
    out = torch.full((rows,), -7)
    best = torch.full((rows,), torch.nan)
    before = logits.clone()
    values = {name.replace("_R", "_N"): tensor for name, tensor in batch.rows.items()}
    sample(
        logits,
        columns_of(rows, num_rows=num_rows, **values),
        memory=memory,
        out_R=out,
        best_logit_R=best,
        any_truncated=any_truncated,
    )
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())
    return out, best


def on_cpu(reference, logits, **rows):
    """The torch backend's tokens, on the logits' device."""
    with torch.device("cpu"):
        tokens = reference(logits.cpu(), **{name: tensor.cpu() for name, tensor in rows.items()})
    return tokens.to(logits.device)


def expected(logits, batch):
    rows = dict(batch.rows)
    rows["top_k_R"] = torch.where(rows["top_k_R"] < logits.shape[1], rows["top_k_R"], 0)
    return on_cpu(sample_reference, logits, **rows)


def random_logits(rows, vocab_size, spread=3.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab_size, generator=generator) * spread


@pytest.mark.parametrize("vocab_size", [1, 2, 63, 257, 1000, TILE - 1, TILE, TILE + 1])
def test_mixed_rows_give_the_tokens_of_the_torch_backend(vocab_size):
    logits, batch = random_logits(9, vocab_size, seed=vocab_size), Batch(9)
    out, best = draw(logits, batch)
    assert torch.equal(out, expected(logits, batch))
    assert torch.equal(best, logits.amax(dim=1))


@pytest.mark.parametrize("vocab_size", [49152, on_gpu(151936)])
def test_real_vocabularies_give_the_tokens_of_the_torch_backend(vocab_size):
    logits, batch = random_logits(2, vocab_size, 1.0), Batch(2, limits=False)
    out, _ = draw(logits, batch, any_truncated=False)
    assert torch.equal(out, expected(logits, batch))


def test_many_draws_give_the_tokens_of_sample_from_all():
    rows = 80
    logits = random_logits(1, 300, 1.0).expand(rows, -1)
    batch = Batch(rows, limits=False)
    batch.rows["is_greedy_R"][:] = False
    batch.rows["temperature_R"][:] = 1.0
    out, _ = draw(logits, batch, any_truncated=False)
    rows = {name: batch.rows[name] for name in ("seeds_R", "positions_R")}
    assert torch.equal(out, on_cpu(torch_sampling.sample_from_all, logits, **rows))
    assert len(set(out.tolist())) > 30


def test_truncated_rows_give_the_tokens_of_sample_truncated():
    rows = 24
    logits = random_logits(rows, 500, 2.0)
    batch = Batch(rows)
    batch.rows["is_greedy_R"][:] = False
    batch.rows["temperature_R"][:] = 1.0
    out, _ = draw(logits, batch)

    def truncated(logits, *, seeds_R, positions_R, top_k_R, top_p_R, min_p_R):
        limits = SamplingLimits(top_k_R=top_k_R, top_p_R=top_p_R, min_p_R=min_p_R)
        return torch_sampling.sample_truncated(logits, seeds_R, positions_R, limits)

    del batch.rows["is_greedy_R"], batch.rows["temperature_R"]
    assert torch.equal(out, on_cpu(truncated, logits, **batch.rows))


@pytest.mark.parametrize("kind", ["ties", "flat", "impossible", "huge", "one hot"])
def test_adversarial_rows(kind):
    logits, batch = random_logits(9, 300, 2.0), Batch(9)
    if kind == "ties":
        logits = logits.round()
    elif kind == "flat":
        logits = torch.zeros(9, TILE + 300)
    elif kind == "impossible":
        logits[:, ::2] = -torch.inf
        logits[5:, 2:] = -torch.inf
    elif kind == "huge":
        logits *= 1e37
        batch.rows["temperature_R"].clamp_(min=0.9)
    else:
        logits = torch.full((9, 300), -1e4)
        logits[:, 123] = 1e4
    out, _ = draw(logits, batch)
    assert torch.equal(out, expected(logits, batch))


def test_greedy_rows_take_the_lowest_id_of_a_tie_across_splits():
    logits = torch.full((3, 2 * TILE + 9), -1.0)
    logits[:, [70, TILE + 1, 2 * TILE + 8]] = 5.0
    batch = Batch(3)
    batch.rows["is_greedy_R"][:] = True
    assert draw(logits, batch)[0].tolist() == [70] * 3


def test_a_row_gives_the_same_token_alone_and_in_a_crowd():
    logits, batch = random_logits(8, 700), Batch(8)
    together, _ = draw(logits, batch)
    for row in range(8):
        alone, _ = draw(logits[row : row + 1], batch.part([row]))
        assert alone[0] == together[row]
    shuffled = torch.randperm(8, generator=torch.Generator().manual_seed(1))
    again, _ = draw(logits[shuffled], batch.part(shuffled))
    assert torch.equal(again, together[shuffled])


def test_rows_beyond_the_real_count_stay_as_they_were():
    logits, batch = random_logits(5, 90), Batch(5)
    out, best = draw(logits, batch, num_rows=3)
    assert torch.equal(out[:3], expected(logits, batch)[:3])
    assert out[3:].tolist() == [-7, -7]
    assert best[3:].isnan().all()
    assert draw(logits, batch, num_rows=0)[0].tolist() == [-7] * 5


def test_failed_rows_say_why_and_harm_nobody():
    logits, batch = random_logits(6, 90), Batch(6)
    logits[0, 5], logits[1, 6], logits[2, 7] = torch.nan, torch.inf, torch.nan
    logits[3] = -torch.inf
    out, best = draw(logits, batch)
    assert out[:4].tolist() == [0, 0, 0, 0]
    assert best[:4].tolist() == [torch.inf] * 3 + [-torch.inf]
    assert torch.equal(out[4:], expected(logits[4:], batch.part([4, 5])))


@pytest.mark.parametrize("limits", [True, False])
def test_rows_whose_temperature_makes_logits_infinite_fail_alone(limits):
    logits, batch = random_logits(6, 90), Batch(6, limits=limits)
    good = [2, 4, 5]
    same = expected(logits[good], batch.part(good))
    logits[0, 5], logits[1] = 1e35, 1e35
    logits[3] = -1e35
    batch.rows["temperature_R"][[0, 1, 3]] = 1e-5
    out, best = draw(logits, batch, any_truncated=limits)
    assert out[[0, 1, 3]].tolist() == [0] * 3
    assert best[[0, 1, 3]].tolist() == [torch.inf] * 3
    assert torch.equal(out[good], same)
    assert best[good].isfinite().all()


def test_logits_may_be_a_part_of_wider_rows():
    wide, batch = random_logits(4, 333), Batch(4)
    assert torch.equal(draw(wide[:, :300], batch)[0], expected(wide[:, :300].contiguous(), batch))


def test_wrong_arguments_are_named():
    logits, batch = random_logits(2, 9), Batch(2)
    with pytest.raises(ValueError, match="logits is"):
        draw(logits.double(), batch)
    with pytest.raises(ValueError, match="state_row is"):
        sample(logits, columns_of(3), memory=None, out_R=None, best_logit_R=None)
    columns = columns_of(2, seeds_N=torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="seeds_N is"):
        columns.check(2, logits.device)
