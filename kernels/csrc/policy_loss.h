// Policy loss per token: value, gradient by the log-prob and all metrics in one pass. The formulas, in the same order,
// are those of megatron_rl_kernels/policy_loss (README.md there derives them).
#pragma once
#include "block.h"

enum Surrogate { REINFORCE, WEIGHTED, TOPR, CISPO, CLIP, SAPO, GMPO };  // gspo is CLIP of the sequence's ratio
enum Kl { KL_NONE, K1, K2, K3, K3_STRAIGHT_THROUGH, K3_UNBIASED };
// The loss, then the metrics in the order of policy_loss.METRICS; SUM_NAMES lets the caller check that.
enum Sum {
  LOSS, TOKENS, CLIPPED_HIGH, CLIPPED_LOW, KL_K1, KL_K3, RATIO, RATIO_MAX, GRAD_ABS, KL_REF, ENTROPY, NLL, NLL_TOKENS,
  NUM_SUMS
};
#define SUM_NAMES \
  "loss tokens clipped_high clipped_low kl_k1 kl_k3 ratio ratio_max grad_abs kl_ref entropy nll nll_tokens"

// [size] each, float32; null where the caller has none. Where mask is 0 the others may hold anything.
struct PolicyInputs {
  const float* logprob;
  const float* old_logprob;
  const float* advantage;
  const float* token_weight;
  const float* entropy;
  const float* ref_logprob;
  const float* correction;
  const float* nll_weight;
  const float* sequence_log_ratio;
  const uint8_t* mask;
  int64_t size;
};

// lower, upper: bounds of the ratio (of the log-ratio for GMPO); *_value, *_slope: what a clipped token's f and gradient
// weight are. dual_clip: 0 for none.
struct PolicyConfig {
  int32_t surrogate, kl, cispo_mask;
  float lower, upper, low_value, low_slope, high_value, high_slope, dual_clip;
  float tau_positive, tau_negative, kl_coefficient, entropy_coefficient;
};

constexpr float MAX_LOG_RATIO = 20.f;

// One tile of W tokens. `on` is 1 where the token exists and is trained on, else 0.
template <int W>
struct PolicyTile {
  int on[W];
  float logprob[W], advantage[W], log_ratio[W], own_ratio[W], ratio[W], value[W], slope[W], high[W], low[W];
};

// from[first .. first + count - 1] where `on`, else 0: select before any arithmetic, for 0 * NaN is NaN
template <int W>
DEVICE void take(const float* from, int64_t first, int count, const int* on, float* to) {
  if (is_whole<W>(count)) {
    EACH(l, W) {
      float v = from[first + l];
      to[l] = on[l] ? v : 0.f;
    }
    return;
  }
  EACH(l, W) to[l] = 0.f;
  for (int l = 0; l < count; ++l) to[l] = on[l] ? from[first + l] : 0.f;
}

template <int W>
DEVICE void put(const float* from, int count, float* to) {
  if (is_whole<W>(count)) EACH(l, W) to[l] = from[l];
  else for (int l = 0; l < count; ++l) to[l] = from[l];
}

// a - b, at most MAX_LOG_RATIO in size; a NaN stays
template <int W>
DEVICE void bounded_gap(const float* a, const float* b, float* to) {
  EACH(l, W) to[l] = at_least(at_most(a[l] - b[l], MAX_LOG_RATIO), -MAX_LOG_RATIO);
}

// f and gradient weight of the surrogates whose f is a constant weight times the log-prob.
template <int W>
DEVICE void log_linear(const PolicyConfig& c, PolicyTile<W>& p) {
  if (c.surrogate == REINFORCE) {
    EACH(l, W) p.slope[l] = 1.f;
  } else if (c.surrogate == WEIGHTED) {
    EACH(l, W) p.slope[l] = p.ratio[l];
  } else if (c.surrogate == TOPR) {
    EACH(l, W) {
      float negative = p.advantage[l] < 0.f ? 1.f : 0.f;
      p.high[l] = p.ratio[l] > 1.f ? negative : 0.f;
      p.slope[l] = negative > 0.f ? at_most(p.ratio[l], 1.f) : 1.f;
    }
  } else {
    // with the mask a token is clipped where PPO's is, without it wherever it is out of bounds
    const float either = c.cispo_mask ? 0.f : 1.f;
    EACH(l, W) {
      float positive = p.advantage[l] > 0.f ? 1.f : 0.f, negative = p.advantage[l] < 0.f ? 1.f : 0.f;
      p.high[l] = p.ratio[l] > c.upper ? at_most(positive + either * negative, 1.f) : 0.f;
      p.low[l] = p.ratio[l] < c.lower ? at_most(negative + either * positive, 1.f) : 0.f;
      float weight = at_most(at_least(p.ratio[l], c.lower), c.upper);
      p.slope[l] = p.high[l] + p.low[l] > either ? 0.f : weight;
    }
  }
  EACH(l, W) p.value[l] = p.slope[l] * p.logprob[l];
}

