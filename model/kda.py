"""KDA (Kimi Delta Attention), the gated-delta layer: 34 of 45 trunk layers, the "GDN" of the policy.

Per head a matrix S [key, value] is carried from token to token:

    S <- diag(exp(g_t)) S                              decay per key channel, g in (gate_lower_bound, 0)
    S <- S + k_t (x) beta_t (v_t - S^T k_t)            delta rule on the decayed state
    o_t = S^T q_t                                      read after the update

`recurrence` is that law, token by token. `chunked` computes the same 16 tokens at a time and meets every
boundary on the 16-token grid on its way, which is where states are exported. The state "at n tokens" is S
after token n-1 together with the last `conv kernel - 1` rows of q|k|v before the convolution: one unit, never
carried, restored or exported apart. All arithmetic is float32.

A verification runs tokens of which only a prefix may come true. It reads a slot and leaves the slot's matrix alone;
what the recurrence read of each token goes to a replay row, and `roll_back` runs the accepted prefix again from
there: the same law on the same numbers, without the layers around it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from model.batch import Batch, Export, Segment, VerifiedRows
from model.config import Glm5NextConfig
from model.linear import Linear
from model.norms import l2_norm, rms_norm
from model.weights import WeightTree

# Inside a chunk exp(G_i - G_j) is computed as exp(G_i) * exp(-G_j): 16 tokens x 5 = 80 < 88 = ln(float32 max).
CHUNK_TOKENS = 16
ROW_BLOCK = 256  # rows at a time, so that a CPU's cache holds what lies between two operations
# What the forward below can do for a checkpoint policy: any number of states, at multiples of a chunk from the start
# of a segment, and a segment may end anywhere.
EXPORT_GRID_TOKENS = CHUNK_TOKENS


@dataclass(frozen=True)
class KdaState:
    """Recurrent slots, and replay rows for verifications of up to `depth` drafts: of all KDA layers, or one's view."""

    matrix: Tensor  # [num_slots, (layers,) heads, key, value] float32, or bfloat16 to halve a checkpoint
    conv: Tensor  # [num_slots, kernel - 1, (layers,) 3 * heads * head_dim], rows of q|k|v before the convolution
    replay: Tensor  # [num_rows, 1 + depth, (layers,) heads, 3 * head_dim + 1] float32: k, v, g and beta of each token
    conv_tail: Tensor  # [num_rows, depth, (layers,) 3 * heads * head_dim], what a verification adds to `conv`

    def layer(self, index: int) -> "KdaState":
        """One layer's part of a state of all layers."""
        conv, replay, conv_tail = (x[:, :, index] for x in (self.conv, self.replay, self.conv_tail))
        return KdaState(self.matrix[:, index], conv, replay, conv_tail)

    def copy(self, source: int, target: int) -> None:
        """Copy one whole state from slot to slot."""
        self.matrix[target] = self.matrix[source]
        self.conv[target] = self.conv[source]

    def roll_back(self, slot: int, row: int, exports: tuple[Export, ...]) -> None:
        """After a verification from `slot` into replay row `row`: leave the state after `num_tokens` verified tokens in
        each export's slot, ascending; the last one is `slot` itself. On a state of all layers."""
        window, kept = torch.cat([self.conv[slot], self.conv_tail[row]]), self.conv.shape[1]
        inputs = self.replay[row].flatten(1, 2)  # [1 + depth, layers * heads, ..]
        matrix, done = self.matrix[slot].flatten(0, 1).float(), 0
        for export in exports:
            for token in range(done, export.num_tokens):
                k, v, g, beta = inputs[token].split([*matrix.shape[1:], matrix.shape[1], 1], dim=1)
                matrix = absorb(matrix, k.unsqueeze(1), v.unsqueeze(1), g, beta)
            done = export.num_tokens
            self.matrix[export.slot] = matrix.view_as(self.matrix[slot])
            self.conv[export.slot] = window[done - 1 : done - 1 + kept]


