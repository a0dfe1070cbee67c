// The bodies as CUDA kernels. C ABI without torch: pointers and the stream come from the caller, results are error codes.
#include <cuda_runtime.h>

#include "adamw.h"
#include "policy_loss.h"
#include "row_logprob.h"

constexpr int ADAMW_THREADS = 256, POLICY_THREADS = 256, ROW_THREADS = 512, ROW_TILE = 8;

__global__ void __launch_bounds__(POLICY_THREADS) policy_kernel(
    PolicyInputs in, PolicyConfig config, int64_t per_block, float* grad, float* grad_entropy, float* parts) {
  __shared__ float shared[NUM_SUMS * POLICY_THREADS];
  policy_block<1>(
      in, config, per_block, grad, grad_entropy, parts, blockIdx.x, threadIdx.x, POLICY_THREADS, shared);
}

template <class T>
__global__ void __launch_bounds__(ROW_THREADS) statistics_kernel(RowInputs in, float* stats) {
  __shared__ float shared[2 * ROW_THREADS];
  row_statistics<T, ROW_TILE>(in, stats, blockIdx.x, threadIdx.x, ROW_THREADS, shared);
}

template <class T>
__global__ void __launch_bounds__(ROW_THREADS) gradient_kernel(RowInputs in, RowGradients g, void* out) {
  row_gradient<T, ROW_TILE>(in, g, out, blockIdx.x, threadIdx.x, ROW_THREADS);
}

template <class Grad, class Weight>
__global__ void __launch_bounds__(ADAMW_THREADS) adamw_kernel(AdamwInputs in) {
  int64_t first = (int64_t)blockIdx.x * ADAMW_THREADS + threadIdx.x;
  if (first < in.size) adamw_tile<Grad, Weight, 1>(in, first, 1);
}

extern "C" const char* mrl_sum_names() { return SUM_NAMES; }

extern "C" const char* mrl_error_text(int code) { return cudaGetErrorString((cudaError_t)code); }

extern "C" int mrl_policy_loss(
    const PolicyInputs* in, const PolicyConfig* config, int64_t per_block, float* grad, float* grad_entropy, float* parts,
    void* stream) {
  int64_t blocks = (in->size + per_block - 1) / per_block;
  if (blocks)
    policy_kernel<<<(unsigned)blocks, POLICY_THREADS, 0, (cudaStream_t)stream>>>(
        *in, *config, per_block, grad, grad_entropy, parts);
  return (int)cudaGetLastError();
}

extern "C" int mrl_row_statistics(const RowInputs* in, int is_bf16, float* stats, void* stream) {
  if (in->rows) {
    if (is_bf16) statistics_kernel<bf16><<<(unsigned)in->rows, ROW_THREADS, 0, (cudaStream_t)stream>>>(*in, stats);
    else statistics_kernel<float><<<(unsigned)in->rows, ROW_THREADS, 0, (cudaStream_t)stream>>>(*in, stats);
  }
  return (int)cudaGetLastError();
}

extern "C" int mrl_row_gradient(const RowInputs* in, const RowGradients* g, int is_bf16, void* out, void* stream) {
  if (in->rows) {
    if (is_bf16) gradient_kernel<bf16><<<(unsigned)in->rows, ROW_THREADS, 0, (cudaStream_t)stream>>>(*in, *g, out);
    else gradient_kernel<float><<<(unsigned)in->rows, ROW_THREADS, 0, (cudaStream_t)stream>>>(*in, *g, out);
  }
  return (int)cudaGetLastError();
}

template <class Grad, class Weight>
static void launch_adamw(const AdamwInputs& in, cudaStream_t stream) {
  int64_t blocks = (in.size + ADAMW_THREADS - 1) / ADAMW_THREADS;
  if (blocks) adamw_kernel<Grad, Weight><<<(unsigned)blocks, ADAMW_THREADS, 0, stream>>>(in);
}

extern "C" int mrl_adamw(const AdamwInputs* in, int grad_is_bf16, int weight_is_bf16, void* stream) {
  cudaStream_t on = (cudaStream_t)stream;
  if (grad_is_bf16) weight_is_bf16 ? launch_adamw<bf16, bf16>(*in, on) : launch_adamw<bf16, float>(*in, on);
  else weight_is_bf16 ? launch_adamw<float, bf16>(*in, on) : launch_adamw<float, float>(*in, on);
  return (int)cudaGetLastError();
}
