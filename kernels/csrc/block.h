// What kernel bodies need from the machine they are compiled for. One source, three compilations:
//
//   nvcc            a block is a CUDA thread block
//   g++             a block is one thread, and a thread works on wide tiles, so that its loops become vector code
//   g++ -DEMULATE   a block is one std::thread per CUDA thread and SYNC a barrier: races show under ThreadSanitizer
//
// A body is a template over its tile width and gets (t, threads, shared): its thread, how many there are, scratch
// memory of the block. It may use EACH, SYNC, block_reduce and the functions below, and nothing else of the machine.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#define DEVICE static __device__ __forceinline__
#define EACH(l, size) _Pragma("unroll") for (int l = 0; l < (size); ++l)
#define SYNC() __syncthreads()
typedef __nv_bfloat16 bf16;
#else
#define DEVICE static inline
// loops over EACH are independent from iteration to iteration: they are vectorised without a check
#define EACH(l, size) _Pragma("omp simd") for (int l = 0; l < (size); ++l)
struct bf16 {
  uint16_t bits;
};
#if defined(EMULATE)
#include <barrier>
// owned by emulate.cpp, one block at a time
extern std::barrier<>* emulated_barrier;
#define SYNC() emulated_barrier->arrive_and_wait()
#else
#define SYNC() ((void)0)
#endif
#endif

// One of the numbered barriers of block_reduce; the emulation can leave one out, to show that its race is seen.
#if defined(EMULATE)
extern int dropped_barrier;
#define BARRIER(number) \
  do {                  \
    if (dropped_barrier != (number)) SYNC(); \
  } while (0)
#else
#define BARRIER(number) SYNC()
#endif

#if defined(__CUDACC__)
DEVICE float widen(bf16 v) { return __bfloat162float(v); }
DEVICE void narrow(float v, bf16* to) { *to = __float2bfloat16_rn(v); }
#else
DEVICE float widen(bf16 v) {
  uint32_t bits = (uint32_t)v.bits << 16;
  float out;
  memcpy(&out, &bits, 4);
  return out;
}
// to nearest even; a NaN becomes the quiet one
DEVICE void narrow(float v, bf16* to) {
  uint32_t bits;
  memcpy(&bits, &v, 4);
  uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  to->bits = (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}
#endif
DEVICE float widen(float v) { return v; }
DEVICE void narrow(float v, float* to) { *to = v; }

// Whether a tile of W has all its elements. One of a single element has: its other way through is not even compiled.
template <int W>
DEVICE bool is_whole(int count) {
  return W == 1 || count == W;
}

// Both keep a NaN: every comparison with it is false.
DEVICE float at_most(float v, float bound) { return v > bound ? bound : v; }
DEVICE float at_least(float v, float bound) { return v < bound ? bound : v; }
// The larger, or the NaN if one of them is.
DEVICE float larger(float a, float b) { return (b > a || b != b) ? b : a; }

#if defined(__CUDACC__)
DEVICE float exp_exact(float x) { return expf(x); }
// relative error 2^-22 + |x| 2^-24: for sums of exp, where a large |x| adds next to nothing
DEVICE float exp_fast(float x) { return __expf(x); }
#else
// exp to 1 unit in the last place, without a branch or a table: x = n ln 2 + r, |r| <= ln 2 / 2, exp r by its
// series to r^7 (the rest is below 6e-9). 0 below -87.3 (no denormals), infinity above 88.7, NaN for NaN.
DEVICE float exp_exact(float x) {
  const float magic = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer
  float y = at_most(at_least(x, -88.f), 88.8f);
  float shifted = __builtin_fmaf(y, 1.44269504f, magic);
  float n = shifted - magic;
  float r = __builtin_fmaf(n, -0.693359375f, y);
  r = __builtin_fmaf(n, 2.12194440e-4f, r);
  float p = 1.f / 5040.f;
  p = __builtin_fmaf(p, r, 1.f / 720.f);
  p = __builtin_fmaf(p, r, 1.f / 120.f);
  p = __builtin_fmaf(p, r, 1.f / 24.f);
  p = __builtin_fmaf(p, r, 1.f / 6.f);
  p = __builtin_fmaf(p, r, 0.5f);
  p = __builtin_fmaf(p * r, r, r);
  int32_t bits;
  memcpy(&bits, &shifted, 4);
  // the exponent field of 2^n: 0 for n = -127, infinity for n = 128
  bits = (bits - 0x4b400000 + 127) << 23;
  float scale;
  memcpy(&scale, &bits, 4);
  return __builtin_fmaf(p, scale, scale);
}
DEVICE float exp_fast(float x) { return exp_exact(x); }
#endif

// exp(x) - 1 - x without cancellation near 0: a series there (x^10 / 10! is 2e-9 of it at 1/2)
DEVICE float exp_rest(float x, float exp_x) {
  float p = 1.f / 362880.f;
  p = p * x + 1.f / 40320.f;
  p = p * x + 1.f / 5040.f;
  p = p * x + 1.f / 720.f;
  p = p * x + 1.f / 120.f;
  p = p * x + 1.f / 24.f;
  p = p * x + 1.f / 6.f;
  p = p * x + 0.5f;
  return fabsf(x) < 0.5f ? p * x * x : exp_x - 1.f - x;
}

struct Add {
  DEVICE float join(float a, float b) { return a + b; }
};
struct Max {
  DEVICE float join(float a, float b) { return larger(a, b); }
};

// Fold `values[0 .. K - 1]` of all threads, a power of two of them, in a fixed order; every thread gets the results.
// shared: K * threads floats, free for the next use when this returns.
template <class Op, int K>
DEVICE void block_reduce(float* values, float* shared, int t, int threads) {
  if (threads == 1) return;
  EACH(k, K) shared[k * threads + t] = values[k];
  BARRIER(1);
  for (int half = threads / 2; half > 0; half /= 2) {
    if (t < half) EACH(k, K) {
      float* row = shared + k * threads;
      row[t] = Op::join(row[t], row[t + half]);
    }
    BARRIER(2);
  }
  EACH(k, K) values[k] = shared[k * threads];
  // nobody may write the scratch again before all have read it
  BARRIER(3);
}

// Fold a tile of W values of one thread, a power of two of them, in pairs: a fixed order, and few roundings.
template <class Op, int W>
struct TileFold {
  DEVICE float run(const float* tile) {
    float half[W / 2];
    EACH(l, W / 2) half[l] = Op::join(tile[l], tile[l + W / 2]);
    return TileFold<Op, W / 2>::run(half);
  }
};
template <class Op>
struct TileFold<Op, 1> {
  DEVICE float run(const float* tile) { return tile[0]; }
};
template <class Op, int W>
DEVICE float tile_reduce(const float* tile) {
  return TileFold<Op, W>::run(tile);
}