@dataclass(frozen=True)
class KdaInputs:
    """What the recurrence reads; heads and channels split, float32. Axes: [num_tokens, heads, head_dim]."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor  # log-decay per key channel
    beta: Tensor  # [num_tokens, heads]

    def rows(self, index: slice | Tensor) -> "KdaInputs":
        """The inputs of some rows; of all of them, itself."""
        if index == slice(0, len(self.q)):
            return self
        return KdaInputs(self.q[index], self.k[index], self.v[index], self.g[index], self.beta[index])

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """q, k, v, g, beta, all of them [num_tokens, heads, width]."""
        return self.q, self.k, self.v, self.g, self.beta.unsqueeze(2)


class Kda:
    """One KDA mixer: x [num_tokens, hidden] -> y [num_tokens, hidden]."""

    def __init__(self, tree: WeightTree, config: Glm5NextConfig, dtype: torch.dtype) -> None:
        self.heads, self.head_dim = config.linear_num_heads, config.linear_head_dim
        self.rms_eps = config.rms_norm_eps
        self.qkv_proj = Linear(tree.fused(["q_proj", "k_proj", "v_proj"]), dtype)
        self.gates_proj = Linear(tree.fused(["f_a_proj", "g_a_proj", "b_proj"]), dtype)
        self.gate_widths = [self.head_dim, self.head_dim, self.heads]
        self.f_b_proj = Linear(tree.linear("f_b_proj"), dtype)
        self.g_b_proj = Linear(tree.linear("g_b_proj"), dtype)
        self.o_proj = Linear(tree.linear("o_proj"), dtype)
        convs = [tree.tensor(f"{name}_conv1d.weight").squeeze(1) for name in "qkv"]
        # [kernel, 3 * heads * head_dim]; the last tap is the current token
        self.conv_taps = torch.cat(convs).T.contiguous()
        self.decay_rate = tree.tensor("A_log").exp().unsqueeze(1)  # [heads, 1]
        self.dt_bias = tree.tensor("dt_bias").view(self.heads, self.head_dim)
        self.gate_lower_bound = config.linear_gate_lower_bound
        self.o_norm = tree.tensor("o_norm.weight")

    def forward(self, x: Tensor, batch: Batch, state: KdaState) -> Tensor:
        """Advance every segment's slot by its tokens; write the exports that segments ask for."""
        if len(x) <= ROW_BLOCK or x.device.type != "cpu":
            return self._forward(x, batch, state)
        parts = batch.cut(ROW_BLOCK, CHUNK_TOKENS)
        rows = x.split([len(part.token_ids) for part in parts])
        return torch.cat([self._forward(*pair, state) for pair in zip(rows, parts, strict=True)])

    def _forward(self, x: Tensor, batch: Batch, state: KdaState) -> Tensor:
        f_a, g_a, b = self.gates_proj(x).split(self.gate_widths, dim=1)
        # Rounded before use, so that a row means the same inside a chunk and carried across a boundary.
        qkv = self.qkv_proj(x).to(state.conv.dtype)
        inputs = self._inputs(self._convolve(qkv, batch, state), f_a, b)
        parts, singles = [], batch.single_rows
        if singles is not None:
            carried = singles.carried(state.matrix).float()
            stepped, after = recurrence_step(inputs.rows(singles.rows), carried)
            state.matrix[singles.slots] = after.to(state.matrix.dtype)
            parts.append((singles.rows, stepped))
        for segment in batch.multi_row_segments:
            parts.append((segment.rows, self._run_segment(inputs.rows(segment.rows), segment, state)))
        for group in batch.verifications:
            parts.append((group.rows, self._verify(inputs.rows(group.rows), group, state)))
        out = in_row_order(parts, len(x))
        gate = self.g_b_proj(g_a).float().sigmoid().view_as(out)
        return self.o_proj((rms_norm(out, self.o_norm, self.rms_eps) * gate).flatten(1))

    def _convolve(self, qkv: Tensor, batch: Batch, state: KdaState) -> Tensor:
        """Causal depthwise convolution and SiLU; qkv [num_tokens, 3 * width] -> float32. Advances the slots' rows."""
        parts, singles, history = [], batch.single_rows, state.conv
        if singles is not None:
            window = torch.cat([singles.carried(history), qkv[singles.rows].unsqueeze(1)], dim=1)
            parts.append((singles.rows, (window.float() * self.conv_taps).sum(1)))
            history[singles.slots] = window[:, 1:]
        kept = history.shape[1]
        for segment in batch.multi_row_segments:
            before = history[segment.slot] if segment.start else torch.zeros_like(history[0])
            window = torch.cat([before, qkv[segment.rows]])
            parts.append((segment.rows, depthwise_causal_conv(window.float(), self.conv_taps)))
            for export in segment.exports:
                history[export.slot] = window[export.num_tokens : export.num_tokens + kept]
            history[segment.slot] = window[segment.num_tokens :]
        for group in batch.verifications:
            window = torch.cat([history[group.slots], group.split(qkv[group.rows])], dim=1)
            parts.append((group.rows, depthwise_causal_conv(window.float(), self.conv_taps).flatten(0, 1)))
            history[group.slots] = window[:, 1 : 1 + kept]  # the first token is always verified
            state.conv_tail[group.replay, : group.num_tokens - 1] = window[:, 1 + kept :]
        return functional.silu(in_row_order(parts, len(qkv)), inplace=True)

    def _inputs(self, qkv: Tensor, f_a: Tensor, b: Tensor) -> KdaInputs:
        qkv = qkv.view(len(qkv), 3, self.heads, self.head_dim)
        q, k = l2_norm(qkv[:, :2]).unbind(1)
        rate = self.f_b_proj(f_a).float().view(-1, self.heads, self.head_dim)
        g = (rate + self.dt_bias).mul_(self.decay_rate).sigmoid_().mul_(self.gate_lower_bound)
        return KdaInputs(q * self.head_dim**-0.5, k, qkv[:, 2], g, b.float().sigmoid())

    def _run_segment(self, inputs: KdaInputs, segment: Segment, state: KdaState) -> Tensor:
        start = state.matrix[segment.slot] if segment.start else torch.zeros_like(state.matrix[0])
        exports = {export.num_tokens: export.slot for export in segment.exports}
        out, states = chunked(inputs, start.float(), tuple(exports))
        for num_tokens, slot in exports.items():
            state.matrix[slot] = states[num_tokens]
        state.matrix[segment.slot] = states[segment.num_tokens]
        return out

    def _verify(self, inputs: KdaInputs, group: VerifiedRows, state: KdaState) -> Tensor:
        """Outputs of the group's tokens; no slot's matrix is touched."""
        read = group.split(torch.cat(inputs.tensors, dim=2))
        state.replay[group.replay, : group.num_tokens] = read[..., self.head_dim :]
        parts = read.transpose(1, 2).flatten(0, 1).split([*[self.head_dim] * 4, 1], dim=2)
        update, absorbed, scores, q_in, _, _ = within_chunks(*parts)  # [n * heads, tokens, width]
        matrix = state.matrix[group.slots].float().flatten(0, 1)
        delta = torch.baddbmm(update, absorbed, matrix, alpha=-1)
        out = torch.bmm(scores, delta).baddbmm_(q_in, matrix).view(-1, self.heads, *update.shape[1:])
        return out.transpose(1, 2).flatten(0, 1)


