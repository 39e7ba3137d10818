"""Encoders from their folder through start-up, scheduler and runner, against transformers."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
import transformers
from engine_loop import EngineLoop

from engine_core.devices import traits_of
from engine_core.errors import ConfigurationError, StartupError
from engine_core.kv_cache import KVCacheManager
from engine_core.model_files import BrokenModelFile, ModelNotFound
from engine_core.options.adapters import AdapterOptions
from engine_core.options.checks import check_layers
from engine_core.options.engine import EngineOptions
from engine_core.options.pooling import PoolingOptions
from engine_core.options.scheduling import SchedulingOptions
from engine_core.options.speculation import SpeculationOptions
from engine_core.scheduler import ModelRunnerOutput
from engine_core.startup.before_torch import open_model
from engine_core.startup.model import load_any_model
from engine_core.startup.pooled_files import _ENCODER
from engine_core.startup.resolve import plan_runner, resolve_config
from engine_core.startup.scheduler import build_scheduler
from kernels.triton.operations import TritonOperations
from protocol.outputs import FinishReason
from protocol.pooling import POOLING_SAMPLING, PoolingParams, PoolingTask

SHAPE = {
    "vocab_size": 99,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": 64,
}
EMBED = PoolingParams(task=PoolingTask.EMBED)
MODERN = SHAPE | {"local_attention": 8} | {f"{n}_token_id": 1 for n in ("pad", "cls", "bos", "eos")}

DEBERTA = {"relative_attention": True, "pos_att_type": "c2p|p2c"}
GEMMA = SHAPE | {"num_key_value_heads": 2, "head_dim": 10, "sliding_window": 9}
GEMMA |= {"initializer_range": 0.3}
GEMMA |= {"use_bidirectional_attention": True, "sliding_window_pattern": 2, "num_hidden_layers": 3}
"""EmbeddingGemma's: two layers have a window of 5 to each side."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of tiny random models, made when first asked for: name -> path."""
    made = {}

    def make(name, **options):
        key = name, *options.items()
        if key not in made:
            torch.manual_seed(0)
            family = name.split("For")[0].removesuffix("Model")
            shape = MODERN | {"sep_token_id": 1} if family == "ModernBert" else SHAPE
            shape = GEMMA if family == "Gemma3Text" else shape
            config = getattr(transformers, f"{family}Config")(**shape | options)
            made[key] = tmp_path_factory.mktemp(name)
            getattr(transformers, name)(config).eval().save_pretrained(made[key])
        return made[key]

    return make


def options_of(folder, **more):
    return EngineOptions(model=str(folder), device="cpu", **more)


def start(folder, scheduling=None, **more):
    """(loop, resolved configuration), as the daemon has them."""
    options = options_of(folder, scheduling=SchedulingOptions(**scheduling or {}), **more)
    files = open_model(options).files
    spec = plan_runner(options, files, load_any_model(options, files, torch.device("cpu")))
    config = resolve_config(spec, files, address="ipc://x")
    runner = spec.build(num_blocks=0, num_host_blocks=0, max_model_len=64)
    scheduler = build_scheduler(
        config.scheduler, KVCacheManager(num_blocks=0, block_size=16, groups=())
    )
    return EngineLoop(scheduler, runner, depth=1), config


def ask(loop, name, prompt, params=EMBED, **more):
    loop.add(name, prompt, POOLING_SAMPLING, pooling_params=params, pools_all_states=True, **more)


def answer(loop, name):
    pooled = loop.pooled[name]
    return torch.from_numpy(np.frombuffer(pooled.data, "<f4").reshape(pooled.shape).copy())


def prompts_of(*lengths):
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 99, (n,), generator=generator).tolist() for n in lengths]


