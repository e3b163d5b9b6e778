"""Device functions of `verify_chain`'s kernels: clean logits, seeded noise, races.

Drawing from weights w is a race: each i finishes after E_i / w_i with E_i exponential, and i is the first with probability w_i
/ Σ w. It runs in two heats: over the masses of VOCAB_CHUNK-wide pieces of the vocabulary, then within the winning piece. So
noise is drawn for some 8,000 tokens rather than for a vocabulary. Noise is E = −log(1 − u) with u of 32 bits, whose small
values (they win) keep their resolution in float32. A cumulative sum would round every boundary to 2⁻²⁴ of the whole.

Philox4x32-10: key = the request's seed, counter = (index, position's low and high word, purpose). So a draw depends only on
seed, position and index, never on the batch.

Clean logits: divided by the temperature, NaN → −inf, +inf → the largest finite number (several share the mass evenly).
The twins are in reference.py. Source: exponential races: Gumbel's trick, arXiv 1611.00712, section 2, by another monotone map;
Philox: Salmon et al., SC 2011.
"""

from __future__ import annotations

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

VOCAB_CHUNK = 8192
"""Tokens a program reads. A seed's draws depend on it, since the first heat is over pieces of this width."""
MAX_VOCAB = 1 << 24
"""Token ids pass through float32, which is exact below this."""
GREEDY_BELOW = 1e-5
"""Temperatures under this take the most likely token, as in vLLM."""
LARGEST = 3.0e38
PURPOSE_ACCEPT, PURPOSE_CHUNK, PURPOSE_TOKEN = 0, 1, 2

if triton is not None:
    C_GREEDY_BELOW = tl.constexpr(GREEDY_BELOW)
    C_LARGEST = tl.constexpr(LARGEST)
    C_ACCEPT = tl.constexpr(PURPOSE_ACCEPT)
    C_CHUNK = tl.constexpr(PURPOSE_CHUNK)
    C_TOKEN = tl.constexpr(PURPOSE_TOKEN)

    @triton.jit  # type: ignore[untyped-decorator]
    def uniform(seed: tl.tensor, position: tl.tensor, index: tl.tensor, purpose: tl.constexpr) -> tl.tensor:
        """Numbers in (0, 1), one Philox word each."""
        c_0 = index.to(tl.uint32)
        none = c_0 * 0
        low = (position & 0xFFFFFFFF).to(tl.uint32)
        high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
        word, _, _, _ = tl.philox(seed, c_0, none + low, none + high, none + purpose)
        return tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)

    @triton.jit  # type: ignore[untyped-decorator]
    def exponential(b_u: tl.tensor) -> tl.tensor:
        """−log(1 − u), by the series if 1 − u would round u away."""
        series = 1.0 + b_u * (0.5 + b_u * (0.33333334 + b_u * (0.25 + b_u * (0.2 + b_u * 0.16666667))))
        return tl.where(b_u < 0.0625, b_u * series, -tl.log(1.0 - b_u))

    @triton.jit  # type: ignore[untyped-decorator]
    def clean_logits(p_row: tl.tensor, o_v: tl.tensor, m_v: tl.tensor, inverse_temperature: tl.tensor) -> tl.tensor:
        b_x = tl.load(p_row + o_v, mask=m_v, other=float("-inf")).to(tl.float32) * inverse_temperature
        return tl.minimum(tl.where(b_x != b_x, float("-inf"), b_x), C_LARGEST)

    @triton.jit  # type: ignore[untyped-decorator]
    def peak_and_mass(b_x: tl.tensor) -> tl.tensor:
        """Maximum and Σ exp(x − maximum); (−inf, 0) for an empty piece."""
        peak = tl.max(b_x, axis=0)
        base = tl.where(peak > float("-inf"), peak, 0.0)
        return peak, tl.sum(tl.exp(b_x - base), axis=0)

    @triton.jit  # type: ignore[untyped-decorator]
    def total_of(b_peak: tl.tensor, b_mass: tl.tensor) -> tl.tensor:
        """Base and total of pieces' (peak, mass): Σ exp(x) = exp(base) · total."""
        peak = tl.max(b_peak, axis=0)
        base = tl.where(peak > float("-inf"), peak, 0.0)
        return base, tl.sum(b_mass * tl.exp(b_peak - base), axis=0)

    @triton.jit  # type: ignore[untyped-decorator]
    def race_keys(
        b_weight: tl.tensor, seed: tl.tensor, position: tl.tensor, o_i: tl.tensor, purpose: tl.constexpr
    ) -> tl.tensor:
        """Race keys: the greatest wins; a weight of 0 never wins against others."""
        return tl.where(b_weight > 0.0, b_weight / exponential(uniform(seed, position, o_i, purpose)), -1.0)

    @triton.jit  # type: ignore[untyped-decorator]
    def race_of_chunks(
        b_peak: tl.tensor, b_weight: tl.tensor, seed: tl.tensor, position: tl.tensor, o_c: tl.tensor
    ) -> tl.tensor:
        """Return the winning chunk and its peak."""
        winner = tl.argmax(race_keys(b_weight, seed, position, o_c, C_CHUNK), axis=0)
        return winner, tl.max(tl.where(o_c == winner, b_peak, float("-inf")), axis=0)

    @triton.jit  # type: ignore[untyped-decorator]
    def race_within(
        p_row: tl.tensor,
        first: tl.tensor,
        vocab: tl.tensor,
        hidden: tl.tensor,
        inverse_temperature: tl.tensor,
        peak: tl.tensor,
        seed: tl.tensor,
        position: tl.tensor,
        CHUNK: tl.constexpr,
        STEP: tl.constexpr,
    ) -> tl.tensor:
        """Draw a token by the clean logits of the chunk from `first` on, whose maximum is `peak`; never `hidden` (−1: none).

        Works in steps, so that a kernel that streams logits needn't keep registers for a whole chunk's noise.
        """
        base = tl.where(peak > float("-inf"), peak, 0.0)
        winner, best = first, first * 0.0 - 1.0
        for start in range(0, CHUNK, STEP):
            o_v = first + start + tl.arange(0, STEP)
            b_x = clean_logits(p_row, o_v, o_v < vocab, inverse_temperature)
            b_weight = tl.where(o_v == hidden, 0.0, tl.exp(b_x - base))
            b_key = race_keys(b_weight, seed, position, o_v, C_TOKEN)
            key = tl.max(b_key, axis=0)
            winner = tl.where(key > best, first + start + tl.argmax(b_key, axis=0), winner)
            best = tl.maximum(best, key)
        return winner