// f and gradient weight of the surrogates that are functions of the ratio.
template <int W>
DEVICE void of_ratio(const PolicyConfig& c, PolicyTile<W>& p) {
  if (c.surrogate == SAPO) {
    const float tau_positive = c.tau_positive, tau_negative = c.tau_negative;
    EACH(l, W) {
      float tau = p.advantage[l] > 0.f ? tau_positive : tau_negative;
      // bounded so that both halves stay finite
      float x = at_least(at_most(tau * (1.f - p.ratio[l]), 80.f), -80.f);
      float e = exp_exact(x), gate = 1.f / (1.f + e);
      p.value[l] = 4.f / tau * gate;
      p.slope[l] = 4.f * gate * (e * gate) * p.ratio[l];
    }
    return;
  }
  if (c.surrogate == GMPO) {
    EACH(l, W) {
      p.high[l] = (p.advantage[l] > 0.f) & (p.log_ratio[l] > c.upper) ? 1.f : 0.f;
      p.low[l] = (p.advantage[l] < 0.f) & (p.log_ratio[l] < c.lower) ? 1.f : 0.f;
      p.value[l] = p.ratio[l];
      p.slope[l] = p.high[l] + p.low[l] > 0.f ? 0.f : p.ratio[l];
    }
    return;
  }
  const float cap = c.dual_clip > 0.f ? c.dual_clip : INFINITY;
  EACH(l, W) {
    // & and not &&: no branch, so that this stays vector code
    p.high[l] = (p.advantage[l] > 0.f) & (p.ratio[l] > c.upper) ? 1.f : 0.f;
    p.low[l] = (p.advantage[l] < 0.f) & (p.ratio[l] < c.lower) ? 1.f : 0.f;
  }
  // numbers of their own: a load under a condition is a branch
  const float high_value = c.high_value, high_slope = c.high_slope, low_value = c.low_value, low_slope = c.low_slope;
  EACH(l, W) {
    float high = p.high[l], low = p.low[l], r = p.ratio[l];
    float value = high > 0.f ? high_value : r, slope = high > 0.f ? high_slope : r;
    p.value[l] = low > 0.f ? low_value : value;
    p.slope[l] = low > 0.f ? low_slope : slope;
  }
  EACH(l, W) {
    float capped = (p.advantage[l] < 0.f) & (p.ratio[l] > cap) ? 1.f : 0.f, value = p.value[l], slope = p.slope[l];
    p.value[l] = capped > 0.f ? cap : value;
    p.slope[l] = capped > 0.f ? 0.f : slope;
    p.high[l] += capped;
  }
}

// Value and slope (by the log-prob) of the KL estimator at `gap` = ref_logprob - logprob; KL_NONE: k3, as a metric.
template <int W>
DEVICE void kl_terms(const PolicyConfig& c, const float* gap, const float* own_ratio, float* value, float* slope) {
  if (c.kl == K1) {
    EACH(l, W) value[l] = -gap[l];
    EACH(l, W) slope[l] = 1.f;
    return;
  }
  if (c.kl == K2) {
    EACH(l, W) value[l] = 0.5f * gap[l] * gap[l];
    EACH(l, W) slope[l] = -gap[l];
    return;
  }
  EACH(l, W) value[l] = exp_rest(gap[l], exp_exact(gap[l]));
  if (c.kl == K3) {
    // exp(gap) - 1 = k3 + gap
    EACH(l, W) slope[l] = -(value[l] + gap[l]);
  } else if (c.kl == K3_UNBIASED) {
    EACH(l, W) value[l] *= own_ratio[l];
    EACH(l, W) slope[l] = -own_ratio[l] * gap[l];
  } else {
    EACH(l, W) slope[l] = -gap[l];
  }
}

