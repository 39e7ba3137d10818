"""Heads for multi-token prediction with random weights, and what they are published as, around the
decoder layer of transformers. Not a test."""

import torch


class PublishedMTP(torch.nn.Module):
    """Whole sequences at once, without a cache. Its tensors in a checkpoint are `tensors`.
    `target`: a model of transformers."""

    def __init__(self, target, *, seed=0, spread=0.2):
        super().__init__()
        config, (first, *_) = target.config, target.model.layers
        norm, size = type(target.model.norm), config.hidden_size
        self.fc = torch.nn.Linear(2 * size, size, bias=False)
        self.pre_fc_norm_embedding = norm(size, eps=config.rms_norm_eps)
        self.pre_fc_norm_hidden = norm(size, eps=config.rms_norm_eps)
        kinds = getattr(config, "layer_types", None) or ["full_attention"]
        self._of_layer = "full_attention" not in kinds or not hasattr(config, "layer_types")
        last = len(target.model.layers) - 1 if self._of_layer else kinds.index("full_attention")
        layer = type(first)(config, last)
        self.layers = torch.nn.ModuleList([layer])
        self.norm = norm(size, eps=config.rms_norm_eps)
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * spread
        self._target = [target]  # no part of the head

    @property
    def tensors(self):
        """Of a checkpoint, beside the target's."""
        tensors = {f"mtp.{name}": tensor for name, tensor in self.state_dict().items()}
        if not self._of_layer:
            return tensors
        behind = f"model.layers.{self._target[0].config.num_hidden_layers}"  # DeepSeek's names
        names = {
            "mtp.layers.0": behind,
            "mtp.fc": f"{behind}.eh_proj",
            "mtp.norm": f"{behind}.shared_head.norm",
            "mtp.pre_fc_norm_embedding": f"{behind}.enorm",
            "mtp.pre_fc_norm_hidden": f"{behind}.hnorm",
        }
        renamed = {
            name.replace(ours, theirs, 1): tensor
            for name, tensor in tensors.items()
            for ours, theirs in names.items()
            if name.startswith(f"{ours}.")
        }
        embedding = self._target[0].get_input_embeddings().weight.data
        return renamed | {f"{behind}.embed_tokens.weight": embedding}

    def forward(self, next_token_ids, hidden):
        """Of each position [B, T]: the token behind it, and the target's state behind its last
        norm, or the head's own -> (logits [B, T, V], the head's state)."""
        (target,) = self._target
        embedded = target.get_input_embeddings()(next_token_ids)
        both = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)]
        x, length = self.fc(torch.cat(both, -1)), hidden.shape[1]
        mask = torch.full((length, length), float("-inf")).triu(1)
        angles = target.model.rotary_emb(x, torch.arange(length)[None])
        x = self.layers[0](x, position_embeddings=angles, attention_mask=mask[None, None])
        hidden = self.norm(x)
        return target.get_output_embeddings()(hidden), hidden

    @torch.inference_mode()
    def drafts(self, token_ids, number):
        """The most probable ones behind `token_ids`, of which the target has computed all but the
        last."""
        (target,) = self._target
        tokens = list(token_ids)
        hidden = target.model(torch.tensor([tokens[:-1]]), use_cache=False).last_hidden_state
        for _ in range(number):
            logits, own = self(torch.tensor([tokens[1:]]), hidden)
            tokens.append(int(logits[0, -1].argmax()))
            hidden = torch.cat([hidden, own[:, -1:]], 1)
        return tokens[len(token_ids) :]
