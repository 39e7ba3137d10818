"""Options of speculative decoding: defaults, and what is refused."""

import pytest

from engine_core.errors import ConfigurationError
from engine_core.options.speculation import SpeculationOptions
from engine_core.speculation.ngram import NgramProposer
from engine_core.speculation.suffix import SuffixProposer


def test_without_an_option_there_is_no_proposer_and_no_draft():
    options = SpeculationOptions()
    options.check()
    assert options.max_drafts == 0
    assert options.make_proposer() is None


def test_each_name_makes_its_proposer():
    assert isinstance(SpeculationOptions(speculative="suffix").make_proposer(), SuffixProposer)
    options = SpeculationOptions(speculative="ngram", prompt_lookup_max=2)
    options.check()
    proposer = options.make_proposer()
    assert isinstance(proposer, NgramProposer)
    assert (proposer.smallest, proposer.largest, options.max_drafts) == (2, 2, 8)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"num_speculative_tokens": 3}, "no effect without --speculative"),
        ({"speculative": "suffix", "prompt_lookup_min": 2}, "no effect with --speculative suffix"),
        (
            {"speculative": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 3},
            "--prompt-lookup-min is 4 and --prompt-lookup-max 3",
        ),
        ({"speculative": "eagle"}, "eagle needs an EAGLE-3 head; name one with --draft-model"),
        ({"speculative": "draft"}, "name one with --draft-model"),
        ({"draft_model": "m"}, "--draft-model has no effect without --speculative"),
        (
            {"speculative": "mtp", "draft_model": "m", "draft_quantization": "int8"},
            "--draft-model has no effect with --speculative mtp",
        ),
        (
            {"speculative": "ngram", "draft_quantization": "int4"},
            "--draft-quantization has no effect with --speculative ngram",
        ),
    ],
)
def test_what_has_no_effect_is_refused_by_name(given, why):
    with pytest.raises(ConfigurationError, match=why):
        SpeculationOptions(**given).check()