def embedded(model, prompt):
    """The mean of its hidden states, of length 1."""
    with torch.inference_mode():
        mean = model(torch.tensor([prompt])).last_hidden_state[0].mean(0)
    return mean / mean.norm()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["BertModel", "XLMRobertaModel", "ModernBertModel", "Gemma3TextModel"]
)
def test_a_gpus_kernels_give_the_vectors_of_transformers(folder, name, monkeypatch):
    """In Triton's interpreter."""

    def on_triton(device, **options):
        return TritonOperations(device)

    monkeypatch.setattr("engine_core.startup.model.select_operations", on_triton)
    path = folder(name, **({"max_position_embeddings": 66} if "Roberta" in name else {}))
    loop, _ = start(path, {"max_num_batched_tokens": 64})
    if name == "BertModel":
        loop.runner.warm_up()
    prompts = prompts_of(1, 20, 9)
    for number, prompt in enumerate(prompts):
        ask(loop, str(number), prompt)
    loop.finish()
    reference = transformers.AutoModel.from_pretrained(path)
    for number, prompt in enumerate(prompts):
        found = answer(loop, str(number))
        torch.testing.assert_close(found, embedded(reference, prompt), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "name",
    [
        *("BertModel", "RobertaModel", "ModernBertModel", "Gemma3TextModel"),
        *("NomicBertModel", "GteModel", "JinaEmbeddingsV3Model"),
    ],
)
def test_vectors_are_those_of_transformers_and_no_prompt_is_cut(folder, name):
    """Proves S131, S176."""
    path = folder(name, **({"max_position_embeddings": 66} if "Roberta" in name else {}))
    loop, config = start(path, {"max_num_batched_tokens": 100})
    assert (config.num_blocks, config.kv_cache_bytes, config.enable_prefix_caching) == (0, 0, False)
    prompts = prompts_of(*range(1, 65, 3), 64, 64, 2, 1, 33)
    for number, prompt in enumerate(prompts):
        ask(loop, str(number), prompt)
    lengths = {str(number): len(prompt) for number, prompt in enumerate(prompts)}
    submit, sizes = loop.runner.submit, []

    def checked(plan):
        counts = plan.batch.num_scheduled_tokens.tolist()
        assert counts == [lengths[name] for name in plan.batch.req_ids], "a prompt was cut"
        sizes.append(sum(counts))
        submit(plan)

    loop.runner.submit = checked
    loop.finish()
    assert max(sizes) <= 100 and len(loop.ends) == len(prompts)
    assert set(loop.ends.values()) == {FinishReason.STOP}
    model = getattr(transformers, name).from_pretrained(path).eval()
    for number, prompt in enumerate(prompts):
        torch.testing.assert_close(
            answer(loop, str(number)), embedded(model, prompt), atol=1e-4, rtol=0
        )


def test_a_vector_has_the_same_bits_alone_and_among_others(folder):
    loop, _ = start(folder("BertModel"))
    prompts = prompts_of(5, 64, 17, 33, 40)
    for number, prompt in enumerate(prompts):
        ask(loop, str(number), prompt)
    loop.finish()
    for number, prompt in enumerate(prompts):
        ask(loop, f"alone {number}", prompt)
        loop.finish()
        assert loop.pooled[f"alone {number}"].data == loop.pooled[str(number)].data


def test_vectors_that_are_cut_or_left_as_long_as_they_are(folder):
    path, (prompt,) = folder("BertModel"), prompts_of(21)
    loop, _ = start(path)
    whole = PoolingParams(task=PoolingTask.EMBED, use_activation=False)
    ask(loop, "whole", prompt, whole)
    ask(loop, "cut", prompt, PoolingParams(task=PoolingTask.EMBED, dimensions=7))
    ask(loop, "tokens", prompt, PoolingParams(task=PoolingTask.TOKEN_EMBED, use_activation=False))
    loop.finish()
    mean = answer(loop, "tokens").mean(0)
    torch.testing.assert_close(answer(loop, "whole"), mean, atol=1e-6, rtol=0)
    direction = torch.nn.functional.normalize(mean[:7], dim=0)
    torch.testing.assert_close(answer(loop, "cut"), direction, atol=1e-6, rtol=0)


