"""EAGLE-3 heads with random weights, and the published formula in plain torch. Not a test."""

import math

import torch


def head_config(target, **options):
    """config.json of a head for a target's, in SpecForge's spelling."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": target["hidden_size"],
        "intermediate_size": 44,
        "num_hidden_layers": 1,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500.0,
        "max_position_embeddings": 16,
        "vocab_size": target["vocab_size"],
        "draft_vocab_size": target["vocab_size"],
        "tie_word_embeddings": False,
        "bos_token_id": 0,
    } | options


def head_tensors(config, *, seed=0, num_states=3, own_embedding=False, spread=0.2):
    """Of a checkpoint with SafeAILab's names."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator) * spread

    width, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    target_width = config.get("target_hidden_size", width)
    queries, keys = (config[f"num_{kind}_heads"] * size for kind in ("attention", "key_value"))
    shapes = {
        "fc.weight": (width, num_states * target_width),
        "midlayer.self_attn.q_proj.weight": (queries, 2 * width),
        "midlayer.self_attn.k_proj.weight": (keys, 2 * width),
        "midlayer.self_attn.v_proj.weight": (keys, 2 * width),
        "midlayer.self_attn.o_proj.weight": (width, queries),
        "midlayer.mlp.gate_proj.weight": (inner, width),
        "midlayer.mlp.up_proj.weight": (inner, width),
        "midlayer.mlp.down_proj.weight": (width, inner),
        "lm_head.weight": (config["draft_vocab_size"], width),
    }
    if own_embedding:
        shapes["embed_tokens.weight"] = (config["vocab_size"], width)
    tensors = {name: draw(*shape) for name, shape in shapes.items()}
    norms = {f"midlayer.{name}": width for name in ("input_layernorm", "hidden_norm")}
    norms |= {"midlayer.post_attention_layernorm": width, "norm": width}
    if config.get("norm_before_fc"):
        norms["input_norm"] = num_states * target_width
    if config.get("fc_norm"):
        norms |= {f"fc_norm.{number}": target_width for number in range(num_states)}
    tensors |= {f"{name}.weight": 1 + draw(size) for name, size in norms.items()}
    if config["draft_vocab_size"] != config["vocab_size"]:
        chosen = torch.randperm(config["vocab_size"], generator=generator)
        chosen = chosen[: config["draft_vocab_size"]].sort().values
        tensors["d2t"] = chosen - torch.arange(len(chosen))
        tensors["t2d"] = torch.zeros(config["vocab_size"], dtype=torch.bool)
        tensors["t2d"][chosen] = True
    return tensors


class PublishedHead:
    """Whole sequences at once, without a cache."""

    def __init__(self, config, tensors, embedding):
        self.config, self.tensors = config, tensors
        self.embedding = tensors.get("embed_tokens.weight", embedding)

    def weight(self, name):
        return self.tensors[f"{name}.weight"]

    def norm(self, name, x):
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return x * scale * self.weight(name)

    def rotate(self, x):
        """[T, H, D] at positions 0, 1, ..."""
        half = x.shape[-1] // 2
        frequencies = self.config["rope_theta"] ** (-torch.arange(half) / half)
        angles = torch.arange(len(x))[:, None, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        left, right = x[..., :half], x[..., half:]
        return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)

    def attend(self, x):
        size, heads = self.config["head_dim"], self.config["num_attention_heads"]

        def project(name):
            return (x @ self.weight(f"midlayer.self_attn.{name}_proj").T).unflatten(-1, (-1, size))

        q, k, v = self.rotate(project("q")), self.rotate(project("k")), project("v")
        k, v = (part.repeat_interleave(heads // part.shape[1], 1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(size)
        future = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        out = torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
        return out @ self.weight("midlayer.self_attn.o_proj").T

    def combine(self, states):
        """The target's states [T, E], one for each layer -> [T, E]."""
        if self.config.get("fc_norm"):
            states = [self.norm(f"fc_norm.{at}", state) for at, state in enumerate(states)]
        x = torch.cat(states, -1)
        if self.config.get("norm_before_fc"):
            x = self.norm("input_norm", x)
        return x @ self.weight("fc").T

    def __call__(self, next_token_ids, hidden):
        """Of each position: the token behind it, and the state -> (logits [T, D], hidden)."""
        embedded = self.norm("midlayer.input_layernorm", self.embedding[next_token_ids])
        normed = self.norm("midlayer.hidden_norm", hidden)
        residual = normed if self.config.get("norm_before_residual") else hidden
        residual = residual + self.attend(torch.cat([embedded, normed], -1))
        x = self.norm("midlayer.post_attention_layernorm", residual)
        gate, up, down = (
            self.weight(f"midlayer.mlp.{name}_proj") for name in ("gate", "up", "down")
        )
        gated = torch.nn.functional.silu(x @ gate.T) * (x @ up.T)
        hidden = residual + gated @ down.T
        out = self.norm("norm", hidden)
        logits = out @ self.weight("lm_head").T
        return logits, out if self.config.get("norm_output") else hidden

    def drafts(self, token_ids, states, number):
        """The most probable ones behind `token_ids`, of which the target has computed all but the
        last: `states` are of those."""
        tokens, hidden = list(token_ids), self.combine(states)
        for _ in range(number):
            logits, own = self(torch.tensor(tokens[1:]), hidden)
            best = int(logits[-1].argmax())
            tokens.append(best + int(self.tensors["d2t"][best]) if "d2t" in self.tensors else best)
            hidden = torch.cat([hidden, own[-1:]])
        return tokens[len(token_ids) :]
