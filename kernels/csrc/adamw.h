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

template <class Grad>
DEVICE void adamw_element(
    const AdamwInputs& in, float scale, const Grad* grad, float* exp_avg, float* exp_avg_sq, float* master) {
  float g = widen(*grad) * scale;
  float m = *exp_avg + (g - *exp_avg) * in.gain1;
  float v = *exp_avg_sq * in.beta2 + g * g * in.gain2;
  *exp_avg = m;
  *exp_avg_sq = v;
  *master = *master * in.decay - in.step_size * (m / (sqrtf(v) * in.root + in.eps));
}

// Elements first .. first + count - 1, at most W.
template <class Grad, class Weight, int W>
DEVICE void adamw_tile(const AdamwInputs& given, int64_t first, int count) {
  // a copy: what is written below might otherwise change it
  const AdamwInputs in = given;
  const float scale = in.scale ? *in.scale : 1.f;
  const Grad* grad = (const Grad*)in.grad + first;
  float *master = in.master + first, *exp_avg = in.exp_avg + first, *exp_avg_sq = in.exp_avg_sq + first;
  Weight* weight = in.weight ? (Weight*)in.weight + first : nullptr;
  if (is_whole<W>(count)) {
    EACH(l, W) adamw_element(in, scale, grad + l, exp_avg + l, exp_avg_sq + l, master + l);
    if (weight) EACH(l, W) narrow(master[l], &weight[l]);
    return;
  }
  for (int l = 0; l < count; ++l) {
    adamw_element(in, scale, grad + l, exp_avg + l, exp_avg_sq + l, master + l);
    if (weight) narrow(master[l], &weight[l]);
  }
}