// One tile: writes grad[first ..] (and grad_entropy if not null), folds its sums into `sums`.
template <int W>
DEVICE void policy_tile(
    const PolicyInputs& in, const PolicyConfig& c, int64_t first, int count, float* grad, float* grad_entropy,
    float* sums) {
  PolicyTile<W> p;
  float row[W], other[W], weight[W], loss[W], g[W];
  if (is_whole<W>(count)) {
    EACH(l, W) p.on[l] = in.mask[first + l] != 0;
  } else {
    EACH(l, W) p.on[l] = 0;
    for (int l = 0; l < count; ++l) p.on[l] = in.mask[first + l] != 0;
  }
  take<W>(in.logprob, first, count, p.on, p.logprob);
  take<W>(in.old_logprob, first, count, p.on, row);
  take<W>(in.advantage, first, count, p.on, p.advantage);
  take<W>(in.token_weight, first, count, p.on, weight);
  bounded_gap<W>(p.logprob, row, p.log_ratio);
  EACH(l, W) p.own_ratio[l] = exp_exact(p.log_ratio[l]);
  EACH(l, W) p.ratio[l] = p.own_ratio[l];
  if (in.sequence_log_ratio) {
    take<W>(in.sequence_log_ratio, first, count, p.on, row);
    EACH(l, W) p.ratio[l] = exp_exact(at_least(at_most(row[l], MAX_LOG_RATIO), -MAX_LOG_RATIO));
  }
  EACH(l, W) p.high[l] = p.low[l] = 0.f;
  if (c.surrogate == CLIP || c.surrogate == SAPO || c.surrogate == GMPO) of_ratio<W>(c, p);
  else log_linear<W>(c, p);

  EACH(l, W) row[l] = -p.advantage[l] * weight[l];
  if (in.correction) {
    take<W>(in.correction, first, count, p.on, other);
    EACH(l, W) row[l] *= other[l];
  }
  EACH(l, W) loss[l] = row[l] * p.value[l];
  EACH(l, W) g[l] = row[l] * p.slope[l];

  EACH(l, W) row[l] = (float)p.on[l];
  sums[TOKENS] += tile_reduce<Add, W>(row);
  sums[CLIPPED_HIGH] += tile_reduce<Add, W>(p.high);
  sums[CLIPPED_LOW] += tile_reduce<Add, W>(p.low);
  sums[KL_K1] -= tile_reduce<Add, W>(p.log_ratio);
  EACH(l, W) row[l] = exp_rest(p.log_ratio[l], p.own_ratio[l]);
  sums[KL_K3] += tile_reduce<Add, W>(row);
  EACH(l, W) row[l] = p.on[l] ? p.ratio[l] : 0.f;
  sums[RATIO] += tile_reduce<Add, W>(row);
  sums[RATIO_MAX] = larger(sums[RATIO_MAX], tile_reduce<Max, W>(row));

  if (in.ref_logprob) {
    float gap[W];
    take<W>(in.ref_logprob, first, count, p.on, row);
    bounded_gap<W>(row, p.logprob, gap);
    kl_terms<W>(c, gap, p.own_ratio, row, other);
    sums[KL_REF] += tile_reduce<Add, W>(row);
    if (c.kl != KL_NONE) {
      EACH(l, W) loss[l] += weight[l] * row[l] * c.kl_coefficient;
      EACH(l, W) g[l] += weight[l] * other[l] * c.kl_coefficient;
    }
  }
  if (in.entropy) {
    take<W>(in.entropy, first, count, p.on, row);
    sums[ENTROPY] += tile_reduce<Add, W>(row);
    if (c.entropy_coefficient != 0.f) EACH(l, W) loss[l] -= weight[l] * row[l] * c.entropy_coefficient;
  }
  if (in.nll_weight) {
    take<W>(in.nll_weight, first, count, p.on, other);
    EACH(l, W) row[l] = other[l] != 0.f ? -p.logprob[l] : 0.f;
    sums[NLL] += tile_reduce<Add, W>(row);
    EACH(l, W) loss[l] += other[l] * row[l];
    EACH(l, W) g[l] -= other[l];
    EACH(l, W) row[l] = other[l] != 0.f ? 1.f : 0.f;
    sums[NLL_TOKENS] += tile_reduce<Add, W>(row);
  }
  // not -0 for a masked token
  EACH(l, W) g[l] = p.on[l] ? g[l] : 0.f;
  sums[LOSS] += tile_reduce<Add, W>(loss);
  EACH(l, W) row[l] = fabsf(g[l]);
  sums[GRAD_ABS] += tile_reduce<Add, W>(row);
  put<W>(g, count, grad + first);
  if (grad_entropy) {
    EACH(l, W) row[l] = p.on[l] ? -c.entropy_coefficient * weight[l] : 0.f;
    put<W>(row, count, grad_entropy + first);
  }
}

// Tokens [block * per_block, + per_block) of one block; parts[block][NUM_SUMS] are its sums.
// shared: NUM_SUMS * threads floats.
template <int W>
DEVICE void policy_block(
    const PolicyInputs& in, const PolicyConfig& c, int64_t per_block, float* grad, float* grad_entropy, float* parts,
    int64_t block, int t, int threads, float* shared) {
  float sums[NUM_SUMS];
  EACH(k, NUM_SUMS) sums[k] = 0.f;
  int64_t end = (block + 1) * per_block;
  if (end > in.size) end = in.size;
  for (int64_t first = block * per_block + (int64_t)t * W; first < end; first += (int64_t)threads * W) {
    int64_t left = end - first;
    policy_tile<W>(in, c, first, left < W ? (int)left : W, grad, grad_entropy, sums);
  }
  float top[1] = {sums[RATIO_MAX]};
  block_reduce<Max, 1>(top, shared, t, threads);
  block_reduce<Add, NUM_SUMS>(sums, shared, t, threads);
  if (t == 0) {
    sums[RATIO_MAX] = top[0];
    EACH(k, NUM_SUMS) parts[block * NUM_SUMS + k] = sums[k];
  }
}
