// Row statistics of logits for log-prob and entropy, and the gradient of the logits, which may be written over them.
// The derivation is in megatron_rl_kernels/logprob_from_logits/README.md.
#pragma once
#include "block.h"

// Columns vocab_start .. vocab_start + num_columns of the vocabulary; columns from num_columns to width are padding.
struct RowInputs {
  const void* logits;         // [rows, width], `stride` elements from row to row; float32 or bf16
  const int64_t* target;      // [rows] global ids
  const float* temperatures;  // [rows], or null: `temperature` for all
  int64_t rows, width, num_columns, stride, vocab_start;
  float temperature;
};

// [rows] each: what forward kept, and the upstream gradients; entropy and grad_entropy null together
struct RowGradients {
  const float* top;
  const float* log_sum;
  const float* entropy;
  const float* grad_logprob;
  const float* grad_entropy;
  int64_t out_stride;
};

enum RowStatistic { TOP, SUM_EXP, MOMENT, TARGET_LOGIT, OWNED, NUM_ROW_STATISTICS };

// stands for the log-probability of an impossible token: far below any other, and 0 times it is 0
constexpr float LOWEST = -1e30f;

#if defined(__CUDACC__)
// a tile is 8 elements a thread: 16 bytes of bf16, read and written in one instruction where they are aligned
struct alignas(16) Tile8 {
  bf16 v[8];
};
DEVICE void load_tile(const bf16* from, float* to) {
  if (((uintptr_t)from & 15) == 0) {
    Tile8 words = *(const Tile8*)from;
    EACH(l, 8) to[l] = widen(words.v[l]);
  } else {
    EACH(l, 8) to[l] = widen(from[l]);
  }
}
DEVICE void store_tile(const float* from, bf16* to) {
  if (((uintptr_t)to & 15) == 0) {
    Tile8 words;
    EACH(l, 8) narrow(from[l], &words.v[l]);
    *(Tile8*)to = words;
  } else {
    EACH(l, 8) narrow(from[l], &to[l]);
  }
}
DEVICE void load_tile(const float* from, float* to) {
  if (((uintptr_t)from & 15) == 0) {
    float4 a = ((const float4*)from)[0], b = ((const float4*)from)[1];
    to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w, to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
  } else {
    EACH(l, 8) to[l] = from[l];
  }
}
DEVICE void store_tile(const float* from, float* to) {
  if (((uintptr_t)to & 15) == 0) {
    ((float4*)to)[0] = make_float4(from[0], from[1], from[2], from[3]);
    ((float4*)to)[1] = make_float4(from[4], from[5], from[6], from[7]);
  } else {
    EACH(l, 8) to[l] = from[l];
  }
}
#endif

// W logits from `from` on, those at or beyond `left` as -inf
template <class T, int W>
DEVICE void take_logits(const T* from, int64_t left, float* to) {
  if (left >= W) {
#if defined(__CUDACC__)
    load_tile(from, to);
#else
    EACH(l, W) to[l] = widen(from[l]);
#endif
    return;
  }
  EACH(l, W) to[l] = -INFINITY;
  for (int l = 0; l < W; ++l)
    if (l < left) to[l] = widen(from[l]);
}

template <class T, int W>
DEVICE void put_logits(const float* from, int64_t left, T* to) {
  if (left >= W) {
#if defined(__CUDACC__)
    store_tile(from, to);
#else
    EACH(l, W) narrow(from[l], &to[l]);
#endif
    return;
  }
  for (int l = 0; l < W; ++l)
    if (l < left) narrow(from[l], &to[l]);
}

// what to subtract: the maximum, and 0 where it is -inf, for -inf minus -inf is not a number
DEVICE float base_of(float top) { return top == -INFINITY ? 0.f : top; }

// A running maximum with the sums of exp and of exp times logit, both relative to it and after the temperature.
struct Running {
  float top, sum, moment;
};

// Move the sums of `r` to the maximum `top`, which is at least its own.
DEVICE void move_to(Running& r, float top, float inverse) {
  if (r.top == -INFINITY) {
    r.sum = r.moment = 0.f;
  } else {
    float shift = (r.top - top) * inverse, scale = exp_fast(shift);
    r.moment = scale * (r.moment + shift * r.sum);
    r.sum *= scale;
  }
  r.top = top;
}

