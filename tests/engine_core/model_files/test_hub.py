"""Which files of a hub's repository are the model, by its name as people type it."""

import pytest

from engine_core.model_files.errors import ModelNotFound, UnsupportedModelFile
from engine_core.model_files.hub import HubName, choose_files, choose_mmproj, parse_hub_name

DESCRIBED = ["config.json", "tokenizer.json", "README.md"]
BARTOWSKI = [
    "Llama-3.2-1B-Instruct-Q4_K_M.gguf", "Llama-3.2-1B-Instruct-Q2_K.gguf",
    "Llama-3.2-1B-Instruct-Q2_K_L.gguf", "Llama-3.2-1B-Instruct-IQ4_XS.gguf",
    "Llama-3.2-1B-Instruct-f16.gguf", "Llama-3.2-1B-Instruct.imatrix", "README.md",
]  # fmt: skip
UNSLOTH = [
    "mmproj-F16.gguf", "Qwen3-VL-Q8_0.gguf", "Qwen3-VL-UD-Q4_K_XL.gguf", "imatrix_unsloth.gguf",
    "BF16/Qwen3-VL-BF16-00002-of-00002.gguf", "BF16/Qwen3-VL-BF16-00001-of-00002.gguf",
]  # fmt: skip


@pytest.mark.parametrize(
    ("typed", "means"),
    [
        ("org/name", HubName("org/name")),
        ("org/name:Q4_K_M", HubName("org/name", tag="Q4_K_M")),
        ("org/name:latest", HubName("org/name")),
        ("hf.co/org/name.v2:Q8_0", HubName("org/name.v2", tag="Q8_0")),
        ("https://huggingface.co/org/name", HubName("org/name")),
        ("hf://org/name", HubName("org/name")),
        ("org/name:file.Q4_K_M.gguf", HubName("org/name", tag="file.Q4_K_M.gguf")),
        ("org/name@refs/pr/3", HubName("org/name", revision="refs/pr/3")),
        ("org/name@v1:Q8_0", HubName("org/name", revision="v1", tag="Q8_0")),
        ("https://huggingface.co/org/name/tree/main", HubName("org/name")),
        ("https://huggingface.co/org/name/blob/main/config.json", HubName("org/name")),
        (
            "https://huggingface.co/org/name/resolve/main/q8/m-Q8_0.gguf?download=true",
            HubName("org/name", tag="q8/m-Q8_0.gguf"),
        ),
        (
            "hf.co/org/name/blob/refs%2Fpr%2F3/m.gguf",
            HubName("org/name", revision="refs/pr/3", tag="m.gguf"),
        ),
        ("https://huggingface.co/datasets/org/name", None),
        ("models/file.gguf", None),
        ("a/b/c", None),
        ("./org/name", None),
        ("name", None),
        ("https://example.com/org/name", None),
    ],
)
def test_a_name_of_the_hub_is_known_however_it_is_typed(typed, means):
    assert parse_hub_name(typed) == means


@pytest.mark.parametrize(
    ("names", "tag", "chosen"),
    [
        (BARTOWSKI, None, ["Llama-3.2-1B-Instruct-Q4_K_M.gguf"]),
        (BARTOWSKI, "q2_k", ["Llama-3.2-1B-Instruct-Q2_K.gguf"]),
        (BARTOWSKI, "F16", ["Llama-3.2-1B-Instruct-f16.gguf"]),
        (
            BARTOWSKI,
            "Llama-3.2-1B-Instruct-IQ4_XS.gguf",
            ["Llama-3.2-1B-Instruct-IQ4_XS.gguf"],
        ),
        (UNSLOTH, "UD-Q4_K_XL", ["Qwen3-VL-UD-Q4_K_XL.gguf"]),
        (UNSLOTH, "Q4_K_XL", ["Qwen3-VL-UD-Q4_K_XL.gguf"]),
        (
            UNSLOTH,
            "BF16",
            [f"BF16/Qwen3-VL-BF16-0000{i}-of-00002.gguf" for i in (1, 2)],
        ),
        (["only-Q5_1.gguf", "mmproj-only.gguf"], None, ["only-Q5_1.gguf"]),
        (["m-Q8_0-00001-of-00002.gguf", "m-Q8_0.gguf"], "Q8_0", ["m-Q8_0.gguf"]),
        (["a.Q4_K_M-imat.gguf", "a.Q8_0-imat.gguf"], None, ["a.Q4_K_M-imat.gguf"]),
        ([*DESCRIBED, "model.safetensors", "m-Q8_0.gguf"], "Q8_0", ["m-Q8_0.gguf"]),
    ],
)
def test_a_tag_names_a_gguf_file_with_all_its_parts(names, tag, chosen):
    assert list(choose_files(HubName("org/name", tag=tag), names)) == chosen


