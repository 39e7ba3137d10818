"""Real daemons for tests: tiny random models, and SmolLM2-135M-Instruct where a test needs it."""

import functools
import sys
from pathlib import Path
from unittest import mock

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory):
    """A folder with a random Llama of 97 tokens and no tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("tiny-llama")
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=96,
        bos_token_id=0,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def smollm2():
    """The path of SmolLM2-135M-Instruct's GGUF file, fetched if it is not here yet."""
    from engine_core.model_files import open_model_files

    return open_model_files("smollm2-135m-instruct", report=print).path


def reader_of_models():
    """gguf's reader for those who need a file's tensors and settings: the elements of long arrays,
    which are of tokenizers, are zeros. gguf looks at hundreds of thousands of them one by one."""
    import gguf
    import numpy as np

    class ModelReader(gguf.GGUFReader):
        def _get_field_parts(self, orig_offs, raw_type):
            kind, count = self._get(orig_offs, np.uint32)[0], self._get(orig_offs + 4, np.uint64)[0]
            if raw_type != gguf.GGUFValueType.ARRAY or count < 10_000:
                return super()._get_field_parts(orig_offs, raw_type)
            size = 12
            if kind == gguf.GGUFValueType.STRING:
                data = memoryview(self.data)
                for _ in range(count):
                    at = orig_offs + size
                    size += 8 + int.from_bytes(data[at : at + 8], "little")
            else:
                size += int(count) * np.dtype(self.gguf_scalar_to_np[kind]).itemsize
            types = [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT8]
            return size, [np.zeros(1, np.uint8)], [0] * int(count), types

    return ModelReader


@pytest.fixture(scope="session")
def logits_by_transformers():
    """Call it with a GGUF file for a function of a prompt and further tokens, tuples of ids: the
    logits of the next token after the prompt and after each of these but the last, in fp32."""
    import gguf
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    # gguf reads the file again, and makes the table of tensors' names for every module, each time:
    # here once, in memory
    table = gguf.get_tensor_name_map
    once = {"GGUFReader": reader_of_models(), "get_tensor_name_map": table}
    once = {name: functools.cache(made) for name, made in once.items()}

    def of_file(path):
        in_memory = mock.patch.object(np, "memmap", lambda path, **_: np.fromfile(path, np.uint8))
        with mock.patch.multiple(gguf, **once), in_memory:
            model = AutoModelForCausalLM.from_pretrained(
                path.parent, gguf_file=path.name, dtype=torch.float32
            ).eval()

        @functools.cache
        def next_logits(prompt, tokens):
            with torch.inference_mode():
                ids = torch.tensor([prompt + tokens])
                return model(ids, logits_to_keep=len(tokens) + 1).logits[0, :-1]

        return next_logits

    return of_file