template <int W>
DEVICE void fold_tile(const float* tile, float inverse, Running& r) {
  float high = tile_reduce<Max, W>(tile);
  if (high > r.top) move_to(r, high, inverse);
  const float base = base_of(r.top);
  float sums[W], moments[W];
  EACH(l, W) {
    float x = (tile[l] - base) * inverse;
    sums[l] = exp_fast(x);
    moments[l] = sums[l] * at_least(x, LOWEST);
  }
  r.sum += tile_reduce<Add, W>(sums);
  r.moment += tile_reduce<Add, W>(moments);
}

// stats[5][rows]: maximum, and relative to it the sums of exp, of exp times logit, the target's logit, ownership.
// shared: 2 * threads floats.
template <class T, int W>
DEVICE void row_statistics(const RowInputs& in, float* stats, int64_t row, int t, int threads, float* shared) {
  const T* logits = (const T*)in.logits + row * in.stride;
  const float inverse = 1.f / (in.temperatures ? in.temperatures[row] : in.temperature);
  Running r = {-INFINITY, 0.f, 0.f};
  for (int64_t first = (int64_t)t * W; first < in.num_columns; first += (int64_t)threads * W) {
    float tile[W];
    take_logits<T, W>(logits + first, in.num_columns - first, tile);
    fold_tile<W>(tile, inverse, r);
  }
  float top[1] = {r.top};
  block_reduce<Max, 1>(top, shared, t, threads);
  move_to(r, top[0], inverse);
  float sums[2] = {r.sum, r.moment};
  block_reduce<Add, 2>(sums, shared, t, threads);
  if (t != 0) return;
  int64_t column = in.target[row] - in.vocab_start;
  bool owned = column >= 0 && column < in.num_columns;
  stats[TOP * in.rows + row] = top[0];
  stats[SUM_EXP * in.rows + row] = sums[0];
  stats[MOMENT * in.rows + row] = sums[1];
  stats[TARGET_LOGIT * in.rows + row] = owned ? (widen(logits[column]) - base_of(top[0])) * inverse : 0.f;
  stats[OWNED * in.rows + row] = owned ? 1.f : 0.f;
}

// dz = (g (onehot - p) - h p (log p + entropy)) / temperature, into `out` [rows, width], which may be the logits: a
// thread reads its tile before it writes it, and nobody else touches it. Padding gets 0, and so does a row without
// upstream gradient or without a possible token, whatever its logits are.
template <class T, int W>
DEVICE void row_gradient(const RowInputs& in, const RowGradients& g, void* out, int64_t row, int t, int threads) {
  const T* logits = (const T*)in.logits + row * in.stride;
  T* to = (T*)out + row * g.out_stride;
  const float inverse = 1.f / (in.temperatures ? in.temperatures[row] : in.temperature);
  const float grad = g.grad_logprob[row], pull = g.grad_entropy ? g.grad_entropy[row] : 0.f;
  const float entropy = g.grad_entropy ? g.entropy[row] : 0.f;
  const float base = base_of(g.top[row]), log_sum = g.log_sum[row];
  const bool idle = (grad == 0.f && pull == 0.f) || g.top[row] == -INFINITY;
  const int64_t target = in.target[row] - in.vocab_start;
  for (int64_t first = (int64_t)t * W; first < in.width; first += (int64_t)threads * W) {
    float tile[W];
    if (idle) {
      EACH(l, W) tile[l] = 0.f;
    } else {
      // padding is read as -inf: probability 0, gradient 0
      take_logits<T, W>(logits + first, in.num_columns - first, tile);
      EACH(l, W) {
        float logprob = (tile[l] - base) * inverse - log_sum;
        tile[l] = -exp_fast(logprob) * inverse * (grad + pull * (at_least(logprob, LOWEST) + entropy));
      }
      // the target's column, if it is in this tile and not in the padding
      const int64_t at = target < in.num_columns ? target - first : -1;
      if (at >= 0 && at < W) EACH(l, W) tile[l] += l == at ? grad * inverse : 0.f;
    }
    put_logits<T, W>(tile, in.width - first, to + first);
  }
}
