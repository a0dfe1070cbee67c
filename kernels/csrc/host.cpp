// The bodies for the CPU: one thread per block, wide tiles. C ABI; `stream` is there to have one signature.
#include "adamw.h"
#include "policy_loss.h"
#include "row_logprob.h"

constexpr int ADAMW_TILE = 512, POLICY_TILE = 256, ROW_TILE = 2048;

extern "C" const char* mrl_sum_names() { return SUM_NAMES; }

extern "C" int mrl_policy_loss(
    const PolicyInputs* in, const PolicyConfig* config, int64_t per_block, float* grad, float* grad_entropy, float* parts,
    void* stream) {
  (void)stream;
  for (int64_t block = 0; block * per_block < in->size; ++block)
    policy_block<POLICY_TILE>(*in, *config, per_block, grad, grad_entropy, parts, block, 0, 1, nullptr);
  return 0;
}

extern "C" int mrl_row_statistics(const RowInputs* in, int is_bf16, float* stats, void* stream) {
  (void)stream;
  for (int64_t row = 0; row < in->rows; ++row) {
    if (is_bf16) row_statistics<bf16, ROW_TILE>(*in, stats, row, 0, 1, nullptr);
    else row_statistics<float, ROW_TILE>(*in, stats, row, 0, 1, nullptr);
  }
  return 0;
}

extern "C" int mrl_row_gradient(const RowInputs* in, const RowGradients* g, int is_bf16, void* out, void* stream) {
  (void)stream;
  for (int64_t row = 0; row < in->rows; ++row) {
    if (is_bf16) row_gradient<bf16, ROW_TILE>(*in, *g, out, row, 0, 1);
    else row_gradient<float, ROW_TILE>(*in, *g, out, row, 0, 1);
  }
  return 0;
}

template <class Grad, class Weight>
static void adamw(const AdamwInputs& in) {
  for (int64_t first = 0; first < in.size; first += ADAMW_TILE) {
    int64_t left = in.size - first;
    adamw_tile<Grad, Weight, ADAMW_TILE>(in, first, left < ADAMW_TILE ? (int)left : ADAMW_TILE);
  }
}

extern "C" int mrl_adamw(const AdamwInputs* in, int grad_is_bf16, int weight_is_bf16, void* stream) {
  (void)stream;
  if (grad_is_bf16) weight_is_bf16 ? adamw<bf16, bf16>(*in) : adamw<bf16, float>(*in);
  else weight_is_bf16 ? adamw<float, bf16>(*in) : adamw<float, float>(*in);
  return 0;
}

// exp, for a test of its accuracy
extern "C" void mrl_exp(const float* from, int64_t size, float* to) {
  for (int64_t i = 0; i < size; ++i) to[i] = exp_exact(from[i]);
}