def in_row_order(parts: list[tuple[slice | Tensor, Tensor]], num_rows: int) -> Tensor:
    """Results of disjoint sets of rows, put together as [num_rows, ...]."""
    if len(parts) == 1:
        return parts[0][1]
    first = parts[0][1]
    out = first.new_empty(num_rows, *first.shape[1:])
    for rows, part in parts:
        out[rows] = part
    return out


def depthwise_causal_conv(window: Tensor, taps: Tensor) -> Tensor:
    """window [.., kernel - 1 + num_tokens, width], taps [kernel, width] -> [.., num_tokens, width], no activation."""
    num_tokens = window.shape[-2] - len(taps) + 1
    out = window[..., :num_tokens, :] * taps[0]
    for offset in range(1, len(taps)):
        out.addcmul_(window[..., offset : offset + num_tokens, :], taps[offset])
    return out


def absorb(state: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The state after one more token of each of n heads: state [n, key, value], k [n, 1, key], v [n, 1, value],
    g [n, key], beta [n, 1]."""
    state = state * g.exp().unsqueeze(2)
    delta = torch.baddbmm(v, k, state, alpha=-1).mul_(beta.unsqueeze(2))
    return torch.baddbmm(state, k.transpose(1, 2), delta)


def recurrence_step(inputs: KdaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each of n requests. inputs [n, heads, ...], state [n, heads, key, value] -> (out, new state)."""
    q, k, v = (x.flatten(0, 1).unsqueeze(1) for x in (inputs.q, inputs.k, inputs.v))  # [n * heads, 1, width]
    after = absorb(state.flatten(0, 1), k, v, inputs.g.flatten(0, 1), inputs.beta.reshape(-1, 1))
    return torch.bmm(q, after).view_as(inputs.v), after.view_as(state)


def recurrence(inputs: KdaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """The law: token by token. state [heads, key, value] float32 -> (out [num_tokens, heads, value], new state)."""
    out = torch.empty_like(inputs.v)
    for t in range(len(out)):
        row, state = recurrence_step(inputs.rows(slice(t, t + 1)), state.unsqueeze(0))
        out[t], state = row[0], state[0]
    return out, state


def chunked(
    inputs: KdaInputs, state: Tensor, boundaries: tuple[int, ...] = ()
) -> tuple[Tensor, dict[int, Tensor]]:
    """The same function as `recurrence`, `CHUNK_TOKENS` at a time.

    state [heads, key, value]. Returns out [num_tokens, heads, value] and the states after each of `boundaries`
    tokens (multiples of CHUNK_TOKENS, else ValueError) and after all of them.
    """
    num_tokens = len(inputs.v)
    if any(b % CHUNK_TOKENS and b != num_tokens for b in boundaries):
        raise ValueError(f"exports at {boundaries} tokens; expected multiples of {CHUNK_TOKENS}")
    algebra = within_chunks(*(in_chunks(x).flatten(0, 1) for x in inputs.tensors))
    update, absorbed, scores, q_in, keep, k_to_end = (x.unflatten(0, (-1, len(state))) for x in algebra)
    out, states = torch.empty_like(update), {}
    steps = zip(*(x.unbind() for x in (update, absorbed, scores, q_in, keep, k_to_end, out)), strict=True)
    for end, (u, w, p, q_c, keep_c, k_c, out_c) in enumerate(steps, start=1):
        delta = u.baddbmm_(w, state, alpha=-1)  # in place: `update` is used up
        torch.bmm(p, delta, out=out_c).baddbmm_(q_c, state)
        state = (keep_c * state).baddbmm_(k_c, delta)
        if end * CHUNK_TOKENS in boundaries:
            states[end * CHUNK_TOKENS] = state
    states[num_tokens] = state
    return out.transpose(1, 2).flatten(0, 1)[:num_tokens], states


def within_chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    """What chunks [n, tokens, width] of at most CHUNK_TOKENS tokens need that does not depend on the state S before:

    delta = update - absorbed @ S;  out = scores @ delta + q_in @ S;  S <- keep * S + k_to_end @ delta
    """
    decay = g.cumsum(1)  # [n, tokens, key], log-decay since the chunk's start
    total, from_start = decay[:, -1:], decay.exp()
    q_in, k_in, k_over = q * from_start, k * from_start, (k / from_start).transpose(1, 2)
    keep, k_to_end = total.exp().transpose(1, 2), (k * (total - decay).exp()).transpose(1, 2)
    system = torch.bmm(k_in, k_over).mul_(beta).tril_(-1)
    rhs = torch.empty(*v.shape[:2], v.shape[2] + k.shape[2], device=v.device)
    torch.mul(v, beta, out=rhs[..., : v.shape[2]])
    torch.mul(k_in, beta, out=rhs[..., v.shape[2] :])
    solved = torch.linalg.solve_triangular(system, rhs, upper=False, unitriangular=True)
    update, absorbed = solved.split([v.shape[2], k.shape[2]], dim=2)
    return update, absorbed, torch.bmm(q_in, k_over).tril_(), q_in, keep, k_to_end


def in_chunks(x: Tensor) -> Tensor:
    """x [num_tokens, heads, width] -> [chunks, heads, CHUNK_TOKENS, width], padded with zeros.

    Zeros for k, v, beta and g leave the final state alone.
    """
    num_tokens, heads, width = x.shape
    chunks = x.new_zeros(-(-num_tokens // CHUNK_TOKENS), heads, CHUNK_TOKENS, width)
    whole = num_tokens // CHUNK_TOKENS
    chunks[:whole] = x[: whole * CHUNK_TOKENS].unflatten(0, (whole, CHUNK_TOKENS)).transpose(1, 2)
    chunks[whole:, :, : num_tokens - whole * CHUNK_TOKENS] = x[whole * CHUNK_TOKENS :].transpose(0, 1)
    return chunks
