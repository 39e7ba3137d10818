"""Two runners' answers to one plan, compared entry by entry; and requests that ask for anything."""

import numpy as np

from protocol.sampling import SamplerChain, SamplingParams

V = 131
CHAINS = (
    SamplerChain(
        dry_multiplier=2.0, dry_allowed_length=1, dry_breakers=(((3, 9), ()), ((8,), (4,)))
    ),
    SamplerChain(xtc_probability=0.5, xtc_threshold=0.01, typical_p=0.9),
    SamplerChain(top_n_sigma=2.0, dynatemp_range=0.5, repeat_last_n=9),
    SamplerChain(samplers=("temperature", "top_p", "penalties", "top_k"), repeat_last_n=-1),
    SamplerChain(),
)


def assert_same_answer(plan, found, expected, needs_sampling):
    """Tokens, failures, reports. Log-probabilities may differ in rounding.

    Args:
        needs_sampling: by name; what stands at others is not looked at.
    """
    assert list(found.req_ids) == list(expected.req_ids) == list(plan.batch.req_ids)
    assert found.failures == expected.failures
    assert isinstance(found.sampled_token_ids, list) == isinstance(expected.sampled_token_ids, list)
    for name, mine, theirs in zip(
        found.req_ids, found.sampled_token_ids, expected.sampled_token_ids, strict=True
    ):
        if needs_sampling[name]:
            assert mine == theirs, name
    assert (found.logprobs or {}).keys() == (expected.logprobs or {}).keys()
    for name, report in (found.logprobs or {}).items():
        other = expected.logprobs[name]
        assert (report.num_positions, report.width) == (other.num_positions, other.width)
        assert report.ranks == other.ranks
        values = [np.frombuffer(each.logprobs, "<f4") for each in (report, other)]
        np.testing.assert_allclose(*values, rtol=1e-4, atol=1e-4)
        ids = [np.frombuffer(each.token_ids, "<i4") for each in (report, other)]
        # equals may swap places
        apart = np.abs(np.diff(values[1][1:], append=-1e9)) > 1e-3
        apart &= np.abs(np.diff(values[1][1:], prepend=1e9)) > 1e-3
        assert (ids[0][1:] == ids[1][1:])[apart].all()
        assert ids[0][0] == ids[1][0]


def draw_params(draw, *, max_tokens=12, may_fail=True):
    """Sampling parameters of every kind; a seed is always given."""
    fields = {"max_tokens": max_tokens, "seed": draw.getrandbits(64)}
    if draw.random() < 0.3:
        fields["temperature"] = 0.0
    elif draw.random() < 0.5:
        fields["temperature"] = draw.choice([0.3, 0.8, 1.7])
    if draw.random() < 0.4:
        fields |= draw.choice(
            [
                {"top_k": 1},
                {"top_k": 9},
                {"top_p": 0.6},
                {"min_p": 0.1},
                {"top_k": 20, "top_p": 0.9},
            ]
        )
    if draw.random() < 0.3:
        fields |= {"repetition_penalty": draw.choice([0.7, 1.4]), "presence_penalty": 0.5}
    if draw.random() < 0.2:
        fields["frequency_penalty"] = 0.75
    if draw.random() < 0.2:
        fields["logit_bias"] = {draw.randrange(V): draw.uniform(-9, 9) for _ in range(5)}
    if draw.random() < 0.2:
        fields["min_tokens"] = draw.randint(1, max_tokens)
        fields["stop_token_ids"] = tuple(draw.sample(range(V), 5))
    if draw.random() < 0.2:
        fields["allowed_token_ids"] = tuple(draw.sample(range(V), 40))
    elif may_fail and draw.random() < 0.05:
        fields |= {"allowed_token_ids": (7,), "min_tokens": 2}
    if draw.random() < 0.3:
        fields["logprobs"] = draw.choice([0, 1, 5, 128, -1])
    if fields["seed"] % 4 == 0:
        fields["chain"] = CHAINS[fields["seed"] // 4 % len(CHAINS)]
    return SamplingParams(**fields)