def test_int8_weights_give_nearly_the_same_vectors(folder):
    path, (prompt,) = folder("BertModel"), prompts_of(40)
    vectors = []
    for more in ({}, {"quantization": "int8"}):
        loop, _ = start(path, **more)
        ask(loop, "r", prompt)
        loop.finish()
        vectors.append(answer(loop, "r"))
    assert float(vectors[0] @ vectors[1]) > 0.999
    assert not torch.equal(*vectors)


@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize(
    "family", ["Bert", "Roberta", "ModernBert", "NomicBert", "Gte", "DebertaV2", "Albert"]
)
def test_pairs_and_labels_are_those_of_transformers(folder, family, labels):
    more = DEBERTA if family == "DebertaV2" else {}
    path = folder(f"{family}ForSequenceClassification", num_labels=labels, **more)
    loop, _ = start(path)
    (prompt,) = prompts_of(30)
    task = PoolingTask.SCORE if labels == 1 else PoolingTask.CLASSIFY
    raw = {"task": task, "use_activation": False}
    ask(loop, "pair", prompt, PoolingParams(**raw, second_segment_start=12))
    ask(loop, "active", prompt, PoolingParams(task=task))
    loop.finish()
    model = transformers.AutoModelForSequenceClassification.from_pretrained(path).eval()
    types = torch.tensor([[0] * 12 + [1] * 18])
    has_types = getattr(model.config, "type_vocab_size", 1) == 2
    typed = {"token_type_ids": types} if has_types else {}
    with torch.inference_mode():
        pair, single = (model(torch.tensor([prompt]), **more).logits[0] for more in (typed, {}))
    torch.testing.assert_close(answer(loop, "pair"), pair, atol=1e-4, rtol=0)
    active = single.sigmoid() if labels == 1 else single.softmax(-1)
    torch.testing.assert_close(answer(loop, "active"), active, atol=1e-4, rtol=0)
    assert family not in ("Bert", "NomicBert") or not torch.allclose(pair, single, atol=1e-4)


def test_labels_of_tokens(folder):
    path, (prompt,) = folder("BertForTokenClassification"), prompts_of(9)
    loop, _ = start(path)
    ask(loop, "r", prompt, PoolingParams(task=PoolingTask.TOKEN_CLASSIFY, use_activation=False))
    loop.finish()
    model = transformers.AutoModelForTokenClassification.from_pretrained(path).eval()
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(answer(loop, "r"), expected, atol=1e-4, rtol=0)


def test_bge_m3_has_weights_and_vectors_of_tokens_beside_the_texts_vector(folder, tmp_path):
    path = shutil.copytree(
        folder("XLMRobertaModel", bos_token_id=0, eos_token_id=2), tmp_path / "m"
    )
    options = {"hf_overrides": '{"architectures": ["BgeM3EmbeddingModel"]}'}
    with pytest.raises(ModelNotFound, match=r"has no sparse_linear\.pt; copy the file"):
        start(path, pooling=PoolingOptions(**options))
    heads = {"sparse": torch.nn.Linear(48, 1), "colbert": torch.nn.Linear(48, 20)}
    for name, head in heads.items():
        torch.save(head.state_dict(), path / f"{name}_linear.pt")
    loop, _ = start(path, pooling=PoolingOptions(**options))
    tasks = [PoolingTask.EMBED, PoolingTask.TOKEN_EMBED, PoolingTask.TOKEN_CLASSIFY]
    assert list(loop.runner.config.pooler.config.tasks) == tasks
    for ids in ([0, 9, 7, 9, 40, 2], [9, 7], [0, 2]):
        for task in tasks:
            ask(loop, f"{task} {ids}", ids, PoolingParams(task=task))
        loop.finish()
        model = transformers.XLMRobertaModel.from_pretrained(path).eval()
        with torch.inference_mode():
            states = model(torch.tensor([ids])).last_hidden_state[0]
            first, last = int(ids[0] == 0), len(ids) - int(ids[-1] == 2)
            weights = heads["sparse"](states)[first:last, 0].relu()
            vectors = torch.nn.functional.normalize(heads["colbert"](states[first:]), dim=1)
        wanted = torch.nn.functional.normalize(states[0], dim=0), vectors, weights
        for task, each in zip(tasks, wanted, strict=True):
            torch.testing.assert_close(answer(loop, f"{task} {ids}"), each, atol=1e-4, rtol=0)
        rows = loop.pooled[f"{tasks[-1]} {ids}"].rows()
        torch.testing.assert_close(torch.tensor(rows), weights[None], atol=1e-4, rtol=0)
    for wrong in ({"weight": torch.ones(3)}, {"weight": torch.ones(1, 48), "x": print}, {}):
        torch.save(wrong, path / "sparse_linear.pt")
        with pytest.raises(BrokenModelFile, match=r"_linear\.pt is not one layer.*get it again"):
            start(path, pooling=PoolingOptions(**options))


