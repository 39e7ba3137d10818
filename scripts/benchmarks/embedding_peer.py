"""Run by another Python, which has sentence-transformers and onnxruntime. A line of JSON is a list
of batches of texts, run one by one; the answer has seconds, CPU seconds and the first vector.

    python embedding_peer.py sentence-transformers|onnxruntime FOLDER THREADS
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer

MOST_AT_ONCE = 32


def onnx_encoder(model: Any, num_threads: int) -> Callable[[list[str]], Any]:
    """The model as ONNX with onnxruntime's own fusions for BERT; batches as the library makes them:
    by length, so that little is padded."""
    import onnxruntime
    from onnxruntime.transformers import optimizer

    body = model[0].auto_model.eval()
    config, names = body.config, ["input_ids", "attention_mask", "token_type_ids"]

    class Plain(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.body = body

        def forward(self, ids: Any, mask: Any, types: Any) -> Any:
            fed = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}
            return self.body(**fed).last_hidden_state

    ones = torch.ones(2, 16, dtype=torch.long)
    with tempfile.NamedTemporaryFile(suffix=".onnx") as file:
        torch.onnx.export(
            Plain(),
            (ones, ones, ones * 0),
            file.name,
            input_names=names,
            output_names=["hidden"],
            dynamic_axes={name: {0: "batch", 1: "length"} for name in [*names, "hidden"]},
            opset_version=17,
            dynamo=False,
        )
        fused = optimizer.optimize_model(
            file.name,
            model_type="bert",
            num_heads=config.num_attention_heads,
            hidden_size=config.hidden_size,
        )
        fused.save_model_to_file(file.name)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = num_threads
        session = onnxruntime.InferenceSession(file.name, options)
    tokenizer = model.tokenizer

    def run(texts: list[str]) -> Any:
        fed = tokenizer(texts, padding=True, truncation=True, max_length=256, return_tensors="np")
        hidden = session.run(None, {name: fed[name].astype(np.int64) for name in names})[0]
        mask = fed["attention_mask"][..., None]
        mean = (hidden * mask).sum(1) / mask.sum(1)
        return mean / np.linalg.norm(mean, axis=1, keepdims=True)

    def encode(texts: list[str]) -> Any:
        order = sorted(range(len(texts)), key=lambda at: -len(texts[at]))
        vectors: list[Any] = [None] * len(texts)
        for start in range(0, len(order), MOST_AT_ONCE):
            some = order[start : start + MOST_AT_ONCE]
            for at, vector in zip(some, run([texts[at] for at in some]), strict=True):
                vectors[at] = vector
        return vectors

    return encode


def main(kind: str, folder: str, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    # the fusions of onnxruntime know no other attention
    how = {"attn_implementation": "eager"} if kind == "onnxruntime" else {}
    model = SentenceTransformer(folder, device="cpu", model_kwargs=how)
    encode = onnx_encoder(model, num_threads) if kind == "onnxruntime" else model.encode
    for line in sys.stdin:
        batches = json.loads(line)
        started_s, cpu_s = time.perf_counter(), time.process_time()
        vectors = [encode(texts) for texts in batches]
        answer = {
            "seconds": time.perf_counter() - started_s,
            "cpu_s": time.process_time() - cpu_s,
            "vector": [float(number) for number in vectors[0][0]],
        }
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
