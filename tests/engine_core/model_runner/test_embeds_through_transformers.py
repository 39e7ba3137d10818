"""prompt_embeds of models that run through transformers' code, against transformers' generate."""

import pytest
import torch
import transformers
from engine_loop import EngineLoop, make_scheduler
from runners import runner_config

from engine_core.model_runner.cpu.runner import CPUModelRunner
from engine_core.models.transformers.model import load_transformers_model
from engine_core.scheduler.records.prompt_content import EmbeddedRows
from kernels.torch.operations import TorchOperations
from protocol.sampling import SamplingParams
from tests.engine_core.models.test_transformers_fallback import FLATTENED, PER_REQUEST

CONFIGS = FLATTENED | PER_REQUEST
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize("name", ["opt", "gpt2", "gemma2", "falcon"])
def test_rows_in_chunks_beside_tokens_have_the_tokens_of_generate(name, tmp_path):
    """OPT's embeddings are narrower than its layers. Proves S020."""
    torch.manual_seed(0)
    reference = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()
    reference.save_pretrained(tmp_path)
    reference.generation_config.eos_token_id = None
    ops = TorchOperations()
    config = reference.config.to_dict()
    model = load_transformers_model(tmp_path, config, dtype=torch.float32, ops=ops)
    embedding = reference.get_input_embeddings()
    size = model.spec.hidden_size
    assert size == embedding.weight.shape[1]
    runner = CPUModelRunner(runner_config(model, ops, num_blocks=90, num_host_blocks=1))
    limits = {"max_num_seqs": 8, "max_model_len": 64, "max_num_batched_tokens": 9}
    loop = EngineLoop(
        make_scheduler(
            runner.config.layout, num_blocks=90, num_host_blocks=1, swap=False, **limits
        ),
        runner,
        depth=1,
    )
    tokens = torch.randint(3, 131, (14,), generator=torch.Generator().manual_seed(1))
    states = torch.randn(7, size) * embedding.weight.std().detach()
    loop.add("plain", tokens.tolist(), GREEDY)
    data = memoryview(states.numpy().tobytes())
    rows = (EmbeddedRows(4, 11, "float32", data),)
    loop.add("mixed", tokens.tolist(), GREEDY, prompt_embeds=rows)
    loop.finish()
    with torch.inference_mode():
        embeds = embedding(tokens[None]).clone()
        for kind in ("plain", "mixed"):
            if kind == "mixed":
                embeds[0, 4:11] = states
            expected = reference.generate(
                inputs_embeds=embeds,
                attention_mask=torch.ones(1, 14, dtype=torch.int64),
                max_new_tokens=8,
                do_sample=False,
            )
            assert loop.tokens[kind, 0] == expected[0].tolist()