@pytest.mark.parametrize(
    ("names", "tag", "words"),
    [
        (UNSLOTH, None, r"no GGUF files of type Q4_K_M; name one of .*BF16.*as org/name:"),
        (BARTOWSKI, "Q3_K", r"no GGUF files of type Q3_K; name one of .*Q4_K_M"),
        (["a-Q8_0.gguf", "b-Q8_0.gguf"], "Q8_0", r"several .* name one of a-Q8_0, b-Q8_0"),
        ([*DESCRIBED, "model.safetensors"], "Q8_0", r"no GGUF file; name it without :Q8_0"),
        (DESCRIBED, None, "no weights"),
    ],
)
def test_where_no_file_is_meant_the_choices_are_said(names, tag, words):
    with pytest.raises(ModelNotFound, match=words):
        choose_files(HubName("org/name", tag=tag), names)


@pytest.mark.parametrize(
    ("more", "dropped"),
    [
        (["model.safetensors"], ["consolidated.safetensors", "original/model.safetensors"]),
        (
            ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
             "model.safetensors.index.json"],
            ["consolidated-00001-of-00001.safetensors", "consolidated.safetensors",
             "model.fp16-00001-of-00001.safetensors", "metal/model.safetensors"],
        ),
        (["model.safetensors", "2_Dense/model.safetensors", "2_Dense/config.json"], []),
        (["model.safetensors"], ["pytorch_model.bin", "model.fp16.safetensors", "m-Q8_0.gguf"]),
        (["consolidated.safetensors"], []),
        (
            ["model.safetensors", "2_Dense/pytorch_model.bin", "sparse_linear.pt"],
            ["pytorch_model.bin", "training_args.pt"],
        ),
    ],
)  # fmt: skip
def test_weights_are_fetched_once(more, dropped):
    chosen = choose_files(HubName("org/name"), [*DESCRIBED, *more, *dropped])
    assert set(chosen) == {"config.json", "tokenizer.json", *more}


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (BARTOWSKI, None),
        (["mmproj-BF16.gguf", "mmproj-F16.gguf", "mmproj-F32.gguf"], "mmproj-F16.gguf"),
        (["x/mmproj-m-Q8_0.gguf", "mmproj-m-bf16.gguf"], "mmproj-m-bf16.gguf"),
        (["b/m.gguf", "m.mmproj.gguf"], "m.mmproj.gguf"),
    ],
)
def test_of_a_texts_encoders_the_one_in_16_bits_is_chosen(names, chosen):
    assert choose_mmproj(names) == chosen


def test_pickles_are_refused_before_they_are_fetched():
    with pytest.raises(UnsupportedModelFile, match=r"pytorch_model.bin only.*refs/pr/.*save_pre"):
        choose_files(HubName("facebook/opt-125m"), [*DESCRIBED, "pytorch_model.bin", "tf.h5"])


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["adapter_config.json", "adapter_model.safetensors"], "an adapter; serve its base model"),
        (["params.json", "consolidated.safetensors"], "no model in Hugging Face's layout"),
    ],
)
def test_weights_that_describe_no_model_are_refused_before_they_are_fetched(names, words):
    with pytest.raises(UnsupportedModelFile, match=words):
        choose_files(HubName("org/name"), names)
