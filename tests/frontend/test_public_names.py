"""`import frontend` is light, and every public name is there."""

import pytest

import frontend


@pytest.mark.parametrize("name", frontend.__all__)
def test_every_public_name_loads(name):
    assert getattr(frontend, name).__name__ == name


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = frontend.nothing


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("AsyncLLMEngine", r"AsyncLLM; `await AsyncLLM.launch\(model"),
        ("AsyncEngineArgs", r"keyword arguments of `await AsyncLLM.launch\(model"),
        ("EngineArgs", "keyword arguments of LLM"),
        ("LLMEngine", "use LLM"),
    ],
)
def test_a_name_of_vllm_that_is_not_here_says_what_to_use(name, instead):
    with pytest.raises(ImportError, match=instead):
        exec(f"from frontend import {name}")


def test_vllms_parameters_can_be_imported_from_where_vllm_has_them():
    from frontend.sampling_params import (
        BeamSearchParams,
        GuidedDecodingParams,
        StructuredOutputsParams,
    )

    assert BeamSearchParams is frontend.BeamSearchParams
    assert GuidedDecodingParams is StructuredOutputsParams
    assert StructuredOutputsParams(json={}).json == {}


def test_a_client_that_is_given_a_model_says_how_to_start_an_engine():
    with pytest.raises(frontend.InvalidInput, match=r"not take model:.*AsyncLLM.launch\(model"):
        frontend.AsyncLLM(model="m")
