// One AdamW step over flat arrays, each element read and written once. Formulas and names as in
// megatron_rl_kernels/adamw/update.py. Elements are independent: no thread waits for another.
#pragma once
#include "block.h"

struct AdamwInputs {
  float* master;
  float* exp_avg;
  float* exp_avg_sq;
  const void* grad;    // float32 or bf16
  void* weight;        // float32 or bf16, written; or null
  const float* scale;  // one element, multiplies the gradient; or null for 1
  int64_t size;
  float gain1, beta2, gain2, decay, step_size, root, eps;
};

// Elements first .. first + count - 1, at most W.
template <class Grad, class Weight, int W>
DEVICE void adamw_tile(const AdamwInputs& in, int64_t first, int count) {
  float m[W], v[W], p[W], g[W];
  const Grad* grad = (const Grad*)in.grad + first;
  float *master = in.master + first, *exp_avg = in.exp_avg + first, *exp_avg_sq = in.exp_avg_sq + first;
  if (count == W) {
    EACH(l, W) {
      g[l] = widen(grad[l]);
      m[l] = exp_avg[l];
      v[l] = exp_avg_sq[l];
      p[l] = master[l];
    }
  } else {
    EACH(l, W) g[l] = m[l] = v[l] = p[l] = 0.f;
    for (int l = 0; l < count; ++l) g[l] = widen(grad[l]), m[l] = exp_avg[l], v[l] = exp_avg_sq[l], p[l] = master[l];
  }
  const float scale = in.scale ? *in.scale : 1.f;
  // numbers of their own: what is written below might otherwise change them
  const float gain1 = in.gain1, beta2 = in.beta2, gain2 = in.gain2;
  const float decay = in.decay, step_size = in.step_size, root = in.root, eps = in.eps;
  EACH(l, W) {
    float scaled = g[l] * scale;
    m[l] = m[l] + (scaled - m[l]) * gain1;
    v[l] = v[l] * beta2 + scaled * scaled * gain2;
    p[l] = p[l] * decay - step_size * (m[l] / (sqrtf(v[l]) * root + eps));
  }
  Weight* weight = in.weight ? (Weight*)in.weight + first : nullptr;
  if (count == W) {
    EACH(l, W) {
      exp_avg[l] = m[l];
      exp_avg_sq[l] = v[l];
      master[l] = p[l];
    }
    if (weight) EACH(l, W) narrow(p[l], &weight[l]);
  } else {
    for (int l = 0; l < count; ++l) {
      exp_avg[l] = m[l], exp_avg_sq[l] = v[l], master[l] = p[l];
      if (weight) narrow(p[l], &weight[l]);
    }
  }
}
