"""The trunk of GLM-5.3: `num_hidden_layers` layers between two stream operations, and the output head.

    streams = embedding, repeated `hc_mult` times
    for each layer:  site reads x from the streams; y = mixer(norm(x)); site writes y back      KDA or MLA
                     site reads x from the streams; y = ffn(norm(x));   site writes y back      dense or MoE
    hidden = norm(mean of the streams)          also what the MTP layer is fed
    logits = hidden @ lm_head.T

There is no other residual path. Streams have the activation dtype between sites: one rounding per write.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from model.batch import Batch
from model.config import Glm5NextConfig
from model.hyper_connections import HyperConnection
from model.kda import Kda, KdaState
from model.linear import Linear, matmul_dtype
from model.mla import Mla, MlaCache
from model.moe import Mlp, Moe
from model.norms import rms_norm
from model.weights import WeightTree


@dataclass(frozen=True)
class TrunkCache:
    """Cache tensors by layer index: an MlaCache per MLA layer, and per KDA layer a view of `recurrent`, all of them."""

    recurrent: KdaState
    kda: dict[int, KdaState]
    mla: dict[int, MlaCache]


class DecoderLayer:
    """One trunk layer: two mHC sites around a mixer and a feed-forward layer."""

    def __init__(self, tree: WeightTree, config: Glm5NextConfig, index: int, dtype: torch.dtype) -> None:
        self.index, self.eps = index, config.rms_norm_eps
        self.attn_site = HyperConnection(tree, "hc_attn", config)
        self.ffn_site = HyperConnection(tree, "hc_ffn", config)
        self.input_norm = tree.tensor("input_layernorm.weight")
        self.post_attention_norm = tree.tensor("post_attention_layernorm.weight")
        own, is_kda = tree.at("self_attn"), config.layer_types[index] == "kda"
        self.mixer = Kda(own, config, dtype) if is_kda else Mla(own, config, dtype, first_slot=0)
        ffn = Mlp if config.mlp_layer_types[index] == "dense" else Moe
        self.ffn: Mlp | Moe = ffn(tree.at("mlp"), config, dtype)

    def forward(self, streams: Tensor, batch: Batch, cache: TrunkCache) -> Tensor:
        """streams [num_tokens, hc_mult, hidden] -> the same shape and dtype."""
        site = self.attn_site.read(streams)
        x = rms_norm(site.x, self.input_norm, self.eps)
        if isinstance(self.mixer, Kda):
            y = self.mixer.forward(x, batch, cache.kda[self.index])
        else:
            y = self.mixer.forward(x, batch, cache.mla[self.index])
        streams = site.write_back(y, streams.dtype)
        site = self.ffn_site.read(streams)
        y = self.ffn.forward(rms_norm(site.x, self.post_attention_norm, self.eps))
        return site.write_back(y, streams.dtype)


class Glm5Next:
    """The trunk with its embedding and head. `dtype` (bfloat16 or float32) is that of weights and caches;
    activations have the dtype that products run in (model/linear.py)."""

    def __init__(
        self, tree: WeightTree, config: Glm5NextConfig, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        product = matmul_dtype(dtype, device)
        # A stack of one: rows are looked up, so each must lie in one piece.
        self.embedding = tree.stack(["embed_tokens"]).select(0).expand(product)
        num_layers = len(config.layer_types)
        self.layers = [DecoderLayer(tree.at(f"layers.{i}"), config, i, product) for i in range(num_layers)]
        self.norm, self.eps = tree.tensor("norm.weight"), config.rms_norm_eps
        self.lm_head = Linear(tree.linear("lm_head"), product)

    def embed(self, token_ids: Tensor) -> Tensor:
        """token_ids [num_tokens] int64 -> [num_tokens, hidden]."""
        return functional.embedding(token_ids, self.embedding)

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: TrunkCache) -> Tensor:
        """Advance the caches by the batch; hidden states after the final norm, [num_tokens, hidden]."""
        streams = self.embed(batch.token_ids).unsqueeze(1).repeat(1, self.config.hc_mult, 1)
        for layer in self.layers:
            streams = layer.forward(streams, batch, cache)
        return rms_norm(streams.float().mean(1), self.norm, self.eps).to(streams.dtype)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [rows, hidden] -> [rows, vocab_size] float32."""
        return self.lm_head(hidden).float()
