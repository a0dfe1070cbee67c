// The bodies as the GPU runs them, without a GPU: one std::thread per CUDA thread, SYNC a barrier of all of them. Built
// with -fsanitize=thread a missing barrier is reported as a data race; the argument 1, 2 or 3 leaves one out. It knows
// nothing of warps: the bodies use no shuffles.
//
// Compares with the same bodies on one thread; exit code 1 and a line for each result that differs too much.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#define EMULATE
#include "policy_loss.h"
#include "row_logprob.h"

std::barrier<>* emulated_barrier;
int dropped_barrier = 0;

constexpr int THREADS = 16;
static int failures = 0;

// Run `body(t, shared)` on THREADS threads, as one block.
template <class Body>
static void run_block(size_t shared_floats, Body body) {
  std::barrier<> barrier(THREADS);
  emulated_barrier = &barrier;
  std::vector<float> shared(shared_floats, NAN);
  std::vector<std::thread> threads;
  for (int t = 0; t < THREADS; ++t) threads.emplace_back([&, t] { body(t, shared.data()); });
  for (auto& thread : threads) thread.join();
}

static void expect_close(const char* what, const std::vector<float>& got, const std::vector<float>& want) {
  for (size_t i = 0; i < got.size(); ++i) {
    bool close = fabsf(got[i] - want[i]) <= 1e-5f * (1.f + fabsf(want[i])) || got[i] == want[i];
    if (!close && failures++ < 10) std::printf("%s[%zu]: %g with threads, %g alone\n", what, i, got[i], want[i]);
  }
}

static std::vector<float> normal(size_t size, unsigned seed) {
  std::mt19937 draw(seed);
  std::normal_distribution<float> of;
  std::vector<float> out(size);
  for (float& value : out) value = of(draw);
  return out;
}

static void check_policy_loss() {
  const int64_t size = 333, per_block = 128, blocks = 3;
  auto logprob = normal(size, 1), old = normal(size, 2), advantage = normal(size, 3), weight = normal(size, 4);
  auto reference = normal(size, 5), entropy = normal(size, 6);
  std::vector<uint8_t> mask(size, 1);
  for (int64_t i = 0; i < size; i += 3) mask[i] = 0, logprob[i] = NAN;
  PolicyInputs in = {logprob.data(), old.data(), advantage.data(), weight.data(), entropy.data(), reference.data(),
                     nullptr, nullptr, nullptr, mask.data(), size};
  PolicyConfig config = {CLIP, K3, 0, 0.8f, 1.28f, 0.8f, 0.f, 1.28f, 0.f, 3.f, 1.f, 1.05f, 0.1f, 0.01f};
  std::vector<float> grad(size, NAN), pull(size, NAN), parts(blocks * NUM_SUMS, NAN);
  auto want_grad = grad, want_pull = pull, want_parts = parts;
  for (int64_t block = 0; block < blocks; ++block) {
    run_block(NUM_SUMS * THREADS, [&](int t, float* shared) {
      policy_block<1>(in, config, per_block, grad.data(), pull.data(), parts.data(), block, t, THREADS, shared);
    });
    policy_block<64>(
        in, config, per_block, want_grad.data(), want_pull.data(), want_parts.data(), block, 0, 1, nullptr);
  }
  expect_close("policy grad", grad, want_grad);
  expect_close("policy grad_entropy", pull, want_pull);
  expect_close("policy sums", parts, want_parts);
}

static void check_rows() {
  const int64_t rows = 3, columns = 1003, width = 1010;
  auto logits = normal(rows * width, 7);
  // whole threads of the first row see nothing but -inf
  for (int i = 0; i < 400; ++i) logits[i] = -INFINITY;
  std::vector<int64_t> target = {700, 0, 1002};
  RowInputs in = {logits.data(), target.data(), nullptr, rows, width, columns, width, 0, 0.7f};
  std::vector<float> stats(NUM_ROW_STATISTICS * rows, NAN), out(rows * width, NAN);
  auto want_stats = stats, want_out = out;
  auto grad = normal(rows, 8), pull = normal(rows, 9), entropy = normal(rows, 10);
  for (int64_t row = 0; row < rows; ++row) {
    run_block(2 * THREADS, [&](int t, float* shared) {
      row_statistics<float, 8>(in, stats.data(), row, t, THREADS, shared);
    });
    row_statistics<float, 256>(in, want_stats.data(), row, 0, 1, nullptr);
  }
  expect_close("row statistics", stats, want_stats);
  std::vector<float> log_sum(rows);
  for (int64_t row = 0; row < rows; ++row) log_sum[row] = logf(want_stats[SUM_EXP * rows + row]);
  RowGradients g = {want_stats.data(), log_sum.data(), entropy.data(), grad.data(), pull.data(), width};
  for (int64_t row = 0; row < rows; ++row) row_gradient<float, 256>(in, g, want_out.data(), row, 0, 1);
  // over the logits themselves, last: they are gone then
  for (int64_t row = 0; row < rows; ++row)
    run_block(1, [&](int t, float*) { row_gradient<float, 8>(in, g, logits.data(), row, t, THREADS); });
  expect_close("row gradient", logits, want_out);
}

int main(int argc, char** argv) {
  if (argc > 1) dropped_barrier = std::atoi(argv[1]);
  check_policy_loss();
  check_rows();
  if (failures) return 1;
  std::printf("the same with %d threads as alone\n", THREADS);
}