def test_sentence_t5_is_the_mean_behind_a_dense_layer(tmp_path):
    """Its files have the config of a whole T5, and the layer as a state dict of PyTorch."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 99, "d_model": 48, "d_kv": 20, "d_ff": 80, "num_heads": 3}
    model = transformers.T5EncoderModel(transformers.T5Config(**sizes, num_layers=2)).eval()
    model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"is_encoder_decoder": True}))
    kinds = ("Transformer", "Pooling", "Dense", "Normalize")
    paths = "", *(f"{at}_{kind}" for at, kind in enumerate(kinds[1:], 1))
    modules = [{"type": f"x.{kind}", "path": path} for kind, path in zip(kinds, paths, strict=True)]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    dense = tmp_path / "2_Dense"
    dense.mkdir()
    (dense / "config.json").write_text(
        '{"activation_function": "torch.nn.modules.linear.Identity"}'
    )
    weight = torch.randn(30, 48)
    torch.save({"linear.weight": weight}, dense / "pytorch_model.bin")
    loop, _ = start(tmp_path)
    for number, prompt in enumerate(prompts_of(5, 40)):
        ask(loop, str(number), prompt)
        loop.finish()
        with torch.inference_mode():
            mean = model(torch.tensor([prompt])).last_hidden_state[0].mean(0)
        wanted = torch.nn.functional.normalize(weight @ mean, dim=0)
        torch.testing.assert_close(answer(loop, str(number)), wanted, atol=1e-4, rtol=0)


def test_the_more_urgent_is_first_and_an_aborted_one_is_not_computed(folder):
    policy = {"scheduling_policy": "priority", "max_num_batched_tokens": 64}
    loop, _ = start(folder("BertModel"), policy)
    late, gone, urgent = prompts_of(60, 60, 60)
    ask(loop, "late", late, priority=5)
    ask(loop, "gone", gone, priority=3)
    ask(loop, "urgent", urgent, priority=1)
    loop.abort("gone")
    loop.step()
    assert list(loop.pooled) == ["urgent"]
    loop.finish()
    assert list(loop.pooled) == ["urgent", "late"]


def test_a_prompt_that_makes_steps_fail_ends_alone(folder):
    path, prompts = folder("BertModel"), prompts_of(20, 7, 64, 3, 9)
    loop, _ = start(path)
    prompts[2][5] = poison = 98
    prompts = [[min(token, 97) if n != 2 else token for token in p] for n, p in enumerate(prompts)]
    for number, prompt in enumerate(prompts):
        ask(loop, str(number), prompt)
    compute = loop.runner.model.forward

    def forward(token_ids_T, *more):
        if poison in token_ids_T.tolist():
            raise RuntimeError("poison")
        return compute(token_ids_T, *more)

    loop.runner.model.forward = forward
    collect = loop.runner.collect

    def collected():
        plan = loop.runner._in_flight
        try:
            return collect()
        except RuntimeError as error:
            loop.scheduler.discard_step(plan, str(error))
            return ModelRunnerOutput(req_ids=[], sampled_token_ids=[])

    loop.runner.collect = collected
    loop.finish()
    model = transformers.BertModel.from_pretrained(path).eval()
    assert loop.ends[("2", 0)] is FinishReason.ERROR and "2" not in loop.pooled
    for number, prompt in enumerate(prompts):
        if number != 2:
            expected = embedded(model, prompt)
            torch.testing.assert_close(answer(loop, str(number)), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_blocks": 100}, "--num-blocks has no effect on an encoder-only model"),
        ({"kv_cache_memory": 1 << 30}, "--kv-cache-memory has no effect"),
        ({"kv_cache_dtype": "int8"}, "--kv-cache-dtype has no effect"),
        ({"scheduling": SchedulingOptions(max_chunk_size=8)}, "--max-chunk-size has no effect"),
        ({"scheduling": SchedulingOptions(slo_tpot_ms=8.0)}, "--slo-tpot-ms has no effect"),
        ({"speculation": SpeculationOptions(speculative="ngram")}, "--speculative has no effect"),
        ({"adapters": AdapterOptions(enable_lora=True)}, "--enable-lora has no effect"),
        (
            {"scheduling": SchedulingOptions(max_num_batched_tokens=63)},
            "--max-num-batched-tokens is 63, and an encoder computes a prompt of up to 64 tokens",
        ),
        ({"max_model_len": 65}, "--max-model-len is 65, the model was made for 64"),
        (
            {"pooling": PoolingOptions(hf_overrides='{"jina_task": "separation"}')},
            "jina_task is of jina-embeddings v3, .* has no tasks; omit it",
        ),
        ({"pooling": PoolingOptions(runner="generate")}, "--runner generate: BertModel has no"),
    ],
)
def test_what_has_no_effect_is_refused(folder, options, text):
    with pytest.raises(ConfigurationError, match=text):
        start(folder("BertModel"), **{"scheduling": None} | _as_dict(options))


def _as_dict(options):
    scheduling = options.get("scheduling")
    if scheduling is None:
        return options
    given = {
        field.name: getattr(scheduling, field.name)
        for field in dataclasses.fields(scheduling)
        if getattr(scheduling, field.name) != field.default
    }
    return options | {"scheduling": given}


def test_a_bias_on_a_gpu_and_a_missing_head_are_refused(folder):
    for name in ("MPNetModel", "DebertaV2Model", "T5EncoderModel"):
        config, cuda = {"architectures": [name], **DEBERTA}, traits_of(torch.device("cuda"))
        with pytest.raises(ConfigurationError, match=f"{name} has a learned bias of distances"):
            check_layers(config, cuda)
    with pytest.raises(StartupError, match=r"BertModel.* has no head to classify with"):
        start(folder("BertModel"), pooling=PoolingOptions(convert="classify"))


def test_start_up_knows_the_registrys_encoders():
    from engine_core.models.encoders.encoder_configs import EncoderConfig
    from engine_core.models.families.table import SUPPORTED_ARCHITECTURES
    from engine_core.models.registry import read_model_config

    for name in SUPPORTED_ARCHITECTURES:
        try:
            config = read_model_config({"architectures": [name], **DEBERTA})
        except Exception:  # decoders' shapes have no defaults
            config = None
        assert isinstance(config, EncoderConfig) == bool(_ENCODER.fullmatch(name)), name


def test_an_answer_is_sent_before_its_request_is_dropped(folder):
    loop, _ = start(folder("BertModel"))
    for number, prompt in enumerate(prompts_of(5, 9)):
        ask(loop, str(number), prompt)
    scheduler, sent = loop.scheduler, []

    def send(outputs):
        (per_client,) = outputs.values()
        sent.extend(per_client.finished_req_ids)
        assert scheduler.get_request_counts() == (2, 0), "they leave behind their answers"

    plan = scheduler.schedule()
    loop.runner.submit(plan)
    scheduler.update_from_output(plan, loop.runner.collect(), send=send)
    assert sorted(sent) == ["0", "1"]
    assert scheduler.get_request_counts() == (0, 0) and not scheduler.has_work()
    assert sorted(scheduler.schedule().finished_req_ids) == ["0", "1"]
