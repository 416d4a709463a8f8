"""The MTP layer: drafts the token after next from a hidden state and the token that followed it.

    x = eh_proj([ norm(embedding of x_p) ; norm(h_{p-1}) ])      embedding half first
    x = x + mla(norm(x)) ;  x = x + moe(norm(x))                 plain residual, one stream
    y = norm(x) ;  draft = argmax(y @ lm_head.T)                 y is also the next iteration's hidden state

The MTP row of token p pairs (h_{p-1}, x_p), hidden states as the trunk returns them (after its final norm), and
is filed in slot p of the layer's own cache: what lies in a page depends only on tokens up to the page's last
one. Token 0 has no row and slot 0 stays empty, but index pools are grouped by row (row 0 is token 1), so pool j
is entry j + 1. (`first_slot` 0 files rows by their hidden state instead, in slot p - 1, as public engines do.)
Embedding and head are the trunk's.

A row's cache entries are a function of (h_{p-1}, x_p) alone, because there is one layer: `DRAFT_ARCHITECTURE`
declares that. So rows that draft nothing need no attention and no experts, only `enter` and `write`.

Iteration 1 writes the rows of known tokens and reads the last. Iterations 2..k feed the layer its own y and draft.
With index sharing (`index_share_for_mtp_iteration`) they attend to the rows selected for the last known row, run no
indexer and write nothing; without it they are ordinary rows, to be overwritten later.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from model.batch import Batch
from model.glm5_next import Glm5Next
from model.indexer import Selection
from model.linear import Linear, matmul_dtype
from model.mla import Mla, MlaCache
from model.moe import Moe
from model.norms import rms_norm
from model.weights import WeightTree

DRAFT_ARCHITECTURE = "Glm5NextMTPModel"


@dataclass(frozen=True)
class DraftCache:
    """Pages of the draft layer, and by companion slot what a prefix lacks for drafting: the hidden state of its last
    token, and the layer's raw index rows of the incomplete pool (the ring of `mla.index`)."""

    mla: MlaCache
    hidden: Tensor  # [num_slots, hidden_size], in the activation dtype

    def copy_companion(self, source: int, target: int) -> None:
        """Copy a companion from slot to slot."""
        self.hidden[target] = self.hidden[source]
        self.mla.index.ring[target] = self.mla.index.ring[source]


class Mtp:
    """The draft layer, `layers.{num_hidden_layers}` of the checkpoint; shares the trunk's embedding and head."""

    def __init__(self, tree: WeightTree, trunk: Glm5Next, first_slot: int = 1) -> None:
        config = trunk.config
        tree = tree.at(f"layers.{config.num_hidden_layers}")
        product = matmul_dtype(trunk.dtype, trunk.device)
        self.trunk, self.eps, self.first_slot = trunk, config.rms_norm_eps, first_slot
        self.enorm, self.hnorm = tree.tensor("enorm.weight"), tree.tensor("hnorm.weight")
        self.eh_proj = Linear(tree.linear("eh_proj"), product)
        self.input_norm = tree.tensor("input_layernorm.weight")
        self.post_attention_norm = tree.tensor("post_attention_layernorm.weight")
        self.mla = Mla(tree.at("self_attn"), config, product, first_slot)
        self.moe = Moe(tree.at("mlp"), config, product)
        self.norm = tree.tensor("shared_head.norm.weight")

    @torch.inference_mode()
    def enter(self, token_ids: Tensor, previous: Tensor) -> Tensor:
        """Residual rows [num_tokens, hidden] float32 from token_ids [num_tokens] and `previous` [num_tokens, hidden],
        h_{p-1} of each. What a row becomes depends on its own two inputs alone."""
        tokens = rms_norm(self.trunk.embed(token_ids), self.enorm, self.eps)
        return self.eh_proj(torch.cat([tokens, rms_norm(previous, self.hnorm, self.eps)], dim=1)).float()

    @torch.inference_mode()
    def write(self, x: Tensor, batch: Batch, cache: MlaCache) -> None:
        """Cache the rows of `batch` from x, their residual rows. The row of token 0 is written nowhere."""
        self.mla.write(rms_norm(x, self.input_norm, self.eps), batch, cache)

    @torch.inference_mode()
    def read(
        self, x: Tensor, batch: Batch, cache: MlaCache, selections: list[Selection] | None = None
    ) -> tuple[Tensor, list[Selection]]:
        """y [num_tokens, hidden] in the activation dtype, from residual rows x; also what they attended to."""
        mixed, selections = self.mla.attend(rms_norm(x, self.input_norm, self.eps), batch, cache, selections)
        x = x + mixed.float()
        x = x + self.moe.forward(rms_norm(x, self.post_attention_norm, self.eps)).float()
        return rms_norm(x, self.norm, self.eps).to(mixed.dtype), selections

    def logits(self, y: Tensor) -> Tensor:
        """y [rows, hidden] -> [rows, vocab_size] float32, through the trunk's head."""
        return self.trunk.logits(y)
