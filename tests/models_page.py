"""Writes docs/reference/models.md from the files of the families: `python tests/models_page.py`."""

import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path

from engine_core.models import text_part
from engine_core.models.families import dense, encoders, experts, hybrids

PAGE = Path(__file__).parents[1] / "docs/reference/models.md"
_NOT_RUN = "[untried](../internals/gpu.md#layers-with-a-state)"
_LATENTS = "[untried](../internals/gpu.md#latents)"
_GPU = {
    "dense": "yes",
    "experts": "yes",
    "hybrids": _NOT_RUN,
    "encoders": "untried",
    **dict.fromkeys(("mpnet", "deberta", "t5"), "no: a learned bias"),
    **dict.fromkeys(("deepseek_v32", "kimi_linear"), "no"),
    **dict.fromkeys(("minicpm3", "deepseek_v2", "deepseek_v3", "mistral4"), _LATENTS),
    **dict.fromkeys(("cohere2", "ernie4_5", "exaone4", "gemma2", "gemma3n", "gemma4"), "untried"),
    **dict.fromkeys(("olmo3", "seed_oss", "starcoder2", "hunyuan", "hunyuan_moe"), "untried"),
    **dict.fromkeys(("ernie4_5_moe", "glm4", "nemotron"), "untried"),
}
_MAIN = ("ForCausalLM", "Model")
_HEAD = """\
# Models
What runs in this engine's own code: prefix cache, drafts, adapters, quantised weights, answers
equal in every batch. Written by `tests/models_page.py` from the families' files; each family's tiny
random model is compared with transformers in `tests/engine_core/models`. An adapter, ranks or a
device that a family does not take is refused at start, by name.

The text of a checkpoint with images or sounds is read whatever the wrapper; the encoders that run
stand in [images and sounds](../guides/multimodal.md). Texts known without their config.json:
"""
_REST = """
## Everything else
Other decoder-only models of transformers run through its modelling code over this engine's paged
attention (OPT, GPT-2, Phi, Falcon, Apertus, Laguna, MiMo-V2-Flash, LongCat-Flash ...); slower,
without ranks, untried on a GPU. Encoder-decoders:
[encoder-decoders](../guides/encoder_decoder.md). Refused by name: Mamba-1 (Jamba), attention in
chunks (Llama 4), texts that transformers has only within another model (Step 3.5).

Next: [files and names](../guides/model_files.md), [images and sounds](../guides/multimodal.md),
[embeddings](../guides/pooling.md).
"""


def rows(folder) -> Iterator[str]:
    """A row for each file of a folder of families."""
    for module in pkgutil.iter_modules(folder.__path__):
        found = importlib.import_module(f"{folder.__name__}.{module.name}")
        name, _, what = found.__doc__.partition("\n\n")[0].replace("\n", " ").partition(": ")
        assert what, f"{module.name}: its docstring must begin with the family's name and a colon"
        names = dict.fromkeys(f.names[0] for f in found.FAMILIES if f.names[0].endswith(_MAIN))
        files = dict.fromkeys(f.gguf.architecture for f in found.FAMILIES if f.gguf)
        kind = folder.__name__.rpartition(".")[2]
        gpu = _GPU.get(module.name, _GPU.get(kind, "no"))
        columns = (", ".join(f"`{each}`" for each in column) or "-" for column in (names, files))
        cells = (name, what, *columns, gpu)
        yield "| " + " | ".join(cells) + " |"


def page() -> str:
    """The whole file."""
    parts = [_HEAD + ", ".join(f"`{each}`" for each in sorted(text_part.TEXT_OF)) + ".\n"]
    for folder, title in (
        (dense, "Dense"),
        (experts, "With experts"),
        (hybrids, "With a state beside attention"),
        (encoders, "Encoders"),
    ):
        head = ["family", "what it is", "`architectures`", "GGUF", "GPU"]
        lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *rows(folder)]
        parts.append(f"\n## {title}\n" + "\n".join(lines) + "\n")
    return "".join(parts) + _REST


if __name__ == "__main__":
    PAGE.write_text(page())
