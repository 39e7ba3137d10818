"""Models without code of ours on the device's kernels, interpreted, against transformers' generate:
chunks, cached prefixes, samples, given embeddings, with a step in flight."""

import pytest
import torch
import transformers
from engine_loop import EngineLoop, make_scheduler
from fake_device import TRITON_DEVICE, make_queue, make_steps
from runners import runner_config, spoiled

from engine_core.model_runner.gpu import GPUModelRunner
from engine_core.models.transformers.attention import FlattenedModel
from engine_core.models.transformers.model import load_transformers_model
from engine_core.scheduler.records.prompt_content import EmbeddedRows
from kernels.triton.operations import TritonOperations
from protocol.sampling import SamplingParams
from tests.engine_core.models.test_transformers_fallback import FLATTENED, PER_REQUEST

pytestmark = pytest.mark.slow

CONFIGS = FLATTENED | PER_REQUEST
GREEDY = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
SIZES = {"num_blocks": 40, "num_host_blocks": 1}
LIMITS = {"max_num_seqs": 4, "max_model_len": 32, "max_num_batched_tokens": 9}


@torch.inference_mode()
def generated(reference, tokens, states=None):
    embeds = reference.get_input_embeddings()(tokens[None]).clone()
    if states is not None:
        embeds[0, 4:11] = states
    mask = torch.ones(1, len(tokens), dtype=torch.int64)
    options = {"max_new_tokens": 3, "do_sample": False, "attention_mask": mask}
    return reference.generate(inputs_embeds=embeds, **options)[0].tolist()


@pytest.mark.parametrize("name", ["opt", "falcon"])
def test_the_devices_kernels_give_the_tokens_of_generate(name, tmp_path):
    torch.manual_seed(0)
    config = CONFIGS[name]()
    config.num_hidden_layers = 1
    reference = transformers.AutoModelForCausalLM.from_config(config).eval()
    reference.save_pretrained(tmp_path)
    reference.generation_config.eos_token_id = None
    ops = TritonOperations(TRITON_DEVICE)
    model = load_transformers_model(tmp_path, config.to_dict(), dtype=torch.float32, ops=ops)
    assert isinstance(model, FlattenedModel) is (name in FLATTENED)
    runner = spoiled(
        GPUModelRunner(
            runner_config(model, ops, **SIZES | LIMITS),
            steps=make_steps(),
            queue=make_queue(),
            use_graphs=False,
        )
    )
    scheduler = make_scheduler(runner.config.layout, swap=False, depth=2, **SIZES, **LIMITS)
    loop = EngineLoop(scheduler, runner, depth=2)
    tokens = torch.randint(3, 131, (14,), generator=torch.Generator().manual_seed(1))
    states = torch.randn(7, model.spec.hidden_size)
    states *= reference.get_input_embeddings().weight.std().detach()
    rows = (EmbeddedRows(4, 11, "float32", memoryview(states.numpy().tobytes())),)
    loop.add("plain", tokens.tolist(), GREEDY, num_sequences=2)
    loop.add("mixed", tokens.tolist(), GREEDY, prompt_embeds=rows)
    loop.finish()
    loop.add("again", tokens.tolist(), GREEDY)
    loop.finish()
    assert loop.num_ahead and loop.num_cached_tokens["again"] == 12
    plain = generated(reference, tokens)
    assert [loop.tokens[each] for each in (("plain", 0), ("plain", 1), ("again", 0))] == [plain] * 3
    assert loop.tokens["mixed", 0] == generated(reference, tokens, states)
