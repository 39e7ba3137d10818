"""Perplexity of formats: the windows, the sum, and the options."""

import math

import pytest
import torch

from kernels.cpu.linear import PackedParts
from kernels.cpu.operations import CpuOperations
from kernels.cpu.weights import pack_float, quantise_int4, quantise_int8
from scripts.quality.measurement import (
    FloatProducts,
    compare,
    cut_windows,
    negative_log_likelihoods,
    parse_options,
)
from tests.native_kernels import native_library_or_skip


def test_windows_are_spread_over_the_text_and_begin_as_the_tokenizer_begins():
    windows = cut_windows(range(100, 200), [7], context=11, num_windows=4)
    assert [window.tokens for window in windows] == [
        [7, *range(start, start + 10)] for start in (100, 125, 150, 175)
    ]
    assert {window.first_scored for window in windows} == {1}
    assert cut_windows(range(8), [], context=4, num_windows=2)[1].tokens == [4, 5, 6, 7]


@pytest.mark.parametrize(("context", "num_windows"), [(2, 1), (11, 11), (11, 0)])
def test_windows_that_the_text_does_not_hold_are_refused(context, num_windows):
    with pytest.raises(ValueError, match="use"):
        cut_windows(range(100), [7], context=context, num_windows=num_windows)


@pytest.mark.parametrize("prefix", [[], [3], [3, 4]])
def test_each_token_of_the_text_with_something_before_it_is_scored_once(prefix):
    # 300 tokens: logits come in several pieces
    vocabulary, text = 50, [(7 * at) % 50 for at in range(300)]
    [window] = cut_windows(text, prefix, context=300, num_windows=1)
    table_VV = torch.randn(vocabulary, vocabulary, generator=torch.Generator().manual_seed(0))

    def forward(tokens):
        return torch.nn.functional.one_hot(torch.tensor(tokens), vocabulary).float()

    found = negative_log_likelihoods([window], forward, lambda hidden: hidden @ table_VV)
    before = torch.tensor(window.tokens[:-1])
    expected = torch.nn.functional.cross_entropy(
        table_VV[before], torch.tensor(window.tokens[1:]), reduction="none"
    )[max(len(prefix), 1) - 1 :]
    assert len(found) == len(window.tokens) - max(len(prefix), 1)
    torch.testing.assert_close(found, expected.double(), rtol=1e-5, atol=1e-5)


def test_a_value_that_is_no_number_is_an_error():
    [window] = cut_windows(range(8), [], context=8, num_windows=1)
    with pytest.raises(ValueError, match="7 log-probabilities are not finite"):
        negative_log_likelihoods(
            [window],
            lambda tokens: torch.zeros(len(tokens), 1),
            lambda hidden: torch.full((len(hidden), 9), math.nan),
        )


def test_the_increase_is_that_of_the_perplexity():
    reference_N = torch.tensor([1.0, 2.0, 3.0, 2.0]).double()
    increase, standard_error = compare(reference_N + math.log(1.05), reference_N)
    assert increase == pytest.approx(0.05)
    assert standard_error == pytest.approx(0.0, abs=1e-12)
    uneven = reference_N + torch.tensor([0.1, -0.1, 0.1, -0.1])
    increase, standard_error = compare(uneven, reference_N)
    assert increase == pytest.approx(0.0) and standard_error > 0.05


def test_formats_are_the_daemons_own_options():
    options = parse_options(["--model", "smollm2", "--quantization", "int8"])
    assert (options.model, options.quantization) == ("smollm2", "int8")
    for words, complaint in [
        (["--model", "m", "--quantization", "int3"], "int3"),
        (["--model", "m", "--speed", "9"], "speed"),
        (["--dtype", "float32"], "--model"),
    ]:
        with pytest.raises(ValueError, match=complaint):
            parse_options(words)


@pytest.mark.parametrize("text", ["int8", "=--dtype float32", "int8:much=--quantization int8"])
def test_a_format_without_a_name_or_with_a_wrong_limit_is_one_line_and_exit_code_2(text, capsys):
    from scripts.measure_quality import main

    assert main(["--format", text]) == 2
    assert capsys.readouterr().err == (
        f"measure_quality: {text!r} is no format; write NAME[:PERCENT]=OPTIONS\n"
    )


def test_products_in_floats_are_those_of_the_numbers_that_packed_weights_stand_for():
    library = native_library_or_skip()
    generator = torch.Generator().manual_seed(0)
    x_TE, first_NE, second_NE = (torch.randn(n, 96, generator=generator) for n in (5, 17, 3))
    bias_N = torch.randn(17, generator=generator)
    products = FloatProducts(CpuOperations(library))
    floats = PackedParts((pack_float(library, first_NE, bias_N), pack_float(library, second_NE)))
    plain = torch.cat((x_TE @ first_NE.T + bias_N, x_TE @ second_NE.T), dim=1)
    torch.testing.assert_close(products(x_TE, floats), plain, rtol=1e-5, atol=1e-5)

    scales_N1 = first_NE.abs().amax(1, keepdim=True) / 127
    int8_NE = torch.round(first_NE / scales_N1) * scales_N1
    found = products(x_TE, quantise_int8(library, first_NE, bias_N))
    torch.testing.assert_close(found, x_TE @ int8_NE.T + bias_N, rtol=1e-4, atol=1e-4)

    groups = first_NE.view(17, 3, 32)
    minima = groups.amin(2, keepdim=True).half().float()
    scales = ((groups.amax(2, keepdim=True) - minima) / 15).half().float()
    int4_NE = (torch.round((groups - minima) / scales).clamp(0, 15) * scales + minima).view(17, 96)
    found = products(x_TE, quantise_int4(library, first_NE))
    torch.testing.assert_close(found, x_TE @ int4_NE.T, rtol=1e-4, atol=1e-4)
