"""Processors of transformers, small, and what an engine says of their models. Not a test."""

import contextlib
import importlib
import json
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import tokenizers
import torch
from transformers import (
    Gemma3Processor,
    Gemma4Processor,
    Idefics3Processor,
    InternVLProcessor,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2_5_VLProcessor,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from frontend.multimodal.inputs import MultiModalProcessor
from frontend.multimodal.media import MediaSources
from frontend.text.tokenizer import Tokenizer
from protocol.multimodal import MultiModalInfo
from protocol.outputs import TokenizerInfo

WORDS = ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<start_of_image>"]
WORDS += ["<image_soft_token>", "<end_of_image>", "<image>", "<fake_token_around_image>"]
WORDS += ["<global-img>", "<end_of_utterance>", "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"]
WORDS += ["[IMG]", "[IMG_BREAK]", "[IMG_END]", "[AUDIO]", "[BEGIN_AUDIO]", "[INST]", "[/INST]"]
WORDS += ["<s>", "[TRANSCRIBE]", "<|audio_pad|>", "<|audio_start|>", "<|audio_end|>", "<asr_text>"]
WORDS += ["<img>", "<IMG_CONTEXT>", "</img>"]
WORDS += ["<|image|>", "<|image>", "<image|>", "<|video|>", "<|audio|>"]
WORDS += [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]


def backend() -> tokenizers.Tokenizer:
    """Bytes, a merge of two line feeds, and the special tokens of all families."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    vocabulary["ĊĊ"] = len(vocabulary)
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[("Ċ", "Ċ")]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(WORDS)
    return made


BACKEND = backend()


def id_of(token: str) -> int:
    return BACKEND.token_to_id(token)


def their_tokenizer(**names: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=backend(), extra_special_tokens=names)


def our_tokenizer(chat_template: str | None = None) -> Tokenizer:
    info = TokenizerInfo(fingerprint="t", tokenizer_json=None, chat_template=chat_template)
    return Tokenizer(backend(), info)


CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"image_token_id": id_of("<|image_pad|>")},
    "qwen3_vl": {"image_token_id": id_of("<|image_pad|>")},
    "gemma3": {
        "image_token_index": id_of("<image_soft_token>"),
        "boi_token_index": id_of("<start_of_image>"),
        "eoi_token_index": id_of("<end_of_image>"),
    },
    "gemma4": {
        "image_token_id": id_of("<|image|>"),
        "boi_token_id": id_of("<|image>"),
        "eoi_token_id": id_of("<image|>"),
    },
    "internvl": {"image_token_id": id_of("<IMG_CONTEXT>")},
    "idefics3": {"image_token_id": id_of("<image>")},
    "smolvlm": {"image_token_id": id_of("<image>")},
    "llava": {"image_token_index": id_of("<image>")},
    "mistral3": {
        "image_token_index": id_of("[IMG]"),
        "spatial_merge_size": 2,
        "vision_config": {"patch_size": 7},
    },
    "llava of Pixtral": {
        "image_token_index": id_of("[IMG]"),
        "vision_config": {"model_type": "pixtral", "patch_size": 7},
    },
    "qwen2_audio": {"audio_token_index": id_of("<|AUDIO|>")},
    "voxtral": {
        "audio_token_id": id_of("[AUDIO]"),
        "audio_config": {"hidden_size": 8, "intermediate_size": 32},
    },
    "qwen3_asr": {"audio_token_id": id_of("<|audio_pad|>")},
}


@dataclass
class Case:
    """A family: what transformers' processor is made of."""

    model_type: str
    processor: Any
    config: dict[str, Any] | None = None
    """Another one than the type's of `CONFIGS`."""

    def info(self, **config: Any) -> MultiModalInfo:
        part = getattr(self.processor, "image_processor", None)
        settings = {} if part is None else part.to_dict()
        outer = {
            name: value
            for name, value in vars(self.processor).items()
            if isinstance(value, int | str)
            and name.startswith(("image_seq", "patch", "vision", "num"))
        }
        feature = getattr(self.processor, "feature_extractor", None)
        if feature is not None:
            settings = feature.to_dict()
        return MultiModalInfo(
            model_type=self.model_type,
            config_json=json.dumps((self.config or CONFIGS[self.model_type]) | config).encode(),
            processor_json=json.dumps({**settings, **outer}, default=str).encode(),
            max_items={"image": 8, "audio": 8},
            max_input_bytes=2**30,
        )

    def ours(self, **limits: Any) -> MultiModalProcessor:
        return MultiModalProcessor(
            "tiny", self.info(), our_tokenizer(), max_model_len=100_000,
            **{"sources": MediaSources, **limits},
        )  # fmt: skip


def _processor(kind: type, parts: dict[str, Any], **options: Any) -> Any:
    """Without torchvision there are no video processors, which some insist on."""
    check = ProcessorMixin.check_argument_for_proper_class
    ProcessorMixin.check_argument_for_proper_class = lambda *_: None
    try:
        return kind(**parts, **options)
    finally:
        ProcessorMixin.check_argument_for_proper_class = check


def qwen2_5_vl(**settings: Any) -> Case:
    parts = {"image_processor": Qwen2VLImageProcessorPil(**settings), "video_processor": None}
    tokenizer = their_tokenizer(image_token="<|image_pad|>", video_token="<|audio_eos|>")
    return Case("qwen2_5_vl", _processor(Qwen2_5_VLProcessor, {**parts, "tokenizer": tokenizer}))


def qwen3_vl() -> Case:
    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    size = {"shortest_edge": 64 * 64, "longest_edge": 512 * 512}
    return replace(qwen2_5_vl(patch_size=16, size=size, **half), model_type="qwen3_vl")


def gemma3(**settings: Any) -> Case:
    names = {
        "image_token": "<image_soft_token>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
    }
    size = settings.pop("size", {"height": 56, "width": 56})
    parts = {"image_processor": Gemma3ImageProcessorPil(size=size), **settings}
    parts["tokenizer"] = their_tokenizer(**names)
    return Case("gemma3", _processor(Gemma3Processor, parts, image_seq_length=16))


class MergedPatches(Gemma4ImageProcessorPil):
    """Of Gemma 4 12B: transformers has it with torchvision alone."""

    def _preprocess(self, images: Any, **options: Any) -> Any:
        with _without_torchvision():
            own = importlib.import_module(
                "transformers.models.gemma4_unified.image_processing_gemma4_unified"
            )
        given = super()._preprocess(images, **options)
        most, parts = self.max_soft_tokens, []
        numbers = given["num_soft_tokens_per_image"]
        tensors = [torch.as_tensor(given[name]) for name in ("pixel_values", "image_position_ids")]
        for patches, places, number in zip(*tensors, numbers, strict=True):
            count = int(number) * self.pooling_kernel_size**2
            merged = own.patches_merge(patches[None, :count], places[None, :count], int(number))
            parts.append(own.pad_along_first_dim(merged[0][0], merged[1][0], most))
        for name, found in zip(
            ("pixel_values", "image_position_ids"), zip(*parts, strict=True), strict=True
        ):
            given[name] = torch.stack(found).numpy()
        return given


@contextlib.contextmanager
def _without_torchvision() -> Iterator[None]:
    names = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")
    made = {name: types.ModuleType(name) for name in names}
    made[names[-1]].functional = types.SimpleNamespace(InterpolationMode=None)  # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules, made):
        yield


def gemma4(kind: type = Gemma4ImageProcessorPil, model_type: str = "gemma4") -> Case:
    names = {"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>"}
    names |= {"audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>"}
    names["pad_token"] = "<|audio_eos|>"
    images = kind(patch_size=4, max_soft_tokens=70)
    parts = {"image_processor": images, "feature_extractor": None, "video_processor": None}
    made = _processor(Gemma4Processor, parts | {"tokenizer": their_tokenizer(**names)})
    return Case(model_type, made, CONFIGS["gemma4"])


def internvl(**settings: Any) -> Case:
    names = {"start_image_token": "<img>", "end_image_token": "</img>"}
    names |= {"context_image_token": "<IMG_CONTEXT>", "video_token": "<|video|>"}
    images = GotOcr2ImageProcessorPil(size={"height": 28, "width": 28}, **settings)
    parts = {"image_processor": images, "video_processor": None}
    parts["tokenizer"] = their_tokenizer(**names)
    return Case("internvl", _processor(InternVLProcessor, parts, image_seq_length=4))


def idefics3(**settings: Any) -> Case:
    sizes = {"size": {"longest_edge": 96}, "max_image_size": {"longest_edge": 32}}
    parts = {"image_processor": Idefics3ImageProcessorPil(**{**sizes, **settings})}
    parts["tokenizer"] = their_tokenizer(image_token="<image>")
    return Case("idefics3", _processor(Idefics3Processor, parts, image_seq_len=4))


def mistral3(merge: int = 2) -> Case:
    from transformers.models.pixtral import image_processing_pil_pixtral as images

    # the module of its processor takes a function of this name from one that needs torchvision
    sys.modules.setdefault("transformers.models.pixtral.image_processing_pixtral", images)
    from transformers.models.pixtral.processing_pixtral import PixtralProcessor

    image_processor = images.PixtralImageProcessorPil(size={"longest_edge": 96})
    parts = {"image_processor": image_processor, "tokenizer": their_tokenizer()}
    made = _processor(PixtralProcessor, parts, patch_size=7, spatial_merge_size=merge)
    return Case("mistral3", made)


def llava_of_pixtral() -> Case:
    return replace(mistral3(1), model_type="llava", config=CONFIGS["llava of Pixtral"])


def llava(kind: type = CLIPImageProcessorPil, **settings: Any) -> Case:
    parts = {"image_processor": kind(**settings)}
    parts["tokenizer"] = their_tokenizer(image_token="<image>")
    options = {"patch_size": 14, "vision_feature_select_strategy": "default"}
    return Case(
        "llava", _processor(LlavaProcessor, parts, num_additional_image_tokens=1, **options)
    )
